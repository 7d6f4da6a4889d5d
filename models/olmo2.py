"""OLMo 2 (OLMo team 2024): norms after attention and MLP instead of before them."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig


class Olmo2(Decoder):
    """The outputs of attention and MLP are normed; so are q and k, each over its whole width."""

    norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        return DecoderConfig.read(raw, eps=1e-5, attention_bias=False, wide_qk_norm=True)
