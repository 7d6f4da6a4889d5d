"""Ministral (Mistral AI 2024): Mistral with a sliding window in some layers."""

from __future__ import annotations

from infer.models.blocks.layers import layer_windows
from infer.models.mistral import Mistral


class Ministral(Mistral):
    """layer_types says which layers have the window; without it all have."""

    windows = staticmethod(layer_windows)
