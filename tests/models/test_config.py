"""config.json: what is not implemented, or says nothing sensible, is refused by name."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from reference_models import CONFIG_FILES, DATA

from infer.kernels.errors import UnsupportedError
from infer.memory import kv_bytes_per_position
from infer.models import build_model
from infer.models.blocks.multimodal import text_config
from infer.models.blocks.rope import rope_table
from infer.models.loading.config import RawConfig
from infer.models.loading.formats import find_format


def test_any_name_may_be_a_key() -> None:
    values = json.loads((DATA / "gemma" / "config.json").read_text())
    assert (
        build_model(RawConfig(values | {"self": 1})).config == build_model(RawConfig(values)).config
    )


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("afmoe", {"attention_bias": True}, "attention_bias = True"),
        ("afmoe", {"score_func": "softmax"}, "score_func = 'softmax'"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act = 'silu'"),
        ("apertus", {"post_norm": True}, "post_norm = True"),
        ("bamba", {"attn_rotary_emb": 16}, "attn_rotary_emb = 16"),
        ("bamba", {"mamba_n_heads": 5}, "5 Mamba heads of 25 are not 128 values"),
        ("bamba", {"mamba_n_heads": 64}, "64 heads of 2 in"),
        ("codegen", {"n_head": 2}, "n_head = 2"),
        ("codegen", {"scale_attn_weights": False}, "scale_attn_weights = False"),
        ("gptj", {"rope_theta": 500.0}, "rope_theta = 500.0"),
        ("deepseek_v2", {"attention_bias": True}, "attention_bias = True"),
        ("deepseek_v2", {"kv_lora_rank": 1024}, "head_dim = 1040"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("deepseek_v2", {"num_key_value_heads": 1}, "num_key_value_heads = 1"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("deepseek_v3", {"n_group": 3}, "n_group = 3 groups of 8 experts"),
        ("deepseek_v3", {"n_group": 8}, "n_group = 8"),  # of one: there are no two best
        ("deepseek_v3", {"topk_group": 1}, "topk_group = 1"),  # two experts, and three are wanted
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("exaone_moe", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("falcon", {"alibi": True}, "alibi = true"),
        ("falcon", {"parallel_attn": False}, "parallel_attn = False"),
        ("falcon_h1", {"mlp_bias": True}, "mlp_bias = True"),
        ("falcon_h1", {"mamba_d_head": "auto", "mamba_d_ssm": 62}, "62 values"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 0.0, 1.0, 1.0, 1.0]}, "must be positive"),
        ("falcon_h1_norm", {"mamba_norm_before_gate": True}, "mamba_norm_before_gate = true"),
        ("gpt2", {"n_layer": 2**31 - 1}, "'n_layer' must be a count"),
        ("gpt_neo", {"attention_types": [[["global"], 1]]}, "for each of 2 layers"),
        ("gpt_neo", {"attention_types": [2, "local"]}, "attention_types must name"),
        ("gpt_neo", {"attention_layers": ["local", "global"]}, "not what attention_types says"),
        ("mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("qwen3", {"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ("gpt_neo", {"attention_types": [[["global"], 2**62]]}, "attention_types must name"),
        ("granite_swa", {"layer_rope_theta": [0, 1.0]}, "for each of 3 layers"),
        ("granite_swa", {"layer_rope_theta": [2.0, 1.0, 3.0]}, "layer_rope_theta = "),
        ("hyperclovax", {"use_post_norm": False}, "use_post_norm = False"),
        ("hyperclovax", {"residual_multiplier": 0.5}, "residual_multiplier = 0.5"),
        ("iquestcoder", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("minimax_m2", {"attn_type_list": [0, 1]}, r"attn_type_list = \[0, 1\]"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias = False"),
        ("mistral4", {"n_group": 2}, "n_group = 2"),
        ("mistral4", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "lacks .llama_4"),
        ("solar_open", {"use_qk_norm": True}, "use_qk_norm = True"),
        ("youtu", {"mlp_bias": True}, "mlp_bias = True"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm = true"),
        ("cohere2", {"logit_scale": 0}, "'logit_scale' must be positive"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention = true"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "'attn_logit_softcapping' must be positive"),
        ("gemma2", {"hidden_activation": "tanh"}, "hidden_activation = 'tanh'"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gemma3", {"text_config": {"model_type": "t5"}}, "the architecture 't5'"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "ntk"}}, "rope type 'ntk'"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = true"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt_bigcode", {"multi_query": False}, "multi_query = False"),
        ("gemma4_text", {"attention_bias": True}, "attention_bias = True"),
        ("gemma4_text", {"global_head_dim": 516}, "head_dim = 516"),
        ("gemma4_text", {"hidden_size_per_layer_input": -8}, "'hidden_size_per_layer_input' must"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers = 2 of 3 layers"),
        ("gemma4_text", {"num_kv_shared_layers": 3}, "num_kv_shared_layers = 3 of 3 layers"),
        ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config must"),
        ("gemma4_text", {"per_layer_config": {"0": {}}}, "per_layer_config must"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention ="),
        ("gemma4_text_experts", {"top_k_experts": 9}, "9 experts cannot be chosen of 8"),
        ("glm4_moe_lite", {"head_dim": 32}, "head_dim = 32"),
        ("gpt_neox", {"head_dim": 32}, "head_dim = 32"),
        ("gpt_neox", {"rotary_pct": 0.2}, "3 rotary dimensions of 16"),
        ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm = False"),
        ("granitemoehybrid", {"layer_types": ["attention"]}, "for each of 2 layers"),
        ("granitemoehybrid", {"layer_types": ["mamba2", "mamba"]}, "layer_types must name mamba,"),
        ("granitemoehybrid_mamba", {"mamba_n_groups": 3}, "8 heads of 16 in 3 groups"),
        ("granitemoehybrid_mamba", {"mamba_d_state": 260}, "with 260 states"),
        ("granitemoehybrid_mamba", {"mamba_d_head": 8}, "8 Mamba heads of 8 are not 128 values"),
        ("granitemoehybrid_mamba", {"mamba_d_conv": 1}, "mamba_d_conv = 1"),
        ("granitemoehybrid_mamba", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("granitemoehybrid_mamba", {"time_step_limit": [0.1]}, "time_step_limit must be"),
        ("granitemoehybrid_mamba", {"time_step_limit": [0.2, 0.1]}, "time_step_limit must be"),
        ("granite", {"logits_scaling": 0.0}, "'logits_scaling' must be positive"),
        ("granite", {"residual_multiplier": "1"}, "'residual_multiplier' must be of type float"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "conv for each of 3 layers"),
        ("lfm2", {"layer_types": ["conv", "conv", "mamba"]}, "must name full_attention or conv"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache = 1"),
        ("lfm2_moe", {"layer_types": None}, "lacks 'layer_types'"),
        ("lfm2_moe", {"full_attn_idxs": [1]}, r"full_attn_idxs = \[1\]"),
        ("lfm2_moe", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"model_type": ""}, "has no model_type"),
        ("llama", {"scale_emb": 12}, "scale_emb = 12"),
        ("llama", {"conv_L_cache": 3}, "conv_L_cache = 3"),
        ("llama", {"linear_conv_kernel_dim": 4}, "linear_conv_kernel_dim = 4"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "linear attention of 4 heads, 3 keys"),
        ("qwen3_next", {"linear_key_head_dim": 18}, "18 dimensions"),
        ("qwen3_next", {"linear_value_head_dim": 18}, "values of 18"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ("qwen3_5_moe_text", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping = 30.0"),
        ("llama", {"residual_multiplier": 0.5}, "residual_multiplier = 0.5"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla = True"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 3]}, "the same for all layers"),
        ("hunyuan_v1_moe", {"num_shared_expert": 2}, "num_shared_expert = 2"),
        ("llama", {"num_kv_shared_layers": 1}, "num_kv_shared_layers = 1"),
        ("llama", {"no_rope_layer_interval": 4}, "no_rope_layer_interval = 4"),
        ("llama", {"hybrid_override_pattern": "M*"}, 'hybrid_override_pattern = "M'),
        ("nemotron_h", {"hybrid_override_pattern": "M-M?"}, "pattern must name M, [*], -, E"),
        ("nemotron_h", {"hybrid_override_pattern": "M-*"}, "for each of 4 layers"),
        ("nemotron_h", {"hybrid_override_pattern": None}, "for each of 4 layers"),
        ("nemotron_h", {"layers_block_type": ["mlp", "conv"]}, "layers_block_type must name"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias = True"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act = 'gelu'"),
        ("nemotron_h", {"mamba_proj_bias": True}, "mamba_proj_bias = True"),
        ("nemotron_h", {"sliding_window": 16}, "sliding_window = 16"),
        ("llama", {"text_config": ["x"]}, r'text_config = \["x"\]'),
        ("llama", {"text_config": "x"}, 'text_config = "x"'),
        ("llama", {"text_config": {"hidden_size": 64}}, "text_config = {"),
        ("llama", {"decoder": {"hidden_size": 64}}, "decoder = {"),
        ("llava", {"text_config": ["x"]}, "'text_config' must be of type dict"),
        ("nemotron_h_experts", {"n_group": 2}, "n_group = 2"),
        ("nemotron_h_experts", {"n_shared_experts": 2}, "n_shared_experts = 2"),
        ("nemotron_h_experts", {"num_experts_per_tok": 9}, "9 experts cannot be chosen of 8"),
        ("opt", {"word_embed_proj_dim": 24}, "word_embed_proj_dim = 24"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before = False"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm = True"),
        ("stablelm", {"head_dim": 32}, "head_dim = 32"),
        ("phi3", {"attention_bias": True}, "attention_bias = True"),
        *(
            (case, {"layer_types": ["full_attention", "sliding_attention"]} | own, "in all layers")
            for case, own in (
                ("ministral3", {"sliding_window": 16}),
                ("mistral_sliding", {}),
                ("mixtral_sliding", {}),
                ("phi3", {}),
                ("qwen3_moe", {"sliding_window": 16, "use_sliding_window": True}),
                ("starcoder2", {}),
            )
        ),
        ("phi3", {"rope_scaling": {"type": "yarn", "long_factor": []}}, "long_factor"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must be .* 3 layers"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers must be"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ],
)
def test_is_refused(case: str, change: dict[str, Any], message: str) -> None:
    values = json.loads((DATA / case / CONFIG_FILES["published"]).read_text())
    build_model(RawConfig(values))
    with pytest.raises(UnsupportedError, match=message):
        build_model(RawConfig(values | change))


_DENSE = ["dense"] * 3
_FULL = ["full_attention"] * 3


@pytest.mark.parametrize(
    ("case", "change", "unused"),
    [  # transformers computes the same, whatever the unused keys say
        ("nemotron_h", {}, {"routed_scaling_factor": 0.5, "moe_latent_size": 8}),
        ("nemotron_h", {}, {"tie_word_embeddings": True, "n_routed_experts": 3}),
        ("nemotron_h", {}, {"partial_rotary_factor": 0.5}),
        ("gemma4_text_experts", {"enable_moe_block": False}, {"num_experts": 3}),
        ("qwen2_moe", {"num_experts": 0}, {"num_experts_per_tok": 9}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, {"num_experts_per_tok": 99}),
        ("qwen3_next", {"num_experts": 0}, {"decoder_sparse_step": 2}),
        ("qwen3_next", {"layer_types": _FULL}, {"linear_num_key_heads": 3}),
        ("qwen3_5_text", {"layer_types": _FULL}, {"linear_key_head_dim": 18}),
        ("deepseek_v2", {"first_k_dense_replace": 9}, {"norm_topk_prob": True}),
        ("deepseek_v3", {"first_k_dense_replace": 9}, {"n_group": 5, "routed_scaling_factor": 2.0}),
        ("mistral4", {"first_k_dense_replace": 9}, {"n_group": 3}),
        ("hy_v3", {"mlp_layer_types": _DENSE}, {"route_norm": False}),
        ("afmoe", {"num_dense_layers": 9}, {"route_norm": False, "num_expert_groups": 2}),
        ("ernie4_5_moe", {"moe_layer_start_index": 9}, {"moe_norm_min": 0.5}),
    ],
)
def test_keys_of_what_no_layer_has_change_nothing(
    case: str, change: dict[str, Any], unused: dict[str, Any]
) -> None:
    values = json.loads((DATA / case / "config.json").read_text()) | change
    for key in ("layer_types", "mlp_layer_types"):
        if key in change:
            values[key] = values[key][:1] * values["num_hidden_layers"]
    base, other = (build_model(RawConfig(values | own)) for own in ({}, unused))
    assert other.config == base.config
    names = [spec.name for spec in base.weights()]
    assert names == [spec.name for spec in other.weights()]
    assert not any(".experts." in name for name in names) or "linear" in str(unused)


@pytest.mark.parametrize(
    ("key", "used", "unused"),
    [
        ("attention_chunk_size", 8192, None),
        ("attention_out_multiplier", 0.5, 1.0),
        ("attn_temperature_tuning", True, False),
        ("attn_temperature_tuning", 4, 0),
        ("full_attention_interval", 4, None),
        ("index_topk", 2048, None),
        ("is_causal", False, True),
        ("layer_types", ["full_attention", "sliding_attention"], ["full_attention"] * 2),
        ("layer_types", ["full_attention", "chunked_attention"], []),
        ("llama_4_scaling", {"beta": 0.1}, {}),
        ("lm_head_multiplier", 0.5, 1),
        ("logits_soft_cap", 30.0, None),
        ("post_norm", True, False),
        ("rope_interleaved", True, False),  # as SmolLM2 says that it is not
        ("rope_local_base_freq", 1e4, None),
        ("rotary_pct", 0.25, 1.0),
        ("routed_scaling_factor", 2.5, 1.0),
        ("sliding_window", 4096, None),
        ("sliding_window", 16, 0),
        ("use_parallel_residual", True, False),
    ],
)
def test_keys_that_only_others_read(key: str, used: Any, unused: Any) -> None:
    """Llama would compute the same whatever they say."""
    values = json.loads((DATA / "llama" / CONFIG_FILES["published"]).read_text())
    assert build_model(RawConfig(values | {key: unused})).config.model_type == "llama"
    with pytest.raises(UnsupportedError, match=f"{key} = .* changes the computation"):
        build_model(RawConfig(values | {key: used}))


@pytest.mark.parametrize(
    ("case", "unread"),
    [
        *((case, {"mlp_layer_types": ["sparse", "dense"]}) for case in ("afmoe", "deepseek_v3")),
        *((case, {"mlp_layer_types": ["sparse", "dense"]}) for case in ("dots1", "glm4_moe")),
        *((case, {"mlp_layer_types": ["sparse", "dense"]}) for case in ("mistral4", "solar_open")),
        *((case, {"num_key_value_heads": 2}) for case in ("codegen", "gpt2", "gpt_bigcode")),
        *((case, {"num_key_value_heads": 2}) for case in ("gpt_neo", "gpt_neox", "gptj")),
        ("hy_v3", {"n_group": 2, "topk_group": 1}),
        ("lfm2", {"hidden_act": "relu"}),
        ("olmo", {"rms_norm_eps": 0.1}),
        ("opt", {"head_dim": 32, "num_key_value_heads": 2, "rms_norm_eps": 0.1}),
    ],
)
def test_keys_that_are_not_read(case: str, unread: dict[str, Any]) -> None:
    """Where transformers computes the same whatever they say."""
    values = json.loads((DATA / case / CONFIG_FILES["published"]).read_text())
    expected = build_model(RawConfig(values)).config
    assert build_model(RawConfig(values | unread)).config == expected


def test_part_of_a_wide_head_turns() -> None:
    values = json.loads((DATA / "phi" / CONFIG_FILES["published"]).read_text())
    for head_dim in (16, 32):
        config = build_model(RawConfig(values | {"head_dim": head_dim})).config
        assert (config.head_dim, config.rope.rotary_dim) == (head_dim, head_dim / 2)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "qwen3_moe", "smollm3", "qwen3_next"])
def test_a_window_that_is_not_used(case: str) -> None:
    """Configs of Qwen2.5 and others have a window that use_sliding_window turns off."""
    values = json.loads((DATA / case / CONFIG_FILES["published"]).read_text())
    own = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 1}
    assert set(build_model(RawConfig(values | own)).config.windows) == {0}


def test_time_steps_have_a_limit_or_not() -> None:
    """And layers are all Mamba where nothing is said of them, as wide as that makes them."""
    values = json.loads((DATA / "granitemoehybrid_mamba" / CONFIG_FILES["published"]).read_text())
    for given in (None, [0.0, math.inf], [0.1, 1]):
        raw = RawConfig(values | {"time_step_limit": given})
        assert build_model(raw).config.mamba.time_step_limit == tuple(given or (0.0, math.inf))
    config = build_model(RawConfig(values | {"layer_types": None, "mamba_d_head": "auto"})).config
    assert [state and (state.heads, state.value_dim) for state in config.states] == [(8, 16)] * 2


def test_what_nemotron_calls_its_keys() -> None:
    """By other names in some files; a list of layers counts before a pattern."""
    values = json.loads((DATA / "nemotron_h" / CONFIG_FILES["published"]).read_text())
    expected = build_model(RawConfig(values)).config
    values |= {"attention_head_dim": values.pop("head_dim"), "mamba_d_conv": 4, "conv_kernel": 9}
    kinds = ["mamba", "mlp", "attention", "mlp"]
    values |= {"layers_block_type": kinds, "hybrid_override_pattern": "MMMM"}
    values |= {"auto_map": {"AutoConfig": "configuration.Config"}, "n_routed_experts": None}
    assert build_model(RawConfig(values)).config == expected


def test_gpt2_says_the_width_of_its_mlp_or_not() -> None:
    values = json.loads((DATA / "gpt2" / CONFIG_FILES["published"]).read_text())
    for given, width in ((None, 4 * 64), (100, 100)):
        config = build_model(RawConfig(values | {"n_inner": given})).config
        assert config.intermediate_size == width


def test_a_rope_that_changes_with_the_length_is_that_of_all_layers() -> None:
    """The engine keeps up the table of one alone."""
    values = json.loads((DATA / "granite_swa" / CONFIG_FILES["published"]).read_text())
    values |= {"rope_scaling": {"factor": 2.0, "rope_type": "dynamic"}}
    for thetas in (None, [0, 10000.0, 10000.0]):
        config = build_model(RawConfig(values | {"layer_rope_theta": thetas})).config
        assert config.rope.kind == "dynamic"
        assert config.local_rope is None
    with pytest.raises(UnsupportedError, match="layer_rope_theta"):
        build_model(RawConfig(values | {"layer_rope_theta": [0, 100.0, 10000.0]}))


def test_minicpm3_has_factors_or_not() -> None:
    values = json.loads((DATA / "minicpm3" / CONFIG_FILES["published"]).read_text())
    no, n_layers, hidden = None, values["num_hidden_layers"], values["hidden_size"]
    for depth, base, factors in (
        (no, no, (1.0, 1.0)),
        (2.0, hidden // 2, (2 / math.sqrt(n_layers), 2.0)),
    ):
        own = {"scale_depth": depth, "dim_model_base": base}
        config = build_model(RawConfig(values | own)).config
        assert (config.residual_multiplier, config.logits_scaling) == factors
    for key in own:
        values.pop(key)
    config = build_model(RawConfig(values)).config
    assert (config.residual_multiplier, config.logits_scaling) == (
        1.4 / math.sqrt(n_layers),
        hidden / 256,
    )


def test_what_the_first_files_leave_out_of_text_config() -> None:
    """text_config of LLaVA 1.5 7B and LLaVA-OneVision 7B leaves sizes out."""
    own = {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32064}
    llama = build_model(RawConfig({"model_type": "llava", "text_config": own})).config
    assert (llama.hidden_size, llama.intermediate_size, llama.vocab_size) == (4096, 11008, 32064)
    assert (llama.num_hidden_layers, llama.num_attention_heads) == (32, 32)
    own = json.loads((DATA / "llava_onevision" / CONFIG_FILES["published"]).read_text())
    del own["text_config"]["max_position_embeddings"]
    assert build_model(RawConfig(own)).config.max_position_embeddings == 32768


def test_what_is_quantised_has_the_names_of_the_text_model() -> None:
    """MLX gives sizes by the names of the whole model."""
    sizes = {"group_size": 64, "bits": 4}
    names = ("language_model.lm_head", "language_model.model.layers.0.mlp.down_proj")
    values = json.loads((DATA / "gemma3" / CONFIG_FILES["published"]).read_text())
    values["quantization"] = sizes | {name: {"bits": 8} for name in names}
    assert text_config(RawConfig(values)).values["quantization"] == sizes | {
        "lm_head": {"bits": 8},
        "model.layers.0.mlp.down_proj": {"bits": 8},
    }


def test_only_one_factor_of_yarn() -> None:
    values = json.loads((DATA / "llama_rope_yarn" / CONFIG_FILES["published"]).read_text())
    values["rope_scaling"] |= {"attn_factor": 0.9, "attention_factor": 1.0}
    with pytest.raises(UnsupportedError, match="exclude each other"):
        rope_table(build_model(RawConfig(values)).config.rope, 8)


_NO_NUMBERS = (math.nan, math.inf, -math.inf, 10**400, True, "1", [], {})


@pytest.mark.parametrize(
    ("case", "key", "values"),
    [
        ("llama", "rms_norm_eps", (*_NO_NUMBERS, -1e-6, 1e6)),
        ("llama", "rope_theta", (*_NO_NUMBERS, 0, 1, -10000.0, 1e38)),
        ("llama", "rope_parameters", (5, [], {"rope_theta": 0}, {"rope_theta": "x"})),
        ("llama", "rope_parameters", ({"rope_type": []}, {"rope_type": {}}, {"type": 1})),
        ("llama", "model_type", ([], {}, 1, True)),
        ("llama", "num_hidden_layers", (2**31, 1e3, 10_001)),
        ("llama", "num_attention_heads", (2**31, 10_001)),
        ("llama", "max_position_embeddings", (1, 2**31)),
        ("llava", "text_config", ([], "x", 1, {"model_type": []}, {"model_type": 1})),
        ("gemma3_text", "rope_parameters", ({"full_attention": []}, {"rope_theta": 1e6})),
        ("stablelm", "partial_rotary_factor", (*_NO_NUMBERS, 0, -1, 1.5)),
        ("gptj", "n_head", (10_000,)),
        ("qwen2_moe", "mlp_only_layers", ([[]], ["0"], [None], [True])),
        ("bamba", "attn_layer_indices", ([[]], [1.0])),
        ("mistral_sliding", "layer_types", ([[], {}], [None, None], 3)),
        ("ernie4_5_moe", "moe_num_shared_experts", (-1, 10_001)),
        ("falcon_h1", "mlp_multipliers", ([1, math.nan], [1, 1e30], ["1", 1])),
        ("granitemoehybrid_mamba", "time_step_limit", ([math.nan, 1], [0, math.nan])),
        ("falcon_h1", "time_step_limit", ([10**400, 10**400], [math.inf, math.inf])),
    ],
)
def test_values_that_nothing_can_be_computed_with(
    case: str, key: str, values: tuple[Any, ...]
) -> None:
    for name in CONFIG_FILES.values():
        good = json.loads((DATA / case / name).read_text())
        for value in values:
            with pytest.raises(UnsupportedError):
                build_model(RawConfig(good | {key: value}))


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "factor": 4.0,
        "attention_factor": 1.1,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_parameters_of_ropes(kind: str) -> None:
    """Each must be a number that can be computed with, and is then finite in every table."""
    values = json.loads((DATA / "phi3_longrope" / CONFIG_FILES["published"]).read_text())
    values["original_max_position_embeddings"] = None  # the rope says it
    own = ROPES[kind] | {"rope_type": kind}

    def tables(**changes: Any) -> None:
        rope = build_model(RawConfig(values | {"rope_scaling": own | changes})).config.rope
        for length in (0, 1, 33, 10**6):
            assert np.isfinite(rope_table(rope, 8, length)).all()

    tables()
    for key in ROPES[kind]:
        for value in (*_NO_NUMBERS, -1, -0.5, 1e30, [1.0], [1.0] * 3 + [0]):
            with pytest.raises(UnsupportedError, match=key):
                tables(**{key: value})
        for value in (0, 1, 2, 100, 1e-320, 1e-6, 0.9):
            with suppress(UnsupportedError):
                tables(**{key: value})


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3"])
def test_ropes_need_their_parameters(kind: str) -> None:
    values = json.loads((DATA / "llama" / CONFIG_FILES["published"]).read_text())
    for key in ROPES[kind]:
        own = ROPES[kind] | {"rope_type": kind, key: None}
        with pytest.raises(UnsupportedError, match=key):
            build_model(RawConfig(values | {"rope_scaling": own}))


def test_two_ropes_exclude_each_other() -> None:
    """transformers takes rope_scaling, with a theta of its own."""
    values = json.loads((DATA / "llama" / CONFIG_FILES["transformers5"]).read_text())
    build_model(RawConfig(values | {"rope_scaling": values["rope_parameters"]}))
    with pytest.raises(UnsupportedError, match="rope_parameters and rope_scaling exclude"):
        build_model(RawConfig(values | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}))


def test_long_values_are_shortened() -> None:
    values = json.loads((DATA / "llama" / CONFIG_FILES["published"]).read_text())
    long = ["x" * 10**6, [1] * 10**6, {str(i): i for i in range(10**5)}, [["x" * 10**5] * 9] * 9]
    for key in ("vocab_size", "model_type", "rope_scaling", "layer_types", "hidden_act"):
        for value in long:
            with pytest.raises(UnsupportedError) as refused:
                build_model(RawConfig(values | {key: value}))
            assert len(str(refused.value)) < 3000


@pytest.mark.parametrize("factors", [None, [1.0] * 7, [1.0] * 7 + [0], [1.0] * 7 + ["1"], 8.0])
def test_longrope_needs_a_factor_for_every_pair(factors: Any) -> None:
    values = json.loads((DATA / "phi3_longrope" / CONFIG_FILES["published"]).read_text())
    values["rope_scaling"]["long_factor"] = factors
    with pytest.raises(UnsupportedError, match="long_factor"):
        build_model(RawConfig(values))


# config.json of DeepSeek-V2-Lite, without what says nothing of the model; V3 and R1 have one file.
V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"},
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
_SIGMOID = {
    "model_type": "deepseek_v3",
    "ep_size": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
MOONLIGHT = V2_LITE | _SIGMOID
MOONLIGHT |= {
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "vocab_size": 163840,
}
V3 = V2_LITE | _SIGMOID
V3 |= {
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "vocab_size": 129280,
}


@pytest.mark.parametrize(
    ("values", "parameters", "scale"),
    [  # parameters as transformers counts them; 0.1 mscale ln(factor) + 1, squared, on the scores
        (V2_LITE, 15_706_484_224, (1 + 0.0707 * math.log(40)) ** 2),
        (MOONLIGHT, 15_960_110_208, 1.0),
        (V3, 671_026_419_200, (1 + 0.1 * math.log(40)) ** 2),
    ],
    ids=["v2-lite", "moonlight", "v3"],
)
def test_published_models_with_latents(
    values: dict[str, Any], parameters: int, scale: float
) -> None:
    raw = RawConfig(values)
    find_format(raw)
    model = build_model(raw)
    assert sum(math.prod(spec.shape) for spec in model.weights()) == parameters
    assert model.config.attention.attention_multiplier == pytest.approx(scale * 192**-0.5)
    assert kv_bytes_per_position(model, "f16") == values["num_hidden_layers"] * 576 * 2
