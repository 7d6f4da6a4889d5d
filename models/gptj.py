"""GPT-J (Wang & Komatsuzaki 2021): the config of GPT-2, a rotary part of each head, and attention
and MLP side by side."""

from __future__ import annotations

from collections.abc import Iterator

from infer.models.blocks import layers
from infer.models.blocks.layers import DecoderConfig
from infer.models.cohere import Cohere
from infer.models.gpt2 import GPT2, read_gpt2
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec

# Parts of the names of tensors, by Llama's.
_NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.h.",
    "input_layernorm.": "ln_1.",
    "self_attn.o_proj.": "attn.out_proj.",
    "self_attn.": "attn.",
    "mlp.up_proj.": "mlp.fc_in.",
    "mlp.down_proj.": "mlp.fc_out.",
}


class GPTJ(Cohere):
    """Neighbouring dimensions are rotated together; the MLP and the output have biases."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(n_positions=2048, tie_word_embeddings=False)
        raw.expect("rotary", True)
        raw.expect("scale_attn_weights", True)
        raw.expect("rope_theta", 10000.0)
        for key in ("partial_rotary_factor", "rope_parameters", "rope_scaling"):
            raw.expect(key, None)
        config = read_gpt2(raw, head_bias=True)
        part = raw.size("rotary_dim", 64) / config.head_dim
        return config.changed(
            rope=raw.rope(config.head_dim, default_partial=part, interleaved=True),
            rope_layers=(True,) * raw.size("n_layer"),
            fused_qkv=False,
            qkv_bias=False,
            output_bias=False,
            parallel=True,
        )

    def weights(self) -> Iterator[WeightSpec]:
        return layers.renamed(super().weights(), _NAMES)

    def ignorable(self, key: str) -> bool:
        """Older checkpoints hold the causal mask too."""
        return super().ignorable(key) or key.endswith(GPT2.masks)
