"""Make tests/data/sampling: logits before and after transformers' logits processors, and the fields
of its generation configs.

    python scripts/make_sampling_references.py

Needs torch and transformers (`pip install infer-wgpu[reference]`). The processors are those that
transformers' generate() builds from a GenerationConfig, in its order. processors.npz holds:

    logits.N   float32 [vocab]: of several shapes and sizes
    ids.N      int64: the prompt, for the repetition penalty
    log_softmax.N  float32 [vocab]
    cases      JSON of [[N, settings], ...]: which logits, and what GenerationConfig was given
    scores.I   float32 [vocab] of case I: logits processed, -inf for what does not survive

generation_config.json has every field with the value that generate() takes where it is not given.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "sampling"

SETTINGS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 30, "top_p": 0.77},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.7, "top_k": 200, "top_p": 0.6},
    {"repetition_penalty": 1.3, "top_k": 25},
    {"repetition_penalty": 0.8, "temperature": 0.9, "top_p": 0.8},
    {"suppress_tokens": [5, 17, 40, 41], "top_k": 40},
    {"bad_words_ids": [[17], [2], [9], [30]], "eos_token_id": [2, 9], "top_p": 0.9},
    {
        "sequence_bias": [[[17], 3.0], [[5], -1.0], [[6], -200.0]],
        "bad_words_ids": [[6], [8]],
        "suppress_tokens": [8, 5],
        "repetition_penalty": 1.2,
        "temperature": 0.8,
        "top_k": 60,
    },
    {"sequence_bias": [[[3], 2.5], [[7], -4.0], [[30], 100.0], [[31], 99.0]], "top_p": 0.97},
]
# A boundary of top-p nearer than this to the sum that decides would be decided by rounding.
MIN_MARGIN = 3e-6


def all_logits() -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(20)
    result = []
    for vocab in (331, 2111):
        peaked = rng.normal(0, 2, vocab)
        peaked[17] += 12
        shapes = [
            rng.normal(-2, 3, vocab),
            peaked,
            np.full(vocab, 1.5),
            rng.normal(0, 1e-3, vocab),
            np.round(rng.normal(0, 2, vocab)),  # many ties
        ]
        result += [shape.astype(np.float32) for shape in shapes]
    return result


def tiny_model() -> LlamaForCausalLM:
    """A tiny model, because generate() needs one."""
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    return LlamaForCausalLM(config)


def generate_processors(settings: dict[str, Any], prompt_tokens: int) -> LogitsProcessorList:
    """Returns the processors that generate() applies for these settings, everything else off."""
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(do_sample=True, **(off | settings))
    model = tiny_model()
    model._prepare_special_tokens(config)
    return model._get_logits_processor(config, input_ids_seq_length=prompt_tokens)


def processed(
    logits: NDArray[np.float32], ids: NDArray[np.int64], settings: dict[str, Any]
) -> NDArray[np.float32]:
    processors = generate_processors(settings, len(ids))
    result: NDArray[np.float32] = processors(
        torch.from_numpy(ids)[None], torch.from_numpy(logits)[None]
    )[0].numpy()
    return result


def check_margin(
    logits: NDArray[np.float32], ids: NDArray[np.int64], settings: dict[str, Any]
) -> None:
    """Refuse a case whose top-p another order of summation could decide differently."""
    if not 0 < settings.get("top_p", 0) < 1:
        return
    before = {name: value for name, value in settings.items() if name not in ("top_p", "min_p")}
    scores = processed(logits, ids, before).astype(np.float64)
    weights = np.sort(np.exp(scores - scores.max()))
    margin = np.abs(np.cumsum(weights) / weights.sum() - (1 - settings["top_p"])).min()
    if margin < MIN_MARGIN:
        raise SystemExit(f"{settings}: margin {margin:.1e}; choose other logits or another top_p")


def references() -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    cases: list[tuple[int, dict[str, Any]]] = []
    rng = np.random.default_rng(21)
    for n, logits in enumerate(all_logits()):
        ids = rng.integers(0, len(logits), 40)
        arrays[f"logits.{n}"], arrays[f"ids.{n}"] = logits, ids
        arrays[f"log_softmax.{n}"] = torch.log_softmax(torch.from_numpy(logits), 0).numpy()
        for settings in SETTINGS if len(logits) < 1000 else SETTINGS[3:9]:
            check_margin(logits, ids, settings)
            arrays[f"scores.{len(cases)}"] = processed(logits, ids, settings)
            cases.append((n, settings))
    arrays["cases"] = np.array(json.dumps(cases))
    return arrays


def fields() -> dict[str, Any]:
    """Every field that a generation_config.json can have, and its default."""
    config = GenerationConfig()
    names = [name for name in vars(config) if not name.startswith("_")]
    return {name: config._get_default_generation_params().get(name) for name in names}


if __name__ == "__main__":
    DATA.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(DATA / "processors.npz", allow_pickle=False, **references())
    path = DATA / "generation_config.json"
    path.write_text(json.dumps(fields(), indent=2) + "\n", encoding="utf-8")
