"""The kernels by hand: numpy arrays in, numpy arrays out, one op each.

    >>> from infer.kernels import Device, functions
    >>> with Device.open() as device:
    ...     y = functions.rmsnorm(device, x, weight, eps=1e-6)

Every function traces its op and lowers it as a model's forward is lowered, so what runs is what the
engine runs. x is [rows, width] float; up to 8 rows go through the kernels of decode, more through
those of prefill. They allocate and wait, so they are for trying and testing, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from infer.kernels.arrays import Array, from_rows, to_gpu, to_rows
from infer.kernels.device import Buffer, Device
from infer.kernels.errors import ShaderError
from infer.kernels.kv_cache import KVCache
from infer.kernels.lower import MAX_VEC_ROWS, Arena, Lowering, StepKind
from infer.kernels.ops import Ops, Rope, Value
from infer.kernels.plan import Dispatch
from infer.kernels.record import run
from infer.kernels.step import pack_step
from infer.kernels.tuning import Tuning

P = ParamSpec("P")

__all__ = [
    "add",
    "attention",
    "embedding",
    "gated_linear",
    "linear",
    "mul",
    "rmsnorm",
    "rope",
    "rope_table",
    "silu",
]


class Bench:
    """One traced forward on a device, its buffers, and its kernels."""

    def __init__(
        self, device: Device, rows: int, *, fuse: bool = True, tuning: Tuning | None = None
    ) -> None:
        self.device, self.rows, self.fuse, self.tuning = device, rows, fuse, tuning
        self.ops = Ops()
        self.padded = rows if rows <= MAX_VEC_ROWS else -(-rows // 128) * 128

    def input(self, values: Array) -> Value:
        rows = to_rows(np.atleast_2d(values), self.padded)
        return self.ops.input(self.device.upload(rows), np.atleast_2d(values).shape[1])

    def lower(
        self, output: Value, tokens: NDArray[np.integer[Any]] | None = None, position: int = 0
    ) -> tuple[list[Dispatch], Buffer]:
        """The dispatches that compute `output`, and the buffer that it will be in."""
        ids = np.zeros(self.rows, np.int64) if tokens is None else tokens
        step = self.device.upload(pack_step(ids, position))
        stride = -(-output.width // 8) * 8
        unwritten = np.full(self.padded * stride, np.nan, np.float32)
        buffer = self.device.upload(unwritten)
        lowering = Lowering(
            self.device,
            self.ops,
            StepKind(self.rows),
            step,
            output=output,
            output_buffer=buffer,
            fuse=self.fuse,
            tuning=self.tuning,
        )
        plan = lowering.place(Arena(self.device))
        return [*plan.body, *plan.head], buffer

    def run(
        self, output: Value, tokens: NDArray[np.integer[Any]] | None = None, position: int = 0
    ) -> Array:
        """The values of `output`, [rows, width]."""
        dispatches, buffer = self.lower(output, tokens, position)
        run(self.device, dispatches, self.rows, position + self.rows)
        return from_rows(self.device.read(buffer), self.rows, output.width).copy()


def _scoped(function: Callable[P, Array]) -> Callable[P, Array]:
    """Frees, when the function returns, all GPU memory that it took."""

    @wraps(function)
    def scoped(*args: P.args, **kwargs: P.kwargs) -> Array:
        device = args[0]
        assert isinstance(device, Device)
        with device.scope():
            return function(*args, **kwargs)

    return scoped


def _rows(x: Array) -> int:
    if x.ndim != 2 or x.shape[0] < 1:
        raise ShaderError(f"x must be [rows, width] with at least one row, not {x.shape}")
    return int(x.shape[0])


def _one(device: Device, x: Array, op: Callable[[Bench, Value], Value], **options: Any) -> Array:
    bench = Bench(device, _rows(x), **options)
    return bench.run(op(bench, bench.input(x)))


@_scoped
def embedding(
    device: Device,
    ids: NDArray[np.integer[Any]],
    weight: Array,
    *,
    dtype: str = "f32",
    scale: float = 1.0,
) -> Array:
    """ids [rows] -> scale * weight[ids], [rows, width]; the weight is stored as `dtype`."""
    bench = Bench(device, len(ids))
    return bench.run(bench.ops.embedding(to_gpu(device, weight, dtype), scale), ids)


@_scoped
def rmsnorm(device: Device, x: Array, weight: Array, *, eps: float, **options: Any) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over each part of x as wide as the weight."""
    norm = to_gpu(device, weight)
    return _one(device, x, lambda b, v: b.ops.rmsnorm(v, norm, eps), **options)


@_scoped
def silu(device: Device, x: Array, **options: Any) -> Array:
    """x * sigmoid(x)."""
    return _one(device, x, lambda b, v: b.ops.silu(v), **options)


@_scoped
def add(device: Device, x: Array, other: Array, **options: Any) -> Array:
    """x + other."""
    return _one(device, x, lambda b, v: v + b.input(other), **options)


@_scoped
def mul(device: Device, x: Array, other: Array, **options: Any) -> Array:
    """x * other."""
    return _one(device, x, lambda b, v: v * b.input(other), **options)


@_scoped
def linear(
    device: Device,
    x: Array,
    weight: Array,
    *,
    dtype: str = "f32",
    bias: Array | None = None,
    residual: Array | None = None,
    norm: tuple[Array, float] | None = None,
    **options: Any,
) -> Array:
    """norm(x) W^T + bias + residual; weight [out, in], stored as `dtype`; norm (weight, eps)."""

    def op(bench: Bench, value: Value) -> Value:
        if norm is not None:
            value = bench.ops.rmsnorm(value, to_gpu(device, norm[0]), norm[1])
        bias_gpu = None if bias is None else to_gpu(device, bias)
        y = bench.ops.linear(value, to_gpu(device, weight, dtype), bias_gpu)
        return y if residual is None else bench.input(residual) + y

    return _one(device, x, op, **options)


@_scoped
def gated_linear(
    device: Device, x: Array, gate_up: Array, *, dtype: str = "f32", **options: Any
) -> Array:
    """silu(x G^T) * (x U^T), where gate_up [2 n, in] is G on top of U."""
    n = gate_up.shape[0] // 2

    def op(bench: Bench, value: Value) -> Value:
        both = bench.ops.linear(value, to_gpu(device, gate_up, dtype))
        gate, up = bench.ops.split(both, n, n)
        return bench.ops.silu(gate) * up

    return _one(device, x, op, **options)


def rope_table(frequencies: Array, positions: int, scale: float = 1.0) -> NDArray[np.float32]:
    """(cos, sin) of position * frequency, times scale: [positions, len(frequencies), 2]."""
    angle = np.arange(positions)[:, None] * np.asarray(frequencies, np.float64)
    return (scale * np.stack([np.cos(angle), np.sin(angle)], -1)).astype(np.float32)


@_scoped
def rope(
    device: Device,
    x: Array,
    *,
    position: int,
    frequencies: Array,
    head_dim: int,
    interleaved: bool = False,
    **options: Any,
) -> Array:
    """The heads of x [rows, heads * head_dim] turned by position, position + 1, … radians times
    frequencies [rotary_dim / 2]."""
    bench = Bench(device, _rows(x), **options)
    table = device.upload(rope_table(frequencies, position + bench.rows))
    rotary = Rope(table, 2 * len(frequencies), interleaved)
    return bench.run(bench.ops.rope(bench.input(x), rotary, head_dim), position=position)


@_scoped
def attention(
    device: Device,
    q: Array,
    k: Array,
    v: Array,
    *,
    n_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int = 0,
    kv_dtype: str = "f32",
    **options: Any,
) -> Array:
    """softmax(scale * q k^T) v, causal. q [rows, n_heads * head_dim] belongs to the last rows of
    k and v [kv_len, n_kv_heads * head_dim]; what comes before is written to the cache first."""
    rows, kv_len = _rows(q), _rows(k)
    cache = KVCache(device, 1, n_kv_heads, head_dim, kv_len, dtype=kv_dtype)
    done = kv_len - rows
    while done > 0:  # the past, in chunks of which only the writing matters
        past = slice(max(0, done - 512), done)
        unused = np.zeros((past.stop - past.start, q.shape[1]))
        _attend(device, (unused, k[past], v[past]), cache, past.start, scale, window, {})
        done = past.start
    last = slice(kv_len - rows, kv_len)
    return _attend(device, (q, k[last], v[last]), cache, last.start, scale, window, options)


def _attend(
    device: Device,
    qkv: tuple[Array, Array, Array],
    cache: KVCache,
    position: int,
    scale: float,
    window: int,
    options: dict[str, Any],
) -> Array:
    bench = Bench(device, qkv[0].shape[0], **options)
    q, k, v = map(bench.input, qkv)
    output = bench.ops.attention(q, k, v, cache.layers[0], scale=scale, window=window)
    return bench.run(output, position=position)
