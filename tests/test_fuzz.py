"""Damaged headers of both containers: nothing but our own errors, and little memory."""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from reference_models import DATA
from safetensors.numpy import save_file
from test_gguf import Kind, converted
from test_packing import Array, mlx_packed

from infer.kernels.errors import InferError
from infer.models import open_model
from infer.models.checkpoint import Checkpoint
from infer.models.formats.packed import read_rows
from infer.models.weights import check_checkpoint, stored

LLAMA = DATA / "llama"
# How many of each container.
cases = pytest.mark.parametrize("count", [2000, pytest.param(20_000, marks=pytest.mark.full)])
MEMORY = 64 << 20  # bytes that reading headers may take, which of these are a few thousand


def spoilt(data: bytes, header: int, count: int) -> Iterator[bytes]:
    """The file with some bytes of its header changed, lost, added, repeated or cut off."""
    rng = random.Random(0)
    for _ in range(count):
        own = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            kind, at = rng.randrange(7), rng.randrange(header)
            if kind == 0:
                own[at] = rng.randrange(256)
            elif kind == 1:
                own[at] ^= 1 << rng.randrange(8)
            elif kind == 2:
                del own[at : at + rng.randint(1, 9)]
            elif kind == 3:
                own[at:at] = rng.randbytes(rng.randint(1, 9))
            elif kind == 4:  # a count that is absurd
                own[at : at + 8] = rng.choice((b"\xff" * 8, b"\0" * 8, b"\0\0\0\0\1\0\0\0"))
            elif kind == 5:
                other = rng.randrange(header)
                own[at : at + 8] = own[other : other + 8]
            else:
                del own[rng.randrange(len(own)) :]
                break
        yield bytes(own)


def open_whole(path: Path) -> None:
    """All that happens before memory is allocated for a model."""
    model, checkpoint = open_model(path)
    specs = list(model.weights())
    check_checkpoint(specs, checkpoint, model.ignorable)
    for spec in specs:
        stored(spec, checkpoint)


def refusals(path: Path, file: Path, header: int, count: int) -> int:
    """How many spoilt files are refused; each is read within MEMORY, and ends in no other error."""
    data, refused = file.read_bytes(), 0
    tracemalloc.start()
    try:
        for own in spoilt(data, header, count):
            file.write_bytes(own)
            try:
                open_whole(path)
            except InferError:
                refused += 1
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    return refused


@cases
def test_spoilt_headers_of_gguf_files(tmp_path: Path, count: int) -> None:
    file = tmp_path / "m.gguf"
    gguf = converted(file, "llama", kind=Kind.Q8_0)
    open_whole(file)
    header = min(info.offset for info in gguf.tensors.values())
    assert refusals(file, file, header, count) > count / 2


@cases
def test_spoilt_headers_of_quantised_safetensors(tmp_path: Path, count: int) -> None:
    config = json.loads((LLAMA / "config.json").read_text())
    changes = {"quantization": {"bits": 4, "group_size": 32}}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    tensors: dict[str, Array] = {}
    for key, info in Checkpoint.open(LLAMA).tensors.items():
        tensors[key] = read_rows(info).astype(np.float16)
        if "_proj." in key:
            parts = mlx_packed(tensors.pop(key).astype(np.float32))
            tensors |= {f"{key.removesuffix('weight')}{name}": part for name, part in parts.items()}
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    open_whole(tmp_path)
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert refusals(tmp_path, file, header, count) > count / 2


@pytest.mark.parametrize("value", [None, "x", -1, 1.5, [], {}, 1 << 70])
def test_quantisation_configs_of_any_kind(tmp_path: Path, value: object) -> None:
    """Keys of every method: nothing but our own errors, or none."""
    shutil.copy(LLAMA / "model.safetensors", tmp_path)
    config = json.loads((LLAMA / "config.json").read_text())
    methods = ("gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4")
    keys = ("quant_method", "bits", "group_size", "format", "config_groups", "weight_block_size")
    for method in methods:
        for key in keys:
            own = config | {"quantization_config": {"quant_method": method, key: value}}
            (tmp_path / "config.json").write_text(json.dumps(own))
            with suppress(InferError):
                open_whole(tmp_path)
