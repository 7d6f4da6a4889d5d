"""DeepSeek-V3 and R1 (DeepSeek-AI 2024): DeepSeek-V2 with experts that are chosen by sigmoids and a
correction."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig
from infer.models.blocks.moe import predicts_further, read_sigmoid_experts
from infer.models.blocks.mtp import Predictor, nextn
from infer.models.deepseek_v2 import DeepseekV2, read_latent
from infer.models.loading.config import RawConfig

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "max_position_embeddings": 4096,
    "n_group": 8,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}


class DeepseekV3(DeepseekV2):
    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw.expect("scoring_func", "sigmoid")
        raw.expect("topk_method", "noaux_tc")
        raw.expect("moe_layer_freq", 1)
        return read_latent(
            raw,
            read_sigmoid_experts(raw, dense=3, normalize=True),
            interleaved=raw.get("rope_interleave", True, bool),
        )

    @property
    def predictor(self) -> Predictor:
        return Predictor(self, nextn(self.config.num_hidden_layers))

    def ignorable(self, key: str) -> bool:
        return super().ignorable(key) or predicts_further(self.config, key)
