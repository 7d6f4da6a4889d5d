"""LoRA adapters: PEFT's answers, merged and beside the weights; what is refused, and how."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import places
import pytest
from commands import invoke, refused
from engines import answer, build_engine, scores
from numpy.typing import NDArray
from plans import load_weights
from reference_models import DATA as MODELS
from reference_models import load, relative_error
from safetensors.numpy import load_file, save_file
from test_batch import assert_same, of, together
from test_formats import DATA as FORMATS
from test_formats import values_of
from test_fuzz import spoilt
from test_gguf import Kind, converted
from test_packing import as_floats, e4m3_packed, loaded, save, shape_of

import infer
import infer.shortcuts
from infer.bench import run as bench
from infer.bench.measure import weight_bytes_per_token
from infer.bench.report import BenchReport
from infer.engine.engine import Engine
from infer.engine.scheduler import Decode, Prefill
from infer.hub import DEMO, resolve, resolve_adapter
from infer.kernels.checks import linear_check
from infer.kernels.checks.arrays import to_gpu
from infer.kernels.checks.forward import Forward
from infer.kernels.checks.inputs import int8_rows
from infer.kernels.checks.reference import nmse
from infer.kernels.errors import (
    CheckpointError,
    InferError,
    ModelNotFoundError,
    RequestError,
    UnsupportedError,
)
from infer.kernels.gpu.device import Device, DryDevice, Limits
from infer.kernels.gpu.pack import from_bf16, to_bf16
from infer.kernels.gpu.tensor import INTEGERS
from infer.kernels.ops import functional as ops
from infer.kernels.ops.linear import LowRank
from infer.models import open_model
from infer.models.blocks.decoder import Decoder
from infer.models.loading.checkpoint import ADAPTER_CONFIG, ADAPTER_TENSORS, Checkpoint
from infer.models.loading.formats.packed import read_rows
from infer.models.loading.lora import Lora, Loras
from infer.models.loading.plan import LoadPlan, plan_weights
from infer.sampling import SamplingParams

DATA = places.DATA / "adapters"
CASES = sorted(folder.name for folder in DATA.iterdir())
MODEL = {"llama_head": "llama"}  # the others are named after theirs
TOLERANCE = 1e-5

Array = NDArray[Any]
Tensors = dict[str, Array]


def plan_of(model: Decoder, checkpoint: Checkpoint) -> LoadPlan:
    return plan_weights(model.weights(), checkpoint, ignorable=model.ignorable)


@dataclass(frozen=True)
class Reference:
    """The results of PEFT, stored by scripts/make_lora_references.py."""

    prompt_ids: list[int]
    logits: NDArray[np.float32]
    greedy_ids: list[int]
    final_logits: NDArray[np.float32]

    @classmethod
    def load(cls, case: str) -> Reference:
        with np.load(DATA / case / "reference.npz") as arrays:
            return cls(
                arrays["prompt_ids"].tolist(),
                arrays["logits"],
                arrays["greedy_ids"].tolist(),
                arrays["final_logits"],
            )

    def assert_same(self, engine: Engine, adapter: str | None = None) -> None:
        got = answer(engine, self.prompt_ids, len(self.greedy_ids), adapter=adapter)
        assert got.token_ids == self.greedy_ids
        assert relative_error(got.logits[-1], self.final_logits) <= TOLERANCE
        rows = scores(engine, self.prompt_ids, adapter)[4::5]
        assert relative_error(rows, self.logits) <= TOLERANCE


def model_of(case: str) -> Path:
    return MODELS / MODEL.get(case, case)


# Against PEFT


@pytest.mark.parametrize("case", CASES)
def test_merged_agrees_with_peft(device: Device, case: str) -> None:
    """In f32, since PEFT's answers are those of weights that were not rounded."""
    with device.scope():
        engine = build_engine(device, model_of(case), dtype="f32", adapter=DATA / case)
        Reference.load(case).assert_same(engine)


@pytest.mark.parametrize(
    ("case", "fuse"), [*((case, True) for case in CASES), ("llama_head", False), ("qwen2", False)]
)
def test_beside_agrees_with_peft(device: Device, case: str, fuse: bool) -> None:
    with device.scope():
        engine = build_engine(device, model_of(case), adapters={"own": DATA / case}, fuse=fuse)
        Reference.load(case).assert_same(engine, "own")


@pytest.mark.full
@pytest.mark.parametrize("case", ["gpt_neox", "llama_head"])
def test_agrees_on_the_weakest_device(least_device: Device, case: str) -> None:
    with least_device.scope():
        engine = build_engine(least_device, model_of(case), adapters={"own": DATA / case})
        Reference.load(case).assert_same(engine, "own")


@pytest.mark.full
def test_a_gguf_file_takes_an_adapter(device: Device, tmp_path: Path) -> None:
    """The rows of its q and k are in another order than the adapter's."""
    file, adapter = tmp_path / "m.gguf", DATA / "llama"
    converted(file, "llama")
    with device.scope():
        merged = build_engine(device, file, dtype="f32", adapter=adapter)
        Reference.load("llama").assert_same(merged)
        beside = build_engine(device, file, adapters={"own": adapter})
        Reference.load("llama").assert_same(beside, "own")


def test_the_first_files_of_gpt2_take_an_adapter(device: Device, tmp_path: Path) -> None:
    """They have other names than the model's parts, which PEFT goes by."""
    shutil.copytree(MODELS / "gpt2", tmp_path / "gpt2")
    file, adapter = tmp_path / "gpt2" / "model.safetensors", DATA / "gpt2"
    file.write_bytes(file.read_bytes().replace(b'"transformer.', b"            " + b'"'))
    assert "h.0.attn.c_attn.weight" in Checkpoint.open(file.parent).tensors
    with device.scope():
        merged = build_engine(device, tmp_path / "gpt2", dtype="f32", adapter=adapter)
        Reference.load("gpt2").assert_same(merged)
        beside = build_engine(device, tmp_path / "gpt2", adapters={"own": adapter})
        Reference.load("gpt2").assert_same(beside, "own")


@pytest.mark.full
def test_a_tensor_of_which_two_weights_are_made(device: Device, tmp_path: Path) -> None:
    """Mamba's in_proj becomes two weights: its time steps are one of their own."""
    source, adapter, rng = MODELS / "falcon_h1", tmp_path / "adapter", np.random.default_rng(0)
    module = "base_model.model.model.layers.1.mamba.in_proj"
    rows, columns = Checkpoint.open(source).tensors["model.layers.1.mamba.in_proj.weight"].shape
    adapter.mkdir()
    shutil.copy(DATA / "llama" / ADAPTER_CONFIG, adapter)
    pairs = {"lora_A": (4, columns), "lora_B": (rows, 4)}
    tensors = {
        f"{module}.{half}.weight": rng.normal(0, 0.3, shape).astype(np.float32)
        for half, shape in pairs.items()
    }
    save_file(tensors, adapter / ADAPTER_TENSORS)
    merged = tmp_path / "merged"
    merged.mkdir()
    shutil.copy(source / "config.json", merged)
    save_file(merged_tensors(source, adapter), merged / "model.safetensors")
    ids = load("falcon_h1").prompt_ids.tolist()
    with device.scope():
        expected = scores(build_engine(device, merged), ids)
        for own in ({"dtype": "f32", "adapter": adapter}, {"adapters": {"own": adapter}}):
            name = "own" if "adapters" in own else None
            got = scores(build_engine(device, source, **own), ids, name)
            assert relative_error(got, expected) <= TOLERANCE


def test_a_model_that_also_sees_takes_an_adapter(device: Device, tmp_path: Path) -> None:
    """The adapter has the names of modules of such a model, and may change those that see."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((MODELS / "llama" / "config.json").read_text())
    outer = {"model_type": "mistral3", "text_config": config}
    (folder / "config.json").write_text(json.dumps(outer))
    plain, own = "model.layers", "model.language_model.layers"
    stored = Checkpoint.open(MODELS / "llama").tensors
    tensors = {key.replace(plain, own): read_rows(info) for key, info in stored.items()}
    save_file(tensors, folder / "model.safetensors")

    def change(tensors: Tensors) -> None:
        for key in list(tensors):
            tensors[key.replace(plain, own)] = tensors.pop(key)
        seeing = "base_model.model.model.vision_tower.layers.0.q_proj"
        tensors[f"{seeing}.lora_A.weight"] = np.ones((4, 8), np.float32)
        tensors[f"{seeing}.lora_B.weight"] = np.ones((8, 4), np.float32)

    adapter = adapter_with(tmp_path / "adapter", change=change)
    with device.scope():
        merged = build_engine(device, folder, dtype="f32", adapter=adapter)
        Reference.load("llama").assert_same(merged)
        beside = build_engine(device, folder, adapters={"own": adapter})
        Reference.load("llama").assert_same(beside, "own")


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")  # of PEFT and transformers, to each other
@pytest.mark.parametrize("case", CASES)
def test_regenerating_gives_the_same(case: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    path = places.ROOT / "scripts" / "make_lora_references.py"
    spec = importlib.util.spec_from_file_location("make_lora_references", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    _, again = script.make(case, tmp_path / case)
    expected = Reference.load(case)
    assert again["prompt_ids"].tolist() == expected.prompt_ids
    assert again["greedy_ids"].tolist() == expected.greedy_ids
    assert relative_error(again["logits"], expected.logits) < TOLERANCE
    stored_bytes, new_bytes = ((f / case / ADAPTER_TENSORS).read_bytes() for f in (DATA, tmp_path))
    assert new_bytes == stored_bytes


# Merged: what is stored


def merged_tensors(folder: Path, adapter: Path) -> Tensors:
    """The tensors of a model in f32 with an adapter in f32 of r = 4 and alpha = 8 added in numpy,
    by the formula alone."""
    tensors = {key: read_rows(info) for key, info in Checkpoint.open(folder).tensors.items()}
    pairs = load_file(adapter / ADAPTER_TENSORS)
    for name, a in pairs.items():
        if name.endswith("lora_A.weight"):
            key = name.removeprefix("base_model.model.").replace("lora_A.", "")
            b = pairs[name.replace("lora_A", "lora_B")].astype(np.float64)
            tensors[key] = tensors[key] + 8 / 4 * (b @ a.astype(np.float64))
    return {key: value.astype(np.float32) for key, value in tensors.items()}


@pytest.mark.parametrize("dtype", [None, "f16"])
def test_merged_weights_are_rounded_once(device: Device, dtype: str | None) -> None:
    """In the dtype of the model, or the one that was asked for; the others are what they were."""
    folder, adapter = MODELS / "llama", DATA / "llama"
    model, checkpoint = open_model(folder)
    lora = Lora.open(adapter, "llama")
    expected = merged_tensors(folder, adapter)
    with device.scope():
        loras = Loras.fit(model, plan_of(model, checkpoint), always=lora)
        assert not loras.always
        weights = load_weights(
            device, list(model.weights()), checkpoint, dtype=dtype, changes=loras.merged
        )
        for layer in range(2):
            raw = device.read(weights[f"layers.{layer}.self_attn.qkv_proj"].buffer, np.uint16)
            got = from_bf16(raw) if dtype is None else raw.view(np.float16).astype(np.float32)
            got = got.reshape(-1, 64)
            q, k, v = (
                expected[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkv"
            )
            exact = np.concatenate([q, k, v])
            step = abs(exact) * 2.0 ** (-8 if dtype is None else -11) + 1e-7
            assert (abs(got - exact) <= step).all()
            own = from_bf16(to_bf16(k)) if dtype is None else k.astype(np.float16)
            assert (got[64:96] == own).all()


def test_merged_before_it_is_quantised(device: Device, tmp_path: Path) -> None:
    shutil.copy(MODELS / "llama" / "config.json", tmp_path)
    save_file(merged_tensors(MODELS / "llama", DATA / "llama"), tmp_path / "model.safetensors")
    ids = Reference.load("llama").prompt_ids
    with device.scope():
        expected = scores(build_engine(device, tmp_path, dtype="q8"), ids)
        engine = build_engine(device, MODELS / "llama", dtype="q8", adapter=DATA / "llama")
        assert relative_error(scores(engine, ids), expected) <= 1e-2
        plain = scores(build_engine(device, MODELS / "llama", dtype="q8"), ids)
        assert relative_error(plain, expected) > 1e-1


# Beside quantised weights


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("case", ["gptq_4bit_act_order", "mlx_4bit", "fp8_block", "mlx_mxfp4"])
@pytest.mark.parametrize("by_row", [False, True])
def test_beside_each_kind_of_weight(device: Device, case: str, rows: int, by_row: bool) -> None:
    """h + W x + B A x, against float64, from activations that are known as int8. by_row: B and A
    are the second of a stack, and the first row has none."""
    rng, values = np.random.default_rng(rows), values_of(case)
    n, k = shape_of(case)
    a, b = (rng.standard_normal(shape, np.float32) / 8 for shape in ((5, k), (n, 5)))
    h = rng.standard_normal((rows, n), np.float32)
    x = exact = rng.standard_normal((rows, k), np.float32)
    with device.scope():
        weight = loaded(device, FORMATS / case, (n, k))
        order = np.arange(k)
        if weight.order is not None:
            order = device.read(weight.order, np.uint32)
        if weight.dtype in INTEGERS:
            quantized = int8_rows(rng, rows, k)
            x, exact = (np.empty_like(part) for part in quantized)
            x[:, order], exact[:, order] = quantized
        stacks = [np.concatenate([2 * part, part]) if by_row else part for part in (a, b)]
        changes = {weight: LowRank(*(to_gpu(device, part) for part in stacks), by_row)}
        forward = Forward(device, rows, changes=changes)
        adapters = [2] * rows if rows == 1 else [0, *[2] * (rows - 1)]
        summed = forward.input(h) + ops.linear(forward.input(x), weight)
        y = forward.run(summed, adapters=adapters)
    change = linear_check.matmul(linear_check.matmul(x, a), b)
    if by_row and rows > 1:
        change[0] = 0
    assert nmse(y, h + linear_check.matmul(exact, values) + change) <= 1e-10
    assert nmse(y, h + linear_check.matmul(exact, values)) > 1e-3


@pytest.mark.full
def test_always_on_beside_a_quantised_model(device: Device, tmp_path: Path) -> None:
    """Answers are those of a model of floats that has these values, with the adapter merged."""
    floats = {k: read_rows(i) for k, i in Checkpoint.open(MODELS / "llama").tensors.items()}
    packed: Tensors = {}
    for key, values in floats.items():
        parts = e4m3_packed(values) if "_proj." in key else {"weight": values}
        packed |= {f"{key.removesuffix('weight')}{name}": part for name, part in parts.items()}
    config = json.loads((MODELS / "llama" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    folder = tmp_path / "packed"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save(packed, folder / "model.safetensors")
    _, checkpoint = open_model(folder)
    same = as_floats(checkpoint, floats, tmp_path)
    ids = Reference.load("llama").prompt_ids
    with device.scope():
        expected = build_engine(device, same, adapter=DATA / "llama")
        engine = build_engine(device, folder, adapter=DATA / "llama")
        assert relative_error(scores(engine, ids), scores(expected, ids)) <= TOLERANCE
        assert answer(engine, ids, 8).token_ids == answer(expected, ids, 8).token_ids
        plain = build_engine(device, folder)
        assert relative_error(scores(plain, ids), scores(expected, ids)) > 1e-1
        more = weight_bytes_per_token(engine) - weight_bytes_per_token(plain)
        targets = Lora.open(DATA / "llama", "llama").targets(
            engine.model, plan_of(engine.model, checkpoint)
        )
        ranks = {name: sum(p.rank for p in pairs.values()) for name, pairs in targets.items()}
        assert more == sum(
            4 * rank * sum(plain.weights[name].shape) for name, rank in ranks.items()
        )


# Chosen call by call


@pytest.mark.full
def test_answers_with_unlike_adapters_run_side_by_side(device: Device) -> None:
    """And reuse nothing of each other: the same tokens have other keys."""
    two = {"a": DATA / "llama", "b": DATA / "llama_head"}
    ids = Reference.load("llama").prompt_ids
    with device.scope():
        engine = build_engine(device, MODELS / "llama", adapters=two, max_batch=4)
        names = [None, "a", "b", "a"]
        alone = [answer(engine, ids, 9, adapter=name).token_ids for name in names]
        engine.forget()
        params = SamplingParams(max_tokens=9).resolved({})
        running = [engine.generate(ids, params, adapter=name) for name in names]
        assert [[step.token for step in item] for item in running] == alone
        # The fourth begins when the prompt of the second is there.
        assert [item.timings.reused_tokens for item in running] == [0, 0, 0, len(ids) - 1]


def test_unlike_adapters_share_steps(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that come and go are each as they are alone: PEFT's, or that of weights merged by the
    formula. Ranks of the adapters differ, and some weights are changed by only one of them."""

    def change(tensors: Tensors) -> None:
        for key in list(tensors):
            if "layers.1.self_attn.v_proj" not in key:
                del tensors[key]

    folder, small = MODELS / "llama", adapter_with(tmp_path / "small", change=change)
    merged = tmp_path / "merged"
    merged.mkdir()
    shutil.copy(folder / "config.json", merged)
    save_file(merged_tensors(folder, small), merged / "model.safetensors")
    three = {"a": DATA / "llama", "b": DATA / "llama_head", "c": small}
    ids = Reference.load("llama").prompt_ids
    shared, packed = set[frozenset[str | None]](), set[frozenset[str | None]]()
    names = [None, "a", "b", "c", "a", "b"]
    prompts = [ids, ids[2:], ids, ids[:9], ids[4:], ids[3:5]]
    with device.scope():
        engine = build_engine(device, folder, adapters=three, max_batch=4)
        Reference.load("llama").assert_same(engine, "a")
        Reference.load("llama_head").assert_same(engine, "b")
        both = zip(prompts, names, strict=True)
        alone = [answer(engine, prompt, 12, adapter=name) for prompt, name in both]
        assert len({tuple(item.token_ids) for item in alone[:3]}) == 3
        expected = answer(build_engine(device, merged), prompts[3], 12)
        assert_same(alone[3], expected)
        assert_same(alone[0], answer(build_engine(device, folder), ids, 12))
        engine.forget()
        next_step = engine.scheduler.next

        def noted(rows: int) -> tuple[Prefill, ...] | Decode | None:
            work = next_step(rows)
            if isinstance(work, tuple):
                packed.add(frozenset(chunk.sequence.key[0] for chunk in work))
            if isinstance(work, Decode):
                keys: Any = [sequence.key for sequence in work.sequences]
                shared.add(frozenset(name for name, *_ in keys))
            return work

        monkeypatch.setattr(engine.scheduler, "next", noted)
        params = SamplingParams(max_tokens=12).resolved({})
        begun = [
            partial(engine.generate, prompt, params, with_logits=True, adapter=name)
            for prompt, name in zip(prompts, names, strict=True)
        ]
        begun[4] = partial(begun[4], logits_processor=lambda ids, logits: logits)  # on the host
        for found, own in zip(together(engine, begun), alone, strict=True):
            assert_same(found, own)
        engine.forget()
        at_once = [start() for start in begun]  # whose prompts share steps
        for item, own in zip(at_once, alone, strict=True):
            assert_same(of(list(item)), own)
    assert {frozenset([None, "a", "b", "c"]), frozenset("abc")} <= shared
    assert max(map(len, packed)) > 2


@pytest.mark.full
def test_switching_is_as_good_as_separate_models(device: Device) -> None:
    folder = MODELS / "llama"
    two = {"a": DATA / "llama", "b": DATA / "llama_head"}
    ids = Reference.load("llama").prompt_ids
    with device.scope():
        alone = {
            name: build_engine(device, folder, adapters={name: path}) for name, path in two.items()
        }
        expected = {name: answer(engine, ids, 9, adapter=name) for name, engine in alone.items()}
        expected[""] = answer(build_engine(device, folder), ids, 9)
        assert len({tuple(e.token_ids) for e in expected.values()}) == 3
        engine = build_engine(device, folder, adapters=two)
        seen: set[str] = set()
        for name in ("", "a", "b", "", "b", "b", "a", "a"):
            got = answer(engine, ids, 9, adapter=name or None)
            assert got.token_ids == expected[name].token_ids
            assert relative_error(got.logits, expected[name].logits) <= 1e-5
            assert engine.timings.reused_tokens == (len(ids) - 1 if name in seen else 0)
            seen.add(name)
        for name in ("", "a", "b"):
            rows = scores(engine, ids, name or None)
            assert relative_error(rows[-1], expected[name].logits[0]) <= TOLERANCE


def test_memory_is_counted_before(device: Device) -> None:
    """The memory of changes beside the weights is what a dry run counts."""
    model, checkpoint = open_model(MODELS / "phi3")
    specs = list(model.weights())
    lora = Lora.open(DATA / "phi3", "phi3")
    loras = Loras.fit(model, plan_of(model, checkpoint), named={"own": lora})
    with device.scope():
        weights = load_weights(device, specs, checkpoint)
        before = device.memory_stats().allocated
        loras.allocate(device, weights)
        used = device.memory_stats().allocated - before
    dry = DryDevice(Limits())
    loras.allocate(dry, weights)
    assert dry.allocated == used > sum(pair.a.nbytes for pair in lora.pairs.values())


@pytest.mark.full
def test_a_shared_expert_that_is_changed_stays_alone(device: Device, tmp_path: Path) -> None:
    """In the first layer; in the second it is one of the experts."""
    folder, rng = MODELS / "qwen3_next", np.random.default_rng(0)

    def change(tensors: Tensors) -> None:
        tensors.clear()
        for part, (rows, columns) in {"up": (32, 64), "down": (64, 32)}.items():
            module = f"base_model.model.model.layers.0.mlp.shared_expert.{part}_proj"
            for half, shape in (("A", (4, columns)), ("B", (rows, 4))):
                values = rng.standard_normal(shape, np.float32) / 4
                tensors[f"{module}.lora_{half}.weight"] = values

    adapter = adapter_with(tmp_path / "adapter", change=change)
    shutil.copy(folder / "config.json", tmp_path)
    save_file(merged_tensors(folder, adapter), tmp_path / "model.safetensors")
    ids = list(range(3, 30))
    with device.scope():
        merged = build_engine(device, tmp_path)
        expected, tokens = scores(merged, ids), answer(merged, ids, 8).token_ids
        assert relative_error(scores(build_engine(device, folder), ids), expected) > 1e-1
        for name in (None, "own"):
            own: dict[str, Any] = {"adapters": {name: adapter}} if name else {"adapter": adapter}
            engine = build_engine(device, folder, dtype="f32", **own)
            apart = [name for name in engine.weights if "shared_expert" in name]
            assert {name.split(".")[1] for name in apart} == {"0"}
            assert relative_error(scores(engine, ids, name), expected) <= TOLERANCE
            assert answer(engine, ids, 8, adapter=name).token_ids == tokens


# Adapters that are refused


def adapter_with(
    folder: Path,
    case: str = "llama",
    change: Callable[[Tensors], object] = lambda tensors: None,
    **config: Any,
) -> Path:
    """A copy of a stored adapter with other tensors, and other keys of its config."""
    folder.mkdir(exist_ok=True)
    own = json.loads((DATA / case / ADAPTER_CONFIG).read_text()) | config
    (folder / ADAPTER_CONFIG).write_text(json.dumps(own))
    tensors = load_file(DATA / case / ADAPTER_TENSORS)
    change(tensors)
    save_file(tensors, folder / ADAPTER_TENSORS)
    return folder


def fit(folder: Path, model: str = "llama") -> Loras:
    """All that happens before memory is allocated."""
    lora = Lora.open(folder, folder.name)
    built, checkpoint = open_model(MODELS / model)
    return Loras.fit(built, plan_of(built, checkpoint), always=lora)


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "IA3"},
        {"bias": "lora_only"},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [1, 2]},
        {"target_parameters": ["mlp.experts.down_proj"]},
        {"layer_replication": [[0, 1]]},
        {"alora_invocation_tokens": [1]},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "loftq"},
        {"a_key_of_the_future": {"x": 1}},
        {"r": 0},
        {"lora_alpha": None},
        {"lora_alpha": float("nan")},
        {"lora_alpha": 10**400},
        {"lora_alpha": 1e38},
        {"alpha_pattern": {"(a*)*q_proj": 3}},
        {"alpha_pattern": {".*.*.*.*.*.*.*.*x": 3}},
        {"alpha_pattern": {"(": 3}},
        {"alpha_pattern": {"q_proj": "many"}},
        {"alpha_pattern": []},
    ],
    ids=str,
)
def test_configs_that_are_not_implemented(tmp_path: Path, config: dict[str, Any]) -> None:
    named = next(iter(config)).removeprefix("lora_")
    with pytest.raises(UnsupportedError, match=named) as caught:
        fit(adapter_with(tmp_path / "adapter", **config))
    merging_helps = named not in ("peft_type", "r", "alpha", "alpha_pattern")
    assert ("merge_and_unload" in str(caught.value)) == merging_helps


@pytest.mark.parametrize("init", [False, "gaussian", "eva"])
def test_how_training_began_does_not_matter(tmp_path: Path, init: Any) -> None:
    assert fit(adapter_with(tmp_path / "adapter", init_lora_weights=init)).merged


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def renamed(new: str) -> Callable[[Tensors], object]:
    """Changes the module of the first pair."""

    def change(tensors: Tensors) -> None:
        for half in "AB":
            tensors[f"{new}.lora_{half}.weight"] = tensors.pop(f"{FIRST}.lora_{half}.weight")

    return change


def with_tensor(name: str, values: Array) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: values})


ONES = np.ones((4, 64), np.float32)
EMBEDDING = "base_model.model.model.embed_tokens"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop(f"{FIRST}.lora_B.weight"), CheckpointError, "only one of lora_A and"),
        (lambda t: t.clear(), CheckpointError, "for any module"),
        (with_tensor(f"{FIRST}.lora_A.weight", ONES[:3]), CheckpointError, "does not fit r = 4"),
        (
            lambda t: t.update({f"{FIRST}.lora_{h}.weight": np.ones((9, 9), "f4") for h in "AB"}),
            CheckpointError,
            "does not fit r = 4",
        ),
        (
            with_tensor(f"{FIRST}.lora_A.weight", ONES[0]),
            UnsupportedError,
            "not matrices.*merge_and_unload",
        ),
        (
            with_tensor(f"{FIRST}.lora_A.weight", ONES.astype(np.int8)),
            UnsupportedError,
            r"lora_A.weight \(I8\)",
        ),
        (
            with_tensor(f"{FIRST}.lora_magnitude_vector.weight", ONES[0]),
            UnsupportedError,
            "lora_magnitude_vector.*merge_and_unload",
        ),
        (
            with_tensor(f"{FIRST}.lora_B.bias", ONES[0]),
            UnsupportedError,
            "lora_B.bias.*merge_and_unload",
        ),
        (
            with_tensor(f"{EMBEDDING}.lora_embedding_A", ONES),
            UnsupportedError,
            "lora_embedding_A.*merge_and_unload",
        ),
        (with_tensor(f"{EMBEDDING}.weight", ONES), UnsupportedError, "embed_tokens.weight"),
        (with_tensor(f"{FIRST}.lora_A.weight", ONES[:, :63]), CheckpointError, "another model"),
        (renamed("base_model.model.model.layers.9.self_attn.q_proj"), CheckpointError, "layers.9"),
        (renamed("base_model.model.model.norm"), CheckpointError, "does not have"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, change: Callable[[Tensors], object], error: type[InferError], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(adapter_with(tmp_path / "adapter", change=change))


def test_an_adapter_for_another_model() -> None:
    message = "phi3 is for another model.*qkv_proj.*, which.*It was made for models/phi3"
    with pytest.raises(CheckpointError, match=message):
        fit(DATA / "phi3")
    with pytest.raises(CheckpointError, match=r"another model: .*\(4, 64\).*is \(32, 64\)"):
        fit(DATA / "llama", "mistral")


def test_what_is_multiplied_head_by_head_is_refused(tmp_path: Path) -> None:
    module = "base_model.model.model.layers.0.self_attn.kv_b_proj"

    def alone(tensors: Tensors) -> None:
        tensors.clear()
        tensors |= {f"{module}.lora_A.weight": ONES, f"{module}.lora_B.weight": ONES.T.copy()}

    with pytest.raises(UnsupportedError, match=r"kv_b_proj.*of latents.*merge_and_unload"):
        fit(adapter_with(tmp_path / "a", change=alone), "deepseek_v3")


def test_embeddings_and_experts_are_refused(tmp_path: Path) -> None:
    def embedding(tensors: Tensors) -> None:
        tensors[f"{EMBEDDING}.lora_A.weight"] = ONES
        tensors[f"{EMBEDDING}.lora_B.weight"] = np.ones((211, 4), np.float32)

    with pytest.raises(UnsupportedError, match=r"embed_tokens.*of experts.*merge_and_unload"):
        fit(adapter_with(tmp_path / "a", change=embedding))
    expert = "base_model.model.model.layers.0.mlp.experts.1.down_proj"
    with pytest.raises(UnsupportedError, match=r"experts\.1.*of experts.*merge_and_unload"):
        fit(adapter_with(tmp_path / "b", change=renamed(expert)), "olmoe")


@pytest.mark.parametrize("case", ["llama_head", "phi3"])
def test_a_head_that_is_not_the_models_own(device: Device, tmp_path: Path, case: str) -> None:
    """PEFT saves the head under the changes to it: whether it is the model's, its values tell."""
    name = "base_model.model.lm_head.base_layer.weight"

    def off(tensors: Tensors) -> None:
        tensors[name][-1, -1] += 1

    folder, adapter = model_of(case), adapter_with(tmp_path / "a", case, off)
    with pytest.raises(UnsupportedError, match=r"lm_head.*other values"), device.scope():
        build_engine(device, folder, adapter=adapter)
    with pytest.raises(UnsupportedError, match=r"lm_head.*other values"), device.scope():
        build_engine(device, folder, adapters={"own": adapter})

    def longer(tensors: Tensors) -> None:
        tensors[name] = np.concatenate([tensors[name], tensors[name][:1]])

    with pytest.raises(UnsupportedError, match=r"lm_head.*the model's is.*merge_and_unload"):
        fit(adapter_with(tmp_path / "b", case, longer), folder.name)


def test_a_head_beside_one_that_is_quantised(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    converted(file, "llama", kind=Kind.Q8_0)
    model, checkpoint = open_model(file)
    lora = Lora.open(DATA / "llama_head", "head")
    with pytest.raises(UnsupportedError, match=r"quantised.*save_embedding_layers=False"):
        Loras.fit(model, plan_of(model, checkpoint), always=lora)
    Loras.fit(model, plan_of(model, checkpoint), always=replace(lora, copies={}))


def test_copies_of_embeddings(device: Device, tmp_path: Path) -> None:
    """Copies of embeddings that are unchanged, as save_embedding_layers writes them, are ignored in
    any dtype."""
    own = read_rows(Checkpoint.open(MODELS / "llama").tensors["model.embed_tokens.weight"])

    def change(tensors: Tensors) -> None:
        tensors[f"{EMBEDDING}.weight"] = own.astype(np.float16)

    with device.scope():
        adapter = adapter_with(tmp_path / "a", change=change)
        engine = build_engine(device, MODELS / "llama", dtype="f32", adapter=adapter)
        Reference.load("llama").assert_same(engine)


def test_a_rank_that_is_absurd(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{FIRST}.lora_A.weight"] = np.ones((200, 64), np.float32)
        tensors[f"{FIRST}.lora_B.weight"] = np.ones((64, 200), np.float32)

    folder = adapter_with(tmp_path / "a", change=change, rank_pattern={"q_proj": 200})
    with pytest.raises(CheckpointError, match=r"another model.*\(200, 64\)"):
        fit(folder)


@pytest.mark.parametrize("way", ["adapter", "adapters"])
@pytest.mark.parametrize("half", "AB")
def test_values_that_are_not_finite(device: Device, tmp_path: Path, half: str, way: str) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{FIRST}.lora_{half}.weight"][2, 3] = np.nan

    folder = adapter_with(tmp_path / "a", change=change)
    options: dict[str, Any] = {way: folder if way == "adapter" else {"a": folder}}
    with pytest.raises(CheckpointError, match="not finite"), device.scope():
        build_engine(device, MODELS / "llama", **options)


def test_damaged_files(tmp_path: Path) -> None:
    """Nothing but our own errors, whatever became of a file."""
    folder = adapter_with(tmp_path / "a")
    fit(folder)
    for name, count in ((ADAPTER_TENSORS, 300), (ADAPTER_CONFIG, 300)):
        data, refusals = (folder / name).read_bytes(), 0
        header = 800 if name == ADAPTER_TENSORS else len(data)
        for own in spoilt(data, header, count):
            (folder / name).write_bytes(own)
            try:
                fit(folder)
            except InferError:
                refusals += 1
        assert refusals > count / 2
        (folder / name).write_bytes(data)
    for text in ("", "[]", "{", "[" * 100_000, '{"r": 1e99}', '{"r": "4"}'):
        (folder / ADAPTER_CONFIG).write_text(text)
        with pytest.raises(InferError):
            fit(folder)


def test_folders_that_are_no_adapters(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no adapter_config\.json, adapter_model"):
        resolve_adapter(str(MODELS / "llama"))
    with pytest.raises(ModelNotFoundError, match=r"made for, models/phi3, and .*adapter=\"/.*phi3"):
        resolve(str(DATA / "phi3"))
    with pytest.raises(ModelNotFoundError, match="There is no folder"):
        resolve_adapter(str(tmp_path / "nothing"))
    (tmp_path / ADAPTER_CONFIG).write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"no adapter_model\.safetensors"):
        resolve_adapter(str(tmp_path))
    (tmp_path / "adapter_model.bin").write_text("")
    with pytest.raises(UnsupportedError, match=r"adapter_model\.bin, which is not read"):
        resolve_adapter(str(tmp_path))


# The bundled model, from end to end

PROMPT = "Once upon a time"
TOKENS = 16  # of its answer: the first few are the same with any adapter


@pytest.fixture(scope="module")
def demo_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the demo model, whose answers it changes."""
    folder, rng = tmp_path_factory.mktemp("lora") / "story", np.random.default_rng(0)
    folder.mkdir()
    tensors: Tensors = {}
    for layer in range(6):
        for name, rows, columns in (("self_attn.v_proj", 64, 256), ("mlp.down_proj", 256, 448)):
            place = f"base_model.model.model.layers.{layer}.{name}"
            a, b = rng.standard_normal((4, columns)), rng.standard_normal((rows, 4))
            tensors[f"{place}.lora_A.weight"] = (a / columns**0.5).astype(np.float32)
            tensors[f"{place}.lora_B.weight"] = (b / 8).astype(np.float32)
    save_file(tensors, folder / ADAPTER_TENSORS)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "demo"}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def expected(demo_adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The answer of a model into which numpy has merged the adapter."""
    folder = tmp_path_factory.mktemp("merged") / "demo"
    shutil.copytree(resolve(DEMO).path, folder)
    save_file(merged_tensors(folder, demo_adapter), folder / "model.safetensors")
    with infer.load(folder, dtype="bf16", context=256) as llm:
        yield llm.chat(PROMPT, max_tokens=TOKENS).text


@pytest.mark.full
@pytest.mark.demo
@pytest.mark.usefixtures("same_kernels")
def test_the_command_line(demo_adapter: Path, expected: str) -> None:
    flags = ("-p", PROMPT, "-n", TOKENS, "--context", 256, "--quiet")
    result = invoke("run", DEMO, "--adapter", demo_adapter, *flags)
    assert result.stdout == expected + "\n"
    assert invoke("run", DEMO, *flags).stdout != result.stdout
    message = refused("run", DEMO, "--adapter", DATA / "phi3", "-p", PROMPT)
    assert "phi3 is for another model" in message
    assert "phi3 is for another model" in refused("info", DEMO, "--adapter", DATA / "phi3")
    assert "There is no folder /none" in refused(
        "run", DEMO, "--adapter", "/none", "-p", PROMPT, code=2
    )
    assert "story, for 12 tensors" in invoke("info", DEMO, "--adapter", demo_adapter).stdout


@pytest.mark.full
@pytest.mark.demo
@pytest.mark.usefixtures("same_kernels")
def test_a_benchmark_names_its_adapter(
    demo_adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "copy_bandwidth", lambda device: 1e9)
    counts = ("--prompt-tokens", 4, "-n", 2, "-r", 1, "--context", 64, "--save", tmp_path)
    assert invoke("bench", DEMO, "--adapter", demo_adapter, *counts).exit_code == 0
    (path,) = tmp_path.iterdir()
    report = BenchReport.from_json(path.read_text(encoding="utf-8"))
    assert report.lora == demo_adapter.name == "story"
    assert report.model_and_dtypes == "demo bf16, adapter story"
    assert path.name.endswith("-demo-bf16-adapter-story.json")


@pytest.mark.full
@pytest.mark.demo
@pytest.mark.usefixtures("same_kernels")
def test_the_api(demo_adapter: Path, expected: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(demo_adapter, other)
    config = json.loads((other / ADAPTER_CONFIG).read_text()) | {"lora_alpha": -8}
    (other / ADAPTER_CONFIG).write_text(json.dumps(config))
    with infer.load(DEMO, context=256, adapters={"story": demo_adapter, "other": other}) as llm:
        assert llm.adapters == ("story", "other")
        plain = llm.chat(PROMPT, max_tokens=TOKENS).text
        story = llm.chat(PROMPT, max_tokens=TOKENS, adapter="story").text
        assert len({plain, story, llm.chat(PROMPT, max_tokens=TOKENS, adapter="other").text}) == 3
        assert story[:20] == expected[:20]  # the weights of that one were rounded
        with llm.stream([5, 6], adapter="story", max_tokens=2) as stream:
            assert len(list(stream)) >= 2
        assert llm.logits([5, 6], adapter="story")[-1].argmax() == stream.result.token_ids[0]
        for name in ("none", 3, ["story"]):
            with pytest.raises(RequestError, match="Loaded by a name: other, story"):
                llm.chat(PROMPT, adapter=name)
            with pytest.raises(RequestError, match="Loaded by a name: other, story"):
                llm.logits(PROMPT, adapter=name)  # type: ignore[arg-type]
        assert llm.chat(PROMPT, max_tokens=TOKENS).text == plain
        assert infer.generate(llm, PROMPT, max_tokens=2, adapter="story").completion_tokens
    with pytest.raises(RequestError, match="either one adapter"):
        infer.load(DEMO, adapter=other, adapters={"a": other})
    for adapters in ({"": other}, {1: other}, [other], str(other)):
        with pytest.raises(RequestError, match="names of adapters"):
            infer.load(DEMO, adapters=adapters)  # type: ignore[arg-type]


@pytest.mark.demo
@pytest.mark.usefixtures("same_kernels")
def test_generate_in_one_call(demo_adapter: Path, expected: str) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    result = infer.generate(DEMO, messages, adapter=demo_adapter, context=256, max_tokens=TOKENS)
    assert result.text == expected
    assert infer.shortcuts._last is not None
    infer.shortcuts._last.llm.close()
    infer.shortcuts._last = None
