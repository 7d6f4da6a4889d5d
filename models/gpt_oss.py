"""gpt-oss (OpenAI 2025): experts with biases and a clamped SwiGLU, attention with sinks, and a
sliding window in every other layer.

The experts are published in MXFP4, all else in bf16. Where they are floats, as transformers writes
them, their matrices are transposed. Gate and up alternate in the rows of an expert; GGUF files have
a matrix for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from infer.kernels.lowering.graph import Value
from infer.kernels.ops import functional as ops
from infer.models.blocks import layers
from infer.models.blocks.layers import DecoderConfig, Weights, layer_windows
from infer.models.blocks.moe import MixtureOfExperts, read_experts
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import Source, WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS: dict[str, Any] = {
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 128,
}


class GptOss(MixtureOfExperts):
    """The weights of the experts that are chosen add up to one."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        raw.expect("swiglu_alpha", 1.702)
        raw.expect("swiglu_limit", 7.0)
        if raw.get("rope_parameters", None, dict) is None:
            raw.get("rope_scaling", kind=dict)  # without, it is not the plain one
        return DecoderConfig.read(
            raw,
            windows=layer_windows(raw, raw.size("sliding_window", None), lambda i: i % 2 == 0),
            eps=1e-5,
            theta=150000.0,
            attention_bias=True,
            sinks=True,
            experts=read_experts(
                raw, "num_local_experts", "intermediate_size", per_token=4, normalize=True
            ),
        )

    def mlp_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        """router, experts.gate_up_proj and experts.down_proj, each with a bias; gate rows and then
        up rows of each expert, one expert below the other."""
        hidden, count, inner = self.config.hidden_size, self.experts.count, self.experts.inner
        router, experts = f"{prefix}.mlp.router", f"{prefix}.mlp.experts"
        yield layers.stacked(f"{name}.router", router, {"weight": (count, hidden)})
        yield layers.stacked(f"{name}.router.bias", router, {"bias": (count,)})
        for part, rows, columns, ways in (
            ("gate_up_proj", 2 * inner, hidden, ("gate_proj", "up_proj")),
            ("down_proj", hidden, inner, ("down_proj",)),
        ):
            key, own = f"{experts}.{part}", f"{name}.experts.{part}"
            parts = [
                range(expert * rows + way, (expert + 1) * rows, len(ways))
                for expert in range(count)
                for way in range(len(ways))
            ]
            apart = [f"{experts}.{expert}.{way}" for expert in range(count) for way in ways]
            shape, one = (count, rows, columns), (rows // len(ways), columns)
            stack = Source(key, shape, transposed=True)
            matrices = tuple(stack.rows(part) for part in parts)
            others = tuple(Source(f"{module}.weight", one) for module in apart)
            yield WeightSpec(own, matrices, others, unit=rows)
            values = Source(f"{key}_bias", shape[:2]).values()
            biases = tuple(values.rows(part) for part in parts)
            others = tuple(Source(f"{module}.bias", one[:1]) for module in apart)
            yield WeightSpec(f"{own}.bias", biases, others)

    def mlp(self, x: Value, w: Weights) -> Value:
        logits = ops.linear(x, w["router"], w["router.bias"])
        routing = ops.route(logits, self.experts.per_token, normalize=True)
        into, back = "experts.gate_up_proj", "experts.down_proj"
        y = ops.expert_gate_up(x, w[into], routing, w[f"{into}.bias"], "clamped_swiglu")
        return ops.expert_down(y, w[back], routing, w[f"{back}.bias"])
