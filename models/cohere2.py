"""Command R7B and Command A (Cohere Team 2025): attention and MLP side by side, and layer norms
without a bias; every fourth layer has neither positions nor a window."""

from __future__ import annotations

from infer.kernels.kv_cache import LayerCache
from infer.kernels.ops import Ops, Rope, Value
from infer.models import layers
from infer.models.config import RawConfig
from infer.models.layers import DecoderConfig, Scope, Weights, layer_windows
from infer.models.llama import Llama

# What transformers takes for keys that a config leaves out.
_DEFAULTS = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": True,
}


class Cohere2(Llama):
    """One norm, then attention and MLP of the same activation."""

    norms = ("input_layernorm",)

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        bias = raw.get("attention_bias", False, bool)
        head_dim = raw.size("hidden_size") // raw.size("num_attention_heads")
        pattern = raw.size("sliding_window_pattern")
        windows = layer_windows(
            raw, raw.size("sliding_window"), lambda layer: (layer + 1) % pattern != 0
        )
        return DecoderConfig.read(
            raw,
            windows=windows,
            rope_layers=[window > 0 for window in windows],
            rope=raw.rope(head_dim, interleaved=True),
            eps_key="layer_norm_eps",
            qkv_bias=bias,
            output_bias=bias,
            layer_norm=True,
            logits_scaling=1 / raw.factor("logit_scale"),
        )

    def layer(
        self, ops: Ops, h: Value, w: Weights, rope: Rope | None, cache: LayerCache, window: int
    ) -> Value:
        c = self.config
        x = layers.norm(ops, h, w, "input_layernorm", c)
        h = h + layers.attention(ops, x, Scope(w, "self_attn"), c, rope, cache, window)
        return h + layers.mlp(ops, x, Scope(w, "mlp"), c)
