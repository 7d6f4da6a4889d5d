"""Quantised checkpoints: each matrix is what the format's own library makes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import places
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from infer.kernels.errors import CheckpointError, InferError, UnsupportedError
from infer.kernels.gpu.codes import TABLES
from infer.models.loading.checkpoint import SINGLE, Checkpoint, read_header
from infer.models.loading.config import RawConfig
from infer.models.loading.formats import find_format, find_packed
from infer.models.loading.formats.format import Format
from infer.models.loading.formats.grouped import Grouped, Scheme, from_e8m0, to_signed, unpack
from infer.models.loading.formats.mlx import Mlx
from infer.models.loading.formats.packed import Packed
from infer.models.loading.tensors import TensorInfo
from infer.models.loading.weights import Source, WeightSpec

DATA = places.DATA / "formats"
CASES = sorted(path.name for path in DATA.iterdir())
KEY = "model.layers.0.self_attn.q_proj.weight"

Array = NDArray[Any]
Config = dict[str, Any]


def opened(folder: Path) -> tuple[Format, Checkpoint]:
    found = find_format(RawConfig.open(folder))
    assert found is not None
    return found, Checkpoint.open(folder)


def values_of(name: str) -> Array:
    with np.load(DATA / name / "values.npz") as arrays:
        values: Array = arrays["values"]
    return values


def matrix_of(name: str) -> Packed:
    found, checkpoint = opened(DATA / name)
    shape = values_of(name).shape
    matrix = found.matrix(
        checkpoint, KEY, (2, shape[0] // 2, shape[1]) if name == "mxfp4" else shape
    )
    assert matrix is not None
    return matrix


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[str], Path]:
    """A case's folder that a test may change."""

    def copy(name: str) -> Path:
        return shutil.copytree(DATA / name, tmp_path / name)

    return copy


def edit(folder: Path, change: Callable[[dict[str, Array]], object]) -> None:
    """Change the tensors of a checkpoint, by the last part of their names."""
    arrays = load_file(folder / SINGLE)
    prefix = KEY.removesuffix("weight")
    parts = {name.removeprefix(prefix): array for name, array in arrays.items()}
    change(parts)
    save_file({f"{prefix}{name}": array for name, array in parts.items()}, folder / SINGLE)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (key,) = config
    path.write_text(json.dumps({key: config[key] | changes}))


# Values


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_formats_library(name: str) -> None:
    matrix, values = matrix_of(name), values_of(name)
    assert matrix.shape == values.shape
    whole = matrix.read(0, len(values))
    got = whole.dequantize()
    assert got.dtype == np.float32
    if name == "bnb_int8":  # multiplied by a rounded 1 / 127 there
        np.testing.assert_allclose(got, values, rtol=3e-7, atol=0)
    else:
        np.testing.assert_array_equal(got, values)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [(0, 1), (7, 9), (15, 16), (3, 16), (33, 47)])
def test_any_rows_can_be_read(name: str, rows: tuple[int, int]) -> None:
    matrix, values = matrix_of(name), values_of(name)
    start, stop = (row % (len(values) + 1) for row in rows)
    if start >= stop:
        start, stop = 0, len(values) - 1
    whole, some = matrix.read(0, len(values)), matrix.read(start, stop)
    np.testing.assert_array_equal(some.codes, whole.codes[start:stop])
    np.testing.assert_array_equal(some.scales, whole.scales[start:stop])
    np.testing.assert_array_equal(some.dequantize(), whole.dequantize()[start:stop])


@pytest.mark.parametrize("name", CASES)
def test_the_scheme_says_what_is_read(name: str) -> None:
    matrix = matrix_of(name)
    scheme, (rows, columns) = matrix.scheme, matrix.shape
    grouped = matrix.read(0, rows)
    groups = (rows, scheme.groups(columns))
    assert grouped.scheme == scheme
    config = json.loads((DATA / name / "config.json").read_text())
    method = config.get("quantization_config", {}).get("quant_method", "mlx")
    assert opened(DATA / name)[0].method == {"auto-round": "gptq"}.get(method, method)
    assert grouped.codes.shape == (rows, columns)
    assert grouped.codes.dtype == (np.int8 if scheme.signed else np.uint8)
    low, high = (-(1 << (scheme.bits - 1)), 0) if scheme.signed else (0, 1 << scheme.bits)
    high = high or -low
    assert low <= grouped.codes.min()
    assert grouped.codes.max() < high
    assert grouped.scales.shape == groups
    assert grouped.scales.dtype == np.float32
    for offsets, wanted, dtype in (
        (grouped.zeros, scheme.zeros, np.int16),
        (grouped.biases, scheme.biases, np.float32),
    ):
        assert (offsets is not None) == wanted
        if offsets is not None:
            assert offsets.shape == groups
            assert offsets.dtype == dtype
            assert np.ptp(offsets) > 0
    numbers = [grouped.scales] if grouped.biases is None else [grouped.scales, grouped.biases]
    for x in numbers:
        if scheme.scale_dtype == "f16":
            np.testing.assert_array_equal(x, x.astype(np.float16))
        elif scheme.scale_dtype == "bf16":
            assert not (x.view(np.uint32) & 0xFFFF).any()
        elif scheme.scale_dtype == "e8m0":
            assert not (x.view(np.uint32) & 0x807FFFFF).any()
    assert matrix.order is grouped.order
    assert (matrix.order is not None) == (name in ("gptq_4bit_act_order", "gptq_4bit_zeros"))


def unused(found: Format, checkpoint: Checkpoint, matrix: Packed) -> list[str]:
    """The tensors that mean something and belong to no matrix."""
    left = checkpoint.tensors.keys() - {info.name for info in matrix.tensors}
    return [name for name in left if not found.ignorable(checkpoint, name)]


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_belongs_to_the_matrix(name: str) -> None:
    found, checkpoint = opened(DATA / name)
    assert not unused(found, checkpoint, matrix_of(name))
    assert found.matrix(checkpoint, "lm_head.weight", (8, 8)) is None


def test_targets_are_found_by_name_pattern_and_class(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("compressed_int4_zeros")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    groups = config["quantization_config"]["config_groups"]
    right, wrong = groups["group_0"], json.loads(json.dumps(groups["group_0"]))
    wrong["weights"]["group_size"] = 64
    module = KEY.removesuffix(".weight")
    for better, worse in ((module, "re:.*q_proj$"), ("re:.*q_proj$", "Linear"), (module, "Linear")):
        for order in ((better, worse), (worse, better)):
            config["quantization_config"]["config_groups"] = {
                target: (right if target == better else wrong) | {"targets": [target]}
                for target in order
            }
            path.write_text(json.dumps(config))
            found, checkpoint = opened(folder)
            matrix = found.matrix(checkpoint, KEY, values_of("compressed_int4_zeros").shape)
            assert matrix is not None
            assert matrix.scheme.group == 32
    config["quantization_config"]["config_groups"] = {"a": right | {"targets": ["Embedding"]}}
    path.write_text(json.dumps(config))
    found, checkpoint = opened(folder)
    with pytest.raises(UnsupportedError, match="no group has it"):
        found.matrix(checkpoint, KEY, values_of("compressed_int4_zeros").shape)


@pytest.mark.parametrize("offsets", ["none", "zeros", "biases"])
@pytest.mark.parametrize("ordered", [False, True])
def test_dequantisation_is_its_formula(offsets: str, ordered: bool) -> None:
    rng = np.random.default_rng(0)
    rows, columns, group = 3, 11, 4  # the last group is short
    codes = rng.integers(-8, 8, (rows, columns)).astype(np.int8)
    scales = rng.standard_normal((rows, 3)).astype(np.float32)
    zeros = rng.integers(-8, 8, (rows, 3)).astype(np.int16) if offsets == "zeros" else None
    biases = rng.standard_normal((rows, 3)).astype(np.float32) if offsets == "biases" else None
    order = rng.permutation(columns) if ordered else None
    scheme = Scheme("int", 4, group, "f32", signed=True)
    got = Grouped(scheme, codes, scales, zeros, biases, order=order).dequantize()
    for row in range(rows):
        for i in range(columns):
            g = i // group
            value = float(codes[row, i]) - (0 if zeros is None else zeros[row, g])
            value = scales[row, g].item() * value + (0 if biases is None else biases[row, g].item())
            assert got[row, i if order is None else order[i]] == pytest.approx(value, rel=1e-6)


def test_columns_of_compressed_tensors_are_ordered_by_group(tmp_path: Path) -> None:
    """actorder = "group": the group of column i is g_idx[i]."""
    rng = np.random.default_rng(0)
    rows, columns = 3, 8
    weight = rng.integers(-8, 8, (rows, columns)).astype(np.int8)
    scales = rng.standard_normal((rows, 2)).astype(np.float32)
    index = np.array([1, 0, 0, 1, 1, 0, 1, 0], np.int32)
    args = {"num_bits": 4, "strategy": "group", "group_size": 4, "actorder": "group"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": args}},
    }
    parts = {"weight": weight, "weight_scale": scales, "weight_g_idx": index}
    prefix = KEY.removesuffix("weight")
    save_file({f"{prefix}{part}": array for part, array in parts.items()}, tmp_path / SINGLE)
    found = find_format(RawConfig({"quantization_config": config}))
    assert found is not None
    matrix = found.matrix(Checkpoint.open(tmp_path), KEY, (rows, columns))
    assert matrix is not None
    np.testing.assert_array_equal(matrix.read(0, 3).dequantize(), weight * scales[:, index])


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
def test_a_stream_of_codes_is_unpacked(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 32), np.uint8)
    stream = (codes[..., None] >> np.arange(bits)) & 1
    packed = np.packbits(stream.reshape(3, -1), axis=1, bitorder="little")
    np.testing.assert_array_equal(unpack(packed, bits, 32), codes)
    np.testing.assert_array_equal(unpack(packed, bits, 29), codes[:, :29])
    signed = codes.astype(int) - (1 << (bits - 1))
    np.testing.assert_array_equal(to_signed(codes, bits), signed)


def test_scales_of_microscaling_are_powers_of_two() -> None:
    exponents = np.arange(255, dtype=np.uint8)
    np.testing.assert_array_equal(from_e8m0(exponents), 2.0 ** (np.arange(255) - 127.0))
    assert np.isnan(from_e8m0(np.array([255], np.uint8))).all()


@pytest.mark.live
def test_e4m3_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    np.testing.assert_array_equal(TABLES["e4m3"], codes.float().numpy())


def test_zero_points_of_symmetric_integers_must_be_zero(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("compressed_int8")
    edit(folder, lambda arrays: arrays.update(weight_zero_point=np.zeros((48, 1), np.int8)))
    found, checkpoint = opened(folder)
    matrix = found.matrix(checkpoint, KEY, values_of("compressed_int8").shape)
    assert matrix is not None
    assert not unused(found, checkpoint, matrix)
    edit(folder, lambda arrays: arrays["weight_zero_point"].__setitem__(47, 1))
    found, checkpoint = opened(folder)
    assert unused(found, checkpoint, matrix)


@pytest.mark.parametrize("name", CASES)
def test_no_more_is_read_than_rows_need(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = matrix_of(name)
    codes = max(matrix.tensors, key=lambda info: info.nbytes)
    read: list[int] = []
    original = TensorInfo.read_into

    def counted(self: TensorInfo, view: memoryview, start: int = 0) -> None:
        if self.name == codes.name:
            read.append(len(view))
        original(self, view, start)

    monkeypatch.setattr(TensorInfo, "read_into", counted)
    matrix.read(8, 16)
    assert 0 < sum(read) <= -(-8 * codes.nbytes // matrix.shape[0])


# Checkpoints that are refused


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq_4bit", {"bits": 5}, "bits = 5"),
        ("gptq_4bit", {"group_size": 0}, "group_size = 0"),
        ("gptq_4bit", {"checkpoint_format": "marlin"}, "marlin"),
        ("gptq_4bit", {"is_marlin_format": True}, "is_marlin_format"),
        ("gptq_4bit", {"dynamic": {"+:.*down": {"bits": 8}}}, "dynamic"),
        ("gptq_4bit", {"quant_method": "hqq"}, "'hqq'"),
        ("auto_round", {"packing_format": "auto_round"}, "packing_format = 'auto_round'"),
        ("auto_round", {"packing_format": None}, "lacks 'packing_format'"),
        ("auto_round", {"data_type": "mx_fp"}, "mx_fp"),
        ("auto_round", {"act_bits": 8}, "act_bits = 8"),
        ("auto_round", {"super_bits": 6}, "super_bits = 6"),
        ("auto_round", {"extra_config": {"lm_head": {"bits": 8}}}, "sizes by layer"),
        ("awq", {"bits": 8}, "bits = 8"),
        ("awq", {"version": "gemv"}, "gemv"),
        ("awq", {"zero_point": False}, "zero_point"),
        ("mlx_4bit", {"bits": 7}, "bits = 7"),
        ("mlx_4bit", {"mode": "fp5"}, "fp5"),
        ("mlx_4bit", {"lm_head": {"bits": 1, "group_size": 64}}, "lm_head: bits = 1"),
        ("mlx_4bit", {"group_size": 48}, "group_size = 48"),
        ("compressed_int4", {"format": "mxfp8-quantized"}, "mxfp8-quantized"),
        ("compressed_int4", {"format": "nvfp4-pack-quantized"}, "type = 'int'"),
        ("compressed_int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        ("compressed_int4", {"transform_config": {"config_groups": {"R1": {}}}}, "transform"),
        ("fp8_block", {"fmt": "e5m2"}, "e5m2"),
        ("fp8_block", {"weight_block_size": [128]}, "weight_block_size"),
        ("nf4", {"bnb_4bit_quant_type": "fp4"}, "fp4"),
        ("nf4", {"bnb_4bit_quant_storage": "bfloat16"}, "bfloat16"),
    ],
)
def test_variants_are_refused_by_name(
    copy_of: Callable[[str], Path], name: str, changes: Config, message: str
) -> None:
    folder = copy_of(name)
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedError, match=message):
        opened(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ["re:("]}, "not a pattern"),
        ({"targets": ["re:(.+)+x"]}, "repeats too much"),
        ({"num_bits": 3}, "num_bits = 3"),
        ({"type": "float"}, "type = 'float'"),
        ({"strategy": "tensor_group"}, "tensor_group"),
        ({"dynamic": True}, "dynamic"),
        ({"group_size": 0}, "group_size = 0"),
        ({"actorder": "soon"}, "soon"),
        ({"strategy": "tensor", "symmetric": False}, "zero points"),
    ],
)
def test_schemes_of_weights_are_refused_by_name(
    copy_of: Callable[[str], Path], changes: Config, message: str
) -> None:
    folder = copy_of("compressed_int4")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    (group if "targets" in changes else group["weights"]).update(changes)
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=message):
        opened(folder)


def variants(config: Any) -> Iterator[Any]:
    """The config with each of its values, at any depth, replaced by what it should not be."""
    items = config.items() if isinstance(config, dict) else enumerate(config)
    for key, value in items:
        copies = [None, -1, 0, True, 1.5, "x", [], {}, ["x"], {"x": 1}, 1 << 70]
        if isinstance(value, dict | list):
            copies += variants(value)
        for other in copies:
            changed = config.copy()
            changed[key] = other
            yield changed


@pytest.mark.parametrize(
    "name",
    [
        *(
            "gptq_4bit",
            "auto_round",
            "awq",
            "mlx_4bit",
            "fp8_block",
            "nf4",
            "bnb_int8",
            "compressed_int8",
        ),
        *(
            "compressed_mxfp4",
            "compressed_nvfp4",
            "compressed_int4_zeros",
            "compressed_fp8_block",
            "compressed_fp8_channel",
        ),
    ],
)
def test_no_config_does_harm(name: str) -> None:
    config = json.loads((DATA / name / "config.json").read_text())
    checkpoint = Checkpoint.open(DATA / name)
    values = values_of(name)
    outcomes = set()
    for changed in variants(config):
        try:
            found = find_format(RawConfig(changed))
            if found is None:
                outcomes.add("none")
                continue
            matrix = found.matrix(checkpoint, KEY, values.shape)
            if matrix is None or unused(found, checkpoint, matrix):  # which loading would refuse
                outcomes.add("refused")
                continue
            got = matrix.read(0, len(values)).dequantize()
            np.testing.assert_allclose(got, values, rtol=3e-7, atol=0)  # or it was told otherwise
            outcomes.add("same")
        except InferError:
            outcomes.add("refused")
    assert {"same", "refused"} <= outcomes


def test_a_model_without_a_format_has_none() -> None:
    assert find_format(RawConfig({"model_type": "llama"})) is None
    assert find_format(RawConfig({"quantization_config": {}, "quantization": None})) is None


@pytest.mark.parametrize("name", ["mlx_4bit", "gptq_4bit"])
def test_quantised_weights_that_the_config_does_not_mention_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"q_proj\.scales .* config\.json does not say"):
        find_packed(Checkpoint.open(DATA / name), find_format(RawConfig({})), [])


def test_what_is_not_done_is_named(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("compressed_fp8_channel")
    assert opened(folder)[0].ignored == ()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True}
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8}
    path.write_text(json.dumps(config))
    assert opened(folder)[0].ignored == ("activations", "the KV cache")


@pytest.mark.parametrize("divisor", [0.0, np.nan, np.inf])
def test_a_scale_of_scales_that_is_none(copy_of: Callable[[str], Path], divisor: float) -> None:
    folder = copy_of("compressed_nvfp4")
    found, checkpoint = opened(folder)
    info = checkpoint.tensors[f"{KEY}_global_scale"]
    with open(info.file, "r+b") as file:
        file.seek(info.offset)
        file.write(np.float32(divisor).tobytes())
    matrix = found.matrix(checkpoint, KEY, values_of("compressed_nvfp4").shape)
    assert matrix is not None
    with pytest.raises(CheckpointError, match="weight_global_scale is"):
        matrix.read(0, 1)


# Where older files say it, and what they leave unsaid


@pytest.mark.parametrize("name", ["nf4", "bnb_int8"])
def test_bitsandbytes_is_known_by_its_keys(copy_of: Callable[[str], Path], name: str) -> None:
    folder = copy_of(name)
    edit_config(folder, quant_method=None)
    assert opened(folder)[0].method == "bitsandbytes"


def test_a_format_that_is_not_named(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("gptq_4bit")
    edit_config(folder, quant_method=None)
    with pytest.raises(UnsupportedError, match=r"quantization_config has no quant_method"):
        opened(folder)


def test_gptq_beside_the_config(copy_of: Callable[[str], Path]) -> None:
    """AutoGPTQ first wrote a file of its own, quantize_config.json. A quantisation in config.json
    counts before it."""
    folder = copy_of("gptq_4bit_act_order")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    del config["quant_method"]
    (folder / "config.json").write_text("{}")
    assert find_format(RawConfig.open(folder), folder) is None
    (folder / "quantize_config.json").write_text(json.dumps(config))
    found = find_format(RawConfig.open(folder), folder)
    assert found is not None
    values = values_of("gptq_4bit_act_order")
    matrix = found.matrix(Checkpoint.open(folder), KEY, values.shape)
    assert matrix is not None
    np.testing.assert_array_equal(matrix.read(0, len(values)).dequantize(), values)
    own = RawConfig({"quantization": {"bits": 4}})
    assert isinstance(find_format(own, folder), Mlx)
    (folder / "quantize_config.json").write_text(json.dumps(config | {"bits": 5}))
    with pytest.raises(UnsupportedError, match=r"quantize_config\.json: bits = 5"):
        find_format(RawConfig({}), folder)


@pytest.mark.parametrize("name", ["fp8_tensor", "compressed_fp8_tensor"])
@pytest.mark.parametrize("scale", ["k_scale", "kv_scale", "k_proj.output_scale"])
def test_scales_of_a_cache_are_left_out(
    copy_of: Callable[[str], Path], name: str, scale: str
) -> None:
    folder = copy_of(name)
    file = folder / "more.safetensors"
    scales = [f"model.layers.0.self_attn.{scale}", "model.layers.0.self_attn.q_scale"]
    save_file(dict.fromkeys(scales, np.ones(1, np.float32)), file)
    found, checkpoint = opened(folder)
    checkpoint = replace(checkpoint, tensors=checkpoint.tensors | read_header(file))
    spec = WeightSpec("w", (Source(KEY, values_of(name).shape),))
    left = find_packed(checkpoint, found, [spec])
    assert list(left.tensors) == scales[1:]
    assert "the KV cache" in left.ignored


# Damage


def needed(name: str) -> list[str]:
    """The parts without which a case has a format, but no matrix."""
    marks = {"qweight", "weight_scale", "SCB"}
    marks |= {"weight_blocks", "weight.quant_state.bitsandbytes__nf4"}
    if name.startswith("fp8"):
        marks.add("weight")
    tensors = [
        info.name.removeprefix(KEY.removesuffix("weight")) for info in matrix_of(name).tensors
    ]
    return [part for part in tensors if part not in marks]


def raw_tensors(folder: Path) -> bool:
    """Whether numpy can hold the tensors of a case."""
    with safe_open(folder / SINGLE, framework="numpy") as file:
        dtypes = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return not dtypes & {"BF16", "F8_E4M3"}


EDITABLE = [name for name in CASES if raw_tensors(DATA / name)]
OPTIONAL = {"g_idx"}  # of groups in their own order


@pytest.mark.parametrize("name", EDITABLE)
def test_a_part_that_is_missing_is_named(copy_of: Callable[[str], Path], name: str) -> None:
    folder = copy_of(name)
    parts = needed(name)
    assert parts
    for missing in parts:
        if missing in OPTIONAL and matrix_of(name).order is None:
            continue
        shutil.copyfile(DATA / name / SINGLE, folder / SINGLE)
        edit(folder, lambda arrays, missing=missing: arrays.pop(missing))
        found, checkpoint = opened(folder)
        shape = values_of(name).shape
        wanted = (2, shape[0] // 2, shape[1]) if name == "mxfp4" else shape
        with pytest.raises(CheckpointError, match=f"lacks .*{missing}"):
            found.matrix(checkpoint, KEY, wanted)


@pytest.mark.parametrize("name", EDITABLE)
def test_a_part_of_another_shape_or_dtype_is_named(
    copy_of: Callable[[str], Path], name: str
) -> None:
    folder = copy_of(name)
    shape = values_of(name).shape
    wanted = (2, shape[0] // 2, shape[1]) if name == "mxfp4" else shape
    for info in matrix_of(name).tensors:
        part = info.name.removeprefix(KEY.removesuffix("weight"))
        if part.endswith("nf4"):  # JSON of any length
            continue
        shutil.copyfile(DATA / name / SINGLE, folder / SINGLE)
        edit(folder, lambda arrays, part=part: arrays.update({part: arrays[part][:-1]}))
        found, checkpoint = opened(folder)
        with pytest.raises(CheckpointError, match=f"{part} is "):
            found.matrix(checkpoint, KEY, wanted)
        shutil.copyfile(DATA / name / SINGLE, folder / SINGLE)
        edit(
            folder,
            lambda arrays, part=part: arrays.update({part: arrays[part].astype(np.float64)}),
        )
        found, checkpoint = opened(folder)
        with pytest.raises(UnsupportedError, match=f"{part} is of dtype F64"):
            found.matrix(checkpoint, KEY, wanted)


@pytest.mark.parametrize("name", CASES)
def test_a_model_of_another_shape_is_refused(name: str) -> None:
    found, checkpoint = opened(DATA / name)
    rows, columns = values_of(name).shape
    for shape in ((rows * 2, columns), (rows, columns * 2), (rows, columns - 1), (rows,)):
        with pytest.raises(InferError, match=r"q_proj"):
            found.matrix(checkpoint, KEY, shape)


def test_groups_of_wrong_size_are_refused(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("gptq_4bit_act_order")
    edit(folder, lambda arrays: arrays["g_idx"].__setitem__(0, arrays["g_idx"][1] + 1))
    found, checkpoint = opened(folder)
    with pytest.raises(CheckpointError, match="g_idx does not have 32 columns in each group"):
        found.matrix(checkpoint, KEY, values_of("gptq_4bit_act_order").shape)


def test_zero_points_must_be_symmetric_where_the_config_says_so(
    copy_of: Callable[[str], Path],
) -> None:
    folder = copy_of("gptq_4bit")
    edit_config(folder, checkpoint_format="gptq_v2")
    found, checkpoint = opened(folder)
    matrix = found.matrix(checkpoint, KEY, values_of("gptq_4bit").shape)
    assert matrix is not None
    with pytest.raises(CheckpointError, match="other zero points than 8"):
        matrix.read(0, 1)


def test_a_bias_that_is_not_zero_counts(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("gptq_4bit")
    name = KEY.replace("weight", "bias")
    found, checkpoint = opened(folder)
    assert found.ignorable(checkpoint, name)
    edit(folder, lambda arrays: arrays["bias"].__setitem__(5, 1))
    found, checkpoint = opened(folder)
    assert not found.ignorable(checkpoint, name)


@pytest.mark.parametrize("state", [b"{", b"[]", b"\xff", b"[" * 5000, b"{}"])
def test_a_damaged_state_of_nf4_is_refused(copy_of: Callable[[str], Path], state: bytes) -> None:
    folder = copy_of("nf4")
    part = "weight.quant_state.bitsandbytes__nf4"
    edit(folder, lambda arrays: arrays.update({part: np.frombuffer(state, np.uint8)}))
    found, checkpoint = opened(folder)
    with pytest.raises((CheckpointError, UnsupportedError), match="q_proj"):
        found.matrix(checkpoint, KEY, values_of("nf4").shape)


@pytest.mark.parametrize("name", ["gptq_4bit", "awq", "mlx_4bit", "nf4_double"])
def test_a_file_that_was_cut_is_named(copy_of: Callable[[str], Path], name: str) -> None:
    folder = copy_of(name)
    found, checkpoint = opened(folder)
    values = values_of(name)
    matrix = found.matrix(checkpoint, KEY, values.shape)
    assert matrix is not None
    file = folder / SINGLE
    codes = matrix.tensors[0]
    file.write_bytes(file.read_bytes()[: codes.offset + codes.nbytes // 2])
    with pytest.raises(CheckpointError, match="ends inside the tensor"):
        matrix.read(0, len(values))
