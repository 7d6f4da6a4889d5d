"""Quantised weights: the least error that their format allows, in the layout that kernels read."""

from __future__ import annotations

import json
import runpy
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import places
import pytest
from engines import scores
from numpy.typing import NDArray
from plans import load_weights, random_weights
from reference_models import load, relative_error
from safetensors.numpy import save_file

import infer
from infer.engine.engine import Engine
from infer.engine.options import EngineOptions
from infer.engine.steps import Loaded
from infer.kernels.checks import functions
from infer.kernels.checks.arrays import to_gpu
from infer.kernels.errors import CheckpointError, UnsupportedError
from infer.kernels.gpu import quantize, upload
from infer.kernels.gpu.device import Device, Limits, Settings
from infer.kernels.gpu.pack import from_bf16, to_bf16
from infer.kernels.gpu.tensor import GpuTensor, Grouping, allocate, row_bytes
from infer.models import build_model
from infer.models.loading.checkpoint import SINGLE, Checkpoint
from infer.models.loading.config import RawConfig
from infer.models.loading.plan import converted_dtype
from infer.models.loading.weights import Source, WeightSpec

Array = NDArray[Any]
FORMATS = ("q8", "q4")
RANGE = {"q8": (-127, 127), "q4": (-8, 7)}
FACTORS = 0.75 + 0.025 * np.arange(15)  # of the scales that q4 chooses from
SHAPES = [(5, 32), (7, 40), (3, 8), (4, 100), (2, 1), (33, 352)]


@pytest.fixture(autouse=True)
def scope(device: Device) -> Iterator[None]:
    with device.scope():
        yield


def normal(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    """Values of rows whose magnitudes differ, as those of models do."""
    rng = np.random.default_rng(seed)
    rows = rng.lognormal(-4, 1, (shape[0], *(1 for _ in shape[1:])))
    return (rows * rng.standard_normal(shape)).astype(np.float32)


def unpacked(device: Device, tensor: GpuTensor) -> tuple[Array, Array]:
    """Integers [rows, blocks, 32] and scales [rows, blocks], by the layouts' description; padding
    is checked to be zero."""
    rows, columns = tensor.shape
    n_blocks = -(-columns // 32)
    integers, scales = [], []
    for shard in tensor.shards:
        assert shard.scales is not None
        data = device.read(shard.buffer, np.int8)[: shard.rows * row_bytes(columns, tensor.dtype)]
        if tensor.dtype == "q4":
            data = data.reshape(shard.rows, n_blocks, 16)
            nibbles = np.concatenate([data & 15, (data >> 4) & 15], axis=2)
            integers.append(np.where(nibbles < 8, nibbles, nibbles - 16))
        else:
            planes = data.reshape(shard.rows, 2, n_blocks, 16)
            integers.append(np.concatenate([planes[:, 0], planes[:, 1]], axis=2))
        f16 = device.read(shard.scales, np.float16)[
            : shard.rows * Grouping().row_bytes(columns) // 2
        ]
        f16 = f16.reshape(shard.rows, -1)
        assert f16.shape[1] == -(-n_blocks // 8) * 8
        assert not f16[:, n_blocks:].any()
        scales.append(f16[:, :n_blocks])
    q = np.concatenate(integers).astype(np.float64)
    assert not q.reshape(rows, -1)[:, columns:].any()
    return q, np.concatenate(scales).astype(np.float64)


def dequantized(device: Device, tensor: GpuTensor) -> Array:
    q, scales = unpacked(device, tensor)
    return (q * scales[..., None]).reshape(len(q), -1)[:, : tensor.shape[1]]


def in_blocks(values: Array) -> Array:
    """[rows, blocks, 32] in float64, padded with zeros."""
    padding = -values.shape[1] % 32
    padded = np.pad(values.astype(np.float64), ((0, 0), (0, padding)))
    return padded.reshape(len(values), -1, 32)


def candidates(blocks: Array, dtype: str) -> Array:
    """The scales that a format chooses from, each as the two numbers of f16 that are nearest to it,
    because drivers may round to either: [2, candidates, rows, blocks]."""
    most, least = blocks.max(axis=2), blocks.min(axis=2)
    largest = np.where(most >= -least, most, least)
    scales = {"q8": np.abs(largest)[None] / 127, "q4": largest / -8 * FACTORS[:, None, None]}
    exact = scales[dtype]
    nearest = exact.astype(np.float16)
    beyond = np.nextafter(nearest, np.where(nearest < exact, np.inf, -np.inf).astype(np.float16))
    return np.stack([nearest, np.where(nearest == exact, nearest, beyond)]).astype(np.float64)


def errors(blocks: Array, scales: Array, dtype: str) -> Array:
    """The sums of squared errors with some scales, [..., rows, blocks]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.rint(blocks / scales[..., None]).clip(*RANGE[dtype])
    q = np.where(scales[..., None] == 0, 0, q)
    return ((blocks - scales[..., None] * q) ** 2).sum(axis=-1)


def check_quantized(device: Device, tensor: GpuTensor, values: Array) -> None:
    blocks, (q, scales) = in_blocks(values), unpacked(device, tensor)
    options = candidates(blocks, tensor.dtype)
    assert (scales == options).any(axis=(0, 1)).all()
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = (blocks / scales[..., None]).clip(*RANGE[tensor.dtype])
    assert np.abs(np.where(scales[..., None] == 0, 0, exact) - q).max() <= 0.5 + 1e-4
    got = ((blocks - scales[..., None] * q) ** 2).sum(axis=2)
    least = errors(blocks, options, tensor.dtype).max(axis=0).min(axis=0)
    assert (got <= least * (1 + 1e-4) + 1e-14).all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_scale_of_the_format_gives_a_smaller_error(
    device: Device, dtype: str, shape: tuple[int, int]
) -> None:
    values = normal(shape)
    check_quantized(device, to_gpu(device, values, dtype), values)


def test_the_error_of_normal_values_is_as_measured(device: Device) -> None:
    values = np.random.default_rng(0).standard_normal((200, 1024)).astype(np.float32)
    for dtype, expected in (("q8", 0.0054), ("q4", 0.0814)):
        error = dequantized(device, to_gpu(device, values, dtype)) - values
        assert np.sqrt((error**2).mean() / (values**2).mean()) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("dtype", FORMATS)
def test_blocks_of_zeros_tiny_and_large_values(device: Device, dtype: str) -> None:
    values = normal((8, 64))
    values[0] = 0
    values[1, :32] = 0
    values[2] *= 1e-3 / np.abs(values[2]).max()  # scales that are subnormal in f16
    values[3] *= 1e-9 / np.abs(values[3]).max()  # and smaller than any f16
    values[4] *= 4e5 / np.abs(values[4]).max()
    values[5], values[6] = 0.5, -0.5
    values[7, ::2] = 1
    values[7, 1::2] = -1
    tensor = to_gpu(device, values, dtype)
    q, scales = unpacked(device, tensor)
    assert not q[0].any()
    assert not scales[0].any()
    assert not q[1, 0].any()
    assert not q[3].any()
    usual = [0, 1, 2, 4, 5, 6, 7]
    rest = to_gpu(device, values[usual], dtype)
    check_quantized(device, rest, values[usual])


# Loading


def weight(name: str, **shapes: tuple[int, ...]) -> WeightSpec:
    return WeightSpec(name, tuple(Source(key, shape) for key, shape in shapes.items()))


def save(folder: Path, values: dict[str, Array], stored: str) -> dict[str, Array]:
    """Writes a checkpoint and returns the values that it holds."""
    if stored == "bf16":  # which numpy lacks
        bits = {name: to_bf16(array) for name, array in values.items()}
        header, end = {}, 0
        for name, array in bits.items():
            span, end = [end, end + array.nbytes], end + array.nbytes
            header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": span}
        text = json.dumps(header).encode()
        data = b"".join(array.tobytes() for array in bits.values())
        (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + data)
        return {name: from_bf16(array) for name, array in bits.items()}
    arrays = {
        n: a.astype({"f32": np.float32, "f16": np.float16}[stored]) for n, a in values.items()
    }
    save_file(arrays, folder / SINGLE)
    return {name: array.astype(np.float32) for name, array in arrays.items()}


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything goes round several times, and pieces end within matrices."""
    monkeypatch.setattr(quantize, "BUFFER_BYTES", 1 << 14)
    monkeypatch.setattr(upload, "STAGING_BYTES", 3 << 12)
    monkeypatch.setattr(upload, "SOFTWARE_STAGING_BYTES", 3 << 12)
    monkeypatch.setattr(upload, "PIECE_BYTES", 1 << 12)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("stored", ["f32", "f16", "bf16"])
def test_matrices_are_quantised_while_they_are_loaded(
    device: Device, tmp_path: Path, stored: str, dtype: str
) -> None:
    shapes = {"a": (300, 96), "q": (40, 100), "k": (8, 100), "v": (9, 100), "norm": (100,)}
    values = save(tmp_path, {name: normal(shape) for name, shape in shapes.items()}, stored)
    specs = [
        weight("qkv", q=shapes["q"], k=shapes["k"], v=shapes["v"]),
        weight("norm", norm=shapes["norm"]),
        weight("a", a=shapes["a"]),
    ]
    seen: list[tuple[int, int]] = []
    weights = load_weights(
        device,
        specs,
        Checkpoint.open(tmp_path),
        dtype=dtype,
        progress=lambda *p: seen.append(p),
    )
    assert {name: tensor.dtype for name, tensor in weights.items()} == {
        "qkv": dtype,
        "norm": "f32",
        "a": dtype,
    }
    check_quantized(device, weights["a"], values["a"])
    check_quantized(device, weights["qkv"], np.concatenate([values[key] for key in "qkv"]))
    np.testing.assert_array_equal(device.read(weights["norm"].buffer)[:100], values["norm"])
    assert seen[-1][0] == seen[-1][1]
    assert [p[0] for p in seen] == sorted(p[0] for p in seen)


def test_sources_of_different_dtypes_are_each_quantised(device: Device, tmp_path: Path) -> None:
    a, b = normal((20, 64), 1).astype(np.float16), normal((33, 64), 2)
    save_file({"a": a, "b": b}, tmp_path / SINGLE)
    specs = [weight("ab", a=a.shape, b=b.shape)]
    weights = load_weights(device, specs, Checkpoint.open(tmp_path), dtype="q4")
    check_quantized(device, weights["ab"], np.concatenate([a.astype(np.float32), b]))


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_matrix_larger_than_a_binding_is_split(tmp_path: Path, dtype: str) -> None:
    a, b = normal((1500, 100), 1), normal((1000, 100), 2)
    save_file({"a": a, "b": b}, tmp_path / SINGLE)
    with Device.open(settings=Settings(max_binding=1 << 16)) as limited:
        spec = weight("ab", a=a.shape, b=b.shape)
        tensor = load_weights(limited, [spec], Checkpoint.open(tmp_path), dtype=dtype)["ab"]
        assert len(tensor.shards) > 2
        assert all(b.nbytes <= 1 << 16 for shard in tensor.shards for b in shard.buffers)
        assert all(shard.start % 32 == 0 for shard in tensor.shards)
        assert tensor.nbytes == sum(b.nbytes for shard in tensor.shards for b in shard.buffers)
        check_quantized(limited, tensor, np.concatenate([a, b]))
        random = random_weights(limited, [spec], dtype)["ab"]
        whole = random_weights(limited, [spec], "f32")["ab"]
        parts = [limited.read(shard.buffer).reshape(shard.rows, -1) for shard in whole.shards]
        error = dequantized(limited, random) - np.concatenate(parts)[:, :100]
        assert np.abs(error).max() < {"q8": 0.002, "q4": 0.03}[dtype]


def test_rows_too_long_for_a_shard_are_refused() -> None:
    with (
        Device.open(settings=Settings(max_binding=1 << 12)) as limited,
        pytest.raises(UnsupportedError, match="w of 300 columns cannot be quantised"),
    ):
        allocate(limited, (100, 300), "q8", "w")


@pytest.mark.parametrize("dtype", FORMATS)
def test_random_weights_are_those_in_bf16_quantised(device: Device, dtype: str) -> None:
    specs = [weight("w", w=(900, 77)), weight("norm", norm=(77,))]
    exact = random_weights(device, specs, "bf16", seed=3)["w"]
    values = from_bf16(device.read(exact.buffer, np.uint16)).reshape(900, -1)[:, :77]
    got = random_weights(device, specs, dtype, seed=3)
    assert got["norm"].dtype == "f32"
    check_quantized(device, got["w"], values)
    np.testing.assert_array_equal(
        dequantized(device, got["w"]), dequantized(device, to_gpu(device, values, dtype))
    )


def test_the_gates_of_a_state_are_not_quantised() -> None:
    spec = weight("layers.0.linear_attn.gates", w=(8, 8))
    assert [converted_dtype(spec, dtype) for dtype in ("q4", "q8", "bf16")] == [
        "f32",
        "f32",
        "bf16",
    ]


def test_embeddings_and_output_projection_take_eight_bits() -> None:
    specs = [weight(name, w=(8, 8)) for name in ("embed_tokens", "lm_head", "layers.0.mlp.down")]
    specs += [weight("layers.0.mlp.router", w=(8, 8)), weight("norm", w=(8,))]
    assert [converted_dtype(spec, "q4") for spec in specs] == ["q8", "q8", "q4", "f32", "f32"]
    assert [converted_dtype(spec, "q8") for spec in specs] == ["q8", "q8", "q8", "f32", "f32"]
    assert [converted_dtype(spec, "f16") for spec in specs] == ["f16"] * 4 + ["f32"]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e7, -1e38])
def test_a_value_that_no_block_can_hold_is_an_error(
    device: Device, tmp_path: Path, dtype: str, value: float
) -> None:
    bad = normal((30, 70))
    bad[17, 69] = value
    save_file({"good": normal((30, 70)), "bad": bad}, tmp_path / SINGLE)
    specs = [weight("good", good=(30, 70)), weight("bad", bad=(30, 70))]
    before = device.memory_stats()
    with pytest.raises(CheckpointError, match=r"cannot be quantised: bad\. Load"):
        load_weights(device, specs, Checkpoint.open(tmp_path), dtype=dtype)
    after = device.memory_stats()
    assert after.allocated - after.pooled == before.allocated - before.pooled


def test_the_temporary_buffer_is_no_larger_than_the_largest_matrix() -> None:
    assert quantize.buffer_bytes([], Limits()) == 0
    assert quantize.buffer_bytes([(3, 40), (5, 8)], Limits()) == 3 * 40 * 4
    assert quantize.buffer_bytes([(128256, 4096)], Limits()) == quantize.BUFFER_BYTES
    assert quantize.buffer_bytes([(1000, 40)], Limits(max_binding=1 << 12)) == 1 << 12


# Reading


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("columns", [8, 40, 100, 256, 352])
def test_embeddings_are_read_as_scale_times_integer(
    device: Device, dtype: str, columns: int
) -> None:
    values, ids = normal((50, columns)), [3, 49, 0, 3, 17]
    exact = dequantized(device, to_gpu(device, values, dtype))[ids]
    got = functions.embedding(device, ids, values, dtype=dtype)
    np.testing.assert_array_equal(got, exact.astype(np.float32))
    twice = functions.embedding(device, ids, values, dtype=dtype, scale=2.0)
    np.testing.assert_array_equal(twice, 2 * exact.astype(np.float32))


@pytest.mark.parametrize("dtype", FORMATS)
def test_embeddings_are_read_from_several_shards(dtype: str) -> None:
    values, ids = normal((2000, 100)), [0, 1999, 700, 1024, 31, 32]
    with Device.open(settings=Settings(max_binding=1 << 15)) as limited:
        tensor = to_gpu(limited, values, dtype)
        assert len(tensor.shards) > 2
        exact = dequantized(limited, tensor)[ids]
        got = functions.embedding(limited, ids, values, dtype=dtype)
    np.testing.assert_array_equal(got, exact.astype(np.float32))


@pytest.mark.parametrize(
    ("case", "share"),
    [("llama", 1.0), ("deepseek_v3", 0.8), ("mixtral", 0.9), ("qwen2_moe", 0.9)],
)
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_model_computes_with_what_is_stored(
    device: Device, tmp_path: Path, dtype: str, case: str, share: float
) -> None:
    """Against the same model with weights of scale times integer in f32. What is left is the
    activations, which projections round to eight bits: much to this model of random weights. In
    some rows that makes a router choose otherwise; the `share` of rows counts."""
    reference = load(case)
    folder = reference.write_checkpoint(tmp_path / "model")
    model = build_model(RawConfig.open(folder))
    specs, checkpoint = list(model.weights()), Checkpoint.open(folder)
    weights = load_weights(device, specs, checkpoint, ignorable=model.ignorable, dtype=dtype)
    exact = {
        name: to_gpu(device, dequantized(device, tensor)) if tensor.dtype in FORMATS else tensor
        for name, tensor in weights.items()
    }
    options = EngineOptions(context=128, kv_dtype="f32")
    logits = []
    for stored in (weights, exact):
        engine = Engine(device, Loaded(model, stored), options)
        logits.append(scores(engine, reference.prompt_ids.tolist()))
    errors = [relative_error(*rows) for rows in zip(*logits, strict=True)]
    assert 0 < np.quantile(errors, share) < 0.15


@pytest.mark.live
@pytest.mark.parametrize("dtype", FORMATS)
def test_blocks_are_those_of_ggml_but_for_their_order(device: Device, dtype: str) -> None:
    """Q8_0 is a scale and 32 int8; Q4_0 a scale and our nibbles, with 8 added to each."""
    gguf = pytest.importorskip("gguf")
    tensor = to_gpu(device, normal((6, 160)), dtype)
    (shard,) = tensor.shards
    assert shard.scales is not None
    data = device.read(shard.buffer, np.uint8)
    if dtype == "q4":
        blocks = data.reshape(6, 5, 16) ^ 0x88
    else:
        blocks = data.reshape(6, 2, 5, 16).transpose(0, 2, 1, 3).reshape(6, 5, 32)
    scales = device.read(shard.scales, np.uint8).reshape(6, 8, 2)[:, :5]
    raw = np.concatenate([scales, blocks], axis=2).reshape(6, -1)
    kind = {"q8": "Q8_0", "q4": "Q4_0"}[dtype]
    theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(theirs, dequantized(device, tensor))


# scripts/quality.py


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    scripts = places.ROOT / "scripts"
    monkeypatch.syspath_prepend(str(scripts))
    return runpy.run_path(str(scripts / "quality.py"))


def test_divergence_and_perplexity_by_hand(quality: dict[str, Any]) -> None:
    exact = np.log([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]])
    got = np.log([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]])
    kl, same_top = quality["compare"]([got[:1], got[1:]], [exact[:1], exact[1:]])
    np.testing.assert_allclose(kl, [0.25 * np.log(2), 0], atol=1e-12)
    assert same_top == 0.5
    # The second text's tokens had probabilities of 1/4 and 1/10.
    assert quality["perplexity"]([exact], [[9, 1, 2]]) == pytest.approx(40**0.5)


@pytest.mark.full
def test_forced_decoding_gives_the_logits_of_scoring(quality: dict[str, Any]) -> None:
    with infer.load("demo", kv_dtype="f32", context=64) as llm:
        (ids,) = quality["enough"](iter([llm.encode("Once upon a time")]), 9, 64)
        (whole,) = quality["scored"](llm, [ids])
        (single,) = quality["decoded"](llm, [ids])
    np.testing.assert_allclose(single, whole, atol=1e-3)


# scripts/accuracy.py


def test_accuracy_by_hand(quality: dict[str, Any]) -> None:
    scripts = places.ROOT / "scripts"
    of = runpy.run_path(str(scripts / "accuracy.py"))
    logits = of["Logits"]
    exact = np.log(np.array([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1], [0.3, 0.3, 0.4]], np.float32))
    got = exact.copy()
    got[0] = np.log([0.25, 0.5, 0.25])
    got[2] += 2  # the same distribution
    found = of["accuracy"](
        "a",
        "b",
        "f16",
        logits([got[:2], got[2:]], got[1:]),
        logits([exact[:2], exact[2:]], exact[1:]),
    )
    assert (found.model, found.computed, found.products, found.tokens) == ("a", "b", "f16", 3)
    assert found.nmse == pytest.approx(((got - exact) ** 2).sum() / (exact**2).sum(), rel=1e-6)
    assert found.prefill_nmse == pytest.approx(12 / (exact[1:] ** 2).sum(), rel=1e-6)
    assert found.kl == pytest.approx(0.25 * np.log(2) / 3, rel=1e-6)
    assert found.kl_99 > found.kl
    assert found.same_top == pytest.approx(2 / 3)


@pytest.mark.live
def test_accuracy_against_transformers(
    quality: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = places.ROOT / "scripts"
    file = tmp_path / "report.json"
    options = ["demo", "--tokens", "5,40", "--kv-dtype", "f32", "--precision", "f32"]
    monkeypatch.setattr("sys.argv", ["accuracy.py", *options, "--json", str(file)])
    runpy.run_path(str(scripts / "accuracy.py"), run_name="__main__")
    rounded, ours = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert ours["nmse"] < 1e-10 < 1e-5 < rounded["nmse"] < 1e-2
    assert ours["kl"] < 1e-9 < rounded["kl"]
    assert ours["same_top"] == 1
