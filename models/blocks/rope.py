"""The angles of rotary position embedding and its context extensions, as transformers has them.

Frequencies and angles are rounded to float32 where transformers rounds them
(modeling_rope_utils.py), so that long contexts agree with it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from infer.models.loading.config import RopeConfig

F32 = np.float32
_AT_ONCE = 4096  # positions at a time


def rope_table(
    rope: RopeConfig, positions: int, length: int = 0, first: int = 0
) -> NDArray[np.float32]:
    """(cos, sin) of every position from `first` up to `positions`, and pair:
    [positions - first, rotary_dim / 2, 2].

    Two kinds depend on the length of the sequence. "longrope" has one table up to
    original_max_position_embeddings and another beyond. "dynamic" rotates a prompt with the
    frequencies for its length, and a position after it with those for the sequence up to itself.
    """
    frequencies, attention_factor = _frequencies(rope, length)
    own = max(rope.max_position_embeddings, length)
    table = np.empty((positions - first, rope.rotary_dim // 2, 2), F32)
    for start in range(first, positions, _AT_ONCE):  # so that temporaries stay small
        rows = np.arange(start, min(start + _AT_ONCE, positions))[:, None]
        if rope.kind == "dynamic":
            frequencies = _dynamic(rope, np.maximum(rows + 1.0, own))
        angle = (rows.astype(F32) * frequencies).astype(np.float64)
        angle = -angle if rope.backwards else angle
        table[rows[:, 0] - first, :, 0] = attention_factor * np.cos(angle)
        table[rows[:, 0] - first, :, 1] = attention_factor * np.sin(angle)
    return table


def table_bytes(rope: RopeConfig, positions: int) -> int:
    """Returns the bytes of the rotary table of so many positions."""
    return positions * rope.rotary_dim // 2 * 2 * F32().nbytes


def _frequencies(rope: RopeConfig, length: int) -> tuple[NDArray[np.float32], float]:
    """Returns the frequency of each pair of dimensions in a sequence of that length, and the factor
    on cos and sin."""
    if rope.kind == "yarn":
        return _yarn(rope)
    if rope.kind == "longrope":
        return _longrope(rope, length)
    return _FREQUENCIES[rope.kind](rope), 1.0


def table_length(rope: RopeConfig, prompt_length: int) -> int:
    """The length for which a prompt of that length needs its table: 0 where any table does."""
    if rope.kind == "dynamic" and prompt_length > rope.max_position_embeddings:
        return prompt_length
    if rope.kind == "longrope" and prompt_length > _original(rope):
        return int(_original(rope)) + 1
    return 0


def same_until(rope: RopeConfig, length: int) -> float:
    """The length up to which a sequence that grows from `length` keeps its rotations. Beyond it
    all of them rotate otherwise, and keys must be computed anew."""
    own = _original(rope) if rope.kind == "longrope" else 0.0
    return own if length <= own else math.inf


def _base(
    rope: RopeConfig, theta: float | NDArray[np.float64] | None = None
) -> NDArray[np.float32]:
    """theta^(2i / dim), the wavelengths over 2 pi (Su et al. 2021); theta: one, or a column."""
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=F32) / F32(rope.rotary_dim)
    base = np.minimum(rope.theta if theta is None else theta, np.finfo(F32).max).astype(F32)
    wavelengths: NDArray[np.float32] = np.power(base, exponent, dtype=F32)
    return wavelengths


def _default(rope: RopeConfig) -> NDArray[np.float32]:
    return F32(1.0) / _base(rope)


def _linear(rope: RopeConfig) -> NDArray[np.float32]:
    """Position interpolation (Chen et al. 2023)."""
    return _default(rope) / F32(rope.scaling["factor"])


def _dynamic(rope: RopeConfig, lengths: NDArray[np.float64]) -> NDArray[np.float32]:
    """NTK-aware scaling for sequences of these lengths, a column."""
    factor, dim = rope.scaling["factor"], rope.rotary_dim
    growth = factor * lengths / rope.max_position_embeddings - (factor - 1)
    return F32(1.0) / _base(rope, rope.theta * growth ** (dim / (dim - 2)))


def _ntk_alpha(rope: RopeConfig) -> NDArray[np.float32]:
    """NTK-aware scaling by a fixed factor; only `alpha` of its keys is used (Hunyuan)."""
    dim = rope.rotary_dim
    return F32(1.0) / _base(rope, rope.theta * rope.scaling["alpha"] ** (dim / (dim - 2)))


def _proportional(rope: RopeConfig) -> NDArray[np.float32]:
    """Gemma 4: some of a head's pairs rotate, with the wavelengths that they have if all do."""
    frequencies = _default(rope) / F32(rope.scaling.get("factor", 1.0))
    frequencies[int(rope.scaling["partial_rotary_factor"] * rope.rotary_dim // 2) :] = 0.0
    return frequencies


def _llama3(rope: RopeConfig) -> NDArray[np.float32]:
    """Llama 3.1: long wavelengths slowed by `factor`, short ones kept, a ramp between."""
    frequencies = _default(rope)
    factor, low, high, original = (
        rope.scaling[key]
        for key in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
    )
    wavelength = F32(2 * math.pi) / frequencies
    smooth = (F32(original) / wavelength - F32(low)) / F32(high - low)
    ramp = (1 - smooth) * (frequencies / F32(factor)) + smooth * frequencies
    slowed = np.where(wavelength > original / low, frequencies / F32(factor), ramp)
    result: NDArray[np.float32] = np.where(wavelength < original / high, frequencies, slowed)
    return result.astype(F32)


def _yarn(rope: RopeConfig) -> tuple[NDArray[np.float32], float]:
    """YaRN (Peng et al. 2023): frequencies and the factor on cos and sin."""
    scaling, dim = rope.scaling, rope.rotary_dim
    original = _original(rope)
    factor = _factor(rope)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and all_dim:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, all_dim)
        else:
            attention_factor = _mscale(factor, 1.0)
        # vLLM reads the key (YaRNScalingRotaryEmbedding); transformers ignores it.
        attention_factor *= scaling.get("attn_factor", 1.0)

    def dimension(rotations: float) -> float:
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    first = dimension(scaling.get("beta_fast") or 32)
    last = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0.0
    ramp = np.clip((np.arange(dim // 2, dtype=F32) - F32(first)) / F32(last - first), 0, 1)
    extrapolation, interpolation = F32(1.0) / _base(rope), F32(1.0) / (F32(factor) * _base(rope))
    keep = F32(1.0) - ramp.astype(F32)
    frequencies = interpolation * (1 - keep) + extrapolation * keep
    return frequencies.astype(F32), float(attention_factor)


def score_factor(rope: RopeConfig) -> float:
    """Returns the further factor on DeepSeek's attention scores where YaRN extends the context."""
    all_dim = rope.scaling.get("mscale_all_dim")
    if rope.kind != "yarn" or not all_dim:
        return 1.0
    return _mscale(_factor(rope), all_dim) ** 2


def _longrope(rope: RopeConfig, length: int) -> tuple[NDArray[np.float32], float]:
    """LongRoPE (Ding et al. 2024): a factor for every wavelength, and one on cos and sin."""
    original = _original(rope)
    factors = rope.scaling["long_factor" if length > original else "short_factor"]
    factor = _factor(rope)
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    frequencies = F32(1.0) / (np.array(factors, F32) * _base(rope))
    return frequencies, rope.scaling.get("attention_factor", grown)


def _original(rope: RopeConfig) -> float:
    own: float = rope.scaling.get("original_max_position_embeddings", rope.max_position_embeddings)
    return own


def _factor(rope: RopeConfig) -> float:
    """Returns how many times longer the context has become than the one that the model was trained
    for."""
    own: float = rope.scaling.get("factor", rope.max_position_embeddings / _original(rope))
    return own


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


_FREQUENCIES = {
    "default": _default,
    "dynamic": _default,  # up to its own length
    "linear": _linear,
    "llama3": _llama3,
    "ntk_alpha": _ntk_alpha,
    "proportional": _proportional,
}
