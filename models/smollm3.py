"""SmolLM3 (Bakouch et al. 2025): Llama with layers that know no positions."""

from __future__ import annotations

from infer.kernels.errors import UnsupportedError
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, layer_windows
from infer.models.loading.config import RawConfig, shown


class SmolLM3(Decoder):
    """In some layers, by default every fourth, queries and keys are not rotated (NoPE:
    Kazemnejad et al. 2023)."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(max_position_embeddings=32768, num_key_value_heads=4)
        rotated = rope_layers(raw)
        window, bias = raw.size("sliding_window", None), raw.get("attention_bias", False, bool)
        used = raw.get("use_sliding_window", False, bool)
        return DecoderConfig.read(
            raw,
            windows=layer_windows(raw, window if used else None, lambda layer: not rotated[layer]),
            rope_layers=rotated,
            tied=True,
            theta=2e6,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=raw.get("mlp_bias", False, bool),
        )


def rope_layers(raw: RawConfig) -> list[bool]:
    """Returns which layers rotate q and k. no_rope_layers has 1 for those, in spite of its name."""
    layers, interval = raw.size("num_hidden_layers"), raw.size("no_rope_layer_interval", 4)
    default = [int((layer + 1) % interval != 0) for layer in range(layers)]
    rotated = raw.items("no_rope_layers", default, kind=int)
    if len(rotated) < layers or any(value not in (0, 1) for value in rotated):
        raise UnsupportedError(
            f"{raw.place}: no_rope_layers must be 1 (with rope) or 0 for each of {layers} layers; "
            f"it is {shown(rotated)}."
        )
    return [bool(value) for value in rotated[:layers]]
