"""GLM-4.5 (GLM team 2025): GLM-4 with experts, which are chosen as in DeepSeek-V3."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig
from infer.models.blocks.moe import MixtureOfExperts, predicts_further, read_sigmoid_experts
from infer.models.blocks.mtp import Predictor, nextn
from infer.models.loading.config import RawConfig


class Glm4Moe(MixtureOfExperts):
    """Half of each head is rotated, in some models after a norm."""

    shared = "shared_experts"

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(max_position_embeddings=131072, num_key_value_heads=8)
        return DecoderConfig.read(
            raw,
            eps=1e-5,
            partial=0.5,
            qkv_bias=raw.get("attention_bias", False, bool),
            qk_norm=raw.get("use_qk_norm", False, bool),
            experts=read_sigmoid_experts(raw, dense=1, normalize=True),
        )

    @property
    def predictor(self) -> Predictor:
        return Predictor(self, nextn(self.config.num_hidden_layers))

    def ignorable(self, key: str) -> bool:
        return super().ignorable(key) or predicts_further(self.config, key)
