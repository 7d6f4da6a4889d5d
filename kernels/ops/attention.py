"""The kernels of attention: rope and the cache write, then one of three forms.

A few rows: attention, which splits the context, and attention_combine. Many rows: attention_tiled.
Without fusing, or without subgroups: attention_scores, softmax, weighted_sum. With one row,
attention_decode takes the place of rope, the cache write and attention.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infer.kernels.compiler.arena import Operand, Scratch
from infer.kernels.compiler.fusion import Fusion
from infer.kernels.compiler.graph import Rope, Value, stride
from infer.kernels.compiler.tuning import AttentionVariant, power_of_two
from infer.kernels.errors import ShaderError
from infer.kernels.gpu.device import Buffer
from infer.kernels.gpu.plan import NOTHING, Size
from infer.kernels.gpu.tensor import HALF, GpuTensor
from infer.kernels.state.kv_cache import PAGE, LayerCache, kv_cache_bytes

if TYPE_CHECKING:
    from infer.kernels.compiler.lowering import Lowering


def lower_attention(low: Lowering, value: Value, result: Value) -> None:
    """Emit the kernels of the attention op `value`. result: the same, or what its gates make of
    it."""
    cache: LayerCache = value.attrs["cache"]
    group = value.width // (cache.n_kv_heads * cache.head_dim)
    common = {
        **_kv_params(cache),
        "WINDOW": value.attrs["window"],
        "GROUP": group,
        "SCALE": float(value.attrs["scale"]),
        "SOFTCAP": float(value.attrs["softcap"]),
    }
    split = low.tuning.attention(group, cache.n_kv_heads, cache.head_dim) if low.fusion else None
    projection = low.fusion.projection(value) if low.fusion else None
    heads = _Heads.of(value, projection) if projection is not None else None
    if heads is not None and split is not None and _turns_in_registers(low, cache, heads, split):
        _attention_split(low, value, result, heads.projection, common, split, heads)
        return
    bindings = 5 + 2 * heads.own + len(heads.weights) if heads is not None else 0
    if heads and heads.rope and low.device.limits.storage_buffers >= bindings:
        query = _rope_kv_write(low, value, heads, heads.rope)
    else:
        if heads is not None:  # nothing turns, or too many bindings: one kernel after the other
            _turn_apart(low, value)
        query = value.inputs[0]
        latent = low.fusion.latent(value) if low.fusion else None
        if latent is not None:
            key = LatentKey.of(low, value, latent)
            if query not in low.absorbed or not low.head_linear(query, key):
                _latent_write(low, value, key)
        elif len(value.inputs) > 1:
            _kv_write(low, value)
    if low.fusion and not low.kind.vec:
        _attention_tiled(low, value, query, common)
    elif split is not None:
        _attention_split(low, value, result, query, common, split)
    else:
        _attention_chain(low, value, query, common)
        if result is not value:
            low.sigmoid_gate(result)


@dataclass(frozen=True)
class _Heads:
    """A projection of q, k and v, and what becomes of its heads: how queries and keys turn, if they
    do, and the weights of the norms of queries, keys and values, if they have any. rows_normed:
    norms are of whole rows of heads. own: there are keys and values; v_is_k: these are the keys as
    they are projected."""

    projection: Value
    rope: Rope | None
    weights: tuple[Buffer, ...]
    eps: float
    rows_normed: bool
    own: bool
    v_is_k: bool
    turned_first: bool

    @classmethod
    def of(cls, value: Value, projection: Value) -> _Heads:
        parts, norms, ropes = zip(*map(Fusion.head_chain, value.inputs), strict=True)
        found = [norm for norm in norms if norm is not None]
        return cls(
            projection,
            ropes[0],
            tuple(norm.attrs["weight"].buffer for norm in found),
            float(found[0].attrs["eps"]) if found else 0.0,
            rows_normed=Fusion.norms_rows(value),
            own=len(parts) == 3,
            v_is_k=len(parts) == 3 and parts[1] is parts[2],
            turned_first=Fusion.turns_first(value.inputs[0]),
        )

    @property
    def params(self) -> dict[str, Any]:
        return {
            "ROTARY_DIM": self.rope.rotary_dim if self.rope else 0,
            "INTERLEAVED": self.rope.interleaved if self.rope else False,
            "NORM": bool(self.weights),
            "ROW_NORM": self.rows_normed,
            "ROTATE_FIRST": self.turned_first,
            "OWN": self.own,
            "V_NORM": len(self.weights) == 3,
            "V_IS_K": self.v_is_k,
            "EPS": self.eps,
        }

    @property
    def operands(self) -> tuple[Buffer, ...]:
        """The table, if there is one, and the norms."""
        return ((self.rope.table,) if self.rope else ()) + self.weights


def _turns_in_registers(
    low: Lowering, cache: LayerCache, heads: _Heads, variant: AttentionVariant
) -> bool:
    """Whether attention_decode can do the work of rope_kv_write: rows do not wait for each other's
    keys, groups of eight dimensions have their partners in one group, scales of int8 are written
    as the pairs that they are read as, and the bindings suffice."""
    turned = heads.params["ROTARY_DIM"]
    pairs = cache.dtype != "q8" or variant.cluster % 8 == 0
    return (
        low.kind.rows == 1
        and (turned if heads.params["INTERLEAVED"] else turned // 2) % 8 == 0
        and cache.head_dim % 8 == 0
        and (pairs or not heads.own)
        and low.device.limits.storage_buffers >= 6 + len(heads.operands)
    )


def _turn_apart(low: Lowering, value: Value) -> None:
    """The norms and ropes of heads as kernels of their own."""
    for source in value.inputs:
        chain = []
        while source in low.absorbed:
            chain.append(source)
            source = source.inputs[0]
        for step in reversed(chain):
            getattr(low, f"_lower_{step.op}")(step)


def _rope_kv_write(low: Lowering, value: Value, heads: _Heads, rope: Rope) -> Value:
    cache: LayerCache = value.attrs["cache"]
    x, x_stride, _ = low.source(heads.projection)
    query = Value(value.ops, "query", value.width)
    operands: list[Operand] = [low.step, cache.pages, rope.table, x, query]
    n_heads, kv = value.width // cache.head_dim, (cache.keys, cache.values) if heads.own else ()
    workgroup = max(32, min(128, cache.head_dim // 2)) if cache.head_dim % 64 == 0 else 32
    if heads.rows_normed:
        workgroup = low.tuning.workgroup(value.width)
    low.emit(
        "rope_kv_write",
        [*operands, *kv, *heads.weights],
        low.row_grid(value, n_heads + len(kv) * cache.n_kv_heads),
        {
            **_kv_params(cache),
            **heads.params,
            "WG": workgroup,
            "SUBGROUPS": low.device.subgroups,
            "N_HEADS": n_heads,
            "N_KV_HEADS": cache.n_kv_heads,
            "X_STRIDE": x_stride,
            "Y_STRIDE": stride(value.width),
        },
    )
    return query


def _kv_write(low: Lowering, value: Value) -> None:
    cache: LayerCache = value.attrs["cache"]
    (k, k_stride, k_offset), (v, v_stride, v_offset) = map(low.source, value.inputs[1:])
    latent = cache.shape.latent
    low.emit(
        "kv_write",
        (low.step, cache.pages, k, v, cache.keys, *([] if latent else [cache.values])),
        low.row_grid(value, cache.n_kv_heads),
        {
            **_kv_params(cache),
            "LATENT": latent,
            "K_DIM": value.inputs[1].width // cache.n_kv_heads,
            "K_STRIDE": k_stride,
            "K_OFFSET": k_offset,
            "V_STRIDE": v_stride,
            "V_OFFSET": v_offset,
        },
    )


@dataclass(frozen=True)
class LatentKey:
    """The key of a latent cache that turns, and the latent that is normed, as a kernel writes them
    (latent.wgsl): how the key turns, what is bound behind its table, and parameters."""

    rope: Rope
    operands: tuple[Operand, ...]
    params: dict[str, Any]

    @classmethod
    def of(cls, low: Lowering, value: Value, latent: Value) -> LatentKey:
        cache: LayerCache = value.attrs["cache"]
        norm = value.inputs[2]
        x, x_stride, offset = low.source(latent)
        pages = [cache.pages] if cache.paged else []
        return cls(
            value.inputs[1].attrs["rope"],
            (x, norm.attrs["weight"].buffer, cache.keys, *pages),
            {
                **_kv_params(cache),
                "EPS": float(norm.attrs["eps"]),
                "LATENT_STRIDE": x_stride,
                "LATENT_OFFSET": offset,
            },
        )

    @property
    def storage(self) -> int:
        """Bytes of workgroup memory, but for a sum's."""
        return 8 * int(self.params["HEAD_DIM"])


NO_KEY: dict[str, Any] = {
    "KV": "f32",
    "HEAD_DIM": 0,
    "KV_HEADS": 0,
    "PAGE": 0,
    "PAGES_PER_SEQUENCE": 0,
    "PAGED": False,
    "SLOTS": 0,
    "EPS": 0.0,
    "LATENT_STRIDE": 0,
    "LATENT_OFFSET": 0,
}


def _latent_write(low: Lowering, value: Value, key: LatentKey) -> None:
    """The key from a projection into the cache."""
    low.emit(
        "latent_write",
        (low.step, key.rope.table, *key.operands),
        low.row_grid(value, 1),
        {
            **key.params,
            "WG": low.tuning.workgroup(key.params["HEAD_DIM"]),
            "SUBGROUPS": low.device.subgroups,
            "ROTARY_DIM": key.rope.rotary_dim,
            "INTERLEAVED": key.rope.interleaved,
        },
    )


def _attention_chain(low: Lowering, value: Value, query: Value, common: dict[str, Any]) -> None:
    """attention_scores, softmax, weighted_sum."""
    cache: LayerCache = value.attrs["cache"]
    q, q_stride, q_offset = low.source(query)
    n_heads = value.width // cache.head_dim
    scores_stride = cache.pages_per_sequence * PAGE
    scores = Scratch(4 * low.kind.rows * n_heads * scores_stride)
    probabilities = Scratch(scores.nbytes)
    heads = low.row_grid(value, n_heads)
    low.emit(
        "attention_scores",
        (low.step, cache.pages, q, cache.keys, scores),
        lambda rows, kv_len: (-(-kv_len // 64), n_heads, rows),
        common | {"Q_STRIDE": q_stride, "Q_OFFSET": q_offset, "SCORES_STRIDE": scores_stride},
    )
    low.emit(
        "softmax",
        (low.step, scores, probabilities, *_sinks(value)),
        heads,
        {
            "WG": low.tuning.workgroup(1024),
            "SUBGROUPS": low.device.subgroups,
            "WINDOW": common["WINDOW"],
            "STRIDE": scores_stride,
            "SINKS": bool(_sinks(value)),
        },
    )
    weighted = {name: common[name] for name in (*_kv_params(cache), "WINDOW", "GROUP")}
    low.emit(
        "weighted_sum",
        (low.step, cache.pages, probabilities, cache.values, value),
        heads,
        weighted
        | {
            "SCORES_STRIDE": scores_stride,
            "Y_STRIDE": stride(value.width),
            "LANES": low.tuning.lanes(cache.head_dim),
        },
    )


def _attention_split(
    low: Lowering,
    value: Value,
    result: Value,
    source: Value,
    common: dict[str, Any],
    variant: AttentionVariant,
    heads: _Heads | None = None,
) -> None:
    """attention or, with heads, attention_decode, and attention_combine; a short context is joined
    in the first itself. source: the queries, or, with heads, the projection."""
    cache: LayerCache = value.attrs["cache"]
    x, x_stride, x_offset = low.source(source)
    n_heads, sinks, window = value.width // cache.head_dim, _sinks(value), common["WINDOW"]
    last: list[Operand] = [*sinks]
    ungated = gated = {"GATED": False, "GATE_STRIDE": 0, "GATE_OFFSET": 0}
    if result is not value:
        gates, gate_stride, gate_offset = low.source(result.inputs[1])
        gated = {"GATED": True, "GATE_STRIDE": gate_stride, "GATE_OFFSET": gate_offset}
        last.append(gates)
    outputs: list[Operand] = [result]
    form = low.next_form(result, low.device.limits.storage_buffers - 2 - len(last))
    quantize = form is not None and form.norm is None and not form.keep
    if form is not None and quantize:
        outputs = low.prepare(result, form, low.kind.rows)
    inputs: list[Operand] = [low.step, cache.pages, x, cache.keys, cache.values]
    kernel, own = ("attention_decode", heads.operands) if heads is not None else ("attention", ())
    params = (
        common
        | (heads.params if heads is not None else {"LATENT": cache.shape.latent})
        | {"X_STRIDE": x_stride, "X_OFFSET": x_offset, "Y_STRIDE": stride(value.width)}
    )
    joined = low.tuning.attention_joined(variant) if low.kind.rows == 1 else None
    operands = [*inputs, *outputs, *last, *own]
    if len(operands) > low.device.limits.storage_buffers or (quantize and cache.head_dim % HALF):
        joined = None
    longest = joined.max_split if joined is not None else 0  # context that one split has room for
    positions = cache.pages_per_sequence * PAGE
    if joined is not None:
        low.emit(
            kernel,
            operands,
            _Grid(joined, n_heads // joined.heads, window, 0, longest),
            params
            | _split_params(cache, joined, window, 2)
            | _variant_params(low, joined)
            | {"JOINED": True, "QUANTIZE": quantize, "SINKS": bool(sinks)}
            | gated,
            moved=lambda rows, kv_len: rows * _read_bytes(cache, kv_len, window),
        )
    if min(positions, window or positions) <= longest:
        return
    count = variant.count(positions)
    at_once = min(_COMBINED_AT_ONCE, power_of_two(max(2, count)))
    stored = -(-count // at_once) * at_once
    split = _split_params(cache, variant, window, stored)
    partial = Scratch(low.kind.rows * n_heads * stored * (4 * cache.head_dim + 8))
    low.emit(
        kernel,
        [*inputs, partial, *own],
        _Grid(variant, n_heads // variant.heads, window, longest + 1),
        params
        | split
        | _variant_params(low, variant)
        | {"JOINED": False, "QUANTIZE": False, "SINKS": False}
        | ungated,
        moved=lambda rows, kv_len: rows * _read_bytes(cache, kv_len, window),
    )
    low.emit(
        "attention_combine",
        (low.step, partial, *outputs, *last),
        _Grid(-(-value.width // (4 * _COMBINE_WORKGROUP)), 1, window, longest + 1),
        split
        | gated
        | {
            "WG": _COMBINE_WORKGROUP,
            "N_HEADS": n_heads,
            "AT_ONCE": at_once,
            "Y_STRIDE": stride(value.width),
            "QUANTIZE": quantize,
            "SINKS": bool(sinks),
        },
    )


@dataclass(frozen=True)
class _Grid:
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


_COMBINED_AT_ONCE = 8  # splits: four registers each
_COMBINE_WORKGROUP = 32  # small: a row is only so many vec4s, and every multiprocessor can help


def _split_params(
    cache: LayerCache, variant: AttentionVariant, window: int, stored: int
) -> dict[str, Any]:
    """Of attention_split.wgsl and attention_range.wgsl, with room for so many splits."""
    return {
        "HEAD_DIM": cache.head_dim,
        "WINDOW": window,
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


def _attention_tiled(low: Lowering, value: Value, query: Value, common: dict[str, Any]) -> None:
    cache: LayerCache = value.attrs["cache"]
    q, q_stride, q_offset = low.source(query)
    n_heads = value.width // cache.head_dim
    variant = low.tuning.attention_tiled(cache.head_dim, n_heads)
    low.emit(
        "attention_tiled",
        (low.step, cache.pages, q, cache.keys, cache.values, value, *_sinks(value)),
        lambda rows, kv_len: (n_heads, -(-rows // variant.rows), 1),
        common
        | {
            "Q_STRIDE": q_stride,
            "Q_OFFSET": q_offset,
            "Y_STRIDE": stride(value.width),
            "M_SIZE": variant.m_size,
            "N_SIZE": variant.n_size,
            "M_TILE": variant.m_tile,
            "N_TILE": variant.n_tile,
            "DEPTH": variant.depth,
            "V_DEPTH": variant.v_depth(cache.head_dim),
            "DOUBLE": variant.double,
            "SINKS": bool(_sinks(value)),
            "SOFTWARE": low.device.software,
        },
        flops=lambda rows, kv_len: 2 * rows * value.width * (2 * kv_len - rows),
    )


def _sinks(value: Value) -> list[Buffer]:
    """The sinks' buffer, if there are any."""
    sinks: GpuTensor | None = value.attrs["sinks"]
    return [] if sinks is None else [sinks.buffer]


def _kv_params(cache: LayerCache) -> dict[str, Any]:
    return {
        "KV": cache.dtype,
        "HEAD_DIM": cache.head_dim,
        "KV_HEADS": cache.n_kv_heads,
        "PAGE": PAGE,
        "PAGES_PER_SEQUENCE": cache.pages_per_sequence,
        "PAGED": cache.paged,
        "SLOTS": cache.slots,
    }


def _read_bytes(cache: LayerCache, kv_len: int, window: int) -> int:
    """Bytes of keys and values that a row reads."""
    positions = min(kv_len, window) if window else kv_len
    page = kv_cache_bytes(cache.shape, PAGE, cache.dtype)
    return positions * page // PAGE
