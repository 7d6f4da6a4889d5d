"""Which variant of a kernel to use: small rules on shapes and the adapter's limits.

docs/decisions.md has the measurements behind them. Nothing here changes a result beyond rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TypeVar

from infer.kernels.errors import ShaderError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.tensor import BLOCK, CODED, HALF, INTEGERS, LOOKED_UP, PLANES


@dataclass(frozen=True)
class VecShape:
    """What matmul_vec is asked for: columns and outputs, rows of activations, the weights' dtype,
    whether outputs are pairs of rows (gated), and go out as int8 (quantize)."""

    k: int
    n: int
    rows: int
    dtype: str
    gated: bool
    quantize: bool


@dataclass(frozen=True)
class VecVariant:
    """matmul_vec: invocations of a workgroup and of each of its teams, outputs of a team, loads in
    flight per row of weights, copies of the table of codes that are looked up, and whether there
    are workgroups for each row of activations, instead of each taking all of them."""

    workgroup: int
    team: int
    outputs: int
    unroll: int
    copies: int = 1
    row_each: bool = False

    @property
    def per_workgroup(self) -> int:
        """Outputs of a workgroup."""
        return self.workgroup // self.team * self.outputs


@dataclass(frozen=True)
class TileVariant:
    """matmul: rows and outputs per invocation, double buffer, invocations of a workgroup along the
    rows and along the outputs, workgroups that share the columns."""

    m_tile: int
    n_tile: int
    double: bool
    m_size: int = 16
    n_size: int = 16
    splits: int = 1

    @property
    def rows(self) -> int:
        """Of a workgroup."""
        return self.m_size * self.m_tile

    @property
    def columns(self) -> int:
        """Outputs of a row in a workgroup."""
        return self.n_size * self.n_tile

    @property
    def storage(self) -> int:
        """Bytes of workgroup memory."""
        return (1 + self.double) * (self.rows + self.columns) * 5 * 16

    @property
    def params(self) -> dict[str, int | bool]:
        """The kernel's."""
        return {
            "M_SIZE": self.m_size,
            "N_SIZE": self.n_size,
            "M_TILE": self.m_tile,
            "N_TILE": self.n_tile,
            "DOUBLE": self.double,
            "SPLITS": self.splits,
        }


@dataclass(frozen=True)
class Int8TileVariant(TileVariant):
    """The same of matmul_int8, for weights of any grouping, and int8 numbers that make each of
    their integers."""

    planes: int = 1

    @property
    def storage(self) -> int:
        rows = 3 * 16 + 4 + 8  # integers of a block, their scale, and offsets or a table
        columns = (1 + 2 * self.planes) * 16 + 2 * 8  # two scales, each with an offset
        return (1 + self.double) * (self.rows * rows + self.columns * columns)


@dataclass(frozen=True)
class HeadVariant:
    """head_linear: rows and outputs of a workgroup, invocations that share an output."""

    rows: int
    team: int
    outputs: int

    @property
    def workgroup(self) -> int:
        """Invocations."""
        return self.team * self.outputs

    def storage(self, k: int) -> int:
        """Bytes of workgroup memory, a table of codes and another sum's values among them."""
        sums = (self.team + 1) * self.outputs
        own = self.rows * (-(-k // 8) * 8 + sums) + self.outputs
        return 4 * (own + self.workgroup) + 1024


@dataclass(frozen=True)
class AttentionVariant:
    """attention of a few rows: invocations and query heads of a workgroup, lanes per position and
    groups of eight dimensions per lane, positions that a lane loads at once, and how the context is
    split.

    workgroup, cluster and batch are powers of two, a cluster is at most a subgroup and that at most
    a workgroup, heads divides the query heads of a KV head, and cluster * per_lane * 8 is head_dim.
    """

    workgroup: int
    heads: int
    cluster: int
    per_lane: int
    batch: int
    splits: int
    min_split: int
    max_split: int

    def count(self, positions: int) -> int:
        """The most splits that attention_split.wgsl makes of that many positions or fewer: the
        rows of a step have unlike contexts, and a longer one may have fewer splits (of 32 that
        have at least 16 each, 512 positions take all and 513 one less)."""
        if positions <= self.splits * self.max_split:
            return min(self.splits, -(-positions // self.min_split))
        return -(-positions // self.max_split)

    def storage(self, merged: int, lanes: int) -> int:
        """Bytes of workgroup memory, in which so many heads of each subgroup are merged at once."""
        subgroups = max(1, self.workgroup // lanes)
        return subgroups * (8 * self.heads + 32 * merged * self.cluster * self.per_lane)

    def merged(self, storage: int, lanes: int) -> int:
        """The most heads that fit into that memory; 0: not even one."""
        fitting = (n for n in range(self.heads, 0, -1) if self.storage(n, lanes) <= storage)
        return next((n for n in fitting if self.heads % n == 0), 0)


@dataclass(frozen=True)
class TiledVariant:
    """attention_tiled: invocations of a workgroup along the rows and along the positions, rows and
    positions per invocation, dimensions of a slice of queries and keys, double buffer."""

    m_size: int
    n_size: int
    m_tile: int
    n_tile: int
    depth: int
    double: bool

    @property
    def rows(self) -> int:
        """Of a workgroup."""
        return self.m_size * self.m_tile

    @property
    def columns(self) -> int:
        """Positions of a tile."""
        return self.n_size * self.n_tile

    def v_depth(self, head_dim: int) -> int:
        """Positions of a slice of values: as many as take no more room than queries and keys."""
        fitting = (self.rows + self.columns) * (self.depth + 4) // head_dim
        return max(4, min(32, self.columns, power_of_two(fitting + 1) // 2))

    def storage(self, head_dim: int) -> int:
        """Bytes of workgroup memory."""
        queries_keys = (self.rows + self.columns) * (self.depth + 4)
        slices = max(queries_keys, self.v_depth(head_dim) * head_dim)
        exchange = self.rows * (self.columns + 4 + self.n_size)
        return 4 * ((1 + self.double) * slices + exchange)


@dataclass(frozen=True)
class ScanVariant:
    """ssm_scan: rows whose inputs are in workgroup memory at once, and of the loop's body, columns
    of a matrix in a workgroup and in an invocation (tile: 2 or 4), invocations that share a
    column."""

    rows: int
    unroll: int
    columns: int
    split: int
    tile: int

    @property
    def invocations(self) -> int:
        """Of a workgroup."""
        return self.columns // self.tile * self.split

    @property
    def cluster(self) -> int:
        """Neighbouring invocations that must be in one subgroup; 0: none."""
        return 0

    def storage(self, key_dim: int) -> int:
        """Bytes of workgroup memory."""
        quantized = 2 * self.columns if self.rows == 1 else 0
        return 4 * (self.rows * (2 * key_dim + 4 + self.columns * (1 + self.split)) + quantized)

    def serves(self, key_dim: int) -> bool:
        """Whether a matrix with so many rows can be split like that."""
        return key_dim % (4 * self.split) == 0 and self.rows % self.unroll == 0

    @property
    def params(self) -> dict[str, int]:
        """The kernel's."""
        return {
            "ROWS": self.rows,
            "UNROLL": self.unroll,
            "COLUMNS": self.columns,
            "SPLIT": self.split,
            "TILE": self.tile,
        }


@dataclass(frozen=True)
class DeltaVariant(ScanVariant):
    """The same of delta_rule, invocations that load a row's query and key, and whether those that
    share a column (a power of two) are lanes of a subgroup."""

    loaders: int
    subgroups: bool

    @property
    def cluster(self) -> int:
        return self.split if self.subgroups else 0

    def storage(self, key_dim: int) -> int:
        sums = 0 if self.subgroups else 16 * self.columns * self.split
        return 4 * self.rows * (2 * key_dim + 4 + self.columns + 4 * self.loaders) + sums

    def serves(self, key_dim: int) -> bool:
        return super().serves(key_dim) and self.rows * self.loaders <= self.invocations

    @property
    def params(self) -> dict[str, int]:
        return super().params | {"LOADERS": self.loaders, "SUBGROUPS": self.subgroups}


_INVOCATIONS = 2048  # that a multiprocessor has at once
_SMALL = 1 << 25  # values of a matrix
_SMALL_SOFTWARE = 1 << 16  # the same for which compiling a large tile takes longer than it saves
_NARROW_SOFTWARE = 256  # the same of a row, for attention and experts
_FEW_GATED = 2048  # outputs: of half blocks there are more workgroups
_FEW_PLAIN = 8192  # the same of those that are no pairs
MOST_SPLITS = 8  # of a matrix' columns
_SPLIT_COLUMNS = 256  # at the least
_START = 64  # columns: what a workgroup waits for before its first product
_COMBINE = 6e5  # what a launch of matmul_combine costs, in products of a multiprocessor
_FEW = 256  # rows of a matrix, as of a router: each may have a workgroup of its own


Tile = TypeVar("Tile", bound=TileVariant)
Scan = TypeVar("Scan", bound=ScanVariant)


def power_of_two(value: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, value - 1).bit_length()


class Tuning:
    """The rules for one device. Tests and sweeps replace a method to force a variant."""

    def __init__(self, device: Device) -> None:
        self.limits, self.software = device.limits, device.software
        self.subgroup_size = device.subgroup_size
        self.largest_subgroup = device.largest_subgroup
        self.multiprocessors = device.multiprocessors
        # A power of two of invocations that fill the GPU.
        self.filling = power_of_two(self.multiprocessors * _INVOCATIONS + 1) // 2

    def _overflows(self, invocations: int) -> bool:
        """Whether they need a second round of workgroups, which is mostly empty."""
        return self.filling < invocations <= self.filling * 3 // 2

    def workgroup(self, width: int) -> int:
        """Invocations for a kernel that reduces `width` values."""
        return max(32, min(256, self.limits.max_invocations, power_of_two(-(-width // 4))))

    def matmul_vec(self, shape: VecShape) -> VecVariant:
        """Of a table 1,024 invocations have 16 copies: to fill them costs each so many stores."""
        variant = self._vec(shape)
        many = shape.dtype in LOOKED_UP and variant.workgroup == 1024
        return replace(variant, copies=16) if many else variant

    def _vec(self, shape: VecShape) -> VecVariant:
        """A CPU wants many rows for each subgroup, a GPU few, and in a large matrix many
        invocations for a row, so that what is read at one time lies close together in memory."""
        lanes = self.subgroup_size
        most = power_of_two(self.limits.max_invocations + 1) // 2  # some GPUs have 384
        if shape.dtype in LOOKED_UP and self.limits.workgroup_storage < 32768:
            most = min(most, 512)  # 1,024 have 16 copies of a table
        int8 = shape.dtype in INTEGERS
        columns = BLOCK if int8 else 128 // CODED.get(shape.dtype, 16)  # of a chunk
        chunks = -(-shape.k // columns)
        if not lanes:
            workgroup = max(32, min(128, most, power_of_two(chunks)))
            return VecVariant(workgroup, workgroup, 2, 1, row_each=self.software)
        if self.software:
            # Weights come out of a CPU's cache for every row; one kernel for all, which compiles
            # in a fifth of the time, leaves registers to more outputs.
            return VecVariant(BLOCK // 4 * lanes, lanes, 4, 1, row_each=True)
        least = max(32, self.largest_subgroup)  # a team is whole subgroups
        if shape.quantize:
            return self._to_int8(shape, chunks, most, least)
        rows_of_weights = shape.n * (1 + shape.gated)
        if shape.dtype in CODED and not int8:
            # Arithmetic bounds them: what is read of x serves many rows of W.
            workgroup = max(least, min(512, most))
            team = min(workgroup, max(least, 32 if rows_of_weights > 8192 else 128))
            return VecVariant(workgroup, team, max(1, 4 // shape.rows), 1)
        small = shape.gated and rows_of_weights * shape.k <= _SMALL
        if int8 or small or rows_of_weights <= _FEW:
            team, outputs = max(1, self.filling // rows_of_weights), 1
        else:
            team, outputs = chunks // 2, 1 if shape.gated else 2
        workgroup = min(256, most)
        team = min(workgroup, max(least, 1 << team.bit_length() >> 1))
        if self._overflows(rows_of_weights // outputs * team):
            team = max(least, team // 2)
        while team > max(least, chunks):
            team //= 2
        return VecVariant(workgroup, team, outputs, 1)

    def _to_int8(self, shape: VecShape, chunks: int, most: int, least: int) -> VecVariant:
        """Of outputs that go out as int8: a workgroup has a block of them, or half a block where
        there are few or a product takes many registers."""
        workgroup, outputs, block = 1024, 1 if shape.dtype in INTEGERS else 2, HALF
        if shape.gated and shape.dtype == "mxfp4":
            workgroup, outputs, block = 256, 4, BLOCK
        elif shape.gated and shape.dtype in ("q4", "q5"):
            workgroup = 512
        elif shape.gated and shape.n > _FEW_GATED:
            block = BLOCK
        elif not shape.gated and shape.n > _FEW_PLAIN:
            workgroup, outputs, block = 512, 2, BLOCK
        if self._overflows(shape.n // block * workgroup):
            workgroup, outputs = workgroup // 2, 2 * outputs
        workgroup = min(workgroup * least // 32, most)  # the sweeps had subgroups of 32
        team = max(least, workgroup * outputs // block)
        outputs = block * team // workgroup
        ahead = shape.gated and outputs == 1
        if shape.dtype in LOOKED_UP:
            ahead = ahead and chunks >= 2 * team
        else:
            ahead = ahead and shape.dtype == "q4" and chunks == 2 * team  # all of a row at once
        return VecVariant(workgroup, team, outputs, 2 if ahead else 1)

    def matmul(self, rows: int, n: int, k: int, splits: bool, heads: int = 1) -> TileVariant:
        """128x128, 128x96, 64x128 or 64x64: the tiles that take a large GPU the least time, for so
        many products at once; with splits, columns may be shared where there are too few."""
        tiles = {(8, 8): 1.0, (8, 6): 0.97, (4, 8): 0.87, (4, 4): 0.62}
        choice = {TileVariant(*tile, double=True): speed for tile, speed in tiles.items()}
        if self.software:
            tile = (4, 4) if n * k <= _SMALL_SOFTWARE else (8, 8)
            choice = {TileVariant(*tile, True, 8, 8): 1.0}
        return self._fastest(choice, heads * rows, n, k, splits, least_rounds=1.0)

    def matmul_int8(self, rows: int, n: int, k: int, splits: bool, dtype: str) -> Int8TileVariant:
        """64x128, 64x64 or 32x64, the same way: workgroups of 128 invocations, so that more of them
        share a multiprocessor, which one alone does not keep busy. 128x128 too for two planes."""
        planes = PLANES.get(dtype, 1)
        tiles = {(8, 8, True, 8, 16): 1.9}
        if not self.software:
            tiles |= {(4, 8, True, 16, 8): 1.7, (4, 4, True, 8, 16): 1.4}
            if planes > 1:
                tiles[8, 8, True, 16, 16] = 2.1  # what is read of x serves twice as many products
        elif n * k <= _SMALL_SOFTWARE:
            tiles = {(2, 4, True, 8, 8): 1.4}
        choice = {Int8TileVariant(*tile, planes=planes): speed for tile, speed in tiles.items()}
        return self._fastest(choice, rows, n, k, splits, least_rounds=1.4)

    def expert_matmul(self, rows: int, width: int, dtype: str) -> TileVariant:
        """For experts that have so many rows each, of that width: 32x128, or 64x128 where most of
        it is used; on a CPU 16x32 if they are narrow."""
        tile = TileVariant(8 if rows > 32 else 4, 8, True, 8, 16)
        if self.software and width <= _NARROW_SOFTWARE:
            tile = TileVariant(2, 4, True, 8, 8)
        if dtype in INTEGERS:
            tile = Int8TileVariant(**asdict(tile), planes=PLANES.get(dtype, 1))
        fits = tile.storage <= self.limits.workgroup_storage
        return tile if fits else replace(tile, double=False)

    def _fastest(
        self, tiles: dict[Tile, float], rows: int, n: int, k: int, splits: bool, least_rounds: float
    ) -> Tile:
        """Of tiles and their speeds where there are many, which go in rounds of one for each
        multiprocessor."""

        def cost(tile: Tile) -> float:
            count = -(-rows // tile.rows) * -(-n // tile.columns) * tile.splits
            rounds = max(least_rounds, -(-count // self.multiprocessors))
            columns = k / tile.splits + _START
            time = rounds * tile.rows * tile.columns * columns / speeds[tile]
            return time + (_COMBINE + rows * n * (tile.splits + 1) / 4) * (tile.splits > 1)

        storage = self.limits.workgroup_storage
        most = min(MOST_SPLITS, k // _SPLIT_COLUMNS) if splits and not self.software else 1
        speeds = {
            replace(tile, double=double, splits=count): speed * (1.0 if double else 0.88)
            for double, count in product((True, False), (1, 2, 4, MOST_SPLITS))
            for tile, speed in tiles.items()
            if count <= max(1, most)
        }
        return min((tile for tile in speeds if tile.storage <= storage), key=cost)

    def head_linear(self, rows: int, k: int) -> HeadVariant:
        """As many rows as there are, up to 8, and as memory has room for."""
        for count in (8, 4, 2, 1):
            variant = HeadVariant(count, 16, HALF)
            fits = variant.storage(k) <= self.limits.workgroup_storage
            if count < 2 * rows and fits:
                return variant
        raise ShaderError(f"head_linear has no variant for {k} columns.")

    def attention(self, group: int, n_kv_heads: int, head_dim: int) -> AttentionVariant | None:
        """None without subgroups: then attention_scores, softmax and weighted_sum do it."""
        if not self.subgroup_size:
            return None
        chunks = head_dim // 8
        cluster = min(self.subgroup_size, chunks & -chunks)
        per_lane = chunks // cluster
        # A lane keeps heads * per_lane groups of queries and of outputs in registers.
        most = max(1, 8 // per_lane)
        fitting = [heads for heads in range(1, min(group, most) + 1) if group % heads == 0]
        if self.software:
            # Subgroups go through a barrier one after the other; large kernels compile for seconds.
            heads, workgroup, batch = max(heads for heads in fitting if heads <= 2), 32, 1
        else:
            # Up to four, so that there are more workgroups; but the 5 or 7 of some models are
            # shared.
            heads = max(heads for heads in fitting if heads <= 4 or fitting[1:] == [heads])
            workgroup, batch = 128 if chunks <= 8 else 256, 2 if per_lane <= 8 else 1
        # More splits than that cost more in attention_combine than they gain.
        splits = max(1, min(64, (8 if self.software else 128) // (n_kv_heads * group // heads)))
        workgroup = max(workgroup, self.subgroup_size)
        while True:
            at_once = batch * workgroup // cluster
            shortest = max(32, at_once) if self.software else at_once
            variant = AttentionVariant(
                workgroup, heads, cluster, per_lane, batch, splits, shortest, max(512, at_once)
            )
            if variant.merged(self.limits.workgroup_storage, self.subgroup_size):
                return variant
            workgroup //= 2

    def attention_joined(self, variant: AttentionVariant) -> AttentionVariant | None:
        """For a context so short that one workgroup for each head takes less time than splits and
        attention_combine. None where it has no room, or on a CPU, which gains nothing."""
        if self.software:
            return None
        workgroup, batch = max(256, variant.workgroup), 4 if variant.per_lane <= 8 else 1
        at_once = batch * workgroup // variant.cluster
        longest = min(1024, 6 * at_once)
        joined = AttentionVariant(
            workgroup, 1, variant.cluster, variant.per_lane, batch, 1, longest, longest
        )
        fits = joined.merged(self.limits.workgroup_storage, self.subgroup_size)
        return joined if fits else None

    def attention_tiled(self, head_dim: int, n_heads: int) -> TiledVariant:
        """32 rows by 64 positions, where memory and registers have room for that; on a CPU 32 by
        32, or 8 by 32 for few heads: short code, little that is masked."""
        tiles = [] if self.software else [(16, 4, 32), (16, 4, 16)]
        tiles += [(16, 2, 16)] if head_dim > 512 and not self.software else []
        narrow = self.software and n_heads * head_dim <= _NARROW_SOFTWARE
        tiles += [(8, rows, depth) for rows in (4, 2, 1)[2 * narrow :] for depth in (16, 8)]
        for n_size, m_tile, depth in tiles:
            variant = TiledVariant(8, n_size, m_tile, 4, depth, double=False)
            # An invocation keeps up to 72 outputs in registers.
            small = m_tile * -(-head_dim // (4 * n_size)) <= 18
            fits = variant.storage(head_dim) <= self.limits.workgroup_storage
            if small and fits and head_dim % depth == 0:
                return variant
        raise ShaderError(f"attention_tiled has no variant for heads of {head_dim} dimensions.")

    def ssm_scan(self, rows: int, key_dim: int) -> ScanVariant:
        """An invocation has 32 values of a matrix where it can be split so."""
        split = next(n for n in (16, 8, 4, 2, 1) if key_dim % (4 * n) == 0)
        variants = (ScanVariant(n, self._unroll(n), 32, split, 4) for n in (8, 4, 2, 1))
        return self._first(variants, rows, key_dim)

    def delta_rule(self, rows: int, key_dim: int) -> DeltaVariant:
        """The same, but with fewer invocations for a column, as all of them need its sums. Lanes of
        a subgroup have them sooner, but read a matrix in smaller pieces, which a single row waits
        for."""
        split = next(n for n in (8, 4, 2, 1) if key_dim % (4 * n) == 0)
        variants = (
            DeltaVariant(n, self._unroll(n), 32, split, 2, 8, subgroups)
            for subgroups in ((True, False) if rows > 1 else (False,))
            for n in (16, 8, 4, 2, 1)
        )
        return self._first(variants, rows, key_dim)

    def runs(self, variant: ScanVariant, key_dim: int) -> bool:
        """Whether a scan can be of that variant, for matrices with so many rows."""
        whole = self.largest_subgroup and variant.invocations % self.largest_subgroup == 0
        return bool(
            variant.serves(key_dim)
            and variant.invocations <= self.limits.max_invocations
            and variant.storage(key_dim) <= self.limits.workgroup_storage
            and (variant.cluster == 0 or (whole and variant.cluster <= self.subgroup_size))
        )

    def _unroll(self, rows: int) -> int:
        return 1 if self.software else min(4, rows)

    def _first(self, variants: Iterable[Scan], rows: int, key_dim: int) -> Scan:
        """The first that runs and has no more rows than there are."""
        return next(v for v in variants if v.rows <= rows and self.runs(v, key_dim))

    def lanes(self, head_dim: int) -> int:
        """weighted_sum: positions that a workgroup adds up at once."""
        return max(1, 256 // (head_dim // 8))
