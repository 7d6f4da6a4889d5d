"""StarCoder2 (Lozhkov et al. 2024): Llama with layer norms, an MLP without a gate, and biases."""

from __future__ import annotations

from collections.abc import Iterator

from infer.models import layers
from infer.models.config import RawConfig
from infer.models.layers import DecoderConfig, layer_windows
from infer.models.llama import Llama
from infer.models.weights import WeightSpec

# What transformers takes for keys that a config leaves out.
_DEFAULTS = {
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "use_bias": True,
}


class Starcoder2(Llama):
    """As the config says; only the MLP's weights have other names."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        bias = raw.get("use_bias", kind=bool)
        return DecoderConfig.read(
            raw,
            windows=layer_windows(raw, raw.size("sliding_window", None)),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
            layer_norm=True,
            norm_bias=True,
            gated=False,
            eps_key="norm_epsilon",
        )

    def mlp_weights(self, name: str, prefix: str) -> Iterator[WeightSpec]:
        c = self.config
        hidden, inner = c.hidden_size, c.intermediate_size
        yield from layers.projection(
            f"{name}.up_proj", f"{prefix}.c_fc", inner, hidden, bias=c.mlp_bias
        )
        yield from layers.projection(
            f"{name}.down_proj", f"{prefix}.c_proj", hidden, inner, bias=c.mlp_bias
        )
