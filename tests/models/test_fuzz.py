"""Damaged headers of both containers, and configs that say anything: nothing but our own errors,
and little memory."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import shutil
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from marks import others_full
from reference_models import CONFIG_FILES, DATA
from reference_models import cases as all_cases
from safetensors.numpy import save_file
from test_gguf import Kind, converted
from test_packing import Array, mlx_packed

from infer.engine.options import EngineOptions
from infer.kernels.errors import InferError
from infer.kernels.gpu.device import Limits
from infer.memory import MemoryCount, default_context
from infer.models import open_model
from infer.models.blocks.rope import rope_table
from infer.models.loading.checkpoint import Checkpoint
from infer.models.loading.config import RawConfig
from infer.models.loading.formats.packed import read_rows
from infer.models.loading.plan import plan_weights

LLAMA = DATA / "llama"
# How many of each container.
cases = pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.full)])
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
    plan_weights(model.weights(), checkpoint, ignorable=model.ignorable)


def refusals(path: Path, file: Path, header: int, count: int) -> int:
    """How many spoilt files are refused; each is read within MEMORY, and ends in no other error."""
    data, refused = file.read_bytes(), 0
    with little_memory():
        for own in spoilt(data, header, count):
            file.write_bytes(own)
            try:
                open_whole(path)
            except InferError:
                refused += 1
    return refused


@contextmanager
def little_memory() -> Iterator[None]:
    """Fails where the block takes more than MEMORY."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


@cases
def test_spoilt_headers_of_gguf_files(tmp_path: Path, count: int) -> None:
    file = tmp_path / "m.gguf"
    whole = converted(file, "llama", kind=Kind.Q8_0)
    open_whole(file)
    header = min(info.offset for info in whole.tensors.values())
    assert refusals(file, file, header, count) > count / 2


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("deepseek_v2", "deepseek2.expert_group_count", "x"),
        ("deepseek_v2", "deepseek2.attention.key_length_mla", "x"),
        ("deepseek_v2", "deepseek2.rope.scaling.yarn_log_multiplier", "x"),
        ("granitemoehybrid_mamba", "granitehybrid.expert_count", [1, 2]),
        ("apertus", "apertus.rope.freq_base", 0),
        ("llama", "general.architecture", "x" * 10_000),
        ("lfm2", "lfm2.attention.head_count_kv", list(range(3000))),
    ],
)
@pytest.mark.filterwarnings("error:divide by zero")
def test_metadata_of_other_kinds(tmp_path: Path, name: str, key: str, value: Any) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        kinds = {str: writer.add_string, list: writer.add_array, int: writer.add_uint32}
        kinds[type(value)](key, value)

    with suppress(InferError):
        converted(tmp_path / "m.gguf", name, change)  # which opens it at its end
    with pytest.raises(InferError) as caught:
        open_whole(tmp_path / "m.gguf")
    assert len(str(caught.value)) < 5000


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


@pytest.mark.parametrize(
    "value", [None, "x", -1, 1.5, [], {}, 1 << 70, "x" * 10_000, ["x" * 10_000]]
)
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
            message = ""
            try:
                open_whole(tmp_path)
            except InferError as error:
                message = str(error)
            assert len(message) < 5000


# config.json

LONG = ("x" * 10_000, [1] * 10_000)
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, "", "x", "default", [], {}, [[]], [None], ["x"], [0], [-1], {"x": 1}),
    *(-1, 0, 1, 2, 3, 7, 100, 10_000, 2**31 - 1, 2**31, 2**63, 10**400),
    *(-0.5, 0.5, 2.5, 1e-320, 1e30, 1e308, math.inf, -math.inf, math.nan, [math.nan]),
    *LONG,
)
NOTHING = object()  # for a key that is removed


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to everything in a config; of a list, to its first item."""
    own = value.items() if isinstance(value, dict) else enumerate(value[:1])
    for key, inner in own:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


def changed(values: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The config with one value changed."""
    result = copy.deepcopy(values)
    place: Any = result
    for key in path[:-1]:
        place = place[key]
    if value is NOTHING:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return result


def keys_read(path: Path) -> set[str]:
    """The keys that the model's config is asked for."""
    read: set[str] = set()
    get = RawConfig.get

    def noting(self: RawConfig, key: str, *args: Any, **kwargs: Any) -> Any:
        if self.place.endswith(("config.json", "text_config")):
            read.add(key)
        return get(self, key, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RawConfig, "get", noting)
        open_whole(path)
    return read


def load_dry(path: Path) -> None:
    """All that loading does without a GPU; the tables must be finite."""
    model, checkpoint = open_model(path)
    plan = plan_weights(model.weights(), checkpoint, ignorable=model.ignorable)
    for rope in filter(None, (model.config.rope, model.config.local_rope)):
        for length in (0, 1, 10**6):
            assert np.isfinite(rope_table(rope, 8, length)).all()
    context = min(default_context(model, None), 64)
    MemoryCount(model, plan, Limits()).needed(EngineOptions(context))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [1, pytest.param(30, marks=pytest.mark.full)])
@others_full("case", all_cases(), all_cases()[::4])
def test_any_key_of_a_config_may_be_anything(tmp_path: Path, case: str, count: int) -> None:
    """So many changes of one key, at any depth, in each spelling."""
    rng = random.Random(case)
    for file in (DATA / case).glob("*.safetensors*"):
        shutil.copy(file, tmp_path)
    for name in CONFIG_FILES.values():
        values = json.loads((DATA / case / name).read_text())
        config = tmp_path / "config.json"
        config.write_text(json.dumps(values))
        base = ("text_config",) if "text_config" in values else ()
        keys = sorted(keys_read(tmp_path))
        found = list(places(values))
        absent = [(*base, key) for key in keys if (*base, key) not in found]
        for _ in range(count):
            path = rng.choice([*found, *absent])
            value = rng.choice([*HOSTILE, *[NOTHING] * (path in found)])
            config.write_text(json.dumps(changed(values, path, value)))
            try:
                with little_memory():
                    load_dry(tmp_path)
            except InferError as error:
                message = str(error)
            except Exception as error:
                raise AssertionError(f"{case}: {name}: {path} = {repr(value)[:60]}") from error
            else:
                message = ""
            assert len(message) < 5000, (case, name, path)


MLX = {"quantization": {"bits": 4, "group_size": 32}}


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        pytest.param(
            "mixtral",
            {"num_local_experts": 10_000, "num_hidden_layers": 10_000} | MLX,
            marks=pytest.mark.full,
        ),
        pytest.param(
            "deepseek_v3",
            {"num_attention_heads": 10_000, "num_key_value_heads": 10_000},
            marks=pytest.mark.full,
        ),
        ("deepseek_v3", {"num_attention_heads": 2**31, "num_key_value_heads": 2**31}),
        pytest.param(
            "falcon_groups",
            {"num_attention_heads": 10_000, "num_kv_heads": 10_000, "head_dim": 8},
            marks=pytest.mark.full,
        ),
        ("ernie4_5_moe", {"moe_num_experts": 2**31 - 1}),
        ("qwen3_next", {"linear_num_key_heads": 2**31 - 1, "linear_num_value_heads": 2**31 - 1}),
        ("llama", {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 8}),
        ("llama", {"num_hidden_layers": 10_000} | MLX),
        ("gpt2", {"n_layer": 10_000}),
    ],
)
def test_numbers_that_nobody_can_list(tmp_path: Path, case: str, changes: dict[str, Any]) -> None:
    """The sizes in a config are compared with the files before all weights are listed."""
    for file in (DATA / case).glob("*.safetensors*"):
        shutil.copy(file, tmp_path)
    values = json.loads((DATA / case / CONFIG_FILES["published"]).read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    with little_memory(), pytest.raises(InferError):
        load_dry(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"x": "' + "x" * (16 << 20) + '"}', "is larger than 16,777,216 bytes"),
        ('{"x": ' + "[" * 32 + "]" * 32 + "}", "nested more than 32 levels"),
        ('{"x": ' + "[" * 400 + "]" * 400 + "}", "nested more than 32 levels"),
        ('{"x": ' + "[" * 10**6 + "]" * 10**6 + "}", "recursion|nested"),
    ],
    ids=["large", "deep", "deeper", "deepest"],
)
def test_a_config_is_no_larger_than_any_is(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InferError, match=message):
        RawConfig.open(tmp_path)
    (tmp_path / "config.json").write_text('{"x": ' + "[" * 31 + "]" * 31 + "}")
    RawConfig.open(tmp_path)


def test_a_config_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InferError, match="it is not a regular file"):
        RawConfig.open(tmp_path)
