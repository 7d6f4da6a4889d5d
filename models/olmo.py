"""OLMo (Groeneveld et al. 2024): Llama with layer norms that have no weights."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig


def read_clip(raw: RawConfig) -> float:
    """The largest magnitude of queries, keys and values, 0 for any."""
    return 0.0 if raw.get("clip_qkv", None) is None else raw.factor("clip_qkv")


class Olmo(Decoder):
    """Norms subtract the mean and divide by the deviation, and that is all."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_values(rms_norm_eps=1e-5)  # whatever a config says
        return DecoderConfig.read(
            raw,
            attention_bias=False,
            layer_norm=True,
            norm_weight=False,
            clip_qkv=read_clip(raw),
        )
