"""dots.llm1 (rednote-hilab 2025): Qwen3 with experts, which are chosen as in DeepSeek-V3."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig, layer_windows
from infer.models.blocks.moe import MixtureOfExperts, read_sigmoid_experts
from infer.models.loading.config import RawConfig


class Dots1(MixtureOfExperts):
    """Experts that all tokens share have no gate."""

    shared = "shared_experts"

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(num_key_value_heads=32, sliding_window=4096)
        first = raw.get("max_window_layers", 62, int)
        window = raw.size("sliding_window", None)
        return DecoderConfig.read(
            raw,
            windows=layer_windows(raw, window, lambda layer: layer >= first),
            attention_bias=False,
            qk_norm=True,
            experts=read_sigmoid_experts(raw, dense=0, normalize=False),
        )
