"""VaultGemma (Google 2025): Gemma 2 without the norms after each block."""

from __future__ import annotations

from infer.models.blocks.decoder import Decoder
from infer.models.gemma2 import Gemma2


class VaultGemma(Gemma2):
    """The layer of most models: norm, attention; norm, MLP; each with a residual."""

    norms = ("input_layernorm", "pre_feedforward_layernorm")
    layer = Decoder.layer
