"""Hunyuan-A13B (Tencent 2025): Hunyuan with experts, one of which all tokens share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from infer.kernels.errors import UnsupportedError
from infer.models.blocks import layers
from infer.models.blocks.layers import DecoderConfig, ExpertsConfig
from infer.models.blocks.moe import MixtureOfExperts, read_chosen
from infer.models.hunyuan_v1_dense import HunyuanDense
from infer.models.loading.config import RawConfig, shown
from infer.models.loading.weights import WeightSpec

# Keys of config.json that may be lists, with a value for each layer.
_OF_LAYERS = ("moe_intermediate_size", "moe_topk", "num_experts", "num_shared_expert")


class HunyuanMoe(MixtureOfExperts):
    """The weights of the experts that are chosen add up to one."""

    shared = "shared_mlp"

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_values(**{key: _of_all(raw, key) for key in _OF_LAYERS})
        experts = _experts(raw)
        return replace(HunyuanDense.read_config(raw), experts=experts)

    def mlp_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        names = {".mlp.gate.weight": ".mlp.gate.wg.weight"}
        return layers.renamed(super().mlp_weights(layer, name, prefix), names)


def _of_all(raw: RawConfig, key: str) -> Any:
    """The value that all layers have."""
    value = raw.get(key, None)
    if not isinstance(value, list):
        return value
    if any(own != value[0] for own in value):
        raise UnsupportedError(
            f"{raw.place}: {key} = {shown(value)} is not implemented (only the same for all "
            "layers)."
        )
    return value[0] if value else None


def _experts(raw: RawConfig) -> ExpertsConfig:
    raw.expect("hidden_act", "silu", "swish")
    inner, count = raw.size("intermediate_size"), raw.size("num_experts")
    raw.expect("moe_intermediate_size", inner)
    raw.expect("num_shared_expert", 1)
    raw.expect("use_mixed_mlp_moe", True)
    raw.expect("moe_layer_num_skipped", 0)
    return ExpertsConfig(
        count,
        read_chosen(raw, "moe_topk", count, 1),
        inner,
        normalize=True,
        shared_inner=inner,
        layers=(True,) * raw.size("num_hidden_layers"),
        gated=False,
    )
