"""One description of every quantised matrix: codes, and a scale for a group of columns."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.gpu.codes import TABLES
from infer.kernels.gpu.tensor import SUPERBLOCK

Floats = NDArray[np.float32]
_E8M0: Floats = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))


@dataclass(frozen=True)
class Scheme:
    """How the codes of a quantised matrix become values; known before any tensor is read.

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
    scales: float32 or float16 [rows, groups], exact; int8 where there are units.
    zeros: int16 [rows, groups], or None.
    biases: like scales, or None.
    units: float16 [rows, columns / 256, 2], the numbers that these scales and biases are multiples
        of, or None.
    order: int64 [columns], or None. Where there is one, column i of `codes` is column order[i] of
        the matrix: only so are groups consecutive. A product with the matrix takes the activation
        at order[i] there.
    """

    scheme: Scheme
    codes: NDArray[Any]
    scales: NDArray[Any]
    zeros: NDArray[np.int16] | None = None
    biases: NDArray[Any] | None = None
    units: NDArray[np.float16] | None = None
    order: NDArray[np.int64] | None = None

    def every(self, step: int) -> Grouped:
        """The first of each `step` rows."""
        names = ("codes", "scales", "zeros", "biases", "units")
        parts = {name: getattr(self, name) for name in names}
        return replace(self, **{n: p[::step] for n, p in parts.items() if p is not None})

    def across(self, columns: range) -> Grouped:
        """These columns of each row, which are whole groups, or some of the only one."""

        def cut(parts: NDArray[Any] | None, size: int) -> Any:
            first, end = columns.start // size, -(-columns.stop // size)
            return None if parts is None else parts[:, first:end]

        names = ("scales", "zeros", "biases")
        own = {name: cut(getattr(self, name), self.scheme.group) for name in names}
        units = cut(self.units, SUPERBLOCK)
        return replace(self, codes=cut(self.codes, 1), units=units, **own)

    def dequantize(self) -> Floats:
        """The values, float32 [rows, columns], in the matrix's own order of columns."""
        table = TABLES.get(self.scheme.kind)
        values: Floats = self.codes.astype(np.float32) if table is None else table[self.codes]
        if self.zeros is not None:
            values -= self._spread(self.zeros)
        scales, biases = self.numbers()
        values *= self._spread(scales)
        if biases is not None:
            values += self._spread(biases)
        if self.order is not None:
            ordered = np.empty_like(values)
            ordered[:, self.order] = values
            return ordered
        return values

    def numbers(self) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Scales and biases, float32 or float16 [rows, groups], whether or not there are units."""
        if self.units is None:
            return self.scales, self.biases
        times = self.scales.shape[1] // self.units.shape[1]
        units = np.repeat(self.units.astype(np.float32), times, axis=1)
        with np.errstate(invalid="ignore"):  # what is not finite shows as that
            biases = None if self.biases is None else units[:, :, 1] * self.biases
            return units[:, :, 0] * self.scales, biases

    def _spread(self, groups: NDArray[Any]) -> NDArray[Any]:
        """A value for each column from one for each group."""
        return np.repeat(groups, self.scheme.group, axis=1)[:, : self.codes.shape[1]]


def unpack(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint8]:
    """The first `count` codes of each row of bytes: code i is bits [i * bits, (i + 1) * bits) of
    the row, read from its lowest bit on. [..., bytes] to [..., count]."""
    if bits == 8:
        return packed[..., :count]
    width = 8 // math.gcd(bits, 8)  # codes of a word, which has a byte for each
    nbytes = width * bits // 8
    missing = -packed.shape[-1] % nbytes
    if missing:
        packed = np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, missing)])
    if nbytes == 1:
        words = packed.reshape(-1).astype(f"<u{width}")
    else:  # words that overlap, the last one with what is added
        flat = np.append(packed, np.zeros(width - nbytes, np.uint8))
        words = np.ndarray(packed.size // nbytes, f"<u{width}", flat, strides=nbytes).copy()
    half = width // 2
    while half:  # in each 2 * half bytes, the upper half of the codes moves to the upper half
        low = sum(((1 << half * bits) - 1) << 8 * lane for lane in range(0, width, 2 * half))
        upper = words << half * (8 - bits)
        upper &= low << 8 * half
        words &= low
        words |= upper
        half //= 2
    return words.view(np.uint8).reshape(*packed.shape[:-1], -1)[..., :count]


def to_signed(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int8]:
    """Codes less 2^(bits - 1)."""
    return (codes - np.uint8(1 << (bits - 1))).view(np.int8)


def from_e8m0(exponents: NDArray[np.uint8]) -> Floats:
    """2^(exponent - 127), the scales of microscaling formats; 255 is NaN."""
    scales: Floats = _E8M0.take(exponents)
    return scales


def split(words: NDArray[Any], bits: int, shifts: Iterable[int]) -> NDArray[np.uint8]:
    """The codes that words [n, values] hold from each of the shifts on: [n, shifts, values]."""
    shifts = list(shifts)
    codes = np.empty((len(words), len(shifts), words.shape[1]), np.uint8)
    for i, shift in enumerate(shifts):
        np.right_shift(words, shift, out=codes[:, i], casting="unsafe")
    codes &= (1 << bits) - 1
    return codes
