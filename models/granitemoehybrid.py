"""Granite 4 (Granite team, IBM 2025): Granite 3, with or without experts, and an MLP that all
tokens share; in those called H most layers are Mamba 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from infer.models.blocks import layers, mamba2
from infer.models.blocks.layers import DecoderConfig
from infer.models.granite import read_granite
from infer.models.granitemoe import GraniteMoe, read_granite_experts
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = mamba2.DEFAULTS | {"num_local_experts": 8, "shared_intermediate_size": 1024}
_NAMES = {
    "mlp.gate_up_proj": "shared_mlp.input_linear",
    "mlp.down_proj": "shared_mlp.output_linear",
}


class GraniteMoeHybrid(mamba2.Mamba2, GraniteMoe):
    """Without experts the shared MLP is the only one, which MLX has as Llama's."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw.expect("normalization_function", "rmsnorm")
        raw.expect("position_embedding_type", None, "nope", "rope")
        n_layers = raw.size("num_hidden_layers")
        types = raw.items("layer_types", ["mamba"] * n_layers, kind=str)
        kinds = mamba2.read_kinds(raw, types, mamba2.KINDS, "layer_types")
        mamba = [kind == "mamba" for kind in kinds]
        rotates = raw.get("position_embedding_type", None) == "rope"
        shared = raw.size("shared_intermediate_size")
        experts = None
        if raw.get("num_local_experts", raw.get("num_experts", 0, int), int):
            experts = replace(read_granite_experts(raw), shared_inner=shared, gated=False)
        return read_granite(
            raw.with_values(intermediate_size=shared),
            rope_layers=[rotates and not has_state for has_state in mamba],
            fused_gate_up=True,
            experts=experts,
            **mamba2.read_mamba(raw, mamba),
        )

    def mlp_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        shared = name if self.config.experts is None else f"{name}.shared_expert"
        specs = layers.mlp_weights(self.config, shared, f"{prefix}.mlp")
        apart = layers.mlp_weights(self.config.changed(fused_gate_up=False), name, f"{prefix}.mlp")
        for spec, of_mlx in zip(layers.renamed(specs, _NAMES), apart, strict=True):
            yield replace(spec, others=of_mlx.sources)
        if self.config.experts is not None:
            yield from super().mlp_weights(layer, name, prefix)
