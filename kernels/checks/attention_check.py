"""References and cases of attention, and of its kernels alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Annotated, Any, Required, Unpack

import numpy as np
from numpy.typing import NDArray

from infer.kernels.checks.arrays import Array, from_rows
from infer.kernels.checks.bench import EPS, TILED, Bench, Case, Outcome
from infer.kernels.checks.by_hand import by_hand, floats
from infer.kernels.checks.elementwise_check import softcap
from infer.kernels.checks.forward import Floats, Options, unwritten
from infer.kernels.checks.linear_check import ByMatrix, few
from infer.kernels.checks.norm_check import rmsnorm
from infer.kernels.checks.reference import nmse, softmax
from infer.kernels.checks.rope_check import (
    RopeTable,
    check_rotated,
    frequencies,
    rope,
    rope_table,
    stored_rope,
)
from infer.kernels.errors import ShaderError
from infer.kernels.gpu.device import Buffer
from infer.kernels.lowering.graph import Value, split
from infer.kernels.ops.attention import Attention, AttentionMatrixVariant
from infer.kernels.ops.norm import RMSNorm
from infer.kernels.ops.rope import Rope, Rotate
from infer.kernels.state.kv_cache import (
    KV_DTYPES,
    KVCache,
    KVShape,
    LayerCache,
    from_kv,
    kept,
    kv_block,
    to_kv,
)
from infer.kernels.state.step import MAX_PROMPTS

Prompt = tuple[Array, Array, Array]  # q, k and v: as of `run_attention`


def visible(rows: int, kv_len: int, window: int = 0) -> NDArray[np.bool_]:
    """[rows, kv_len]: which positions the last `rows` of kv_len positions attend to."""
    own = np.arange(kv_len - rows, kv_len)[:, None]
    position = np.arange(kv_len)[None, :]
    seen = position <= own
    return seen & (position > own - window) if window else seen


def attention_scores(q: Array, k: Array, n_heads: int, scale: float, cap: float = 0.0) -> Array:
    """q [rows, n_heads * d], k [kv_len, n_kv_heads * d] -> [rows, n_heads, kv_len], unmasked."""
    rows, kv_len = q.shape[0], k.shape[0]
    queries = q.astype(np.float64).reshape(rows, n_heads, -1)
    keys = k.astype(np.float64).reshape(kv_len, -1, queries.shape[-1])
    keys = np.repeat(keys, n_heads // keys.shape[1], axis=1)
    result: Array = scale * np.einsum("rhd,phd->rhp", queries, keys)
    return softcap(result, cap) if cap else result


def weighted_sum(p: Array, v: Array) -> Array:
    """p [rows, n_heads, kv_len], v [kv_len, n_kv_heads, d] -> [rows, n_heads * d]."""
    values = np.repeat(v.astype(np.float64), p.shape[1] // v.shape[1], axis=1)
    result: Array = np.einsum("rhp,phd->rhd", p.astype(np.float64), values)
    return result.reshape(p.shape[0], -1)


def attention(
    q: Array,
    k: Array,
    v: Array,
    n_heads: int,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    sinks: Array | None = None,
) -> Array:
    """q [rows, n_heads * d] are the last rows of k, v [kv_len, n_kv_heads * d]. sinks [n_heads]:
    of each head a score that has no value."""
    scores = attention_scores(q, k, n_heads, scale, cap)
    seen = visible(q.shape[0], k.shape[0], window)[:, None, :]
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        own = np.broadcast_to(sinks[:, None], (*scores.shape[:2], 1))
        p = softmax(np.concatenate([scores, own], axis=-1))[..., :-1]
    else:
        p = softmax(scores)
    return weighted_sum(p, v.reshape(v.shape[0], -1, q.shape[1] // n_heads))


# By hand


KVDtype = Annotated[str, KV_DTYPES]
Q = Annotated[Array, "rows, n_heads * head_dim"]
K = Annotated[Array, "kv_len, k_width"]
V = Annotated[Array, "kv_len, v_width"]
Norms = Annotated[tuple[Array, Array, float] | None, "q_norm", "k_norm"]


class AttentionOptions(Options, total=False):
    """The keyword arguments of the functions of attention, which `run_attention` describes."""

    n_kv_heads: Required[int]
    scale: Required[float]
    window: int
    softcap: float
    sinks: Annotated[Array | None, "n_heads"]
    kv_dtype: KVDtype
    latent: bool


@by_hand
def run_attention(
    bench: Bench, q: Q, k: K, v: V, **options: Unpack[AttentionOptions]
) -> Annotated[Floats, "rows, n_heads * head_dim"]:
    """softmax(scale * q k^T) v, [rows, n_heads * head_dim], for 1 to 8 rows, by the kernels of
    decode.

    q [rows, n_heads * head_dim] are the last rows of k and v [kv_len, n_kv_heads * head_dim], which
    are cached as kv_dtype (f32 by default). head_dim is a multiple of 8. A row attends to all
    before it, or to the last `window` positions. A softcap c turns scores s into c tanh(s / c).
    sinks [n_heads] are scores without a value. latent: keys are k and v side by side, and so are
    values.
    """
    few(len(q), "attention_tiled")
    return _attention(bench, [(q, k, v)], 0, **options)


@by_hand
def run_attention_tiled(
    bench: Bench, q: Q, k: K, v: V, **options: Unpack[AttentionOptions]
) -> Annotated[Floats, "rows, n_heads * head_dim"]:
    """Attention as `attention` computes it, [rows, n_heads * head_dim], by the kernel of prefill,
    for any number of rows."""
    return _attention(bench, [(q, k, v)], TILED, **options)


@by_hand
def run_attention_matrix(
    bench: Bench,
    q: Q,
    k: K,
    v: V,
    variant: AttentionMatrixVariant | None = None,
    **options: Unpack[AttentionOptions],
) -> Annotated[Floats, "rows, n_heads * head_dim"]:
    """Attention as `attention` computes it, [rows, n_heads * head_dim], for any number of rows, by
    matrices of f16: those of the adapter, or emulated where it has none or the variant says so."""
    bench.options["tuning"] = ByMatrix(bench.device, attention=variant)
    return _attention(bench, [(q, k, v)], TILED, **options)


@by_hand
def run_attention_prompts(
    bench: Bench, prompts: Sequence[Prompt], **options: Unpack[AttentionOptions]
) -> Annotated[Floats, "all_rows, n_heads * head_dim"]:
    """Attention of up to eight sequences, each with its own (q, k, v) as `attention` takes them, by
    the kernel of prefill that runs several at once. The rows of a sequence follow those of the one
    before, [all rows, n_heads * head_dim]."""
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ShaderError(f"it takes 1 to {MAX_PROMPTS} sequences, not {len(prompts)}")
    prompts = [(floats("q", q), floats("k", k), floats("v", v)) for q, k, v in prompts]
    for q, k, v in prompts:
        if any(each.ndim != 2 or not each.size for each in (q, k, v)) or len(k) != len(v):
            shapes = f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
            raise ShaderError(f"q, k and v must be [rows, width], k and v as many, not {shapes}")
    return _attention(bench, prompts, TILED, **options)


def _attention(
    bench: Bench,
    prompts: Sequence[Prompt],
    plan_rows: int,
    *,
    n_kv_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Array | None = None,
    kv_dtype: str = "f32",
    latent: bool = False,
    **options: Unpack[Options],
) -> Floats:
    for q, k, v in prompts:
        _check_heads(q, k.shape[1] + v.shape[1] if latent else k.shape[1], n_kv_heads, len(k))
        if sinks is not None and q.shape[1] * n_kv_heads != len(sinks) * (
            k.shape[1] + v.shape[1] if latent else k.shape[1]
        ):
            raise ShaderError(f"{len(sinks)} sinks do not fit the heads of q {list(q.shape)}")
    placed = [(len(q), len(k) - len(q)) for q, k, _ in prompts]
    before, rows = list[tuple[Array, Array]](), list[tuple[Array, Array, Array]]()
    for (_, past), (q, k, v) in zip(placed, prompts, strict=True):
        keys, values = (np.concatenate([k, v], axis=1),) * 2 if latent else (k, v)
        before.append((keys[:past], values[:past]))
        rows.append((q, k[past:], v[past:]))
    longest = max(len(k) for _, k, _ in prompts)
    own, *others = before
    cache = _new_cache(bench, *own, n_kv_heads, kv_dtype, longest, latent=latent, others=others)
    new_q, new_k, new_v = (bench.input(np.concatenate(part)) for part in zip(*rows, strict=True))
    own_sinks, layer = bench.vector(sinks), cache.layers[0]
    output = Attention(new_q, new_k, new_v, layer, scale, window, softcap, own_sinks)
    return bench.run(output, prompts=placed, plan_rows=plan_rows)


def _check_heads(q: Array, kv_width: int, n_kv_heads: int, kv_len: int) -> None:
    """Raises ShaderError where q are not the last rows of so many positions, or not as many heads
    for each KV head."""
    if len(q) > kv_len:
        raise ShaderError(f"q has {len(q)} rows, more than the {kv_len} of k and v")
    if q.shape[1] % kv_width:
        raise ShaderError(
            f"q must be [rows, n_heads * head_dim], n_heads a multiple of {n_kv_heads} and "
            f"head_dim {kv_width // n_kv_heads}, not {list(q.shape)}"
        )


@by_hand
def run_attention_scores(
    bench: Bench,
    q: Q,
    k: K,
    *,
    n_kv_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    kv_dtype: KVDtype = "f32",
    **options: Unpack[Options],
) -> Annotated[Floats, "rows, n_heads, kv_len"]:
    """scale * q k^T, [rows, n_heads, kv_len], for q [rows, n_heads * head_dim] and k [kv_len,
    n_kv_heads * head_dim] as of `attention`, and -inf where a row does not attend to a position."""
    _check_heads(q, k.shape[1], n_kv_heads, len(k))
    cache = _new_cache(bench, k, k, n_kv_heads, kv_dtype, len(k))
    n_heads = q.shape[1] // cache.layers[0].head_dim
    output = _traced(bench, q, cache, scale, window, softcap)
    scores = _score_matrix(bench, np.zeros((len(q), n_heads, 0)), -np.inf, cache)
    position = len(k) - len(q)
    bench.run_alone("attention_scores", output, position=position, fuse=False, scores=scores)
    return bench.device.read(scores).reshape(len(q), n_heads, -1)[..., : len(k)].copy()


@by_hand
def run_softmax(
    bench: Bench, x: Annotated[Array, "rows, n"], **options: Unpack[Options]
) -> Annotated[Floats, "rows, n"]:
    """exp(x) / sum(exp(x)) of each row of x [rows, n]. Scores of attention, of which a row sees
    some, go through `attention_softmax`."""
    # The scores of so many heads at the last position, which sees all.
    y: Floats = run_attention_softmax(bench, x[None])[0]
    return y


@by_hand
def run_attention_softmax(
    bench: Bench,
    x: Annotated[Array, "rows, n_heads, kv_len"],
    *,
    window: int = 0,
    **options: Unpack[Options],
) -> Annotated[Floats, "rows, n_heads, kv_len"]:
    """The softmax of attention scores x [rows, n_heads, kv_len] over the positions that each of the
    last rows of kv_len attends to, and 0 for the others."""
    rows, heads, kv_len = x.shape
    _check_rows(rows, kv_len)
    none = np.zeros((0, 8))  # any keys and values: only the shape of the scores matters
    cache = _new_cache(bench, none, none, 1, "f32", kv_len)
    output = _traced(bench, np.zeros((rows, heads * 8)), cache, 1.0, window)
    scores, y = _score_matrix(bench, x, np.nan, cache), _score_matrix(bench, x[..., :0], 0.0, cache)
    bench.run_alone("softmax", output, position=kv_len - rows, fuse=False, x=scores, y=y)
    return bench.device.read(y).reshape(rows, heads, -1)[..., :kv_len].copy()


def _check_rows(rows: int, kv_len: int) -> None:
    """Raises ShaderError where rows are not the last of so many positions."""
    if rows > kv_len:
        raise ShaderError(f"there are {rows} rows, which cannot be the last of {kv_len} positions")


@by_hand
def run_weighted_sum(
    bench: Bench,
    p: Annotated[Array, "rows, n_heads, kv_len"],
    v: Annotated[Array, "kv_len, n_kv_heads * head_dim"],
    *,
    n_kv_heads: int,
    window: int = 0,
    kv_dtype: KVDtype = "f32",
    **options: Unpack[Options],
) -> Annotated[Floats, "rows, n_heads * head_dim"]:
    """The sum of p [rows, n_heads, kv_len] times v [kv_len, n_kv_heads * head_dim] over the
    positions that each of the last rows attends to: [rows, n_heads * head_dim]."""
    rows, n_heads, kv_len = p.shape
    _check_rows(rows, kv_len)
    if n_heads % n_kv_heads:
        raise ShaderError(f"{n_heads} heads of p cannot share {n_kv_heads} KV heads")
    cache = _new_cache(bench, v, v, n_kv_heads, kv_dtype, kv_len)
    width = n_heads * cache.layers[0].head_dim
    output = _traced(bench, np.zeros((rows, width)), cache, 1.0, window)
    y = unwritten(bench.device, rows, width)
    probabilities = _score_matrix(bench, p, np.nan, cache)
    buffers = {"probabilities": probabilities, "y": y}
    bench.run_alone("weighted_sum", output, position=kv_len - rows, fuse=False, **buffers)
    return from_rows(bench.device.read(y), rows, width).copy()


@by_hand
def run_kv_write(
    bench: Bench,
    k: Annotated[Array, "rows, k_width"],
    v: Annotated[Array, "rows, v_width"],
    *,
    n_kv_heads: int,
    position: int = 0,
    kv_dtype: KVDtype = "f32",
    latent: bool = False,
    **options: Unpack[Options],
) -> tuple[
    Annotated[Array, "n_kv_heads, slots, head_dim"], Annotated[Array, "n_kv_heads, slots, head_dim"]
]:
    """The cache after k and v [rows, n_kv_heads * head_dim] were written from `position` on: keys
    and values [n_kv_heads, slots, head_dim] in float32 or float16, NaN where nothing was. latent:
    both are k and v side by side."""
    if not latent and k.shape != v.shape:
        raise ShaderError(f"k and v must be of one shape, not {list(k.shape)} and {list(v.shape)}")
    queries = np.concatenate([k, v], axis=1) if latent else k
    empty = queries[:0]
    cache = _new_cache(bench, empty, empty, n_kv_heads, kv_dtype, position + len(k), latent=latent)
    inputs = bench.input(np.zeros(queries.shape)), bench.input(k), bench.input(v)
    output = Attention(*inputs, cache.layers[0], scale=1.0)
    bench.run_alone("kv_write", output, position=position, fuse=False)
    return _read_cache(bench, cache)


@by_hand
def run_latent_write(
    bench: Bench,
    x: Annotated[Array, "rows, 2 * pairs + normed"],
    table: RopeTable,
    weight: Annotated[Array, "normed"],
    eps: float,
    *,
    position: int = 0,
    interleaved: bool = False,
    kv_dtype: KVDtype = "f32",
    **options: Unpack[Options],
) -> Annotated[Array, "1, slots, 2 * pairs + normed"]:
    """A latent cache, [1, slots, width], after x [rows, width] was written from `position` on: as
    many of its values as the table [positions, pairs, 2] rotates are rotated, and the others normed
    by the weight [width - 2 * pairs]."""
    cache = _new_cache(bench, x[:0], x[:0], 1, kv_dtype, position + len(x), latent=True)
    rotary = stored_rope(bench, table, position + len(x), interleaved)
    k, v = split(bench.input(x), rotary.rotary_dim, x.shape[1] - rotary.rotary_dim)
    k, v = Rotate(k, rotary, rotary.rotary_dim), RMSNorm(v, bench.weight(weight), eps)
    output = Attention(bench.input(np.zeros(x.shape)), k, v, cache.layers[0], scale=1.0)
    bench.run_alone("latent_write", output, position=position)
    return _read_cache(bench, cache)[0]


@by_hand
def run_rope_kv_write(
    bench: Bench,
    x: Annotated[Array, "rows, (n_heads + 2 * n_kv_heads) * head_dim"],
    table: RopeTable,
    *,
    n_heads: int,
    n_kv_heads: int,
    position: int = 0,
    interleaved: bool = False,
    norms: Norms = None,
    kv_dtype: KVDtype = "f32",
    **options: Unpack[Options],
) -> tuple[
    Annotated[Floats, "rows, n_heads * head_dim"],
    Annotated[Array, "n_kv_heads, slots, head_dim"],
    Annotated[Array, "n_kv_heads, slots, head_dim"],
]:
    """All from a projection x [rows, (n_heads + 2 n_kv_heads) * head_dim] of queries, keys and
    values to attention, in one kernel: the queries normed and rotated, and the cache (see kv_write)
    with keys likewise and values written. norms: (q weight, k weight, eps) of heads, where the
    device's limits allow nine storage buffers; table [positions, pairs, 2]: as in `rope`."""
    if norms is not None and bench.device.limits.storage_buffers < 9:
        raise ShaderError("rope_kv_write with norms needs nine storage buffers: use rope_attention")
    head_dim = x.shape[1] // (n_heads + 2 * n_kv_heads)
    check_rotated(table, head_dim)
    _check_groups(n_heads, n_kv_heads)
    empty = np.zeros((0, n_kv_heads * head_dim))
    cache = _new_cache(bench, empty, empty, n_kv_heads, kv_dtype, position + len(x))
    rotary = stored_rope(bench, table, position + len(x), interleaved)
    heads = _rotated_heads(bench, x, rotary, cache.layers[0], n_heads, norms)
    output = Attention(*heads, cache.layers[0], scale=1.0)
    y = unwritten(bench.device, len(x), n_heads * head_dim)
    # Alone, one row has no such kernel.
    bench.run_alone("rope_kv_write", output, position=position, plan_rows=2, y=y)
    queries = from_rows(bench.device.read(y), len(x), n_heads * head_dim).copy()
    return queries, *_read_cache(bench, cache)


def _check_groups(n_heads: int, n_kv_heads: int) -> None:
    """Raises ShaderError where not as many heads of queries share each KV head."""
    if n_heads % n_kv_heads:
        raise ShaderError(f"{n_heads} heads of queries cannot share {n_kv_heads} KV heads")


@by_hand
def run_rope_attention(
    bench: Bench,
    x: Annotated[Array, "rows, width"],
    table: Annotated[Array | None, "positions, pairs, 2"],
    k: Annotated[Array, "past, n_kv_heads * head_dim"],
    v: Annotated[Array, "past, n_kv_heads * head_dim"],
    *,
    n_heads: int,
    n_kv_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    interleaved: bool = False,
    norms: Norms = None,
    v_norm: Annotated[Array | None, "v_norm_width"] = None,
    rotate_first: bool = False,
    kv_dtype: KVDtype = "f32",
    **options: Unpack[Options],
) -> tuple[
    Annotated[Floats, "rows, n_heads * head_dim"],
    Annotated[Array, "n_kv_heads, slots, head_dim"],
    Annotated[Array, "n_kv_heads, slots, head_dim"],
]:
    """All from a projection x (see rope_kv_write) to the output of attention, [rows, n_heads *
    head_dim], and the cache after it. k and v [past, n_kv_heads * head_dim] are in the cache
    already, and x follows them. Without values in x they are the keys before their norm; without
    keys too, k and v have those of x's rows. norms: (q weight, k weight, eps), of heads, or of all
    heads of a row. v_norm: the weight of a norm of values, beside norms; rotate_first: norms are of
    what was rotated. One row is what attention does by itself; more rows go through rope_kv_write,
    or, where nothing is rotated (table None) or bindings are too few for that, through a kernel for
    each step."""
    head_dim = k.shape[1] // n_kv_heads
    _check_groups(n_heads, n_kv_heads)
    if x.shape[1] not in [(n_heads + parts * n_kv_heads) * head_dim for parts in range(3)]:
        raise ShaderError(
            f"x must be [rows, (n_heads + 2 * n_kv_heads) * head_dim], or have fewer keys and "
            f"values, with heads of {head_dim} as in k, not {list(x.shape)}"
        )
    if table is not None:
        check_rotated(table, head_dim)
    kv_parts = (x.shape[1] * n_kv_heads // k.shape[1] - n_heads) // n_kv_heads
    past = len(k) if kv_parts else len(k) - len(x)
    if past < 0:
        raise ShaderError(f"k and v must have the rows of x, {len(x)} or more, not {len(k)}")
    cache = _new_cache(bench, k, v, n_kv_heads, kv_dtype, past + len(x))
    rotary = None if table is None else stored_rope(bench, table, past + len(x), interleaved)
    layer = cache.layers[0]
    heads = _rotated_heads(bench, x, rotary, layer, n_heads, norms, v_norm, rotate_first)
    output = Attention(*heads, layer, scale=scale, window=window, softcap=softcap)
    return bench.run(output, position=past), *_read_cache(bench, cache)


def _rotated_heads(
    bench: Bench,
    x: Array,
    rotary: Rope | None,
    layer: LayerCache,
    n_heads: int,
    norms: tuple[Array, Array, float] | None,
    v_norm: Array | None = None,
    rotate_first: bool = False,
) -> tuple[Value, Value | None, Value | None]:
    """Queries, keys and values of a projection x, which may lack values, or keys too; heads perhaps
    normed, those of queries and keys perhaps rotated, before that or after."""
    q_width, kv_width = n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim
    parts = (x.shape[1] - q_width) // kv_width
    q, *kv = split(bench.input(x), q_width, *[kv_width] * parts)
    k, v = (kv[0], kv[-1]) if kv else (None, None)
    for rotates in (rotate_first, not rotate_first):
        if rotates and rotary is not None:
            q = Rotate(q, rotary, layer.head_dim)
            k = k and Rotate(k, rotary, layer.head_dim)
        if not rotates and norms is not None:
            q = RMSNorm(q, bench.weight(norms[0]), norms[2])
            k = k and RMSNorm(k, bench.weight(norms[1]), norms[2])
    if v and norms is not None and v_norm is not None:
        v = RMSNorm(v, bench.weight(v_norm), norms[2])
    return q, k, v


def _traced(
    bench: Bench, q: Array, cache: KVCache, scale: float, window: int, softcap: float = 0.0
) -> Value:
    """Attention of which one kernel will run, with what it needs in the cache already."""
    layer = cache.layers[0]
    unused = np.zeros((len(q), layer.n_kv_heads * layer.head_dim))
    inputs = bench.input(q), bench.input(unused), bench.input(unused)
    return Attention(*inputs, layer, scale=scale, window=window, softcap=softcap)


def _score_matrix(bench: Bench, values: Array, fill: float, cache: KVCache) -> Buffer:
    """The score matrix [rows, heads, positions of the cache], with `fill` beyond the values."""
    rows, heads, positions = values.shape
    padded = np.full((rows, heads, cache.layers[0].slots), fill, np.float32)
    padded[..., :positions] = values
    return bench.device.upload(padded, label="scores")


def _new_cache(
    bench: Bench,
    k: Array,
    v: Array,
    n_kv_heads: int,
    dtype: str,
    positions: int,
    *,
    latent: bool = False,
    others: Sequence[tuple[Array, Array]] = (),
) -> KVCache:
    """A cache that holds k and v [up to positions, n_kv_heads * head_dim], and NaN after them.
    latent: k is v. others: of as many more sequences."""
    if k.ndim != 2 or k.shape != v.shape or k.shape[1] % n_kv_heads:
        raise ShaderError(
            f"k and v must be [kv_len, {n_kv_heads} * head_dim], "
            f"not {list(k.shape)} and {list(v.shape)}"
        )
    head_dim = k.shape[1] // n_kv_heads
    if head_dim % 8:
        raise ShaderError(f"head_dim must be a multiple of 8, not {head_dim}")
    shape = KVShape(n_kv_heads, head_dim, latent)
    parts = [(k, v), *others]
    cache = KVCache(bench.device, [shape], positions, sequences=len(parts), dtype=dtype)
    layer = cache.layers[0]
    for buffer, of_each in zip((layer.keys, layer.values), zip(*parts, strict=True), strict=True):
        stored = np.full((len(parts), layer.slots // len(parts), n_kv_heads, head_dim), np.nan)
        for own, part in zip(stored, of_each, strict=True):
            own[: len(part)] = part.reshape(len(part), n_kv_heads, head_dim)
        stored = stored.reshape(layer.slots, n_kv_heads, head_dim)
        bench.device.write(buffer, to_kv(stored, dtype))
    return cache


def _read_cache(bench: Bench, cache: KVCache) -> tuple[Array, Array]:
    layer = cache.layers[0]
    keys, values = (
        from_kv(
            bench.device.read(buffer, np.uint8), layer.n_kv_heads, layer.head_dim, layer.dtype
        ).swapaxes(0, 1)
        for buffer in (layer.keys, layer.values)
    )
    return keys, values


# Cases


def cases() -> Iterator[Case]:
    for kernel, (function, rows_of, shapes) in _ATTENTION.items():
        for dtype, shape, rows in product(KV_DTYPES, shapes, rows_of):
            run = partial(function, shape=shape, rows=rows, dtype=dtype)
            yield Case(kernel, f"{dtype}, {rows} rows, {shape}", run)
    for dtype, shape in product(("f16", "q8"), _OF_MATRICES):
        run = partial(_attend, run_attention_matrix, shape=shape, rows=150, dtype=dtype)
        # Exponentials are rounded to f16.
        yield Case("attention_matrix", f"{dtype}, 150 rows, {shape}", run, most=1e-6)
    run = partial(_attend, run_attention_tiled, shape=_LONG, rows=9, dtype="f16")
    yield Case("attention_tiled", f"f16, 9 rows, {_LONG}", run)


@dataclass(frozen=True)
class _Shape:
    """group query heads share each KV head; the last row is at kv_len - 1; scores may be capped."""

    n_kv_heads: int
    group: int
    head_dim: int
    kv_len: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False  # for functions that take them
    latent: int = 0  # so many dimensions of a key are k, the others v; values are the keys
    row_norms: bool = False  # norms of heads, for functions that take them, are of whole rows

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        window += f", cap {self.softcap}" if self.softcap else ""
        window += ", sinks" if self.sinks else ""
        window += f", latent {self.latent}" if self.latent else ""
        window += ", norms of rows" if self.row_norms else ""
        heads = f"{self.n_heads}/{self.n_kv_heads} heads of {self.head_dim}"
        return f"{heads}, context {self.kv_len}{window}"

    @property
    def n_heads(self) -> int:
        return self.n_kv_heads * self.group

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    def rows(self, rows: int) -> slice:
        """The positions of the last rows."""
        return slice(self.kv_len - rows, self.kv_len)

    def seen(self, rows: int) -> Array:
        """[rows, 1, kv_len]: which positions they attend to."""
        return visible(rows, self.kv_len, self.window)[:, None, :]

    def qkv(self, bench: Bench, rows: int) -> tuple[Array, Array, Array]:
        q = bench.random(rows, self.n_heads * self.head_dim)
        k, v = bench.random(self.kv_len, self.kv_width), bench.random(self.kv_len, self.kv_width)
        return (q, k[:, : self.latent], v[:, self.latent :]) if self.latent else (q, k, v)

    def attention(self, q: Array, k: Array, v: Array, sinks: Array | None = None) -> Array:
        """Returns the attention of this shape in float64."""
        own = self.n_heads, self.scale, self.window, self.softcap
        return attention(q, k, v, *own, sinks)

    def joined(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Keys and values of what attention is given."""
        keys = np.concatenate([k, v], axis=1)
        return (keys, keys) if self.latent else (k, v)

    def options(self, dtype: str) -> dict[str, Any]:
        """Returns the keyword arguments that every function of attention takes for this shape."""
        return {"n_kv_heads": self.n_kv_heads, "window": self.window, "kv_dtype": dtype}


_SHAPES = (
    _Shape(2, 1, 8, 259),
    _Shape(1, 3, 64, 301, window=33, sinks=True),
    _Shape(2, 8, 40, 97),
    _Shape(1, 4, 128, 531),
    _Shape(1, 2, 256, 81, softcap=0.7),
)
_ROW_NORMS = _Shape(2, 4, 64, 97, row_norms=True)
_LATENT = (_Shape(1, 3, 48, 301, latent=16), _Shape(1, 2, 576, 75, latent=64))


def _attend(
    function: Callable[..., Array], bench: Bench, shape: _Shape, rows: int, dtype: str
) -> Outcome:
    q, *cached = shape.qkv(bench, rows)
    joined = shape.joined(*cached)
    keys, values = (kept(part, shape.head_dim, dtype) for part in joined)  # not rounded again
    sinks = bench.random(shape.n_heads) if shape.sinks else None
    options = shape.options(dtype) | {"softcap": shape.softcap, "sinks": sinks}
    k, v = (keys[:, : shape.latent], keys[:, shape.latent :]) if shape.latent else (keys, values)
    y = function(bench, q, k, v, scale=shape.scale, latent=shape.latent > 0, **options)
    return y, shape.attention(q, keys, values, sinks)


def _prompts(bench: Bench, shape: _Shape, rows: int, dtype: str) -> Outcome:
    """Attention of five sequences: the last rows of a context, a row alone, all rows of a short
    context, and tiles that are full or nearly full."""
    prompts: list[Prompt] = []
    expected: list[Array] = []
    sinks = bench.random(shape.n_heads) if shape.sinks else None
    for own, kv_len in ((rows, shape.kv_len), (1, 40), (5, 5), (32, 66), (33, 70)):
        of = replace(shape, kv_len=kv_len)
        q, *cached = of.qkv(bench, own)
        keys, values = (kept(part, of.head_dim, dtype) for part in of.joined(*cached))
        k, v = (keys[:, : of.latent], keys[:, of.latent :]) if of.latent else (keys, values)
        prompts.append((q, k, v))
        expected.append(of.attention(q, keys, values, sinks))
    options = shape.options(dtype) | {"softcap": shape.softcap, "sinks": sinks}
    latent = shape.latent > 0
    y = run_attention_prompts(bench, prompts, scale=shape.scale, latent=latent, **options)
    return y, np.concatenate(expected)


def _scores(bench: Bench, shape: _Shape, rows: int, dtype: str) -> Outcome:
    q, *cached = shape.qkv(bench, rows)
    k, _ = shape.joined(*cached)
    options = shape.options(dtype) | {"softcap": shape.softcap}
    y = run_attention_scores(bench, q, k, scale=shape.scale, **options)
    stored = kept(k, shape.head_dim, dtype)
    expected = attention_scores(q, stored, shape.n_heads, shape.scale, shape.softcap)
    return np.where(shape.seen(rows), y, 0), np.where(shape.seen(rows), expected, 0)


def _softmax(bench: Bench, shape: _Shape, rows: int, dtype: str) -> Outcome:
    scores = 4 * bench.random(rows, shape.n_heads, shape.kv_len)
    scores = np.where(shape.seen(rows), scores, -np.inf)
    return run_attention_softmax(bench, scores, window=shape.window), softmax(scores)


def _weighted_sum(bench: Bench, shape: _Shape, rows: int, dtype: str) -> Outcome:
    scores = bench.random(rows, shape.n_heads, shape.kv_len)
    p = softmax(np.where(shape.seen(rows), scores, -np.inf))
    v = bench.random(shape.kv_len, shape.kv_width)
    y = run_weighted_sum(bench, p, v, **shape.options(dtype))
    stored = kept(v, shape.head_dim, dtype)
    values = stored.reshape(shape.kv_len, shape.n_kv_heads, shape.head_dim)
    return y, weighted_sum(p, values)


def _kv_write(bench: Bench, shape: _Shape, rows: int, dtype: str) -> Outcome:
    (_, *cached), at = shape.qkv(bench, rows), shape.rows(rows)
    k, v = (part[:rows] for part in cached)
    own: dict[str, Any] = {"position": at.start, "kv_dtype": dtype, "latent": shape.latent > 0}
    keys, values = run_kv_write(bench, k, v, n_kv_heads=shape.n_kv_heads, **own)
    y = np.concatenate([_of_positions(keys, at), _of_positions(values, at)])
    return _cached(y, np.concatenate(shape.joined(k, v)), shape.head_dim, dtype)


def _latent_write(bench: Bench, shape: _Shape, rows: int, dtype: str) -> Outcome:
    at, rotary_dim, interleaved = shape.rows(rows), shape.latent, shape.group % 2 == 1
    x, weight = bench.random(rows, shape.head_dim), bench.random(shape.head_dim - rotary_dim)
    own = frequencies(rotary_dim)
    table = rope_table(own, shape.kv_len)
    options: dict[str, Any] = {"position": at.start, "interleaved": interleaved}
    y = run_latent_write(bench, x, table, weight, EPS, kv_dtype=dtype, **options)
    positions = np.arange(at.start, at.stop)
    k = rope(x[:, :rotary_dim], positions, own, rotary_dim, interleaved)
    expected = np.concatenate([k, rmsnorm(x[:, rotary_dim:], weight, EPS)], axis=1)
    return _cached(_of_positions(y, at), expected, shape.head_dim, dtype)


def _rope_kv_write(bench: Bench, shape: _Shape, rows: int, dtype: str) -> Outcome:
    normed = shape.group > 1 and bench.device.limits.storage_buffers > 8
    at, heads = shape.rows(rows), _Heads(bench, shape, rows, normed)
    y, keys, values = run_rope_kv_write(
        bench, heads.x, heads.table, position=at.start, kv_dtype=dtype, **heads.options
    )
    k, v = heads.cached(keys, values, dtype)
    result, expected = zip((y, heads.q), k, v, strict=True)
    return np.concatenate(result, axis=1), np.concatenate(expected, axis=1)


def _rope_attention(bench: Bench, shape: _Shape, rows: int, dtype: str) -> Outcome:
    at, heads = shape.rows(rows), _Heads(bench, shape, rows, normed=shape.group > 1)
    past_k, past_v = bench.random(at.start, shape.kv_width), bench.random(at.start, shape.kv_width)
    own: dict[str, Any] = shape.options(dtype) | heads.options
    own |= {"scale": shape.scale, "softcap": shape.softcap}
    y, keys, values = run_rope_attention(bench, heads.x, heads.table, past_k, past_v, **own)
    k, v = heads.cached(keys, values, dtype)
    cached = [_of_positions(part, slice(0, at.stop)) for part in (keys, values)]
    attend = partial(shape.attention, heads.q)
    expected = nearest_output(y, attend, cached, (heads.k, heads.v), dtype)
    found, wanted = zip((y, expected), k, v, strict=True)
    return np.concatenate(found, axis=1), np.concatenate(wanted, axis=1)


class _Heads:
    """A projection x of rows at the end of a context, and its queries, keys and values as they
    should become. Shapes with odd groups are interleaved."""

    def __init__(self, bench: Bench, shape: _Shape, rows: int, normed: bool) -> None:
        self.shape, self.at = shape, shape.rows(rows)
        d, q_width = shape.head_dim, shape.n_heads * shape.head_dim
        interleaved = shape.group % 2 == 1
        self.x = bench.random(rows, q_width + 2 * shape.kv_width)
        widths = (q_width, shape.kv_width) if shape.row_norms else (d, d)
        q_norm, k_norm = (bench.random(width) for width in widths)
        self.table = rope_table(frequencies(d), shape.kv_len)
        self.options: dict[str, Any] = {
            "n_heads": shape.n_heads,
            "n_kv_heads": shape.n_kv_heads,
            "interleaved": interleaved,
            "norms": (q_norm, k_norm, EPS) if normed else None,
        }
        q, k, self.v = np.split(self.x, [q_width, q_width + shape.kv_width], axis=1)
        if normed:
            q, k = rmsnorm(q, q_norm, EPS), rmsnorm(k, k_norm, EPS)
        positions = np.arange(self.at.start, self.at.stop)
        self.q, self.k = (rope(part, positions, frequencies(d), d, interleaved) for part in (q, k))

    def cached(self, keys: Array, values: Array, dtype: str) -> tuple[Outcome, Outcome]:
        """The keys and the values that were cached, each with those that should be."""
        d = self.shape.head_dim
        found = _of_positions(keys, self.at), _of_positions(values, self.at)
        return _cached(found[0], self.k, d, dtype), _cached(found[1], self.v, d, dtype)


def _cached(found: Array, exact: Array, head_dim: int, dtype: str) -> Outcome:
    """Returns what was cached, and what should be, where f32 arithmetic may turn a rounding the
    other way."""
    right = abs(found - exact) <= kv_step(exact, head_dim, dtype)
    return found, np.where(right, found, exact)


def kv_step(values: Array, head_dim: int, dtype: str) -> Array:
    """How far from keys or values [positions, n_kv_heads * head_dim] a cache may be: a step of f16,
    half a step of q8, and the rounding of f32."""
    near = np.full(values.shape, 1e-6 * abs(values).max())
    if dtype == "f16":  # WGSL leaves open which way packing rounds, and may flush subnormals
        subnormal = abs(values) < 2**-14
        near += np.where(subnormal, 2**-14, np.spacing(abs(values).astype(np.float16)))
    if dtype == "q8":
        blocks = abs(values).reshape(-1, kv_block(head_dim))
        near += np.repeat(blocks.max(axis=1) / 254, blocks.shape[1]).reshape(values.shape)
    return near


def nearest_output(
    y: Array,
    attend: Callable[[Array, Array], Array],
    cached: Sequence[Array],
    own: Sequence[Array],
    dtype: str,
) -> Array:
    """Returns the result nearest to y of those that attention may give with these cached keys and
    values. own: the keys and values of the rows, as they were before they were cached."""
    options = [[part] for part in cached]
    if dtype == "f16" and len(y) == 1:
        # One kernel packs and attends, and a compiler may drop packing that is undone at once: of
        # all values, or of the second of each pair, as Mesa 25's does.
        for parts, exact in zip(options, own, strict=True):
            before, packed = np.split(parts[0], [-1])
            second = np.where(np.arange(exact.shape[1]) % 2, exact, packed)
            parts += [np.concatenate([before, last]) for last in (exact, second)]
    outputs = [attend(*parts) for parts in product(*options)]
    return min(outputs, key=lambda output: nmse(y, output))


def _of_positions(cached: Array, at: slice) -> Array:
    """[n_kv_heads, slots, head_dim] of a cache -> [positions, n_kv_heads * head_dim]."""
    return cached[:, at].swapaxes(0, 1).reshape(at.stop - at.start, -1)


_ALL = _SHAPES + _LATENT
_OF_MATRICES = (
    _Shape(1, 3, 64, 301, window=33, sinks=True),
    _Shape(1, 2, 80, 173),
    _Shape(2, 2, 128, 531),
    _Shape(1, 2, 256, 181, softcap=0.7),
    _Shape(1, 2, 512, 181),
    _LATENT[0],
    replace(_LATENT[1], kv_len=175),
)
_LONG = _Shape(1, 2, 32, 60_007)  # where Mesa's software adapter would end attention_tiled's loops
_ATTENTION: dict[str, tuple[Callable[..., Outcome], tuple[int, ...], tuple[_Shape, ...]]] = {
    "attention_scores": (_scores, (3,), _ALL),
    "softmax": (_softmax, (3,), _SHAPES),
    "weighted_sum": (_weighted_sum, (3,), _ALL),
    "kv_write": (_kv_write, (3,), _ALL),
    "latent_write": (_latent_write, (1, 3), _LATENT),
    "rope_kv_write": (_rope_kv_write, (3,), _SHAPES),
    "rope_attention": (_rope_attention, (1, 3), (*_SHAPES, _ROW_NORMS)),
    "attention": (partial(_attend, run_attention), (1, 5), _ALL),
    "attention_tiled": (partial(_attend, run_attention_tiled), (70,), _ALL),
    "attention_prompts": (_prompts, (47,), _ALL),
}
