"""Every kernel against its reference on one device: what `infer devices --check` runs.

Shapes are small and awkward: widths that are no multiple of what a kernel loads at once, contexts
that cross a page, rows that end in the middle of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from infer.kernels.checks import functions, reference
from infer.kernels.checks.arrays import Array, Codes, rounded
from infer.kernels.compiler.target import MAX_VEC_ROWS
from infer.kernels.errors import InferError
from infer.kernels.gpu.codes import NF4_PRODUCTS, TABLES
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.tensor import BLOCK, CODED, HALF, INTEGERS, QUANTIZED, SUPERBLOCK, Grouping
from infer.kernels.state.kv_cache import KV_DTYPES, kept, kv_block
from infer.kernels.state.sampler import INVALID_TOKEN

F32_LIMIT = 1e-10  # of arithmetic in f32, whatever the storage
EPS = 1e-6


@dataclass(frozen=True)
class CheckResult:
    """How one kernel did in one case.

    error is the normalised mean square error, of the sampler the share of wrong tokens; NaN where
    the kernel did not run, and message says why.
    """

    kernel: str
    case: str
    error: float
    limit: float
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


Outcome = tuple[Array, Array]  # what the kernel gave, what it should have given


@dataclass(frozen=True)
class Case:
    """One kernel in one case."""

    kernel: str
    name: str
    run: Callable[[Device, Inputs], Outcome]

    def check(self, device: Device) -> CheckResult:
        sampler = self.kernel == "sample"
        limit = 0.0 if sampler else F32_LIMIT
        try:
            y, expected = self.run(device, Inputs())
        except InferError as error:
            return CheckResult(self.kernel, self.name, math.nan, limit, str(error))
        wrong = float((y != expected).mean()) if sampler else reference.nmse(y, expected)
        return CheckResult(self.kernel, self.name, wrong, limit)


class Inputs:
    """Random f32 arrays of any shape: the same ones for a case every time."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape, np.float32)


def int8_rows(
    rng: np.random.Generator, rows: int, columns: int, *, many: bool | None = None
) -> tuple[Array, Array]:
    """Activations of which it is known how they round to int8, and what they are then. many: for
    the kernels of many rows, where both halves of a block share a scale (None: if there are)."""
    q = _integers(rng, rows, columns, -127, HALF)
    near = q + np.where(q > -127, rng.uniform(-0.4, 0.4, q.shape), 0)
    scales = rng.lognormal(-6, 0.5, (*q.shape[:2], 1)) * rng.choice([-1, 1], (*q.shape[:2], 1))
    if many or (many is None and rows > MAX_VEC_ROWS):
        scales = scales[:, np.arange(q.shape[1]) // 2 * 2]
    x, exact = ((scales * blocks).reshape(rows, -1)[:, :columns] for blocks in (near, q))
    return x.astype(np.float32), exact


def exact_weight(rng: np.random.Generator, rows: int, columns: int, dtype: str) -> Array:
    """An f32 matrix that a weight of that dtype holds exactly."""
    if dtype not in QUANTIZED:
        return rounded(rng.standard_normal((rows, columns), np.float32), dtype)
    q = _integers(rng, rows, columns, {"q8": -127, "q4": -8}[dtype], BLOCK)
    scales = rng.lognormal(-4, 0.5, (*q.shape[:2], 1)).astype(np.float16).astype(np.float32)
    weight: Array = (scales * q).astype(np.float32).reshape(rows, -1)[:, :columns]
    return weight


def _integers(rng: np.random.Generator, rows: int, columns: int, least: int, block: int) -> Array:
    """[rows, blocks, block] from `least` to -1 - least; the first of a block, which is never
    padding, is the least."""
    q = rng.integers(least, -least, (rows, -(-columns // block), block))
    q[..., 0] = least
    return q


def grouped(
    rng: np.random.Generator, shape: tuple[int, int], dtype: str, grouping: Grouping
) -> tuple[Codes, Array]:
    """A random quantised matrix [rows, columns], and its values in float64."""
    n, k = shape
    groups = (n, grouping.groups(k))
    units = None
    if grouping.dtype == "int8":
        units = rng.lognormal(-7, 0.5, (n, -(-k // SUPERBLOCK), 2)).astype(np.float16)

    def exact(values: Array, unit: int) -> tuple[Array, Array]:
        """Scales or offsets near such values that the dtype holds, as it does; and their values."""
        if units is None:
            return (near := rounded(values, grouping.dtype)), near
        each = np.repeat(units[:, :, unit], SUPERBLOCK // grouping.group, axis=1)[:, : groups[1]]
        multiples = np.rint(values / each).clip(-128, 127).astype(np.int8)
        return multiples, each.astype(np.float32) * multiples

    scales, scaling = exact(rng.lognormal(-4, 0.5, groups), 0)
    spread = partial(np.repeat, repeats=grouping.group, axis=1)
    if dtype in CODED:
        codes = rng.integers(0, 1 << CODED[dtype], shape, np.uint8)
        codes[codes & 0x7F == 0x7F] = 0  # which is no number in e4m3
        values = TABLES[dtype][codes].astype(np.float64)
    else:
        least = {"q4": -8, "q5": -16, "q6": -32}.get(dtype, -127)  # as int8 activations are
        codes = rng.integers(least, -least, shape, np.int8)
        values = codes.astype(np.float64) + grouping.shift
    offsets = None
    if grouping.offset == "zero":
        offsets = rng.integers(0, 17, scales.shape).astype(np.float32)
        values -= spread(offsets)[:, :k]
    values *= spread(scaling.astype(np.float64))[:, :k]
    if grouping.offset == "bias":
        offsets, biases = exact(rng.standard_normal(groups, np.float32) / 8, 1)
        values += spread(biases)[:, :k]
    return Codes(dtype, grouping, codes, scales, offsets, units), values


def multiplied(weight: Codes, values: Array) -> Array:
    """What products take these values of a quantised matrix for."""
    if weight.dtype != "nf4":
        return values
    scales = np.repeat(weight.scales.astype(np.float64), weight.grouping.group, axis=1)
    products: Array = scales[:, : values.shape[1]] * NF4_PRODUCTS[weight.codes]
    return products


def check_device(
    device: Device, progress: Callable[[CheckResult], None] | None = None
) -> list[CheckResult]:
    """Run every kernel, its fused forms and its storage types. progress is called after each case.

    A kernel that does not compile, and a device that fails, are failed checks, not exceptions.
    """
    results = []
    for case in cases():
        results.append(case.check(device))
        if progress is not None:
            progress(results[-1])
    return results


def cases() -> Iterator[Case]:
    """All of them, kernel by kernel."""
    weights = ("f32", "f16", "bf16")
    for dtype in weights + QUANTIZED:
        yield Case("embedding", dtype, partial(_embedding, dtype=dtype))
    yield Case("position_embedding", "", _position_embedding)
    yield Case("rmsnorm", "one part", partial(_rmsnorm, rows=3, parts=1, width=331))
    yield Case("rmsnorm", "per head", partial(_rmsnorm, rows=3, parts=5, width=24))
    yield Case("rmsnorm", "per group", partial(_rmsnorm, rows=3, parts=1, width=66, groups=3))
    for bias in (False, True):
        yield Case("layernorm", "bias" if bias else "", partial(_layernorm, bias=bias))
    heads = partial(_layernorm, bias=True, parts=5, width=24, groups=2)
    yield Case("layernorm", "per head", heads)
    for function, gated in product(reference.ACTIVATIONS, (False, True)):
        run = partial(_activation, function=function, gated=gated)
        yield Case("activation", f"{function}, {'gated' if gated else 'plain'}", run)
    yield Case("softcap", "", _softcap)
    yield Case("clip", "", _clip)
    yield Case("xielu", "", _xielu)
    yield Case("scale", "", _scale)
    yield Case("position_scale", "", _position_scale)
    yield Case("elementwise_add", "", _elementwise_add)
    yield Case("elementwise_mul", "", _elementwise_mul)
    yield Case("take_rows", "", _take_rows)
    for dtype, rows, form in product(
        weights, (1, 3, 8), ("plain", "norm bias", "norm gated", "gelu gated", "gelu_tanh residual")
    ):
        run = partial(_linear, functions.matmul_vec, dtype=dtype, rows=rows, k=131, n=37, form=form)
        yield Case("matmul_vec", f"{dtype}, {rows} rows, {form}", run)
    for dtype, rows, form in product(
        QUANTIZED, (1, 3, 8), ("plain", "bias gated", "gelu_tanh gated", "gelu residual")
    ):
        run = partial(_linear, functions.matmul_vec, dtype=dtype, rows=rows, k=131, n=37, form=form)
        yield Case("matmul_vec", f"{dtype}, {rows} rows, {form}", run)
    for dtype, (rows, k, n, form) in product(
        weights + QUANTIZED, ((9, 37, 21, "gelu_tanh gated"), (130, 72, 134, "gelu bias residual"))
    ):
        run = partial(_linear, functions.matmul, dtype=dtype, rows=rows, k=k, n=n, form=form)
        yield Case("matmul", f"{dtype}, {rows} rows, {form}", run)
    for dtype in ("bf16", "q4"):  # workgroups share so many columns
        form = "gelu bias residual"
        run = partial(_linear, functions.matmul, dtype=dtype, rows=9, k=1024, n=37, form=form)
        yield Case("matmul_combine", f"{dtype}, {form}", run)
    for normalize, sigmoid, corrected in product((False, True), repeat=3):
        name = f"{'sigmoid' if sigmoid else 'softmax'}, {'normalized' if normalize else 'plain'}"
        run = partial(_route, normalize=normalize, sigmoid=sigmoid, corrected=corrected)
        yield Case("route", f"{name}, corrected" if corrected else name, run)
    yield Case("route", "300 experts", partial(_route, experts=300))
    yield Case("route", "shared experts", partial(_route, shared=2))
    for sigmoid in (False, True):  # as DeepSeek-V2 and V3 do
        run = partial(_route, sigmoid=sigmoid, corrected=sigmoid, experts=48, groups=(8, 3))
        yield Case("route", f"{'sigmoid' if sigmoid else 'softmax'}, groups", run)
    for kernel, function in (("expert_gate_up", _gate_up), ("expert_down", _down)):
        for dtype, rows in product(weights + QUANTIZED, (1, 3, 40)):
            yield Case(kernel, f"{dtype}, {rows} rows", partial(function, dtype=dtype, rows=rows))
        for dtype, rows in product(("bf16", "q4"), (3, 40)):
            run = partial(function, dtype=dtype, rows=rows, bias=True)
            yield Case(kernel, f"{dtype}, {rows} rows, bias", run)
    for dtype, rows in product(("bf16", "q4"), (3, 40)):
        run = partial(_gate_up, dtype=dtype, rows=rows, gated=False)
        yield Case("expert_gate_up", f"{dtype}, {rows} rows, no gates", run)
    forms = product(("bf16",), (1, 3, 40), ("alone", "kept", "half-split", "interleaved"))
    for dtype, rows, form in [*forms, *product(QUANTIZED, (3, 40), ("alone",))]:
        run = partial(_head_linear, dtype=dtype, rows=rows, form=form)
        yield Case("head_linear", f"{dtype}, {rows} rows, {form}", run)
    for each in (False, True):
        name = "a gate each" if each else "a gate for all"
        yield Case("sigmoid_gate", name, partial(_sigmoid_gate, each=each))
    yield Case("gated_rmsnorm", "", _gated_rmsnorm)
    for rows, goes_on in product((1, 3, 40), (False, True)):
        name = f"{rows} rows, {'going on' if goes_on else 'from the start'}"
        for gated in (False, True):
            run = partial(_short_conv, rows=rows, goes_on=goes_on, gated=gated)
            yield Case("short_conv", f"{name}, {'gated' if gated else 'silu'}", run)
        yield Case("delta_rule", name, partial(_delta_rule, rows=rows, goes_on=goes_on))
        yield Case("ssm_scan", name, partial(_ssm_scan, rows=rows, goes_on=goes_on))
    yield Case("ssm_scan", "1 row, as int8 behind a norm", _ssm_scan_int8)
    for (dtype, grouping), rows in product(_PUBLISHED, (1, 3, 40)):
        run = partial(_grouped, dtype=dtype, grouping=grouping, rows=rows)
        kernel = "matmul_vec" if rows <= 8 else "matmul"
        yield Case(kernel, f"{dtype}, {rows} rows, {grouping}", run)
    for (dtype, grouping), rows in product(_PUBLISHED, (1, 9)):
        run = partial(_grouped_heads, dtype=dtype, grouping=grouping, rows=rows)
        yield Case("head_linear", f"{dtype}, {rows} rows, {grouping}", run)
    for layout, rotary_dim in product(("half-split", "interleaved"), (24, 16)):
        run = partial(_rope, interleaved=layout == "interleaved", rotary_dim=rotary_dim)
        yield Case("rope", f"{layout}, {rotary_dim} of 24", run)
    for kernel, (function, rows_of, shapes) in _ATTENTION.items():
        for dtype, shape, rows in product(KV_DTYPES, shapes, rows_of):
            run = partial(function, shape=shape, rows=rows, dtype=dtype)
            yield Case(kernel, f"{dtype}, {rows} rows, {shape}", run)
    for name, sampled in _SAMPLING.items():
        yield Case("sample", name, sampled)


# Everything but attention


def _embedding(device: Device, inputs: Inputs, dtype: str) -> Outcome:
    weight, ids = exact_weight(inputs.rng, 37, 67, dtype), np.array([36, 0, 5, 5])
    y = functions.embedding(device, ids, weight, dtype=dtype, scale=0.5)
    return y, 0.5 * weight[ids]


def _position_embedding(device: Device, inputs: Inputs) -> Outcome:
    weight = inputs(37, 67)
    return functions.position_embedding(device, weight, 3, position=34), weight[34:]


def _rmsnorm(
    device: Device, inputs: Inputs, rows: int, parts: int, width: int, groups: int = 1
) -> Outcome:
    x, weight = inputs(rows, parts * width), inputs(width)
    y = functions.rmsnorm(device, x, weight, eps=EPS, groups=groups)
    return y, reference.rmsnorm(x, weight, EPS, groups)


def _layernorm(
    device: Device,
    inputs: Inputs,
    bias: bool,
    parts: int = 1,
    width: int = 331,
    groups: int = 1,
) -> Outcome:
    x, weight, added = 3 + inputs(3, parts * width), inputs(width), inputs(width) if bias else None
    y = functions.layernorm(device, x, weight, added, eps=EPS, groups=groups)
    return y, reference.layernorm(x, weight, added, EPS, groups)


def _activation(device: Device, inputs: Inputs, function: str, gated: bool) -> Outcome:
    x = 4 * inputs(3, 2 * 67 if gated else 67)
    y = functions.activation(device, x, function, gated=gated)
    expected = reference.ACTIVATIONS[function](x[:, :67])
    return y, expected * x[:, 67:] if gated else expected


def _softcap(device: Device, inputs: Inputs) -> Outcome:
    x = 4 * inputs(3, 67)
    return functions.softcap(device, x, 5.0), reference.softcap(x, 5.0)


def _clip(device: Device, inputs: Inputs) -> Outcome:
    x = 4 * inputs(3, 67)
    return functions.clip(device, x, 2.5), reference.clip(x, 2.5)


def _xielu(device: Device, inputs: Inputs) -> Outcome:
    x, shape = 4 * inputs(3, 67), np.array([0.3, -0.8, 0.5, -1e-6], np.float32)
    return functions.xielu(device, x, shape), reference.xielu(x, shape)


def _scale(device: Device, inputs: Inputs) -> Outcome:
    x = inputs(3, 67)
    return functions.scale(device, x, 0.7), np.float64(np.float32(0.7)) * x


def _position_scale(device: Device, inputs: Inputs) -> Outcome:
    x = inputs(3, 67)
    y = functions.position_scale(device, x, 0.1, 64, position=127)
    return y, reference.position_scale(x, np.arange(127, 130), 0.1, 64)


def _elementwise_add(device: Device, inputs: Inputs) -> Outcome:
    a, b = inputs(3, 67), inputs(3, 67)
    return functions.elementwise_add(device, a, b), a.astype(np.float64) + b


def _elementwise_mul(device: Device, inputs: Inputs) -> Outcome:
    a, b = inputs(3, 67), inputs(3, 67)
    return functions.elementwise_mul(device, a, b), a.astype(np.float64) * b


def _take_rows(device: Device, inputs: Inputs) -> Outcome:
    x, rows = inputs(11, 67), [10, 0, 3]
    return functions.take_rows(device, x, rows), x[rows]


def _linear(
    function: Callable[..., Array],
    device: Device,
    inputs: Inputs,
    dtype: str,
    rows: int,
    k: int,
    n: int,
    form: str,
) -> Outcome:
    """form: any of the words "norm" (of float weights), "bias", "gated", "residual", and an
    activation function, or silu for what is gated."""
    gated = "gated" in form
    activation = next((word for word in form.split() if word in reference.ACTIVATIONS), None)
    activate = reference.ACTIVATIONS[activation or "silu"]
    x = expected = inputs(rows, k)
    if dtype in INTEGERS:
        x, expected = int8_rows(inputs.rng, rows, k)
    weight = exact_weight(inputs.rng, 2 * n if gated else n, k, dtype)
    options: dict[str, Any] = {"dtype": dtype, "gated": gated, "activation": activation}
    if "norm" in form:
        options["norm"] = inputs(k), EPS
        expected = reference.rmsnorm(x, *options["norm"])
    expected = reference.matmul(expected, weight)
    if "bias" in form:
        options["bias"] = inputs(len(weight))
        expected = expected + options["bias"]
    if gated:
        expected = activate(expected[:, :n]) * expected[:, n:]
    elif activation is not None:
        expected = activate(expected)
    if "residual" in form:
        options["residual"] = inputs(rows, n)
        expected = expected + options["residual"]
    return function(device, x, weight, **options), expected


def _route(
    device: Device,
    inputs: Inputs,
    normalize: bool = False,
    sigmoid: bool = False,
    corrected: bool = False,
    experts: int = 37,
    groups: tuple[int, int] = (1, 1),
    shared: int = 0,
) -> Outcome:
    """shared: behind a gate."""
    logits = inputs(3, experts + (shared > 0))
    logits[1] = 0.0  # of equals the first
    options: dict[str, Any] = {"slots": 5, "normalize": normalize, "sigmoid": sigmoid, "scale": 2.5}
    options |= {"groups": groups, "shared": shared, "gated": shared > 0}
    if sigmoid and normalize:
        options["epsilon"] = 0.5
    if corrected:
        options["correction"], options["expert_scales"] = inputs(experts), inputs(experts)
    ids, weights = functions.route(device, logits, **options)
    expected_ids, expected = reference.route(logits, **options)
    return np.concatenate([ids, weights], 1), np.concatenate([expected_ids, expected], 1)


def _gate_up(
    device: Device,
    inputs: Inputs,
    dtype: str,
    rows: int,
    bias: bool = False,
    gated: bool = True,
) -> Outcome:
    """bias: with the activation of gpt-oss too; not gated: with that of Nemotron."""
    x = exact = inputs(rows, 67)
    if dtype in INTEGERS:
        x, exact = int8_rows(inputs.rng, rows, 67)
    logits = inputs(rows, 7)
    n = (1 + gated) * 21
    weight = exact_weight(inputs.rng, 7 * n, 67, dtype).reshape(7, n, 67)
    added = 5 * inputs(7, n) if bias else None
    function = "clamped_swiglu" if bias else "silu" if gated else "relu2"
    own: dict[str, Any] = {"bias": added, "function": function, "gated": gated}
    y = functions.expert_gate_up(device, x, logits, weight, slots=3, dtype=dtype, **own)
    return y, reference.expert_gate_up(exact, reference.route(logits, 3, False)[0], weight, **own)


def _down(device: Device, inputs: Inputs, dtype: str, rows: int, bias: bool = False) -> Outcome:
    x = exact = inputs(3 * rows, 37)
    if dtype in INTEGERS:
        x, exact = int8_rows(inputs.rng, 3 * rows, 37, many=rows > MAX_VEC_ROWS)
    x, exact = x.reshape(rows, 3, 37), exact.reshape(rows, 3, 37)
    logits, residual = inputs(rows, 7), inputs(rows, 67)
    weight = exact_weight(inputs.rng, 7 * 67, 37, dtype).reshape(7, 67, 37)
    added = inputs(7, 67) if bias else None
    own: dict[str, Any] = {"dtype": dtype, "residual": residual, "bias": added}
    y = functions.expert_down(device, x, logits, weight, **own)
    ids, weights = reference.route(logits, 3, False)
    return y, residual + reference.expert_down(exact, ids, weights, weight, added)


def _head_linear(device: Device, inputs: Inputs, dtype: str, rows: int, form: str) -> Outcome:
    """form: what becomes of the values of a head that are not multiplied."""
    (heads, n, k), keep = (3, 21, 36), form != "alone"
    weight = exact_weight(inputs.rng, heads * n, k, dtype)
    x = exact = inputs(rows, heads * (k + 12))
    options: dict[str, Any] = {"keep": keep, "dtype": dtype}
    if form in ("half-split", "interleaved"):
        frequencies, interleaved = _frequencies(12), form == "interleaved"
        table = functions.rope_table(frequencies, 7 + rows)
        options |= {"table": table, "position": 7, "interleaved": interleaved}
        exact = reference.rope(x, 7 + np.arange(rows), frequencies, k + 12, interleaved)
    y = functions.head_linear(device, x, weight, heads, **options)
    return y, reference.head_linear(exact, weight.reshape(heads, n, k), keep)


def _sigmoid_gate(device: Device, inputs: Inputs, each: bool) -> Outcome:
    x, gate = inputs(3, 67), inputs(3, 67 if each else 1)
    return functions.sigmoid_gate(device, x, gate), x / (1 + np.exp(-gate.astype(np.float64)))


def _gated_rmsnorm(device: Device, inputs: Inputs) -> Outcome:
    x, gate, weight = inputs(3, 5 * 24), inputs(3, 5 * 24), inputs(24)
    y = functions.gated_rmsnorm(device, x, gate, weight, eps=EPS)
    return y, reference.rmsnorm(x, weight, EPS) * reference.silu(gate)


def _short_conv(device: Device, inputs: Inputs, rows: int, goes_on: bool, gated: bool) -> Outcome:
    weight, state = inputs(67, 4), inputs(3, 67) if goes_on else None
    if not gated:
        x, bias = inputs(rows, 67), inputs(67)
        options: dict[str, Any] = {"bias": bias, "activation": "silu", "state": state}
        y, left = functions.short_conv(device, x, weight, **options)
        expected, expected_left = reference.short_conv(x, weight, bias, state)
        return np.concatenate([y, left]), np.concatenate([reference.silu(expected), expected_left])
    x = inputs(rows, 3 * 67)
    y, left = functions.short_conv(device, x, weight, gated=True, state=state)
    before, after, value = np.split(x.astype(np.float64), 3, axis=1)
    expected, expected_left = reference.short_conv(before * value, weight, None, state)
    return np.concatenate([y, left]), np.concatenate([after * expected, expected_left])


def _delta_rule(device: Device, inputs: Inputs, rows: int, goes_on: bool) -> Outcome:
    q, k, v = inputs(rows, 2, 24), inputs(rows, 2, 24), inputs(rows, 4, 36)
    own = inputs(rows, 8), inputs(4) - 1, inputs(4)
    state = inputs(4, 24, 36) if goes_on else None
    y, left = functions.delta_rule(device, q, k, v, *own, state=state)
    expected, expected_left = reference.delta_rule(q, k, v, *own, state)
    return (
        np.concatenate([y.ravel(), left.ravel()]),
        np.concatenate([expected.ravel(), expected_left.ravel()]),
    )


def _ssm_scan(device: Device, inputs: Inputs, rows: int, goes_on: bool) -> Outcome:
    b, c, x, z = inputs(rows, 2, 24), inputs(rows, 2, 24), inputs(rows, 4, 36), inputs(rows, 4, 36)
    own = x, b, c, z, inputs(rows, 4), inputs(3, 4) - 1
    state = inputs(4, 24, 36) if goes_on else None
    y, left = functions.ssm_scan(device, *own, state=state)
    expected, expected_left = reference.ssm_scan(*own, state=state)
    return (
        np.concatenate([y.ravel(), left.ravel()]),
        np.concatenate([expected.ravel(), expected_left.ravel()]),
    )


def _ssm_scan_int8(device: Device, inputs: Inputs) -> Outcome:
    """What comes out of each head is a multiple of x, of which it is known how it rounds."""
    x, exact = (part.reshape(1, 4, 48) for part in int8_rows(inputs.rng, 1, 4 * 48))
    b, c, z = inputs(1, 1, 24), inputs(1, 1, 24), np.tile(inputs(1, 4, 1), 48)
    own = b, c, z, inputs(1, 4), inputs(3, 4) - 1
    norm, weight = np.repeat(inputs(12), 16), exact_weight(inputs.rng, 37, 4 * 48, "q8")
    options: dict[str, Any] = {"norm": (norm, EPS), "projection": weight, "dtype": "q8"}
    y, left = functions.ssm_scan(device, x, *own, **options)
    (values, expected_left), (rounded_values, _) = (
        reference.ssm_scan(part, *own) for part in (x, exact)
    )
    scale = 1 / np.sqrt(np.mean(values**2) + EPS)
    expected = reference.matmul(scale * rounded_values.reshape(1, -1) * norm, weight)
    return (
        np.concatenate([y.ravel(), left.ravel()]),
        np.concatenate([expected.ravel(), expected_left.ravel()]),
    )


# What published checkpoints have: groups of other sizes, zero points and biases, codes of floats.
_PUBLISHED = (
    ("q4", Grouping(128, "f16", "zero", 8)),
    ("q4", Grouping(64, "bf16", "bias", 8)),
    ("q4", Grouping(32, "int8", "bias")),
    ("q5", Grouping(32, "int8", "bias", 16)),
    ("q6", Grouping(16, "int8")),
    ("q8", Grouping(32, "f32", "bias", 128)),
    ("e4m3", Grouping(128, "f32")),
    ("mxfp4", Grouping(32, "e8m0")),
    ("nf4", Grouping(64, "f32")),
    ("iq4nl", Grouping(32, "f16")),
)


def _grouped(device: Device, inputs: Inputs, dtype: str, grouping: Grouping, rows: int) -> Outcome:
    x = exact = inputs(rows, 331)
    if dtype in INTEGERS:
        x, exact = int8_rows(inputs.rng, rows, 331)
    weight, values = grouped(inputs.rng, (37, 331), dtype, grouping)
    function = functions.matmul_vec if rows <= 8 else functions.matmul
    return function(device, x, weight), reference.matmul(exact, multiplied(weight, values))


def _grouped_heads(
    device: Device, inputs: Inputs, dtype: str, grouping: Grouping, rows: int
) -> Outcome:
    heads, n, k = 2, 18, 256
    codes, values = grouped(inputs.rng, (heads * n, k), dtype, grouping)
    x = inputs(rows, heads * k)
    y = functions.head_linear(device, x, codes, heads)
    return y, reference.head_linear(x, values.reshape(heads, n, k))


def _rope(device: Device, inputs: Inputs, interleaved: bool, rotary_dim: int) -> Outcome:
    x, frequencies = inputs(3, 2 * 24), _frequencies(rotary_dim)
    table, at = functions.rope_table(frequencies, 300), np.arange(290, 293)
    y = functions.rope(device, x, table, head_dim=24, position=290, interleaved=interleaved)
    return y, reference.rope(x, at, frequencies, 24, interleaved)


def _frequencies(rotary_dim: int) -> Array:
    """Radians per position of each pair (Su et al. 2021)."""
    exponents: Array = np.arange(0, rotary_dim, 2) / rotary_dim
    return 10000.0**-exponents


# Attention


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
        return reference.visible(rows, self.kv_len, self.window)[:, None, :]

    def qkv(self, inputs: Inputs, rows: int) -> tuple[Array, Array, Array]:
        q = inputs(rows, self.n_heads * self.head_dim)
        k, v = inputs(self.kv_len, self.kv_width), inputs(self.kv_len, self.kv_width)
        return (q, k[:, : self.latent], v[:, self.latent :]) if self.latent else (q, k, v)

    def attention(self, q: Array, k: Array, v: Array, sinks: Array | None = None) -> Array:
        """What it should be."""
        own = self.n_heads, self.scale, self.window, self.softcap
        return reference.attention(q, k, v, *own, sinks)

    def joined(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Keys and values of what attention is given."""
        keys = np.concatenate([k, v], axis=1)
        return (keys, keys) if self.latent else (k, v)

    def options(self, dtype: str) -> dict[str, Any]:
        """What every function of attention takes."""
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
    function: Callable[..., Array],
    device: Device,
    inputs: Inputs,
    shape: _Shape,
    rows: int,
    dtype: str,
) -> Outcome:
    q, *cached = shape.qkv(inputs, rows)
    joined = shape.joined(*cached)
    keys, values = (kept(part, shape.head_dim, dtype) for part in joined)  # not rounded again
    sinks = inputs(shape.n_heads) if shape.sinks else None
    options = shape.options(dtype) | {"softcap": shape.softcap, "sinks": sinks}
    k, v = (keys[:, : shape.latent], keys[:, shape.latent :]) if shape.latent else (keys, values)
    y = function(device, q, k, v, scale=shape.scale, latent=shape.latent > 0, **options)
    return y, shape.attention(q, keys, values, sinks)


def _scores(device: Device, inputs: Inputs, shape: _Shape, rows: int, dtype: str) -> Outcome:
    q, *cached = shape.qkv(inputs, rows)
    k, _ = shape.joined(*cached)
    options = shape.options(dtype) | {"softcap": shape.softcap}
    y = functions.attention_scores(device, q, k, scale=shape.scale, **options)
    stored = kept(k, shape.head_dim, dtype)
    expected = reference.attention_scores(q, stored, shape.n_heads, shape.scale, shape.softcap)
    return np.where(shape.seen(rows), y, 0), np.where(shape.seen(rows), expected, 0)


def _softmax(device: Device, inputs: Inputs, shape: _Shape, rows: int, dtype: str) -> Outcome:
    scores = np.where(shape.seen(rows), 4 * inputs(rows, shape.n_heads, shape.kv_len), -np.inf)
    return functions.softmax(device, scores, window=shape.window), reference.softmax(scores)


def _weighted_sum(device: Device, inputs: Inputs, shape: _Shape, rows: int, dtype: str) -> Outcome:
    scores = inputs(rows, shape.n_heads, shape.kv_len)
    p = reference.softmax(np.where(shape.seen(rows), scores, -np.inf))
    v = inputs(shape.kv_len, shape.kv_width)
    y = functions.weighted_sum(device, p, v, **shape.options(dtype))
    stored = kept(v, shape.head_dim, dtype)
    values = stored.reshape(shape.kv_len, shape.n_kv_heads, shape.head_dim)
    return y, reference.weighted_sum(p, values)


def _kv_write(device: Device, inputs: Inputs, shape: _Shape, rows: int, dtype: str) -> Outcome:
    (_, *cached), at = shape.qkv(inputs, rows), shape.rows(rows)
    k, v = (part[:rows] for part in cached)
    keys, values = functions.kv_write(
        device,
        k,
        v,
        n_kv_heads=shape.n_kv_heads,
        position=at.start,
        kv_dtype=dtype,
        latent=shape.latent > 0,
    )
    y = np.concatenate([_of_positions(keys, at), _of_positions(values, at)])
    return _cached(y, np.concatenate(shape.joined(k, v)), shape.head_dim, dtype)


def _latent_write(device: Device, inputs: Inputs, shape: _Shape, rows: int, dtype: str) -> Outcome:
    at, turned, interleaved = shape.rows(rows), shape.latent, shape.group % 2 == 1
    x, weight = inputs(rows, shape.head_dim), inputs(shape.head_dim - turned)
    frequencies = _frequencies(turned)
    table = functions.rope_table(frequencies, shape.kv_len)
    options: dict[str, Any] = {"position": at.start, "interleaved": interleaved}
    y = functions.latent_write(device, x, table, weight, EPS, kv_dtype=dtype, **options)
    positions = np.arange(at.start, at.stop)
    k = reference.rope(x[:, :turned], positions, frequencies, turned, interleaved)
    expected = np.concatenate([k, reference.rmsnorm(x[:, turned:], weight, EPS)], axis=1)
    return _cached(_of_positions(y, at), expected, shape.head_dim, dtype)


def _rope_kv_write(device: Device, inputs: Inputs, shape: _Shape, rows: int, dtype: str) -> Outcome:
    normed = shape.group > 1 and device.limits.storage_buffers > 8
    at, heads = shape.rows(rows), _Heads(inputs, shape, rows, normed)
    y, keys, values = functions.rope_kv_write(
        device, heads.x, heads.table, position=at.start, kv_dtype=dtype, **heads.options
    )
    k, v = heads.cached(keys, values, dtype)
    result, expected = zip((y, heads.q), k, v, strict=True)
    return np.concatenate(result, axis=1), np.concatenate(expected, axis=1)


def _rope_attention(
    device: Device, inputs: Inputs, shape: _Shape, rows: int, dtype: str
) -> Outcome:
    at, heads = shape.rows(rows), _Heads(inputs, shape, rows, normed=shape.group > 1)
    past_k, past_v = inputs(at.start, shape.kv_width), inputs(at.start, shape.kv_width)
    y, keys, values = functions.rope_attention(
        device,
        heads.x,
        heads.table,
        past_k,
        past_v,
        scale=shape.scale,
        window=shape.window,
        softcap=shape.softcap,
        kv_dtype=dtype,
        **heads.options,
    )
    k, v = heads.cached(keys, values, dtype)
    cached = [_of_positions(part, slice(0, at.stop)) for part in (keys, values)]
    attend = partial(shape.attention, heads.q)
    expected = nearest_output(y, attend, cached, (heads.k, heads.v), dtype)
    found, wanted = zip((y, expected), k, v, strict=True)
    return np.concatenate(found, axis=1), np.concatenate(wanted, axis=1)


class _Heads:
    """A projection x of rows at the end of a context, and its queries, keys and values as they
    should become. Shapes with odd groups are interleaved."""

    def __init__(self, inputs: Inputs, shape: _Shape, rows: int, normed: bool) -> None:
        self.shape, self.at = shape, shape.rows(rows)
        d, q_width = shape.head_dim, shape.n_heads * shape.head_dim
        interleaved = shape.group % 2 == 1
        self.x = inputs(rows, q_width + 2 * shape.kv_width)
        widths = (q_width, shape.kv_width) if shape.row_norms else (d, d)
        q_norm, k_norm = (inputs(width) for width in widths)
        self.table = functions.rope_table(_frequencies(d), shape.kv_len)
        self.options: dict[str, Any] = {
            "n_heads": shape.n_heads,
            "n_kv_heads": shape.n_kv_heads,
            "interleaved": interleaved,
            "norms": (q_norm, k_norm, EPS) if normed else None,
        }
        q, k, self.v = np.split(self.x, [q_width, q_width + shape.kv_width], axis=1)
        if normed:
            q, k = reference.rmsnorm(q, q_norm, EPS), reference.rmsnorm(k, k_norm, EPS)
        positions = np.arange(self.at.start, self.at.stop)
        self.q, self.k = (
            reference.rope(part, positions, _frequencies(d), d, interleaved) for part in (q, k)
        )

    def cached(self, keys: Array, values: Array, dtype: str) -> tuple[Outcome, Outcome]:
        """The keys and the values that were cached, each with those that should be."""
        d = self.shape.head_dim
        found = _of_positions(keys, self.at), _of_positions(values, self.at)
        return _cached(found[0], self.k, d, dtype), _cached(found[1], self.v, d, dtype)


def _cached(found: Array, exact: Array, head_dim: int, dtype: str) -> Outcome:
    """What was cached and what should be. f32 arithmetic may turn a rounding the other way."""
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
    """Of what attention may give with these cached keys and values, what is nearest to y. `own` are
    those of the rows, as they were before they were cached."""
    options = [[part] for part in cached]
    if dtype == "f16" and len(y) == 1:
        # One kernel packs and attends, and a compiler may drop packing that is undone at once.
        for parts, exact in zip(options, own, strict=True):
            parts.append(np.concatenate([parts[0][:-1], exact]))
    outputs = [attend(*parts) for parts in product(*options)]
    return min(outputs, key=lambda output: reference.nmse(y, output))


def _of_positions(cached: Array, at: slice) -> Array:
    """[n_kv_heads, slots, head_dim] of a cache -> [positions, n_kv_heads * head_dim]."""
    return cached[:, at].swapaxes(0, 1).reshape(at.stop - at.start, -1)


_ALL = _SHAPES + _LATENT
_ATTENTION: dict[str, tuple[Callable[..., Outcome], tuple[int, ...], tuple[_Shape, ...]]] = {
    "attention_scores": (_scores, (3,), _ALL),
    "softmax": (_softmax, (3,), _SHAPES),
    "weighted_sum": (_weighted_sum, (3,), _ALL),
    "kv_write": (_kv_write, (3,), _ALL),
    "latent_write": (_latent_write, (1, 3), _LATENT),
    "rope_kv_write": (_rope_kv_write, (3,), _SHAPES),
    "rope_attention": (_rope_attention, (1, 3), (*_SHAPES, _ROW_NORMS)),
    "attention": (partial(_attend, functions.attention), (1, 5), _ALL),
    "attention_tiled": (partial(_attend, functions.attention_tiled), (70,), _ALL),
}


# Sampling: cases of which the outcome is known whatever the noise


def _logits(inputs: Inputs) -> Array:
    return 3 * inputs(4, 2500)


def _best(device: Device, inputs: Inputs, **options: Any) -> Outcome:
    logits = _logits(inputs)
    return functions.sample(device, logits, **options), logits.argmax(1)


def _invalid(device: Device, inputs: Inputs) -> Outcome:
    logits = _logits(inputs)
    logits[1, 2000], logits[2] = np.nan, -np.inf
    expected = logits.argmax(1).astype(np.uint32)
    expected[1:3] = INVALID_TOKEN
    return functions.sample(device, logits), expected


def _first_of_equals(device: Device, inputs: Inputs) -> Outcome:
    logits = _logits(inputs)
    logits[:, [2400, 1700]] = 50
    return functions.sample(device, logits), np.full(4, 1700)


def _changed(device: Device, inputs: Inputs) -> Outcome:
    logits = _logits(inputs)
    logits[:, 1100], logits[:, 1200] = 60, 50
    y = functions.sample(
        device, logits, prompt_ids=[1100], repetition_penalty=2.0, logit_bias={1200: -10, 7: 70}
    )
    return y, np.where(logits[:, 7] + 70 > 40, 7, 1200)


def _survivors(device: Device, inputs: Inputs, n: int, **options: Any) -> Outcome:
    """Tokens 5, 1030, 2499, 1031 have 40, 30, 20 and 10 %. All of the first n appear, no other."""
    probabilities = {5: 0.4, 1030: 0.3, 2499: 0.2, 1031: 0.1}
    logits = np.full((64, 2500), -30.0)
    logits[:, [*probabilities]] = np.log([*probabilities.values()])
    ids = functions.sample(device, logits, temperature=1.0, seed=3, **options)
    survivors = [*probabilities][:n]
    found = [token in ids for token in survivors]
    y = np.array([*np.isin(ids, survivors), *found])
    return y, np.ones_like(y)


_SAMPLING: dict[str, Callable[[Device, Inputs], Outcome]] = {
    "greedy": _best,
    "greedy, equal logits": _first_of_equals,
    "not a number": _invalid,
    "penalty and bias": _changed,
    "top-k 1": partial(_best, temperature=1.0, top_k=1),
    "top-p 0": partial(_best, temperature=1.0, top_p=1e-9),
    "min-p 1": partial(_best, temperature=1.0, min_p=1.0),
    "unfiltered": partial(_survivors, n=4),
    "top-k 3": partial(_survivors, n=3, top_k=3),
    "top-p 0.6": partial(_survivors, n=2, top_p=0.6),
    "min-p 0.4": partial(_survivors, n=3, min_p=0.4),
    "top-k 3, top-p 0.7": partial(_survivors, n=2, top_k=3, top_p=0.7),
}
