"""What a GGUF file means: its metadata as a config.json, its tensors by their names on the hub.

Names and conventions are those of llama.cpp's converter (convert_hf_to_gguf.py).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer.kernels.errors import CheckpointError, UnsupportedError
from infer.models.checkpoint import Checkpoint, TensorInfo, listed
from infer.models.config import RawConfig
from infer.models.formats.gguf import Gguf
from infer.models.formats.gguf_blocks import GgufBlocks
from infer.models.formats.packed import FLOATS, read_rows

# general.architecture -> model_type
_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Those whose rows of q and k the converter turns: see _Turned.
_TURNED = ("llama",)

_NAMES = {
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
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}

# Every key of an architecture that is understood; any other could change the computation.
_KNOWN = {
    *_SIZES,
    "vocab_size",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.causal",
    "expert_count",
    "expert_used_count",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}

# The other parameters of Llama 3's scaling, which no GGUF file states: all published models have
# these (low_freq_factor, high_freq_factor, original_max_position_embeddings).
_LLAMA3 = (1.0, 4.0, 8192)


def gguf_config(gguf: Gguf) -> RawConfig:
    """The metadata in Hugging Face's spelling. `find_format` of it reads the file's blocks.

    Raises UnsupportedError for an architecture or a key that is not implemented, CheckpointError
    for values that contradict each other.
    """
    architecture = str(gguf.metadata.get("general.architecture"))
    if architecture not in _ARCHITECTURES:
        raise UnsupportedError(
            f"{gguf.file}: the architecture {architecture!r} is not implemented for GGUF files "
            f"(only {listed(_ARCHITECTURES)})."
        )
    prefix = f"{architecture}."
    values = {
        key.removeprefix(prefix): value
        for key, value in gguf.metadata.items()
        if key.startswith(prefix)
    }
    if unknown := sorted(values.keys() - _KNOWN):
        raise UnsupportedError(
            f"{gguf.file}: {listed(prefix + key for key in unknown)} is not implemented."
        )
    if arrays := sorted(key for key, value in values.items() if not np.isscalar(value)):
        raise UnsupportedError(
            f"{gguf.file}: {listed(prefix + key for key in arrays)} differ from layer to layer, "
            "which is not implemented."
        )
    raw = RawConfig(values, f"{gguf.file}: {architecture}")
    raw.expect("attention.causal", True)
    raw.expect("expert_count", 0)
    config: dict[str, Any] = {name: raw.size(key) for key, name in _SIZES.items()}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = raw.size("attention.key_length", hidden // heads)
    raw.expect("attention.value_length", head_dim)
    embeddings = _tensor(gguf, "token_embd.weight")
    return RawConfig(
        config
        | {
            "model_type": _ARCHITECTURES[architecture],
            "num_key_value_heads": raw.size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": raw.get("attention.layer_norm_rms_epsilon", kind=float),
            "vocab_size": embeddings.shape[0],
            "tie_word_embeddings": "output.weight" not in gguf.tensors,
            "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in gguf.tensors,
            "hidden_act": "silu",
            "rope_theta": raw.get("rope.freq_base", 10000.0, float),
            "partial_rotary_factor": raw.size("rope.dimension_count", head_dim) / head_dim,
            "rope_scaling": _rope_scaling(gguf, raw, head_dim),
            "quantization_config": {"quant_method": GgufBlocks.method},
        },
        str(gguf.file),
    )


def _tensor(gguf: Gguf, name: str) -> TensorInfo:
    info = gguf.tensors.get(name)
    if info is None:
        raise CheckpointError(f"{gguf.file} lacks the tensor {name}. Download it again.")
    return info


def _rope_scaling(gguf: Gguf, raw: RawConfig, head_dim: int) -> dict[str, Any] | None:
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        raw.expect(f"rope.scaling.{key}", 1.0)
    raw.expect("rope.scale_linear", 1.0)
    raw.expect("rope.scaling.type", "none", "linear", "yarn")
    kind = raw.get("rope.scaling.type", "none", str)
    if kind == "none":
        return _llama3(gguf, raw, head_dim) if _ROPE_FACTORS in gguf.tensors else None
    if _ROPE_FACTORS in gguf.tensors:
        raise UnsupportedError(f"{gguf.file}: {_ROPE_FACTORS} with {kind} is not implemented.")
    scaling = {"rope_type": kind, "factor": raw.get("rope.scaling.factor", kind=float)}
    if kind == "yarn":
        keys = {
            "original_max_position_embeddings": ("original_context_length", int),
            "beta_fast": ("yarn_beta_fast", float),
            "beta_slow": ("yarn_beta_slow", float),
        }
        found = {name: raw.get(f"rope.scaling.{key}", None, of) for name, (key, of) in keys.items()}
        scaling |= {name: value for name, value in found.items() if value is not None}
    return scaling


def _llama3(gguf: Gguf, raw: RawConfig, head_dim: int) -> dict[str, Any] | None:
    """Llama 3's scaling, from the factors that the converter has made of it."""
    info = gguf.tensors[_ROPE_FACTORS]
    if info.shape != (head_dim // 2,) or info.dtype not in FLOATS:
        raise CheckpointError(f"{gguf.file}: {_ROPE_FACTORS} is {info.shape} of {info.dtype}.")
    factors = read_rows(info)
    factor = float(factors[-1])  # of the longest wave
    if (factors == 1).all():
        return None
    low, high, original = _LLAMA3
    theta = raw.get("rope.freq_base", 10000.0, float)
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / waves - low) / (high - low), 0, 1)
    if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4, atol=0):
        raise UnsupportedError(
            f"{gguf.file}: {_ROPE_FACTORS} is not Llama 3's scaling of {original} positions, the "
            "only one that is implemented."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def gguf_checkpoint(gguf: Gguf, config: RawConfig) -> Checkpoint:
    """The tensors by their names on the hub, rows in the order that they have there. Those without
    such a name keep their own; what config.json says instead is left out."""
    turned = gguf.metadata.get("general.architecture") in _TURNED
    heads = {
        "attn_q": config.values["num_attention_heads"],
        "attn_k": config.values["num_key_value_heads"],
    }
    tensors: dict[str, TensorInfo] = {}
    for info in gguf.tensors.values():
        if info.name == _ROPE_FACTORS:
            continue
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", info.name)
        name, own = info.name, "" if match is None else match[2]
        if match is not None and own in _NAMES:
            layer = "" if match[1] is None else f"model.layers.{match[1]}."
            name = f"{layer}{_NAMES[own]}.{match[3]}"
        fields = (name, info.dtype, info.shape, info.file, info.offset, info.nbytes)
        if turned and own in heads:
            if info.shape[0] % (2 * heads[own]):
                raise CheckpointError(
                    f"{gguf.file}: {info.name} has {info.shape[0]} rows, but {heads[own]} heads."
                )
            tensors[name] = _Turned(*fields, heads[own])
        else:
            tensors[name] = TensorInfo(*fields)
    return Checkpoint(gguf.file, tensors)


@dataclass(frozen=True)
class _Turned(TensorInfo):
    """A tensor with rows 0, h, 1, h + 1, ... of each head of 2 h rows, as llama.cpp rotates pairs
    of neighbours. It is read as the hub has it, where a row is rotated with the one h after it."""

    heads: int

    def read_into(self, view: memoryview, start: int = 0) -> None:
        per_head = self.nbytes // self.heads
        first, last = start // per_head, -(-(start + len(view)) // per_head)
        whole = np.empty((last - first) * per_head, np.uint8)
        super().read_into(whole.data.cast("B"), first * per_head)
        pairs = whole.reshape(last - first, self.shape[0] // self.heads // 2, 2, -1)
        rows = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)
        at = start - first * per_head
        view[:] = rows[at : at + len(view)].data.cast("B")
