"""References and cases of operations on each value by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Annotated, Unpack

import numpy as np

from infer.kernels.checks.arrays import Array
from infer.kernels.checks.bench import Bench, Case, Outcome
from infer.kernels.checks.by_hand import by_hand
from infer.kernels.checks.forward import Floats, Options
from infer.kernels.lowering.graph import Value, split
from infer.kernels.ops.elementwise import (
    XIELU,
    Activation,
    Clip,
    PositionScale,
    Scale,
    SigmoidGate,
    Softcap,
)


def silu(x: Array) -> Array:
    x = x.astype(np.float64)
    return x / (1.0 + np.exp(-x))


def gelu(x: Array) -> Array:
    x = x.astype(np.float64)
    result: Array = x * (1.0 + _erf(x / math.sqrt(2.0))) / 2.0
    return result


_erf = np.vectorize(math.erf, otypes=[np.float64])  # numpy has none


def gelu_tanh(x: Array) -> Array:
    x = x.astype(np.float64)
    return x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))) / 2.0


def relu(x: Array) -> Array:
    result: Array = np.maximum(x.astype(np.float64), 0.0)
    return result


def relu2(x: Array) -> Array:
    return relu(x) ** 2


ACTIVATIONS = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": relu2,
}


def clamped_swiglu(gate: Array, up: Array) -> Array:
    """The gated activation of gpt-oss."""
    gate, up = np.minimum(gate.astype(np.float64), 7.0), np.clip(up.astype(np.float64), -7.0, 7.0)
    result: Array = gate / (1.0 + np.exp(-1.702 * gate)) * (up + 1.0)
    return result


def softcap(x: Array, cap: float) -> Array:
    result: Array = cap * np.tanh(x.astype(np.float64) / cap)
    return result


def clip(x: Array, limit: float) -> Array:
    result: Array = np.clip(x.astype(np.float64), -limit, limit)
    return result


def xielu(x: Array, shape: Array) -> Array:
    """shape: alpha_p, alpha_n, beta, eps (Huang & Schlag 2024)."""
    x, (alpha_p, alpha_n, beta, eps) = x.astype(np.float64), shape.astype(np.float64)
    above = np.log1p(np.exp(alpha_p)) * x**2
    below = (beta + np.log1p(np.exp(alpha_n))) * (np.expm1(np.minimum(x, eps)) - x)
    result: Array = np.where(x > 0, above, below) + beta * x
    return result


def position_scale(x: Array, positions: Array, beta: float, interval: int) -> Array:
    """x [rows, width], positions [rows]: times 1 + beta log(1 + floor(position / interval))."""
    scale = 1.0 + beta * np.log1p(positions // interval)
    result: Array = x.astype(np.float64) * scale[:, None]
    return result


Function = Annotated[str, tuple(ACTIVATIONS)]
Rows = Annotated[Array, "rows, width"]


@by_hand
def run_activation(
    bench: Bench, x: Rows, function: Function, *, gated: bool = False, **options: Unpack[Options]
) -> Annotated[Floats, "rows, n"]:
    """A function of each value of x [rows, width]: silu, gelu, gelu_tanh, relu or relu2. gated: x
    is [rows, 2 * n], and the function of its left half is multiplied by its right half."""
    value = bench.input(x)
    if not gated:
        return bench.run(Activation(value, function))
    gate, up = halves(value)
    return bench.run(Activation(gate, function) * up)


def halves(x: Value) -> tuple[Value, ...]:
    """Returns the left and the right half of x. Raises ValueError for an odd width."""
    if x.width % 2:
        raise ValueError(f"what is gated has two halves of one width, but {x.width} is odd")
    return split(x, x.width // 2, x.width // 2)


@by_hand
def run_silu(bench: Bench, x: Rows, **options: Unpack[Options]) -> Annotated[Floats, "rows, width"]:
    """x * sigmoid(x) of each value of x [rows, width]."""
    return run_activation(bench, x, "silu")


@by_hand
def run_softcap(
    bench: Bench, x: Rows, cap: float, **options: Unpack[Options]
) -> Annotated[Floats, "rows, width"]:
    """cap * tanh(x / cap) of each value of x [rows, width]; cap is above 0."""
    if not cap > 0:
        raise ValueError(f"cap must be above 0, not {cap}")
    return bench.run(Softcap(bench.input(x), cap))


@by_hand
def run_clip(
    bench: Bench, x: Rows, limit: float, **options: Unpack[Options]
) -> Annotated[Floats, "rows, width"]:
    """Each value of x [rows, width], between -limit and limit; limit is 0 or above."""
    if not limit >= 0:
        raise ValueError(f"limit must be 0 or above, not {limit}")
    return bench.run(Clip(bench.input(x), limit))


@by_hand
def run_xielu(
    bench: Bench, x: Rows, shape: Annotated[Array, "4"], **options: Unpack[Options]
) -> Annotated[Floats, "rows, width"]:
    """xIELU of each value of x [rows, width] (Huang & Schlag 2024); shape [4]: alpha_p, alpha_n,
    beta, eps."""
    return bench.run(XIELU(bench.input(x), bench.weight(shape)))


@by_hand
def run_scale(
    bench: Bench, x: Rows, factor: Annotated[Array | float, "1"], **options: Unpack[Options]
) -> Annotated[Floats, "rows, width"]:
    """x [rows, width] times a number."""
    return bench.run(Scale(bench.input(x), bench.weight(np.asarray(factor))))


@by_hand
def run_position_scale(
    bench: Bench,
    x: Rows,
    beta: float,
    interval: int,
    *,
    position: int = 0,
    **options: Unpack[Options],
) -> Annotated[Floats, "rows, width"]:
    """Row i of x [rows, width] times 1 + beta log(1 + floor((position + i) / interval))."""
    return bench.run(PositionScale(bench.input(x), beta, interval), position=position)


@by_hand
def run_elementwise_add(
    bench: Bench, a: Rows, b: Rows, **options: Unpack[Options]
) -> Annotated[Floats, "rows, width"]:
    """a + b, both [rows, width]."""
    return bench.run(bench.input(a) + bench.input(b))


@by_hand
def run_elementwise_mul(
    bench: Bench, a: Rows, b: Rows, **options: Unpack[Options]
) -> Annotated[Floats, "rows, width"]:
    """a * b, value by value, both [rows, width]."""
    return bench.run(bench.input(a) * bench.input(b))


@by_hand
def run_sigmoid_gate(
    bench: Bench, x: Rows, gate: Annotated[Array, "rows, gates"], **options: Unpack[Options]
) -> Annotated[Floats, "rows, width"]:
    """x [rows, width] * sigmoid(gate); gate [rows, gates], where gates is 1 or width."""
    return bench.run(SigmoidGate(bench.input(x), bench.input(gate)))


def cases() -> Iterator[Case]:
    for function, gated in product(ACTIVATIONS, (False, True)):
        run = partial(_activation, function=function, gated=gated)
        yield Case("activation", f"{function}, {'gated' if gated else 'plain'}", run)
    yield Case("softcap", "", _softcap)
    yield Case("clip", "", _clip)
    yield Case("xielu", "", _xielu)
    yield Case("scale", "", _scale)
    yield Case("position_scale", "", _position_scale)
    yield Case("elementwise_add", "", _add)
    yield Case("elementwise_mul", "", _mul)
    for each in (False, True):
        name = "a gate each" if each else "a gate for all"
        yield Case("sigmoid_gate", name, partial(_sigmoid_gate, each=each))


def _activation(bench: Bench, function: str, gated: bool) -> Outcome:
    x = 4 * bench.random(3, 2 * 67 if gated else 67)
    expected = ACTIVATIONS[function](x[:, :67])
    y = run_activation(bench, x, function, gated=gated)
    return y, expected * x[:, 67:] if gated else expected


def _softcap(bench: Bench) -> Outcome:
    x = 4 * bench.random(3, 67)
    return run_softcap(bench, x, 5.0), softcap(x, 5.0)


def _clip(bench: Bench) -> Outcome:
    x = 4 * bench.random(3, 67)
    return run_clip(bench, x, 2.5), clip(x, 2.5)


def _xielu(bench: Bench) -> Outcome:
    x, shape = 4 * bench.random(3, 67), np.array([0.3, -0.8, 0.5, -1e-6], np.float32)
    return run_xielu(bench, x, shape), xielu(x, shape)


def _scale(bench: Bench) -> Outcome:
    x, factor = bench.random(3, 67), np.array([0.7], np.float32)
    return run_scale(bench, x, factor), factor.astype(np.float64) * x


def _position_scale(bench: Bench) -> Outcome:
    x = bench.random(3, 67)
    y = run_position_scale(bench, x, 0.1, 64, position=127)
    return y, position_scale(x, np.arange(127, 130), 0.1, 64)


def _add(bench: Bench) -> Outcome:
    a, b = bench.random(3, 67), bench.random(3, 67)
    return run_elementwise_add(bench, a, b), a.astype(np.float64) + b


def _mul(bench: Bench) -> Outcome:
    a, b = bench.random(3, 67), bench.random(3, 67)
    return run_elementwise_mul(bench, a, b), a.astype(np.float64) * b


def _sigmoid_gate(bench: Bench, each: bool) -> Outcome:
    x, gate = bench.random(3, 67), bench.random(3, 67 if each else 1)
    y = run_sigmoid_gate(bench, x, gate)
    return y, x / (1 + np.exp(-gate.astype(np.float64)))
