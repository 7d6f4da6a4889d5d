"""Granite with a sliding window in three layers of four (Granite team, IBM 2026), and sinks as in
gpt-oss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from infer.kernels.errors import UnsupportedError
from infer.models.blocks.layers import DecoderConfig, layer_windows
from infer.models.granite import Granite, read_granite
from infer.models.loading.config import RawConfig, shown


class GraniteSwa(Granite):
    """A layer may have another theta than the others, or, where it is 0, know no positions."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(
            max_position_embeddings=8192, num_key_value_heads=4, tie_word_embeddings=True
        )
        windows = layer_windows(raw, raw.size("sliding_window", 128), lambda layer: layer % 4 != 0)
        bias = raw.get("mlp_bias", False, bool)
        return read_granite(
            raw, windows=windows, sinks=True, eps=1e-5, mlp_bias=bias, **_ropes(raw, windows)
        )


def _ropes(raw: RawConfig, windows: list[int]) -> dict[str, Any]:
    """The ropes of the layers without a window and of those with one, and which layers have one.
    Raises UnsupportedError."""
    head_dim = raw.size("head_dim", raw.size("hidden_size") // raw.size("num_attention_heads"))
    rope = raw.rope(head_dim)
    thetas = raw.items("layer_rope_theta", [rope.theta] * len(windows), kind=float)
    numbers = all(theta == 0 or theta > 1 for theta in thetas)
    pairs = list(zip(thetas, windows, strict=False))
    wide, narrow = (
        {theta for theta, window in pairs if theta and (window > 0) == slides} or {rope.theta}
        for slides in (False, True)
    )
    grows = rope.kind in ("dynamic", "longrope") and wide != narrow
    if len(thetas) != len(windows) or not numbers or len(wide) > 1 or len(narrow) > 1 or grows:
        raise UnsupportedError(
            f"{raw.place}: layer_rope_theta = {shown(thetas)} is not implemented (only a number "
            f"for each of {len(windows)} layers, which is 0, or the same for all with a window and "
            "for all without; with a rope whose frequencies depend on the length the same for all)."
        )
    (own,), (local,) = wide, narrow
    return {
        "rope": replace(rope, theta=float(own)),
        "local_rope": None if wide == narrow else replace(rope, theta=float(local)),
        "rope_layers": [theta > 0 for theta in thetas],
    }
