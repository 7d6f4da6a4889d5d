"""OLMo 2 (OLMo team 2024): norms after attention and MLP instead of before them."""

from __future__ import annotations

from infer.kernels.compiler.graph import Value
from infer.kernels.ops import functional as ops
from infer.kernels.ops.rope import Rope
from infer.kernels.state.kv_cache import LayerCache
from infer.models.blocks import layers
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, Scope, Weights
from infer.models.loading.config import RawConfig


class Olmo2(Decoder):
    """What a layer adds is normed; so are q and k, each over its whole width."""

    norms = ("post_attention_layernorm", "post_feedforward_layernorm")

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        bias = raw.get("attention_bias", False, bool)
        return DecoderConfig.read(raw, eps=1e-5, qkv_bias=bias, output_bias=bias, wide_qk_norm=True)

    def layer(
        self, h: Value, w: Weights, rope: Rope | None, cache: LayerCache, window: int
    ) -> Value:
        c = self.config
        y = layers.attention(h, Scope(w, "self_attn"), c, rope, cache, window)
        h = h + ops.rmsnorm(y, w["post_attention_layernorm"], c.norm.rms_norm_eps)
        y = self.mlp(h, Scope(w, "mlp"))
        return h + ops.rmsnorm(y, w["post_feedforward_layernorm"], c.norm.rms_norm_eps)
