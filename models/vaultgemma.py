"""VaultGemma (Google 2025): Gemma 2 without the norms after each block."""

from __future__ import annotations

from infer.models.gemma2 import Gemma2


class VaultGemma(Gemma2):
    """The layer of most models: norm, attention; norm, MLP; each with a residual."""

    norms = ("input_layernorm", None, "pre_feedforward_layernorm", None)
