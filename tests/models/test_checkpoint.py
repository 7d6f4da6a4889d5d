"""Checkpoints: what is on the GPU is what is in the files, and nothing else is accepted."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import places
import pytest
from huggingface_hub import split_state_dict_into_shards_factory
from plans import load_weights, random_weights
from safetensors.numpy import load_file, save_file

from infer.kernels.errors import (
    CheckpointError,
    InferError,
    ModelNotFoundError,
    OutOfMemoryError,
    UnsupportedError,
)
from infer.kernels.gpu import upload
from infer.kernels.gpu.device import Device, Settings
from infer.kernels.gpu.pack import from_bf16
from infer.kernels.gpu.tensor import GpuTensor
from infer.models.loading.checkpoint import INDEX, SINGLE, Checkpoint
from infer.models.loading.load import Change
from infer.models.loading.tensors import TensorInfo
from infer.models.loading.weights import Source, WeightSpec

Array = np.ndarray[Any, Any]
NAMES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
STORAGE = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
MODELS = places.DATA / "models"


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device.open() as device:
        yield device


@pytest.fixture(autouse=True)
def nothing_leaks(device: Device) -> Iterator[None]:
    yield
    device.destroy(list(device._buffers))
    device._pool.clear()


def write(file: Path, tensors: dict[str, tuple[str, Array]], **metadata: str) -> None:
    """A safetensors file by the format's description: numpy writers know no bf16."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name, (dtype, array) in tensors.items():
        span = [start, start + array.nbytes]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": span}
        start = span[1]
    text = json.dumps(header).encode()
    file.write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for _, a in tensors.values())
    )


def some(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (
        (values.view(np.uint32) >> 16).astype(np.uint16)
        if dtype == "bf16"
        else values.astype(STORAGE[dtype])
    )


def weight(name: str, **shapes: tuple[int, ...]) -> WeightSpec:
    """weight("a", shape=(2, 3)) is a itself; weight("ab", a=(2, 3), b=(4, 3)) is stacked."""
    if "shape" in shapes:
        return WeightSpec(name, (Source(name, shapes["shape"]),))
    return WeightSpec(name, tuple(Source(key, shape) for key, shape in shapes.items()))


def on_gpu(device: Device, tensor: GpuTensor) -> Array:
    """The stored values of a tensor, with the padding of its rows, which is checked to be zero."""
    dtype, columns = STORAGE[tensor.dtype], tensor.shape[-1]
    parts = []
    for shard in tensor.shards:
        data = device.read(shard.buffer, dtype)
        rows = data.reshape(shard.rows, -1)
        assert rows.shape[1] == -(-columns // 8) * 8
        assert not rows[:, columns:].any()
        parts.append(rows[:, :columns])
    return np.concatenate(parts).reshape(tensor.shape)


# Values


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("shape", [(7, 16), (5, 13), (3, 1), (1, 24)])
def test_a_matrix_is_stored_as_it_is(
    device: Device, tmp_path: Path, dtype: str, shape: tuple[int, int]
) -> None:
    array = some(shape, dtype)
    write(tmp_path / SINGLE, {"w": (NAMES[dtype], array)}, format="pt")
    weights = load_weights(device, [weight("w", shape=shape)], Checkpoint.open(tmp_path))
    assert weights["w"].dtype == dtype
    np.testing.assert_array_equal(on_gpu(device, weights["w"]), array)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_vector_is_widened_to_f32(device: Device, tmp_path: Path, dtype: str) -> None:
    array = some((19,), dtype)
    write(tmp_path / SINGLE, {"norm": (NAMES[dtype], array)})
    weights = load_weights(device, [weight("norm", shape=(19,))], Checkpoint.open(tmp_path))
    exact = (array.astype("<u4") << 16).view("<f4") if dtype == "bf16" else array.astype("<f4")
    assert weights["norm"].dtype == "f32"
    np.testing.assert_array_equal(on_gpu(device, weights["norm"]), exact)


@pytest.mark.parametrize("columns", [16, 12])
def test_sources_are_stacked(device: Device, tmp_path: Path, columns: int) -> None:
    q, k, v = (some((rows, columns), "f16", rows) for rows in (6, 2, 3))
    bias = {key: some((n,), "f16", n) for key, n in (("qb", 5), ("kb", 2), ("vb", 3))}
    save_file({"v": v, "q": q, "k": k, **bias}, tmp_path / SINGLE)
    specs = [
        weight("qkv", q=q.shape, k=k.shape, v=v.shape),
        weight("bias", **{key: array.shape for key, array in bias.items()}),
    ]
    weights = load_weights(device, specs, Checkpoint.open(tmp_path))
    np.testing.assert_array_equal(on_gpu(device, weights["qkv"]), np.concatenate([q, k, v]))
    np.testing.assert_array_equal(
        on_gpu(device, weights["bias"]), np.concatenate(list(bias.values())).astype(np.float32)
    )


def test_sources_of_different_dtypes_are_widened(device: Device, tmp_path: Path) -> None:
    a, b = some((2, 8), "f16"), some((3, 8), "bf16")
    write(tmp_path / SINGLE, {"a": ("F16", a), "b": ("BF16", b)})
    spec = weight("ab", a=(2, 8), b=(3, 8))
    weights = load_weights(device, [spec], Checkpoint.open(tmp_path))
    exact = np.concatenate([a.astype(np.float32), (b.astype("<u4") << 16).view("<f4")])
    assert weights["ab"].dtype == "f32"
    np.testing.assert_array_equal(on_gpu(device, weights["ab"]), exact)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("columns", [32, 29])
def test_a_matrix_larger_than_a_binding_is_split_by_rows(
    tmp_path: Path, dtype: str, columns: int
) -> None:
    a, b = some((1500, columns), dtype, 1), some((1000, columns), dtype, 2)
    write(tmp_path / SINGLE, {"a": (NAMES[dtype], a), "b": (NAMES[dtype], b)})
    with Device.open(settings=Settings(max_binding=1 << 16)) as device:
        spec = weight("ab", a=a.shape, b=b.shape)
        tensor = load_weights(device, [spec], Checkpoint.open(tmp_path))["ab"]
        assert len(tensor.shards) > 2
        assert all(shard.buffer.nbytes <= 1 << 16 for shard in tensor.shards)
        np.testing.assert_array_equal(on_gpu(device, tensor), np.concatenate([a, b]))


def test_data_larger_than_the_ring_arrives(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STAGING_BYTES", "SOFTWARE_STAGING_BYTES"):
        monkeypatch.setattr(upload, name, 1 << 18)
    rng = np.random.default_rng(0)
    arrays = {
        "whole": rng.standard_normal((700, 1024), np.float32),
        "padded": rng.standard_normal((500, 1021), np.float32),
        "vector": rng.standard_normal(70_000, np.float32),
    }
    save_file(arrays, tmp_path / SINGLE)
    seen: list[tuple[int, int]] = []
    specs = [weight(name, shape=array.shape) for name, array in arrays.items()]
    weights = load_weights(
        device, specs, Checkpoint.open(tmp_path), progress=lambda *p: seen.append(p)
    )
    for name, array in arrays.items():
        np.testing.assert_array_equal(on_gpu(device, weights[name]), array)
    done, totals = [p[0] for p in seen], {p[1] for p in seen}
    assert done == sorted(set(done))
    assert totals == {done[-1]}
    assert len(done) > 2 * upload.RING


# Half the distance from 1 to the next bf16 is 2^-8: ties go to the even neighbour.
BF16_CASES = {
    1 + 2**-8: 1.0,
    1 + 2**-8 + 2**-23: 1 + 2**-7,
    1 + 3 * 2**-8: 1 + 2**-6,
    -1 - 3 * 2**-8: -1 - 2**-6,
    2.0**-133: 2.0**-133,
    -0.0: -0.0,
    np.inf: np.inf,
}
F16_CASES = {
    1 + 2**-11: 1.0,
    1 + 3 * 2**-11: 1 + 2**-9,
    65519.0: 65504.0,
    2.0**-24: 2.0**-24,
    -np.inf: -np.inf,
}


@pytest.mark.parametrize(("dtype", "cases"), [("bf16", BF16_CASES), ("f16", F16_CASES)])
def test_narrowing_rounds_to_nearest_even(
    device: Device, tmp_path: Path, dtype: str, cases: dict[float, float]
) -> None:
    save_file({"w": np.array([[*cases, np.nan]], np.float32)}, tmp_path / SINGLE)
    spec = weight("w", shape=(1, len(cases) + 1))
    tensor = load_weights(device, [spec], Checkpoint.open(tmp_path), dtype=dtype)["w"]
    assert tensor.dtype == dtype
    stored = on_gpu(device, tensor)[0]
    wide = (stored.astype("<u4") << 16).view("<f4") if dtype == "bf16" else stored
    np.testing.assert_array_equal(wide[:-1], np.array([*cases.values()], np.float32))
    np.testing.assert_array_equal(np.signbit(wide[:-1]), np.signbit([*cases.values()]))
    assert np.isnan(wide[-1])


@pytest.mark.parametrize(("dtype", "value"), [("f16", 65520.0), ("bf16", -3.4e38)])
def test_a_value_too_large_for_the_dtype_is_an_error(
    device: Device, tmp_path: Path, dtype: str, value: float
) -> None:
    save_file({"big.w": np.array([[1, value]], np.float32)}, tmp_path / SINGLE)
    spec = weight("big.w", shape=(1, 2))
    with pytest.raises(CheckpointError, match=r"big\.w .* too large for"):
        load_weights(device, [spec], Checkpoint.open(tmp_path), dtype=dtype)
    assert device.memory_stats().allocated == 0


@pytest.mark.live
@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("target", ["f32", "f16", "bf16"])
def test_conversions_equal_those_of_torch(
    device: Device, tmp_path: Path, source: str, target: str
) -> None:
    torch = pytest.importorskip("torch")
    types = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    torch.manual_seed(0)
    values = (torch.randn(200, 301) * 10.0 ** torch.randint(-9, 4, (200, 301))).to(types[source])
    bits = torch.int32 if source == "f32" else torch.int16
    array = values.view(bits).numpy().view(STORAGE[source])
    write(tmp_path / SINGLE, {"w": (NAMES[source], array)})
    spec = weight("w", shape=(200, 301))
    tensor = load_weights(device, [spec], Checkpoint.open(tmp_path), dtype=target)["w"]
    stored = on_gpu(device, tensor)
    bits = torch.int32 if target == "f32" else torch.int16
    np.testing.assert_array_equal(
        stored.view(np.uint8), values.to(types[target]).view(bits).numpy().view(np.uint8)
    )


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_parts_of_a_source(device: Device, tmp_path: Path, dtype: str) -> None:
    """Rows of a matrix and of vectors, in another order, beginning in the middle of shards."""
    w, b = some((30, 24), dtype), some((30,), dtype)
    arrays = {"w": w, "b": b, "stack": b.reshape(5, 6)}
    write(tmp_path / SINGLE, {name: (NAMES[dtype], array) for name, array in arrays.items()})
    parts = [range(20, 30), range(3), range(7, 19, 3), range(8, 19, 3)]
    specs = [
        WeightSpec(name, tuple(source.rows(part) for part in parts))
        for name, source in (
            ("w", Source("w", w.shape)),
            ("b", Source("b", b.shape)),
            ("stack", Source("stack", (5, 6)).values()),
        )
    ]
    weights = load_weights(device, specs, Checkpoint.open(tmp_path))
    rows = np.concatenate([np.array(part) for part in parts])
    np.testing.assert_array_equal(on_gpu(device, weights["w"]), w[rows])
    vector = from_bf16(b) if dtype == "bf16" else b
    for name in ("b", "stack"):
        np.testing.assert_array_equal(on_gpu(device, weights[name]), vector[rows])


@pytest.mark.parametrize("target", [None, "f32", "q4"])
@pytest.mark.parametrize("shape", [(3, 10, 24), (1, 20000, 256)])
def test_transposed_matrices(
    device: Device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, int, int],
    target: str | None,
) -> None:
    """Every other row of each and then the rest: what they would be as they are wanted. All is read
    once."""
    sizes: list[int] = []
    read_into = TensorInfo.read_into

    def counted(info: TensorInfo, view: memoryview, start: int = 0) -> None:
        sizes.append(len(view) if info.name == "transposed" else 0)
        read_into(info, view, start)

    monkeypatch.setattr(TensorInfo, "read_into", counted)
    monkeypatch.setattr(upload, "MAX_THREADS", 1)
    count, rows, columns = shape
    transposed = some((count, columns, rows), "bf16")
    parts = [range(i * rows + way, (i + 1) * rows, 2) for i in range(count) for way in (0, 1)]
    order = np.concatenate([np.array(part) for part in parts])
    wanted = transposed.swapaxes(1, 2).reshape(-1, columns)[order]
    write(tmp_path / SINGLE, {"transposed": ("BF16", transposed), "wanted": ("BF16", wanted)})
    sources = tuple(Source("transposed", shape, transposed=True).rows(part) for part in parts)
    specs = [WeightSpec("transposed", sources), weight("wanted", shape=wanted.shape)]
    with device.scope():
        weights = load_weights(device, specs, Checkpoint.open(tmp_path), dtype=target)
        for a, b in zip(*(weights[name].buffers for name in ("transposed", "wanted")), strict=True):
            np.testing.assert_array_equal(device.read(a, np.uint32), device.read(b, np.uint32))
    assert sum(sizes) == transposed.nbytes


@pytest.mark.parametrize("target", [None, "f32", "q4"])
def test_rows_that_become_columns(device: Device, tmp_path: Path, target: str | None) -> None:
    """Two parts of a matrix, each transposed, as W_UK of each head lies in DeepSeek's kv_b_proj."""
    whole, parts = some((100, 70), "bf16"), (range(1, 37), range(50, 86))
    wanted = np.concatenate([whole[part.start : part.stop].T for part in parts])
    write(tmp_path / SINGLE, {"whole": ("BF16", whole), "wanted": ("BF16", wanted)})
    sources = tuple(Source("whole", whole.shape).rows(part).transpose() for part in parts)
    specs = [WeightSpec("whole", sources), weight("wanted", shape=wanted.shape)]
    with device.scope():
        weights = load_weights(device, specs, Checkpoint.open(tmp_path), dtype=target)
        for a, b in zip(*(weights[name].buffers for name in ("whole", "wanted")), strict=True):
            np.testing.assert_array_equal(device.read(a, np.uint32), device.read(b, np.uint32))


@pytest.mark.parametrize("changed", [False, True])
def test_columns_of_a_source(device: Device, tmp_path: Path, changed: bool) -> None:
    """Its right part above as wide a left one, as they are or after a product is added."""
    w, b, a = some((30, 24), "f32"), some((30, 2), "f32", 1), some((2, 24), "f32", 2)
    write(tmp_path / SINGLE, {"w": ("F32", w)})
    spec = WeightSpec(
        "w", tuple(Source("w", w.shape).columns(own) for own in (range(11, 24), range(13)))
    )
    changes: dict[str, Change] = {"w": lambda row, count: (b[row : row + count], a)}
    checkpoint = Checkpoint.open(tmp_path)
    found = load_weights(device, [spec], checkpoint, changes=changes if changed else {})["w"]
    whole = w + b @ a if changed else w
    wanted = np.concatenate([whole[:, 11:], whole[:, :13]])
    np.testing.assert_allclose(on_gpu(device, found), wanted, atol=1e-6 * changed, rtol=0)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_what_is_added_to_a_vector(device: Device, tmp_path: Path, dtype: str) -> None:
    values = some((37,), dtype)
    write(tmp_path / SINGLE, {"norm": (NAMES[dtype], values)})
    spec = WeightSpec("norm", (Source("norm", (37,)),), added=1.0)
    weights = load_weights(device, [spec], Checkpoint.open(tmp_path))
    expected = values.astype(np.float32) + np.float32(1)
    np.testing.assert_array_equal(on_gpu(device, weights["norm"]), expected)


# Folders


def shards_of(folder: Path, arrays: dict[str, Array], limit: int) -> None:
    """A sharded checkpoint, split as the hub's library splits one."""
    split = split_state_dict_into_shards_factory(
        arrays,
        get_storage_size=lambda array: array.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    for file, names in split.filename_to_tensors.items():
        save_file({name: arrays[name] for name in names}, folder / file)
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (folder / INDEX).write_text(json.dumps(index))


@pytest.fixture
def sharded(tmp_path: Path) -> dict[str, Array]:
    arrays = {f"w{i}": some((10, 8), "f32", i) for i in range(7)}
    shards_of(tmp_path, arrays, 1000)
    return arrays


def test_shards_are_read(device: Device, tmp_path: Path, sharded: dict[str, Array]) -> None:
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    specs = [
        weight("stack", w0=(10, 8), w6=(10, 8)),
        *(weight(f"w{i}", shape=(10, 8)) for i in range(1, 6)),
    ]
    weights = load_weights(device, specs, Checkpoint.open(tmp_path))
    stack = np.concatenate([sharded["w0"], sharded["w6"]])
    np.testing.assert_array_equal(on_gpu(device, weights["stack"]), stack)
    np.testing.assert_array_equal(on_gpu(device, weights["w4"]), sharded["w4"])


@pytest.mark.parametrize("name", sorted(path.name for path in MODELS.iterdir()))
def test_checkpoints_that_transformers_wrote_are_read(name: str) -> None:
    tensors = Checkpoint.open(MODELS / name).tensors
    embeddings = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "embeddings.weight")
    assert any(key.endswith(embeddings) for key in tensors)
    outputs = ("o_proj.weight", "dense.weight", "out_proj.weight", "attn.c_proj.weight")
    assert any(key.endswith(outputs) for key in tensors)
    assert all(info.nbytes > 0 for info in tensors.values())


def test_any_single_file_is_read(tmp_path: Path) -> None:
    save_file({"w": some((2, 8), "f32")}, tmp_path / "other.safetensors")
    assert list(Checkpoint.open(tmp_path).tensors) == ["w"]


def test_a_folder_without_safetensors_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing at all"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin"):
        Checkpoint.open(tmp_path)
    for name in ("a", "b"):
        save_file({"w": some((2, 8), "f32")}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors, b\.safetensors but no .*index"):
        Checkpoint.open(tmp_path)


def test_a_folder_that_is_none_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(ModelNotFoundError, match=folder.name):
            Checkpoint.open(folder)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / SINGLE).symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        Checkpoint.open(tmp_path)
    (tmp_path / SINGLE).unlink()
    (tmp_path / SINGLE).mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        Checkpoint.open(tmp_path)


def test_a_git_lfs_pointer_says_so(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    (tmp_path / SINGLE).write_text(pointer)
    with pytest.raises(CheckpointError, match="git lfs pull"):
        Checkpoint.open(tmp_path)


@pytest.mark.usefixtures("sharded")
def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00003\.safetensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.usefixtures("sharded")
def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is damaged"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["weight_map"].update(w9="model-00001-of-00003.safetensors"), "w9"),
        (lambda index: index["weight_map"].update(w0="model-00003-of-00003.safetensors"), "w0"),
        (lambda index: index["weight_map"].update(w0="../model.safetensors"), "w0"),
        (lambda index: index["weight_map"].update(w0="/model.safetensors"), "w0"),
        (lambda index: index["weight_map"].update(w0="model.bin"), "w0"),
        (lambda index: index["weight_map"].update(w0=3), "w0"),
        (lambda index: index.update(weight_map={}), "weight_map"),
        (lambda index: index.update(weight_map=["w0"]), "weight_map"),
        (lambda index: index.clear(), "weight_map"),
    ],
)
@pytest.mark.usefixtures("sharded")
def test_a_lying_index_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    index = json.loads((tmp_path / INDEX).read_text())
    change(index)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000])
def test_an_index_that_is_no_index_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / INDEX).write_bytes(text)
    with pytest.raises(CheckpointError, match="index"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("named", [1, 3])
def test_a_tensor_in_several_shards(tmp_path: Path, sharded: dict[str, Array], named: int) -> None:
    """The one in the file that the index names counts. transformers takes the last, so that this
    must have the same values."""
    files = [tmp_path / f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["w0"] = files[named - 1].name
    (tmp_path / INDEX).write_text(json.dumps(index))
    for file, value in zip(files[1:], (sharded["w1"], sharded["w0"]), strict=True):
        save_file(load_file(file) | {"w0": value}, file)
    assert Checkpoint.open(tmp_path).tensors["w0"].file == files[named - 1]
    save_file(load_file(files[0]) | {"w0": sharded["w2"]}, files[0])
    if named == 3:
        assert Checkpoint.open(tmp_path).tensors["w0"].file == files[2]
        return
    with pytest.raises(CheckpointError, match=r"other values in a later file .*: w0"):
        Checkpoint.open(tmp_path)


# Strictness


@pytest.fixture
def small(tmp_path: Path) -> Path:
    save_file(
        {
            "a": some((4, 8), "f32"),
            "b": some((4, 8), "f16"),
            "ids": np.arange(6),
            "rotary_emb.inv_freq": some((4,), "f32"),
        },
        tmp_path / SINGLE,
    )
    return tmp_path


def ignorable(name: str) -> bool:
    return name in ("ids", "rotary_emb.inv_freq")


def test_missing_tensors_are_named_up_to_ten(device: Device, small: Path) -> None:
    specs = [weight(name, shape=(4, 8)) for name in ("a", *(f"layers.{i}" for i in range(13)))]
    with pytest.raises(CheckpointError, match=r"layers\.0, .*layers\.9, 3 more"):
        load_weights(device, specs, Checkpoint.open(small), ignorable=ignorable)


def test_wrong_shapes_are_named(device: Device, small: Path) -> None:
    specs = [weight("a", shape=(8, 4)), weight("b", shape=(32,))]
    with pytest.raises(CheckpointError, match=r"a is \(4, 8\), not \(8, 4\), b is \(4, 8\), not"):
        load_weights(device, specs, Checkpoint.open(small), ignorable=ignorable)


def test_surplus_tensors_are_named_unless_ignorable(device: Device, small: Path) -> None:
    checkpoint, specs = Checkpoint.open(small), [weight("a", shape=(4, 8))]
    with pytest.raises(CheckpointError, match="no use for: b"):
        load_weights(device, specs, checkpoint, ignorable=ignorable)
    with pytest.raises(CheckpointError, match="inv_freq"):
        load_weights(device, specs, checkpoint)
    assert load_weights(device, specs, checkpoint, ignorable=lambda name: name != "a").keys() == {
        "a"
    }


def test_a_dtype_that_is_needed_but_not_implemented_is_named(device: Device, small: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"ids \(I64\)"):
        load_weights(
            device, [weight("ids", shape=(6,))], Checkpoint.open(small), ignorable=lambda name: True
        )


def test_a_dtype_to_convert_to_must_exist(device: Device, small: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'f8'.*f32, f16, bf16"):
        load_weights(device, [], Checkpoint.open(small), dtype="f8")
    with pytest.raises(UnsupportedError, match=r"'int4'.*bf16, q8, q4"):
        random_weights(device, [], "int4")


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0,), (2, 20_000), (20_000,)])
def test_sizes_that_no_buffer_can_hold_are_refused(shape: tuple[int, ...]) -> None:
    with (
        Device.open(settings=Settings(max_binding=1 << 16)) as device,
        pytest.raises(UnsupportedError, match="odd"),
    ):
        random_weights(device, [weight("odd", shape=shape)], "f16")


# Memory


def test_everything_is_allocated_before_the_first_read(
    device: Device, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [weight("a", shape=(4, 8)), weight("b", shape=(4, 8))]
    checkpoint, allocated = Checkpoint.open(small), []
    real = TensorInfo.read_into

    def read_into(self: TensorInfo, view: memoryview, start: int = 0) -> None:
        allocated.append(device.memory_stats().allocated)
        real(self, view, start)

    monkeypatch.setattr(TensorInfo, "read_into", read_into)
    load_weights(device, specs, checkpoint, ignorable=ignorable)
    planned = 4 * 8 * (4 + 2)  # a is f32, b f16
    assert min(allocated) == max(allocated) > planned  # the staging ring comes on top
    assert device.memory_stats().allocated == planned


def test_weights_that_do_not_fit_are_freed(
    device: Device, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = device.buffer

    def buffer(nbytes: int, usage: str = "storage", label: str = "") -> Any:
        if label == "b":
            raise OutOfMemoryError("no room for b")
        return real(nbytes, usage, label)

    monkeypatch.setattr(device, "buffer", buffer)
    specs = [weight("a", shape=(4, 8)), weight("b", shape=(4, 8))]
    with pytest.raises(OutOfMemoryError, match="no room for b"):
        load_weights(device, specs, Checkpoint.open(small), ignorable=ignorable)
    assert device.memory_stats().allocated == 0


def test_a_file_cut_while_it_is_read_is_an_error_and_frees_all(device: Device, small: Path) -> None:
    checkpoint = Checkpoint.open(small)
    file = small / SINGLE
    file.write_bytes(file.read_bytes()[:-300])
    specs = [weight("a", shape=(4, 8)), weight("b", shape=(4, 8))]
    with pytest.raises(CheckpointError, match=r"model\.safetensors ends inside the tensor"):
        load_weights(device, specs, checkpoint, ignorable=ignorable)
    file.unlink()
    with pytest.raises(CheckpointError, match="could not be read"):
        load_weights(device, specs, checkpoint, ignorable=ignorable)
    assert device.memory_stats().allocated == 0


def test_an_interrupt_frees_all(device: Device, small: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    specs = [weight("a", shape=(4, 8)), weight("b", shape=(4, 8))]
    with pytest.raises(KeyboardInterrupt):
        load_weights(device, specs, Checkpoint.open(small), ignorable=ignorable, progress=interrupt)
    assert device.memory_stats().allocated == 0


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("dtype", [None, "f16"])
def test_host_memory_stays_small(device: Device, tmp_path: Path, dtype: str | None) -> None:
    rows, columns, count = 4096, 2048, 6
    block = np.random.default_rng(0).standard_normal((rows, columns), np.float32)
    nbytes = block.nbytes * count
    names = [f"w{i}" for i in range(count)]
    header = {
        name: {
            "dtype": "F32",
            "shape": block.shape,
            "data_offsets": [i * block.nbytes, (i + 1) * block.nbytes],
        }
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    with open(tmp_path / SINGLE, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in names:
            block.tofile(file)
    # On a software adapter the GPU's memory is ours: see how much of it the kernel calls anonymous.
    start = anonymous_bytes()
    device.upload(block)
    device.wait()
    share = (anonymous_bytes() - start) / block.nbytes
    start, most = anonymous_bytes(), 0.0

    def progress(done: int, total: int) -> None:
        nonlocal most
        gpu = min(share, 1) * done
        most = max(most, anonymous_bytes() - start - gpu)

    specs = [weight(name, shape=block.shape) for name in names]
    load_weights(device, specs, Checkpoint.open(tmp_path), dtype=dtype, progress=progress)
    assert most < 160 << 20 < nbytes  # the ring, and what threads convert
    (tmp_path / SINGLE).unlink()


# Damage


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def assemble(header: Any, body: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def damaged(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """Files that someone or something has spoilt."""
    header, body = header_of(data)
    length = len(data) - len(body) - 8
    for end in (0, 1, 7, 8, 9, 8 + length // 2, 7 + length, 8 + length, len(data) - 1):
        yield data[:end]
    yield data + b"\0"
    for wrong in (0, 1, length - 1, length + 1, len(data), 10**8, 2**31, 2**62, 2**63, 2**64 - 1):
        yield assemble(header, body, wrong)
    for text in (b"", b"[]", b"null", b"{", b"\xff" * 20, b"[" * 10_000, b'{"a":1}', b'{"a":{}}'):
        yield assemble(text, body)
    for field, values in {
        "shape": [-1, [-1], [2**63], [2**32, 2**32], [0], [], [1.5], ["4"], None, [[4]], [10**30]],
        "data_offsets": [[0], [0, 1], [4, 0], [-4, 4], [0, 2**63], [2**64, 2**65], [8, 12], None],
        "dtype": ["F99", "f32", "I8", "F64", "", None, 3, ["F32"]],
    }.items():
        for value in values:
            yield assemble({**header, "a": {**header["a"], field: value}}, body)
        yield assemble({**header, "a": {k: v for k, v in header["a"].items() if k != field}}, body)
    yield assemble({**header, "a": header["b"]}, body)  # two tensors in one place
    yield assemble({**header, "__metadata__": 5}, body)
    yield assemble({**header, "__metadata__": {"a": 5}}, body)
    yield assemble({**header, "x\0\ud800": header["a"]}, body)
    for _ in range(300):
        spoilt = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            kind, place = rng.randrange(4), rng.randrange(8 + length)
            if kind == 0:
                spoilt[place] = rng.randrange(256)
            elif kind == 1:
                spoilt[place] ^= 1 << rng.randrange(8)
            elif kind == 2:
                del spoilt[place : place + rng.randint(1, 9)]
            else:
                spoilt[place:place] = rng.randbytes(rng.randint(1, 9))
        yield bytes(spoilt)


def test_damaged_files_raise_nothing_but_our_errors(device: Device, tmp_path: Path) -> None:
    save_file({"a": some((4, 8), "f32"), "b": some((6,), "f16")}, tmp_path / SINGLE)
    good = (tmp_path / SINGLE).read_bytes()
    specs = [weight("a", shape=(4, 8)), weight("b", shape=(6,))]
    load_weights(device, specs, Checkpoint.open(tmp_path))
    messages = []
    for data in damaged(good, random.Random(0)):
        (tmp_path / SINGLE).write_bytes(data)
        try:
            load_weights(device, specs, Checkpoint.open(tmp_path))
        except InferError as error:
            messages.append(str(error))
    assert len(messages) > 300
    assert all(str(tmp_path) in message and len(message) < 5000 for message in messages)


@pytest.mark.usefixtures("sharded")
def test_damaged_indexes_raise_nothing_but_our_errors(tmp_path: Path) -> None:
    good, rng, refused = (tmp_path / INDEX).read_bytes(), random.Random(0), 0
    for _ in range(200):
        spoilt = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            spoilt[rng.randrange(len(good))] = rng.choice(b'"{}[],:0\\\0 \xff./u')
        (tmp_path / INDEX).write_bytes(spoilt)
        try:
            Checkpoint.open(tmp_path)
        except CheckpointError:
            refused += 1
    assert refused > 100


# Random weights


def floats(device: Device, tensor: GpuTensor) -> Array:
    stored = on_gpu(device, tensor)
    if tensor.dtype == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_random_values_have_the_right_spread(device: Device, dtype: str) -> None:
    specs = [
        weight("layers.0.q_proj", shape=(300, 501)),
        weight("layers.1.q_proj", shape=(300, 501)),
        weight("input_layernorm", shape=(1000,)),
        weight("q_bias", shape=(1000,)),
        WeightSpec("norm", (), ones=7),
    ]
    values = {name: floats(device, t) for name, t in random_weights(device, specs, dtype).items()}
    first, second = values["layers.0.q_proj"], values["layers.1.q_proj"]
    assert first.std() * 501**0.5 == pytest.approx(1, abs=0.01)
    assert abs(first.mean()) * 501**0.5 < 0.01
    for lag in (1, 2, 501):  # neighbours and rows have nothing to do with each other
        flat = first.ravel()
        assert abs(np.corrcoef(flat[:-lag], flat[lag:])[0, 1]) < 0.015
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.015
    norm, bias = values["input_layernorm"], values["q_bias"]
    assert norm.min() >= 0.9
    assert norm.max() <= 1.1
    assert norm.std() == pytest.approx(0.1 / 3**0.5, rel=0.1)
    assert np.abs(bias).max() <= 0.02
    assert (values["norm"] == 1).all()
    assert all(np.isfinite(array).all() and array.all() for array in values.values())


def test_random_values_are_the_same_in_every_dtype_and_shard(device: Device) -> None:
    specs = [weight("w", shape=(900, 77))]
    exact = floats(device, random_weights(device, specs, "f32", seed=3)["w"])
    with Device.open(settings=Settings(max_binding=1 << 16)) as limited:
        tensor = random_weights(limited, specs, "f32", seed=3)["w"]
        assert len(tensor.shards) > 3
        np.testing.assert_array_equal(floats(limited, tensor), exact)
    for dtype, digits in (("f16", 10), ("bf16", 8)):
        rounded = floats(device, random_weights(device, specs, dtype, seed=3)["w"])
        assert np.max(np.abs(rounded - exact) / np.abs(exact)) < 2.0**-digits
    other = floats(device, random_weights(device, specs, "f32", seed=4)["w"])
    assert abs(np.corrcoef(exact.ravel(), other.ravel())[0, 1]) < 0.015


def test_random_values_are_uniform(device: Device) -> None:
    values = floats(device, random_weights(device, [weight("w", shape=(400, 300))], "f32")["w"])
    bound = (3 / 300) ** 0.5
    counts, _ = np.histogram(values, 50, (-bound, bound))
    assert counts.sum() == values.size
    expected = values.size / 50
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 86  # 49 degrees of freedom: exceeded once in a thousand
