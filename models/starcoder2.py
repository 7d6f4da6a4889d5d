"""StarCoder2 (Lozhkov et al. 2024): Llama with layer norms, an MLP without a gate, and biases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infer.kernels.kv_cache import LayerCache
from infer.kernels.ops import Ops, Rope, Value
from infer.models import layers
from infer.models.config import RawConfig
from infer.models.layers import DecoderConfig, Scope, Weights, layer_windows
from infer.models.llama import Llama
from infer.models.weights import WeightSpec

# What transformers takes for keys that a config leaves out.
_DEFAULTS = {
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "use_bias": True,
}


class Starcoder2(Llama):
    """Norm, attention, norm, MLP; each with a residual."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        bias = raw.get("use_bias", kind=bool)
        return DecoderConfig.read(
            raw,
            windows=layer_windows(raw, raw.size("sliding_window", None)),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            norm_bias=True,
            eps_key="norm_epsilon",
        )

    def mlp_weights(self, name: str, prefix: str) -> Iterator[WeightSpec]:
        c = self.config
        hidden, inner = c.hidden_size, c.intermediate_size
        yield from layers.projection(
            f"{name}.up_proj", f"{prefix}.c_fc", inner, hidden, bias=c.mlp_bias
        )
        yield from layers.projection(
            f"{name}.down_proj", f"{prefix}.c_proj", hidden, inner, bias=c.mlp_bias
        )

    def forward(
        self, ops: Ops, w: Weights, ropes: Sequence[Rope], cache: Sequence[LayerCache]
    ) -> Value:
        c = self.config
        h = ops.embedding(w["embed_tokens"])
        for i, (rope, layer_cache) in enumerate(zip(ropes, cache, strict=True)):
            layer = Scope(w, f"layers.{i}")
            x = layers.layernorm(ops, h, layer, "input_layernorm", c)
            h = h + layers.attention(
                ops, x, Scope(layer, "self_attn"), c, rope, layer_cache, c.windows[i]
            )
            x = layers.layernorm(ops, h, layer, "post_attention_layernorm", c)
            h = h + layers.plain_mlp(ops, x, Scope(layer, "mlp"), c.activation)
        h = layers.layernorm(ops, ops.logits_rows(h), w, "norm", c)
        return ops.linear(h, w["embed_tokens" if c.tie_word_embeddings else "lm_head"])
