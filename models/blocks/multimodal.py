"""Models that also see: the text model of their checkpoints, and what is left out of them.

config.json has the text model's own under text_config, or, in the first files of Qwen2-VL and
Qwen2.5-VL, at the top. Its tensors are Llama's with language_model in front or behind model, or
text_model behind it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from infer.models.loading.checkpoint import Checkpoint
from infer.models.loading.config import RawConfig
from infer.models.loading.formats import QUANTIZATION_KEYS

T = TypeVar("T")

# model_type of a text model -> that of the architecture that it is built like
_SAME_AS = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
_QWEN2_VL = {
    "max_position_embeddings": 32768,
    "max_window_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
}
# Defaults of transformers for keys that the config of a text model leaves out, where they differ
# from those of that architecture alone, and values of keys that the first files leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
    },
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN2_VL),
    "qwen3_vl_text": {"max_position_embeddings": 128000, "rope_theta": 500000.0},
}
_TEXT = re.compile(r"^(?:model\.language_model|language_model\.model|model\.text_model)\.")
_OTHER = re.compile(
    r"^(?:model\.)?(?:vision_tower|vision_model|visual|multi_modal_projector|connector"
    r"|image_newline|audio_tower|embed_vision|embed_audio|vision_embedder)(?:\.|$)"
)


def text_config(raw: RawConfig) -> RawConfig:
    """The config of the text model. Its rope is the ordinary one: positions of text are the same in
    all sections of a rope for text, height and width (M-RoPE: Wang et al. 2024)."""
    nested = raw.section("text_config")
    text = nested if nested.values else raw
    values: dict[str, Any] = dict(text.values)
    own = raw.get("model_type", kind=str)
    model_type = text.get("model_type", "mistral" if own == "mistral3" else f"{own}_text", str)
    values["model_type"] = _SAME_AS.get(model_type, model_type)
    if nested.values or model_type in _SAME_AS:
        values = _DEFAULTS.get(model_type, {}) | values
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key)
        if isinstance(rope, dict) and "mrope_section" in rope:
            rope = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
            kinds = {name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"}
            values[key] = rope | kinds
    for key in QUANTIZATION_KEYS:
        if key in raw.values:
            config = raw.get(key, {}, dict)
            values[key] = {_text_name(name): value for name, value in config.items()}
    if nested.values and "tie_word_embeddings" in raw.values:
        values.setdefault("tie_word_embeddings", raw.values["tie_word_embeddings"])
    return RawConfig(values, text.place)


def text_model(raw: RawConfig, checkpoint: Checkpoint) -> tuple[RawConfig, Checkpoint]:
    """Returns the config and the tensors of the text model. Without a head among them the
    embeddings are the head, whatever the config says: published ones contradict themselves
    there."""
    config, own = text_config(raw), text_tensors(checkpoint.tensors)
    tensors = {name: replace(info, name=name) for name, info in own.items()}
    if not any(name.startswith("lm_head.") for name in tensors):
        config.values["tie_word_embeddings"] = True
    part_of = raw.get("model_type", kind=str)
    return config, replace(checkpoint, tensors=tensors, part_of=part_of)


def text_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Returns the entries of the text model's tensors, by the names that it would have alone."""
    return {_text_name(name): own for name, own in tensors.items() if not _OTHER.match(name)}


def _text_name(name: str) -> str:
    """A tensor's name, or a module's, as the text model alone would have it."""
    name = _TEXT.sub("model.", name)
    return name.removeprefix("language_model.") if name.startswith("language_model.lm_") else name
