"""Granite 3 with experts (Granite team, IBM 2024), as in Granite 3.1 1B-A400M and 3B-A800M."""

from __future__ import annotations

from collections.abc import Iterator

from infer.models.blocks import layers
from infer.models.blocks.layers import DecoderConfig, ExpertsConfig
from infer.models.blocks.moe import MixtureOfExperts, read_experts
from infer.models.granite import read_granite
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import Source, WeightSpec


class GraniteMoe(MixtureOfExperts):
    """The factors of Granite; the experts of a layer are two tensors, but not in GGUF files."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        return read_granite(raw, experts=read_granite_experts(raw))

    def mlp_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        count, inner, width = self.experts.count, self.experts.inner, self.config.hidden_size
        block = f"{prefix}.block_sparse_moe"
        yield layers.stacked(f"{name}.router", block, {"router.layer.weight": (count, width)})
        for part, key, shape, apart in (
            ("gate_up_proj", "input_linear", (count, 2 * inner, width), ("w1", "w3")),
            ("down_proj", "output_linear", (count, width, inner), ("w2",)),
        ):
            sources = (Source(f"{block}.{key}.weight", shape),)
            one = (shape[1] // len(apart), shape[2])
            others = tuple(
                Source(f"{block}.experts.{expert}.{matrix}.weight", one)
                for expert in range(count)
                for matrix in apart
            )
            yield WeightSpec(f"{name}.experts.{part}", sources, others, unit=shape[1])


def read_granite_experts(raw: RawConfig) -> ExpertsConfig:
    """Reads the config of the experts of Granite 3 and 4. Raises UnsupportedError."""
    return read_experts(
        raw,
        "num_local_experts",
        "intermediate_size",
        per_token=2,
        normalize=True,
        scale=raw.factor("residual_multiplier"),
    )
