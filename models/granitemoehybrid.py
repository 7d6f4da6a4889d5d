"""Granite 4 (Granite team, IBM 2025) where all layers have attention, as in its micro, 1B and 350M:
Granite 3, with or without experts, and an MLP that all tokens share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from infer.kernels.errors import UnsupportedError
from infer.models import layers
from infer.models.config import RawConfig
from infer.models.granite import read_granite
from infer.models.granitemoe import GraniteMoe, read_granite_experts
from infer.models.layers import DecoderConfig
from infer.models.weights import WeightSpec

# What transformers takes for keys that a config leaves out.
_DEFAULTS = {"num_local_experts": 8, "shared_intermediate_size": 1024}
_NAMES = {
    "mlp.gate_up_proj": "shared_mlp.input_linear",
    "mlp.down_proj": "shared_mlp.output_linear",
}


class GraniteMoeHybrid(GraniteMoe):
    """Without experts the shared MLP is the only one, which MLX has as Llama's."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        types = raw.get("layer_types", [None], list)
        if any(found not in ("attention", "full_attention") for found in types):
            raise UnsupportedError(
                f"{raw.place}: layer_types has Mamba layers, which are not implemented: take a "
                "model of attention alone, such as Granite 4.0 micro, 1B or 350M."
            )
        raw.expect("normalization_function", "rmsnorm")
        raw.expect("position_embedding_type", None, "nope", "rope")
        turns = raw.get("position_embedding_type", None) == "rope"
        shared = raw.size("shared_intermediate_size")
        experts = None
        if raw.get("num_local_experts", kind=int):
            experts = replace(read_granite_experts(raw), shared_inner=shared, gated=False)
        return read_granite(
            raw.with_values(intermediate_size=shared),
            rope_layers=[turns] * raw.size("num_hidden_layers"),
            fused_gate_up=True,
            experts=experts,
        )

    def mlp_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        shared = name if self.config.experts is None else f"{name}.shared_expert"
        specs = layers.mlp_weights(self.config, shared, f"{prefix}.mlp")
        apart = layers.mlp_weights(replace(self.config, fused_gate_up=False), name, f"{prefix}.mlp")
        for spec, of_mlx in zip(layers.renamed(specs, _NAMES), apart, strict=True):
            yield replace(spec, others=of_mlx.sources)
        if self.config.experts is not None:
            yield from super().mlp_weights(layer, name, prefix)
