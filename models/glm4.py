"""GLM-4-0414 (GLM team 2025): GLM-4 with norms also after attention and MLP."""

from __future__ import annotations

from infer.kernels.compiler.graph import Value
from infer.kernels.ops import functional as ops
from infer.kernels.ops.rope import Rope
from infer.kernels.state.kv_cache import LayerCache
from infer.models.blocks import layers
from infer.models.blocks.layers import Scope, Weights
from infer.models.glm import Glm


class Glm4(Glm):
    """What goes into attention and MLP is normed, and so is what they add."""

    norms = (*Glm.norms, "post_self_attn_layernorm", "post_mlp_layernorm")

    def layer(
        self, h: Value, w: Weights, rope: Rope | None, cache: LayerCache, window: int
    ) -> Value:
        c, eps = self.config, self.config.norm.rms_norm_eps
        x = ops.rmsnorm(h, w["input_layernorm"], eps)
        y = layers.attention(x, Scope(w, "self_attn"), c, rope, cache, window)
        h = h + ops.rmsnorm(y, w["post_self_attn_layernorm"], eps)
        x = ops.rmsnorm(h, w["post_attention_layernorm"], eps)
        y = self.mlp(x, Scope(w, "mlp"))
        return h + ops.rmsnorm(y, w["post_mlp_layernorm"], eps)
