"""StableLM 2 (Bellagente et al. 2024): Llama with layer norms and a rotary part of each head.
In the 12B model each head of queries and keys has a norm of its own."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig
from infer.models.cohere import Cohere
from infer.models.loading.config import RawConfig


class StableLm(Decoder):
    """With use_parallel_residual, one norm serves attention and MLP."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.norms = Cohere.norms if config.parallel else self.norms

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(max_position_embeddings=4096, num_key_value_heads=32)
        head_dim = raw.size("hidden_size") // raw.size("num_attention_heads")
        raw.expect("head_dim", head_dim)  # there is no other
        return DecoderConfig.read(
            raw,
            rope=raw.rope(head_dim, default_partial=0.25),
            eps=1e-5,
            eps_key="layer_norm_eps",
            qkv_bias=raw.get("use_qkv_bias", False, bool),
            layer_norm=True,
            norm_bias=True,
            own_qk_norms=raw.get("qk_layernorm", False, bool),
            norm_names=("q_layernorm", "k_layernorm"),
            parallel=raw.get("use_parallel_residual", False, bool),
        )
