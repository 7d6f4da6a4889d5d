"""Of well-known models config.json, and of well-known formats how they pack weights: for benchmarks
on random weights, for which nothing is downloaded."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from infer.kernels.errors import ModelNotFoundError
from infer.models.config import RawConfig
from infer.models.formats.grouped import Scheme

# Of each published config.json, everything that says what is computed.
_LLAMA_3: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

SHAPES: dict[str, dict[str, Any]] = {
    "gemma-2-2b": {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "attention_bias": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "attention_bias": True,
        "rms_norm_eps": 1e-05,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    },
    "granite-4.0-h-tiny": {
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_hidden_layers": 40,
        "layer_types": [
            "attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)
        ],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "logits_scaling": 6,
        "residual_multiplier": 0.22,
        "attention_bias": False,
        "max_position_embeddings": 131072,
        "position_embedding_type": "nope",
        "normalization_function": "rmsnorm",
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "block_ff_dim": 12288,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "conv_L_cache": 3,
        "conv_bias": False,
        "max_position_embeddings": 128000,
        "norm_eps": 1e-05,
        "rope_theta": 1000000.0,
    },
    "llama-3.2-1b": _LLAMA_3
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_scaling": _LLAMA_3_ROPE | {"factor": 32.0},
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": _LLAMA_3
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_scaling": _LLAMA_3_ROPE | {"factor": 8.0},
        "tie_word_embeddings": False,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_bias": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_bias": False,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 262144,
        "attention_bias": False,
        "rms_norm_eps": 1e-06,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
    "starcoder2-3b": {
        "model_type": "starcoder2",
        "vocab_size": 49152,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
        "sliding_window": 4096,
        "norm_epsilon": 1e-05,
        "rope_theta": 999999.4420358813,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "tie_word_embeddings": True,
    },
}


def shape_config(name: str) -> RawConfig:
    """The config of a shape. Raises ModelNotFoundError for a name that is not in SHAPES."""
    if name not in SHAPES:
        raise ModelNotFoundError(f"There is no shape {name!r}. There are: {', '.join(SHAPES)}.")
    return RawConfig(copy.deepcopy(SHAPES[name]), name)


# How published checkpoints pack weights


@dataclass(frozen=True)
class Published:
    """A kind of checkpoint: its scheme, and the dtype of embeddings and head where these are not
    quantised. part: what the names of all weights have in common that are."""

    scheme: Scheme
    embeddings: str | None = None
    part: str = ""


_ROW = 1 << 20  # columns: all of them share a scale
PUBLISHED = {
    "gptq": Published(Scheme("int", 4, 128, "f16", signed=True), "f16"),
    "awq": Published(Scheme("int", 4, 128, "f16", zeros=True), "f16"),
    "w8a16": Published(Scheme("int", 8, _ROW, "bf16", signed=True), "bf16"),
    "mlx-4bit": Published(Scheme("int", 4, 64, "bf16", biases=True)),
    "mlx-8bit": Published(Scheme("int", 8, 64, "bf16", biases=True)),
    "q4_0": Published(Scheme("int", 4, 32, "f16", signed=True)),
    "q4_k": Published(Scheme("int", 4, 32, "int8", biases=True)),
    "q5_k": Published(Scheme("int", 5, 32, "int8", biases=True)),
    "q6_k": Published(Scheme("int", 6, 16, "int8", signed=True)),
    "iq4_nl": Published(Scheme("iq4nl", 4, 32, "f16")),
    "fp8": Published(Scheme("e4m3", 8, 128, "f32"), "bf16"),
    "mxfp4": Published(Scheme("mxfp4", 4, 32, "e8m0"), "bf16"),
    "mxfp4-experts": Published(Scheme("mxfp4", 4, 32, "e8m0"), "bf16", ".experts."),
    "nf4": Published(Scheme("nf4", 4, 64, "f32"), "bf16"),
}
