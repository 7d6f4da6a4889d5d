"""The conversions of llama.cpp's converter for each architecture: the names of its tensors and
metadata on the hub, and values that no file has because llama.cpp knows them.

| general.architecture                | what is peculiar                                           |
| ----------------------------------- | ---------------------------------------------------------- |
| llama, arcee, granite, granitemoe,  | rows of q and k are permuted: see gguf_config.py           |
| granitehybrid, mistral3, olmo,      |                                                            |
| smollm3                             |                                                            |
| gemma, gemma2, gemma3, nemotron     | one was added to the weights of norms                      |
| gemma2, gemma3                      | the largest model has another scale of attention           |
| gemma2, gemma3, cohere2, exaone4    | every so many layers have no window                        |
| gemma3, gemma4                      | layers with a window have a rope of their own              |
| gemma4                              | and heads of another width and number; rope_freqs says     |
|                                     | which pairs are rotated in the others                      |
| phi3, chatglm, glm4                 | ffn_up is gate and up                                      |
| phi3                                | rope_factors_long and rope_factors_short are of LongRoPE   |
| gptneox                             | attn_qkv is all of q, then all of k, then all of v         |
| hunyuan-dense                       | rope.freq_base has taken the scaling in                    |
| smollm3                             | every fourth layer is not rotated                          |
| llama with experts (Mixtral),       | experts are stacked; whether the weights of those chosen   |
| qwen2moe, qwen3moe, olmoe           | are made to add up to one is known by the architecture     |
| gpt-oss                             | gate and up, which alternate on the hub, are apart; no     |
|                                     | file says that YaRN's bounds are not rounded               |
| lfm2, lfm2moe                       | layers without heads of keys have a short convolution; the |
|                                     | last norm is called that of the embeddings                 |
| qwen3next, qwen35, qwen35moe        | one was added to the weights of norms but for ssm_norm;    |
|                                     | ssm_a is -exp(A_log)                                       |
| qwen3next                           | in_proj_qkvz is apart, its parts each in one piece, but    |
|                                     | not in the first files (ssm_in)                            |
| qwen35, qwen35moe                   | of the heads that share a key, the first of each key come  |
|                                     | first: rows, and columns of ssm_out                        |
| apertus                             | xIELU's numbers are metadata                               |
| mistral3                            | only those of Ministral 3 have a scale of temperature      |
| olmo2 with a window (OLMo 3)        | layers with a window have the rope without its scaling     |
| granitemoe, granitehybrid           | gate and up, which are one tensor on the hub, are apart    |
| granite                             | Granite 4's files have sizes of Mamba layers where there   |
|                                     | are none, and what their heads are for each layer          |
| granitehybrid                       | layers without heads of keys are Mamba; ssm_a is           |
|                                     | -exp(A_log), and in a column like ssm_d                    |
| stablelm                            | the norms of all heads of q, and of k, are stacked         |
| gpt2                                | matrices are not transposed                                |
| deepseek2                           | DeepSeek-V2, V3 and GLM-4.7-Flash; kv_b_proj is in two     |
|                                     | parts as MLX has them, but not in the first files          |

To add one, give it an entry in CONVERSIONS, and in tests/models/test_gguf.py what the converter
does with its metadata and tensors: the test writes stored models with the format's own library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from infer.kernels.errors import UnsupportedError
from infer.models.loading.config import RawConfig, shown
from infer.models.loading.formats.gguf import Gguf

Config = dict[str, Any]


@dataclass(frozen=True)
class Conversion:
    """The way in which the GGUF files of one architecture are read.

    model_type: that of config.json.
    names: of tensors on the hub, where these are others than in NAMES. "{}" is the number of an
        expert or a head.
    layers: what the names of a layer's tensors begin with there.
    keys: of metadata, and what config.json calls them.
    values: of config.json, the same in all models.
    more: values that follow from others and from what tensors there are.
    eps: what config.json calls the epsilon of norms; layer_norm: of which kind these are.
    permuted: rows of q and k are in another order than on the hub. norm_added: what was added to
        the weights of norms.
    pattern: where layers have a window: every so many layers have none, or 0 where the model knows.
    local_theta: of the rope of layers with a window, where they have their own. proportional: in
        the others the last pairs of a head are not rotated.
    experts: whether layers have them. gating: what expert_gating_func may be, 1 for a softmax or 2
        for a sigmoid; the first is meant where a file does not say.
    latent: whether attention is multi-head latent attention.
    stateful: what layers without heads of keys and values are called in layer_types.
    by_layer: keys whose values may differ from layer to layer, which `more` reads. read: other keys
        that only `more` reads.
    tiled: of a gated delta net's heads, the first of each key come first, then the second.
    ignored: keys of metadata that say nothing reliable, or nothing of text.
    """

    model_type: str
    names: dict[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    keys: Mapping[str, str] = field(default_factory=dict)
    values: Config = field(default_factory=dict)
    more: Callable[[Gguf, Config], Config] = lambda gguf, config: {}
    eps: str = "rms_norm_eps"
    layer_norm: bool = False
    permuted: bool = False
    norm_added: float = 0.0
    pattern: int | None = None
    local_theta: float | None = None
    proportional: bool = False
    experts: bool = False
    gating: tuple[int, ...] = (1, 0)
    latent: bool = False
    stateful: str = ""
    by_layer: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    tiled: bool = False
    ignored: tuple[str, ...] = ()


NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GATE_UP = {"ffn_up": "mlp.gate_up_proj"}
_AFTER = {  # norms of what attention and MLP give
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA2 = _AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
_GEMMA4 = _GEMMA2 | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_exps": "experts.{}.gate_proj",
    "ffn_up_exps": "experts.{}.up_proj",
    "ffn_down_exps": "experts.{}.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_GLM4 = _GATE_UP | {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_PHI = {
    "output_norm": "model.final_layernorm",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_GPT_NEOX = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_LFM2 = {
    "token_embd_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2_MOE = _LFM2 | {
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
}
_DELTA_NET = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_APERTUS = {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
_SHARED = {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
_DEEPSEEK = _SHARED | {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
_DEEPSEEK2 = _DEEPSEEK | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
}
_ERNIE_MOE = _SHARED | {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"}
_GRANITE_MOE = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_GRANITE_SHARED = _GRANITE_MOE | {
    f"ffn_{part}_shexp": f"mlp.{part}_proj" for part in ("gate", "up", "down")
}
_GRANITE_HYBRID = _GRANITE_SHARED | {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_dt": "mamba.dt_bias",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_SSM = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "linear_value_head_dim",  # of all heads: see _delta_net
}
_DELTA_KEYS = _SSM | {"full_attention_interval": "full_attention_interval"}
_GROUPS = {  # of experts as DeepSeek-V3 has them
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
_LATENT = {
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.key_length_mla": "qk_head_dim",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",  # a tenth of it
}
_TEMPERATURE = {
    "attention.temperature_scale": "llama_4_scaling_beta",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}
_SECTIONS = ("rope.dimension_sections",)  # for images: text has the same position in all
_VISION = (*_SECTIONS, "n_deepstack_layers")
_SOFTCAPS = {key: key for key in ("attn_logit_softcapping", "final_logit_softcapping")}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_HUNYUAN = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_HUNYUAN_MOE = _HUNYUAN | {
    "ffn_gate_inp": "mlp.gate.wg",
    **{f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_GRANITE_HYBRID_KEYS = _GRANITE | {
    "expert_shared_feed_forward_length": "shared_intermediate_size",
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
    "ssm.inner_size": "mamba_d_head",  # of all heads: see _granite_hybrid
}


def _gemma_scale(largest: int) -> Callable[[Gguf, Config], Config]:
    """The largest model, known by its layers, has another scale of attention than the others."""

    def more(gguf: Gguf, config: Config) -> Config:
        wide = config["hidden_size"] // config["num_attention_heads"]
        is_largest = config["num_hidden_layers"] == largest
        return {"query_pre_attn_scalar": wide if is_largest else config["head_dim"]}

    return more


def _gemma4(gguf: Gguf, config: Config) -> Config:
    """Returns the keys of layers with a window that differ, and whether the MLPs of layers that
    share keys and values are twice as wide."""
    raw, layers = RawConfig(gguf.metadata, str(gguf.file)), config["num_hidden_layers"]
    head_dim = raw.size("gemma4.attention.key_length_swa")
    shared = raw.get("gemma4.attention.shared_kv_layers", 0, int)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        raw.expect(f"gemma4.{key}", head_dim)
    raw.expect("gemma4.rope.dimension_count", config["head_dim"])
    kinds = config.get("layer_types", [])
    if len(kinds) != layers:
        raise UnsupportedError(
            f"{gguf.file}: gemma4.attention.sliding_window_pattern must say of each of {layers} "
            "layers whether it has a window."
        )
    kv_heads = gguf.numbers("gemma4.attention.head_count_kv", layers, "iu")
    own, wide = (
        {count for count, of in zip(kv_heads, kinds, strict=True) if of == kind}
        for kind in ("sliding_attention", "full_attention")
    )
    if len(own) != 1 or len(wide) != 1:
        raise UnsupportedError(
            f"{gguf.file}: gemma4.attention.head_count_kv = {shown(kv_heads)} is not implemented "
            "(only one number for layers with a window and one for those without, and some of "
            "either)."
        )
    widths = gguf.numbers("gemma4.feed_forward_length", layers, "iu")
    double = widths[-1] != widths[0]
    if widths != widths[:1] * (layers - shared) + [widths[0] * (1 + double)] * shared:
        raise UnsupportedError(
            f"{gguf.file}: gemma4.feed_forward_length = {shown(widths)} is not implemented (only "
            f"one width, or twice as much in the last {shared} layers)."
        )
    whole = kinds.index("full_attention")
    return {
        "head_dim": head_dim,
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": own.pop(),
        "num_global_key_value_heads": wide.pop(),
        "attention_k_eq_v": f"blk.{whole}.attn_v.weight" not in gguf.tensors,
        "use_double_wide_mlp": double,
        "vocab_size_per_layer_input": config["vocab_size"],
    }


def _gemma4_experts(gguf: Gguf, config: Config) -> Config:
    """Returns the values of Gemma 4's config, with experts beside all MLPs."""
    chosen = config["num_experts_per_tok"]
    return _gemma4(gguf, config) | {"enable_moe_block": True, "top_k_experts": chosen}


def _has(name: str) -> Callable[[Gguf, Config], Config]:
    """Whether a file has norms of q and k, under the name that the architecture's family uses."""
    return lambda gguf, config: {name: "blk.0.attn_q_norm.weight" in gguf.tensors}


def _gpt_oss(gguf: Gguf, config: Config) -> Config:
    """The dimensions between which YaRN's ramp lies are not rounded to whole ones."""
    rope = config["rope_parameters"]
    return {"rope_parameters": rope | {"truncate": False}} if "factor" in rope else {}


def _stablelm(gguf: Gguf, config: Config) -> Config:
    """The key of the metadata is wrong in some files; a model with both norms is not parallel."""
    return _has("qk_layernorm")(gguf, config) | {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in gguf.tensors
    }


def _delta_net(gguf: Gguf, config: Config) -> Config:
    """All sizes must be there. The width that is stated is of all heads together."""
    raw = RawConfig(config, str(gguf.file))
    sizes = {name: raw.size(name) for name in _SSM.values()}
    heads = sizes["linear_num_value_heads"]
    return {"linear_value_head_dim": sizes["linear_value_head_dim"] // heads}


def _granite_hybrid(gguf: Gguf, config: Config) -> Config:
    """The width that is stated is of all heads together. Biases are where there are some."""
    if gguf.metadata.get("granitehybrid.rope.scaling.finetuned"):
        raise UnsupportedError(
            f"{gguf.file}: granitehybrid.rope.scaling.finetuned = True is not implemented (only "
            "models without positions, as Granite 4.0 H)."
        )
    raw = RawConfig(config, str(gguf.file))
    heads, inner = raw.size("mamba_n_heads"), raw.size("mamba_d_head")
    return {
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // config["hidden_size"],
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in gguf.tensors),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in gguf.tensors),
        "num_local_experts": None,  # num_experts counts
    }


def _dots1(gguf: Gguf, config: Config) -> Config:
    """The number of experts, by another name."""
    return {"n_routed_experts": config["num_experts"], "num_experts": None}


def _deepseek2(gguf: Gguf, config: Config) -> Config:
    """The same, which model it is, and the widths of a head, which the first files have as those
    of any other. Both factors of YaRN are one number in all published models."""
    sigmoid = any(".exp_probs_b" in name for name in gguf.tensors)
    raw, metadata = (RawConfig(values, str(gguf.file)) for values in (config, gguf.metadata))
    widths = {
        name: raw.size(key, None) or metadata.size(f"deepseek2.attention.{name}_length")
        for name, key in (("key", "qk_head_dim"), ("value", "v_head_dim"))
    }
    rope = config["rope_parameters"]
    if (tenth := raw.get("mscale_all_dim", None, float)) is not None and "factor" in rope:
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * tenth, 6))
    grouped = not sigmoid and raw.size("n_group", 1) > 1
    ungrouped = {"n_group": 1, "routed_scaling_factor": 1.0, "topk_group": 1}
    return {key: config.get(key, value) for key, value in ungrouped.items()} | {
        **_dots1(gguf, config),
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "num_key_value_heads": config["num_attention_heads"],
        "qk_nope_head_dim": widths["key"] - config["qk_rope_head_dim"],
        "v_head_dim": widths["value"],
        "rope_parameters": rope,
        "topk_method": ("group_limited_greedy" if grouped else None),
    }


def _glm4_moe(gguf: Gguf, config: Config) -> Config:
    """Returns the values of GLM 4's config for experts, and whether q and k are normed."""
    return _dots1(gguf, config) | _has("use_qk_norm")(gguf, config)


def _ernie4_5_moe(gguf: Gguf, config: Config) -> Config:
    """Numbers of experts, by other names."""
    chosen = config["num_experts_per_tok"]
    return {"moe_num_experts": config["num_experts"], "moe_k": chosen, "num_experts": None}


def _ministral3(gguf: Gguf, config: Config) -> Config:
    """All of these are keys of the rope on the hub; one of them no file states."""
    own = {key: config.get(key) for key in _TEMPERATURE.values()}
    return {"rope_parameters": config["rope_parameters"] | own | {"mscale": 1.0}}


def _olmo3(gguf: Gguf, config: Config) -> Config:
    """Only layers without a window have an extended rope."""
    rope = config["rope_parameters"]
    local = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")}
    return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}


def _granite(gguf: Gguf, config: Config) -> Config:
    """The MLP of Granite 4 is what its models with experts share. In this family a rope that was
    not finetuned is none."""
    name = gguf.metadata["general.architecture"]
    raw = RawConfig(gguf.metadata, str(gguf.file))
    raw.expect(f"{name}.rope.scaling.finetuned", True)
    shared = raw.get(f"{name}.expert_shared_feed_forward_length", None, int)
    if not shared:
        return {}
    own = "shared_intermediate_size" if config.get("num_experts") else "intermediate_size"
    return {own: shared}


def _gpt2(gguf: Gguf, config: Config) -> Config:
    """Sizes, by other names."""
    return {
        "n_embd": config["hidden_size"],
        "n_head": config["num_attention_heads"],
        "n_inner": config["intermediate_size"],
        "n_layer": config["num_hidden_layers"],
        "n_positions": config["max_position_embeddings"],
    }


def _starcoder(gguf: Gguf, config: Config) -> Config:
    """Returns the values of the config, and whether all heads share keys and values."""
    return _gpt2(gguf, config) | {"multi_query": config["num_key_value_heads"] == 1}


def _hunyuan_moe(gguf: Gguf, config: Config) -> Config:
    """The number of experts for a token, by another name."""
    return {"moe_topk": config["num_experts_per_tok"]}


def _ungated(gguf: Gguf, config: Config) -> Config:
    """Biases are looked for at the gate, which there is none of."""
    return {"mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors}


_HYBRID = Conversion(
    "granitemoehybrid",
    _GRANITE_HYBRID,
    keys=_GRANITE_HYBRID_KEYS,
    more=_granite_hybrid,
    permuted=True,
    stateful="mamba",
)
_GEMMA4_TEXT = Conversion(
    "gemma4_text",
    _GEMMA4,
    keys={
        "attention.shared_kv_layers": "num_kv_shared_layers",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    values={"hidden_activation": "gelu_pytorch_tanh"},
    more=_gemma4,
    pattern=6,
    local_theta=10000.0,
    proportional=True,
    by_layer=("attention.head_count_kv", "feed_forward_length"),
    read=("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"),
)

# general.architecture -> a key of metadata, and how files that have it are read
VARIANTS = {
    "gemma4": (
        "expert_count",
        replace(
            _GEMMA4_TEXT,
            values=_GEMMA4_TEXT.values | {"norm_topk_prob": True},
            more=_gemma4_experts,
            experts=True,
        ),
    ),
    "granitehybrid": ("expert_count", replace(_HYBRID, experts=True)),
    "granitemoe": (
        "expert_shared_feed_forward_length",
        Conversion(
            "granitemoeshared",
            _GRANITE_SHARED,
            keys=_GRANITE,
            more=_granite,
            permuted=True,
            experts=True,
        ),
    ),
    "llama": ("expert_count", Conversion("mixtral", _MIXTRAL, permuted=True, experts=True)),
    "mistral3": (
        "attention.temperature_scale",
        Conversion("ministral3", keys=_TEMPERATURE, more=_ministral3, permuted=True),
    ),
    "olmo2": (
        "attention.sliding_window",
        Conversion("olmo3", _AFTER, more=_olmo3, pattern=4),
    ),
}

_QWEN35 = Conversion(
    "qwen3_5_text",
    _DELTA_NET,
    keys=_DELTA_KEYS,
    more=_delta_net,
    norm_added=1.0,
    tiled=True,
    ignored=_SECTIONS,
)
_QWEN35_MOE = replace(
    _QWEN35, model_type="qwen3_5_moe_text", values={"norm_topk_prob": True}, experts=True
)

# general.architecture -> how it is read
CONVERSIONS = {
    "apertus": Conversion("apertus", _APERTUS, values={"hidden_act": "xielu"}),
    "arcee": Conversion("arcee", values={"hidden_act": "relu2"}, more=_ungated, permuted=True),
    "chatglm": Conversion("glm", _GATE_UP),
    "cohere2": Conversion(
        "cohere2",
        keys={"logit_scale": "logit_scale"},
        eps="layer_norm_eps",
        layer_norm=True,
        pattern=4,
    ),
    "command-r": Conversion(
        "cohere",
        keys={"logit_scale": "logit_scale"},
        more=_has("use_qk_norm"),
        eps="layer_norm_eps",
        layer_norm=True,
    ),
    "deepseek2": Conversion(
        "deepseek_v3",
        _DEEPSEEK2,
        keys=_GROUPS | _LATENT,
        values={"norm_topk_prob": False},
        more=_deepseek2,
        experts=True,
        gating=(1, 0, 2),
        latent=True,
    ),
    "dots1": Conversion(
        "dots1",
        _DEEPSEEK,
        keys=_GROUPS,
        values={"norm_topk_prob": False},
        more=_dots1,
        experts=True,
        gating=(2,),
    ),
    "ernie4_5": Conversion("ernie4_5"),
    "ernie4_5-moe": Conversion(
        "ernie4_5_moe",
        _ERNIE_MOE,
        keys={
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        values={"norm_topk_prob": True},
        more=_ernie4_5_moe,
        experts=True,
    ),
    "exaone4": Conversion("exaone4", _AFTER, pattern=4),
    "gemma": Conversion("gemma", values={"hidden_act": "gelu_pytorch_tanh"}, norm_added=1.0),
    "gemma2": Conversion(
        "gemma2",
        _GEMMA2,
        keys=_SOFTCAPS,
        values={"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096},
        more=_gemma_scale(largest=46),
        norm_added=1.0,
        pattern=2,
    ),
    "gemma3": Conversion(
        "gemma3_text",
        _GEMMA2,
        keys=_SOFTCAPS,
        values={"hidden_activation": "gelu_pytorch_tanh"},
        more=_gemma_scale(largest=62),
        norm_added=1.0,
        pattern=6,
        local_theta=10000.0,
    ),
    "gemma4": _GEMMA4_TEXT,
    "glm4": Conversion("glm4", _GLM4),
    "glm4moe": Conversion(
        "glm4_moe",
        _DEEPSEEK | {"post_attention_norm": "post_attention_layernorm"},
        keys=_GROUPS,
        values={"norm_topk_prob": False},
        more=_glm4_moe,
        experts=True,
        gating=(2,),
    ),
    "gptneox": Conversion(
        "gpt_neox",
        _GPT_NEOX,
        layers="gpt_neox.layers",
        keys={"use_parallel_residual": "use_parallel_residual"},
        values={"hidden_act": "gelu"},  # of Pythia; GPT-NeoX-20B has the approximation by tanh
        eps="layer_norm_eps",
        layer_norm=True,
    ),
    "gpt-oss": Conversion("gpt_oss", _GPT_OSS, more=_gpt_oss, pattern=0, experts=True),
    "gpt2": Conversion(
        "gpt2",
        _GPT2,
        layers="transformer.h",
        values={"activation_function": "gelu_new"},
        more=_gpt2,
        eps="layer_norm_epsilon",
        layer_norm=True,
    ),
    "granite": Conversion(
        "granite",
        keys=_GRANITE,
        more=_granite,
        permuted=True,
        read=("expert_shared_feed_forward_length",),
        ignored=tuple(_SSM),
    ),
    "granitehybrid": _HYBRID,
    "granitemoe": Conversion(
        "granitemoe", _GRANITE_MOE, keys=_GRANITE, more=_granite, permuted=True, experts=True
    ),
    "hunyuan-dense": Conversion("hunyuan_v1_dense", _HUNYUAN, values={"use_qk_norm": True}),
    "hunyuan-moe": Conversion(
        "hunyuan_v1_moe",
        _HUNYUAN_MOE,
        keys={"expert_shared_count": "num_shared_expert"},
        values={"use_qk_norm": True, "norm_topk_prob": True},
        more=_hunyuan_moe,
        experts=True,
    ),
    "lfm2": Conversion(
        "lfm2",
        _LFM2,
        keys={"shortconv.l_cache": "conv_L_cache"},
        values={"block_auto_adjust_ff_dim": False},  # it was adjusted
        eps="norm_eps",
        stateful="conv",
    ),
    "lfm2moe": Conversion(
        "lfm2_moe",
        _LFM2_MOE,
        keys={
            "shortconv.l_cache": "conv_L_cache",
            "leading_dense_block_count": "num_dense_layers",
        },
        values={"norm_topk_prob": True},
        eps="norm_eps",
        experts=True,
        gating=(2,),
        stateful="conv",
    ),
    "llama": Conversion("llama", permuted=True),
    "mistral3": Conversion("llama", permuted=True),
    "nemotron": Conversion(
        "nemotron",
        values={"hidden_act": "relu2"},
        more=_ungated,
        eps="norm_eps",
        layer_norm=True,
        norm_added=1.0,
    ),
    "olmo": Conversion(
        "olmo", keys={"attention.clamp_kqv": "clip_qkv"}, layer_norm=True, permuted=True
    ),
    "olmo2": Conversion("olmo2", _AFTER),
    "olmoe": Conversion("olmoe", values={"norm_topk_prob": False}, experts=True),
    "phi2": Conversion(
        "phi",
        _PHI,
        values={"hidden_act": "gelu_new"},
        eps="layer_norm_eps",
        layer_norm=True,
    ),
    "phi3": Conversion("phi3", _GATE_UP | {"attn_qkv": "self_attn.qkv_proj"}, pattern=0),
    "qwen2": Conversion("qwen2"),
    "qwen2moe": Conversion("qwen2_moe", values={"norm_topk_prob": False}, experts=True),
    "qwen2vl": Conversion("qwen2", ignored=_SECTIONS),
    "qwen3": Conversion("qwen3"),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35_MOE,
    "qwen3moe": Conversion("qwen3_moe", values={"norm_topk_prob": True}, experts=True),
    "qwen3next": replace(_QWEN35_MOE, model_type="qwen3_next", tiled=False, ignored=()),
    "qwen3vl": Conversion("qwen3", ignored=_VISION),
    "qwen3vlmoe": Conversion(
        "qwen3_moe", values={"norm_topk_prob": True}, experts=True, ignored=_VISION
    ),
    "seed_oss": Conversion("seed_oss", {"post_attention_norm": "post_attention_layernorm"}),
    "smollm3": Conversion("smollm3", permuted=True),
    "stablelm": Conversion(
        "stablelm",
        {
            "attn_q_norm": "self_attn.q_layernorm.norms.{}",
            "attn_k_norm": "self_attn.k_layernorm.norms.{}",
        },
        more=_stablelm,
        eps="layer_norm_eps",
        layer_norm=True,
        ignored=("use_parallel_residual",),
    ),
    "starcoder": Conversion(
        "gpt_bigcode",
        _GPT2,
        layers="transformer.h",
        values={"activation_function": "gelu_pytorch_tanh"},
        more=_starcoder,
        eps="layer_norm_epsilon",
        layer_norm=True,
    ),
    "starcoder2": Conversion(
        "starcoder2",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        values={"hidden_act": "gelu_pytorch_tanh"},
        eps="norm_epsilon",
        layer_norm=True,
        pattern=0,
    ),
}
