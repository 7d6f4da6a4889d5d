"""Make the stored LoRA adapters in tests/data/adapters, and PEFT's answers with them.

    python scripts/make_lora_references.py [CASE ...]

Needs torch, transformers and peft. Each case is an adapter of random values for one of the models
in tests/data/models, as PEFT's save_pretrained writes it, and

reference.npz  prompt_ids    int64 [20]
               logits        float32 [4, vocab], after every fifth token of the prompt
               greedy_ids    int64 [12], how generate() goes on
               final_logits  float32 [vocab], the logits that chose greedy_ids[-1]

Everything is computed in float32, from weights and adapters as their files round them.
"""

import argparse
import itertools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"

PROMPT_TOKENS, EVERY, GREEDY_STEPS = 20, 5, 12
MIN_MARGIN, MIN_DISTINCT = 1e-3, 6  # see make_references.py


@dataclass(frozen=True)
class Case:
    """An adapter: what LoraConfig is given, and the dtype that it is stored in."""

    model: str
    config: dict[str, Any]
    dtype: str = "float32"


LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

CASES = {
    # Most adapters on the hub: attention alone.
    "llama": Case("llama", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    # One layer of two, and the head, which is tied.
    "llama_head": Case(
        "llama",
        {
            "r": 8,
            "lora_alpha": 8,
            "target_modules": ["k_proj", "o_proj", "gate_proj", "down_proj", "lm_head"],
            "exclude_modules": r".*\.layers\.0\..*",
        },
        "float16",
    ),
    # Biases; ranks and alphas of their own, one for all layers, one for a single module.
    "qwen2": Case(
        "qwen2",
        {
            "r": 3,
            "lora_alpha": 5,
            "use_rslora": True,
            "target_modules": LINEAR,
            "rank_pattern": {"down_proj": 6, "layers.1.self_attn.q_proj": 2},
            "alpha_pattern": {"^model.layers.0.mlp.up_proj": 9, "v_proj": 3},
        },
        "bfloat16",
    ),
    # Tensors that are fused in the model itself; a head that is not tied.
    "phi3": Case(
        "phi3",
        {
            "r": 4,
            "lora_alpha": 4,
            "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"],
        },
    ),
    # q, k and v side by side for each head, layer norms, blocks in parallel.
    "gpt_neox": Case(
        "gpt_neox",
        {
            "r": 2,
            "lora_alpha": 3,
            "target_modules": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
        },
    ),
    # Matrices that lie transposed; q, k and v in one.
    "gpt2": Case(
        "gpt2",
        {
            "r": 4,
            "lora_alpha": 6,
            "fan_in_fan_out": True,
            "target_modules": ["c_attn", "c_proj", "c_fc"],
        },
    ),
}


def random_adapter(case: Case, rng: np.random.Generator) -> Any:
    """The model with an adapter that changes a lot."""
    model = AutoModelForCausalLM.from_pretrained(
        DATA / "models" / case.model, dtype=torch.float32, attn_implementation="eager"
    )
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **case.config))
    adapted.peft_config["default"].base_model_name_or_path = f"models/{case.model}"
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                columns = parameter.shape[1] if "lora_A" in name else 4
                values = torch.from_numpy(rng.normal(0, columns**-0.5, tuple(parameter.shape)))
                parameter.copy_(values.to(getattr(torch, case.dtype)))
    return adapted.eval()


def answers(model: Any, prompt_ids: np.ndarray[Any, Any]) -> tuple[dict[str, Any], float]:
    """The arrays of reference.npz, and the least margin of the greedy tokens."""
    ids = torch.from_numpy(prompt_ids)[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=GREEDY_STEPS,
            output_logits=True,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
    steps = torch.cat(out.logits)
    best = steps.topk(2).values
    margin = float(((best[:, 0] - best[:, 1]) / steps.norm(dim=1)).min())
    return {
        "prompt_ids": prompt_ids,
        "logits": logits[EVERY - 1 :: EVERY].numpy(),
        "greedy_ids": out.sequences[0, len(prompt_ids) :].numpy(),
        "final_logits": steps[-1].numpy(),
    }, margin


def make(name: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """Write one case into `folder` (replaced), from the first seed with clear margins. Returns the
    seed and the arrays written."""
    case = CASES[name]
    for seed in itertools.count():
        rng = np.random.default_rng(seed)
        model = random_adapter(case, rng)
        prompt_ids = rng.integers(3, model.config.vocab_size, PROMPT_TOKENS)
        reference, margin = answers(model, prompt_ids)
        tokens = reference["greedy_ids"].tolist()
        telling = len(tokens) == GREEDY_STEPS and len(set(tokens)) >= MIN_DISTINCT
        if margin >= MIN_MARGIN and telling:
            break
    shutil.rmtree(folder, ignore_errors=True)
    for parameter_name, parameter in model.named_parameters():
        dtype = case.dtype if "lora_" in parameter_name else "float16"  # copies of whole modules
        parameter.data = parameter.data.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"].sort()  # a set
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    np.savez_compressed(folder / "reference.npz", **reference)
    return seed, reference


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the stored references of the LoRA tests.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    names = parser.parse_args().cases or list(CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; the cases are {', '.join(CASES)}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name in names:
        folder = DATA / "adapters" / name
        seed, reference = make(name, folder)
        size = sum(file.stat().st_size for file in folder.iterdir())
        distinct = len(set(reference["greedy_ids"].tolist()))
        print(f"{name:12} seed {seed:3}  {distinct} distinct tokens  {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
