"""Granite 3 with experts and an MLP that all tokens share (Granite team, IBM 2024)."""

from __future__ import annotations

from dataclasses import replace

from infer.models.blocks.layers import DecoderConfig
from infer.models.granite import read_granite
from infer.models.granitemoe import read_granite_experts
from infer.models.granitemoehybrid import GraniteMoeHybrid
from infer.models.loading.config import RawConfig


class GraniteMoeShared(GraniteMoeHybrid):
    """All layers have experts, attention and a rope."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        shared = raw.size("shared_intermediate_size")
        experts = replace(read_granite_experts(raw), shared_inner=shared, gated=False)
        return read_granite(
            raw.with_values(intermediate_size=shared), fused_gate_up=True, experts=experts
        )
