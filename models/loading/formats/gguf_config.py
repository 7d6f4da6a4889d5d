"""Translates GGUF files: the metadata to a config.json, tensors to their names on the hub.

Names and conventions are those of llama.cpp's converter (convert_hf_to_gguf.py);
gguf_conversions.py has what differs from one architecture to the next.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.errors import CheckpointError, UnsupportedError
from infer.models.loading.checkpoint import Checkpoint, listed
from infer.models.loading.config import RawConfig, nearest, shown
from infer.models.loading.formats.format import FLOATS
from infer.models.loading.formats.gguf import Gguf
from infer.models.loading.formats.gguf_blocks import GgufBlocks, SwappedColumns
from infer.models.loading.formats.gguf_conversions import (
    CONVERSIONS,
    NAMES,
    VARIANTS,
    Conversion,
)
from infer.models.loading.formats.grouped import Floats
from infer.models.loading.formats.packed import read_rows
from infer.models.loading.tensors import TensorInfo

_ROPE_FACTORS = "rope_freqs.weight"
_LONGROPE = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}

# Tensors of all experts of a layer, and what each expert's matrix holds.
_STACKED = {part: (part,) for part in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")} | {
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")
}

# Whose names end on the hub without ".weight" or ".bias".
_BARE = ("attn_sinks", "exp_probs_b", "layer_output_scale", "ssm_a", "ssm_d", "ssm_dt")

# Norms of all heads, where each has weights of its own.
_HEAD_NORMS = ("attn_q_norm", "attn_k_norm")

# The names in config.json of the number of experts.
_COUNTS = ("num_experts", "n_routed_experts", "moe_num_experts")

# Tensors of a gated delta net with a row for each head, and those with rows for heads' values.
_BY_HEAD = ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")
_TILED = (*_BY_HEAD, "attn_qkv", "attn_gate", "ssm_conv1d", "ssm_out")

# xIELU's numbers, which are metadata, and their shapes on the hub.
_XIELU: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}
_EPS, _RMS_EPS = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
_KV_HEADS = "attention.head_count_kv"
# Keys that may be lists, with a value for each layer.
_BY_LAYER = ("attention.head_count", _KV_HEADS, "feed_forward_length")
_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"

# Every key that is understood for all architectures; any other could change the computation.
_KNOWN = {
    *_SIZES,
    _EPS,
    _RMS_EPS,
    "vocab_size",
    _KV_HEADS,
    "attention.key_length",
    "attention.value_length",
    "attention.causal",
    "expert_count",
    "expert_used_count",
    "nextn_predict_layers",
    "tensor_data_layout",
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
# Keys of architectures with experts.
_EXPERTS = {
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_weights_norm",
    "expert_weights_scale",
    "expert_gating_func",
}

# The other parameters of Llama 3's scaling, which no GGUF file states: all published models have
# these (low_freq_factor, high_freq_factor, original_max_position_embeddings).
_LLAMA3 = (1.0, 4.0, 8192)
_ORIGINAL = "original_max_position_embeddings"


def gguf_config(gguf: Gguf) -> RawConfig:
    """The metadata in Hugging Face's spelling. `find_format` of it reads the file's blocks.

    Raises UnsupportedError for an architecture or a key that is not implemented, CheckpointError
    for values that contradict each other.
    """
    architecture, how = _conversion(gguf)
    prefix = f"{architecture}."
    values = {
        key.removeprefix(prefix): value
        for key, value in gguf.metadata.items()
        if key.startswith(prefix)
    }
    if unknown := sorted(values.keys() - _known(how)):
        raise UnsupportedError(
            f"{gguf.file}: {listed(prefix + key for key in unknown)} is not implemented."
        )
    raw = RawConfig(values, f"{gguf.file}: {architecture}")
    layer_types: dict[str, Any] = {}
    if how.stateful and not np.isscalar(values.get(_KV_HEADS, 0)):
        heads, layer_types["layer_types"] = _attending(gguf, values[_KV_HEADS], how.stateful)
        values[_KV_HEADS] = heads
    if how.experts:  # a model without another MLP does not state its width
        values.setdefault("feed_forward_length", values.get("expert_feed_forward_length"))
    by_layer = {key for key, value in values.items() if not np.isscalar(value)}
    for key in by_layer.intersection(_BY_LAYER):
        numbers = gguf.numbers(prefix + key, raw.size("block_count"), "iu")
        if key in how.by_layer or len(set(numbers)) == 1:
            values[key] = numbers[0]
            by_layer.remove(key)
    if arrays := sorted(by_layer - {_PATTERN, *how.ignored}):
        raise UnsupportedError(
            f"{gguf.file}: {listed(prefix + key for key in arrays)} differ from layer to layer, "
            "which is not implemented."
        )
    raw.expect("attention.causal", True)
    raw.expect("tensor_data_layout", "Meta AI original pth")
    config: dict[str, Any] = {name: raw.size(key) for key, name in _SIZES.items()}
    layers, further = config["num_hidden_layers"], raw.get("nextn_predict_layers", 0, int)
    if not 0 <= further < layers:
        raise CheckpointError(
            f"{gguf.file}: of {layers} layers, {further} are to predict further tokens."
        )
    config["num_hidden_layers"] = layers - further
    config["num_nextn_predict_layers"] = further
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = raw.size("attention.key_length", hidden // heads)
    if how.latent:  # of what is rotated
        head_dim = raw.size("rope.dimension_count")
    else:
        raw.expect("attention.value_length", head_dim)
    embeddings = _tensor(gguf, "token_embd.weight")
    bias = _has_bias(gguf, "attn_q") or _has_bias(gguf, "attn_qkv")
    config |= {
        "model_type": how.model_type,
        "num_key_value_heads": raw.size(_KV_HEADS, heads),
        "head_dim": head_dim,
        how.eps: raw.get(_EPS if how.layer_norm else _RMS_EPS, kind=float),
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **dict.fromkeys(("attention_bias", "qkv_bias", "use_bias", "use_qkv_bias"), bias),
        "attention_out_bias": _has_bias(gguf, "attn_output"),
        "mlp_bias": _has_bias(gguf, "ffn_gate"),
        "hidden_act": "silu",
        "q_lora_rank": None,
        "sliding_window": None,
        "rope_parameters": _rope(gguf, raw, how, head_dim),
        "quantization_config": {"quant_method": GgufBlocks.method},
    }
    config |= {**how.values, **layer_types}
    if how.pattern is not None:
        config |= _windows(raw, how)
    if how.experts:
        config |= _experts(gguf, raw, how, config["num_hidden_layers"])
    else:
        raw.expect("expert_count", 0)
    config |= {name: raw.get(key) for key, name in how.keys.items() if key in values}
    if config["rope_parameters"].get("rope_type") == "longrope":
        config[_ORIGINAL] = config["rope_parameters"][_ORIGINAL]  # where Phi-3 has it
    return RawConfig(config | how.more(gguf, config), str(gguf.file))


def _conversion(gguf: Gguf) -> tuple[str, Conversion]:
    """general.architecture, and how its files are read."""
    name = str(gguf.metadata.get("general.architecture"))
    if name not in CONVERSIONS:
        raise UnsupportedError(
            f"{gguf.file}: the architecture {shown(name)} is not implemented for GGUF files."
            f"{nearest(name, CONVERSIONS)}"
        )
    key, variant = VARIANTS.get(name, ("", CONVERSIONS[name]))
    value = gguf.metadata.get(f"{name}.{key}")
    return name, variant if value is not None and np.any(value) else CONVERSIONS[name]


def _known(how: Conversion) -> set[str]:
    """The keys that are understood."""
    known = {*_KNOWN, *how.keys, *how.read, *how.ignored}
    if how.experts:
        known |= _EXPERTS
    if how.pattern is not None:
        known.add(_WINDOW)
    if how.pattern:
        known.add(_PATTERN)
    if how.local_theta is not None:
        known.add("rope.freq_base_swa")
    return known


def _has_bias(gguf: Gguf, part: str) -> bool:
    return f"blk.0.{part}.bias" in gguf.tensors


def _attending(gguf: Gguf, by_layer: Any, other: str) -> tuple[Any, list[str]]:
    """The heads of keys in layers that have any, and the types of all layers; other: without."""
    heads = np.asarray(by_layer).tolist()
    counts = set(heads) - {0}
    if len(counts) != 1:
        raise UnsupportedError(
            f"{gguf.file}: {_KV_HEADS} = {shown(heads)} is not implemented (only 0 and one "
            "other number)."
        )
    return counts.pop(), ["full_attention" if count else other for count in heads]


def _windows(raw: RawConfig, how: Conversion) -> dict[str, Any]:
    """The window, which 0 means there is none, and which layers have it."""
    window = raw.get(_WINDOW, how.values.get("sliding_window"), int) or None
    pattern = raw.get(_PATTERN, how.pattern)
    if not how.pattern or window is None:
        return {"sliding_window": window}
    if np.isscalar(pattern):
        return {"sliding_window": window, "sliding_window_pattern": pattern}
    types = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    return {"sliding_window": window, "layer_types": types}


def _experts(gguf: Gguf, raw: RawConfig, how: Conversion, layers: int) -> dict[str, Any]:
    """Reads the number and the width of the experts, and which layers have some. Older files do not
    state all of this."""
    if (normed := how.values.get("norm_topk_prob")) is None:
        raw.expect("expert_weights_norm", True)
    if "expert_weights_scale" not in how.keys:
        raw.expect("expert_weights_scale", 1.0, 0.0)
    raw.expect("expert_gating_func", *how.gating)
    routed = [i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" in gguf.tensors]
    if not routed:
        raise CheckpointError(f"{gguf.file} has experts, but no layer of it a router.")
    down = _tensor(gguf, f"blk.{routed[0]}.ffn_down_exps.weight")
    shared = gguf.tensors.get(f"blk.{routed[0]}.ffn_down_shexp.weight")
    key, width = "expert_shared_feed_forward_length", shared and shared.shape[-1]
    if raw.get(key, None) != 0:  # as Qwen3-Coder has it, where no expert is shared
        width = raw.size(key, width)
    return {
        "num_experts": raw.size("expert_count"),
        "num_experts_per_tok": raw.size("expert_used_count"),
        "moe_intermediate_size": raw.size("expert_feed_forward_length", down.shape[-1]),
        "shared_expert_intermediate_size": width,
        "norm_topk_prob": raw.get("expert_weights_norm", normed, bool),
        "mlp_only_layers": [i for i in range(layers) if i not in routed],
    }


def _tensor(gguf: Gguf, name: str) -> TensorInfo:
    info = gguf.tensors.get(name)
    if info is None:
        raise CheckpointError(f"{gguf.file} lacks the tensor {name}. Download it again.")
    return info


def _rope(gguf: Gguf, raw: RawConfig, how: Conversion, head_dim: int) -> dict[str, Any]:
    """rope_parameters, those of layers with a window apart where they have their own."""
    own = {"partial_rotary_factor": raw.size("rope.dimension_count", head_dim) / head_dim}
    everywhere = own | {"rope_theta": raw.get("rope.freq_base", 10000.0, float)}
    everywhere |= _rope_scaling(gguf, raw, how, head_dim)
    if how.local_theta is None:
        return everywhere
    local = {"rope_theta": raw.get("rope.freq_base_swa", how.local_theta, float)}
    return {"full_attention": everywhere, "sliding_attention": own | local}


def _rope_scaling(gguf: Gguf, raw: RawConfig, how: Conversion, head_dim: int) -> dict[str, Any]:
    raw.expect("rope.scale_linear", 1.0)
    kind = raw.get("rope.scaling.type", "none", str)
    if any(name in gguf.tensors for name in _LONGROPE.values()):
        raw.expect("rope.scaling.type", "none", "longrope")
        return _longrope(gguf, raw)
    raw.expect("rope.scaling.type", "none", "linear", "yarn")
    raw.expect("rope.scaling.yarn_ext_factor", 1.0)
    if kind != "yarn":
        for key in ("attn_factor", "yarn_attn_factor"):
            raw.expect(f"rope.scaling.{key}", 1.0)
    if how.proportional:
        raw.expect("rope.scaling.type", "none")
        return _proportional(gguf, head_dim)
    if kind == "none":
        return _llama3(gguf, raw, head_dim) if _ROPE_FACTORS in gguf.tensors else {}
    if _ROPE_FACTORS in gguf.tensors:
        raise UnsupportedError(f"{gguf.file}: {_ROPE_FACTORS} with {kind} is not implemented.")
    scaling = {"rope_type": kind, "factor": raw.get("rope.scaling.factor", kind=float)}
    if kind == "yarn":
        keys = {
            _ORIGINAL: ("original_context_length", int),
            "beta_fast": ("yarn_beta_fast", float),
            "beta_slow": ("yarn_beta_slow", float),
            "attention_factor": ("yarn_attn_factor", float),
            "attn_factor": ("attn_factor", float),
        }
        found = {name: raw.get(f"rope.scaling.{key}", None, of) for name, (key, of) in keys.items()}
        scaling |= {name: value for name, value in found.items() if value is not None}
    return scaling


def _longrope(gguf: Gguf, raw: RawConfig) -> dict[str, Any]:
    """A factor for each pair, as Phi-3 has them, and one on cos and sin."""
    infos = {key: _tensor(gguf, name) for key, name in _LONGROPE.items()}
    if odd := [info.name for info in infos.values() if info.dtype not in FLOATS]:
        raise CheckpointError(f"{gguf.file}: {listed(odd)} are not floats.")
    factors = {key: read_rows(info).reshape(-1).tolist() for key, info in infos.items()}
    original = raw.size("rope.scaling.original_context_length")
    attention = raw.get("rope.scaling.attn_factor", None, float)
    return {
        "rope_type": "longrope",
        **factors,
        _ORIGINAL: original,
        "attention_factor": attention,
    }


def _rope_factors(gguf: Gguf, head_dim: int) -> Floats:
    """Reads the factors by which each pair of a head's dimensions rotates more slowly."""
    info = _tensor(gguf, _ROPE_FACTORS)
    if info.shape != (head_dim // 2,) or info.dtype not in FLOATS:
        raise CheckpointError(f"{gguf.file}: {_ROPE_FACTORS} is {info.shape} of {info.dtype}.")
    return read_rows(info)


def _proportional(gguf: Gguf, head_dim: int) -> dict[str, Any]:
    """Gemma 4's: the first pairs rotate as they would, the others by next to nothing."""
    factors = _rope_factors(gguf, head_dim)
    rotated = int((factors == 1).sum())
    if (factors[:rotated] != 1).any() or not (factors[rotated:] >= 1e30).all():
        raise UnsupportedError(
            f"{gguf.file}: {_ROPE_FACTORS} is not implemented (only 1 for the first pairs and 1e30 "
            "for the others)."
        )
    return {"rope_type": "proportional", "partial_rotary_factor": 2 * rotated / head_dim}


def _llama3(gguf: Gguf, raw: RawConfig, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, from the factors that the converter has made of it."""
    factors = _rope_factors(gguf, head_dim)
    factor = float(factors[-1])  # of the longest wave
    if (factors == 1).all():
        return {}
    low, high, original = _LLAMA3
    theta = raw.get("rope.freq_base", 10000.0, float)
    with np.errstate(all="ignore"):  # of values that nothing can be computed with
        waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((original / waves - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-4, atol=0):
        raise UnsupportedError(
            f"{gguf.file}: {_ROPE_FACTORS} is not Llama 3's scaling of {original} positions, the "
            "only one that is implemented."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        _ORIGINAL: original,
    }


def gguf_checkpoint(gguf: Gguf, config: RawConfig) -> Checkpoint:
    """The tensors by their names on the hub, with the rows and values that they have there. Those
    without such a name keep their own; what config.json says instead is left out, and so are the
    layers behind the last one, which predict further tokens."""
    _, how = _conversion(gguf)
    names = NAMES | how.names
    last = config.values.get("num_hidden_layers", 0)
    further = range(last, last + config.values.get("num_nextn_predict_layers", 0))
    tensors = _xielu(gguf, last) if how.model_type == "apertus" else {}
    for info in gguf.tensors.values():
        if info.name in (_ROPE_FACTORS, *_LONGROPE.values()):
            continue
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?([\w.]+?)(?:\.(weight|bias))?", info.name)
        if match is None:
            tensors[info.name] = info
            continue
        if match[1] is not None and int(match[1]) in further:
            continue
        layer = "" if match[1] is None else f"{how.layers}.{match[1]}."
        for own, name, part in _parts(info, match[2], names, config):
            suffix = "" if own in _BARE or match[3] is None else f".{match[3]}"
            name = f"{layer}{name}{suffix}" if own in names else info.name
            if name in tensors:
                raise CheckpointError(f"{gguf.file} holds {name} twice, once in {info.name}.")
            tensors[name] = _as_on_the_hub(replace(part, name=name), own, how, config)
    return Checkpoint(gguf.file, tensors, upright=True)


def _parts(
    info: TensorInfo, own: str, names: dict[str, str], config: RawConfig
) -> Iterator[tuple[str, str, TensorInfo]]:
    """Yields the parts of a tensor that are several tensors on the hub: the name that each would
    have in GGUF, its name on the hub, and its info."""
    rows = info.shape[0]
    experts = next(filter(None, map(config.values.get, _COUNTS)), None)
    if 0 in info.shape:  # no shape that a model asks for
        yield own, names.get(own, own), info
    elif own == "attn_qkv" and own not in names:
        kv_heads = config.values["num_key_value_heads"]
        kv_rows = rows // (config.values["num_attention_heads"] + 2 * kv_heads) * kv_heads
        start = 0
        for part, count in (("q", rows - 2 * kv_rows), ("k", kv_rows), ("v", kv_rows)):
            here = f"attn_{part}"
            yield here, names[here], info.part(info.name, start, (count, *info.shape[1:]))
            start += count
    elif (
        own in _STACKED and len(info.shape) > 1 and info.shape[1] % len(held := _STACKED[own]) == 0
    ):
        if rows != experts:
            raise CheckpointError(
                f"{info.file}: {info.name} holds {rows} experts, but the metadata say {experts}."
            )
        shape = (info.shape[1] // len(held), *info.shape[2:])  # of a matrix, or a bias
        whole = replace(info, shape=(rows * len(held), *shape))
        for i in range(rows * len(held)):
            expert, which = divmod(i, len(held))
            name = names[held[which]].format(expert)
            yield held[which], name, whole.part(info.name, i * math.prod(shape[:-1]), shape)
    elif own in _HEAD_NORMS and "{}" in names[own] and len(info.shape) == 2:
        for head in range(rows):
            yield own, names[own].format(head), info.part(info.name, head, info.shape[1:])
    elif own == "ffn_gate_inp_shexp" and len(info.shape) == 1:  # a matrix of one row
        yield own, names[own], replace(info, shape=(1, rows))
    elif own in ("shortconv.conv", "ssm_conv1d") and len(info.shape) == 2:
        yield own, names.get(own, own), replace(info, shape=(rows, 1, info.shape[1]))
    elif own in ("attn_k_b", "attn_v_b") and len(info.shape) == 3:  # a matrix for each head
        yield own, names.get(own, own), replace(info, shape=(rows * info.shape[1], info.shape[2]))
    elif own in ("ssm_a", "ssm_d", "ssm_norm"):  # of Mamba in columns, or rows for groups
        yield own, names.get(own, own), replace(info, shape=(math.prod(info.shape),))
    elif own == "exp_probs_b" and "moe_statics" in names.get(own, ""):
        yield own, names[own], replace(info, shape=(1, math.prod(info.shape)))
    else:
        yield own, names.get(own, own), info


def _as_on_the_hub(info: TensorInfo, own: str, how: Conversion, config: RawConfig) -> TensorInfo:
    """The tensor with its rows in the hub's order, and without what was added to it."""
    fields = _fields(info)
    heads = config.values["num_attention_heads"]
    if how.permuted and own in ("attn_q", "attn_k"):
        heads = heads if own == "attn_q" else config.values["num_key_value_heads"]
        if info.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{info.file}: {info.name} has {info.shape[0]} rows, but {heads} heads."
            )
        return _Swapped(*fields, (heads, info.shape[0] // heads // 2, 2), 1)
    if how.model_type == "gpt_neox" and own == "attn_qkv":
        if info.shape[0] % (3 * heads):
            raise CheckpointError(
                f"{info.file}: {info.name} has {info.shape[0]} rows, but 3 times {heads} heads."
            )
        return _Swapped(*fields, (3, heads, info.shape[0] // heads // 3), 0)
    if how.tiled and own in _TILED:
        info = _untiled(info, own, config)
    if own == "ssm_a":
        return _changed(info, lambda values: np.log(-values))
    if how.norm_added and info.name.endswith("norm.weight") and own != "ssm_norm":
        return _changed(info, lambda values: values - np.float32(how.norm_added))
    return info


def _fields(info: TensorInfo) -> tuple[str, str, tuple[int, ...], Path, int, int]:
    return info.name, info.dtype, info.shape, info.file, info.offset, info.nbytes


def _changed(info: TensorInfo, undo: Callable[[Floats], Floats]) -> TensorInfo:
    if info.dtype != "f32":
        raise UnsupportedError(
            f"{info.file}: {info.name} is of type {info.dtype}, which is not implemented for "
            "such a vector (only f32)."
        )
    return _Changed(*_fields(info), info, undo)


def _untiled(info: TensorInfo, own: str, config: RawConfig) -> TensorInfo:
    """A tensor of a gated delta net with the heads of a key beside each other, where llama.cpp has
    the first of each key, then the second of each."""
    heads, keys = (config.values[f"linear_num_{kind}_heads"] for kind in ("value", "key"))
    width = 1 if own in _BY_HEAD else config.values["linear_value_head_dim"]
    queries = 2 * keys * config.values["linear_key_head_dim"]  # and keys, in front
    start, axis = queries if own in ("attn_qkv", "ssm_conv1d") else 0, -1 if own == "ssm_out" else 0
    if info.shape[axis] != start + heads * width:
        raise CheckpointError(
            f"{info.file}: {info.name} is {info.shape}, which is not of {heads} heads of {width}."
        )
    if heads == keys:
        return info
    sizes = (heads // keys, keys, width)
    if own == "ssm_out":
        return SwappedColumns(*_fields(info), sizes)
    return _Swapped(*_fields(info), sizes, 0, start)


@dataclass(frozen=True)
class _Swapped(TensorInfo):
    """A tensor with rows [a, b, c] that is read with `axis` and the next of these swapped.

    llama.cpp rotates pairs of neighbours, so that a head has rows 0, h, 1, h + 1, ... of its 2 h;
    on the hub a row is rotated with the one h after it. And all of q, all of k and all of v follow
    each other where GPT-NeoX has q, k and v of each head. start: rows in front that stay."""

    sizes: tuple[int, int, int]
    axis: int
    start: int = 0

    @property
    def order(self) -> NDArray[np.int64]:
        """Where each row is in the file."""
        rows = np.arange(self.shape[0])
        swapped = rows[self.start :].reshape(self.sizes).swapaxes(self.axis, self.axis + 1)
        return np.concatenate([rows[: self.start], swapped.reshape(-1)])

    def read_into(self, view: memoryview, start: int = 0) -> None:
        stride = self.nbytes // self.shape[0]
        first, last = start // stride, -(-(start + len(view)) // stride)
        rows, done = self.order[first:last], 0
        whole = np.empty((len(rows), stride), np.uint8)
        for near in np.split(rows, np.flatnonzero(abs(np.diff(rows)) > 2) + 1):
            low = int(near.min())
            span = np.empty((near.max() + 1 - low, stride), np.uint8)
            super().read_into(span.data.cast("B"), low * stride)
            whole[done : done + len(near)] = span[near - low]
            done += len(near)
        at = start - first * stride
        view[:] = whole.reshape(-1)[at : at + len(view)].data.cast("B")


@dataclass(frozen=True)
class _Changed(TensorInfo):
    """A tensor of f32 whose values the converter has changed, which is undone."""

    of: TensorInfo
    undo: Callable[[Floats], Floats]

    def read_into(self, view: memoryview, start: int = 0) -> None:
        self.of.read_into(view, start)
        values = np.frombuffer(view, np.float32)
        with np.errstate(invalid="ignore", divide="ignore"):  # what is not finite shows as that
            values[:] = self.undo(values)


@dataclass(frozen=True)
class _Stated(TensorInfo):
    """A number, f32, that is a tensor on the hub and metadata here."""

    value: float

    def read_into(self, view: memoryview, start: int = 0) -> None:
        view[:] = np.float32(self.value).tobytes()[start : start + len(view)]


def _xielu(gguf: Gguf, layers: int) -> dict[str, TensorInfo]:
    """Returns xIELU's numbers, which are in the metadata for each layer or for all, as tensors."""
    tensors: dict[str, TensorInfo] = {}
    for part, shape in _XIELU.items():
        for layer, value in enumerate(gguf.numbers(f"xielu.{part}", layers, "f")):
            name = f"model.layers.{layer}.mlp.act_fn.{part}"
            tensors[name] = _Stated(name, "f32", shape, gguf.file, 0, 4, value)
    return tensors
