"""Make the stored references in tests/data/models: tiny random models and transformers' answers.

    python scripts/make_references.py [CASE ...]

Needs torch and transformers (`pip install infer-wgpu[reference]`). Each case is a folder whose
config.published.json was written by hand, as most files on the hub spell it: rope_theta,
rope_scaling, torch_dtype. The script makes all else in it:

config.json            as the installed transformers writes it: rope_parameters, dtype, layer_types
*.safetensors          the weights as save_pretrained writes them; of several shards also the index
reference.npz          prompt_ids      int64 [prompt]
                       logits          float32 [prompt, vocab], one pass over the whole prompt
                       greedy_ids      int64 [steps], how generate(), with its cache, goes on
                       greedy_margins  float32 [steps], (best - second best logit) / norm of logits
                       final_logits    float32 [vocab], the logits that chose greedy_ids[-1]
                       routing_margin  float32, only with a choice of experts: the least (last
                                       chosen - first other logit) / norm of logits of a router
long.npz               of some: the same for a prompt of 1,200 tokens, which takes several pages of
                       the cache and several chunks; of its logits LONG_ROWS, as `rows`
hidden.npz             of some: float32 [prompt, hidden_size], the last hidden states of the prompt
batch.npz              of one of each kind: prompts of BATCH_PROMPTS tokens, each answered alone:
                       prompt_ids      int64 [all prompts], one after the other
                       lengths         int64 [prompts]
                       greedy_ids      int64 [prompts, steps]
                       rows            int64 [rows], BATCH_ROWS
                       logits          float32 [prompts, rows, vocab], the logits that chose
                                       greedy_ids[:, rows]

Everything is computed in float32 with eager attention, from the weights as the checkpoint rounds
them. A float64 run would say little more: transformers computes norms, the rope tables and softmax
in float32 in any case.

Dynamic NTK rope is the one feature whose numbers depend on how a sequence was fed. transformers
takes the frequencies of a pass from the position where the pass ends, and the keys in the cache
keep the frequencies they were written with. Well defined are:

- nothing beyond max_position_embeddings: ordinary rope;
- one token per pass beyond max_position_embeddings: position p is rotated for length p + 1, however
  the tokens before that limit were cut into passes (case llama_rope_dynamic_decode);
- a prompt of n > max_position_embeddings tokens in one pass: every position is rotated for length
  n, so that its logits depend on n; then decode steps as above (case llama_rope_dynamic).

A prompt that passes the limit in several chunks gives other numbers for other chunk sizes. And a
model keeps the frequencies of the longest sequence it has seen until a shorter one fits within the
limit, so that each model here answers once.

LongRoPE has one set of frequencies for sequences up to original_max_position_embeddings and
another for longer ones, which then turns all of their positions. Well defined are therefore a
prompt in one pass, and generate(), which drops its cache when the sequence passes the limit.
phi3_longrope_switch passes it while it answers.

Configs have common sizes, unless a case is about others: every size makes kernels of its own, and
compiling them is what the tests of models wait for. A vocabulary of 211 is no multiple of anything;
with a large eps a wrong one shows. A case without a suffix is built like most models of its type.
Where there are several, or where that says too little:

cwm                       the first layer of four sees everything
deepseek_v2               as V2-Lite: one projection of queries, YaRN
deepseek_v2_groups        as V2: two projections, and groups of experts
ernie4_5_moe_bias         also of the head, which is tied
falcon_groups             as the 40B model: heads of keys with several of queries, and two norms
gemma4                    as the smallest: inputs of layers, keys and values that layers share
gemma4_text               as the largest: keys that are the values too, nothing but the tokens
gpt_neox_sequential       the blocks one after the other, and the 20B model's activation
granitemoehybrid_experts  experts beside the MLP, no positions
granitemoehybrid_mamba    a Mamba layer with all of its biases, and experts
lfm2_bias                 as transformers 5 says it; biases, more taps, and a convolution last
llama_f32                 as the files of the first llama: no num_key_value_heads, no rope key
llama_rope_llama3         head_dim is not hidden_size / heads; all three bands of frequencies occur
mistral                   rows of 172 values, which is no multiple of 16 bytes
nemotron_h_latent         all biases, and experts that see less than all of an activation
olmo2                     one key-value head: a norm over all keys has the width of a head
qwen2                     a window is given, and use_sliding_window says that it does not apply
qwen2_5_vl, qwen2_vl      the text model's keys are at the top
qwen3_moe_dense           the second layer has experts; the others are dense, each for its reason
smollm3_sliding           no_rope_layer_interval says which layers turn not, but have the window
stablelm_norms            as the 12B model
"""

import argparse
import itertools
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "models"
PUBLISHED = "config.published.json"

PROMPT_TOKENS = 45
GREEDY_STEPS = 32
LONG_TOKENS = 1200
# Around the ends of chunks (512, and 128 where all rows have logits) and of every fourth page.
LONG_ROWS = [0, 127, 128, 255, 256, 257, 511, 512, 513, 767, 768, 1023, 1024, 1199]
# The longest comes to another page, of 64 positions, while it is answered, at BATCH_ROWS[2].
BATCH_PROMPTS = [1, 5, 18, 45, 96, 250]
BATCH_STEPS = 12
BATCH_ROWS = [0, 1, 7, 11]

# A relative error of 1e-5 moves the difference of two logits by at most sqrt(2) * 1e-5 of their
# norm, so with this margin equal tokens follow from equal logits.
MIN_MARGIN = 3e-4
# The least margin of a router's logits: an expert more or less is another model.
MIN_ROUTING_MARGIN = 1e-4
# A continuation that repeats a few tokens would prove little: of GREEDY_STEPS, of BATCH_STEPS.
MIN_DISTINCT = 12
MIN_DISTINCT_BATCH = 5


@dataclass(frozen=True)
class Case:
    """One tiny model; config is its config.published.json. The embeddings' standard deviation is
    `embedding`. stacked: the experts of a layer are two tensors in the file, as in memory.
    transposed: each of their matrices is, as the hub has them. long, hidden, batch: with long.npz,
    with hidden.npz, with batch.npz."""

    config: dict[str, Any]
    shards: int = 1
    embedding: float = 0.1
    stacked: bool = False
    transposed: bool = False
    long: bool = False
    hidden: bool = False
    batch: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config["torch_dtype"])  # type: ignore[no-any-return]

    @property
    def vocab_size(self) -> int:
        return int(self.config.get("text_config", self.config)["vocab_size"])


# Options of cases that are unlike others, where their name does not say so.
_SMALL: dict[str, Any] = {"embedding": 0.02}
OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"batch": True},
    "deepseek_v3": {"long": True},
    "falcon": _SMALL,
    "gemma": _SMALL,
    "gemma2": _SMALL | {"batch": True},
    "gemma3": _SMALL,
    "gemma3_text": _SMALL,
    "gemma3_text_yarn": _SMALL,
    "gemma4": _SMALL,
    "gemma4_text": _SMALL,
    "gemma4_text_experts": _SMALL,
    "gemma4_unified": _SMALL,
    "gpt2": _SMALL,
    "gpt_oss": {"batch": True},
    "granitemoehybrid_mamba": {"batch": True},
    "lfm2": {"batch": True},
    "llama": {"long": True, "hidden": True, "batch": True},
    "llama_rope_llama3": {"shards": 2},
    "minicpm3": _SMALL,
    "mixtral": {"long": True},
    "persimmon": {"embedding": 1.0},
    "qwen3_5_moe": {"stacked": True},  # as published
    "qwen3_5_text": {"long": True, "hidden": True},
    "qwen3_moe": {"batch": True},
    "qwen3_next": {"batch": True},
    # Transposed as published, too. No matrix is square: transformers goes by the shapes.
    "qwen3_vl_moe": {"transposed": True},
    "vaultgemma": _SMALL,
}


def find_cases() -> dict[str, Case]:
    """All cases by name."""
    files = sorted(DATA.glob(f"*/{PUBLISHED}"))
    return {
        file.parent.name: Case(json.loads(file.read_text()), **OPTIONS.get(file.parent.name, {}))
        for file in files
    }


CASES = find_cases()


class MiMoConfig(Qwen2Config):
    """The config of MiMo's repositories; transformers does not have it."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig


AutoConfig.register("mimo", MiMoConfig)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)


def transformers_config(published: Mapping[str, Any]) -> PreTrainedConfig:
    """Returns transformers' config for a config in the published spelling."""
    # for_model keeps nested dicts and fills them in: it gets its own.
    keys: dict[str, Any] = json.loads(json.dumps(published))
    return AutoConfig.for_model(keys.pop("model_type"), **keys)


def auto_class(config: PreTrainedConfig) -> Any:
    """Returns the auto class for such a config: for a model that also sees, the one that has all of
    its parts."""
    sees = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def random_weight(
    name: str, shape: tuple[int, ...], rng: np.random.Generator, embedding: float
) -> NDArray[Any]:
    """float64 values for spread logits and peaked attention; no norm or bias is without effect."""
    factors = ("norm.weight", "layernorm_1.weight", "layernorm_2.weight", "scale", "layer_scalar")
    factors += ("ln_1.weight", "ln_2.weight", "ln_f.weight", "ln_attn.weight", "ln_mlp.weight")
    factors += ("post_norm1.weight", "post_norm2.weight")
    if name.endswith(factors) or ".norms." in name:
        return rng.uniform(0.5, 1.5, shape)
    if name.endswith(".gate_up_proj_bias"):
        return rng.normal(0.0, 3.0, shape)  # some gates and ups beyond their limits
    if name.endswith("bias"):
        return rng.normal(0.0, 0.2, shape)
    if name.endswith(".sinks"):
        return rng.normal(1.0, 1.0, shape)
    if name.endswith(
        (
            "embed_tokens.weight",
            "embed_positions.weight",
            "wte.weight",
            "wpe.weight",
            "word_embeddings.weight",
        )
    ):
        # Small beside what the layers add, or tied embeddings would repeat the last token for ever.
        return rng.normal(0.0, embedding, shape)
    if name.endswith("router.proj.weight"):  # its logits are divided by the root of the width
        return rng.normal(0.0, 1.5, shape)
    if name.endswith("A_log"):  # so that early tokens matter
        return rng.uniform(-4.0, 0.0, shape)
    peaked = ("q_proj.weight", "k_proj.weight", "qkv_proj.weight", "mlp.gate.weight")
    peaked += ("router.weight", "c_attn.weight", "query_key_value.weight")
    gain = 1.5 if name.endswith(peaked) else 1.0
    return rng.normal(0.0, gain * shape[-1] ** -0.5, shape)


def random_model(case: Case, rng: np.random.Generator) -> PreTrainedModel:
    """A float32 model whose weights are exact in the case's dtype."""
    config = transformers_config(case.config)
    model = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        kept = ("_bias", "layer_scalar")
        buffers = (named for named in model.named_buffers() if named[0].endswith(kept))
        lying = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, Conv1D)}
        for name, parameter in [*model.named_parameters(), *buffers]:
            own = parameter.T if name in lying else parameter
            values = random_weight(name, tuple(own.shape), rng, case.embedding)
            weight = torch.from_numpy(values)
            own.copy_(weight.to(case.dtype))
        for module in model.modules():
            if hasattr(module, "kv_a_proj_with_mqa"):
                # The norms of latents have an eps of their own, which only shows on small values.
                module.kv_a_proj_with_mqa.weight[: len(module.kv_a_layernorm.weight)] /= 32
                if getattr(module, "q_a_proj", None) is not None:
                    module.q_a_proj.weight /= 32
    return model.eval()


_ROUTERS = ("TopKRouter", "TopkRouter", "TextRouter", "TokenChoiceRouter", "MoEV1Gate")


class RoutingMargins:
    """How clearly a model's routers choose while it runs, in `with`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.routers = [m for m in model.modules() if type(m).__name__.endswith(_ROUTERS)]
        self.margins: list[float] = []

    def __enter__(self) -> "RoutingMargins":
        self.hooks = [router.register_forward_hook(self.see) for router in self.routers]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for hook in self.hooks:
            hook.remove()

    @property
    def least(self) -> dict[str, np.float32]:
        """The routing_margin, of a model with routers."""
        return {"routing_margin": np.float32(min(self.margins))} if self.margins else {}

    def see(self, router: Any, args: Any, output: Any) -> None:
        if hasattr(router, "per_expert_scale"):
            logits, chosen = output[0].log(), router.config.top_k_experts
            logits = logits - logits.mean(-1, keepdim=True)
        else:
            logits, chosen = output[0], router.top_k
        if hasattr(router, "moe_statics"):
            logits = router.moe_statics(logits.softmax(-1))
        elif hasattr(router, "e_score_correction_bias"):
            logits = logits.sigmoid() + router.e_score_correction_bias
        elif len(args) > 1 and args[1] is not None:  # the correction
            logits = logits.sigmoid() + args[1]
        if chosen < logits.shape[-1]:
            best = logits.topk(chosen + 1).values
            margins = (best[..., -2] - best[..., -1]) / logits.norm(dim=-1)
            self.margins.append(float(margins.min()))


def continuation(
    model: PreTrainedModel, prompt_ids: NDArray[np.int64], steps: int
) -> dict[str, NDArray[Any]]:
    """greedy_ids, greedy_margins, and step_logits: float32 [steps, vocab]."""
    ids = torch.from_numpy(prompt_ids)[None]
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=steps,
            output_logits=True,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
    step_logits = torch.cat(out.logits)
    best = step_logits.topk(2).values
    margins = (best[:, 0] - best[:, 1]) / step_logits.norm(dim=1)
    return {
        "greedy_ids": out.sequences[0, len(prompt_ids) :].numpy(),
        "greedy_margins": margins.numpy(),
        "step_logits": step_logits.numpy(),
    }


def answers(model: PreTrainedModel, prompt_ids: NDArray[np.int64]) -> dict[str, Any]:
    """The arrays of reference.npz. The model must be fresh (see dynamic rope above)."""
    routing = RoutingMargins(model)
    with torch.no_grad(), routing:
        logits = model(torch.from_numpy(prompt_ids)[None]).logits[0]
        rest = continuation(model, prompt_ids, GREEDY_STEPS)
    step_logits = rest.pop("step_logits")
    return {
        "prompt_ids": prompt_ids,
        "logits": logits.numpy(),
        **rest,
        "final_logits": step_logits[-1],
    } | routing.least


def is_fair(
    reference: Mapping[str, Any], steps: int = GREEDY_STEPS, distinct: int = MIN_DISTINCT
) -> bool:
    """Whether equal greedy tokens are a fair, telling test: clear margins, no stop, variety."""
    greedy_ids = reference["greedy_ids"]
    return (
        len(greedy_ids) == steps
        and float(reference["greedy_margins"].min()) >= MIN_MARGIN
        and len(np.unique(greedy_ids)) >= distinct
        and float(reference.get("routing_margin", np.inf)) >= MIN_ROUTING_MARGIN
    )


def transpose_experts(file: Path) -> None:
    tensors = load_file(file)
    for key in tensors:
        if ".experts." in key:
            tensors[key] = tensors[key].transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


def long_answers(model: PreTrainedModel, seed: int) -> dict[str, Any]:
    """The arrays of long.npz, from the first seed, counted from `seed`, whose prompt is fair."""
    for prompt_seed in itertools.count(seed):
        rng = np.random.default_rng(prompt_seed)
        prompt_ids = rng.integers(3, model.config.get_text_config().vocab_size, LONG_TOKENS)
        reference = answers(model, prompt_ids)
        if is_fair(reference):
            break
    return reference | {"rows": np.array(LONG_ROWS), "logits": reference["logits"][LONG_ROWS]}


def hidden_states(model: PreTrainedModel, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """The hidden states after the last norm, from one pass, [tokens, hidden_size]."""
    with torch.no_grad():
        out = model(torch.from_numpy(token_ids)[None], output_hidden_states=True)
    states: NDArray[np.float32] = out.hidden_states[-1][0].numpy()
    return states


def batch_answers(model: PreTrainedModel, seed: int) -> dict[str, Any]:
    """The arrays of batch.npz; each prompt is from the first seed, counted from `seed`, that is
    fair."""
    prompts, rests = [], []
    for length in BATCH_PROMPTS:
        for prompt_seed in itertools.count(seed):
            rng = np.random.default_rng([prompt_seed, length])
            prompt_ids = rng.integers(3, model.config.get_text_config().vocab_size, length)
            with RoutingMargins(model) as routing:
                rest = continuation(model, prompt_ids, BATCH_STEPS)
            if is_fair(rest | routing.least, BATCH_STEPS, MIN_DISTINCT_BATCH):
                break
        prompts.append(prompt_ids)
        rests.append(rest)
    return {
        "prompt_ids": np.concatenate(prompts),
        "lengths": np.array(BATCH_PROMPTS),
        "greedy_ids": np.stack([rest["greedy_ids"] for rest in rests]),
        "rows": np.array(BATCH_ROWS),
        "logits": np.stack([rest["step_logits"][BATCH_ROWS] for rest in rests]),
    }


def make(name: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """Write one case into `folder`, beside its config, from the first seed that is fair.

    Returns the seed and the arrays written.
    """
    case = CASES[name]
    for seed in itertools.count():
        rng = np.random.default_rng(seed)
        prompt_ids = rng.integers(3, case.vocab_size, PROMPT_TOKENS)
        model = random_model(case, rng)
        reference = answers(model, prompt_ids)
        if is_fair(reference):
            break
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PUBLISHED).write_text(json.dumps(case.config, indent=2) + "\n")
    for file in folder.iterdir():
        if file.name != PUBLISHED:
            file.unlink()
    if case.long:
        np.savez_compressed(folder / "long.npz", **long_answers(model, seed))
    if case.hidden:
        np.savez_compressed(folder / "hidden.npz", hidden=hidden_states(model, prompt_ids))
    if case.batch:
        np.savez_compressed(folder / "batch.npz", **batch_answers(model, seed))
    model.to(case.dtype)
    # A little above an equal share, since shards end between tensors.
    shard_bytes = 1.1 * sum(p.nbytes for p in model.parameters()) / case.shards
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(
            saved, max_shard_size=int(shard_bytes), save_original_format=not case.stacked
        )
        if case.transposed:
            transpose_experts(Path(saved, "model.safetensors"))
        for file in [Path(saved, "config.json"), *Path(saved).glob("*.safetensors*")]:
            shutil.copyfile(file, folder / file.name)
    np.savez_compressed(folder / "reference.npz", **reference)
    return seed, reference


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the stored references of the model tests.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    names = parser.parse_args().cases or list(CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; the cases are {', '.join(CASES)}")
    logging.set_verbosity_error()  # it would warn of every step beyond max_position_embeddings
    logging.disable_progress_bar()
    for name in names:
        seed, reference = make(name, DATA / name)
        size = sum(file.stat().st_size for file in (DATA / name).iterdir())
        margin = float(reference["greedy_margins"].min())
        distinct = len(np.unique(reference["greedy_ids"]))
        print(
            f"{name:28} seed {seed:4}  least margin {margin:.1e}  "
            f"{distinct} distinct tokens  {size / 1024:.0f} KiB"
        )


if __name__ == "__main__":
    main()
