"""From ops to dispatches: fusing changes nothing, and no activation is lost before its last use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from infer.kernels.checks.arrays import Array, to_gpu
from infer.kernels.checks.forward import Forward
from infer.kernels.checks.reference import nmse
from infer.kernels.checks.rope_check import rope_table
from infer.kernels.compiler.compile import lower, target_of
from infer.kernels.compiler.fusion import rewrite
from infer.kernels.gpu.device import Buffer, Device, DryDevice, Limits, Pipeline, Settings
from infer.kernels.gpu.native.library import NOTHING
from infer.kernels.gpu.plan import DispatchPlan, linear_grid
from infer.kernels.gpu.shader import KernelSpec, render
from infer.kernels.gpu.tensor import GpuTensor, allocate
from infer.kernels.lowering.arena import Arena, Kernel, Scratch, colour
from infer.kernels.lowering.graph import Graph, Slice, Value
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import MAX_VEC_ROWS, StepKind, Target, constant, stride
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops import functional as ops
from infer.kernels.ops.linear import LowRank
from infer.kernels.ops.recurrent import SSMScan
from infer.kernels.ops.rope import Rope
from infer.kernels.state.kv_cache import KVCache, KVShape, LayerCache
from infer.kernels.state.layer_state import LayerState, StateShape

# A model of two layers with all that the architectures have: biases, norms of heads, a window.
HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 40, 56, 61, 4, 2, 16
EPS = 1e-5


class Weights:
    """Random weights by name, the same for every device and forward."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def __call__(self, *shape: int, seed: int = 0) -> GpuTensor:
        rng = np.random.default_rng([seed, *shape])
        values = rng.standard_normal(shape, np.float32)
        return to_gpu(self.device, values / np.sqrt(shape[-1]), "bf16")


def model(
    device: Device,
    caches: Sequence[LayerCache],
    *,
    normed: str | None,
    turned: bool = True,
) -> Value:
    """The logits of a decoder, in which heads, or all heads of a row, may be normed."""
    weight = Weights(device)
    angles = np.arange(600)[:, None] * 0.1 ** np.arange(HEAD_DIM // 2)
    table = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    rope = Rope(device.upload(table), HEAD_DIM)
    q_width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    h = ops.embedding(weight(VOCAB, HIDDEN))
    for i, cache in enumerate(caches):
        x = ops.rmsnorm(h, weight(HIDDEN, seed=i), EPS)
        width = q_width + 2 * kv_width
        qkv = ops.linear(x, weight(width, HIDDEN, seed=i), weight(width, seed=i))
        q, k, v = ops.split(qkv, q_width, kv_width, kv_width)
        if normed:
            widths = (q_width, kv_width) if normed == "rows" else (HEAD_DIM, HEAD_DIM)
            q = ops.rmsnorm(q, weight(widths[0], seed=i), EPS)
            k = ops.rmsnorm(k, weight(widths[1], seed=i + 9), EPS)
        if turned:
            q, k = ops.rope(q, rope, HEAD_DIM), ops.rope(k, rope, HEAD_DIM)
        y = ops.attention(q, k, v, cache, scale=0.25, window=3 * i)
        h = h + ops.linear(y, weight(HIDDEN, q_width, seed=i))
        x = ops.rmsnorm(h, weight(HIDDEN, seed=i + 5), EPS)
        gate, up = ops.split(ops.linear(x, weight(2 * INNER, HIDDEN, seed=i)), INNER, INNER)
        down = ops.linear(ops.activation(gate, "silu") * up, weight(HIDDEN, INNER, seed=i))
        h = h + down
    h = ops.rmsnorm(ops.logits_rows(h), weight(HIDDEN), EPS)
    return ops.linear(h, weight(VOCAB, HIDDEN))


def logits(
    device: Device, chunks: Sequence[int], last_only: bool, *, fuse: bool, normed: str | None
) -> Array:
    """The logits after a prompt that is computed in chunks of so many rows."""
    with device.scope():
        caches = KVCache(device, [(KV_HEADS, HEAD_DIM)] * 2, 600, dtype="f32").layers
        results, position = [], 0
        tokens = np.random.default_rng(1).integers(0, VOCAB, sum(chunks))
        for rows in chunks:
            own = [rows - 1] if last_only else None
            forward = Forward(device, rows, logits_rows=own, fuse=fuse)
            output = model(device, caches, normed=normed)
            part = tokens[position : position + rows]
            results.append(forward.run(output, position=position, tokens=part))
            position += rows
    return np.concatenate(results)


NO_SUBGROUPS = Settings(subgroups=False)


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "last_only", "normed"),
    [
        *((Settings(), False, None), (Settings(), True, "heads"), (Settings(), False, "rows")),
        *((NO_SUBGROUPS, True, None), (NO_SUBGROUPS, False, "heads"), (NO_SUBGROUPS, True, "rows")),
    ],
)
def test_fusing_changes_nothing(
    open_device: Any, settings: Settings, last_only: bool, normed: str | None
) -> None:
    device = open_device(settings)
    chunks = [20, 1, 5, 1]
    fused, plain = (
        logits(device, chunks, last_only, fuse=fuse, normed=normed) for fuse in (True, False)
    )
    assert np.isfinite(plain).all()
    assert nmse(fused, plain) <= 1e-10


@pytest.mark.full
def test_chunks_change_nothing(device: Device) -> None:
    """Prefill, a few rows and single rows are different kernels with the same result."""
    expected = logits(device, [1] * 19, False, fuse=True, normed="heads")
    for chunks in ([19], [8, 8, 3], [9, 10], [2] * 9 + [1]):
        y = logits(device, chunks, False, fuse=True, normed="heads")
        assert nmse(y, expected) <= 1e-10


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize(
    ("turned", "normed", "names"),
    [
        (16, 48, {"latent_write"}),
        (8, 48, {"rope", "rmsnorm", "kv_write"}),  # half of the key
        (16, 24, {"rope", "rmsnorm", "kv_write"}),  # the latent in two parts
    ],
)
@pytest.mark.parametrize(("kv_dtype", "limit"), [("f32", 1e-10), ("q8", 1e-6)])
def test_fusing_what_goes_into_a_latent_cache(
    device: Device,
    rng: np.random.Generator,
    rows: int,
    turned: int,
    normed: int,
    names: set[str],
    kv_dtype: str,
    limit: float,
) -> None:
    x, w = rng.standard_normal((rows, 3 * 40 + 64)), rng.standard_normal((3 * 48, 24))
    results = []
    for fuse in (True, False):
        with device.scope():
            forward = Forward(device, rows, fuse=fuse)
            rope = Rope(device.upload(rope_table(1e4 ** -np.arange(0, 1, 2 / turned), 300)), turned)
            q, k, v = ops.split(forward.input(x), 3 * 40, 16, 48)
            q = ops.head_linear(ops.rope(q, rope, 40), to_gpu(device, w), 3, keep=True)
            k = ops.rope(k, rope, 16)
            v = ops.rmsnorm(v, to_gpu(device, np.linspace(0.5, 1.5, normed)), 1e-6)
            cache = KVCache(device, [KVShape(1, 64, latent=True)], 300, dtype=kv_dtype).layers[0]
            y = ops.attention(q, k, v, cache, scale=0.25)
            lowering, _ = forward.lower(y)
            if fuse:
                found = {kernel.spec.name for kernel in lowering.kernels}
                heads = {"matmul", "rope"} if rows == 20 and turned == 16 else {"head_linear"}
                own = names - {"latent_write"} if rows == 1 else names  # head_linear does that too
                assert {name for name in found if "attention" not in name} == own | heads
            results.append(forward.run(y))
    assert nmse(*results) <= limit


# Operations that are fused


class Everywhere(dict[GpuTensor, LowRank]):
    """Something lies beside every weight: one for all rows, or, by row, a stack of three."""

    def __init__(self, device: Device, by_row: bool) -> None:
        self.device, self.by_row = device, by_row

    def get(self, weight: GpuTensor, default: Any = None) -> LowRank:
        (rows, columns), count = weight.shape, 3 if self.by_row else 1
        a, b = ((count * 4, columns), (count * rows, 4))
        return LowRank(*(allocate(self.device, s, "f32") for s in (a, b)), self.by_row)


def kernels_of(
    rows: int,
    *,
    fuse: bool = True,
    normed: str | None = "heads",
    turned: bool = True,
    bindings: int = 9,
    changed: str = "",
    kv_len: int = 2000,
    kv_dtype: str = "f16",
) -> Counter[str]:
    """How often each kernel runs in a step of a two-layer model on an adapter with subgroups."""
    dry = DryDevice(Limits(workgroup_storage=32768, storage_buffers=bindings))
    dry.subgroup_size = 32
    caches = KVCache(dry, [(KV_HEADS, HEAD_DIM)] * 2, 2000, dtype=kv_dtype).layers
    output = model(dry, caches, normed=normed, turned=turned)
    changes = Everywhere(dry, changed == "by row") if changed else {}
    target = target_of(dry, StepKind(rows, logits=1), fuse=fuse)
    lowering = lower(target, output, dry.buffer(16), dry.buffer(16), changes=changes)
    return Counter(
        kernel.spec.name
        for kernel in lowering.kernels
        if not callable(kernel.grid) or kernel.grid(rows, kv_len) is not NOTHING
    )


SHORT = Counter(matmul_vec=4, attention_decode=1)  # a layer of decode with a window
LONG = SHORT + Counter(attention_combine=1)
APART = Counter(matmul_vec=8, attention=2, attention_combine=1)  # of both, where heads come before


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("normed", [None, "heads", "rows"])
@pytest.mark.parametrize(("kv_len", "layer"), [(1, SHORT), (300, SHORT), (2000, LONG)])
def test_a_layer_of_decode_is_five_or_six_kernels(
    kv_len: int, layer: Counter[str], normed: str | None, turned: bool
) -> None:
    found = kernels_of(1, normed=normed, turned=turned, kv_len=kv_len)
    assert found == layer + SHORT + Counter(embedding=1, matmul_vec=1)


def test_a_layer_of_a_few_rows_is_eight_or_nine_kernels() -> None:
    """A row may attend to another's key, which must be in the cache before; and not every workgroup
    of a projection works the norm out again."""
    layer = Counter(rmsnorm=2, matmul_rows=4, rope_kv_write=1, attention=1)
    long = Counter(attention_combine=1)  # the other layer has a window
    rest = Counter(embedding=1, take_rows=1, matmul_vec=1)
    assert kernels_of(2) == kernels_of(2, normed="rows") == layer + layer + long + rest
    assert kernels_of(2, kv_len=1000) == layer + layer + rest
    layer = Counter(rmsnorm=2, matmul_rows=4, kv_write=1, attention=1)
    assert kernels_of(2, normed=None, turned=False) == layer + layer + long + rest


def test_kernels_bind_no_more_buffers_than_the_adapter_allows() -> None:
    """With norms the fused kernels have more than the eight that every device has."""
    rest = Counter(embedding=1, matmul_vec=1)
    assert kernels_of(1, normed=None, bindings=8) == LONG + SHORT + rest
    assert kernels_of(1, bindings=9) == LONG + SHORT + rest
    apart = Counter(rmsnorm=4, rope=4, kv_write=2)
    for normed in ("heads", "rows"):
        assert kernels_of(1, normed=normed, bindings=8) == APART + rest + apart


@pytest.mark.parametrize(("head_dim", "apart"), [(64, 0), (96, 2), (128, 0)])
def test_scales_of_a_q8_cache_are_written_in_pairs(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, apart: int
) -> None:
    """Attention does it by itself where no pair is of two heads, which two workgroups write."""
    monkeypatch.setitem(globals(), "HEAD_DIM", head_dim)
    rest = Counter(embedding=1, matmul_vec=1)
    found = kernels_of(1, kv_dtype="q8")
    whole = APART + Counter(rope_kv_write=apart) if apart else LONG + SHORT
    assert found == whole + rest


def test_a_layer_of_prefill_is_eight_kernels() -> None:
    layer = Counter(rmsnorm=2, matmul=4, rope_kv_write=1, attention_tiled=1)
    rest = Counter(embedding=1, take_rows=1, rmsnorm=1, matmul_vec=1)
    assert kernels_of(512) == layer + layer + rest
    # Every workgroup of rope_kv_write would read the whole row of each head.
    layer = Counter(rmsnorm=4, matmul=4, rope=2, kv_write=1, attention_tiled=1)
    assert kernels_of(512, normed="rows") == layer + layer + rest


def test_a_routing_shares_memory_with_nothing() -> None:
    """A profile runs an expert's kernels after others, which would have written over it."""
    first, routing, last = Scratch(4), Scratch(4, is_routing=True), Scratch(4)
    spec = KernelSpec.of("copy")
    kernels = [
        Kernel(spec, (operand,), (1, 1, 1), constant(0), constant(0), head=False)
        for operand in (first, routing, last)
    ]
    slots = colour(kernels, lambda operand: 4)
    assert [slot.operands for slot in slots] == [[first, last], [routing]]


@pytest.mark.parametrize("v_normed", [False, True])
@pytest.mark.parametrize("kv_parts", [2, 1, 0])
def test_attention_takes_apart_what_there_is_of_q_k_and_v(kv_parts: int, v_normed: bool) -> None:
    """Values may be keys before their norm; keys and values may be in the cache already."""
    dry = DryDevice(Limits(storage_buffers=10))
    dry.subgroup_size = 32
    cache = KVCache(dry, [(2, 16)], 64).layers[0]
    rope, norm = Rope(dry.buffer(1024), 16), allocate(dry, (16,), "f32")
    x = ops.input(dry.buffer(4 * 64), 64)
    qkv = ops.linear(x, allocate(dry, (64 + 32 * kv_parts, 64), "bf16"))
    q, *kv = ops.split(qkv, 64, *[32] * kv_parts)
    turned = [ops.rope(ops.rmsnorm(part, norm, EPS), rope, 16) for part in (q, *kv[:1])]
    values = [ops.rmsnorm(part, norm, EPS) if v_normed else part for part in kv[-1:]]
    output = ops.attention(*turned, *values, *[None] * (2 * (not kv)), cache, scale=0.25)
    step, result = dry.buffer(16), dry.buffer(4 * 64)
    lowering = lower(target_of(dry, StepKind(1)), output, step, result)
    assert [kernel.spec.name for kernel in lowering.kernels] == ["matmul_vec", "attention_decode"]


@pytest.mark.parametrize(("dtype", "rows"), [("bf16", 1), ("q8", 1), ("q8", 5)])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_norm_behind_a_projection_is_one_kernel(scaled: bool, dtype: str, rows: int) -> None:
    """It adds the residual, and prepares the sum for the next projection."""
    dry = DryDevice(Limits(storage_buffers=8))
    dry.subgroup_size = 32
    h = ops.input(dry.buffer(4 * 8 * 64), 64)
    norms = [allocate(dry, (64,), "f32") for _ in range(2)]
    first, second = (allocate(dry, (64, 64), dtype) for _ in range(2))
    total = h + ops.rmsnorm(ops.linear(h, first), norms[0], EPS)
    if scaled:
        total = ops.scale(total, allocate(dry, (1,), "f32"))
    output = total + ops.linear(ops.rmsnorm(total, norms[1], EPS), second)
    step, result = dry.buffer(16), dry.buffer(4 * 8 * 64)
    lowering = lower(target_of(dry, StepKind(rows)), output, step, result)
    kernels = [kernel.spec.name for kernel in lowering.kernels]
    made = ["quantize"] * (dtype == "q8")
    if rows == 1:
        assert kernels == [*made, "matmul_vec", "rmsnorm", "matmul_vec"]
    else:  # whose norm is a kernel, which writes int8
        assert kernels == [*made, "matmul_rows", "rmsnorm", "rmsnorm", "matmul_rows"]


@pytest.mark.parametrize(
    ("dtype", "bindings", "made"),
    [("q8", 9, []), ("q8", 8, ["quantize"]), ("bf16", 9, []), ("bf16", 8, [])],
)
def test_a_layer_of_mamba_2_is_five_kernels_of_decode(
    dtype: str, bindings: int, made: list[str]
) -> None:
    """The scan writes the input of the projection behind its norm, if it can bind the buffers."""
    dry = DryDevice(Limits(storage_buffers=bindings))
    dry.subgroup_size = 32
    state = LayerState.new(dry, StateShape(64 + 2 * 24, 4, 1, 4, 24, 16), 0)
    norms = [allocate(dry, (64,), "f32") for _ in range(2)]
    h = ops.linear(ops.input(dry.buffer(4 * 64), 64), allocate(dry, (64, 64), dtype))
    x = ops.rmsnorm(h, norms[0], EPS)
    zxbc = ops.linear(x, allocate(dry, (64 + state.shape.channels, 64), dtype))
    dt = ops.linear(x, allocate(dry, (4, 64), dtype))
    z, xbc = ops.split(zxbc, 64, state.shape.channels)
    taps = allocate(dry, (4 * state.shape.channels,), "f32")
    xbc = ops.short_conv(xbc, taps, None, state, activation="silu")
    y = ops.ssm_scan(xbc, z, dt, allocate(dry, (12,), "f32"), state)
    output = h + ops.linear(ops.rmsnorm(y, norms[1], EPS), allocate(dry, (64, 64), dtype))
    step, result = dry.buffer(16), dry.buffer(4 * 64)
    lowering = lower(target_of(dry, StepKind(1)), output, step, result)
    before = ["quantize"] * (dtype == "q8") + ["matmul_vec"]
    layer = [*made, "matmul_vec", "matmul_vec", "short_conv", "ssm_scan", *made, "matmul_vec"]
    assert [kernel.spec.name for kernel in lowering.kernels] == before + layer
    operands = [operand for kernel in lowering.kernels for operand in kernel.operands]
    read = any(isinstance(operand, SSMScan) for operand in operands)
    assert read == (dtype != "q8" or bindings == 8)


def test_what_lies_beside_a_weight_costs_two_kernels() -> None:
    """And the MLP's activation, which is of the sum, one more."""
    added = Counter(matmul_vec=16, activation=2)
    rest = Counter(embedding=1, matmul_vec=3)
    assert kernels_of(1, changed="all") == LONG + SHORT + added + rest
    layer = Counter(rmsnorm=2, matmul=12, rope_kv_write=1, attention_tiled=1, activation=1)
    rest = Counter(embedding=1, take_rows=1, rmsnorm=1, matmul_vec=3)
    assert kernels_of(512, changed="all") == layer + layer + rest


def test_what_each_row_has_of_its_own_costs_two_kernels() -> None:
    """A change of each row costs two kernels: the first computes the norm, the second adds the
    residual."""
    added = Counter(lora_down=9, lora_up=9, activation=2)
    rest = Counter(embedding=1, matmul_vec=1)
    assert kernels_of(1, changed="by row") == LONG + SHORT + added + rest
    layer = Counter(rmsnorm=2, matmul=4, rope_kv_write=1, attention_tiled=1, activation=1)
    layer += Counter(lora_down=4, lora_up=4)
    rest = Counter(embedding=1, take_rows=1, rmsnorm=1, matmul_vec=1, lora_down=1, lora_up=1)
    assert kernels_of(512, changed="by row") == layer + layer + rest


def test_without_fusing_every_op_has_its_kernel() -> None:
    attention = Counter(kv_write=1, attention_scores=1, softmax=1, weighted_sum=1)
    layer = attention + Counter(
        rmsnorm=4, matmul_vec=4, rope=2, activation=1, elementwise_mul=1, elementwise_add=2
    )
    rest = Counter(embedding=1, rmsnorm=1, matmul_vec=1)
    assert kernels_of(1, fuse=False) == layer + layer + rest


class Closed(Tuning):
    """Chooses no variant."""

    def choose(self, rule: Callable[..., Any], *call: Any) -> Any:
        raise AssertionError(f"{rule.__name__} is asked while kernels are emitted")


@pytest.mark.parametrize("rows", [1, 5, 40, 512])
@pytest.mark.parametrize("fuse", [True, False])
def test_variants_are_chosen_before_kernels_are_emitted(rows: int, fuse: bool) -> None:
    dry = DryDevice(Limits(workgroup_storage=32768, storage_buffers=9))
    caches = KVCache(dry, [(KV_HEADS, HEAD_DIM)] * 2, 2000, dtype="f16").layers
    graph = Graph(model(dry, caches, normed="heads"))
    target = Target(dry, StepKind(rows, logits=1), Tuning(dry), fuse)
    rewrite(graph, target, Everywhere(dry, by_row=True))
    target.tuning = Closed(dry)
    lowering = Lowering(target, graph.output, dry.buffer(16), dry.buffer(16))
    for value in graph.values:
        value.lower(lowering)
    assert {"matmul_vec", "lora_down"} <= {kernel.spec.name for kernel in lowering.kernels}


# Random graphs


class Recorder(DryDevice):
    """Allocates and compiles nothing; notes what is bound."""

    def __init__(self) -> None:
        super().__init__(Limits(max_binding=1 << 30, storage_buffers=9))
        self.subgroup_size = 32
        self.bound: list[tuple[Pipeline, list[Buffer]]] = []
        self.rendered: dict[KernelSpec, Pipeline] = {}

    def pipeline(self, spec: KernelSpec) -> Pipeline:
        if spec not in self.rendered:
            self.rendered[spec] = Pipeline(spec, render(spec), None, None)
        return self.rendered[spec]

    def pipelines(self, specs: Iterable[KernelSpec]) -> None:
        pass

    def bind(self, pipeline: Pipeline, buffers: Sequence[Buffer]) -> None:
        self.bound.append((pipeline, list(buffers)))


def random_graph(
    device: Device, rng: np.random.Generator, cache: LayerCache, x: Value, size: int
) -> tuple[Value, dict[GpuTensor, LowRank]]:
    """`size` operations on values of some widths, with whatever uses of them come up, fusable or
    not; and what lies beside their weights."""
    changes: dict[GpuTensor, LowRank] = {}
    weight = Weights(device)
    widths = (16, 48, 52, 96)
    values = [x]

    def seen(value: Value) -> Value:
        """Now and then something else uses it as well, so that it cannot be fused away."""
        if rng.random() < 0.15:
            values.append(value)
        return value

    def linear(
        value: Value, n: int, seed: int, bias: GpuTensor | None = None, changed: bool = False
    ) -> Value:
        """A projection, perhaps with something beside its weight; they read whole rows."""
        whole = ops.activation(value, "silu") if isinstance(value, Slice) else value
        own = weight(n, value.width, seed=seed)
        if changed:
            by_row = bool(rng.random() < 0.5)
            count = 3 if by_row else 1  # adapters
            a = weight(5 * count, value.width, seed=seed + 1)
            changes[own] = LowRank(a, weight(n * count, 5, seed=seed + 2), by_row)
        return ops.linear(whole, own, bias)

    table = np.random.default_rng(2).standard_normal((64, 8, 2)).astype(np.float32)
    rope = Rope(device.upload(table), 16)
    for i in range(size):
        x = values[rng.integers(max(0, len(values) - 4), len(values))]  # mostly recent ones
        kind = rng.choice(
            ["norm", "behind", "linear", "linear", "residual", "gated", "activation", "scale"]
            if rng.random() < 0.7
            else ["rope", "attend", "add"]
        )
        same = [value for value in values if value.width == x.width]
        other = same[rng.integers(len(same))]
        if kind == "norm":
            x = ops.rmsnorm(x, weight(x.width, seed=i), EPS)
        elif kind == "behind":
            y = seen(ops.rmsnorm(x, weight(x.width, seed=i), EPS))
            x = other + y if rng.random() < 0.5 else y + other
        elif kind == "scale":
            x = ops.scale(x, weight(1, seed=i))
        elif kind in ("linear", "residual"):
            n = x.width if kind == "residual" else int(rng.choice(widths))
            bias = weight(n, seed=i) if rng.random() < 0.5 else None
            y = linear(x, n, i, bias, changed=kind == "residual" and rng.random() < 0.5)
            if kind == "residual":
                y = other + seen(y) if rng.random() < 0.5 else seen(y) + other
            x = y
        elif kind == "gated":
            both = seen(linear(x, 2 * 48, i))
            gate, up = map(seen, ops.split(both, 48, 48))
            if rng.random() < 0.2:  # the other way round is not what the kernel computes
                gate, up = up, gate
            act = seen(ops.activation(gate, "silu"))
            x = act * up if rng.random() < 0.8 else up * act
        elif kind == "activation":
            x = ops.activation(seen(linear(x, int(rng.choice(widths)), i)), "gelu")
            same = [value for value in values if value.width == x.width]
            if same and rng.random() < 0.5:
                x = seen(x) * same[rng.integers(len(same))]
        elif kind == "rope" and x.width % 16 == 0:
            x = ops.rope(x, rope, 16)
        elif kind == "attend":
            qkv = seen(linear(x, 96, i))
            q, k, v = map(seen, ops.split(qkv, 64, 16, 16))
            if rng.random() < 0.2:
                k, v = v, k
            for turned, chance in ((False, 0.5), (True, 0.8)):
                if rng.random() < chance:
                    norm = weight(16, seed=i)
                    q, k = (
                        seen(ops.rope(y, rope, 16) if turned else ops.rmsnorm(y, norm, EPS))
                        for y in (q, k)
                    )
            x = seen(ops.attention(q, k, v, cache, scale=0.25))
            if rng.random() < 0.5:
                x = ops.sigmoid_gate(x, linear(x, int(rng.choice([1, 64])), i))
        else:
            x = x + other if x is not other else x * other
        values.append(x)
    # Everything that nobody has used, so that nothing is dead.
    read: set[Value] = set()
    missing = [*values]
    while missing:
        new = [source for source in missing.pop().inputs if source not in read]
        read.update(new)
        missing += new
    total = linear(values[0], 24, 0)
    for value in values[1:]:
        if value not in read:
            total = total + linear(value, 24, 7)
    return total, changes


def check_lifetimes(
    kernels: Sequence[Kernel], bound: Sequence[tuple[Pipeline, list[Buffer]]], rows: int
) -> None:
    """Follow what each buffer holds: every read finds what was written for it."""
    holds: dict[Buffer, Any] = {}
    for kernel, (pipeline, buffers) in zip(kernels, bound, strict=True):
        label = kernel.spec.label
        bindings = [binding.access for binding in pipeline.shader.bindings]
        read = {b for b, access in zip(buffers, bindings, strict=True) if access == "read"}
        written = [b for b, access in zip(buffers, bindings, strict=True) if access != "read"]
        assert not read & {*written}, f"{label} reads and writes one buffer"
        assert len(written) == len({*written}), f"{label} writes one buffer twice"
        for operand, buffer in zip(kernel.operands, buffers, strict=True):
            if isinstance(operand, Buffer):
                assert buffer is operand
            elif buffer in written:
                holds[buffer] = operand
                assert buffer.nbytes >= needed(operand, rows)
            else:
                assert holds[buffer] is operand, f"{label} reads what has been lost"


def needed(operand: Value | Scratch, rows: int) -> int:
    """Bytes of an activation: matmul writes whole tiles."""
    if isinstance(operand, Scratch):
        return operand.nbytes
    padded = rows if rows <= MAX_VEC_ROWS else -(-rows // 128) * 128
    return 4 * padded * stride(operand.width)


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("fuse", [True, False])
def test_no_live_activation_is_overwritten(rows: int, fuse: bool) -> None:
    for seed in range(30):
        device = Recorder()
        cache = KVCache(device, [(1, 16)], 64, dtype="f32").layers[0]
        x = ops.input(device.buffer(4 * 128 * 48), 48)
        rng = np.random.default_rng(seed)
        output, changes = random_graph(device, rng, cache, x, size=int(rng.integers(1, 25)))
        target, step = target_of(device, StepKind(rows), fuse=fuse), device.buffer(1024)
        lowering = lower(target, output, step, device.buffer(4 * 128 * 24), changes=changes)
        lowering.place(Arena(device))
        check_lifetimes(lowering.kernels, device.bound, rows)


@pytest.mark.full
@pytest.mark.parametrize("rows", [1, 5, 12])
def test_fusing_a_random_graph_changes_nothing(device: Device, rows: int) -> None:
    for seed in range(4):
        results = []
        for fuse in (True, False):
            with device.scope():
                rng = np.random.default_rng(seed)
                cache = KVCache(device, [(1, 16)], 64, dtype="f32").layers[0]
                forward = Forward(device, rows, fuse=fuse)
                x = forward.input(np.random.default_rng(3).standard_normal((rows, 48)))
                output, forward.changes = random_graph(device, rng, cache, x, size=8)
                adapters = np.random.default_rng(seed).integers(0, 4, rows)
                results.append(forward.run(output, adapters=adapters))
        fused, plain = results
        assert np.isfinite(plain).all()
        assert nmse(fused, plain) <= 1e-10, seed


# Arenas, plans, grids


def test_an_arena_grows_and_serves_smaller_plans() -> None:
    device = Recorder()
    arena = Arena(device)
    arena.reserve([100, 200])
    first, second = arena.slots
    arena.reserve([50, 300, 20])
    assert arena.slots[0] is first
    assert arena.slots[1] is not second
    assert [slot.nbytes >= size for slot, size in zip(arena.slots, (100, 300, 20), strict=True)]


def test_the_head_is_what_only_rows_with_logits_need(device: Device) -> None:
    """So that prefill can leave it out for all chunks but the last."""
    with device.scope():
        caches = KVCache(device, [(KV_HEADS, HEAD_DIM)] * 2, 600, dtype="f32").layers
        forward = Forward(device, 20, logits_rows=[19])
        lowering, _ = forward.lower(model(device, caches, normed=None))
        plan: DispatchPlan = lowering.place(Arena(device))
    assert [item.pipeline.spec.name for item in plan.head][:1] == ["take_rows"]
    names = {item.pipeline.spec.name for item in plan.body}
    assert {"rope_kv_write", "attention_tiled"} <= names
    assert "take_rows" not in names


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 63, 64, 65, 511])
def test_a_linear_grid_covers_its_count_within_the_limit(count: int) -> None:
    x, y, z = linear_grid(count, limit=8)
    assert max(x, y, z) <= max(8, -(-count // 8))
    assert x <= 8
    assert z == 1
    assert count <= x * y < max(count, 1) + 8


def test_misfitting_widths_are_refused_while_tracing() -> None:
    device = Recorder()
    weight = Weights(device)
    x = ops.input(device.buffer(64), 16)
    y = ops.input(device.buffer(64), 12)
    with pytest.raises(ValueError, match="rows of 16 and 12 do not fit"):
        x + y
    with pytest.raises(ValueError, match="rows of 16 and 12 do not fit"):
        x * y
    with pytest.raises(ValueError, match="do not fit a weight"):
        ops.linear(x, weight(4, 15))
    with pytest.raises(ValueError, match="do not add up to 16"):
        ops.split(x, 8, 7)
    with pytest.raises(ValueError, match="cannot cover rows of 16"):
        ops.rmsnorm(x, weight(12), EPS)


@pytest.mark.parametrize("dims", [(6, 8), (8, 6)])
def test_scans_refuse_heads_that_are_not_fours(dims: tuple[int, int]) -> None:
    device = Recorder()
    shape = StateShape(4 * dims[0] + 2 * dims[1], 4, 2, 2, *dims)
    x = ops.input(device.buffer(4 * shape.channels), shape.channels)
    z, dt, gates = (ops.input(device.buffer(64), n) for n in (2 * dims[1], 2, 4))
    state, own = LayerState.new(device, shape, 0), allocate(device, (6,), "f32")
    with pytest.raises(ValueError, match="do not fit StateShape"):
        ops.ssm_scan(x, z, dt, own, state)
    with pytest.raises(ValueError, match="do not fit StateShape"):
        ops.delta_rule(x, gates, own, own, state)
