"""Qwen3.5 (Qwen team 2026), the text model: gated delta nets, and the MLP of Llama."""

from __future__ import annotations

from infer.models.blocks.delta_net import DEFAULTS, GatedDeltaNet
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.config import RawConfig

# How the dimensions of a head are dealt out to time, height and width, which text does not have.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


class Qwen35Text(GatedDeltaNet):
    """The rope has three kinds of positions, of which a text has one."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        return cls.read_delta(of_text(raw).with_defaults(**DEFAULTS | {"num_key_value_heads": 4}))


def of_text(raw: RawConfig) -> RawConfig:
    """Returns the config with the rope of one kind of positions, that of texts."""
    parameters = raw.get("rope_parameters", None, dict) or {}
    own = {key: value for key, value in parameters.items() if key not in _OF_IMAGES}
    return raw.with_values(rope_parameters=own) if own else raw
