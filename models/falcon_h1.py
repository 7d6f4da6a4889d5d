"""Falcon-H1 (Zuo et al. 2025): in each layer Mamba 2 beside attention, and factors (muP: Yang et
al. 2022) on what goes into them and comes out.

The config counts Mamba and attention as layers of their own, one after the other, since each has a
cache. The factor of Mamba's z is also that of x, B and C, which are projected with it; what theirs
differ by is in the taps of the convolution behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from infer.kernels.errors import UnsupportedError
from infer.kernels.lowering.graph import Value
from infer.kernels.ops import functional as ops
from infer.kernels.ops.rope import Rope
from infer.kernels.state.layer_state import StateShape
from infer.models.blocks import layers, mamba2
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, Scope, Weights
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import Source, WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "mamba_d_head": "auto",
    "mamba_d_ssm": 1024,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
}
_NAMES = {
    "post_attention_layernorm": "pre_ff_layernorm",
    "model.norm": "model.final_layernorm",
    ".mlp.": ".feed_forward.",
}


@dataclass(frozen=True)
class BranchesConfig:
    """Mamba beside attention (Falcon-H1): whether Mamba has a norm behind it, and factors: of what
    it projects into, its time steps, x, B and C besides, what it and attention add; of the MLP's
    gates, and what that adds."""

    normed: bool
    mamba: float
    time_steps: float
    convolved: tuple[float, float, float]
    mamba_out: float
    attention_out: float
    gate: float
    mlp_out: float


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(DecoderConfig):
    branches: BranchesConfig


class FalconH1(Decoder):
    """Mamba may have a norm behind it."""

    config: FalconH1Config
    caches_per_layer = 2
    folded_by_mlx = True

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        for bias in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
            raw.expect(bias, False)
        raw.expect("hidden_act", "silu", "swish")
        raw.expect("mamba_use_mlp", True)
        normed = raw.get("mamba_rms_norm", False, bool)
        if normed and raw.get("mamba_norm_before_gate", True, bool):
            raise UnsupportedError(
                f"{raw.place}: mamba_norm_before_gate = true is not implemented (only false, or no "
                "norm: mamba_rms_norm = false)."
            )
        n_layers, state = raw.size("num_hidden_layers"), _read_state(raw)
        head_dim = raw.size("head_dim", raw.size("hidden_size") // raw.size("num_attention_heads"))
        into = raw.factor("attention_in_multiplier")
        return FalconH1Config.read(
            raw.with_values(num_hidden_layers=2 * n_layers),
            states=[state, None] * n_layers,
            rope_layers=[False, True] * n_layers,
            eps=1e-5,
            conv_bias=raw.get("mamba_conv_bias", True, bool),
            time_step_limit=mamba2.read_time_step_limit(raw),
            embedding_multiplier=raw.factor("embedding_multiplier"),
            attention_multiplier=into**2 * raw.factor("key_multiplier") * head_dim**-0.5,
            logits_scaling=1 / raw.factor("lm_head_multiplier"),
            branches=_read_branches(raw, into, normed),
        )

    def weights(self) -> Iterator[WeightSpec]:
        """The weights of Llama, and those of each layer's Mamba."""
        n_layers, state = self.config.num_hidden_layers // 2, self.config.states[0]
        assert state is not None  # Mamba is the first of two
        plain = Decoder(replace(self.config, num_hidden_layers=n_layers))
        yield from layers.renamed(plain.weights(), _NAMES)
        for i in range(n_layers):
            name, prefix = f"layers.{i}.mamba", f"model.layers.{i}.mamba"
            for spec in mamba2.weights(self.config, state, name, prefix):
                if spec.name.endswith(".conv1d"):
                    yield replace(spec, sources=tuple(self._taps(spec.sources[0], state)))
                elif self.config.branches.normed or not spec.name.endswith(".norm"):
                    yield spec

    def _taps(self, whole: Source, state: StateShape) -> Iterator[Source]:
        """The taps of x, B and C, each with its factor."""
        widths = (state.heads * state.value_dim, *[state.key_heads * state.key_dim] * 2)
        start = 0
        for width, factor in zip(widths, self.config.branches.convolved, strict=True):
            end = start + width * state.taps
            yield whole.rows(range(start, end)).scale(factor)
            start = end

    def mixer(self, x: Value, w: Weights, rope: Rope | None, cache: Any, window: int) -> Value:
        """Returns the sum of the outputs of Mamba and of attention, which read the same x."""
        factors, (state, keys_and_values) = self.config.branches, cache
        of_mamba, of_attention = (
            replace(self.config, residual_multiplier=out)
            for out in (factors.mamba_out, factors.attention_out)
        )
        scales = factors.mamba, factors.time_steps
        y = mamba2.mamba2(x, Scope(w, "mamba"), of_mamba, state, scales)
        own = Scope(w, "self_attn")
        return y + layers.attention(x, own, of_attention, rope, keys_and_values, window)

    def mlp(self, x: Value, w: Weights) -> Value:
        """The gates' factor goes for what they are multiplied by too."""
        gate, out = self.config.branches.gate, self.config.branches.mlp_out
        both = ops.linear(x, w["gate_up_proj"], scale=gate)
        gates, up = ops.split(both, both.width // 2, both.width // 2)
        y = ops.activation(gates, self.config.mlp.activation) * up
        return ops.linear(y, w["down_proj"], scale=out / gate)


def _read_state(raw: RawConfig) -> StateShape:
    """Returns the shape of Mamba's state in any layer. Raises UnsupportedError."""
    heads = raw.size("mamba_n_heads")
    inner = raw.size("mamba_d_ssm", raw.size("mamba_expand") * raw.size("hidden_size"))
    raw.expect("mamba_d_head", "auto", inner // heads)
    if inner % heads:
        raise UnsupportedError(f"{raw.place}: {heads} Mamba heads cannot share {inner} values.")
    return mamba2.read_shape(
        raw,
        heads=heads,
        head_dim=inner // heads,
        groups=raw.size("mamba_n_groups"),
        state_dim=raw.size("mamba_d_state"),
        taps="mamba_d_conv",
    )


def _read_branches(raw: RawConfig, into: float, normed: bool) -> BranchesConfig:
    """into: what attention multiplies its input by. Raises UnsupportedError."""
    z, x, b, c, dt = _factors(raw, "ssm_multipliers", 5)
    gate, mlp_out = _factors(raw, "mlp_multipliers", 2)
    ssm_in = raw.factor("ssm_in_multiplier")
    return BranchesConfig(
        normed,
        mamba=ssm_in * z,
        time_steps=ssm_in * dt,
        convolved=(x / z, b / z, c / z),
        mamba_out=raw.factor("ssm_out_multiplier"),
        attention_out=into * raw.factor("attention_out_multiplier"),
        gate=gate,
        mlp_out=mlp_out,
    )


def _factors(raw: RawConfig, key: str, count: int) -> list[float]:
    """Reads a list of `count` positive numbers from the config. Raises UnsupportedError."""
    return raw.factors(key, count, [1.0] * count)
