"""Which variant of a kernel to use: small rules on shapes and the adapter's limits.

docs/decisions.md has the measurements behind them. Nothing here changes a result beyond rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

from infer.kernels.device import Device


@dataclass(frozen=True)
class VecVariant:
    """matmul_vec: invocations and outputs of a workgroup, loads in flight per row of weights."""

    workgroup: int
    outputs: int
    unroll: int


@dataclass(frozen=True)
class TileVariant:
    """matmul: outputs per invocation (a workgroup has 16 times that each way), double buffer."""

    m_tile: int
    n_tile: int
    double: bool

    @property
    def rows(self) -> int:
        return 16 * self.m_tile

    @property
    def columns(self) -> int:
        return 16 * self.n_tile

    @property
    def storage(self) -> int:
        """Bytes of workgroup memory."""
        return (1 + self.double) * (self.rows + self.columns) * 5 * 16


@dataclass(frozen=True)
class AttentionVariant:
    """attention of a few rows: invocations and query heads of a workgroup, lanes per position and
    groups of eight dimensions per lane, positions that a lane loads at once, and how the context is
    split."""

    workgroup: int
    heads: int
    cluster: int
    per_lane: int
    batch: int
    splits: int
    min_split: int
    max_split: int

    def count(self, positions: int) -> int:
        """Splits of that many positions: what attention_split.wgsl says on the GPU."""
        even = -(-positions // self.splits)
        return -(-positions // min(max(even, self.min_split), self.max_split))


_BUSY = 96  # workgroups of a tile below which a smaller tile keeps more of a GPU busy
_MANY_OUTPUTS = 65536  # a vocabulary: workgroups so many that starting them costs


def power_of_two(value: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, value - 1).bit_length()


class Tuning:
    """The rules for one device. Tests and sweeps replace a method to force a variant."""

    def __init__(self, device: Device) -> None:
        self.limits, self.software = device.limits, device.software
        self.subgroup_size = device.subgroup_size

    def workgroup(self, width: int) -> int:
        """Invocations for a kernel that reduces `width` values."""
        return max(32, min(256, self.limits.max_invocations, power_of_two(-(-width // 4))))

    def matmul_vec(self, k: int, n: int, rows: int, gated: bool) -> VecVariant:
        """Each invocation has one or two groups of eight columns in flight for two outputs."""
        groups = -(-k // 8)
        workgroup = 64 if groups <= 128 else 256 if k >= 4 * n else 128
        workgroup = max(32, min(workgroup, self.limits.max_invocations, power_of_two(groups)))
        outputs = 8 if n >= _MANY_OUTPUTS and rows == 1 else 1 if n < 1536 and not gated else 2
        unroll = 2 if groups >= 2 * workgroup and outputs < 8 and not gated else 1
        return VecVariant(workgroup, outputs, unroll if rows == 1 else 1)

    def matmul(self, rows: int, n: int) -> TileVariant:
        """The largest tile of which there are enough to keep a GPU busy."""
        for m_tile, n_tile in ((8, 8), (4, 8)):
            for double in (True, False):
                tile = TileVariant(m_tile, n_tile, double)
                tiles = -(-rows // tile.rows) * -(-n // tile.columns)
                if tiles >= _BUSY and tile.storage <= self.limits.workgroup_storage:
                    return tile
        small = TileVariant(4, 4, True)
        return small if small.storage <= self.limits.workgroup_storage else TileVariant(4, 4, False)

    def attention(self, group: int, n_kv_heads: int, head_dim: int) -> AttentionVariant | None:
        """None without subgroups: then attention_scores, softmax and weighted_sum do it."""
        if not self.subgroup_size:
            return None
        chunks = head_dim // 8
        cluster = min(self.subgroup_size, chunks & -chunks)
        per_lane = chunks // cluster
        # A lane keeps heads * per_lane groups of queries and of outputs in registers.
        most = max(1, 8 // per_lane)
        heads = next(heads for heads in range(min(group, most), 0, -1) if group % heads == 0)
        workgroup = 128
        while workgroup * per_lane * 32 + 2048 > self.limits.workgroup_storage:
            workgroup //= 2
        batch = 4 if cluster * per_lane >= 16 else 2
        at_once = batch * workgroup // cluster
        splits = max(1, (8 if self.software else 256) // (n_kv_heads * group // heads))
        return AttentionVariant(
            workgroup, heads, cluster, per_lane, batch, splits, at_once, max(256, at_once)
        )

    def lanes(self, head_dim: int) -> int:
        """weighted_sum: positions that a workgroup adds up at once."""
        return max(1, 256 // (head_dim // 8))
