"""Hunyuan (Tencent 2025), the dense models: Llama with a norm on each query and key head."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig


class HunyuanDense(Decoder):
    """q and k are normed head by head after they were rotated."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw.expect("use_qk_norm", True)
        raw.expect("use_cla", False)
        return DecoderConfig.read(
            raw,
            eps=1e-5,
            attention_bias=False,
            qk_norm=True,
            norm_after_rope=True,
            norm_names=("query_layernorm", "key_layernorm"),
        )
