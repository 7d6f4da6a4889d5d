"""Nemotron-H (NVIDIA 2025), as in Nemotron Nano 2 and Nemotron 3: each layer is one of Mamba 2,
attention without positions, an MLP of squared relu, or experts with such MLPs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from infer.kernels.lowering.graph import Value
from infer.kernels.ops import functional as ops
from infer.kernels.ops.experts import Route
from infer.kernels.ops.rope import Rope
from infer.kernels.state.layer_state import NOTHING, LayerState
from infer.models.blocks import layers, mamba2
from infer.models.blocks.layers import DecoderConfig, ExpertsConfig, Scope, Weights
from infer.models.blocks.moe import MixtureOfExperts, read_chosen
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "expand": 2,
    "head_dim": 128,
    "intermediate_size": 21504,
    "mamba_head_dim": 64,
    "mamba_num_heads": 128,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "n_groups": 8,
    "n_routed_experts": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
}
# Keys by the names that some files have for them, which count.
_OTHER_KEYS = {
    "attention_head_dim": "head_dim",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_n_groups": "n_groups",
}
# Kinds of layers by their letters in hybrid_override_pattern, and by their names in a list.
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = mamba2.KINDS | {"mlp": "mlp", "moe": "moe"}
_NAMES = {
    "model.embed_tokens": "model.embeddings",
    "model.norm": "model.norm_f",
    ".self_attn.": ".mixer.",
    ".mlp.": ".mixer.",
}


class NemotronH(MixtureOfExperts):
    """A layer has one norm, and its mixer may be an MLP. Checkpoints call the model `backbone`,
    unless transformers 5 was told to write what it has in memory. What they have besides predicts
    more tokens at once."""

    norms = ("norm",)
    block = fused_block = "mixer"
    shared = "shared_experts"

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        others = {new: raw.values[old] for old, new in _OTHER_KEYS.items() if old in raw.values}
        raw = raw.with_values(**others).with_defaults(**_DEFAULTS, mlp_hidden_act="relu2")
        kinds = _read_kinds(raw)
        raw = raw.with_values(num_hidden_layers=len(kinds))
        raw.get("auto_map", None, dict)  # the code of the repositories computes what this does
        raw.expect("attention_bias", False)
        raw.expect("mamba_hidden_act", "silu", "swish")
        raw.expect("sliding_window", None)
        raw.get("partial_rotary_factor", None)  # of no rope
        raw = raw.with_values(tie_word_embeddings=False)  # transformers ties nothing
        bias = raw.get("use_bias", False, bool)
        raw.expect("mamba_proj_bias", False, bias)
        state = None
        if "mamba" in kinds:
            state = mamba2.read_shape(
                raw,
                heads=raw.size("mamba_num_heads"),
                head_dim=raw.size("mamba_head_dim"),
                groups=raw.size("n_groups"),
                state_dim=raw.size("ssm_state_size"),
                taps="conv_kernel",
            )
        keeps = {"mamba": state, "attention": None, "mlp": NOTHING, "moe": NOTHING}
        return DecoderConfig.read(
            raw,
            states=[keeps[kind] for kind in kinds],
            rope_layers=[False] * len(kinds),
            experts=_read_experts(raw, kinds),
            eps=1e-5,
            eps_key="layer_norm_epsilon",
            activation_key="mlp_hidden_act",
            gated=False,
            mlp_bias=raw.get("mlp_bias", False, bool),
            conv_bias=raw.get("use_conv_bias", True, bool),
            mamba_proj_bias=bias,
            # The files' own code limits time steps like this; transformers begins at
            # time_step_min, in prompts alone.
            time_step_limit=mamba2.read_time_step_limit(raw),
        )

    def weights(self) -> Iterator[WeightSpec]:
        for spec in layers.renamed(super().weights(), _NAMES):
            own = tuple(
                replace(source, key=source.key.replace("model.", "backbone.", 1))
                for source in spec.sources
            )
            yield replace(spec, sources=own, others=spec.others or spec.sources)

    def mixer_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        """The weights of attention or of Mamba, in layers that have one of these."""
        shape = self.config.states[layer]
        if shape is None:
            yield from super().mixer_weights(layer, name, prefix)
        elif shape != NOTHING:
            yield from mamba2.weights(self.config, shape, f"{name}.mamba", f"{prefix}.mixer")

    def mlp_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        """The weights of the MLP or of the experts, in layers that have one of these, and of the
        projections through which experts read and write."""
        c = self.config
        if c.states[layer] != NOTHING:
            return
        if c.experts is None or not c.experts.layers[layer]:
            yield from layers.mlp_weights(c, name, f"{prefix}.mlp")
            return
        yield from super().mlp_weights(layer, name, prefix)
        latent, hidden = c.experts.latent, c.hidden_size
        if not latent:
            return
        for part, shape in (("fc1", (latent, hidden)), ("fc2", (hidden, latent))):
            own, place = f"{name}.{part}_latent_proj", f"{prefix}.mixer.{part}_latent_proj"
            yield layers.stacked(own, place, {"weight": shape})
            if c.mlp.mlp_bias:
                yield layers.stacked(f"{own}.bias", place, {"bias": shape[:1]})

    def chosen(self, x: Value, routing: Route, w: Weights) -> Value:
        if not self.experts.latent:
            return super().chosen(x, routing, w)
        x = ops.linear(x, w["fc1_latent_proj"], w.get("fc1_latent_proj.bias"))
        y = super().chosen(x, routing, w)
        return ops.linear(y, w["fc2_latent_proj"], w.get("fc2_latent_proj.bias"))

    def ignorable(self, key: str) -> bool:
        return super().ignorable(key) or key.startswith("mtp.")

    def layer(self, h: Value, w: Weights, rope: Rope | None, cache: Any, window: int) -> Value:
        x = layers.norm(h, w, "norm", self.config)
        if not isinstance(cache, LayerState):
            return h + self.mixer(x, w, rope, cache, window)
        if cache.shape == NOTHING:
            return h + self.mlp(x, Scope(w, "mlp"))
        return h + mamba2.mamba2(x, Scope(w, "mamba"), self.config, cache)


def _read_kinds(raw: RawConfig) -> list[str]:
    """Returns the kind of each layer, from a list or else a pattern. Raises UnsupportedError."""
    key, names = "hybrid_override_pattern", _PATTERN
    found = list(raw.get(key, "", str))
    for other in ("layer_types", "layers_block_type"):
        if raw.get(other, None) is not None:
            key, names, found = other, _KINDS, raw.items(other, kind=str)
    counted = raw.with_defaults(num_hidden_layers=len(found) or 1)
    return mamba2.read_kinds(counted, found, names, key)


def _read_experts(raw: RawConfig, kinds: Sequence[str]) -> ExpertsConfig | None:
    """Reads the config of experts, which are those of DeepSeek-V3 with MLPs without gates; None
    where no layer has experts. Raises UnsupportedError."""
    if "moe" not in kinds:
        raw.without_experts()
        return None
    count = raw.size("n_routed_experts")
    raw.expect("n_group", 1)
    raw.expect("topk_group", 1)
    raw.expect("n_shared_experts", 1)
    return ExpertsConfig(
        count,
        read_chosen(raw, "num_experts_per_tok", count, 2),
        raw.size("moe_intermediate_size"),
        raw.get("norm_topk_prob", True, bool),
        raw.size("moe_shared_expert_intermediate_size"),
        tuple(kind == "moe" for kind in kinds),
        scale=raw.factor("routed_scaling_factor"),
        sigmoid=True,
        correction="gate.e_score_correction_bias",
        gated=False,
        latent=raw.size("moe_latent_size", None) or 0,
    )
