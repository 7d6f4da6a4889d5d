"""Gemma 4 (Gemma Team 2026), the text model: Gemma 3 with wider heads in the layers without a
window, norms of values, and a factor on what a layer gives on.

The E models have embeddings for each layer, and last layers that attend to the keys and values of
layers before them. In the larger models the projection of keys is that of values too where there is
no window; one of them has experts beside the MLP.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infer.kernels.errors import UnsupportedError
from infer.kernels.lowering.graph import Value
from infer.kernels.ops import functional as ops
from infer.kernels.ops.rope import Rope
from infer.kernels.state.kv_cache import KVShape
from infer.models.blocks import layers
from infer.models.blocks.layers import DecoderConfig, ExpertsConfig, Scope, Weights, layer_windows
from infer.models.blocks.moe import MixtureOfExperts, read_chosen
from infer.models.gemma2 import Gemma2, softcap
from infer.models.gemma3_text import read_local_rope
from infer.models.loading.config import RawConfig, shown
from infer.models.loading.weights import WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
_ROPES = {
    "full_attention": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
        "rope_type": "proportional",
    },
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}
_EXPERT_NORMS = (
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)
_KEYS_AND_VALUES = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_")


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(DecoderConfig):
    """global_heads: KV heads and head_dim of layers without a window, and global_k_eq_v: their
    values are the projection of keys. The last num_kv_shared_layers have no keys and values of
    their own, and with double_wide_mlp another MLP. hidden_size_per_layer_input: of an embedding
    for each layer, or 0."""

    global_heads: tuple[int, int]
    global_k_eq_v: bool
    num_kv_shared_layers: int
    double_wide_mlp: bool
    hidden_size_per_layer_input: int

    def kv_shape(self, layer: int) -> KVShape:
        return super().kv_shape(layer) if self.windows[layer] else KVShape(*self.global_heads)

    @property
    def kv_sources(self) -> list[int]:
        """Layers share those of the last that does not and is of their kind."""
        own = self.num_hidden_layers - self.num_kv_shared_layers
        last = {window > 0: layer for layer, window in enumerate(self.windows[:own])}
        return [*range(own), *(last[window > 0] for window in self.windows[own:])]


class Gemma4Text(MixtureOfExperts):
    config: Gemma4Config
    norms = Gemma2.norms

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw = raw.with_values(rope_parameters=raw.get("rope_parameters", _ROPES, dict))
        raw.expect("attention_bias", False)
        raw.expect("use_bidirectional_attention", None, False, "vision")  # of images, if at all
        k_eq_v = raw.get("attention_k_eq_v", False, bool)
        inputs = raw.get("hidden_size_per_layer_input", 0, int)
        if inputs:
            raw.size("hidden_size_per_layer_input")
            raw.expect("vocab_size_per_layer_input", raw.size("vocab_size"))
        windows = layer_windows(raw, raw.size("sliding_window"), lambda i: (i + 1) % 6 != 0)
        windows[-1] = 0
        heads = read_global_heads(raw, windows, k_eq_v)
        return Gemma4Config.read(
            raw,
            windows=windows,
            rope=raw.rope(heads[1], layer_type="full_attention"),
            local_rope=read_local_rope(raw, raw.size("head_dim")),
            activation_key="hidden_activation",
            embedding_multiplier=raw.size("hidden_size") ** 0.5,
            attention_multiplier=1.0,
            final_logit_softcapping=softcap(raw, "final_logit_softcapping"),
            experts=read_experts(raw),
            global_heads=heads,
            global_k_eq_v=k_eq_v,
            num_kv_shared_layers=read_shared(raw, windows),
            double_wide_mlp=raw.get("use_double_wide_mlp", False, bool),
            hidden_size_per_layer_input=inputs,
        )

    def shares(self, layer: int) -> bool:
        """Whether a layer uses the keys and values of an earlier layer."""
        return self.config.kv_sources[layer] != layer

    def weights(self) -> Iterator[WeightSpec]:
        c = self.config
        hidden, inputs = c.hidden_size, c.hidden_size_per_layer_input
        yield from super().weights()
        for i in range(c.num_hidden_layers):
            name, prefix = f"layers.{i}", f"model.layers.{i}"
            own: dict[str, tuple[int, ...]] = {"layer_scalar": (1,)}
            if inputs:
                own["per_layer_input_gate.weight"] = (inputs, hidden)
                own["per_layer_projection.weight"] = (hidden, inputs)
                own["post_per_layer_input_norm.weight"] = (hidden,)
            if c.experts is not None:
                own |= {f"{norm}.weight": (hidden,) for norm in _EXPERT_NORMS}
                own["router.scale"] = (hidden,)
                own["router.per_expert_scale"] = (c.experts.count,)
                own["router.proj.weight"] = (c.experts.count, hidden)
                yield from self.expert_weights(name, prefix, prefix)
            for key, shape in own.items():
                short = key.removesuffix(".weight").removesuffix(".proj")
                yield layers.stacked(f"{name}.{short}", prefix, {key: shape})
        if inputs:
            width = c.num_hidden_layers * inputs
            for short, shape in {
                "embed_tokens_per_layer": (c.vocab_size, width),
                "per_layer_model_projection": (width, hidden),
                "per_layer_projection_norm": (inputs,),
            }.items():
                yield layers.stacked(short, "model", {f"{short}.weight": shape})

    def mixer_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        c = self.config
        name, prefix = f"{name}.self_attn", f"{prefix}.self_attn"
        kv_heads, d, _ = c.kv_shape(layer)
        parts = {"q": c.num_attention_heads * d}
        if not self.shares(layer):
            parts["k"] = kv_heads * d
            if c.windows[layer] or not c.global_k_eq_v:
                parts["v"] = kv_heads * d
            yield layers.stacked(f"{name}.k_norm", prefix, {"k_norm.weight": (d,)})
            yield WeightSpec(f"{name}.v_norm", (), ones=d)
        shapes = {f"{part}_proj.weight": (rows, c.hidden_size) for part, rows in parts.items()}
        yield layers.stacked(f"{name}.qkv_proj", prefix, shapes)
        yield layers.stacked(f"{name}.q_norm", prefix, {"q_norm.weight": (d,)})
        yield layers.stacked(
            f"{name}.o_proj", prefix, {"o_proj.weight": (c.hidden_size, parts["q"])}
        )

    def mlp_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        c = self.config
        wide = replace(c, intermediate_size=2 * c.intermediate_size)
        own = wide if c.double_wide_mlp and self.shares(layer) else c
        return layers.mlp_weights(own, name, f"{prefix}.mlp")

    def active(self, name: str, rows: int) -> int:
        """Rows of a weight that a token multiplies with: none of the embeddings that layers read,
        where it looks up one row."""
        return 0 if name == "embed_tokens_per_layer" else super().active(name, rows)

    def ignorable(self, key: str) -> bool:
        """Layers that share keys and values are published with what would make them."""
        made = _KEYS_AND_VALUES.match(key)
        return super().ignorable(key) or (made is not None and self.shares(int(made[1])))

    def layer_inputs(self, h: Value, w: Weights) -> Sequence[Value]:
        """The further input of each layer about the tokens, times the square root of two."""
        c = self.config
        width = c.hidden_size_per_layer_input
        if not width:
            return ()
        x = ops.linear(h, w["per_layer_model_projection"], scale=c.hidden_size**-0.5)
        x = ops.rmsnorm(x, w["per_layer_projection_norm"], c.norm.rms_norm_eps)
        x = x + ops.embedding(w["embed_tokens_per_layer"], width**0.5)
        return ops.split(x, *[width] * c.num_hidden_layers)

    def behind(self, h: Value, w: Weights, given: Value | None) -> Value:
        if given is not None:
            x = ops.linear(h, w["per_layer_input_gate"])
            x = ops.activation(x, self.config.mlp.activation) * given
            x = ops.linear(x, w["per_layer_projection"], scale=0.5**0.5)
            h = h + layers.norm(x, w, "post_per_layer_input_norm", self.config)
        return ops.scale(h, w["layer_scalar"])

    def layer(self, h: Value, w: Weights, rope: Rope | None, cache: Any, window: int) -> Value:
        def norm(x: Value, name: str) -> Value:
            return layers.norm(x, w, name, self.config)

        x = self.mixer(norm(h, "input_layernorm"), w, rope, cache, window)
        h = h + norm(x, "post_attention_layernorm")
        x = layers.mlp(norm(h, "pre_feedforward_layernorm"), Scope(w, "mlp"), self.config)
        if self.config.experts is not None:
            y = self.routed(h, norm(h, "pre_feedforward_layernorm_2"), w)
            x = norm(x, "post_feedforward_layernorm_1") + norm(y, "post_feedforward_layernorm_2")
        return h + norm(x, "post_feedforward_layernorm")

    def mixer(self, x: Value, w: Weights, rope: Rope | None, cache: Any, window: int) -> Value:
        """Attention, to keys and values of its own if the projection has any."""
        c, w, d = self.config, Scope(w, "self_attn"), cache.head_dim
        assert rope is not None  # all layers have one
        qkv = ops.linear(x, w["qkv_proj"])
        q_width, kv_width = c.num_attention_heads * d, cache.n_kv_heads * d
        q, *kv = ops.split(qkv, q_width, *[kv_width] * ((qkv.width - q_width) // kv_width))
        q = ops.rope(ops.rmsnorm(q, w["q_norm"], c.norm.rms_norm_eps), rope, d)
        k = v = None
        if kv:
            k = ops.rope(ops.rmsnorm(kv[0], w["k_norm"], c.norm.rms_norm_eps), rope, d)
            v = ops.rmsnorm(kv[-1], w["v_norm"], c.norm.rms_norm_eps)
        y = ops.attention(q, k, v, cache, scale=1.0, window=window)
        return ops.linear(y, w["o_proj"])

    def routed(self, h: Value, x: Value, w: Weights) -> Value:
        """Returns the output of the experts that h chooses for x."""
        c = self.config
        r = ops.rmsnorm(h, w["router.scale"], c.norm.rms_norm_eps)
        routing = ops.route(
            ops.linear(r, w["router"], scale=c.hidden_size**-0.5),
            self.experts.per_token,
            normalize=True,
            expert_scales=w["router.per_expert_scale"],
        )
        y = ops.expert_gate_up(x, w["experts.gate_up_proj"], routing, function=c.mlp.activation)
        return ops.expert_down(y, w["experts.down_proj"], routing)


def read_global_heads(raw: RawConfig, windows: Sequence[int], k_eq_v: bool) -> tuple[int, int]:
    """KV heads and head_dim of the layers without a window: by keys of their own, or, as
    transformers 5.23 writes them, for each of these layers. Raises UnsupportedError."""
    kv_heads, head_dim = raw.size("num_key_value_heads"), raw.size("head_dim")
    by_layer = raw.get("per_layer_config", None, dict)
    if by_layer is None:
        own_kv_heads = raw.size("num_global_key_value_heads", kv_heads)
        heads = own_kv_heads if k_eq_v else kv_heads, raw.size("global_head_dim", 512)
    else:
        wide = [str(layer) for layer, window in enumerate(windows) if not window]
        first, *others = (by_layer.get(layer, {}) for layer in wide)
        known = isinstance(first, dict) and set(first) <= {"head_dim", "num_key_value_heads"}
        if not known or any(own != first for own in others) or set(by_layer) - set(wide):
            raise UnsupportedError(
                f"{raw.place}: per_layer_config must give one head_dim and num_key_value_heads to "
                f"the layers with full attention and none to others; it is {shown(by_layer)}."
            )
        own = RawConfig(first, f"{raw.place}: per_layer_config")
        heads = own.size("num_key_value_heads", kv_heads), own.size("head_dim", head_dim)
    layers.check_heads(raw, raw.size("num_attention_heads"), *heads)
    return heads


def read_shared(raw: RawConfig, windows: Sequence[int]) -> int:
    """Reads how many of the last layers have no keys and values of their own. Raises
    UnsupportedError."""
    shared: int = raw.get("num_kv_shared_layers", 0, int)
    count = len(windows)
    kinds, own = ({window > 0 for window in part} for part in (windows, windows[: count - shared]))
    if not 0 <= shared < count or own != kinds:
        raise UnsupportedError(
            f"{raw.place}: num_kv_shared_layers = {shared} of {count} layers leaves none of a kind "
            "whose keys and values could be shared."
        )
    return shared


def read_experts(raw: RawConfig) -> ExpertsConfig | None:
    """Raises UnsupportedError."""
    if not raw.get("enable_moe_block", False, bool):
        raw.without_experts()
        return None
    count = raw.size("num_experts")
    return ExpertsConfig(
        count,
        read_chosen(raw, "top_k_experts", count, 0),
        raw.size("moe_intermediate_size"),
        normalize=True,
        shared_inner=0,
        layers=(True,) * raw.size("num_hidden_layers"),
    )
