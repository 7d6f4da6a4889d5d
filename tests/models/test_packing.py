"""Quantised checkpoints on the GPU: what a format's own library makes of each matrix."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import pytest
from conftest import OpenDevice
from engines import build_engine, scores
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray
from plans import load_weights, stored
from reference_models import load, relative_error
from safetensors.numpy import save_file
from test_formats import CASES, DATA, KEY, opened, values_of
from test_gguf import Kind, converted, write

from infer.cli.report import ModelReport
from infer.inspection import inspect_model
from infer.kernels.checks import linear_check
from infer.kernels.checks.forward import Forward
from infer.kernels.checks.inputs import int8_rows
from infer.kernels.checks.reference import nmse
from infer.kernels.errors import CheckpointError, UnsupportedError
from infer.kernels.gpu import upload
from infer.kernels.gpu.codes import TABLES
from infer.kernels.gpu.device import Device, Settings
from infer.kernels.gpu.tensor import INTEGERS, GpuTensor
from infer.kernels.ops import functional as ops
from infer.models import open_model
from infer.models.loading import packing
from infer.models.loading.checkpoint import Checkpoint
from infer.models.loading.config import RawConfig
from infer.models.loading.formats import find_format, find_packed, mxfp4
from infer.models.loading.formats.gguf_blocks import GgufBlocks
from infer.models.loading.formats.grouped import Scheme, unpack
from infer.models.loading.formats.packed import read_rows
from infer.models.loading.packing import stored_schemes
from infer.models.loading.plan import Summary, plan_weights
from infer.models.loading.tensors import TensorInfo
from infer.models.loading.weights import Source, WeightSpec

Array = NDArray[Any]
LIMIT = 1e-10  # of f32 arithmetic
NF4_LIMIT = 4e-10  # and of 16 bits, where values are 0.4 times the largest of their block
LLAMA = DATA.parent / "models" / "llama"


def loaded(device: Device, folder: Path, shape: tuple[int, ...], name: str = "w") -> GpuTensor:
    found, checkpoint = opened(folder)
    spec = WeightSpec(name, (Source(KEY, shape),))
    packed = find_packed(checkpoint, found, [spec])
    return load_weights(device, [spec], packed)[name]


def shape_of(case: str) -> tuple[int, int]:
    rows, columns = values_of(case).shape
    return rows, columns


CASES_2D = [case for case in CASES if case != "mxfp4"]  # that one has three dimensions


@pytest.mark.parametrize("settings", [Settings(), Settings(subgroups=False, f16=False)])
@pytest.mark.parametrize("case", CASES_2D)
def test_every_format_on_the_gpu(
    open_device: OpenDevice, monkeypatch: pytest.MonkeyPatch, case: str, settings: Settings
) -> None:
    """Its values, row by row, and products with them. It is packed a few rows at a time, and each
    of its codes is read once."""
    device, expected = open_device(settings), values_of(case)
    monkeypatch.setattr(upload, "PIECE_BYTES", 2048)
    monkeypatch.setattr(packing, "_VALUES", 700)
    monkeypatch.setattr(packing, "_ROWS", 5)
    read: dict[str, int] = {}
    original = TensorInfo.read_into

    def counted(self: TensorInfo, view: memoryview, start: int = 0) -> None:
        read[self.name] = read.get(self.name, 0) + len(view)
        original(self, view, start)

    with device.scope():
        with monkeypatch.context() as patch:
            patch.setattr(TensorInfo, "read_into", counted)
            weight = loaded(device, DATA / case, shape_of(case))
        codes = max(opened(DATA / case)[1].tensors.values(), key=lambda info: info.nbytes)
        assert read[codes.name] == codes.nbytes
        rows, columns = weight.shape
        order = np.arange(columns)
        if weight.order is not None:
            order = device.read(weight.order, np.uint32)
        forward = Forward(device, rows)
        y = forward.run(ops.embedding(weight), tokens=list(range(rows)))
        assert nmse(y, expected[:, order]) <= 1e-14
    for n in (1, 40) if device.subgroups else (1,):  # many rows need none
        rng = np.random.default_rng(n)
        x = exact = rng.standard_normal((n, columns), np.float32)
        if weight.dtype in INTEGERS:  # activations that are known as int8, in the weight's order
            quantized = int8_rows(rng, n, columns)
            x, exact = (np.empty_like(part) for part in quantized)
            x[:, order], exact[:, order] = quantized
        with device.scope():
            weight = loaded(device, DATA / case, shape_of(case))
            forward = Forward(device, n)
            y = forward.run(ops.linear(forward.input(x), weight))
        limit = NF4_LIMIT if weight.dtype == "nf4" else LIMIT
        assert nmse(y, linear_check.matmul(exact, expected)) <= limit


# Blocks of GGUF files, and stacked weights whose parts are quantised in different ways

BLOCKS_ON_THE_GPU = {
    "q4": (Kind.Q4_0, Kind.Q4_1, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K),
    "q5": (Kind.Q5_0, Kind.Q5_1, Kind.Q5_K),
    "q6": (Kind.Q6_K,),
    "q8": (Kind.Q8_0,),
    "iq4nl": (Kind.IQ4_NL, Kind.IQ4_XS),
    "mxfp4": (Kind.MXFP4,),
}


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        *(((kind,), dtype) for dtype, kinds in BLOCKS_ON_THE_GPU.items() for kind in kinds),
        ((Kind.Q4_K, Kind.Q4_K, Kind.Q6_K), "q6"),  # as Q4_K_M has q, k and v
        ((Kind.Q4_0, Kind.Q4_1, Kind.Q5_0), "q5"),
        ((Kind.IQ4_XS, Kind.Q5_K, Kind.IQ4_NL), "q8"),
        ((Kind.IQ4_XS, Kind.IQ4_NL), "iq4nl"),
        ((Kind.Q8_0, Kind.F16), "f32"),
        ((Kind.MXFP4, Kind.Q8_0, Kind.BF16), "f32"),
    ],
)
def test_blocks_and_stacks_of_them_keep_their_values(
    device: Device, tmp_path: Path, kinds: tuple[Kind, ...], dtype: str
) -> None:
    rng = np.random.default_rng(0)
    rows, columns = 5, 512
    parts: dict[str, Array] = {}
    expected: list[Array] = []
    for i, kind in enumerate(kinds):
        values = rng.standard_normal((rows, columns), np.float32)
        if kind in (Kind.F16, Kind.BF16) or kind.name in ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "MXFP4"):
            parts[f"w{i}"] = library.quantize(values, kind)
        else:  # the library only reads these
            block, nbytes = GGML_QUANT_SIZES[kind]
            parts[f"w{i}"] = rng.integers(0, 64, (rows, columns // block * nbytes), np.uint8)
        expected.append(library.dequantize(parts[f"w{i}"], kind))
    gguf = write(tmp_path / "m.gguf", parts, {f"w{i}": kind for i, kind in enumerate(kinds)})
    spec = WeightSpec("w", tuple(Source(name, (rows, columns)) for name in parts))
    checkpoint = find_packed(Checkpoint(tmp_path, gguf.tensors), GgufBlocks(RawConfig({})), [spec])
    values = np.concatenate(expected)
    with device.scope():
        halves = replace(spec, sources=tuple(s.columns(range(256, 512)) for s in spec.sources))
        for own, exact in ((halves, values[:, 256:]), (spec, values)):
            weight = load_weights(device, [own], checkpoint)["w"]
            assert weight.dtype == dtype
            forward = Forward(device, len(values))
            y = forward.run(ops.embedding(weight), tokens=list(range(len(values))))
            assert nmse(y, exact) <= 1e-14
        x, exact = int8_rows(rng, 3, columns)
        forward = Forward(device, 3, tuning=linear_check.ByVec(device))
        y = forward.run(ops.linear(forward.input(x), weight))
    rounded = exact if dtype in INTEGERS else x
    assert nmse(y, linear_check.matmul(rounded, values)) <= LIMIT


def test_parts_may_have_different_orders(device: Device, tmp_path: Path) -> None:
    """The matrices of q and k have different orders with act-order, if they were quantised
    apart."""
    rng = np.random.default_rng(0)
    rows, columns = 3, 64
    args = {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": args}},
    }
    tensors: dict[str, Array] = {}
    values: list[Array] = []
    for part in "qk":
        weight = rng.integers(-8, 8, (rows, columns)).astype(np.int8)
        scales = rng.standard_normal((rows, 2)).astype(np.float32)
        index = rng.permutation(columns).astype(np.int32) // 32
        own = {"weight": weight, "weight_scale": scales, "weight_g_idx": index}
        tensors |= {f"{part}.{name}": array for name, array in own.items()}
        values.append(weight * scales[:, index])
    save_file(tensors, tmp_path / "model.safetensors")
    found = find_format(RawConfig({"quantization_config": config}))
    assert found is not None
    sources = tuple(Source(f"{part}.weight", (rows, columns)) for part in "qk")
    spec = WeightSpec("w", sources)
    packed = find_packed(Checkpoint.open(tmp_path), found, [spec])
    for only in (sources[:1], sources):
        own_spec = WeightSpec("w", only)
        with device.scope():
            weight = load_weights(device, [own_spec], packed, ignorable=bool)["w"]
            assert weight.dtype == ("q4" if len(only) == 1 else "f32")
            if len(only) == 2:
                forward = Forward(device, 2 * rows)
                y = forward.run(ops.embedding(weight), tokens=list(range(2 * rows)))
                np.testing.assert_array_equal(y, np.concatenate(values))


@pytest.mark.parametrize("kind", ["int", "e4m3", "nf4"])
def test_groups_that_no_kernel_has(kind: str) -> None:
    """A block of a kernel would have columns of two of them."""
    with pytest.raises(UnsupportedError, match="w has a scale for 24 columns"):
        stored_schemes([Scheme(kind, 8, 24, "f32")], 96, "w")


# Models


def mlx_packed(values: Array) -> dict[str, Array]:
    """A matrix in MLX's 4 bits, in groups of 32."""
    groups = values.reshape(len(values), -1, 32)
    low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
    scales = ((high - low) / 15).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint((groups - low) / scales), 0, 15).astype(np.uint32)
    words = (codes.reshape(len(values), -1, 8) << 4 * np.arange(8, dtype=np.uint32)).sum(axis=2)
    pair = {"scales": scales, "biases": low}
    return {"weight": words.astype(np.uint32)} | {
        name: part.reshape(len(values), -1).astype(np.float16) for name, part in pair.items()
    }


@pytest.mark.parametrize("name", ["w", "w.router"])
def test_parts_of_a_packed_source(
    device: Device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Every other row of each expert, then the rest, in pieces of a few rows; and widened, as
    routers are. Each is unpacked once."""
    rows: list[int] = []

    def counted(packed: Array, bits: int, count: int) -> Array:
        rows.append(len(packed))
        return unpack(packed, bits, count)

    monkeypatch.setattr(mxfp4, "unpack", counted)
    monkeypatch.setattr(upload, "PIECE_BYTES", 512)
    found, checkpoint = opened(DATA / "mxfp4")
    expected = values_of("mxfp4")
    parts = [range(24 * expert + way, 24 * (expert + 1), 2) for expert in (0, 1) for way in (0, 1)]
    shape = (2, 24, expected.shape[1])
    spec = WeightSpec(name, tuple(Source(KEY, shape, transposed=True).rows(part) for part in parts))
    with device.scope():
        weight = load_weights(device, [spec], find_packed(checkpoint, found, [spec]))[name]
        assert weight.dtype == ("mxfp4" if name == "w" else "f32")
        forward = Forward(device, 48)
        y = forward.run(ops.embedding(weight), tokens=list(range(48)))
    assert nmse(y, expected[np.concatenate([np.array(part) for part in parts])]) <= 1e-14
    assert sum(rows) == 48


@pytest.mark.parametrize("case", CASES_2D)
def test_columns_of_a_packed_source(device: Device, case: str) -> None:
    """Its right half above its left one: widened where these have not groups of their own."""
    (found, checkpoint), expected = opened(DATA / case), values_of(case)
    (rows, columns), half = expected.shape, expected.shape[1] // 2
    halves = range(half, columns), range(half)
    spec = WeightSpec("w", tuple(Source(KEY, expected.shape).columns(own) for own in halves))
    checkpoint = find_packed(checkpoint, found, [spec])
    with device.scope():
        weight = load_weights(device, [spec], checkpoint)["w"]
        forward = Forward(device, 2 * rows)
        y = forward.run(ops.embedding(weight), tokens=list(range(2 * rows)))
    assert nmse(y, np.concatenate([expected[:, half:], expected[:, :half]])) <= 1e-14
    odd = case in ("compressed_fp8_block", "gptq_4bit_act_order", "gptq_4bit_zeros")
    assert stored(spec, checkpoint).packed == (not odd)


def test_rows_of_a_packed_source_that_become_columns(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek's W_UK lies like this in a quantised matrix, head by head."""
    monkeypatch.setattr(upload, "PIECE_BYTES", 512)
    found, checkpoint = opened(DATA / "mxfp4")
    expected = values_of("mxfp4")
    parts, shape = (range(3, 17), range(20, 34)), (2, 24, expected.shape[1])
    spec = WeightSpec("w", tuple(Source(KEY, shape).rows(part).transpose() for part in parts))
    with device.scope():
        weight = load_weights(device, [spec], find_packed(checkpoint, found, [spec]))["w"]
        assert (weight.dtype, weight.shape) == ("f32", (2 * expected.shape[1], 14))
        forward = Forward(device, weight.shape[0])
        y = forward.run(ops.embedding(weight), tokens=list(range(weight.shape[0])))
    assert nmse(y, np.concatenate([expected[part.start : part.stop].T for part in parts])) <= 1e-14


def e4m3_packed(values: Array) -> dict[str, Array]:
    """A matrix in E4M3, with a scale for each 32x32 of it."""
    rows, columns = values.shape
    blocks = values.reshape(rows // 32, 32, columns // 32, 32)
    scales = (abs(blocks).max(axis=(1, 3), keepdims=True) / 448).astype(np.float32)
    table = TABLES["e4m3"][:127]
    nearest = abs(abs(blocks / scales)[..., None] - table).argmin(axis=-1).astype(np.uint8)
    codes = np.where(blocks < 0, nearest | 0x80, nearest).reshape(rows, columns)
    return {"weight": codes, "weight_scale_inv": scales.reshape(rows // 32, columns // 32)}


def nf4_packed(values: Array) -> dict[str, Array]:
    """A matrix in NF4, in blocks of 32."""
    blocks = values.reshape(-1, 32)
    absmax = abs(blocks).max(axis=1)
    codes = abs((blocks / absmax[:, None])[..., None] - TABLES["nf4"]).argmin(axis=-1)
    state = json.dumps({"blocksize": 32, "shape": values.shape}).encode()
    return {
        "weight": (codes[:, ::2] << 4 | codes[:, 1::2]).astype(np.uint8).reshape(-1, 1),
        "weight.absmax": absmax,
        "weight.quant_map": TABLES["nf4"],
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(state, np.uint8),
    }


QUANTIZED_MODELS: dict[str, tuple[dict[str, Any], Callable[[Array], dict[str, Array]], float]] = {
    "mlx": ({"quantization": {"bits": 4, "group_size": 32}}, mlx_packed, 1e-1),
    "fp8": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}},
        e4m3_packed,
        1e-5,
    ),
    "nf4": (
        {
            "quantization_config": {
                "quant_method": "bitsandbytes",
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
            }
        },
        nf4_packed,
        1e-1,
    ),
}


@pytest.mark.parametrize("method", QUANTIZED_MODELS)
def test_a_quantised_model_answers_as_its_values_do(
    device: Device, method: str, tmp_path: Path
) -> None:
    """Logits are those of a model of floats that has these values. Rounding activations to int8
    costs this model 8 %."""
    changes, pack, tolerance = QUANTIZED_MODELS[method]
    config = json.loads((LLAMA / "config.json").read_text())
    packed: dict[str, Array] = {}
    floats: dict[str, Array] = {}
    for key, info in Checkpoint.open(LLAMA).tensors.items():
        floats[key] = packed[key] = read_rows(info)
        if "_proj." in key:
            parts = pack(packed.pop(key))
            packed |= {f"{key.removesuffix('weight')}{name}": part for name, part in parts.items()}
    folder = tmp_path / "packed"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | changes))
    (save if method == "fp8" else save_file)(packed, folder / "model.safetensors")
    _, checkpoint = open_model(folder)
    assert len(checkpoint.packed) == 7 * config["num_hidden_layers"]
    ids = load("llama").prompt_ids.tolist()
    with device.scope():
        expected = scores(build_engine(device, as_floats(checkpoint, floats, tmp_path)), ids)
        actual = scores(build_engine(device, folder), ids)
    assert relative_error(actual, expected) <= tolerance
    assert relative_error(expected, load("llama").logits) > 1e-3  # it was quantised


@pytest.mark.full
@pytest.mark.parametrize("scales", ["one", "two", "blocks"])
def test_mistral_small_4_as_it_is_published(device: Device, scales: str, tmp_path: Path) -> None:
    """The model is published as a part of one that sees, in E4M3: with a scale for each matrix, or
    two for an expert's gate and up, or one for eight rows."""
    source = LLAMA.parent / "mistral4"
    packed: dict[str, Array] = {}
    floats: dict[str, Array] = {}
    for key, info in Checkpoint.open(source).tensors.items():
        floats[key] = values = read_rows(info)
        own = f"language_model.{key}"
        if "_proj" not in key:
            packed[own] = values
            continue
        *stack, rows, columns = values.shape
        high = 8 if scales == "blocks" else rows
        high = rows // 2 if scales == "two" and key.endswith("gate_up_proj") else high
        blocks = values.reshape(*stack, rows // high, high, columns)
        scale = (abs(blocks).max(axis=(-2, -1), keepdims=True) / 448).astype(np.float32)
        table = TABLES["e4m3"][:127]
        codes = abs(abs(blocks / scale)[..., None] - table).argmin(axis=-1).astype(np.uint8)
        codes = np.where(blocks < 0, codes | 0x80, codes)
        floats[key] = (scale * TABLES["e4m3"][codes]).astype(np.float32).reshape(values.shape)
        plain = scales != "blocks" and not stack
        packed |= {
            own: codes.reshape(values.shape),
            f"{own}_scale_inv": scale.reshape(() if plain else (*stack, rows // high, -1)),
            f"{own.removesuffix('weight')}{'_' * bool(stack)}activation_scale": scale.ravel()[:1],
        }
    config = json.loads((source / "config.json").read_text())
    size = [8, 96] if scales == "blocks" else None
    own_config = {
        "model_type": "mistral3",
        "text_config": config,
        "quantization_config": {
            "activation_scheme": "static",
            "quant_method": "fp8",
            "weight_block_size": size,
        },
    }
    folders = tmp_path / "floats", tmp_path / "packed"
    for folder, tensors, of, saved in zip(
        folders, (floats, packed), (config, own_config), (save_file, save), strict=True
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(of))
        saved(tensors, folder / "model.safetensors")
    ids = load("mistral4").prompt_ids.tolist()
    with device.scope():
        expected, actual = (scores(build_engine(device, folder), ids) for folder in folders)
    assert relative_error(actual, expected) <= 1e-5
    assert relative_error(expected, load("mistral4").logits) > 1e-3  # it was quantised


def test_stacks_that_lie_transposed_are_refused(tmp_path: Path) -> None:
    """Qwen3-VL is published in E4M3 with stacks like these."""
    source = LLAMA.parent / "qwen3_vl_moe"
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | quantized))
    tensors = {
        key: np.zeros(info.shape, np.uint8 if ".experts." in key else np.float32)
        for key, info in Checkpoint.open(source).tensors.items()
    }
    save(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="is quantised and lies transposed"):
        open_model(tmp_path)


def mxfp4_packed(values: Array) -> tuple[Array, Array, Array]:
    """Blocks and scales of matrices [experts, rows, columns], and what values they mean."""
    groups = values.reshape(*values.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(abs(groups).max(axis=-1))) - 2
    scales = np.exp2(exponents)[..., None]
    codes = abs((groups / scales)[..., None] - TABLES["mxfp4"]).argmin(axis=-1).astype(np.uint8)
    exact = (scales * TABLES["mxfp4"][codes]).astype(np.float32).reshape(values.shape)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).astype(np.uint8), exact


@pytest.mark.full
def test_gpt_oss_as_it_is_published(device: Device, tmp_path: Path) -> None:
    """Its experts in MXFP4 have the values that those of floats have, which lie transposed."""
    source = LLAMA.parent / "gpt_oss"
    config = json.loads((source / "config.json").read_text())
    packed: dict[str, Array] = {}
    floats: dict[str, Array] = {}
    for key, info in Checkpoint.open(source).tensors.items():
        values = read_rows(info)
        if values.ndim == 3:
            blocks, scales, exact = mxfp4_packed(np.ascontiguousarray(values.swapaxes(1, 2)))
            packed |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            floats[key] = np.ascontiguousarray(exact.swapaxes(1, 2))
        else:
            floats[key] = packed[key] = values
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    folders = tmp_path / "floats", tmp_path / "packed"
    for folder, tensors, own in zip(folders, (floats, packed), ({}, quantized), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | own))
        save_file(tensors, folder / "model.safetensors")
    ids = load("gpt_oss").prompt_ids.tolist()
    with device.scope():
        models = [open_model(folder) for folder in folders]
        weights = [load_weights(device, list(m.weights()), found) for m, found in models]
        experts = [name for name, weight in weights[1].items() if weight.dtype == "mxfp4"]
        assert len(experts) == 2 * config["num_hidden_layers"]
        for name in experts:
            rows = weights[0][name].shape[0]
            forwards = [(Forward(device, rows), own[name]) for own in weights]
            expected, actual = (
                forward.run(ops.embedding(weight), tokens=range(rows))
                for forward, weight in forwards
            )
            assert np.array_equal(actual, expected)
        expected, actual = (scores(build_engine(device, folder), ids) for folder in folders)
    errors = [relative_error(*pair) for pair in zip(actual, expected, strict=True)]
    assert np.median(errors) <= 3e-2  # activations are rounded to int8


def test_gpt_oss_as_mlx_has_it(tmp_path: Path) -> None:
    """Gate and up apart, in MXFP4 as is said for all modules, others in 8 bits as is said for them;
    each with a bias of its own."""
    source = LLAMA.parent / "gpt_oss"
    tensors: dict[str, Array] = {}
    wanted: dict[str, Array] = {}
    modules: dict[str, Any] = {}
    for key, info in Checkpoint.open(source).tensors.items():
        values = read_rows(info)
        block, _, part = key.partition(".mlp.experts.")
        if part in ("gate_up_proj", "down_proj"):
            values = values.swapaxes(1, 2)
        ways = [values]
        names = ["down_proj"]
        if part.startswith("gate_up"):
            ways, names = [values[:, ::2], values[:, 1::2]], ["gate_proj", "up_proj"]
        for name, own in zip(names, map(np.ascontiguousarray, ways), strict=True):
            module = f"{block}.mlp.experts.{name}"
            if not part:
                tensors[key] = values
            elif part.endswith("bias"):
                tensors[f"{module}.bias"] = wanted[f"{module}.bias"] = own
            else:
                blocks, scales, wanted[f"{module}.weight"] = mxfp4_packed(own)
                words = blocks.reshape(*own.shape[:2], -1).view(np.uint32)
                tensors |= {f"{module}.weight": words, f"{module}.scales": scales}
        if key.endswith("o_proj.weight"):
            parts = mlx_packed(tensors.pop(key))
            tensors |= {f"{key.removesuffix('weight')}{kind}": x for kind, x in parts.items()}
            modules[key.removesuffix(".weight")] = {"group_size": 32, "bits": 4}
    quantization = {"mode": "mxfp4", "group_size": 32, "bits": 4} | modules
    config = json.loads((source / "config.json").read_text()) | {"quantization": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    model, checkpoint = open_model(tmp_path)
    plan_weights(list(model.weights()), checkpoint, ignorable=model.ignorable)
    how = {spec.name: stored(spec, checkpoint).dtype for spec in model.weights()}
    assert {how[name] for name in how if name.endswith(("gate_up_proj", "down_proj"))} == {"mxfp4"}
    assert {how[name] for name in how if name.endswith("o_proj")} == {"q4"}
    for key, values in wanted.items():
        for expert, own in enumerate(values):
            name = key.replace(".experts.", f".experts.{expert}.")
            if name in checkpoint.packed:
                matrix = checkpoint.packed[name]
                np.testing.assert_array_equal(matrix.read(0, matrix.shape[0]).dequantize(), own)
            else:
                np.testing.assert_array_equal(read_rows(checkpoint.tensors[name]), own)


def stacked(name: str, pack: Callable[[Array], dict[str, Array]]) -> dict[str, Array]:
    """The tensors of a stored model, experts of a layer stacked as in MLX, and packed."""
    part_of = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    if name.startswith("nemotron_h"):
        part_of = {"up_proj": "fc1", "down_proj": "fc2"}
    made: dict[str, Array] = {}
    experts: dict[str, list[Array]] = {}
    for key, info in Checkpoint.open(LLAMA.parent / name).tensors.items():
        match = re.fullmatch(r"(.*)\.experts\.(?:\d+\.)?(\w+?)(?:\.weight)?", key)
        if match is None:
            made[key] = read_rows(info)
            continue
        block, part, values = f"{match[1]}.switch_mlp", match[2], read_rows(info)
        if values.ndim == 2:
            experts.setdefault(f"{block}.{part_of.get(part, part)}", []).append(values)
            continue
        # Stacked on the hub as well, gate above up.
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        halves = np.split(values, len(parts), axis=1)
        experts |= {f"{block}.{own}": [*half] for own, half in zip(parts, halves, strict=True)}
    for module, matrices in experts.items():
        made |= {f"{module}.{kind}": part for kind, part in pack(np.stack(matrices)).items()}
    return made


def packed_one_by_one(matrices: Array) -> dict[str, Array]:
    packed = [mlx_packed(matrix) for matrix in matrices]
    return {kind: np.stack([own[kind] for own in packed]) for kind in packed[0]}


def packed_by_mlx(matrices: Array) -> dict[str, Array]:
    mx = pytest.importorskip("mlx.core")
    mx.set_default_device(mx.cpu)
    parts = mx.quantize(mx.array(matrices), group_size=32, bits=4)
    wanted = mx.dequantize(*parts, group_size=32, bits=4)
    names = ("weight", "scales", "biases", "values")
    return {name: np.array(part) for name, part in zip(names, (*parts, wanted), strict=True)}


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_that_mlx_stacks_are_those_of_the_hub(tmp_path: Path, name: str) -> None:
    config = (LLAMA.parent / name / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    save_file(stacked(name, lambda x: {"weight": x}), tmp_path / "model.safetensors")
    model, checkpoint = open_model(tmp_path)
    plan_weights(list(model.weights()), checkpoint, ignorable=model.ignorable)
    for key, info in Checkpoint.open(LLAMA.parent / name).tensors.items():
        np.testing.assert_array_equal(read_rows(checkpoint.tensors[key]), read_rows(info))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "pack", [packed_one_by_one, pytest.param(packed_by_mlx, marks=pytest.mark.live)]
)
def test_experts_that_mlx_quantises_are_read_one_by_one(
    tmp_path: Path, name: str, pack: Callable[[Array], dict[str, Array]]
) -> None:
    tensors = stacked(name, pack)
    wanted = {key: tensors.pop(key) for key in list(tensors) if key.endswith(".values")}
    modules = [key.removesuffix(".scales") for key in tensors if key.endswith(".scales")]
    size = {"group_size": 32, "bits": 4}  # a module's own counts, not the one for all
    own = {"quantization": {"group_size": 64, "bits": 8} | dict.fromkeys(modules, size)}
    config = json.loads((LLAMA.parent / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | own))
    save_file(tensors, tmp_path / "model.safetensors")
    model, checkpoint = open_model(tmp_path)
    plan_weights(list(model.weights()), checkpoint, ignorable=model.ignorable)
    part_of = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    assert len(checkpoint.packed) == 3 * config["num_hidden_layers"] * model.config.experts.count
    for key, matrix in checkpoint.packed.items():
        block, expert, part = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", key).groups()
        module = f"{block}.switch_mlp.{part_of.get(part, part)}"
        got = matrix.read(0, matrix.shape[0]).dequantize()
        if wanted:
            np.testing.assert_array_equal(got, wanted[f"{module}.values"][int(expert)])
        words = tensors[f"{module}.weight"][int(expert)]
        codes = (words[..., None] >> 4 * np.arange(8, dtype=np.uint32) & 15).reshape(got.shape)
        scale, bias = (
            np.repeat(tensors[f"{module}.{kind}"][int(expert)].astype(np.float32), 32, axis=1)
            for kind in ("scales", "biases")
        )
        np.testing.assert_allclose(got, codes * scale + bias, rtol=0, atol=1e-6)


# Keys that mlx-lm wants in a config besides, or in place of, those that are there.
MLX_KEYS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "granitemoe": {"rope_theta": 1e4},
    "granitemoehybrid": {"layer_types": ["attention"] * 2},
    "granitemoehybrid_experts": {"layer_types": ["attention"] * 2},
    "granitemoehybrid_mamba": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"rope_theta": 1e6},
    "lfm2": {"block_dim": 64, "conv_dim": 64, "block_ff_dim": 96, "rope_theta": 1e6},
    "nemotron_h_experts": {},
    "qwen3_next": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "qwen3_5": {},
    "qwen3_5_moe": {},
}


LIKE_LLAMA = {"1": "gate_proj", "2": "down_proj", "3": "up_proj"}


def as_mlx(name: str) -> dict[str, Array]:
    """The tensors of a stored model in f32, named, transposed and completed as mlx-lm does it."""
    made = {}
    for key, values in stacked(name, lambda x: {"weight": x}).items():
        if ".visual." in key:
            continue
        if "kv_b_proj" in key:  # four heads of 24 + 20
            keys, results = np.split(values.reshape(4, 44, 32), [24], axis=1)
            made[key.replace("kv_b_proj", "embed_q")] = np.ascontiguousarray(keys.swapaxes(1, 2))
            made[key.replace("kv_b_proj", "unembed_out")] = np.ascontiguousarray(results)
            continue
        if key.endswith(("conv.conv.weight", "conv1d.weight")):
            values = np.ascontiguousarray(values.swapaxes(1, 2))
        elif name[:4] == "qwen" and key.endswith("norm.weight") and ".linear_attn." not in key:
            values = values + 1
        key = key.replace("model.language_model.", "language_model.model.")
        made |= zip(*renamed_by_mlx(name, key, values), strict=True)
    return made


def renamed_by_mlx(name: str, key: str, values: Array) -> tuple[list[str], list[Array]]:
    """A tensor of Granite or LFM2 as mlx-lm calls it, where it does; gate and up apart."""
    if name == "lfm2_moe":
        key = re.sub(r"(?<=feed_forward\.)w([123])", lambda found: LIKE_LLAMA[found[1]], key)
    block, stack = "block_sparse_moe", "block_sparse_moe.switch_mlp"
    if name == "granitemoehybrid":
        block, stack = "shared_mlp", "mlp"
    if f".{block}.input_linear" in key:
        parts = [f"{stack}.{part}_proj" for part in ("gate", "up")]
        names = [key.replace(f"{block}.input_linear", part) for part in parts]
        return names, [np.ascontiguousarray(half) for half in np.split(values, 2, axis=-2)]
    return [key.replace(f"{block}.output_linear", f"{stack}.down_proj")], [values]


def by_mlx_lm(name: str) -> dict[str, Array]:
    mx = pytest.importorskip("mlx.core")
    module = name.removesuffix("_experts").removesuffix("_mamba")
    module = pytest.importorskip(f"mlx_lm.models.{module}")
    mx.set_default_device(mx.cpu)
    config = json.loads((LLAMA.parent / name / "config.json").read_text()) | MLX_KEYS[name]
    hub = Checkpoint.open(LLAMA.parent / name).tensors
    weights = {key: mx.array(read_rows(info)) for key, info in hub.items()}
    made = module.Model(module.ModelArgs.from_dict(config)).sanitize(weights)
    return {key: np.array(values) for key, values in made.items()}


@pytest.mark.full
@pytest.mark.parametrize("name", MLX_KEYS)
@pytest.mark.parametrize("convert", [as_mlx, pytest.param(by_mlx_lm, marks=pytest.mark.live)])
def test_models_as_mlx_has_them(
    device: Device, tmp_path: Path, name: str, convert: Callable[[str], dict[str, Array]]
) -> None:
    """Floats answer as on the hub, and what is quantised as floats of its values."""
    source = LLAMA.parent / name
    config, tensors = json.loads((source / "config.json").read_text()), convert(name)
    quantized = {"quantization": {"group_size": 32, "bits": 4}}
    folders = tmp_path / "as_floats", tmp_path / "packed"
    both = tensors, packed_in_part(tensors)
    for folder, made, own in zip(folders, both, ({}, quantized), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | own))
        save_file(made, folder / "model.safetensors", metadata={"format": "mlx"})
    reference, checkpoint = load(name), open_model(folders[1])[1]
    ids = reference.prompt_ids.tolist()
    hub = open_model(source)[1].tensors
    floats = {key: read_rows(hub.get(key, info)) for key, info in checkpoint.tensors.items()}
    with device.scope():
        assert (
            relative_error(scores(build_engine(device, folders[0]), ids), reference.logits) <= 1e-5
        )
        same = as_floats(checkpoint, floats, tmp_path, name)
        expected, actual = (scores(build_engine(device, own), ids) for own in (same, folders[1]))
    errors = [relative_error(*pair) for pair in zip(actual, expected, strict=True)]
    assert np.median(errors) <= 1e-1  # activations are rounded to int8
    assert relative_error(expected, reference.logits) > 1e-2  # it was quantised


def packed_in_part(tensors: dict[str, Array], kept: str = "^$") -> dict[str, Array]:
    """Returns the tensors as MLX quantises them, except for keys that match `kept`."""
    packed: dict[str, Array] = {}
    for key, values in tensors.items():
        module = re.fullmatch(r"(.*(?:_proj(?:_\w+)?|embed_q|unembed_out|fc[12]))\.weight", key)
        pack = mlx_packed if values.ndim == 2 else packed_one_by_one
        parts = {key: values}
        if module is not None and values.shape[-1] % 32 == 0 and not re.search(kept, key):
            parts = {f"{module[1]}.{kind}": part for kind, part in pack(values).items()}
        packed |= parts
    return packed


@pytest.mark.parametrize(
    ("name", "kept", "forms"),
    [
        ("qwen3_next", "^$", {"experts": "q4"}),
        ("qwen3_5_moe", "^$", {"experts": "q4"}),
        ("qwen3_next", r"shared_expert\.up", {"experts": "q4", "shared_expert": "q4 f32"}),
        ("qwen3_5_moe", r"shared_expert\.down", {"experts": "q4", "shared_expert": "q4 f32"}),
        ("qwen3_5_moe", "switch_mlp", {"experts": "f32", "shared_expert": "q4"}),
    ],
)
def test_a_shared_expert_of_another_form_stays_alone(
    device: Device, tmp_path: Path, name: str, kept: str, forms: dict[str, str]
) -> None:
    """It is one of the experts where it lies as they do; nothing is widened for that."""
    config = json.loads((LLAMA.parent / name / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = packed_in_part(as_mlx(name), kept)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "mlx"})
    checkpoint = open_model(tmp_path)[1]
    floats = {key: read_rows(info) for key, info in checkpoint.tensors.items()}
    own = open_model(LLAMA.parent / name)[1].tensors  # norms and convolutions as on the hub
    floats = {key: read_rows(own[key]) if key in own else floats[key] for key in floats}
    ids = load(name).prompt_ids.tolist()
    with device.scope():
        engine = build_engine(device, tmp_path)
        found: dict[str, set[str]] = {}
        for weight, tensor in engine.weights.items():
            match = re.search(r"\.(experts|shared_expert)\.", weight)
            if match is not None:
                found.setdefault(match[1], set()).add(tensor.dtype)
        assert found == {kind: set(dtypes.split()) for kind, dtypes in forms.items()}
        same = as_floats(checkpoint, floats, tmp_path, name)
        expected, actual = (scores(e, ids) for e in (build_engine(device, same), engine))
    errors = [relative_error(*pair) for pair in zip(actual, expected, strict=True)]
    assert np.median(errors) <= 1e-1  # activations are rounded to int8


@pytest.mark.parametrize("part", ["layers.1.linear_attn.conv1d.weight", "conv1d.weight"])
def test_what_mlx_converts_in_part_is_refused(tmp_path: Path, part: str) -> None:
    """One convolution, or all of them, as on the hub, among experts that are stacked."""
    tensors = as_mlx("qwen3_next")
    for key in [key for key in tensors if key.endswith(part)]:
        tensors[key] = np.ascontiguousarray(tensors[key].swapaxes(1, 2))
    (tmp_path / "config.json").write_bytes((LLAMA.parent / "qwen3_next/config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"as MLX has them and .*conv1d\.weight"):
        open_model(tmp_path)


def test_routers_are_never_quantised(tmp_path: Path) -> None:
    """Rounded activations would choose other experts."""
    tensors = stacked("mixtral", packed_one_by_one)
    routers = [key for key in tensors if key.endswith("gate.weight")]
    for key in routers:
        parts = mlx_packed(tensors.pop(key))
        tensors |= {f"{key.removesuffix('weight')}{kind}": part for kind, part in parts.items()}
    config = json.loads((LLAMA.parent / "mixtral" / "config.json").read_text())
    own = {"quantization": {"group_size": 32, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config | own))
    save_file(tensors, tmp_path / "model.safetensors")
    model, checkpoint = open_model(tmp_path)
    how = {spec.name: stored(spec, checkpoint) for spec in model.weights()}
    assert {of.dtype for name, of in how.items() if name.endswith("router")} == {"f32"}
    assert {of.dtype for name, of in how.items() if ".experts." in name} == {"q4"}
    report = inspect_model(str(tmp_path))
    assert report.widened == len(routers) == 2
    assert "2 widened" in ModelReport(report).text()


def test_what_is_not_used_is_shown(tmp_path: Path) -> None:
    """Quantised activations and caches are shown by config.json, and by scales in the files."""
    key = "model.layers.0.self_attn.q_proj.weight"
    tensors = {k: read_rows(info) for k, info in Checkpoint.open(LLAMA).tensors.items()}
    parts = e4m3_packed(tensors.pop(key))
    tensors |= {key.replace("weight", kind): part for kind, part in parts.items()}
    tensors["model.layers.0.self_attn.k_scale"] = np.ones(1, np.float32)
    quantized, _, _ = QUANTIZED_MODELS["fp8"]
    config = json.loads((LLAMA / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | quantized))
    save(tensors, tmp_path / "model.safetensors")
    report = inspect_model(str(tmp_path))
    assert report.ignored == ["activations", "the KV cache"]
    assert "how the files quantise activations, the KV cache\n" in ModelReport(report).text()
    assert "quantise" not in ModelReport(inspect_model(str(LLAMA))).text()


def save(tensors: dict[str, Array], file: Path) -> None:
    """Writes tensors as safetensors; those of uint8 get the dtype E4M3."""
    save_file(tensors, file)
    size = int.from_bytes(file.read_bytes()[:8], "little")
    raw = file.read_bytes()
    header = raw[8 : 8 + size].replace(b'"U8"', b'"F8_E4M3"')
    header = header.rstrip() + b" " * (-len(header.rstrip()) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])


def test_what_weights_are(tmp_path: Path) -> None:
    """The dtype of weights is the one that /api/show tells."""
    file = tmp_path / "m.gguf"
    converted(file, "llama", kind=Kind.Q4_0)
    quantized, _, _ = QUANTIZED_MODELS["fp8"]
    config = json.loads((LLAMA / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | quantized))
    tensors: dict[str, Array] = {}
    for key, info in Checkpoint.open(LLAMA).tensors.items():
        packs = key.endswith("proj.weight")
        value = read_rows(info)
        parts = e4m3_packed(value) if packs else {"weight": value}
        tensors |= {key.replace("weight", kind): part for kind, part in parts.items()}
    save(tensors, tmp_path / "model.safetensors")
    found = {
        (path, dtype): plan_weights(model.weights(), checkpoint, dtype, model.ignorable).summary
        for path, dtype in ((LLAMA, None), (LLAMA, "q4"), (file, None), (tmp_path, None))
        for model, checkpoint in [open_model(path)]
    }
    count = inspect_model(str(LLAMA)).parameters
    assert count == sum(prod(info.shape) for info in Checkpoint.open(LLAMA).tensors.values())
    assert [*found.values()] == [
        Summary(count, "safetensors", "BF16"),
        Summary(count, "safetensors", "Q4"),
        Summary(count, "gguf", "Q4_0"),
        Summary(count, "safetensors", "FP8"),
    ]


@pytest.mark.parametrize(
    ("name", "kind", "tolerance"),
    [("llama", Kind.Q8_0, 1e-1), ("mixtral", Kind.Q8_0, 5e-1), ("qwen3_moe", Kind.Q4_0, 5e-1)],
)
def test_a_gguf_file_answers_as_its_values_do(
    device: Device, name: str, kind: Kind, tolerance: float, tmp_path: Path
) -> None:
    """But for what rounding activations costs, in few rows also other experts."""
    file = tmp_path / "m.gguf"
    converted(file, name, kind=kind)
    _, checkpoint = open_model(file)
    floats = {key: read_rows(info) for key, info in checkpoint.tensors.items()}
    ids = load(name).prompt_ids.tolist()
    with device.scope():
        expected = scores(build_engine(device, as_floats(checkpoint, floats, tmp_path, name)), ids)
        actual = scores(build_engine(device, file), ids)
    assert relative_error(actual, expected) <= tolerance
    assert relative_error(expected, load(name).logits) < 2 * tolerance


def as_floats(
    checkpoint: Checkpoint, floats: dict[str, Array], folder: Path, name: str = "llama"
) -> Path:
    """A model with the values of the packed matrices, and these floats besides."""
    for key, matrix in checkpoint.packed.items():
        floats[key] = matrix.read(0, matrix.shape[0]).dequantize()
    path = folder / "floats"
    path.mkdir()
    (path / "config.json").write_bytes((LLAMA.parent / name / "config.json").read_bytes())
    save_file(floats, path / "model.safetensors")
    return path
