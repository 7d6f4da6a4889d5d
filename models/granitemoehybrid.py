"""Granite 4 (Granite team, IBM 2025): Granite 3, with or without experts, and an MLP that all
tokens share; in those called H most layers are Mamba 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from infer.kernels.errors import UnsupportedError
from infer.kernels.layer_state import LayerState, StateShape
from infer.kernels.ops import Ops, Rope, Value
from infer.models import layers, mamba2
from infer.models.config import RawConfig
from infer.models.granite import read_granite
from infer.models.granitemoe import GraniteMoe, read_granite_experts
from infer.models.layers import DecoderConfig, Scope, Weights
from infer.models.weights import WeightSpec

# What transformers takes for keys that a config leaves out.
_DEFAULTS = {
    "mamba_conv_bias": True,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "num_local_experts": 8,
    "shared_intermediate_size": 1024,
}
_NAMES = {
    "mlp.gate_up_proj": "shared_mlp.input_linear",
    "mlp.down_proj": "shared_mlp.output_linear",
}


class GraniteMoeHybrid(GraniteMoe):
    """Without experts the shared MLP is the only one, which MLX has as Llama's."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw.expect("normalization_function", "rmsnorm")
        raw.expect("position_embedding_type", None, "nope", "rope")
        n_layers = raw.size("num_hidden_layers")
        types = raw.get("layer_types", ["mamba"] * n_layers, list)
        kinds = mamba2.read_kinds(raw, types, mamba2.KINDS, "layer_types")
        mamba = [kind == "mamba" for kind in kinds]
        own: dict[str, Any] = {}
        if any(mamba):
            state = _read_state(raw)
            own["states"] = [state if has_state else None for has_state in mamba]
            own["conv_bias"] = raw.get("mamba_conv_bias", kind=bool)
            own["mamba_proj_bias"] = raw.get("mamba_proj_bias", False, bool)
            own["time_step_limit"] = mamba2.read_time_step_limit(raw)
        turns = raw.get("position_embedding_type", None) == "rope"
        shared = raw.size("shared_intermediate_size")
        experts = None
        if raw.get("num_local_experts", raw.get("num_experts", 0, int), int):
            experts = replace(read_granite_experts(raw), shared_inner=shared, gated=False)
        return read_granite(
            raw.with_values(intermediate_size=shared),
            rope_layers=[turns and not has_state for has_state in mamba],
            fused_gate_up=True,
            experts=experts,
            **own,
        )

    def mixer_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        """Of attention or of Mamba."""
        shape = self.config.states[layer]
        if shape is None:
            return super().mixer_weights(layer, name, prefix)
        return mamba2.weights(self.config, shape, f"{name}.mamba", f"{prefix}.mamba")

    def mixer(
        self, ops: Ops, x: Value, w: Weights, rope: Rope | None, cache: Any, window: int
    ) -> Value:
        if not isinstance(cache, LayerState):
            return super().mixer(ops, x, w, rope, cache, window)
        return mamba2.mamba2(ops, x, Scope(w, "mamba"), self.config, cache)

    def mlp_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        shared = name if self.config.experts is None else f"{name}.shared_expert"
        specs = layers.mlp_weights(self.config, shared, f"{prefix}.mlp")
        apart = layers.mlp_weights(replace(self.config, fused_gate_up=False), name, f"{prefix}.mlp")
        for spec, of_mlx in zip(layers.renamed(specs, _NAMES), apart, strict=True):
            yield replace(spec, others=of_mlx.sources)
        if self.config.experts is not None:
            yield from super().mlp_weights(layer, name, prefix)


def _read_state(raw: RawConfig) -> StateShape:
    """What a Mamba layer keeps. Raises UnsupportedError."""
    raw.expect("hidden_act", "silu", "swish")
    heads, inner = raw.size("mamba_n_heads"), raw.size("mamba_expand") * raw.size("hidden_size")
    given = raw.values.get("mamba_d_head")
    head_dim = raw.size("mamba_d_head") if given not in (None, "auto") else inner // heads
    if heads * head_dim != inner:
        raise UnsupportedError(
            f"{raw.place}: {heads} Mamba heads of {head_dim} are not {inner} values (mamba_expand "
            "times hidden_size), which is not implemented."
        )
    return mamba2.read_shape(
        raw,
        heads=heads,
        head_dim=head_dim,
        groups=raw.size("mamba_n_groups"),
        state_dim=raw.size("mamba_d_state"),
        taps="mamba_d_conv",
    )
