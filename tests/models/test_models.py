"""The architectures, on tiny random models, against transformers' float32 answers.

The default run compares with stored answers; the live one with transformers itself, on new models.
"""

from __future__ import annotations

import itertools
import json
import runpy
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import places
import pytest
from engines import answer, build_engine, scores
from marks import others_full
from reference_models import (
    CONFIG_FILES,
    DATA,
    TOLERANCE,
    Spelling,
    cases,
    load,
    load_hidden,
    load_long,
    long_cases,
    relative_error,
    tolerance_of,
)
from safetensors import deserialize

from infer import models
from infer.engine.engine import Engine
from infer.kernels.errors import UnsupportedError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.pack import from_bf16
from infer.kernels.lowering import tuning
from infer.kernels.state.kv_cache import PAGE, kept
from infer.memory import kv_bytes_per_position
from infer.models import ARCHITECTURES, MULTIMODAL, build_model, open_model
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.multimodal import text_config
from infer.models.loading.checkpoint import Checkpoint
from infer.models.loading.config import RawConfig
from infer.models.loading.formats import find_format
from infer.models.loading.plan import plan_weights
from infer.models.loading.tensors import TensorInfo
from infer.sampling import SamplingParams


def assert_agrees(device: Device, folder: Path, reference: dict[str, Any], **options: Any) -> None:
    """folder: named after the case. reference: the arrays of reference_models.Reference."""
    tolerance = tolerance_of(folder.name)
    prompt_ids, greedy_ids = reference["prompt_ids"].tolist(), reference["greedy_ids"].tolist()
    with device.scope():
        engine = build_engine(device, folder, **options)
        greedy = answer(engine, prompt_ids, len(greedy_ids))
        assert greedy.token_ids == greedy_ids
        assert relative_error(greedy.logits[0], reference["logits"][-1]) <= tolerance
        assert relative_error(greedy.logits[-1], reference["final_logits"]) <= tolerance
        assert relative_error(scores(engine, prompt_ids), reference["logits"]) <= tolerance


def test_every_architecture_has_a_case() -> None:
    raws = [RawConfig.open(DATA / case) for case in cases()]
    raws += [text_config(raw) for raw in raws if raw.values["model_type"] in MULTIMODAL]
    assert {raw.values["model_type"] for raw in raws} == {*ARCHITECTURES, *MULTIMODAL}


def test_every_module_is_an_architecture() -> None:
    """models/ is flat: a file for each model_type, and folders for what they share."""
    assert models.__file__ is not None
    found = {path.stem for path in Path(models.__file__).parent.glob("*.py")}
    assert found == {"__init__", *ARCHITECTURES}


def first_cases() -> set[str]:
    """One for each model_type that has layers of its own."""
    found: dict[str, str] = {}
    for case in sorted(cases(), key=len):
        found.setdefault(str(RawConfig.open(DATA / case).values["model_type"]), case)
    return {case for model_type, case in found.items() if model_type not in MULTIMODAL}


# Ways of attending, of having experts, and of keeping states; test_engine.py has more.
DECODED = {"llama", "gpt_oss", "deepseek_v3", "gemma4_text", "qwen3_next", "lfm2"}


@others_full("case", cases(), DECODED)
def test_agrees_with_transformers(device: Device, case: str, tmp_path: Path) -> None:
    reference = load(case)
    assert_agrees(device, reference.write_checkpoint(tmp_path / case), vars(reference))


@pytest.mark.parametrize("case", sorted((first_cases() | {"gemma3_text_yarn"}) - DECODED))
def test_a_prompt_agrees_with_transformers(device: Device, case: str, tmp_path: Path) -> None:
    """Without an answer, for which other kernels are compiled: all else that is a model's own."""
    reference = load(case)
    with device.scope():
        engine = build_engine(device, reference.write_checkpoint(tmp_path / case))
        error = relative_error(scores(engine, reference.prompt_ids.tolist()), reference.logits)
    assert error <= tolerance_of(case)


@pytest.mark.full
@pytest.mark.parametrize("passes", [None, 1000])
@others_full("case", long_cases(), ["llama"])
def test_agrees_over_pages_and_chunks(
    device: Device, case: str, passes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """passes: that a software adapter has through loops, as if a prompt were a very long one."""
    if passes is not None:
        monkeypatch.setattr(tuning, "_SOFTWARE_PASSES", passes)
    reference = load_long(case)
    prompt_ids, greedy_ids = reference.prompt_ids.tolist(), reference.greedy_ids.tolist()
    with device.scope():
        folder = load(case).write_checkpoint(tmp_path / case)
        engine = build_engine(device, folder, context=len(prompt_ids) + len(greedy_ids))
        engine.runner.pace.measured(64, 1e-6)  # as if the first steps had been so fast
        assert [rows for _, rows in engine.runner.chunks(len(prompt_ids))] == [512, 512, 176]
        assert engine.context > 4 * PAGE
        greedy = answer(engine, prompt_ids, len(greedy_ids))
        assert greedy.token_ids == greedy_ids
        assert relative_error(greedy.logits[0], reference.logits[-1]) <= TOLERANCE
        assert relative_error(greedy.logits[-1], reference.final_logits) <= TOLERANCE
        rows = scores(engine, prompt_ids)[reference.rows]
        assert relative_error(rows, reference.logits) <= TOLERANCE


@pytest.mark.parametrize("case", cases())
def test_a_quantised_model_is_the_same_model(case: str) -> None:
    """Nothing in a config is taken for unknown because of how its weights are stored."""
    raw = RawConfig.open(DATA / case)
    quantised = RawConfig(raw.values | {"quantization": {"bits": 4, "group_size": 32}}, raw.place)
    configs = [raw, quantised]
    if raw.values["model_type"] in MULTIMODAL:
        configs = [text_config(raw), text_config(quantised)]
    assert find_format(configs[1]) is not None
    assert build_model(configs[0]).config == build_model(configs[1]).config


@pytest.mark.parametrize("case", cases())
def test_both_spellings_are_one_model(case: str, tmp_path: Path) -> None:
    """config.json as most files on the hub have it, and as transformers 5 writes it."""
    reference = load(case)
    configs = [
        build_model(RawConfig.open(reference.write_checkpoint(tmp_path / way, way))).config
        for way in get_args(Spelling)
    ]
    assert configs[0] == configs[1]


Tensors = dict[str, tuple[str, list[int], bytes]]
"""dtype, shape and bytes of tensors by their names."""


def with_head(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """A checkpoint of one file, with other tensors."""
    (file,) = folder.glob("*.safetensors")
    found = deserialize(file.read_bytes())
    tensors: Tensors = {name: (of["dtype"], of["shape"], bytes(of["data"])) for name, of in found}
    change(tensors)
    header, data = {}, b""
    for name, (dtype, shape, own) in tensors.items():
        offsets = [len(data), len(data) + len(own)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += own
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def reversed_rows(tensor: tuple[str, list[int], bytes]) -> tuple[str, list[int], bytes]:
    dtype, shape, data = tensor
    return dtype, shape, np.frombuffer(data, np.uint8).reshape(shape[0], -1)[::-1].tobytes()


TIED = [c for c in cases() if build_model(RawConfig.open(DATA / c)).config.tie_word_embeddings]
TIED = [case for case in TIED if (DATA / case / "model.safetensors").exists()]


@pytest.mark.parametrize("case", TIED)
def test_a_head_beside_tied_embeddings(case: str, tmp_path: Path) -> None:
    """A head beside tied embeddings is read as by transformers 5: an equal one is the embeddings,
    and so is the only one there is; a different one counts."""
    tied, own = open_model(DATA / case)
    embed = next(iter(tied.weights())).sources[0].key
    names = Checkpoint.open(DATA / case).tensors
    key = next(name for name in names if is_embedding(name))
    head = "embed_out.weight" if "gpt_neox" in case else "lm_head.weight"
    if key.startswith("language_model."):
        head = f"language_model.{head}"

    def opened(change: Callable[[Tensors], object]) -> tuple[Decoder, Checkpoint]:
        shutil.rmtree(tmp_path, ignore_errors=True)
        return open_model(with_head(load(case).write_checkpoint(tmp_path), change))

    model, checkpoint = opened(lambda tensors: tensors.update({head: tensors[key]}))
    assert model.config == tied.config
    assert checkpoint.tensors.keys() == own.tensors.keys()
    assert not checkpoint.notes
    model, checkpoint = opened(lambda tensors: tensors.update({head: tensors.pop(key)}))
    assert model.config == tied.config
    assert checkpoint.tensors.keys() == own.tensors.keys()
    model, checkpoint = opened(lambda tensors: tensors.update({head: reversed_rows(tensors[key])}))
    plan = plan_weights(model.weights(), checkpoint, ignorable=model.ignorable)
    weights = {weight.name: weight for weight in plan.weights}
    assert not model.config.tie_word_embeddings
    assert weights["embed_tokens"].parts[0].tensor == checkpoint.tensors[embed]
    assert weights["lm_head"].parts[0].tensor.name == head.removeprefix("language_model.")
    (note,) = checkpoint.notes
    assert "tie_word_embeddings" in note


def is_embedding(name: str) -> bool:
    """Whether a tensor is the embeddings of tokens of the text model."""
    names = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight")
    return name.endswith(names) and "visual" not in name


@pytest.mark.parametrize("way", ["other", "only"])
def test_the_logits_of_a_head_beside_tied_embeddings(
    device: Device, way: str, tmp_path: Path
) -> None:
    """transformers' hidden states times the head."""
    reference, hidden = load("llama"), load_hidden("llama")
    folder = reference.write_checkpoint(tmp_path / "llama")
    heads = []

    def change(tensors: Tensors) -> None:
        key = "model.embed_tokens.weight"
        head = reversed_rows(tensors[key]) if way == "other" else tensors[key]
        heads.append(np.frombuffer(head[2], np.uint16).reshape(head[1]))
        tensors["lm_head.weight"] = head
        if way == "only":
            del tensors[key]

    with device.scope():
        engine = build_engine(device, with_head(folder, change))
        found = scores(engine, reference.prompt_ids.tolist())
    expected = hidden @ from_bf16(heads[0]).T
    assert relative_error(found, expected) <= TOLERANCE


@pytest.mark.live
@pytest.mark.parametrize("way", ["other", "equal", "only"])
def test_a_head_beside_tied_embeddings_live(device: Device, way: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    reference = load("llama")
    folder = reference.write_checkpoint(tmp_path / "llama", "transformers5")

    def change(tensors: Tensors) -> None:
        key = "model.embed_tokens.weight"
        head = reversed_rows(tensors[key]) if way == "other" else tensors[key]
        tensors["lm_head.weight"] = head
        if way == "only":
            del tensors[key]

    with_head(folder, change)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(torch.from_numpy(reference.prompt_ids)[None]).logits[0].numpy()
    with device.scope():
        found = scores(build_engine(device, folder), reference.prompt_ids.tolist())
    assert relative_error(found, wanted) <= TOLERANCE


def test_the_first_files_of_gpt2_have_other_names() -> None:
    """No prefix, and the causal mask."""
    model, checkpoint = open_model(DATA / "gpt2")
    old = {name.removeprefix("transformer."): info for name, info in checkpoint.tensors.items()}
    mask = {
        f"h.{layer}.attn.{name}": TensorInfo(name, "f32", (1,), DATA, 0, 4)
        for layer in range(2)
        for name in ("bias", "masked_bias")
    }
    first = replace(checkpoint, tensors=old | mask)
    plans = [
        plan_weights(model.weights(), c, ignorable=model.ignorable) for c in (checkpoint, first)
    ]
    for new, own in zip(*(plan.weights for plan in plans), strict=True):
        assert [part.tensor for part in own.parts] == [part.tensor for part in new.parts]


def test_factors_that_mlx_has_multiplied_weights_by_are_refused(tmp_path: Path) -> None:
    """Its files tell by the taps of convolutions, which lie the other way."""
    folder = load("falcon_h1").write_checkpoint(tmp_path / "falcon")
    open_model(folder)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    assert data.count(b"[192,1,4]") == 2
    file.write_bytes(data.replace(b"[192,1,4]", b"[192,4,1]"))
    with pytest.raises(UnsupportedError, match="as MLX converts falcon_h1"):
        open_model(folder)


# Each has a kernel, or a way through them, that the others have not.
WEAK = ["ernie4_5_moe", "gemma2", "gemma4", "gemma4_text_experts", "glm4", "gpt_neox", "gpt_oss"]
WEAK += [
    "deepseek_v2_groups",
    "deepseek_v3",
    "granitemoehybrid_mamba",
    "lfm2",
    "llama",
    "ministral3",
    "mistral_sliding",
    "nemotron_h_experts",
    "olmo",
    "olmo2",
    "qwen2_moe",
    "qwen3",
    "qwen3_next",
]


@others_full("case", WEAK, ["gpt_oss"])
def test_agrees_on_the_weakest_device(least_device: Device, case: str, tmp_path: Path) -> None:
    """No subgroups, no shader-f16, the smallest limits."""
    reference = load(case)
    assert_agrees(least_device, reference.write_checkpoint(tmp_path / case), vars(reference))


def of_layers(engine: Engine) -> list[int]:
    """Bytes of the buffers of keys and values."""
    both = [(layer.keys, layer.values) for layer in engine.runner.caches.kv.layers]
    return [buffer.nbytes for pair in both for buffer in dict.fromkeys(pair)]


def test_layers_share_a_cache(device: Device, tmp_path: Path) -> None:
    """The last two of four layers attend to what the first two keep: two heads of 16 where there is
    a window, and of 32 where there is none. Files have weights for all of them."""
    with device.scope():
        engine = build_engine(device, load("gemma4").write_checkpoint(tmp_path / "gemma4"))
        first, second, *others = engine.runner.caches.layers
        assert others == [first, second]
        slots = engine.runner.caches.kv.layers[0].slots
        assert sum(of_layers(engine)) == slots * 768
        assert kv_bytes_per_position(engine.model, "f32") == 2 * 4 * (2 * 16 + 2 * 32) == 768
    keys = [f"model.layers.{layer}.self_attn.k_proj.weight" for layer in range(4)]
    assert [engine.model.ignorable(key) for key in keys] == [False, False, True, True]


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "kv_dtype", "least", "most"),
    [
        ("llama", "f16", 1e-4, 5e-3),
        ("llama", "q8", 3e-3, 4e-2),
        ("deepseek_v3", "f16", 1e-4, 5e-3),
    ],
)
def test_a_smaller_cache_costs_little(
    device: Device, case: str, kv_dtype: str, least: float, most: float, tmp_path: Path
) -> None:
    reference = load(case)
    prompt_ids = reference.prompt_ids.tolist()
    folder = reference.write_checkpoint(tmp_path / case)
    with device.scope():
        engine = build_engine(device, folder, kv_dtype=kv_dtype)
        error = relative_error(scores(engine, prompt_ids), reference.logits)
        decoded = answer(engine, prompt_ids, 8)  # decode reads what prefill wrote
        again = scores(engine, [*prompt_ids, *decoded.token_ids])
    # test_the_cache_rounds_keys_and_values says what exactly; less would not have been rounded.
    assert least < error < most
    assert relative_error(decoded.logits, again[len(prompt_ids) - 1 : -1]) < most / 4


def test_a_latent_is_cached_once(device: Device, tmp_path: Path) -> None:
    """One latent of 32 and one key of 16 that turns, for four heads of 40 + 20."""
    with device.scope():
        folder = load("deepseek_v2").write_checkpoint(tmp_path / "deepseek")
        engine = build_engine(device, folder, kv_dtype="f16")
        layers = engine.runner.caches.kv.layers
        assert of_layers(engine) == 2 * [layers[0].slots * 96]
        assert kv_bytes_per_position(engine.model, "f16") == 2 * 2 * (32 + 16) == 192


@pytest.mark.parametrize("case", ["llama_rope_dynamic", "phi3_longrope"])
def test_rope_follows_the_prompt(device: Device, case: str, tmp_path: Path) -> None:
    """A cache that was computed with the frequencies of one length serves no other length."""
    reference = load(case)
    prompt_ids, steps = reference.prompt_ids.tolist(), len(reference.greedy_ids)
    folder = reference.write_checkpoint(tmp_path / case)
    own = json.loads((folder / CONFIG_FILES["transformers5"]).read_text())
    limit = own.get("original_max_position_embeddings", own["max_position_embeddings"])
    short_ids, longer_ids = prompt_ids[: limit - 8], [*prompt_ids, 7]
    with device.scope():
        fresh = build_engine(device, folder)
        short = answer(fresh, short_ids, steps)
        engine = build_engine(device, folder)
        for before in (short_ids, longer_ids):
            answer(engine, before, 4)
            long = answer(engine, prompt_ids, steps)
            assert long.token_ids == reference.greedy_ids.tolist()
            assert relative_error(long.logits[-1], reference.final_logits) <= TOLERANCE
        again = answer(engine, short_ids, steps)
        assert again.token_ids == short.token_ids
        assert relative_error(again.logits, short.logits) <= TOLERANCE


def test_longrope_switches_in_mid_answer(device: Device, tmp_path: Path) -> None:
    """The host's sampling agrees with the GPU's, whose counts of tokens stay what they were; and
    the cache serves what comes next."""
    reference = load("phi3_longrope_switch")
    prompt_ids, steps = reference.prompt_ids.tolist(), len(reference.greedy_ids)
    folder = reference.write_checkpoint(tmp_path / "phi3")
    penalties = {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.2}
    with device.scope():
        engine = build_engine(device, folder)
        on_gpu = answer(engine, prompt_ids, steps, **penalties).token_ids
        assert on_gpu != reference.greedy_ids.tolist()
        assert engine.timings.prefilled_tokens == len(prompt_ids)
        params = SamplingParams(max_tokens=steps, **penalties).resolved({})
        same = engine.generate(prompt_ids, params, logits_processor=lambda ids, logits: logits)
        assert [step.token for step in same] == on_gpu
        longer_ids = [*prompt_ids, *reference.greedy_ids.tolist()[:-1]]
        last = answer(engine, longer_ids, 1)
        assert relative_error(last.logits[0], reference.final_logits) <= TOLERANCE


@pytest.mark.live
@pytest.mark.parametrize("case", cases())
def test_agrees_with_transformers_on_a_new_model(device: Device, case: str, tmp_path: Path) -> None:
    """Weights and prompt from seeds that the stored references do not use."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    root = places.ROOT
    script = runpy.run_path(str(root / "scripts" / "make_references.py"))
    own = script["CASES"][case]
    for seed in itertools.count(10_000):
        rng = np.random.default_rng(seed)
        prompt_ids = rng.integers(3, own.vocab_size, script["PROMPT_TOKENS"])
        model = script["random_model"](own, rng)
        reference = script["answers"](model, prompt_ids)
        if script["is_fair"](reference):
            break
    model.to(own.dtype).save_pretrained(tmp_path / case)
    assert_agrees(device, tmp_path / case, reference)


@pytest.mark.live
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # `cache` since 5.24
@pytest.mark.parametrize("kv_dtype", ["f16", "q8"])
@pytest.mark.parametrize("case", ["deepseek_v3", "llama", "mistral", "qwen2", "qwen3"])
def test_the_cache_rounds_keys_and_values(
    device: Device, case: str, kv_dtype: str, tmp_path: Path
) -> None:
    """And nothing else: transformers agrees once its own keys and values are rounded."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    class RoundingCache(transformers.DynamicCache):  # type: ignore[misc, name-defined]
        def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
            return super().update(rounded(keys), rounded(values), *args, **kwargs)

    def rounded(heads: Any) -> Any:
        flat = heads.numpy().reshape(-1, heads.shape[-1])
        return torch.from_numpy(kept(flat, heads.shape[-1], kv_dtype).astype(np.float32)).reshape(
            heads.shape
        )

    reference = load(case)
    folder = reference.write_checkpoint(tmp_path / case)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        ids = torch.from_numpy(reference.prompt_ids)[None]
        expected = model(ids, past_key_values=RoundingCache(), use_cache=True).logits[0].numpy()
    with device.scope():
        engine = build_engine(device, folder, kv_dtype=kv_dtype)
        actual = scores(engine, reference.prompt_ids.tolist())
    assert relative_error(actual, expected) <= TOLERANCE
