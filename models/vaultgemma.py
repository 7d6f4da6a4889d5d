"""VaultGemma (Google 2025): Gemma 2 without the norms after each block."""

from __future__ import annotations

from infer.kernels.kv_cache import LayerCache
from infer.kernels.ops import Ops, Rope, Value
from infer.models import layers
from infer.models.gemma2 import Gemma2
from infer.models.layers import Scope, Weights


class VaultGemma(Gemma2):
    """Norm, attention; norm, MLP; each with a residual."""

    norms = ("input_layernorm", "pre_feedforward_layernorm")

    def layer(
        self, ops: Ops, h: Value, w: Weights, rope: Rope | None, cache: LayerCache, window: int
    ) -> Value:
        c = self.config
        x = layers.norm(ops, h, w, "input_layernorm", c)
        h = h + layers.attention(ops, x, Scope(w, "self_attn"), c, rope, cache, window)
        x = layers.norm(ops, h, w, "pre_feedforward_layernorm", c)
        return h + layers.mlp(ops, x, Scope(w, "mlp"), c)
