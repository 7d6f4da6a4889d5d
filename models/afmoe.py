"""Trinity (Arcee AI 2025): the norms of GLM-4-0414, a gate behind attention, and experts that are
chosen as in DeepSeek-V3."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from infer.models.blocks import layers
from infer.models.blocks.layers import DecoderConfig, layer_windows
from infer.models.blocks.moe import MixtureOfExperts, read_sigmoid_experts
from infer.models.glm4 import Glm4
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import Source, WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "sliding_window": 1024,
}
# Choices that the files' own code has, and transformers has not.
_ONE_KIND = {"num_expert_groups": 1, "num_limited_groups": 1, "route_norm": True}
_NAMES = {
    "post_attention_layernorm": "pre_mlp_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "mlp.gate.weight": "mlp.router.gate.weight",
}


class Afmoe(MixtureOfExperts, Glm4):
    """q and k are normed head by head. Layers that see everything know no positions."""

    shared = "shared_experts"

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw.get("auto_map", None, dict)  # the code of the repositories computes what this does
        raw.expect("attention_bias", False)
        raw.expect("score_func", "sigmoid")
        every = raw.size("global_attn_every_n_layers", 4)
        window = raw.size("sliding_window", None)
        windows = layer_windows(raw, window, lambda layer: (layer + 1) % every != 0)
        experts = read_sigmoid_experts(
            raw,
            dense=raw.get("num_dense_layers", 1, int),
            normalize=True,
            routed="num_experts",
            shared="num_shared_experts",
        )
        for key, value in _ONE_KIND.items() if any(experts.layers) else ():
            raw.expect(key, value)
        scaled = raw.get("mup_enabled", False, bool)
        return DecoderConfig.read(
            raw,
            windows=windows,
            rope_layers=[size > 0 for size in windows],
            eps=1e-5,
            embedding_multiplier=math.sqrt(raw.size("hidden_size")) if scaled else 1.0,
            qk_norm=True,
            gated_attention=True,
            experts=replace(
                experts,
                normalize=True,
                scale=raw.factor("route_scale"),
                correction="expert_bias",
            ),
        )

    def weights(self) -> Iterator[WeightSpec]:
        return layers.renamed(super().weights(), _NAMES)

    def mixer_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        """The weights of attention, with the gate's rows behind those of q, k and v."""
        c = self.config
        shape = (c.num_attention_heads * c.head_dim, c.hidden_size)
        gate = Source(f"{prefix}.self_attn.gate_proj.weight", shape)
        plain = c.changed(gated_attention=False)
        own, key = f"{name}.self_attn", f"{prefix}.self_attn"
        for spec in layers.attention_weights(plain, own, key):
            qkv = spec.name.endswith("qkv_proj")
            yield replace(spec, sources=(*spec.sources, gate)) if qkv else spec
