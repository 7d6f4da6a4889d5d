"""The kernels of a mixture of experts against float64, and what models do with them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import LEAST, OpenDevice
from engines import answer, scores
from plans import load_weights
from reference_models import DATA, load, relative_error
from safetensors.numpy import save_file
from test_kernels import (
    EPS,
    INT8_LIMIT,
    LIMIT,
    SETTINGS,
    Case,
    Factors,
    covering,
    error_of_sums,
    meeting,
    settings_of,
)

from infer.bench.measure import weight_bytes_per_token
from infer.engine.engine import Engine
from infer.engine.options import EngineOptions
from infer.engine.steps import Loaded
from infer.kernels.checks import experts_check, functions, norm_check
from infer.kernels.checks.arrays import Array, to_gpu
from infer.kernels.checks.forward import Forward
from infer.kernels.checks.inputs import exact_weight, grouped, int8_rows, multiplied
from infer.kernels.checks.reference import nmse
from infer.kernels.errors import UnsupportedError
from infer.kernels.gpu.device import Device, DryDevice, Limits, Settings
from infer.kernels.gpu.tensor import INTEGERS, QUANTIZED, Grouping, allocate
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops import functional as ops
from infer.models import build_model, open_model
from infer.models.loading import load as loading
from infer.models.loading.checkpoint import SINGLE, Checkpoint
from infer.models.loading.config import RawConfig
from infer.models.loading.formats.packed import read_rows
from infer.models.loading.packing import Stored
from infer.models.loading.plan import LoadPlan, Part, PlannedWeight, plan_weights
from infer.models.loading.shapes import SHAPES
from infer.models.loading.tensors import TensorInfo
from infer.models.loading.weights import Source, WeightSpec

ROUTE: Factors = SETTINGS | {
    "rows": (1, 3, 8, 40),
    "choice": ((1, 1), (7, 7), (40, 70), (6, 300)),
    "normalize": (False, True),
    "sigmoid": (False, True),
    "corrected": (False, True),
    "scaled": (False, True),
    "groups": ((1, 1), (2, 1), (5, 3)),
    "shared": ((0, False), (1, False), (1, True), (3, True)),  # how many, and whether gated
}


def logits_of(rng: np.random.Generator, rows: int, experts: int, kind: str = "") -> Array:
    logits = rng.standard_normal((rows, experts), np.float32)
    if kind == "one":  # all rows on one expert: the others have none
        logits[:, experts // 2] += 100.0
    elif kind == "equal":
        logits[:] = 0.5
    return logits


@covering(ROUTE, rows=(1, 8, 40))
def test_route(open_device: OpenDevice, rng: np.random.Generator, cases: Iterable[Case]) -> None:
    for case in cases:
        slots, experts = case["choice"]
        shared, gated = case["shared"]
        logits = logits_of(rng, case["rows"], experts + gated)
        options: dict[str, Any] = {"slots": slots, "scale": 2.5}
        options |= {"shared": shared, "shared_scale": 0.7, "gated": gated}
        options |= {name: case[name] for name in ("normalize", "sigmoid")}
        count, chosen = case["groups"]
        if experts % count == 0 and slots <= experts // count * chosen:
            options["groups"] = case["groups"]
        if case["sigmoid"] and case["normalize"]:
            options["epsilon"] = 0.5
        if case["corrected"]:
            options["correction"] = rng.standard_normal(experts, np.float32)
        if case["scaled"]:
            options["expert_scales"] = rng.standard_normal(experts, np.float32)
        ids, weights = functions.route(open_device(settings_of(case)), logits, **options)
        expected_ids, expected = experts_check.route(logits, **options)
        assert (ids == expected_ids).all(), case
        assert nmse(weights, expected) <= LIMIT, case


@pytest.mark.parametrize("others", [0, 200])
def test_equal_logits_choose_the_first(device: Device, others: int) -> None:
    logits = np.array([[1, 2, 2, 2, 0], [0, 0, -0.0, 0, 0], [3, 1, 1, 3, 1]], np.float32)
    logits = np.pad(logits, [(0, 0), (0, others)], constant_values=-1e30)
    ids, weights = functions.route(device, logits, slots=3, normalize=True)
    assert ids.tolist() == [[1, 2, 3], [0, 1, 2], [0, 3, 1]]
    assert np.allclose(weights[:2], 1 / 3)


@pytest.mark.parametrize(("slots", "experts"), [(3, 5), (6, 70)])
def test_logits_that_are_no_numbers_choose_experts_that_exist(
    device: Device, slots: int, experts: int
) -> None:
    """Each once: kernels index weights by them."""
    logits = np.full((3, experts), np.nan, np.float32)
    logits[1, ::2], logits[2] = 1.0, -np.inf
    ids, _ = functions.route(device, logits, slots=slots, normalize=True)
    assert all(len(set(row)) == slots and set(row) < set(range(experts)) for row in ids.tolist())


def test_large_logits_do_not_overflow(device: Device) -> None:
    logits = np.array([[1e30, -1e30, 0], [500, 499, -500]], np.float32)
    ids, weights = functions.route(device, logits, slots=2, normalize=False)
    assert ids.tolist() == [[0, 2], [0, 1]]
    assert np.allclose(weights, [[1, 0], [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))]])


EXPERTS: Factors = SETTINGS | {
    "rows": (1, 3, 8, 9, 130),
    "tiled": (False, True),
    "experts": ((1, 1), (1, 5), (5, 5), (3, 37)),  # slots, experts
    "shape": ((7, 1), (37, 40), (131, 64), (520, 9)),
    "dtype": ("f32", "f16", "bf16", "q8", "q4"),
    "kind": ("", "one", "equal"),
    "bias": (False, True),
}


def activations(
    rng: np.random.Generator, dtype: str, rows: int, columns: int, many: bool
) -> tuple[Array, Array]:
    """Returns activations, and the values that a kernel (of many rows) reads them as."""
    if dtype in INTEGERS:
        return int8_rows(rng, rows, columns, many=many)
    x = rng.standard_normal((rows, columns), np.float32)
    return x, x


def own_of(case: Case) -> Case:
    return {name: value for name, value in case.items() if name not in SETTINGS}


def limit_of(dtype: str) -> float:
    """With an activation function of integers: exp(-30) of a GPU is 2e-6 from what it is."""
    return 10 * INT8_LIMIT if dtype in QUANTIZED else LIMIT


def gate_up_error(
    device: Device,
    rng: np.random.Generator,
    rows: int,
    tiled: bool,
    experts: tuple[int, int],
    shape: tuple[int, int],
    dtype: str,
    kind: str,
    norm: bool = False,
    bias: bool = False,
    function: str = "silu",
    **options: Any,
) -> float:
    (slots, n_experts), (k, n) = experts, shape
    x, exact = activations(rng, dtype, rows, k, tiled or rows > 8)
    gated = function != "relu2"
    weight_rows = (1 + gated) * n
    weight = exact_weight(rng, n_experts * weight_rows, k, dtype).reshape(n_experts, -1, k)
    added = 5 * rng.standard_normal((n_experts, weight_rows), np.float32) if bias else None
    logits = logits_of(rng, rows, n_experts, kind)
    if norm:
        options["norm"] = rng.standard_normal(k, np.float32), EPS
        exact = norm_check.rmsnorm(x, *options["norm"])
    options |= {"slots": slots, "dtype": dtype, "tiled": tiled}
    options |= {"bias": added, "function": function, "gated": gated}
    y = functions.expert_gate_up(device, x, logits, weight, **options)
    ids, _ = experts_check.route(logits, slots, False)
    expected = experts_check.expert_gate_up(exact, ids, weight, added, function, gated)
    # Beside one: of a single output that gelu makes nearly nothing, f32 leaves no bit right.
    return nmse(1 + y, 1 + expected)


FEWER: Factors = {
    "rows": (1, 8, 130),
    "shape": ((7, 1), (37, 40), (131, 64)),
    "dtype": ("f32", "bf16", "q8", "q4"),
}


@covering(EXPERTS | {"function": ("silu", "gelu", "clamped_swiglu", "relu2")}, **FEWER)
def test_expert_gate_up(
    open_device: OpenDevice, rng: np.random.Generator, cases: Iterable[Case]
) -> None:
    for case in cases:
        error = gate_up_error(open_device(settings_of(case)), rng, **own_of(case))
        assert error <= limit_of(case["dtype"]), case


@pytest.mark.parametrize("rows", [9, 70])  # few for each expert, or many
@pytest.mark.parametrize("dtype", ["bf16", "q8"])
def test_tiles_of_a_gpu(device: Device, rng: np.random.Generator, dtype: str, rows: int) -> None:
    """The other tests run those that a software adapter takes for narrow experts."""
    tuning = Tuning(device)
    tuning.software = False
    own: Case = {"rows": rows, "tiled": True, "experts": (1, 2), "shape": (37, 40)}
    own |= {"dtype": dtype, "kind": "", "bias": True, "tuning": tuning}
    assert gate_up_error(device, rng, **own) <= limit_of(dtype)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 9])
@pytest.mark.parametrize("settings", [Settings(), LEAST])
def test_expert_gate_up_after_a_norm(
    open_device: OpenDevice, rng: np.random.Generator, settings: Settings, rows: int, fuse: bool
) -> None:
    for shape in ((131, 64), (64, 21)):
        own: Case = {"rows": rows, "tiled": False, "experts": (2, 5), "shape": shape}
        own |= {"dtype": "bf16", "kind": "", "norm": True, "fuse": fuse}
        assert gate_up_error(open_device(settings), rng, **own) <= LIMIT


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", ["e4m3", "nf4", "iq4nl"])
def test_experts_in_codes(device: Device, rng: np.random.Generator, dtype: str, rows: int) -> None:
    codes, values = grouped(rng, (5 * 64, 64), dtype, Grouping(32, "f32"))
    x, exact = activations(rng, dtype, rows, 64, rows > 8)
    logits = logits_of(rng, rows, 5)
    with device.scope():
        forward = Forward(device, rows)
        routing = ops.route(forward.input(logits), 2, normalize=False)
        weight = to_gpu(device, codes)
        y = forward.run(ops.expert_gate_up(forward.input(x), weight, routing))
    ids, _ = experts_check.route(logits, 2, False)
    expected = experts_check.expert_gate_up(
        exact, ids, multiplied(codes, values).reshape(5, 64, 64)
    )
    assert nmse(y, expected.reshape(rows, -1)) <= LIMIT


def down_error(
    device: Device,
    rng: np.random.Generator,
    rows: int,
    tiled: bool,
    experts: tuple[int, int],
    shape: tuple[int, int],
    dtype: str,
    kind: str,
    form: str,
    bias: bool = False,
) -> float:
    (slots, n_experts), (k, n) = experts, shape
    given = activations(rng, dtype, rows * slots, k, tiled or rows > 8)
    x, exact = (a.reshape(rows, slots, k) for a in given)
    weight = exact_weight(rng, n_experts * n, k, dtype).reshape(n_experts, n, k)
    logits = logits_of(rng, rows, n_experts, kind)
    options: dict[str, Any] = {"dtype": dtype, "tiled": tiled, "normalize": "normalize" in form}
    ids, weights = experts_check.route(logits, slots, options["normalize"])
    options["bias"] = rng.standard_normal((n_experts, n), np.float32) if bias else None
    expected = experts_check.expert_down(exact, ids, weights, weight, options["bias"])
    if "residual" in form:
        options["residual"] = rng.standard_normal((rows, n), np.float32)
        expected = expected + options["residual"]
    return error_of_sums(functions.expert_down(device, x, logits, weight, **options), expected)


@covering(EXPERTS | {"form": ("", "residual", "normalize residual")}, **FEWER)
def test_expert_down(
    open_device: OpenDevice, rng: np.random.Generator, cases: Iterable[Case]
) -> None:
    for case in cases:
        error = down_error(open_device(settings_of(case)), rng, **own_of(case))
        assert error <= limit_of(case["dtype"]), case


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_shared_experts_are_the_last_of_a_stack(
    device: Device, rng: np.random.Generator, rows: int, gated: bool
) -> None:
    """In decode the choice is a part of the first kernel, of which theirs is no part."""
    width, inner = 64, 32
    own: dict[str, Any] = {"slots": 3, "normalize": True, "scale": 2.5}
    own |= {"shared": 2, "shared_scale": 0.7, "gated": gated}
    x, logits = rng.standard_normal((rows, width), np.float32), logits_of(rng, rows, 40 + gated)
    into, back = (exact_weight(rng, 42 * n, k, "bf16") for n, k in ((64, width), (width, inner)))
    with device.scope():
        forward = Forward(device, rows)
        routing = ops.route(forward.input(logits), **own)
        y = ops.expert_gate_up(forward.input(x), to_gpu(device, into, "bf16"), routing)
        y = ops.expert_down(y, to_gpu(device, back, "bf16"), routing)
        result = forward.run(y)
    ids, weights = experts_check.route(logits, **own)
    expected = experts_check.expert_gate_up(x, ids, into.reshape(42, 64, -1))
    expected = experts_check.expert_down(expected, ids, weights, back.reshape(42, width, -1))
    assert nmse(result, expected) <= LIMIT


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_sigmoid_gate(least_device: Device, rng: np.random.Generator, rows: int) -> None:
    x, gate = rng.standard_normal((rows, 67), np.float32), 20 * rng.standard_normal((rows, 1))
    y = functions.sigmoid_gate(least_device, x, gate.astype(np.float32))
    assert nmse(y, x / (1 + np.exp(-gate))) <= LIMIT


def layer_error(
    device: Device,
    rng: np.random.Generator,
    dtype: str,
    rows: int,
    plan_rows: int,
    bias: bool,
    shared: str,
) -> float:
    """Returns the error of a whole layer: residual, norm, router, experts with biases or a
    correction of the choice, a projection beside them or a shared expert among them, perhaps with a
    gate, and one that reads the result; against all of these in kernels of their own."""
    width, inner, experts, slots = 96, 64, 5, 2
    gates, stacked = int("gated" in shared), int("stacked" in shared)
    every = experts + stacked
    shapes = {"router": (experts + gates, width), "gate_up": (every * 2 * inner, width)}
    shapes |= {"down": (every * width, inner), "next": (70, width), "first": (width, 72)}
    shapes |= {"shared": (width, 72)}
    values = {name: exact_weight(rng, *shape, "bf16") for name, shape in shapes.items()}
    x, added, norms = (
        rng.standard_normal(shape, np.float32) for shape in ((rows, 72), (rows, width), (2, width))
    )
    biases = [rng.standard_normal(len(values[name]), np.float32) for name in ("gate_up", "down")]
    corrections = rng.standard_normal(experts, np.float32)

    def output(**own: Any) -> Array:
        forward = Forward(device, rows, plan_rows=plan_rows, **own)
        w = {n: to_gpu(device, v, "f32" if n == "router" else dtype) for n, v in values.items()}
        first, second = (to_gpu(device, norm) for norm in norms)
        into, back = (to_gpu(device, b) if bias else None for b in biases)
        h = forward.input(added) + ops.linear(forward.input(x), w["first"])
        normed = ops.rmsnorm(h, first, EPS)
        logits, gate = ops.linear(normed, w["router"]), []
        if not stacked:
            logits, *gate = ops.split(logits, experts, *[1] * gates)
        own_route: dict[str, Any] = {"shared": stacked, "gated": logits.width > experts}
        own_route["correction"] = None if bias else to_gpu(device, corrections)
        routing = ops.route(logits, slots, normalize=True, sigmoid=not bias, **own_route)
        y = ops.expert_gate_up(normed, w["gate_up"], routing, into)
        y = ops.expert_down(y, w["down"], routing, back)
        if shared and not stacked:
            beside = ops.linear(forward.input(x[:, ::-1]), w["shared"])
            y = (ops.sigmoid_gate(beside, *gate) if gate else beside) + y
        result = ops.linear(ops.rmsnorm(h + y, second, EPS), w["next"])
        if plan_rows == 1 and not own:  # what is added costs no kernel
            kernels = {kernel.spec.name for kernel in forward.lower(result)[0].kernels}
            assert not kernels & {"sigmoid_gate", "elementwise_add", "route"}
        return forward.run(result)

    return nmse(output(), output(fuse=False).astype(np.float64))


@meeting(
    {
        "rows": ((1, 1), (3, 8), (9, 9), (40, 300)),  # and those that the plan has room for
        "dtype": ("f32", "bf16", "q8", "q4"),
        "bias": (True, False),
        "shared": ("stacked gated", "plain", "gated", "stacked", ""),
        "settings": (
            *(Settings(), Settings(bounds_checks=True), Settings(subgroups=False), LEAST),
            Settings(storage_buffers=8),
        ),
    },
    rows=((1, 1), (3, 8), (40, 300)),
    dtype=("bf16", "q8", "q4"),
    shared=("stacked gated", "plain", "gated", ""),
    settings=(Settings(), LEAST, Settings(storage_buffers=8)),
)
def test_a_layer_of_experts(open_device: OpenDevice, rng: np.random.Generator, case: Case) -> None:
    device, dtype = open_device(case["settings"]), case["dtype"]
    with device.scope():
        error = layer_error(device, rng, dtype, *case["rows"], case["bias"], case["shared"])
    # A sum that rounds otherwise may round another way to int8: 2e-6 for one of 96 values.
    assert error <= (1e-5 if dtype in QUANTIZED else LIMIT)


def test_prefill_is_deterministic(device: Device, rng: np.random.Generator) -> None:
    x, logits = rng.standard_normal((100, 4, 40), np.float32), logits_of(rng, 100, 9)
    weight = rng.standard_normal((9, 64, 40), np.float32)
    runs = [functions.expert_down(device, x, logits, weight) for _ in range(3)]
    assert all((run == runs[0]).all() for run in runs)


@pytest.mark.full
@pytest.mark.parametrize(
    ("rows", "dtype", "binding"),
    [
        pytest.param(1, "f32", 1 << 18, marks=pytest.mark.full),
        (5, "q4", 1 << 16),
        (9, "bf16", 1 << 17),
        pytest.param(9, "q4", 1 << 16, marks=pytest.mark.full),
    ],
)
def test_experts_larger_than_a_binding(
    open_device: OpenDevice, rng: np.random.Generator, rows: int, dtype: str, binding: int
) -> None:
    """They lie in shards of whole experts, and their biases in one vector."""
    small = open_device(Settings(max_binding=binding))
    with small.scope():
        shards = to_gpu(small, np.zeros((73 * 64, 32)), dtype, unit=64).shards
        assert len(shards) > 1
        assert all(shard.start % 64 == 0 for shard in shards)
    own: Case = {"rows": rows, "tiled": False, "experts": (3, 73), "dtype": dtype, "kind": ""}
    own["bias"] = True
    assert gate_up_error(small, rng, shape=(96, 32), **own) <= limit_of(dtype)
    for form in ("", "residual"):
        assert down_error(small, rng, shape=(32, 64), form=form, **own) <= limit_of(dtype)


def test_an_expert_larger_than_a_binding_is_refused(open_device: OpenDevice) -> None:
    small = open_device(Settings(max_binding=1 << 14))
    x, logits, weight = (np.zeros(shape, np.float32) for shape in ((1, 64), (1, 8), (8, 128, 64)))
    with pytest.raises(UnsupportedError, match="larger than one binding"):
        functions.expert_gate_up(small, x, logits, weight, slots=1)


# Configs

QWEN3_MOE = SHAPES["qwen3-30b-a3b"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 129}, "129 experts cannot be chosen of 128"),
        ({"num_experts": None}, "lacks 'num_local_experts'"),
        ({"norm_topk_prob": 1}, "'norm_topk_prob' must be of type bool"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
        ({"model_type": "olmoe", "clip_qkv": -8.0}, "'clip_qkv' must be positive"),
        ({"clip_qkv": 8.0}, "clip_qkv = 8.0 changes the computation"),
        ({"model_type": "qwen3"}, "num_experts = 128 changes the computation"),
        ({"swiglu_limit": 7.0}, "swiglu_limit = 7.0 changes the computation"),
        ({"model_type": "gpt_oss", "swiglu_limit": 10.0}, "swiglu_limit = 10.0 is not implemented"),
        ({"model_type": "gpt_oss", "swiglu_alpha": 1.0}, "swiglu_alpha = 1.0 is not implemented"),
        ({"model_type": "gpt_oss"}, "lacks 'rope_scaling'"),
    ],
)
def test_configs_of_experts_are_read_strictly(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        build_model(RawConfig(QWEN3_MOE | changes))


def test_experts_have_two_names() -> None:
    """transformers 5 writes num_local_experts."""
    renamed = QWEN3_MOE | {"num_local_experts": 128, "num_experts": None}
    old, new = (build_model(RawConfig(config)).config for config in (QWEN3_MOE, renamed))
    assert old.experts == new.experts


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [True] * 6),
        ({"decoder_sparse_step": 2}, [False, True] * 3),
        ({"mlp_only_layers": [0, 4]}, [False, True, True, True, False, True]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [5]}, [False, False, True] + [False] * 3),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], expected: list[bool]) -> None:
    model = build_model(RawConfig(QWEN3_MOE | {"num_hidden_layers": 6} | changes))
    names = {spec.name for spec in model.weights()}
    assert [f"layers.{i}.mlp.router" in names for i in range(6)] == expected
    assert [f"layers.{i}.mlp.down_proj" not in names for i in range(6)] == expected


# Checkpoints


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("dtype", [None, "q8"])
def test_experts_in_one_tensor(
    device: Device, tmp_path: Path, case: str, dtype: str | None
) -> None:
    """Experts as transformers 5 keeps them, and writes them if told to, give the same weights."""
    folder = load(case).write_checkpoint(tmp_path / "apart")
    model = build_model(RawConfig.open(folder))
    specs, apart = list(model.weights()), Checkpoint.open(folder)
    fused: dict[str, Array] = {}
    for spec in specs:
        parts = []
        for source in spec.sources:
            info = apart.tensors[source.key]
            values = np.empty(info.shape, np.uint16)
            info.read_into(values.data.cast("B"))
            parts.append(values)
        if spec.others:
            whole = np.concatenate(parts)
            rows = np.split(whole, np.cumsum([other.view.shape[0] for other in spec.others])[:-1])
            for other, part in zip(spec.others, rows, strict=True):
                fused[other.key] = part.reshape(other.shape)
        else:
            fused |= {s.key: part for s, part in zip(spec.sources, parts, strict=True)}
    (tmp_path / "fused").mkdir()
    save_bf16(fused, tmp_path / "fused" / SINGLE)
    with device.scope():
        loaded = [
            load_weights(device, specs, checkpoint, ignorable=model.ignorable, dtype=dtype)
            for checkpoint in (apart, Checkpoint.open(tmp_path / "fused"))
        ]
        for spec in specs:
            ours, theirs = (weights[spec.name] for weights in loaded)
            assert ours.dtype == theirs.dtype
            for a, b in zip(ours.shards[0].buffers, theirs.shards[0].buffers, strict=True):
                np.testing.assert_array_equal(device.read(a, np.uint32), device.read(b, np.uint32))


JOINED = ["deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe"]
JOINED += ["glm4_moe_lite", "granitemoeshared", "hunyuan_v1_moe", "qwen3_5_moe", "qwen3_next"]


@pytest.mark.parametrize("case", JOINED)
def test_a_shared_expert_takes_no_kernels_of_its_own(case: str) -> None:
    """In decode, where it would take two beside the others, and reads no more than there."""
    model, checkpoint = open_model(DATA / case)
    plan = plan_weights(model.weights(), checkpoint, ignorable=model.ignorable)
    kernels: list[Counter[str]] = []
    moved: list[int] = []
    for each in (plan, plan.joined()):
        dry = DryDevice(Limits())
        dry.subgroups, dry.subgroup_size = True, 32
        weights = {w.name: allocate(dry, w.shape, "bf16", unit=w.spec.unit) for w in each.weights}
        engine = Engine(dry, Loaded(model, weights), EngineOptions(context=128))
        lowering = engine.runner.steps.lowered[engine.runner.kinds.decode]
        kernels.append(Counter(kernel.spec.name for kernel in lowering.kernels))
        moved.append(weight_bytes_per_token(engine))
    assert not any("shared_expert" in weight.name for weight in plan.joined().weights)
    experts = model.config.experts
    assert experts is not None
    assert kernels[0] - kernels[1] == {"matmul_vec": 2 * sum(experts.layers)}
    assert kernels[0] >= kernels[1]
    assert moved[0] == moved[1]


def layer_of_experts(last: range | None = None, columns: range | None = None) -> list[WeightSpec]:
    """The experts of a layer, 4 wide, and a shared one twice as wide: all of its tensors, or these
    rows of one with gate and up, and these columns of the other."""
    w = (Source("gate", (8, 16)), Source("up", (8, 16)))
    if last is not None:
        w = (Source("all", (40, 16)).rows(last),)
    down = Source("down", (16, 8)) if columns is None else Source("down", (16, 20)).columns(columns)
    return [
        WeightSpec("0.experts.gate_up_proj", (Source("stack", (3, 8, 16)),), unit=8),
        WeightSpec("0.experts.down_proj", (Source("back", (3, 16, 4)),), unit=16),
        WeightSpec("0.shared_expert.gate_up_proj", w),
        WeightSpec("0.shared_expert.down_proj", (down,)),
    ]


def planned(specs: list[WeightSpec]) -> LoadPlan:
    """Returns the plan for a checkpoint that has the tensors of these weights in f32."""

    def part(source: Source) -> Part:
        return Part(source, TensorInfo(source.key, "f32", source.shape, Path(), 0, 0), source.view)

    return LoadPlan(
        tuple(PlannedWeight(s, s.shape, Stored("f32"), tuple(map(part, s.sources))) for s in specs)
    )


def test_a_shared_expert_may_be_a_part_of_its_tensors() -> None:
    """It becomes two: the first halves of its gate and of its up, then the second ones."""
    specs = layer_of_experts(range(5, 37, 2), range(7, 15))
    for given in (layer_of_experts(), specs):
        into, back = (weight.parts[1:] for weight in planned(given).joined().weights)
        rows = [(part.source.key, row) for part in into for row in part.view.rows]
        columns = [column for part in back for column in part.view.across]
        if given is specs:
            parts = 5, 21, 13, 29
            assert rows == [("all", row) for n in parts for row in range(n, n + 8, 2)]
            assert columns == [*range(7, 15)]
        else:
            parts = ("gate", 0), ("up", 0), ("gate", 4), ("up", 4)
            assert rows == [(key, row) for key, n in parts for row in range(n, n + 4)]
            assert columns == [*range(8)]


@pytest.mark.parametrize("owners", [["experts"], ["shared_expert"], ["experts", "shared_expert"]])
def test_a_shared_expert_with_biases_stays_apart(owners: list[str]) -> None:
    specs = layer_of_experts()
    for owner in owners:
        bias = Source(owner, (24 if owner == "experts" else 16,))
        specs.append(WeightSpec(f"0.{owner}.gate_up_proj.bias", (bias,)))
    plan = planned(specs)
    assert plan.joined() == plan


@pytest.mark.full
@pytest.mark.parametrize("dtype", [None, "q4"])
def test_a_shared_expert_is_the_same_alone(
    device: Device, rng: np.random.Generator, tmp_path: Path, dtype: str | None
) -> None:
    """MLPs without gates, one as wide as two of the others, cut while it is read, or quantised."""
    source = DATA / "nemotron_h_experts"
    config = json.loads((source / "config.json").read_text())
    config["moe_shared_expert_intermediate_size"] = 2 * config["moe_intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Array] = {}
    for key, info in Checkpoint.open(source).tensors.items():
        shared = ".shared_experts." in key
        tensors[key] = rng.standard_normal((64, 64), np.float32) / 8 if shared else read_rows(info)
    save_file(tensors, tmp_path / SINGLE)
    model, checkpoint = open_model(tmp_path)
    plan = plan_weights(model.weights(), checkpoint, dtype, model.ignorable)
    assert not any("shared_expert" in weight.name for weight in plan.joined().weights)
    logits: list[Array] = []
    decoded: list[Array] = []
    with device.scope():
        for each in (plan, plan.joined()):
            weights = loading.load_weights(device, each)
            own = Loaded(model, weights)
            engine = Engine(device, own, EngineOptions(context=64, kv_dtype="f32"))
            logits.append(scores(engine, range(3, 30)))
            decoded.append(answer(engine, [5], 4).logits)
    assert relative_error(decoded[1], decoded[0]) <= 1e-5
    # An MLP's projections of many rows on a CPU (matmul_lanes) have two int8 scales for 32 columns
    # of x, where the tiles of experts have one.
    differ = dtype is not None and device.software
    assert relative_error(logits[1], logits[0]) <= (6e-2 if differ else 1e-5)


def save_bf16(tensors: dict[str, Array], file: Path) -> None:
    header, data, start = {}, b"", 0
    for name, bits in tensors.items():
        data += bits.tobytes()
        offsets = [start, len(data)]
        header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": offsets}
        start = len(data)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
