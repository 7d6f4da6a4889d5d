"""The values of the codes of weights that are floats of a few bits: the dtypes of tensor.CODED."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# The quantiles of QLoRA (Dettmers et al. 2023), as bitsandbytes stores them.
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# E2M1: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0).
_MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_IQ4NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _e4m3() -> Floats:
    """E4M3 without infinities (OCP 8-bit Floating Point 1.0): a sign, four bits of exponent with
    bias 7, three of mantissa; all ones is NaN."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0)
    )
    magnitude[127] = np.nan
    return np.concatenate([magnitude, -magnitude]).astype(np.float32)


# For each code of E2M1 the one that kernels/e2m1.wgsl reads: -0 is 0.
_POSITIVE = (0, 1, 2, 3, 4, 6, 5, 7)
E2M1_NIBBLES = np.array([*_POSITIVE, *(-value & 15 for value in _POSITIVE)], np.uint8)

# dtype -> the value of each code
TABLES: dict[str, Floats] = {
    "nf4": np.array(_NF4, np.float32),
    "mxfp4": np.array([*_MXFP4, *(-value for value in _MXFP4)], np.float32),
    "iq4nl": np.array(_IQ4NL, np.float32),
    "e4m3": _e4m3(),
}
# The values that products use for the codes of NF4: integers of 16 bits (table_int8.wgsl).
NF4_PRODUCTS = np.rint(31908 * TABLES["nf4"].astype(np.float64)) / 31908
