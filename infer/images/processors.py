"""Finds the image processor of a model, and reads the files that configure it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from infer.images.processor import ImageProcessor, ProcessorConfig
from infer.kernels.errors import ModelNotFoundError, UnsupportedError
from infer.models.loading.config import RawConfig, shown

# model_type -> module of this package, and the class there
PROCESSORS = {
    "gemma3": ("gemma", "Gemma3"),
    "gemma4": ("gemma", "Gemma4"),
    "gemma4_unified": ("gemma", "Gemma4"),
    "idefics3": ("idefics3", "Idefics3"),
    "internvl": ("internvl", "InternVL"),
    "lfm2_vl": ("lfm2_vl", "Lfm2VL"),
    "llava": ("llava", "Llava"),
    "llava_next": ("llava", "LlavaNext"),
    "llava_onevision": ("llava", "LlavaOnevision"),
    "mistral3": ("pixtral", "Pixtral"),
    "qwen2_5_vl": ("qwen_vl", "QwenVL"),
    "qwen2_vl": ("qwen_vl", "QwenVL"),
    "qwen3_5": ("qwen_vl", "QwenVL"),
    "qwen3_5_moe": ("qwen_vl", "QwenVL"),
    "qwen3_vl": ("qwen_vl", "QwenVL"),
    "qwen3_vl_moe": ("qwen_vl", "QwenVL"),
    "smolvlm": ("idefics3", "Idefics3"),
}
_PREPROCESSOR, _PROCESSOR = "preprocessor_config.json", "processor_config.json"
_TOKENIZER = "tokenizer_config.json"


def open_processor(folder: Path) -> ImageProcessor:
    """Returns the image processor of the model in a folder. Raises ModelError where its files are
    missing, damaged, or say what is not implemented."""
    model = RawConfig.open(folder)
    prompts = _optional(folder, _PROCESSOR)
    # As transformers does, which since version 5 writes one file.
    nested = isinstance(prompts.values.get("image_processor"), dict)
    images = prompts.section("image_processor") if nested else RawConfig.open(folder, _PREPROCESSOR)
    return read_processor(
        ProcessorConfig(images, prompts, model, _tokens(_optional(folder, _TOKENIZER)))
    )


def read_processor(config: ProcessorConfig) -> ImageProcessor:
    """Returns the processor that these files describe. Raises UnsupportedError for a model, or
    values, that are not implemented."""
    model_type = config.model.get("model_type", "", str)
    if model_type not in PROCESSORS:
        raise UnsupportedError(
            f"{config.model.place}: models of the type {shown(model_type)} take no images here. "
            "Send text alone."
        )
    module, name = PROCESSORS[model_type]
    cls: type[ImageProcessor] = getattr(import_module(f"infer.images.{module}"), name)
    kind = config.images.get("image_processor_type", cls.kinds[0], str)
    if kind.removesuffix("Fast").removesuffix("Pil") not in cls.kinds:
        raise UnsupportedError(
            f"{config.images.place}: image_processor_type {shown(kind)} is not implemented for "
            f"{model_type} (only {', '.join(cls.kinds)})."
        )
    return cls.read(config)


def _optional(folder: Path, name: str) -> RawConfig:
    """A file of JSON, without keys where there is none."""
    try:
        return RawConfig.open(folder, name)
    except ModelNotFoundError:
        return RawConfig({}, str(folder / name))


def _tokens(raw: RawConfig) -> Mapping[str, str]:
    """Names of special tokens and their texts."""
    found = {}
    extra = raw.values.get("extra_special_tokens")
    for values in (raw.values, extra if isinstance(extra, dict) else {}):
        for name, value in values.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found
