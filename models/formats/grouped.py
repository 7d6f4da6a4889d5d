"""One description of every quantised matrix: codes, and a scale for a group of columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.codes import TABLES

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Scheme:
    """How codes become values: known from config and headers, before any tensor is read.

    kind: "int", whose codes are the values, or a key of TABLES.
    bits: of a code, 2 to 8.
    group: consecutive columns that share a scale. The last group of a row may be short; it is the
        number of columns where a row has one scale.
    scale_dtype: "f16", "bf16", "f32" or, for powers of two, "e8m0": a type that holds each scale
        and bias exactly. Or "int8": they are such integers times `Grouped.units`.
    signed: codes of kind "int" are int8, from -2^(bits - 1) on; else they are uint8.
    zeros: each group has a zero point, an integer that is taken from the codes.
    biases: each group has a bias, a number that is added after scaling.
    """

    kind: str
    bits: int
    group: int
    scale_dtype: str
    signed: bool = False
    zeros: bool = False
    biases: bool = False

    def groups(self, columns: int) -> int:
        """Groups in a row."""
        return -(-columns // self.group)


@dataclass(frozen=True, eq=False)
class Grouped:
    """Rows of a quantised matrix: scale * (value of code - zero) + bias.

    Of zero points and biases a format has one or neither. Both are kept because each is exact:
    codes and zero points are integers, so that scale * (code - zero) is rounded once if at all, and
    not at all for scales of 16 significant bits, which f16 and bf16 scales have. Formats with
    biases define them as numbers; scale * code is exact for such scales, and the sum is rounded
    once.

    codes: uint8, or int8 where the scheme is signed, [rows, columns].
    scales: float32 [rows, groups], exact.
    zeros: int16 [rows, groups], or None.
    biases: float32 [rows, groups], or None.
    units: float32 [rows, columns / 256, 2], the f16 numbers that scales and biases are multiples
        of, or None.
    order: int64 [columns], or None. Where there is one, column i of `codes` is column order[i] of
        the matrix: only so are groups consecutive. A product with the matrix takes the activation
        at order[i] there.
    """

    scheme: Scheme
    codes: NDArray[Any]
    scales: Floats
    zeros: NDArray[np.int16] | None = None
    biases: Floats | None = None
    units: Floats | None = None
    order: NDArray[np.int64] | None = None

    def every(self, step: int) -> Grouped:
        """The first of each `step` rows."""
        names = ("codes", "scales", "zeros", "biases", "units")
        parts = {name: getattr(self, name) for name in names}
        return replace(self, **{n: p[::step] for n, p in parts.items() if p is not None})

    def dequantize(self) -> Floats:
        """The values, float32 [rows, columns], in the matrix's own order of columns."""
        table = TABLES.get(self.scheme.kind)
        values: Floats = self.codes.astype(np.float32) if table is None else table[self.codes]
        if self.zeros is not None:
            values -= self._spread(self.zeros)
        values *= self._spread(self.scales)
        if self.biases is not None:
            values += self._spread(self.biases)
        if self.order is not None:
            ordered = np.empty_like(values)
            ordered[:, self.order] = values
            return ordered
        return values

    def _spread(self, groups: NDArray[Any]) -> NDArray[Any]:
        """A value for each column from one for each group."""
        return np.repeat(groups, self.scheme.group, axis=1)[:, : self.codes.shape[1]]


def unpack(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """The first `count` codes of each row of bytes: code i is bits [i * bits, (i + 1) * bits) of
    the row, read from its lowest bit on. [..., bytes] to [..., count]."""
    if bits == 8:
        return packed[..., :count]
    if bits == 4:
        codes = np.empty((*packed.shape, 2), np.uint8)
        np.bitwise_and(packed, 15, out=codes[..., 0])
        np.right_shift(packed, 4, out=codes[..., 1])
    else:  # eight codes are `bits` bytes
        missing = -packed.shape[-1] % bits
        if missing:
            packed = np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, missing)])
        parts = packed.reshape(*packed.shape[:-1], -1, bits)
        word = np.zeros(parts.shape[:-1], np.uint64)
        for i in range(bits):
            word |= parts[..., i].astype(np.uint64) << np.uint64(8 * i)
        codes = np.empty((*word.shape, 8), np.uint8)
        for i in range(8):
            codes[..., i] = (word >> np.uint64(bits * i)) & np.uint64((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)[..., :count]


def to_signed(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int8]:
    """Codes less 2^(bits - 1)."""
    return (codes - np.uint8(1 << (bits - 1))).view(np.int8)


def from_e8m0(exponents: NDArray[np.uint8]) -> Floats:
    """2^(exponent - 127), the scales of microscaling formats; 255 is NaN."""
    power = np.where(exponents == 255, 0, exponents).astype(np.int32) - 127
    scales: Floats = np.ldexp(np.float32(1), power)
    scales[exponents == 255] = np.nan
    return scales
