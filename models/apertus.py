"""Apertus (Swiss AI Initiative 2025): Llama with norms of q and k, and an MLP of xIELU, without a
gate."""

from __future__ import annotations

from collections.abc import Iterator

from infer.kernels.lowering.graph import Value
from infer.kernels.ops import functional as ops
from infer.models.blocks import layers
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, Weights
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# Defaults of transformers where a config says nothing of rope.
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


class Apertus(Decoder):
    """Each layer has learned how xIELU bends."""

    norms = ("attention_layernorm", None, "feedforward_layernorm", None)

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw.expect("hidden_act", "xielu")
        raw.expect("mlp_bias", False)
        raw.expect("qk_norm", True)
        raw.expect("post_norm", False)
        raw = raw.with_defaults(max_position_embeddings=65536)
        if all(raw.values.get(key) is None for key in ("rope_parameters", "rope_scaling")):
            raw = raw.with_values(rope_parameters=_ROPE)
        config = DecoderConfig.read(
            raw.with_values(hidden_act=None),
            eps=1e-5,
            theta=12000000.0,
            attention_bias=False,
            qk_norm=True,
            gated=False,
        )
        return config.changed(activation="xielu")

    def mlp_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        yield from super().mlp_weights(layer, name, prefix)
        shape = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
        yield layers.stacked(f"{name}.xielu", f"{prefix}.mlp.act_fn", shape)

    def mlp(self, x: Value, w: Weights) -> Value:
        up = ops.linear(x, w["up_proj"])
        return ops.linear(ops.xielu(up, w["xielu"]), w["down_proj"])
