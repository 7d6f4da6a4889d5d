"""The stored references are what transformers computes today."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import numpy as np
import places
import pytest
from reference_models import (
    CONFIG_FILES,
    DATA,
    Spelling,
    batch_cases,
    cases,
    hidden_cases,
    load,
    load_batch,
    load_hidden,
    load_long,
    long_cases,
    relative_error,
)

from infer.models import open_model
from infer.models.loading.plan import plan_weights

pytestmark = pytest.mark.live

# float32 sums in another order, over two or three layers.
TOLERANCE = 1e-5

# Their prompts or answers are longer than one set of frequencies allows, so that they are defined
# for one pass only. Of Bamba transformers counts the positions of each pass from 0, if not told.
ONE_PASS = ("bamba", "llama_rope_dynamic", "phi3_longrope", "phi3_longrope_switch")

# Cases with experts, whose tensors have one name for all experts, or another that is read.
MIXTURES = [case for case in cases() if load(case).routing_margin is not None]
MIXTURES = [case for case in MIXTURES if not case.startswith(("ernie4_5_moe", "granitemoe"))]

# Values that turn off the one key of the config that a case is about.
WITHOUT: dict[str, dict[str, Any]] = {
    "afmoe": {"mup_enabled": False},
    "exaone_moe": {"routed_scaling_factor": 1.0},
    "codegen": {"rotary_dim": 4},
    "falcon_h1": {"ssm_multipliers": None},
    "falcon_h1_norm": {"mamba_rms_norm": False},
    "flex_olmo": {"num_experts_per_tok": 1},
    "gpt_neo": {"window_size": 96},
    "hy_v3": {"router_scaling_factor": 1.0},
    "mellum": {"layer_types": ["full_attention", "full_attention"]},
    "minimax_m2": {"rotary_dim": 16},
    "solar_open": {"rope_scaling": None},
    "youtu": {"rope_interleave": False},
    "apertus": {"rope_scaling": None},
    "cwm": {"sliding_window": 128},
    "deepseek_v2": {"rope_scaling": None},
    "deepseek_v2_groups": {"topk_method": "greedy"},
    "deepseek_v3": {"topk_group": 4},
    "dots1": {"norm_topk_prob": True},
    "cohere2": {"sliding_window": 128},
    "gemma2": {"attn_logit_softcapping": None},
    "gemma3_text": {"rope_local_base_freq": 1000000.0},
    "gemma4_text": {"rope_parameters": None},
    "gemma4_text_experts": {"top_k_experts": 2},
    "gpt_neox": {"use_parallel_residual": False},
    "gpt_neox_sequential": {"rotary_pct": 0.25},
    "exaone4": {"sliding_window_pattern": 3},
    "glm": {"partial_rotary_factor": 1.0},
    "glm4": {"partial_rotary_factor": 1.0},
    "glm4_moe": {"routed_scaling_factor": 1.0},
    "glm4_moe_lite": {"rope_interleave": True},
    "gpt_oss": {"swiglu_limit": 100.0},
    "gptj": {"rotary_dim": 16},
    "granite": {"attention_multiplier": 0.45},
    "granite_swa": {"layer_rope_theta": None},
    "granitemoehybrid": {"position_embedding_type": None},
    "granitemoehybrid_experts": {"position_embedding_type": "rope"},
    "hunyuan_v1_dense": {"rope_scaling": None},
    "lfm2_moe": {"use_expert_bias": False},
    "lfm2_moe_plain": {"norm_topk_prob": True},
    "llama_rope_dynamic": {"rope_scaling": None},
    "llama_rope_dynamic_decode": {"rope_scaling": None},
    "llama_rope_linear": {"rope_scaling": None},
    "llama_rope_llama3": {"rope_scaling": None},
    "llama_rope_yarn": {"rope_scaling": None},
    "ministral": {"layer_types": ["full_attention", "full_attention"]},
    "ministral3": {"rope_parameters": None},
    "mistral4": {"rope_parameters": None},
    "mistral_sliding": {"sliding_window": None},
    "mixtral_sliding": {"sliding_window": None},
    "nanochat": {"final_logit_softcapping": 3.0},
    "nemotron": {"partial_rotary_factor": 1.0},
    "olmo": {"clip_qkv": None},
    "olmo3": {"rope_scaling": None},
    "olmoe": {"clip_qkv": None},
    "phi3": {"sliding_window": None},
    "phi3_longrope": {"original_max_position_embeddings": 128},
    "phi3_longrope_switch": {"original_max_position_embeddings": 128},
    "qwen2": {"use_sliding_window": True},
    "qwen2_moe": {"norm_topk_prob": True},
    "qwen2_moe_sliding": {"use_sliding_window": False},
    "qwen3_5_moe_text": {"num_experts_per_tok": 2},
    "qwen3_5_text": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "qwen3_next": {"norm_topk_prob": False},
    "qwen2_sliding": {"max_window_layers": 0},
    "stablelm": {"partial_rotary_factor": 0.25},
    "stablelm_norms": {"qk_layernorm": False},
    "persimmon": {"qk_layernorm": False},
    "phi": {"partial_rotary_factor": 0.25},
    "smollm3": {"no_rope_layers": [1, 1, 1]},
    "smollm3_sliding": {"sliding_window": None},
    "starcoder2": {"sliding_window": None},
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/make_references.py as a module."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    path = places.ROOT / "scripts" / "make_references.py"
    spec = importlib.util.spec_from_file_location("make_references", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def from_pretrained(folder: Path) -> Any:
    import torch
    from transformers import AutoConfig

    model_class = sys.modules["make_references"].auto_class(AutoConfig.from_pretrained(folder))
    return model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def prompt_logits(model: Any, token_ids: np.ndarray) -> np.ndarray:
    """float32 [tokens, vocab], from one pass."""
    import torch

    with torch.no_grad():
        logits: np.ndarray = model(torch.from_numpy(token_ids)[None]).logits[0].numpy()
    return logits


def test_every_case_is_stored(script: ModuleType) -> None:
    assert cases() == list(script.CASES)
    assert set(script.OPTIONS) <= set(cases())
    assert long_cases() == [name for name, case in script.CASES.items() if case.long]
    assert hidden_cases() == [name for name, case in script.CASES.items() if case.hidden]
    assert batch_cases() == [name for name, case in script.CASES.items() if case.batch]


@pytest.mark.parametrize("spelling", get_args(Spelling))
@pytest.mark.parametrize("case", cases())
def test_transformers_agrees(
    script: ModuleType, case: str, spelling: Spelling, tmp_path: Path
) -> None:
    reference = load(case)
    model = from_pretrained(reference.write_checkpoint(tmp_path / case, spelling))
    again = script.answers(model, reference.prompt_ids)
    assert relative_error(again["logits"], reference.logits) < TOLERANCE
    assert relative_error(again["final_logits"], reference.final_logits) < TOLERANCE
    assert again["greedy_ids"].tolist() == reference.greedy_ids.tolist()
    assert np.allclose(again["greedy_margins"], reference.greedy_margins, atol=2 * TOLERANCE)
    assert script.is_fair(again)


@pytest.mark.parametrize("case", long_cases())
def test_transformers_agrees_over_pages_and_chunks(
    script: ModuleType, case: str, tmp_path: Path
) -> None:
    reference = load_long(case)
    model = from_pretrained(load(case).write_checkpoint(tmp_path / case))
    again = script.answers(model, reference.prompt_ids)
    assert relative_error(again["logits"][reference.rows], reference.logits) < TOLERANCE
    assert relative_error(again["final_logits"], reference.final_logits) < TOLERANCE
    assert again["greedy_ids"].tolist() == reference.greedy_ids.tolist()
    assert script.is_fair(again)


@pytest.mark.parametrize("case", hidden_cases())
def test_transformers_agrees_on_hidden_states(
    script: ModuleType, case: str, tmp_path: Path
) -> None:
    reference = load(case)
    model = from_pretrained(reference.write_checkpoint(tmp_path / case))
    again = script.hidden_states(model, reference.prompt_ids)
    assert relative_error(again, load_hidden(case)) < TOLERANCE


@pytest.mark.parametrize("case", batch_cases())
def test_transformers_agrees_on_prompts_of_unlike_lengths(
    script: ModuleType, case: str, tmp_path: Path
) -> None:
    reference = load_batch(case)
    model = from_pretrained(load(case).write_checkpoint(tmp_path / case))
    steps = reference.greedy_ids.shape[1]
    for i, prompt in enumerate(reference.prompts):
        again = script.continuation(model, np.array(prompt), steps)
        assert relative_error(again["step_logits"][reference.rows], reference.logits[i]) < TOLERANCE
        assert again["greedy_ids"].tolist() == reference.greedy_ids[i].tolist()
        assert script.is_fair(again, steps, script.MIN_DISTINCT_BATCH)


@pytest.mark.parametrize("case", cases())
def test_regenerating_gives_the_same(script: ModuleType, case: str, tmp_path: Path) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    _, again = script.make(case, tmp_path / case)
    reference = load(case)
    assert again["prompt_ids"].tolist() == reference.prompt_ids.tolist()
    assert again["greedy_ids"].tolist() == reference.greedy_ids.tolist()
    assert relative_error(again["logits"], reference.logits) < TOLERANCE
    stored = DATA / case
    assert {file.name for file in stored.iterdir()} == {f.name for f in (tmp_path / case).iterdir()}
    for file in stored.glob("*.safetensors"):
        expected = safetensors_torch.load_file(file)
        actual = safetensors_torch.load_file(tmp_path / case / file.name)
        assert list(actual) == list(expected)
        assert all(actual[name].dtype == expected[name].dtype for name in expected)
        assert all(actual[name].equal(expected[name]) for name in expected)
    for name in CONFIG_FILES.values():
        expected, actual = (
            json.loads((folder / name).read_text()) for folder in (stored, tmp_path / case)
        )
        actual["transformers_version"] = expected["transformers_version"]
        assert actual == expected


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("case", WITHOUT)
def test_what_a_case_is_about_matters(case: str, tmp_path: Path) -> None:
    """A model that ignored the rope scaling or the window would be found out."""
    reference = load(case)
    folder = reference.write_checkpoint(tmp_path / case)
    config = json.loads((folder / "config.json").read_text()) | WITHOUT[case]
    (folder / "config.json").write_text(json.dumps(config))
    other = prompt_logits(
        from_pretrained(folder), np.concatenate([reference.prompt_ids, reference.greedy_ids[:-1]])
    )
    expected = np.concatenate([reference.logits, reference.final_logits[None]])
    actual = np.concatenate([other[: len(reference.prompt_ids)], other[-1:]])
    assert relative_error(actual, expected) > 1e-2


@pytest.mark.parametrize("case", cases())
@pytest.mark.usefixtures("script")
def test_an_eps_ten_times_too_small_shows(case: str, tmp_path: Path) -> None:
    """In each kind of norm, where it is its only fault."""
    reference = load(case)
    model = from_pretrained(reference.write_checkpoint(tmp_path / case))
    base, shows = prompt_logits(model, reference.prompt_ids), dict[str, float]()
    for place, module in model.named_modules():
        for name in {"eps", "variance_epsilon"} & vars(module).keys():
            own, kind = getattr(module, name), place.rpartition(".")[2]
            setattr(module, name, own / 10)
            other = prompt_logits(model, reference.prompt_ids)
            setattr(module, name, own)
            if not np.array_equal(other, base):  # else it belongs to what sees
                shows[kind] = max(shows.get(kind, 0.0), relative_error(other, base))
    assert shows or case == "olmo"  # whose norms are a function
    # OPT has an eps of 1e-5, whatever its config says.
    assert all(error > TOLERANCE for error in shows.values()) or case == "opt"


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("case", [case for case in cases() if case not in ONE_PASS])
@pytest.mark.usefixtures("script")
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # `cache` since 5.24
def test_chunks_do_not_change_the_answers(case: str, chunk: int, tmp_path: Path) -> None:
    import torch

    reference = load(case)
    model = from_pretrained(reference.write_checkpoint(tmp_path / case))
    cache, rows = None, []
    with torch.no_grad():
        pieces = torch.from_numpy(reference.prompt_ids)[None].split(chunk, dim=1)
        steps = torch.from_numpy(reference.greedy_ids[:-1])[None].split(1, dim=1)
        for piece in (*pieces, *steps):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0].numpy())
    logits = np.concatenate(rows)
    n_prompt = len(reference.prompt_ids)
    assert relative_error(logits[:n_prompt], reference.logits) < TOLERANCE
    assert relative_error(logits[-1], reference.final_logits) < TOLERANCE
    assert logits[n_prompt - 1 :].argmax(axis=-1).tolist() == reference.greedy_ids.tolist()


@pytest.mark.parametrize("case", MIXTURES)
@pytest.mark.usefixtures("script")
def test_experts_are_found_as_transformers_keeps_them(case: str, tmp_path: Path) -> None:
    """In files that it writes as it has them in memory, a layer's experts are two tensors."""
    model = from_pretrained(load(case).write_checkpoint(tmp_path / case))
    model.save_pretrained(tmp_path / "memory", save_original_format=False)
    ours, checkpoint = open_model(tmp_path / "memory")
    assert any(key.endswith("experts.down_proj") for key in checkpoint.tensors)
    plan_weights(list(ours.weights()), checkpoint, ignorable=ours.ignorable)


@pytest.mark.usefixtures("script")
def test_eager_attention_honours_the_window(tmp_path: Path) -> None:
    """A window of 16 is the token itself and 15 before it: two layers reach back 30 positions."""
    reference = load("mistral_sliding")
    model = from_pretrained(reference.write_checkpoint(tmp_path / "mistral_sliding"))
    other_ids = reference.prompt_ids.copy()
    other_ids[0] += 1
    differs = prompt_logits(model, other_ids) != prompt_logits(model, reference.prompt_ids)
    reached = 2 * (16 - 1) + 1
    assert differs.any(axis=1).tolist() == [i < reached for i in range(len(other_ids))]
