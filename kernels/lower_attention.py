"""The kernels of attention: rope and the cache write, then one of three forms.

A few rows: attention, which splits the context, and attention_combine. Many rows: attention_tiled.
Without fusing, or without subgroups: attention_scores, softmax, weighted_sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infer.kernels.arena import Operand, Scratch
from infer.kernels.fuse import Fusion
from infer.kernels.kv_cache import PAGE, LayerCache
from infer.kernels.ops import Value, stride
from infer.kernels.tuning import AttentionVariant, power_of_two

if TYPE_CHECKING:
    from infer.kernels.lower import Lowering


def lower_attention(low: Lowering, value: Value) -> None:
    """Emit the kernels of the attention op `value`."""
    cache: LayerCache = value.attrs["cache"]
    projection = low.fusion.projection(value) if low.fusion else None
    if projection is not None:
        query: Value = _rope_kv_write(low, value, projection)
    else:
        query = value.inputs[0]
        _kv_write(low, value)
    q, q_stride, q_offset = low.source(query)
    group = value.width // (cache.n_kv_heads * cache.head_dim)
    common = {
        **_kv_params(cache),
        "WINDOW": value.attrs["window"],
        "GROUP": group,
        "SCALE": float(value.attrs["scale"]),
        "Q_STRIDE": q_stride,
        "Q_OFFSET": q_offset,
    }
    variant = low.tuning.attention(group, cache.n_kv_heads, cache.head_dim)
    if low.fusion and not low.kind.vec:
        _attention_tiled(low, value, q, common)
    elif low.fusion and variant is not None:
        _attention_split(low, value, q, common, variant)
    else:
        _attention_chain(low, value, q, common)


def _rope_kv_write(low: Lowering, value: Value, projection: Value) -> Value:
    cache: LayerCache = value.attrs["cache"]
    _, q_norm, rope = Fusion.head_chain(value.inputs[0])
    _, k_norm, _ = Fusion.head_chain(value.inputs[1])
    assert rope is not None  # Fusion.projection found it
    x, x_stride, _ = low.source(projection)
    query = Value(value.ops, "query", value.width)
    operands: list[Operand] = [low.step, cache.pages, rope.table, x, query]
    operands += [cache.keys, cache.values]
    if q_norm is not None and k_norm is not None:
        operands += [q_norm.attrs["weight"].buffer, k_norm.attrs["weight"].buffer]
    n_heads = value.width // cache.head_dim
    low.emit(
        "rope_kv_write",
        operands,
        low.row_grid(value, n_heads + 2 * cache.n_kv_heads),
        {
            **_kv_params(cache),
            "WG": max(32, min(128, cache.head_dim // 2)) if cache.head_dim % 64 == 0 else 32,
            "SUBGROUPS": low.device.subgroups,
            "ROTARY_DIM": rope.rotary_dim,
            "INTERLEAVED": rope.interleaved,
            "N_HEADS": n_heads,
            "N_KV_HEADS": cache.n_kv_heads,
            "NORM": q_norm is not None,
            "EPS": float(q_norm.attrs["eps"]) if q_norm is not None else 0.0,
            "X_STRIDE": x_stride,
            "Y_STRIDE": stride(value.width),
        },
    )
    return query


def _kv_write(low: Lowering, value: Value) -> None:
    cache: LayerCache = value.attrs["cache"]
    (k, k_stride, k_offset), (v, v_stride, v_offset) = map(low.source, value.inputs[1:])
    low.emit(
        "kv_write",
        (low.step, cache.pages, k, v, cache.keys, cache.values),
        low.row_grid(value, cache.n_kv_heads),
        {
            **_kv_params(cache),
            "K_STRIDE": k_stride,
            "K_OFFSET": k_offset,
            "V_STRIDE": v_stride,
            "V_OFFSET": v_offset,
        },
    )


def _attention_chain(low: Lowering, value: Value, q: Value, common: dict[str, Any]) -> None:
    """attention_scores, softmax, weighted_sum."""
    cache: LayerCache = value.attrs["cache"]
    n_heads = value.width // cache.head_dim
    scores_stride = cache.pages_per_sequence * PAGE
    scores = Scratch(4 * low.kind.rows * n_heads * scores_stride)
    probabilities = Scratch(scores.nbytes)
    heads = low.row_grid(value, n_heads)
    low.emit(
        "attention_scores",
        (low.step, cache.pages, q, cache.keys, scores),
        lambda rows, kv_len: (-(-kv_len // 64), n_heads, rows),
        common | {"SCORES_STRIDE": scores_stride},
    )
    low.emit(
        "softmax",
        (low.step, scores, probabilities),
        heads,
        {
            "WG": low.tuning.workgroup(1024),
            "SUBGROUPS": low.device.subgroups,
            "WINDOW": common["WINDOW"],
            "STRIDE": scores_stride,
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
    low: Lowering, value: Value, q: Value, common: dict[str, Any], variant: AttentionVariant
) -> None:
    cache: LayerCache = value.attrs["cache"]
    n_heads = value.width // cache.head_dim
    stored = variant.count(cache.pages_per_sequence * PAGE)
    split = {
        "WINDOW": common["WINDOW"],
        "SPLITS": variant.splits,
        "MIN_SPLIT": variant.min_split,
        "MAX_SPLIT": variant.max_split,
        "STORED_SPLITS": stored,
    }
    partial = Scratch(4 * low.kind.rows * n_heads * stored * cache.head_dim)
    weights = Scratch(8 * low.kind.rows * n_heads * stored)
    window = common["WINDOW"]

    def splits(kv_len: int) -> int:
        return variant.count(min(kv_len, window) if window else kv_len)

    low.emit(
        "attention",
        (low.step, cache.pages, q, cache.keys, cache.values, partial, weights),
        lambda rows, kv_len: (splits(kv_len), n_heads // variant.heads, rows),
        common
        | split
        | {
            "WG": variant.workgroup,
            "HEADS": variant.heads,
            "CLUSTER": variant.cluster,
            "CLUSTER_BITS": variant.cluster.bit_length() - 1,
            "PER_LANE": variant.per_lane,
            "BATCH": variant.batch,
        },
        moved=lambda rows, kv_len: rows * _read_bytes(cache, kv_len, window),
    )
    low.emit(
        "attention_combine",
        (low.step, partial, weights, value),
        lambda rows, kv_len: (n_heads, rows, 1),
        split
        | {
            "WG": max(32, min(128, power_of_two(cache.head_dim))),
            "SUBGROUPS": low.device.subgroups,
            "HEAD_DIM": cache.head_dim,
            "Y_STRIDE": stride(value.width),
        },
    )


def _attention_tiled(low: Lowering, value: Value, q: Value, common: dict[str, Any]) -> None:
    cache: LayerCache = value.attrs["cache"]
    n_heads = value.width // cache.head_dim
    lanes = min(64, 256 // (cache.head_dim // 8))
    low.emit(
        "attention_tiled",
        (low.step, cache.pages, q, cache.keys, cache.values, value),
        lambda rows, kv_len: (-(-rows // 64), n_heads, 1),
        common | {"Y_STRIDE": stride(value.width), "ROWS_PER_LANE": -(-64 // lanes)},
        flops=lambda rows, kv_len: 2 * rows * value.width * (2 * kv_len - rows),
    )


def _kv_params(cache: LayerCache) -> dict[str, Any]:
    return {
        "KV": cache.dtype,
        "HEAD_DIM": cache.head_dim,
        "KV_SLOTS": cache.slots,
        "PAGE": PAGE,
        "PAGES_PER_SEQUENCE": cache.pages_per_sequence,
    }


def _read_bytes(cache: LayerCache, kv_len: int, window: int) -> int:
    """Bytes of keys and values that a row reads."""
    positions = min(kv_len, window) if window else kv_len
    size = 2 if cache.dtype == "f16" else 4
    return 2 * positions * cache.n_kv_heads * cache.head_dim * size
