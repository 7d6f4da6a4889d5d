"""StarCoder2 (Lozhkov et al. 2024): Llama with layer norms, an MLP without a gate, and biases."""

from __future__ import annotations

from collections.abc import Iterator

from infer.models.blocks import layers
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, same_windows
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "use_bias": True,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 2,
}


class Starcoder2(Decoder):
    """All that the config says, under names of its own in the MLP."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        bias = raw.get("use_bias", kind=bool)
        return DecoderConfig.read(
            raw,
            windows=same_windows(raw, raw.size("sliding_window", None)),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            layer_norm=True,
            norm_bias=True,
            gated=False,
            eps_key="norm_epsilon",
        )

    def weights(self) -> Iterator[WeightSpec]:
        names = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
        return layers.renamed(super().weights(), names)
