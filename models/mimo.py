"""MiMo (Xiaomi 2025): Qwen2, and a layer that predicts further tokens."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig
from infer.models.blocks.mtp import Names, Predictor
from infer.models.loading.config import RawConfig
from infer.models.qwen2 import Qwen2

_LAYERS = "model.mtp_layers."
_NAMES = Names(
    f"{_LAYERS}0",
    f"{_LAYERS}0.input_proj",
    f"{_LAYERS}0.token_layernorm",
    f"{_LAYERS}0.hidden_layernorm",
    f"{_LAYERS}0.final_layernorm",
    reads_hidden_first=True,
)


class MiMo(Qwen2):
    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw.get("auto_map", None, dict)  # the code of the repositories computes what this does
        return super().read_config(raw)

    @property
    def predictor(self) -> Predictor:
        return Predictor(self, _NAMES)

    def ignorable(self, key: str) -> bool:
        return super().ignorable(key) or key.startswith(_LAYERS)
