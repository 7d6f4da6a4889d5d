"""Model architectures: one file each, named after config.json's model_type, loaded on demand."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infer.models.config import RawConfig
    from infer.models.llama import Llama

# model_type -> class, in the module of that name
ARCHITECTURES = {
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "ernie4_5": "Ernie45",
    "exaone4": "Exaone4",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "glm": "Glm",
    "glm4": "Glm4",
    "gpt_neox": "GPTNeoX",
    "granite": "Granite",
    "helium": "Helium",
    "llama": "Llama",
    "ministral": "Ministral",
    "mistral": "Mistral",
    "olmo2": "Olmo2",
    "phi": "Phi",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
}


def build_model(raw: RawConfig) -> Llama:
    """The model that a config.json describes. Raises UnsupportedError for one that is not here."""
    from infer.kernels.errors import UnsupportedError

    model_type = raw.get("model_type", "", str)
    name = ARCHITECTURES.get(model_type)
    if name is None:
        raise UnsupportedError(
            f"{raw.place}: the architecture {model_type!r} is not implemented. "
            f"Implemented: {', '.join(ARCHITECTURES)}."
        )
    cls = getattr(import_module(f"infer.models.{model_type}"), name)
    model: Llama = cls(cls.read_config(raw))
    return model
