"""OLMo 3 (OLMo team 2025): OLMo 2 with a sliding window in three layers of four."""

from __future__ import annotations

from infer.models.blocks.layers import DecoderConfig, layer_windows
from infer.models.loading.config import RawConfig
from infer.models.olmo2 import Olmo2


class Olmo3(Olmo2):
    """Only layers without a window have a rope extended for long contexts."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        window = raw.size("sliding_window", 4096)
        head_dim = raw.size("head_dim", raw.size("hidden_size") // raw.size("num_attention_heads"))
        return DecoderConfig.read(
            raw,
            windows=layer_windows(raw, window, lambda layer: (layer + 1) % 4 != 0),
            rope=raw.rope(head_dim, 5e5, layer_type="full_attention"),
            local_rope=raw.rope(head_dim, 5e5, scaling_key=None, layer_type="sliding_attention"),
            eps=1e-5,
            attention_bias=False,
            wide_qk_norm=True,
        )
