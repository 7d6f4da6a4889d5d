"""Quantised checkpoints on the GPU: what a format's own library makes of each matrix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import OpenDevice
from engines import build_engine, scores
from numpy.typing import NDArray
from reference_models import load, relative_error
from safetensors.numpy import save_file
from test_formats import CASES, DATA, KEY, opened, values_of
from test_gguf import Kind, converted

from infer.kernels import reference, upload
from infer.kernels.check import int8_rows
from infer.kernels.codes import TABLES
from infer.kernels.device import Device, Settings
from infer.kernels.forward import Forward
from infer.kernels.reference import nmse
from infer.kernels.tensor import INTEGERS, GpuTensor
from infer.models import open_model
from infer.models.checkpoint import Checkpoint
from infer.models.formats import find_packed
from infer.models.formats.packed import read_rows
from infer.models.weights import Source, WeightSpec, load_weights

Array = NDArray[Any]
LIMIT = 1e-10  # of f32 arithmetic
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
def test_every_format_on_the_gpu(open_device: OpenDevice, case: str, settings: Settings) -> None:
    """Its values, row by row, and products with them."""
    device, expected = open_device(settings), values_of(case)
    with device.scope():
        weight = loaded(device, DATA / case, shape_of(case))
        rows, columns = weight.shape
        order = np.arange(columns)
        if weight.order is not None:
            order = device.read(weight.order, np.uint32)
        forward = Forward(device, rows)
        y = forward.run(forward.ops.embedding(weight), tokens=list(range(rows)))
        assert nmse(y, expected[:, order]) <= 1e-14
    for n in (1, 3, 40):
        rng = np.random.default_rng(n)
        x = exact = rng.standard_normal((n, columns), np.float32)
        if weight.dtype in INTEGERS:  # activations that are known as int8, in the weight's order
            quantized = int8_rows(rng, n, columns)
            x, exact = (np.empty_like(part) for part in quantized)
            x[:, order], exact[:, order] = quantized
        with device.scope():
            weight = loaded(device, DATA / case, shape_of(case))
            forward = Forward(device, n)
            y = forward.run(forward.ops.linear(forward.input(x), weight))
        assert nmse(y, reference.matmul(exact, expected)) <= LIMIT


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


def test_parts_of_a_packed_source(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other row of each expert, then the rest, in pieces of a few rows."""
    monkeypatch.setattr(upload, "PIECE_BYTES", 512)
    found, checkpoint = opened(DATA / "mxfp4")
    expected = values_of("mxfp4")
    parts = [range(24 * expert + way, 24 * (expert + 1), 2) for expert in (0, 1) for way in (0, 1)]
    shape = (2, 24, expected.shape[1])
    spec = WeightSpec("w", tuple(Source(KEY, shape, part, transposed=True) for part in parts))
    with device.scope():
        weight = load_weights(device, [spec], find_packed(checkpoint, found, [spec]))["w"]
        forward = Forward(device, 48)
        y = forward.run(forward.ops.embedding(weight), tokens=list(range(48)))
    assert nmse(y, expected[np.concatenate([np.array(part) for part in parts])]) <= 1e-14


def e4m3_packed(values: Array) -> dict[str, Array]:
    """A matrix in E4M3, with a scale for each 32x32 of it."""
    rows, columns = values.shape
    blocks = values.reshape(rows // 32, 32, columns // 32, 32)
    scales = (abs(blocks).max(axis=(1, 3), keepdims=True) / 448).astype(np.float32)
    table = TABLES["e4m3"][:127]
    nearest = abs(abs(blocks / scales)[..., None] - table).argmin(axis=-1).astype(np.uint8)
    codes = np.where(blocks < 0, nearest | 0x80, nearest).reshape(rows, columns)
    return {"weight": codes, "weight_scale_inv": scales.reshape(rows // 32, columns // 32)}


QUANTIZED_MODELS: dict[str, tuple[dict[str, Any], Callable[[Array], dict[str, Array]], float]] = {
    "mlx": ({"quantization": {"bits": 4, "group_size": 32}}, mlx_packed, 1e-1),
    "fp8": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}},
        e4m3_packed,
        1e-5,
    ),
}


@pytest.mark.parametrize("method", QUANTIZED_MODELS)
def test_a_quantised_model_answers_as_its_values_do(
    device: Device, method: str, tmp_path: Path
) -> None:
    """As one of floats that has these values. Rounding activations to int8 costs this model 8 %."""
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
    save(packed, folder / "model.safetensors")
    _, checkpoint = open_model(folder)
    assert len(checkpoint.packed) == 7 * config["num_hidden_layers"]
    ids = load("llama").prompt_ids.tolist()
    with device.scope():
        expected = scores(build_engine(device, as_floats(checkpoint, floats, tmp_path)), ids)
        actual = scores(build_engine(device, folder), ids)
    assert relative_error(actual, expected) <= tolerance
    assert relative_error(expected, load("llama").logits) > 1e-3  # it was quantised


def mxfp4_packed(values: Array) -> tuple[Array, Array, Array]:
    """Blocks and scales of matrices [experts, rows, columns], and what values they mean."""
    groups = values.reshape(*values.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(abs(groups).max(axis=-1))) - 2
    scales = np.exp2(exponents)[..., None]
    codes = abs((groups / scales)[..., None] - TABLES["mxfp4"]).argmin(axis=-1).astype(np.uint8)
    exact = (scales * TABLES["mxfp4"][codes]).astype(np.float32).reshape(values.shape)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).astype(np.uint8), exact


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
                forward.run(forward.ops.embedding(weight), tokens=range(rows))
                for forward, weight in forwards
            )
            assert np.array_equal(actual, expected)
        expected, actual = (scores(build_engine(device, folder), ids) for folder in folders)
    errors = [relative_error(*pair) for pair in zip(actual, expected, strict=True)]
    assert np.median(errors) <= 3e-2  # activations are rounded to int8


def save(tensors: dict[str, Array], file: Path) -> None:
    """As safetensors; uint8 named e4m3 is what E4M3 is called."""
    save_file(tensors, file)
    size = int.from_bytes(file.read_bytes()[:8], "little")
    raw = file.read_bytes()
    header = raw[8 : 8 + size].replace(b'"U8"', b'"F8_E4M3"')
    header = header.rstrip() + b" " * (-len(header.rstrip()) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])


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
