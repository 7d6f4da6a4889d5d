"""Attention, in one of four forms.

A few rows: attention, which splits the context, and attention_combine. Many rows: attention_matrix,
where an adapter has matrices, or attention_tiled; but on a software adapter, which would end its
loops too early in a long context, attention as well.
Without fusing, or without subgroups: attention_scores, softmax, weighted_sum. With one row,
attention_decode takes the place of rotation, the cache write and attention.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from infer.kernels.errors import ShaderError
from infer.kernels.gpu.device import Buffer
from infer.kernels.gpu.native.library import NOTHING, MatrixShape, Size
from infer.kernels.gpu.tensor import BLOCK, HALF, GpuTensor
from infer.kernels.lowering.arena import Operand, Scratch
from infer.kernels.lowering.graph import Value, source
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import ContextGrid, Target, stride
from infer.kernels.lowering.tuning import NARROW_SOFTWARE, Tuning, loop_passes, power_of_two
from infer.kernels.ops.kv_write import Heads, KVWrite, kv_params
from infer.kernels.ops.matmul_matrix import matrix_params, matrix_shape
from infer.kernels.ops.prepared import Form, Maker, scale_params
from infer.kernels.state.kv_cache import PAGE, LayerCache, kv_cache_bytes
from infer.kernels.state.step import MAX_PROMPTS


@dataclass(eq=False, repr=False)
class Attention(Maker):
    """k and v appended to the cache, then softmax(scale * q k^T) v over what each row sees: all
    positions up to its own, or the last `window` of them. With a softcap, the scores go through
    `Softcap` before softmax. Without k and v nothing is appended: another attention has done so.
    sinks [heads]: logits that take part in softmax beside the scores, without a value (Xiao et al.
    2023). In a latent cache k and v, side by side, are one key, and values are the keys
    (DeepSeek-AI 2024).

    Rules add: written: what has written k and v; heads: q is the whole projection, of which this
    makes q, k and v; gates: whose sigmoids multiply the result. Chosen: variant, whose type says
    which kernels; None: one for each operation. joined: of decode, for contexts that are not split.
    """

    q: Value
    k: Value | None
    v: Value | None
    cache: LayerCache
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: GpuTensor | None = None
    quantizes_rows = True
    written: Value | None = field(default=None, kw_only=True)
    heads: Heads | None = field(default=None, kw_only=True)
    gates: Value | None = field(default=None, kw_only=True)
    variant: AttentionVariant | TiledVariant | AttentionMatrixVariant | None = field(init=False)
    joined: AttentionVariant | None = field(init=False)

    def checked_width(self) -> int:
        return self.q.width

    @property
    def n_heads(self) -> int:
        return self.width // self.cache.head_dim

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.width // (self.cache.n_kv_heads * self.cache.head_dim)

    def choose(self, target: Target) -> None:
        """Matrices or tiles for many rows; for a few, or where tiles would not come to the end of a
        context, splits of the context, if there are subgroups."""
        many, shape = not target.kind.few, self.cache.shape
        self.variant = self.joined = None
        if target.fuse and many:
            self.variant = target.tuning.choose(
                attention_matrix_variant, shape.head_dim, shape.latent, self.cache.dtype
            ) or self._tiles(target)
        if target.fuse and self.variant is None:
            self.variant = self._splits(target)
        if isinstance(self.variant, AttentionVariant):
            sizes = target.kind.rows, self.n_heads, self.group
            self.joined = target.tuning.choose(attention_joined_variant, self.variant, *sizes)

    def _tiles(self, target: Target) -> TiledVariant | None:
        """Returns the tile sizes of attention_tiled; None where its loops do not come to the end of
        the longest context."""
        head_dim = self.cache.head_dim
        variant = target.tuning.choose(attention_tiled_variant, head_dim, self.n_heads)
        # All rows of a tile attend to this much, from where a tile of positions begins.
        seen = self._seen(variant.rows + variant.columns)
        fits = seen <= variant.most_positions(head_dim, target.tuning.loop_passes)
        return variant if fits else None

    def _splits(self, target: Target) -> AttentionVariant | None:
        """Returns the variant of the kernels of decode; None without subgroups."""
        return target.tuning.choose(
            attention_variant if target.kind.few else attention_long_variant,
            self.group,
            self.cache.n_kv_heads,
            self.cache.head_dim,
            target.kind.rows,
        )

    def _seen(self, more: int = 0) -> int:
        """The most positions that a row attends to, or that many more if there is a window."""
        positions = self.cache.pages_per_sequence * PAGE
        return min(positions, self.window + more) if self.window else positions

    def between(self, target: Target) -> int:
        """Returns how many values for each row the kernels of this attention pass on to each other,
        for steps of many rows."""
        if target.fuse and (target.kind.few or self._tiles(target) is not None):
            return 0  # by matrices either, which no software adapter has
        variant = self._splits(target) if target.fuse else None
        if variant is None:  # the scores of all heads
            return self.n_heads * self.cache.pages_per_sequence * PAGE
        _, stored = variant.stored(self.cache.pages_per_sequence * PAGE)
        return self.n_heads * stored * (self.cache.head_dim + 2)

    def has_room(self, heads: Heads, target: Target) -> bool:
        """Whether attention_decode can do the work of rope_kv_write. It can if rows do not wait for
        each other's keys, both dimensions of a rotated pair lie in one group of eight, scales of
        int8 are written as the pairs that they are read as, and there are enough bindings."""
        rope, cache, variant = heads.rope, self.cache, self.variant
        if not isinstance(variant, AttentionVariant):
            return False
        rotated = rope.rotary_dim if rope else 0
        apart = rotated if rope and rope.interleaved else rotated // 2
        pairs = cache.dtype != "q8" or variant.cluster % 8 == 0
        return (
            target.kind.single
            and apart % 8 == 0
            and cache.head_dim % 8 == 0
            and (pairs or not heads.own)
            and target.device.limits.storage_buffers >= 6 + len(heads.operands)
        )

    def writes(self, form: Form, target: Target) -> bool:
        bound = 2 + sum(item is not None for item in (self.sinks, self.gates))
        only = form.norm is None and not form.keep
        split = isinstance(self.variant, AttentionVariant)
        return split and only and form.fits(self, target, bound)

    def lower(self, low: Lowering) -> None:
        if self.k is not None and self.v is not None:
            KVWrite(self.k, self.v, self.cache).lower(low)
        common = {
            **kv_params(self.cache),
            "WINDOW": self.window,
            "FIRST": self.cache.first,
            "GROUP": self.group,
            "SCALE": float(self.scale),
            "SOFTCAP": float(self.softcap),
        }
        match self.variant:
            case TiledVariant():
                self._tiled(low, self.variant, common)
            case AttentionMatrixVariant():
                self._matrix(low, self.variant, common)
            case AttentionVariant():
                self._split(low, self.variant, common)
            case None:
                self._chain(low, common)

    @property
    def _sinks(self) -> list[Buffer]:
        """The sinks' buffer, if there are any."""
        return [] if self.sinks is None else [self.sinks.buffer]

    def _chain(self, low: Lowering, common: dict[str, Any]) -> None:
        """attention_scores, softmax, weighted_sum."""
        cache, n_heads = self.cache, self.n_heads
        q, q_stride, q_offset = source(self.q)
        scores_stride = cache.pages_per_sequence * PAGE
        lanes = max(1, 256 // (cache.head_dim // 8))  # positions that weighted_sum adds at once
        if loop_passes(-(-self._seen() // lanes)) > low.tuning.loop_passes // 2:
            raise ShaderError(
                f"A context of {scores_stride} positions is more than this software adapter can "
                "attend to without subgroups. Ask for a smaller `context`, or take another "
                "`device`."
            )
        scores = Scratch(4 * low.kind.rows * n_heads * scores_stride)
        probabilities = Scratch(scores.nbytes)
        heads = low.row_grid(self, n_heads)
        low.emit(
            "attention_scores",
            (low.step, cache.pages, q, cache.keys, scores),
            _ScoresGrid(n_heads),
            common | {"Q_STRIDE": q_stride, "Q_OFFSET": q_offset, "SCORES_STRIDE": scores_stride},
        )
        low.emit(
            "softmax",
            (low.step, scores, probabilities, *self._sinks),
            heads,
            {
                "WG": low.tuning.workgroup(1024),
                "SUBGROUPS": low.device.subgroups,
                "WINDOW": common["WINDOW"],
                "FIRST": common["FIRST"],
                "STRIDE": scores_stride,
                "SINKS": self.sinks is not None,
            },
        )
        weighted = {name: common[name] for name in (*kv_params(cache), "WINDOW", "FIRST", "GROUP")}
        low.emit(
            "weighted_sum",
            (low.step, cache.pages, probabilities, cache.values, self),
            heads,
            weighted
            | {
                "SCORES_STRIDE": scores_stride,
                "Y_STRIDE": stride(self.width),
                "LANES": lanes,
            },
        )

    def _split(self, low: Lowering, variant: AttentionVariant, common: dict[str, Any]) -> None:
        """attention or, with heads, attention_decode, and attention_combine; a short context is
        joined in the first itself."""
        cache, heads, n_heads, window = self.cache, self.heads, self.n_heads, self.window
        x, x_stride, x_offset = source(self.q)
        last: list[Operand] = [*self._sinks]
        gated = _UNGATED
        if self.gates is not None:
            gates, gate_stride, gate_offset = source(self.gates)
            gated = {"GATED": True, "GATE_STRIDE": gate_stride, "GATE_OFFSET": gate_offset}
            last.append(gates)
        outputs = [self] if self.prepares is None else self.prepares.operands
        inputs: list[Operand] = [low.step, cache.pages, x, cache.keys, cache.values]
        kernel, own = "attention", list[Operand]()
        if heads is not None:
            kernel, own = "attention_decode", heads.operands
        params = (
            common
            | (heads.params if heads is not None else {"LATENT": cache.shape.latent})
            | {"X_STRIDE": x_stride, "X_OFFSET": x_offset, "Y_STRIDE": stride(self.width)}
        )
        # What the kernel does besides that writes the result.
        end = gated | scale_params(self.prepares)
        end |= {"QUANTIZE": self.prepares is not None, "SINKS": self.sinks is not None}

        def emit(
            of: AttentionVariant,
            bound: Sequence[Operand],
            positions: tuple[int, int],
            stored: int,
            end: dict[str, Any],
        ) -> None:
            low.emit(
                kernel,
                bound,
                _SplitGrid(of, n_heads // of.heads, window, *positions),
                params | _split_params(cache, of, window, stored) | _variant_params(low, of) | end,
                moved=lambda rows, kv_len: rows * _read_bytes(cache, kv_len, window),
                variant=variant,
            )

        operands, longest = [*inputs, *outputs, *last, *own], 0
        joined = self.joined if self._may_join(low, len(operands)) else None
        if joined is not None:
            longest = joined.max_split  # context that one split has room for
            emit(joined, operands, (0, longest), 2, end | {"JOINED": True})
        if self._seen() <= longest:
            return
        at_once, stored = variant.stored(cache.pages_per_sequence * PAGE)
        partial = Scratch(4 * low.kind.rows * n_heads * stored * (cache.head_dim + 2))
        no_end = {"JOINED": False, "QUANTIZE": False, "SINKS": False, **scale_params(None)}
        positions = longest + 1, sys.maxsize
        emit(variant, [*inputs, partial, *own], positions, stored, no_end | _UNGATED)
        low.emit(
            "attention_combine",
            (low.step, partial, *outputs, *last),
            _SplitGrid(-(-self.width // (4 * _COMBINE_WORKGROUP)), 1, window, longest + 1),
            _split_params(cache, variant, window, stored)
            | end
            | {
                "WG": _COMBINE_WORKGROUP,
                "N_HEADS": n_heads,
                "AT_ONCE": at_once,
                "Y_STRIDE": stride(self.width),
            },
        )

    def _may_join(self, low: Lowering, bound: int) -> bool:
        """Whether the first kernel may write the result itself: it must be able to bind so many
        buffers, and no two heads may share a scale of int8."""
        halves = scale_params(self.prepares)["X_SCALES"] == "halves"
        aligned = self.prepares is None or self.cache.head_dim % (HALF if halves else BLOCK) == 0
        return bound <= low.device.limits.storage_buffers and aligned

    def _tiled(self, low: Lowering, variant: TiledVariant, common: dict[str, Any]) -> None:
        cache, n_heads = self.cache, self.n_heads
        q, q_stride, q_offset = source(self.q)
        prompts = low.kind.prompts
        low.emit(
            "attention_tiled",
            (low.step, cache.pages, q, cache.keys, cache.values, self, *self._sinks),
            lambda rows, kv_len: (n_heads, -(-rows // variant.rows) + prompts - 1, 1),
            common
            | {
                "Q_STRIDE": q_stride,
                "Q_OFFSET": q_offset,
                "Y_STRIDE": stride(self.width),
                "M_SIZE": variant.m_size,
                "N_SIZE": variant.n_size,
                "M_TILE": variant.m_tile,
                "N_TILE": variant.n_tile,
                "DEPTH": variant.depth,
                "V_DEPTH": variant.v_depth(cache.head_dim),
                "DOUBLE": variant.double,
                "SINKS": self.sinks is not None,
                "PROMPTS": prompts,
                "SOFTWARE": low.device.software,
            },
            flops=lambda rows, kv_len: 2 * rows * self.width * (2 * kv_len - rows),
        )

    def _matrix(
        self, low: Lowering, variant: AttentionMatrixVariant, common: dict[str, Any]
    ) -> None:
        cache, n_heads = self.cache, self.n_heads
        q, q_stride, q_offset = source(self.q)
        prompts, latent = low.kind.prompts, cache.shape.latent
        values = [] if latent else [cache.values]
        low.emit(
            "attention_matrix",
            (low.step, cache.pages, q, cache.keys, *values, self, *self._sinks),
            lambda rows, kv_len: (n_heads, -(-rows // variant.rows) + prompts - 1, 1),
            common
            | variant.params
            | {
                "LATENT": latent,
                "Q_STRIDE": q_stride,
                "Q_OFFSET": q_offset,
                "Y_STRIDE": stride(self.width),
                "SINKS": self.sinks is not None,
                "PROMPTS": prompts,
            },
            flops=lambda rows, kv_len: 2 * rows * self.width * (2 * kv_len - rows),
        )


@dataclass(frozen=True)
class _SplitGrid(ContextGrid):
    """(x, y, rows), or the splits of a variant for x, where a row attends to at least so many
    positions and at most so many; nothing elsewhere. Equal for equal layers."""

    x: int | AttentionVariant
    y: int
    window: int
    least: int
    most: int = sys.maxsize

    def __call__(self, rows: int, kv_len: int) -> Size:
        positions = min(kv_len, self.window) if self.window else kv_len
        if not self.least <= positions <= self.most:
            return NOTHING
        x = self.x if isinstance(self.x, int) else self.x.count(positions)
        return (x, self.y, rows)


@dataclass(frozen=True)
class _ScoresGrid(ContextGrid):
    """A workgroup for 64 positions, each head and each row."""

    heads: int

    def __call__(self, rows: int, kv_len: int) -> Size:
        return (-(-kv_len // 64), self.heads, rows)


_UNGATED = {"GATED": False, "GATE_STRIDE": 0, "GATE_OFFSET": 0}
_COMBINED_AT_ONCE = 8  # splits: four registers each
_COMBINE_WORKGROUP = 32  # small: a row is only so many vec4s, and every multiprocessor can help


def _split_params(
    cache: LayerCache, variant: AttentionVariant, window: int, stored: int
) -> dict[str, Any]:
    """Returns the parameters of attention_split.wgsl and attention_range.wgsl. stored: for how many
    splits there is room."""
    return {
        "HEAD_DIM": cache.head_dim,
        "WINDOW": window,
        "FIRST": cache.first,
        "SPLITS": variant.splits,
        "MIN_SPLIT": variant.min_split,
        "MAX_SPLIT": variant.max_split,
        "STORED_SPLITS": stored,
    }


def _variant_params(low: Lowering, variant: AttentionVariant) -> dict[str, Any]:
    """The variant, of attention_lanes.wgsl."""
    lanes, storage = low.tuning.subgroup_size, low.device.limits.workgroup_storage
    merged = variant.merged(storage, lanes)
    if not merged:
        raise ShaderError(
            f"{variant} needs {variant.storage(1, lanes)} bytes of workgroup memory; "
            f"{storage} are allowed. Take fewer invocations."
        )
    return {
        "WG": variant.workgroup,
        "HEADS": variant.heads,
        "CLUSTER": variant.cluster,
        "PER_LANE": variant.per_lane,
        "BATCH": variant.batch,
        "SUBGROUPS": max(1, variant.workgroup // lanes),
        "MERGED": merged,
    }


def _read_bytes(cache: LayerCache, kv_len: int, window: int) -> int:
    """Bytes of keys and values that a row reads."""
    positions = min(kv_len, window) if window else kv_len
    page = kv_cache_bytes(cache.shape, PAGE, cache.dtype)
    return positions * page // PAGE


# Variants of attention


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

    def stored(self, positions: int) -> tuple[int, int]:
        """Returns how many splits attention_combine reads at once, and the most that there is room
        for."""
        count = self.count(positions)
        at_once = min(_COMBINED_AT_ONCE, power_of_two(max(2, count)))
        return at_once, -(-count // at_once) * at_once

    def storage(self, merged: int, lanes: int) -> int:
        """Bytes of workgroup memory, in which so many heads of each subgroup are merged at once."""
        subgroups = max(1, self.workgroup // lanes)
        return subgroups * (8 * self.heads + 32 * merged * self.cluster * self.per_lane)

    def merged(self, storage: int, lanes: int) -> int:
        """The most heads that fit into that memory; 0: not even one."""
        fitting = (n for n in range(self.heads, 0, -1) if self.storage(n, lanes) <= storage)
        return next((n for n in fitting if self.heads % n == 0), 0)


def attention_variant(
    tuning: Tuning, group: int, n_kv_heads: int, head_dim: int, rows: int = 1
) -> AttentionVariant | None:
    """Returns the variant of attention for so many rows; None without subgroups, where
    attention_scores, softmax and weighted_sum compute it."""
    if not tuning.subgroup_size:
        return None
    chunks = head_dim // 8
    cluster = min(tuning.subgroup_size, chunks & -chunks)
    per_lane = chunks // cluster
    # A lane keeps heads * per_lane groups of queries and of outputs in registers.
    most = max(1, 8 // per_lane)
    fitting = [heads for heads in range(1, min(group, most) + 1) if group % heads == 0]
    if tuning.software:
        # Subgroups go through a barrier one after the other, so a workgroup is one; large kernels
        # compile for seconds.
        heads, workgroup, batch = max(heads for heads in fitting if heads <= 3), 1, 1
    else:
        # Up to four, so that there are more workgroups; but the 5 or 7 of some models are
        # shared.
        heads = max(heads for heads in fitting if heads <= 4 or fitting[1:] == [heads])
        workgroup, batch = 128 if chunks <= 8 else 256, 2 if per_lane <= 8 else 1
    # More splits than that cost more in attention_combine than they gain.
    splits = max(1, min(64, (8 if tuning.software else 128) // (n_kv_heads * group // heads)))
    if rows > 1 and not tuning.software:
        splits = max(1, 2 * splits // rows)  # the rows fill the GPU
    workgroup = max(workgroup, tuning.subgroup_size)
    while True:
        at_once = batch * workgroup // cluster
        shortest = max(32, at_once) if tuning.software else at_once
        variant = AttentionVariant(
            workgroup, heads, cluster, per_lane, batch, splits, shortest, max(512, at_once)
        )
        if variant.merged(tuning.limits.workgroup_storage, tuning.subgroup_size):
            return variant
        workgroup //= 2


def attention_long_variant(
    tuning: Tuning, group: int, n_kv_heads: int, head_dim: int, rows: int
) -> AttentionVariant | None:
    """In place of attention_tiled on a software adapter. So many rows are enough workgroups, and
    what all splits leave for attention_combine takes room, so splits are as long as loops may be:
    half of the passes, as a few are needed for what comes after the positions."""
    variant = attention_variant(tuning, group, n_kv_heads, head_dim, rows)
    longest = tuning.loop_passes // 2
    return variant and replace(variant, splits=1, min_split=longest, max_split=longest)


def attention_joined_variant(
    tuning: Tuning, variant: AttentionVariant, rows: int, n_heads: int, group: int
) -> AttentionVariant | None:
    """For a context so short that one workgroup for each head, or for some where there are many
    rows, takes less time than splits and attention_combine. None where it has no room, or on a CPU,
    which gains nothing."""
    if tuning.software:
        return None
    enough = 3 * tuning.multiprocessors // 2  # workgroups
    shared = (n for n in range(variant.heads, 1, -1) if group % n == 0)
    heads = next((n for n in shared if rows * n_heads >= n * enough), 1)
    workgroup = max(256, variant.workgroup) if heads == 1 else max(128, tuning.subgroup_size)
    batch = 4 if variant.per_lane <= 8 else 1
    at_once = batch * workgroup // variant.cluster
    longest = min(1024, 6 * at_once) if rows == 1 else 1024
    joined = AttentionVariant(
        workgroup, heads, variant.cluster, variant.per_lane, batch, 1, longest, longest
    )
    fits = joined.merged(tuning.limits.workgroup_storage, tuning.subgroup_size)
    return joined if fits else None


# attention_tiled: its tile sizes


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
        """Rows of a workgroup."""
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

    def most_positions(self, head_dim: int, passes: int) -> int:
        """The most positions that a tile of rows may attend to, where an invocation has so many
        passes through loops (Tuning.loop_passes): the loops of attention_tiled.wgsl, all rolled."""
        v_depth = self.v_depth(head_dim)
        scores = loop_passes(head_dim // self.depth, loop_passes(self.depth // 4))
        of_rows = self.m_tile * loop_passes(self.n_size)
        outputs = loop_passes(self.columns // v_depth, loop_passes(v_depth // 4))
        besides = loop_passes(MAX_PROMPTS) + of_rows
        return (passes - besides) // (1 + scores + of_rows + outputs) * self.columns


def attention_tiled_variant(tuning: Tuning, head_dim: int, n_heads: int) -> TiledVariant:
    """32 rows by 64 positions, where memory and registers have room for that; on a CPU 32 by
    32, or 8 by 32 for few heads: short code, little that is masked."""
    tiles = [] if tuning.software else [(16, 4, 32), (16, 4, 16)]
    tiles += [(16, 2, 16)] if head_dim > 512 and not tuning.software else []
    narrow = tuning.software and n_heads * head_dim <= NARROW_SOFTWARE
    tiles += [(8, rows, depth) for rows in (4, 2, 1)[2 * narrow :] for depth in (16, 8)]
    for n_size, m_tile, depth in tiles:
        variant = TiledVariant(8, n_size, m_tile, 4, depth, double=False)
        # An invocation keeps up to 72 outputs in registers.
        small = m_tile * -(-head_dim // (4 * n_size)) <= 18
        fits = variant.storage(head_dim) <= tuning.limits.workgroup_storage
        if small and fits and head_dim % depth == 0:
            return variant
    raise ShaderError(f"attention_tiled has no variant for heads of {head_dim} dimensions.")


# attention_matrix: its sizes

_SUB_ROWS = 16  # of a subgroup: with 32, outputs take too many registers
_MOST_DIMS = 144  # of a subgroup, whose queries and outputs stay in registers


@dataclass(frozen=True)
class AttentionMatrixVariant:
    """attention_matrix: the small matrices, the lanes of a subgroup, rows of a workgroup and of a
    subgroup, positions whose keys and values are in workgroup memory at once, and dimensions of a
    head that a subgroup has. emulated: without the adapter's own matrices."""

    shape: MatrixShape
    lanes: int
    rows: int
    sub_rows: int
    keys: int
    dims: int
    emulated: bool = False

    def invocations(self, head_dim: int) -> int:
        """Returns how many invocations a workgroup has."""
        return self.rows // self.sub_rows * (head_dim // self.dims) * self.lanes

    def storage(self, head_dim: int, latent: bool) -> int:
        """Bytes of workgroup memory."""
        row = 2 * head_dim + 16  # of queries, keys or values
        tiles = (1 if latent else 2) * self.keys * row
        scores = self.rows * (head_dim // self.dims) * (4 * self.keys + 32)
        weights = self.rows * (2 * self.keys + 16)
        besides = 4 * self.rows + 16
        pool = tiles + scores + weights
        queries = self.rows * row
        return besides + (pool + queries if self.emulated else max(pool, queries))

    def runs(self, tuning: Tuning, head_dim: int, latent: bool) -> bool:
        """Whether a head is made of such parts, and a device has room for it."""
        limits, shape = tuning.limits, self.shape
        invocations = self.invocations(head_dim)
        return (
            head_dim % self.dims == 0
            and self.dims % max(shape.n, shape.k) == 0
            and self.keys % max(shape.n, shape.k) == 0
            and self.sub_rows % shape.m == 0
            and invocations <= limits.max_invocations
            and self.storage(head_dim, latent) <= limits.workgroup_storage
            and (self.emulated or invocations % max(1, tuning.largest_subgroup) == 0)
        )

    @property
    def params(self) -> dict[str, Any]:
        """The kernel's."""
        return {
            **matrix_params(self.shape, self.lanes, self.emulated),
            "ROWS": self.rows,
            "SUB_ROWS": self.sub_rows,
            "KEYS": self.keys,
            "DIMS": self.dims,
        }


def attention_matrix_variant(
    tuning: Tuning, head_dim: int, latent: bool, dtype: str
) -> AttentionMatrixVariant | None:
    """Returns the sizes of attention_matrix; None where the adapter has no matrices, where a head
    is not made of them, or for a cache in f32, whose values must not be rounded."""
    shape = matrix_shape(tuning)
    if shape is None or dtype == "f32":
        return None
    parts = next((n for n in (1, 2, 3, 4, 6, 8) if head_dim / n <= _MOST_DIMS), 8)
    for subgroups, keys in product((8, 4), (32, 16)):
        rows = _SUB_ROWS * (subgroups // parts)
        variant = AttentionMatrixVariant(
            shape, tuning.subgroup_size, rows, _SUB_ROWS, keys, head_dim // parts
        )
        if rows and variant.runs(tuning, head_dim, latent):
            return variant
    return None
