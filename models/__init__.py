"""Model architectures: one file each, named after config.json's model_type, loaded on demand."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from infer.models.checkpoint import Checkpoint
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
    "gpt_oss": "GptOss",
    "granite": "Granite",
    "helium": "Helium",
    "hunyuan_v1_dense": "HunyuanDense",
    "llama": "Llama",
    "ministral": "Ministral",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "olmo2": "Olmo2",
    "olmoe": "Olmoe",
    "phi": "Phi",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
}


def open_model(path: Path) -> tuple[Llama, Checkpoint]:
    """The model in a folder or a GGUF file, and its checkpoint, of which the headers are read.
    Raises ModelError for what is missing, damaged or not implemented."""
    from infer.models.checkpoint import Checkpoint
    from infer.models.config import RawConfig
    from infer.models.formats import find_format, find_packed
    from infer.models.formats.gguf import Gguf
    from infer.models.formats.gguf_config import gguf_checkpoint, gguf_config

    if path.is_file():
        gguf = Gguf.open(path)
        raw = gguf_config(gguf)
        checkpoint = gguf_checkpoint(gguf, raw)
    else:
        raw = RawConfig.open(path)
        checkpoint = Checkpoint.open(path)
    found = find_format(raw)
    model = build_model(raw)
    if found is not None:
        checkpoint = find_packed(checkpoint, found, model.weights())
    return model, checkpoint


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
