"""Filling in the middle (Bavarian et al. 2022, "Efficient Training of Language Models to Fill in
the Middle"): what a model was trained to continue between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Infill:
    """The special tokens with which a model is asked to fill in the middle. prefix, suffix and
    middle: the token before each of the three parts; the middle comes last. suffix_first: whether
    the suffix stands before the prefix."""

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False

    def text(self, prefix: str, suffix: str) -> str:
        """Returns the prompt that asks for the text between a prefix and a suffix."""
        parts = [self.prefix + prefix, self.suffix + suffix]
        return "".join(parts[::-1] if self.suffix_first else parts) + self.middle


_KNOWN = (
    Infill("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    Infill("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    Infill("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    Infill("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    Infill("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    Infill("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)


def find_infill(has_token: Callable[[str], bool]) -> Infill | None:
    """Returns the tokens with which a vocabulary fills in the middle, or None if it has no such
    tokens. has_token: whether a text is a token of the vocabulary."""
    for known in _KNOWN:
        if all(map(has_token, filter(None, (known.prefix, known.suffix, known.middle)))):
            return known
    return None
