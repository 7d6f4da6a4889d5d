"""Make the stored references in tests/data/models: tiny random models and transformers' answers.

    python scripts/make_references.py [CASE ...]

Needs torch and transformers (`pip install infer-wgpu[reference]`). Each case becomes a folder:

config.json            as the installed transformers writes it: rope_parameters, dtype, layer_types
config.published.json  as most files on the hub spell it: rope_theta, rope_scaling, torch_dtype
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
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "models"

PROMPT_TOKENS = 45
GREEDY_STEPS = 32
LONG_TOKENS = 1200
# Around the ends of chunks (512, and 128 where all rows have logits) and of pages (256).
LONG_ROWS = [0, 127, 128, 255, 256, 257, 511, 512, 513, 767, 768, 1023, 1024, 1199]

# Models have common sizes, unless a case is about others: every size makes kernels of its own, and
# compiling them is what the tests of models wait for. With a large eps a wrong one shows.
VOCAB = 211  # no multiple of anything
EPS = 1e-3

# A relative error of 1e-5 moves the difference of two logits by at most sqrt(2) * 1e-5 of their
# norm, so with this margin equal tokens follow from equal logits.
MIN_MARGIN = 3e-4
# The same of a router's logits: an expert more or less is another model.
MIN_ROUTING_MARGIN = 1e-4
# A continuation that repeats a few tokens would prove little.
MIN_DISTINCT = 12


@dataclass(frozen=True)
class Case:
    """One tiny model; config is as the hub spells it, less architectures and torch_dtype. The
    embeddings' standard deviation is `embedding`. stacked: the experts of a layer are two tensors
    in the file, as in memory. transposed: each of their matrices is, as the hub has them.
    long: with long.npz."""

    config: dict[str, Any]
    dtype: str = "bfloat16"
    shards: int = 1
    embedding: float = 0.1
    stacked: bool = False
    transposed: bool = False
    long: bool = False

    @property
    def vocab_size(self) -> int:
        return int(self.config.get("text_config", self.config)["vocab_size"])


def llama(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "mlp_bias": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": EPS,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "transformers_version": "4.43.0",
        "use_cache": True,
        "vocab_size": VOCAB,
    } | changes


def llama_first(**changes: Any) -> dict[str, Any]:
    """The files of the first llama: no num_key_value_heads, no rope key at all."""
    newer = {"attention_bias", "attention_dropout", "mlp_bias", "num_key_value_heads"}
    newer |= {"pretraining_tp", "rope_scaling", "rope_theta"}
    config = llama(transformers_version="4.28.1", **changes)
    return {key: value for key, value in config.items() if key not in newer}


def mistral(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "mistral",
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "transformers_version": "4.34.0",
        "use_cache": True,
        "vocab_size": VOCAB,
    } | changes


def qwen2(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "max_window_layers": 1,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": EPS,
        "rope_theta": 1000000.0,
        "sliding_window": 16,
        "tie_word_embeddings": True,
        "transformers_version": "4.40.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    } | changes


def qwen3(**changes: Any) -> dict[str, Any]:
    own = {
        "attention_bias": False,
        "head_dim": 16,
        "rope_scaling": None,
        "sliding_window": None,
        "transformers_version": "4.51.0",
    }
    return qwen2() | {"model_type": "qwen3"} | own | changes


def gemma(**changes: Any) -> dict[str, Any]:
    own = {
        "model_type": "gemma",
        "hidden_act": "gelu",  # which is not what it means
        "head_dim": 24,
        "hidden_size": 56,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "transformers_version": "4.38.0.dev0",
    }
    newer = {"attn_logit_softcapping", "final_logit_softcapping", "hidden_activation"}
    newer |= {"query_pre_attn_scalar", "sliding_window"}
    config = gemma2() | own | changes
    return {key: value for key, value in config.items() if key not in newer}


def gemma2(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "gemma2",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": 2.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "final_logit_softcapping": 1.5,
        "head_dim": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 4,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "sliding_window": 16,
        "transformers_version": "4.42.4",
        "use_cache": True,
        "vocab_size": VOCAB,
    } | changes


def gemma3_text(**changes: Any) -> dict[str, Any]:
    own = {
        "architectures": ["Gemma3ForCausalLM"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"factor": 4.0, "rope_type": "linear"},
        "rope_theta": 1000000.0,
        "sliding_window_pattern": 2,
        "transformers_version": "4.50.0",
    }
    return gemma2() | {"model_type": "gemma3_text"} | own | changes


def gemma4_text(**changes: Any) -> dict[str, Any]:
    """Built like the largest: keys that are the values too, and nothing but the tokens."""
    own = {
        "architectures": ["Gemma4ForCausalLM"],
        "attention_k_eq_v": True,
        "attn_logit_softcapping": None,
        "enable_moe_block": False,
        "global_head_dim": 32,
        "head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "model_type": "gemma4_text",
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "query_pre_attn_scalar": None,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
        },
        "tie_word_embeddings": True,
        "transformers_version": "5.5.0",
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": VOCAB,
    }
    config = gemma2() | own | changes
    return {key: v for key, v in config.items() if key not in ("hidden_act", "rope_theta")}


def starcoder2(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "starcoder2",
        "attention_dropout": 0.1,
        "bos_token_id": 0,
        "embedding_dropout": 0.1,
        "eos_token_id": 0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "initializer_range": 0.018042,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "mlp_type": "default",
        "norm_epsilon": EPS,
        "norm_type": "layer_norm",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "residual_dropout": 0.1,
        "rope_theta": 999999.4420358813,
        "sliding_window": 16,
        "transformers_version": "4.37.0.dev0",
        "use_bias": True,
        "use_cache": True,
        "vocab_size": VOCAB,
    } | changes


def gpt_neox(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "gelu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "layer_norm_eps": EPS,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "rotary_emb_base": 100,
        "rotary_pct": 0.5,
        "tie_word_embeddings": False,
        "transformers_version": "4.24.0",
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": VOCAB,
    } | changes


def gpt2(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "bos_token_id": 0,
        "embd_pdrop": 0.1,
        "eos_token_id": 0,
        "initializer_range": 0.02,
        "layer_norm_epsilon": EPS,
        "n_ctx": 96,
        "n_embd": 64,
        "n_head": 4,
        "n_inner": 96,
        "n_layer": 2,
        "n_positions": 96,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "transformers_version": "4.20.0.dev0",
        "vocab_size": VOCAB,
    } | changes


def gpt_bigcode(**changes: Any) -> dict[str, Any]:
    own = {
        "activation_function": "gelu_pytorch_tanh",
        "architectures": ["GPTBigCodeForCausalLM"],
        "attention_softmax_in_fp32": True,
        "inference_runner": 0,
        "max_batch_size": None,
        "max_sequence_length": None,
        "model_type": "gpt_bigcode",
        "multi_query": True,
        "pad_key_length": True,
        "pre_allocate_kv_cache": False,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
        "transformers_version": "4.28.1",
        "validate_runner_input": True,
    }
    return {key: value for key, value in gpt2().items() if key != "n_ctx"} | own | changes


def gptj(**changes: Any) -> dict[str, Any]:
    own = {
        "model_type": "gptj",
        "gradient_checkpointing": False,
        "n_inner": None,
        "rotary": True,
        "rotary_dim": 8,
        "scale_attn_weights": True,
        "tie_word_embeddings": False,
        "transformers_version": "4.18.0.dev0",
    }
    return {key: value for key, value in gpt2().items() if key != "n_ctx"} | own | changes


def falcon(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "falcon",
        "activation": "gelu",
        "alibi": False,
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM"},
        "bias": False,
        "bos_token_id": 11,
        "eos_token_id": 11,
        "hidden_dropout": 0.0,
        "hidden_size": 64,
        "initializer_range": 0.02,
        "layer_norm_epsilon": EPS,
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_kv_heads": 4,
        "parallel_attn": True,
        "transformers_version": "4.27.4",
        "use_cache": True,
        "vocab_size": VOCAB,
    } | changes


def opt(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "_remove_final_layer_norm": False,
        "activation_dropout": 0.0,
        "activation_function": "relu",
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "do_layer_norm_before": True,
        "dropout": 0.1,
        "eos_token_id": 2,
        "ffn_dim": 96,
        "hidden_size": 64,
        "init_std": 0.02,
        "layerdrop": 0.0,
        "max_position_embeddings": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "pad_token_id": 1,
        "prefix": "</s>",
        "transformers_version": "4.21.0.dev0",
        "use_cache": True,
        "vocab_size": VOCAB,
        "word_embed_proj_dim": 64,
    } | changes


def cohere2(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "cohere2",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 5,
        "eos_token_id": 1,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "layer_norm_eps": EPS,
        "layer_switch": 4,
        "logit_scale": 0.125,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "order_of_interleaved_layers": "local_attn_first",
        "pad_token_id": 0,
        "position_embedding_type": "rope_gptj",
        "rope_scaling": None,
        "rope_theta": 50000.0,
        "rotary_pct": 1.0,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "transformers_version": "4.48.0",
        "use_cache": True,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
        "vocab_size": VOCAB,
    } | changes


def cohere(**changes: Any) -> dict[str, Any]:
    """With as many key-value heads as query heads, which is the default."""
    newer = {"head_dim", "layer_switch", "order_of_interleaved_layers", "position_embedding_type"}
    newer |= {"rope_scaling", "rotary_pct", "sliding_window", "sliding_window_pattern"}
    newer |= {"num_key_value_heads", *(key for key in cohere2() if key.startswith("use_"))}
    own = {"model_type": "cohere", "num_hidden_layers": 2, "transformers_version": "4.38.2"}
    config = cohere2() | own | {"use_qk_norm": False} | changes
    return {key: value for key, value in config.items() if key not in newer or key in changes}


def stablelm(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "stablelm",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "layer_norm_eps": EPS,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "transformers_version": "4.38.0",
        "use_cache": True,
        "use_qkv_bias": True,
        "vocab_size": VOCAB,
    } | changes


def phi(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "phi",
        "attention_dropout": 0.0,
        "bos_token_id": 50,
        "embd_pdrop": 0.0,
        "eos_token_id": 50,
        "hidden_act": "gelu_new",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "layer_norm_eps": EPS,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": None,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
        "resid_pdrop": 0.1,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.37.0",
        "use_cache": True,
        "vocab_size": VOCAB,
    } | changes


def persimmon(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "persimmon",
        "bos_token_id": 1,
        "eos_token_id": 1,
        "hidden_act": "relu2",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "layer_norm_eps": EPS,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": True,
        "rope_theta": 25000.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.34.0",
        "use_cache": True,
        "vocab_size": VOCAB,
    } | changes


def small(model_type: str, **changes: Any) -> dict[str, Any]:
    """A family whose files have llama's keys, or nearly."""
    own = {
        "head_dim": 16,
        "model_type": model_type,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0",
    }
    return llama() | own | changes


def glm4(**changes: Any) -> dict[str, Any]:
    own = {
        "attention_bias": True,
        "head_dim": 16,
        "pad_token_id": 0,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        "transformers_version": "4.52.0",
    }
    config = llama() | {"model_type": "glm4"} | own | changes
    for key in ("mlp_bias", "pretraining_tp"):
        del config[key]
    return config


def granite(**changes: Any) -> dict[str, Any]:
    own = {
        "attention_multiplier": 0.5,
        "embedding_multiplier": 6.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.25,
        "transformers_version": "4.46.0",
    }
    config = llama() | {"model_type": "granite"} | own | changes
    del config["pretraining_tp"]
    return config


def phi3(**changes: Any) -> dict[str, Any]:
    own = {
        "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        "embd_pdrop": 0.0,
        "original_max_position_embeddings": 128,
        "pad_token_id": 0,
        "resid_pdrop": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "transformers_version": "4.40.2",
    }
    config = llama() | {"model_type": "phi3"} | own | changes
    for key in ("mlp_bias", "pretraining_tp"):
        del config[key]
    return config


def phi3_longrope(original: int, **changes: Any) -> dict[str, Any]:
    own = {
        "max_position_embeddings": 256,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {
            "long_factor": [1.0 + i for i in range(4)],
            "short_factor": [1.0 + 0.25 * i for i in range(4)],
            "type": "longrope",
        },
    }
    return phi3(**own | changes)


def smollm3(**changes: Any) -> dict[str, Any]:
    own = {
        "max_window_layers": 28,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 0, 1],
        "num_hidden_layers": 3,
        "pad_token_id": 0,
        "pretraining_tp": 2,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "transformers_version": "4.54.0",
        "use_sliding_window": False,
    }
    config = llama() | {"model_type": "smollm3"} | own | changes
    del config["tie_word_embeddings"]  # it is true unless it is given
    return config


def olmo2(**changes: Any) -> dict[str, Any]:
    own = {
        "pad_token_id": 0,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.47.0",
    }
    config = llama() | {"model_type": "olmo2"} | own | changes
    for key in ("mlp_bias", "pretraining_tp"):
        del config[key]
    return config


def mixtral(**changes: Any) -> dict[str, Any]:
    own = {
        "intermediate_size": 32,
        "num_experts_per_tok": 3,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "transformers_version": "4.36.0",
    }
    return mistral() | {"model_type": "mixtral"} | own | changes


def qwen3_moe(**changes: Any) -> dict[str, Any]:
    own = {
        "decoder_sparse_step": 1,
        "max_window_layers": 2,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 0,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
    }
    return qwen3() | {"model_type": "qwen3_moe"} | own | changes


def qwen2_moe(**changes: Any) -> dict[str, Any]:
    own = {
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 32,
        "norm_topk_prob": False,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 40,
        "tie_word_embeddings": False,
    }
    return qwen2() | {"model_type": "qwen2_moe"} | own | changes


def delta_net(model_type: str, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "full_attention_interval": 3,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 24,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": EPS,
        "tie_word_embeddings": True,
        "transformers_version": "4.57.0",
        "use_cache": True,
        "vocab_size": VOCAB,
    } | changes


def qwen3_next(**changes: Any) -> dict[str, Any]:
    own = {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "shared_expert_intermediate_size": 32,
    }
    return delta_net("qwen3_next", **own, **changes)


def qwen3_5_text(model_type: str = "qwen3_5_text", **changes: Any) -> dict[str, Any]:
    rope = {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000000.0,
        "rope_type": "default",
    }
    return delta_net(model_type, rope_parameters=rope, **changes)


def qwen3_5_moe_text(**changes: Any) -> dict[str, Any]:
    own = {
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 40,
        "tie_word_embeddings": False,
    }
    config = qwen3_5_text("qwen3_5_moe_text", **own | changes)
    del config["intermediate_size"]
    return config


# Fewer layers, and experts whose widths are multiples of the groups of quantised formats.
_SHORT: dict[str, Any] = {"full_attention_interval": 2, "head_dim": 16, "num_hidden_layers": 2}
_BLOCKS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}


def qwen3_5(model_type: str, text: dict[str, Any]) -> dict[str, Any]:
    """The text model, and a small one that sees images."""
    return {
        "model_type": model_type,
        "image_token_id": 4,
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "transformers_version": "4.57.0",
        "video_token_id": 5,
        "vision_config": {
            "depth": 1,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 8,
            "in_channels": 3,
            "intermediate_size": 8,
            "model_type": model_type,
            "num_heads": 2,
            "num_position_embeddings": 4,
            "out_hidden_size": 64,
            "patch_size": 2,
            "spatial_merge_size": 1,
            "temporal_patch_size": 1,
        },
        "vision_end_token_id": 7,
        "vision_start_token_id": 6,
    }


def lfm2(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 144,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 16,
        "bos_token_id": 1,
        "conv_L_cache": 3,
        "conv_bias": False,
        "eos_token_id": 2,
        "full_attn_idxs": [1],
        "hidden_size": 64,
        "max_position_embeddings": 128,
        "norm_eps": EPS,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "rope_theta": 1000000.0,
        "transformers_version": "4.55.0",
        "use_cache": True,
        "vocab_size": VOCAB,
    } | changes


def lfm2_moe(**changes: Any) -> dict[str, Any]:
    own = {
        "conv_L_cache": 3,
        "conv_bias": False,
        "layer_types": ["conv", "full_attention", "conv"],
        "moe_intermediate_size": 32,
        "norm_eps": EPS,
        "norm_topk_prob": True,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "rope_theta": 1000000.0,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": True,
        "use_expert_bias": True,
    }
    config = small("lfm2_moe", **own | changes)
    others = ("attention_bias", "hidden_act", "mlp_bias", "pretraining_tp", "rms_norm_eps")
    return {key: value for key, value in config.items() if key not in others}


def olmoe(**changes: Any) -> dict[str, Any]:
    own = {
        "clip_qkv": 0.9,
        "intermediate_size": 32,
        "norm_topk_prob": False,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "pad_token_id": 1,
        "rope_scaling": None,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "transformers_version": "4.43.0.dev0",
    }
    config = llama() | {"model_type": "olmoe"} | own | changes
    return {
        key: value for key, value in config.items() if key not in ("mlp_bias", "pretraining_tp")
    }


def gpt_oss(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 2,
        "experts_per_token": 3,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initial_context_length": 32,
        "initializer_range": 0.02,
        "intermediate_size": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 128,
        "num_attention_heads": 6,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 5,
        "output_router_logits": False,
        "pad_token_id": 0,
        "rms_norm_eps": EPS,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 16,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": VOCAB,
    } | changes


def granitemoe(**changes: Any) -> dict[str, Any]:
    own = {
        "intermediate_size": 32,
        "num_experts_per_tok": 3,
        "num_local_experts": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    config = granite() | {"model_type": "granitemoe"} | own | changes
    return {key: value for key, value in config.items() if key != "mlp_bias"}


def granitemoehybrid(**changes: Any) -> dict[str, Any]:
    own = {
        "layer_types": ["attention", "attention"],
        "mamba_n_heads": 8,
        "model_type": "granitemoehybrid",
        "normalization_function": "rmsnorm",
        "num_experts_per_tok": 0,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "shared_intermediate_size": 96,
    }
    return granitemoe(**own | changes)


def bamba(**changes: Any) -> dict[str, Any]:
    own = {
        "attn_layer_indices": [1],
        "attn_rotary_emb": 8,
        "mamba_chunk_size": 16,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": "auto",
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_n_groups": 2,
        "mamba_n_heads": 8,
        "mamba_proj_bias": False,
        "num_logits_to_keep": 1,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "z_loss_coefficient": 0.0,
    }
    config = llama() | {"model_type": "bamba"} | own | changes
    return {key: value for key, value in config.items() if key != "pretraining_tp"}


def falcon_h1(**changes: Any) -> dict[str, Any]:
    own = {
        "attention_in_multiplier": 2.0,
        "attention_out_multiplier": 0.25,
        "embedding_multiplier": 3.0,
        "key_multiplier": 0.5,
        "lm_head_multiplier": 0.125,
        "mamba_chunk_size": 16,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 128,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_n_groups": 2,
        "mamba_n_heads": 8,
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": False,
        "mamba_rms_norm": False,
        "mamba_use_mlp": True,
        "mlp_expansion_factor": 8,
        "mlp_multipliers": [0.9, 1.4],
        "num_logits_to_keep": 1,
        "projectors_bias": False,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.7, 0.5, 1.5, 0.9, 1.2],
        "ssm_out_multiplier": 0.75,
    }
    config = small("falcon_h1", **own | changes)
    return {key: value for key, value in config.items() if key != "pretraining_tp"}


def nemotron_h(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "nemotron_h",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "chunk_size": 16,
        "conv_kernel": 4,
        "eos_token_id": 2,
        "expand": 2,
        "head_dim": 16,
        "hidden_dropout": 0.0,
        "hidden_size": 64,
        "hybrid_override_pattern": "M-*-",
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "layer_norm_epsilon": EPS,
        "mamba_head_dim": 16,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 8,
        "mamba_proj_bias": False,
        "max_position_embeddings": 128,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "n_groups": 2,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_logits_to_keep": 1,
        "pad_token_id": 0,
        "rescale_prenorm_residual": True,
        "residual_in_fp32": False,
        "rms_norm_eps": EPS,
        "sliding_window": None,
        "ssm_state_size": 16,
        "tie_word_embeddings": False,
        "time_step_floor": 0.0001,
        "time_step_limit": [0.0, float("inf")],
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "time_step_rank": 256,
        "transformers_version": "4.51.3",
        "use_bias": False,
        "use_cache": True,
        "use_conv_bias": True,
        "use_mamba_kernels": True,
        "vocab_size": VOCAB,
    } | changes


def nemotron_h_moe(**changes: Any) -> dict[str, Any]:
    own = {
        "hybrid_override_pattern": "ME*E",
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 40,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_eps": EPS,
        "norm_topk_prob": True,
        "num_experts_per_tok": 3,
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "topk_group": 1,
    }
    return nemotron_h(**own | changes)


def glm4_moe(model_type: str, **changes: Any) -> dict[str, Any]:
    """What GLM-4.5 and dots.llm1 have in common."""
    own = {
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.5,
        "topk_group": 1,
    }
    return small(model_type, **own | changes)


def deepseek(model_type: str, **changes: Any) -> dict[str, Any]:
    """Multi-head latent attention, in which all parts of a head have widths of their own."""
    own = {
        "head_dim": 16,  # of what turns
        "kv_lora_rank": 32,
        "num_key_value_heads": 4,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
    }
    return glm4_moe(model_type, **own | changes)


def ernie4_5_moe(**changes: Any) -> dict[str, Any]:
    own = {
        "moe_intermediate_size": 32,
        "moe_k": 3,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 8,
        "moe_num_shared_experts": 2,
        "use_bias": False,
    }
    return small("ernie4_5_moe", **own | changes)


def minimax_m2(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "minimax_m2",
        "attention_dropout": 0.0,
        "attn_type_list": [1, 1],
        "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 32,
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
        "max_position_embeddings": 128,
        "mlp_intermediate_size": 96,
        "mtp_transformer_layers": 1,
        "num_attention_heads": 4,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_mtp_modules": 3,
        "output_router_logits": False,
        "qk_norm_type": "per_layer",
        "rms_norm_eps": EPS,
        "rope_theta": 5000000,
        "rotary_dim": 8,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
        "sliding_window": None,
        "tie_word_embeddings": False,
        "transformers_version": "4.46.1",
        "use_cache": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": VOCAB,
    } | changes


def internlm3(**changes: Any) -> dict[str, Any]:
    own = {
        "auto_map": {"AutoModelForCausalLM": "modeling_internlm3.InternLM3ForCausalLM"},
        "bias": True,
        "qkv_bias": True,
        "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
        "rope_theta": 50000000,
    }
    config = small("internlm3", **own | changes)
    others = ("attention_bias", "mlp_bias", "pretraining_tp")
    return {key: value for key, value in config.items() if key not in others}


def afmoe(**changes: Any) -> dict[str, Any]:
    own = {
        "auto_map": {"AutoModelForCausalLM": "modeling_afmoe.AfmoeForCausalLM"},
        "global_attn_every_n_layers": 2,
        "load_balance_coeff": 0.001,
        "moe_intermediate_size": 32,
        "mup_enabled": True,
        "n_group": 1,
        "num_dense_layers": 1,
        "num_expert_groups": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_limited_groups": 1,
        "num_shared_experts": 1,
        "route_norm": True,
        "route_scale": 1.5,
        "score_func": "sigmoid",
        "sliding_window": 16,
        "topk_group": 1,
    }
    config = small("afmoe", **own | changes)
    return {
        key: value for key, value in config.items() if key not in ("mlp_bias", "pretraining_tp")
    }


def exaone_moe(**changes: Any) -> dict[str, Any]:
    own = {
        "first_k_dense_replace": 1,
        "is_moe_layer": [False, True],
        "layer_types": ["sliding_attention", "full_attention"],
        "moe_intermediate_size": 32,
        "n_group": 1,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_nextn_predict_layers": 1,
        "num_shared_experts": 1,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sigmoid",
        "sliding_window": 16,
        "sliding_window_pattern": "LG",
        "topk_group": 1,
        "topk_method": "noaux_tc",
    }
    return small("exaone_moe", **own | changes)


def hy_v3(**changes: Any) -> dict[str, Any]:
    own = {
        "attention_bias": True,
        "enable_moe_fp32_combine": False,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_nextn_predict_layers": 1,
        "num_shared_experts": 1,
        "qk_norm": True,
        "route_norm": True,
        "router_scaling_factor": 1.5,
    }
    return small("hy_v3", **own | changes)


def mellum(**changes: Any) -> dict[str, Any]:
    own = {
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "rope_parameters": {
            "full_attention": {
                "attention_factor": 1.2,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 500000.0,
                "rope_type": "yarn",
            },
            "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
        },
        "sliding_window": 16,
        "transformers_version": "5.6.0",
    }
    config = small("mellum", **own | changes)
    others = ("mlp_bias", "pretraining_tp", "rope_scaling", "rope_theta")
    return {key: value for key, value in config.items() if key not in others}


def youtu(**changes: Any) -> dict[str, Any]:
    own = {
        "kv_lora_rank": 32,
        "num_key_value_heads": 4,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "rope_interleave": True,
        "tie_word_embeddings": True,
        "v_head_dim": 20,
    }
    config = small("youtu", **own | changes)
    others = ("head_dim", "pad_token_id")
    return {key: value for key, value in config.items() if key not in others}


def minicpm3(**changes: Any) -> dict[str, Any]:
    own = {
        "auto_map": {"AutoModelForCausalLM": "modeling_minicpm.MiniCPM3ForCausalLM"},
        "dim_model_base": 8,
        "scale_depth": 0.25 * 2**0.5,  # over the root of two layers
        "scale_emb": 4,
        "v_head_dim": None,
    }
    config = youtu(**own | changes)
    return {key: value for key, value in config.items() if key != "rope_interleave"} | {
        "model_type": "minicpm3"
    }


def gpt_neo(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "gpt_neo",
        "activation_function": "gelu_new",
        "attention_dropout": 0,
        "attention_layers": ["global", "local"],
        "attention_types": [[["global", "local"], 1]],
        "bos_token_id": 0,
        "embed_dropout": 0,
        "eos_token_id": 0,
        "gradient_checkpointing": False,
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": None,
        "layer_norm_epsilon": EPS,
        "max_position_embeddings": 96,
        "num_heads": 4,
        "num_layers": 2,
        "resid_dropout": 0,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "transformers_version": "4.9.0.dev0",
        "use_cache": True,
        "vocab_size": VOCAB,
        "window_size": 16,
    } | changes


def multimodal(model_type: str, text: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A model that also sees, as little as it can: the text model must be found in it."""
    vision = {
        "deepstack_visual_indexes": [0],
        "depth": 1,
        "embed_dim": 16,
        "hidden_size": 16,
        "image_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "num_position_embeddings": 4,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 4,
    }
    keys = ("bos_token_id", "eos_token_id", "transformers_version")
    own = {key: text[key] for key in keys} | {"model_type": model_type, "text_config": text}
    return own | {"vision_config": vision} | changes


# What sees the images of LLaVA; it is left out all the same.
CLIP = {
    "hidden_size": 8,
    "image_size": 8,
    "intermediate_size": 8,
    "model_type": "clip_vision_model",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 4,
    "projection_dim": 8,
}
_ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1}


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """The same with the text model's keys at the top."""
    return config["text_config"] | {k: v for k, v in config.items() if k != "text_config"}


MROPE = {"mrope_section": [2, 3, 3], "type": "mrope"}

DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 4.0,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "yarn",
}

CASES: dict[str, Case] = {
    "gemma3": Case(
        multimodal("gemma3", gemma3_text(num_hidden_layers=2), mm_tokens_per_image=4),
        embedding=0.02,
    ),
    # Built like the smallest: inputs of layers, and keys and values that layers share.
    "gemma4": Case(
        multimodal(
            "gemma4",
            gemma4_text(
                attention_k_eq_v=False,
                hidden_size_per_layer_input=16,
                layer_types=["sliding_attention", "full_attention"] * 2,
                num_global_key_value_heads=None,
                num_hidden_layers=4,
                num_kv_shared_layers=2,
                use_bidirectional_attention=None,
                use_double_wide_mlp=True,
            ),
            audio_config=None,
            vision_config={
                "head_dim": 8,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "num_key_value_heads": 2,
                "patch_size": 4,
                "position_embedding_size": 8,
            },
        ),
        embedding=0.02,
    ),
    "gemma4_unified": Case(
        multimodal(
            "gemma4_unified",
            gemma4_text(
                architectures=["Gemma4UnifiedForCausalLM"],
                layer_types=["sliding_attention", "full_attention"],
                model_type="gemma4_unified_text",
                num_hidden_layers=2,
            ),
            audio_config=None,
            vision_config={
                "mm_embed_dim": 16,
                "mm_posemb_size": 4,
                "output_proj_dims": 16,
                "patch_size": 2,
                "pooling_kernel_size": 1,
            },
        ),
        embedding=0.02,
    ),
    "mistral3": Case(
        multimodal(
            "mistral3",
            small("mistral", sliding_window=None),
            vision_config={
                "head_dim": 8,
                "hidden_size": 16,
                "image_size": 8,
                "intermediate_size": 16,
                "model_type": "pixtral",
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "patch_size": 4,
            },
        )
    ),
    "idefics3": Case(multimodal("idefics3", small("llama", **_ONE_LAYER))),
    "internvl": Case(multimodal("internvl", small("qwen2", **_ONE_LAYER))),
    "lfm2_vl": Case(
        multimodal(
            "lfm2_vl",
            lfm2(num_hidden_layers=2),
            projector_hidden_size=16,
            tie_word_embeddings=True,
        )
    ),
    "llava": Case(multimodal("llava", small("llama", **_ONE_LAYER), vision_config=CLIP)),
    "llava_next": Case(
        multimodal(
            "llava_next", small("mistral", sliding_window=None, **_ONE_LAYER), vision_config=CLIP
        )
    ),
    "llava_onevision": Case(multimodal("llava_onevision", small("qwen2", **_ONE_LAYER))),
    "smolvlm": Case(multimodal("smolvlm", small("llama", **_ONE_LAYER))),
    # The text model's keys are at the top.
    "qwen2_5_vl": Case(flat(multimodal("qwen2_5_vl", small("qwen2_5_vl", rope_scaling=MROPE)))),
    "qwen2_vl": Case(flat(multimodal("qwen2_vl", small("qwen2_vl", rope_scaling=MROPE)))),
    "qwen3_vl": Case(
        multimodal(
            "qwen3_vl",
            small(
                "qwen3_vl_text",
                rope_scaling={
                    "mrope_interleaved": True,
                    "mrope_section": [2, 3, 3],
                    "rope_type": "default",
                },
            ),
        )
    ),
    # As published: the experts are stacked, and transposed. No matrix is square: transformers goes
    # by the shapes.
    "qwen3_vl_moe": Case(
        multimodal(
            "qwen3_vl_moe",
            qwen3_moe(
                model_type="qwen3_vl_moe_text",
                moe_intermediate_size=48,
                rope_scaling={
                    "mrope_interleaved": True,
                    "mrope_section": [2, 3, 3],
                    "rope_type": "default",
                },
            ),
            tie_word_embeddings=False,
        ),
        transposed=True,
    ),
    "afmoe": Case(afmoe()),
    "apertus": Case(
        small(
            "apertus",
            attention_bias=True,
            hidden_act="xielu",
            post_norm=False,
            qk_norm=True,
            rope_scaling={
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
                "rope_type": "llama3",
            },
        )
    ),
    "arcee": Case(small("arcee", attention_bias=True, hidden_act="relu2", mlp_bias=True)),
    # The first layer of four sees everything.
    "cwm": Case(
        small(
            "cwm",
            rope_scaling={
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
                "rope_type": "llama3",
            },
            sliding_window=16,
        )
    ),
    # As V2-Lite: one projection of queries, YaRN. As V2: two, and groups of experts.
    "deepseek_v2": Case(
        deepseek(
            "deepseek_v2",
            norm_topk_prob=False,
            q_lora_rank=None,
            rope_scaling=DEEPSEEK_YARN | {"mscale_all_dim": 0.707},
            topk_method="greedy",
        )
    ),
    "deepseek_v2_groups": Case(
        deepseek(
            "deepseek_v2",
            first_k_dense_replace=0,
            n_group=4,
            n_shared_experts=2,
            norm_topk_prob=False,
            topk_group=2,
            topk_method="group_limited_greedy",
        )
    ),
    "deepseek_v3": Case(
        deepseek(
            "deepseek_v3",
            max_position_embeddings=2048,
            n_group=4,
            rope_scaling=DEEPSEEK_YARN,
            topk_group=2,
        ),
        long=True,
    ),
    "dots1": Case(
        glm4_moe(
            "dots1",
            first_k_dense_replace=0,
            max_window_layers=1,
            norm_topk_prob=False,
            sliding_window=16,
        )
    ),
    "exaone_moe": Case(exaone_moe()),
    "flex_olmo": Case(
        olmoe(
            model_type="flex_olmo",
            clip_qkv=None,
        )
    ),
    "hy_v3": Case(hy_v3()),
    "internlm3": Case(internlm3()),
    "hyperclovax": Case(
        granite(
            model_type="hyperclovax",
            attention_bias=False,
            auto_map={"AutoModelForCausalLM": "modeling_hyperclovax.HyperCLOVAXForCausalLM"},
            head_dim=16,
            logits_scaling=0.125,
            mlp_bias=False,
            residual_multiplier=1.0,
            tie_word_embeddings=False,
            use_post_norm=True,
        )
    ),
    "iquestcoder": Case(
        small(
            "iquestcoder",
            auto_map={"AutoModelForCausalLM": "modeling_iquestcoder.IQuestCoderForCausalLM"},
            clip_qkv=None,
            use_sliding_window=False,
        )
    ),
    "jais2": Case(
        small("jais2", attention_bias=True, hidden_act="relu2", layer_norm_eps=EPS, mlp_bias=True)
    ),
    "mellum": Case(mellum()),
    "minicpm3": Case(minicpm3(), embedding=0.02),
    "minimax_m2": Case(minimax_m2()),
    "solar_open": Case(
        glm4_moe(
            "solar_open",
            auto_map={"AutoModelForCausalLM": "modeling_solar_open.SolarOpenForCausalLM"},
            first_k_dense_replace=0,
            partial_rotary_factor=1.0,
            rope_scaling={
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "type": "yarn",
            },
            use_qk_norm=False,
        )
    ),
    "youtu": Case(youtu()),
    "ernie4_5_moe": Case(ernie4_5_moe()),
    # Also of the head, which is tied.
    "ernie4_5_moe_bias": Case(ernie4_5_moe(tie_word_embeddings=True, use_bias=True)),
    "glm4_moe": Case(
        glm4_moe("glm4_moe", attention_bias=True, partial_rotary_factor=0.5, use_qk_norm=True)
    ),
    "glm4_moe_lite": Case(deepseek("glm4_moe_lite", rope_interleave=False, v_head_dim=40)),
    "granitemoe": Case(granitemoe(tie_word_embeddings=False)),
    "granitemoehybrid": Case(granitemoehybrid(tie_word_embeddings=False)),
    # With experts beside the MLP, and without positions.
    "granitemoehybrid_experts": Case(
        granitemoehybrid(
            num_experts_per_tok=3,
            num_local_experts=8,
            position_embedding_type="nope",
            shared_intermediate_size=40,
            tie_word_embeddings=False,
        )
    ),
    # With a Mamba layer, all of its biases, and experts.
    "granitemoehybrid_mamba": Case(
        granitemoehybrid(
            layer_types=["mamba", "attention"],
            mamba_chunk_size=16,
            mamba_conv_bias=True,
            mamba_d_conv=4,
            mamba_d_head=16,
            mamba_d_state=16,
            mamba_expand=2,
            mamba_n_groups=2,
            mamba_proj_bias=True,
            num_experts_per_tok=3,
            num_local_experts=8,
            position_embedding_type="nope",
            shared_intermediate_size=40,
            tie_word_embeddings=False,
        )
    ),
    "bamba": Case(bamba()),
    "falcon_h1": Case(falcon_h1()),
    "falcon_h1_norm": Case(falcon_h1(mamba_rms_norm=True, num_hidden_layers=1)),
    "nemotron_h": Case(nemotron_h()),
    "nemotron_h_experts": Case(nemotron_h_moe()),
    # All biases, and experts that see less than all of an activation.
    "nemotron_h_latent": Case(
        nemotron_h_moe(
            hybrid_override_pattern="E*EM",
            mlp_bias=True,
            moe_latent_size=32,
            norm_topk_prob=False,
            use_bias=True,
            use_conv_bias=False,
        )
    ),
    "ministral3": Case(
        small(
            "ministral3",
            rope_parameters={
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "llama_4_scaling_beta": 0.5,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 1000000.0,
                "rope_type": "yarn",
                "type": "yarn",
            },
            sliding_window=None,
        )
    ),
    "mistral4": Case(
        deepseek(
            "mistral4",
            head_dim=40,
            rope_parameters={
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "llama_4_scaling_beta": 0.5,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 10000.0,
                "rope_type": "yarn",
                "type": "yarn",
            },
        )
    ),
    "nanochat": Case(small("nanochat", final_logit_softcapping=2.0, hidden_act="relu2")),
    "nemotron": Case(
        small(
            "nemotron",
            attention_bias=True,
            hidden_act="relu2",
            mlp_bias=True,
            norm_eps=EPS,
            partial_rotary_factor=0.5,
        )
    ),
    "olmo": Case(small("olmo", clip_qkv=0.9)),
    "olmo3": Case(
        small(
            "olmo3",
            layer_types=["sliding_attention", "full_attention"],
            rope_scaling={
                "attention_factor": 1.2,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "rope_type": "yarn",
            },
            rope_theta=500000,
            sliding_window=16,
        )
    ),
    "vaultgemma": Case(gemma2(model_type="vaultgemma", num_hidden_layers=2), embedding=0.02),
    "ernie4_5": Case(small("ernie4_5", use_bias=True)),
    "exaone4": Case(
        small("exaone4", num_hidden_layers=3, sliding_window=16, sliding_window_pattern=2),
    ),
    "glm": Case(glm4(model_type="glm", partial_rotary_factor=0.25)),
    "glm4": Case(glm4()),
    "granite": Case(granite(attention_bias=True, mlp_bias=True, tie_word_embeddings=False)),
    "granite_swa": Case(
        granite(
            model_type="granite_swa",
            layer_rope_theta=[0, 100.0, 10000.0],
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            num_hidden_layers=3,
            sliding_window=16,
            tie_word_embeddings=False,
        )
    ),
    "helium": Case(small("helium", attention_bias=True, mlp_bias=True)),
    "granitemoeshared": Case(
        granitemoe(
            model_type="granitemoeshared", shared_intermediate_size=64, tie_word_embeddings=False
        )
    ),
    "hunyuan_v1_moe": Case(
        small(
            "hunyuan_v1_moe",
            intermediate_size=32,
            moe_intermediate_size=[32, 32],
            moe_layer_num_skipped=0,
            moe_topk=[3, 3],
            num_experts=8,
            num_shared_expert=[1, 1],
            use_cla=False,
            use_mixed_mlp_moe=True,
            use_qk_norm=True,
        )
    ),
    "hunyuan_v1_dense": Case(
        small(
            "hunyuan_v1_dense",
            attention_bias=True,
            rope_scaling={
                "alpha": 50.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "type": "dynamic",
            },
            use_cla=False,
            use_qk_norm=True,
        )
    ),
    "llama": Case(llama(max_position_embeddings=2048), long=True),
    "llama_f32": Case(
        llama_first(hidden_size=48, num_attention_heads=3, intermediate_size=64),
        dtype="float32",
    ),
    # head_dim is not hidden_size / heads; with 32 original positions all three bands occur.
    "llama_rope_llama3": Case(
        llama(
            eos_token_id=[2, 5, 7],
            head_dim=24,
            intermediate_size=48,
            num_key_value_heads=1,
            rope_scaling={
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
                "rope_type": "llama3",
            },
            tie_word_embeddings=False,
        ),
        dtype="float16",
        shards=2,
    ),
    "llama_rope_linear": Case(
        llama(attention_bias=True, mlp_bias=True, rope_scaling={"factor": 4.0, "type": "linear"}),
    ),
    "llama_rope_yarn": Case(
        llama(
            rope_scaling={
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "type": "yarn",
            }
        ),
    ),
    "llama_rope_dynamic": Case(
        llama(max_position_embeddings=32, rope_scaling={"factor": 4.0, "type": "dynamic"}),
    ),
    "llama_rope_dynamic_decode": Case(
        llama(max_position_embeddings=48, rope_scaling={"factor": 4.0, "rope_type": "dynamic"}),
    ),
    "ministral": Case(
        small(
            "ministral",
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=16,
        )
    ),
    # Rows of 172 values are no multiple of 16 bytes.
    "mistral": Case(
        mistral(
            head_dim=16,
            intermediate_size=172,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
    ),
    "mistral_sliding": Case(mistral(max_position_embeddings=2048, sliding_window=16), long=True),
    # A window is given, and use_sliding_window says that it does not apply.
    # With one key-value head a norm over all keys has the width of a head.
    "olmo2": Case(olmo2(num_key_value_heads=1)),
    "phi3": Case(phi3(sliding_window=16)),
    "phi3_longrope": Case(phi3_longrope(32)),
    # The prompt has the short factors; all is computed anew with the long ones after 60 tokens.
    "phi3_longrope_switch": Case(phi3_longrope(60, tie_word_embeddings=True)),
    "qwen2": Case(qwen2()),
    "qwen2_sliding": Case(
        qwen2(num_hidden_layers=3, use_sliding_window=True),
    ),
    "qwen3": Case(qwen3(head_dim=32)),
    "cohere": Case(cohere()),
    "cohere2": Case(cohere2()),
    "gemma": Case(gemma(), embedding=0.02),
    "gemma2": Case(gemma2(), embedding=0.02),
    "gemma3_text": Case(gemma3_text(), embedding=0.02),
    "gemma4_text": Case(gemma4_text(), embedding=0.02),
    "gemma4_text_experts": Case(
        gemma4_text(
            enable_moe_block=True,
            layer_types=["sliding_attention", "full_attention"],
            moe_intermediate_size=32,
            num_experts=8,
            num_hidden_layers=2,
            top_k_experts=3,
        ),
        embedding=0.02,
    ),
    "persimmon": Case(persimmon(), embedding=1.0),
    "phi": Case(phi()),
    "stablelm": Case(stablelm()),
    # As the 12B model.
    "stablelm_norms": Case(
        stablelm(use_parallel_residual=True, use_qkv_bias=False, qk_layernorm=True)
    ),
    "stablelm_parallel": Case(stablelm(use_parallel_residual=True, use_qkv_bias=False)),
    "starcoder2": Case(starcoder2()),
    "gpt2": Case(gpt2(), embedding=0.02),
    "codegen": Case(gptj(model_type="codegen", n_ctx=96)),
    "falcon": Case(falcon(), embedding=0.02),
    # As the 40B model: heads of keys with several of queries, and two norms.
    "falcon_groups": Case(
        falcon(
            bias=True,
            ffn_hidden_size=96,
            new_decoder_architecture=True,
            num_kv_heads=2,
        ),
    ),
    "gptj": Case(gptj()),
    "gpt_neo": Case(gpt_neo()),
    "gpt_bigcode": Case(gpt_bigcode()),
    "opt": Case(opt()),
    "gpt_neox": Case(gpt_neox()),
    # What the 20B model has: another activation; and the blocks one after the other.
    "gpt_neox_sequential": Case(
        gpt_neox(hidden_act="gelu_fast", rotary_pct=0.5, use_parallel_residual=False)
    ),
    "seed_oss": Case(small("seed_oss", attention_bias=True, attention_out_bias=True)),
    "smollm3": Case(smollm3()),
    # Without no_rope_layers, the interval says which layers do not turn; they have the window.
    "smollm3_sliding": Case(
        smollm3(
            attention_bias=True,
            mlp_bias=True,
            no_rope_layer_interval=2,
            no_rope_layers=None,
            sliding_window=16,
            use_sliding_window=True,
        )
    ),
    "gpt_oss": Case(gpt_oss()),
    "mixtral": Case(mixtral(max_position_embeddings=2048), long=True),
    "mixtral_sliding": Case(mixtral(num_experts_per_tok=1, sliding_window=16)),
    "qwen3_moe": Case(qwen3_moe()),
    # The second layer has experts; the others are dense, each for a reason of its own.
    "qwen3_moe_dense": Case(
        qwen3_moe(
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            norm_topk_prob=False,
            num_experts_per_tok=8,
            num_hidden_layers=4,
            tie_word_embeddings=True,
        ),
    ),
    "qwen2_moe": Case(qwen2_moe()),
    "qwen2_moe_sliding": Case(
        qwen2_moe(max_window_layers=2, num_hidden_layers=3, use_sliding_window=True),
    ),
    "olmoe": Case(olmoe()),
    "qwen3_next": Case(qwen3_next()),
    "qwen3_5": Case(qwen3_5("qwen3_5", qwen3_5_text(**_SHORT))),
    "qwen3_5_text": Case(qwen3_5_text(max_position_embeddings=2048), long=True),
    # As published: the experts are stacked.
    "qwen3_5_moe": Case(
        qwen3_5("qwen3_5_moe", qwen3_5_moe_text(**_SHORT, **_BLOCKS)), stacked=True
    ),
    "qwen3_5_moe_text": Case(qwen3_5_moe_text()),
    "lfm2": Case(lfm2()),
    # As transformers 5 says it; with biases and more taps, and a convolution last.
    "lfm2_bias": Case(
        lfm2(
            block_auto_adjust_ff_dim=False,
            block_ff_dim=96,
            conv_L_cache=4,
            conv_bias=True,
            full_attn_idxs=None,
            layer_types=["conv", "full_attention", "conv"],
            num_hidden_layers=3,
            tie_word_embeddings=False,
        )
    ),
    "lfm2_moe": Case(lfm2_moe()),
    "lfm2_moe_plain": Case(
        lfm2_moe(
            layer_types=["full_attention", "conv"],
            norm_topk_prob=False,
            num_dense_layers=0,
            num_hidden_layers=2,
            routed_scaling_factor=1.5,
            tie_embedding=False,
            use_expert_bias=False,
        )
    ),
}


def published_config(case: Case) -> dict[str, Any]:
    """config.json as most files on the hub spell it."""
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    name = names[case.config["model_type"]]
    head = {"architectures": [name], "torch_dtype": case.dtype}
    return dict(sorted((head | case.config).items()))


def transformers_config(published: Mapping[str, Any]) -> PreTrainedConfig:
    """What transformers makes of a config in the published spelling."""
    # for_model keeps nested dicts and fills them in: it gets its own.
    keys: dict[str, Any] = json.loads(json.dumps(published))
    return AutoConfig.for_model(keys.pop("model_type"), **keys)


def auto_class(config: PreTrainedConfig) -> Any:
    """What makes a model of such a config, one that also sees with all its parts."""
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
    if name.endswith("router.proj.weight"):  # what it gives is divided by the root of the width
        return rng.normal(0.0, 1.5, shape)
    if name.endswith("A_log"):  # what came long ago must matter
        return rng.uniform(-4.0, 0.0, shape)
    peaked = ("q_proj.weight", "k_proj.weight", "qkv_proj.weight", "mlp.gate.weight")
    peaked += ("router.weight", "c_attn.weight", "query_key_value.weight")
    gain = 1.5 if name.endswith(peaked) else 1.0
    return rng.normal(0.0, gain * shape[-1] ** -0.5, shape)


def random_model(case: Case, rng: np.random.Generator) -> PreTrainedModel:
    """A float32 model whose weights are exact in the case's dtype."""
    config = transformers_config(published_config(case))
    model = auto_class(config).from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        kept = ("_bias", "layer_scalar")
        buffers = (named for named in model.named_buffers() if named[0].endswith(kept))
        lying = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, Conv1D)}
        for name, parameter in [*model.named_parameters(), *buffers]:
            own = parameter.T if name in lying else parameter
            values = random_weight(name, tuple(own.shape), rng, case.embedding)
            weight = torch.from_numpy(values)
            own.copy_(weight.to(getattr(torch, case.dtype)))
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


def answers(model: PreTrainedModel, prompt_ids: NDArray[np.int64]) -> dict[str, Any]:
    """The arrays of reference.npz. The model must be fresh (see dynamic rope above)."""
    ids = torch.from_numpy(prompt_ids)[None]
    routing = RoutingMargins(model)
    with torch.no_grad(), routing:
        logits = model(ids).logits[0]
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=GREEDY_STEPS,
            output_logits=True,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
    step_logits = torch.cat(out.logits)
    best = step_logits.topk(2).values
    margins = (best[:, 0] - best[:, 1]) / step_logits.norm(dim=1)
    return {
        "prompt_ids": prompt_ids,
        "logits": logits.numpy(),
        "greedy_ids": out.sequences[0, len(prompt_ids) :].numpy(),
        "greedy_margins": margins.numpy(),
        "final_logits": step_logits[-1].numpy(),
    } | ({"routing_margin": np.float32(min(routing.margins))} if routing.margins else {})


def is_fair(reference: Mapping[str, Any]) -> bool:
    """Whether equal greedy tokens are a fair, telling test: clear margins, no stop, variety."""
    greedy_ids = reference["greedy_ids"]
    return (
        len(greedy_ids) == GREEDY_STEPS
        and float(reference["greedy_margins"].min()) >= MIN_MARGIN
        and len(np.unique(greedy_ids)) >= MIN_DISTINCT
        and float(reference.get("routing_margin", np.inf)) >= MIN_ROUTING_MARGIN
    )


def transpose_experts(file: Path) -> None:
    tensors = load_file(file)
    for key in tensors:
        if ".experts." in key:
            tensors[key] = tensors[key].transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


def long_answers(model: PreTrainedModel, seed: int) -> dict[str, Any]:
    """The arrays of long.npz, from the first seed from this one on whose prompt is fair."""
    for prompt_seed in itertools.count(seed):
        rng = np.random.default_rng(prompt_seed)
        prompt_ids = rng.integers(3, model.config.get_text_config().vocab_size, LONG_TOKENS)
        reference = answers(model, prompt_ids)
        if is_fair(reference):
            break
    return reference | {"rows": np.array(LONG_ROWS), "logits": reference["logits"][LONG_ROWS]}


def make(name: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """Write one case into `folder` (replaced), from the first seed that is fair.

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
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    if case.long:
        np.savez_compressed(folder / "long.npz", **long_answers(model, seed))
    model.to(getattr(torch, case.dtype))
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
    published = json.dumps(published_config(case), indent=2)
    (folder / "config.published.json").write_text(published + "\n")
    np.savez_compressed(folder / "reference.npz", **reference)
    return seed, reference


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the stored references of the model tests.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    names = parser.parse_args().cases or list(CASES)
    if unknown := set(names) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; the cases are {', '.join(CASES)}")
    logging.set_verbosity_error()  # else it warns of every step beyond max_position_embeddings
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
