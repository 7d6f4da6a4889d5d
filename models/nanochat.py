"""nanochat (Karpathy 2025): norms without weights, squared ReLU, and a soft cap on the logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from infer.kernels.lowering.graph import Value
from infer.models.blocks import layers
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, Weights
from infer.models.gemma2 import softcap
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# Defaults of transformers for keys that a config leaves out.
_DEFAULTS = {"final_logit_softcapping": 15.0, "hidden_act": "relu2"}


class NanoChat(Decoder):
    """Embeddings are normed too; q and k head by head, after they are rotated backwards."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(**_DEFAULTS)
        head_dim = raw.size("head_dim", raw.size("hidden_size") // raw.size("num_attention_heads"))
        return DecoderConfig.read(
            raw,
            rope=replace(raw.rope(head_dim), backwards=True),
            qkv_bias=raw.get("attention_bias", False, bool),
            output_bias=raw.get("attention_bias", False, bool),
            qk_norm=True,
            norm_after_rope=True,
            norm_weight=False,
            gated=False,
            final_logit_softcapping=softcap(raw, "final_logit_softcapping"),
        )

    def weights(self) -> Iterator[WeightSpec]:
        names = {"mlp.up_proj.": "mlp.fc1.", "mlp.down_proj.": "mlp.fc2."}
        return layers.renamed(super().weights(), names)

    def embed(self, w: Weights) -> Value:
        return layers.norm(super().embed(w), w, "norm", self.config)
