"""Rows of numpy arrays as the bytes that gpu/tensor.py describes, and bf16, which numpy lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.gpu.codes import E2M1_NIBBLES
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.tensor import BLOCK, CODED, SUPERBLOCK, GpuTensor, Grouping, row_bytes

Array = NDArray[Any]  # of any float type


def to_bf16(values: Array) -> NDArray[np.uint16]:
    """The upper halves of f32 values, rounded to nearest even."""
    exact = np.ascontiguousarray(values, np.float32)
    bits = exact.view(np.uint32)
    halves = bits >> 16
    halves &= 1
    halves += 0x7FFF
    halves += bits
    halves >>= 16
    nan = np.isnan(exact)
    if nan.any():  # rounding could carry it into the sign bit
        halves[nan] = bits[nan] >> 16 | 0x40
    return halves.astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


# E2M1_NIBBLES for the four codes in two bytes at once.
_E2M1_BYTES = (E2M1_NIBBLES[:, None] * np.uint16(16) | E2M1_NIBBLES).reshape(-1)
_E2M1_PAIRS = (_E2M1_BYTES[:, None] * np.uint16(256) | _E2M1_BYTES).reshape(-1)


@dataclass(frozen=True, eq=False)
class Codes:
    """Rows of a quantised matrix: signed integers int8 [rows, columns] of a dtype like "q4", or
    uint8 codes of a CODED one, and f32 [rows, groups] scales and the offsets (zero points or
    biases) that `grouping` speaks of. units: f16 [rows, superblocks, 2], of scales and of offsets,
    where these are int8: multiples of them."""

    dtype: str
    grouping: Grouping
    codes: NDArray[Any]
    scales: Array
    offsets: Array | None = None
    units: Array | None = None

    def pack(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The bytes of blocks and of scales, [rows, bytes] each, as gpu/tensor.py has them."""
        rows, columns = self.codes.shape
        block = 128 // CODED[self.dtype] if self.dtype in CODED else BLOCK
        padded = np.ascontiguousarray(self.codes).view(np.uint8)
        if columns % block:
            padded = np.pad(padded, [(0, 0), (0, -columns % block)])
        blocks: NDArray[Any]
        if self.dtype == "q4":
            blocks = _nibbles(padded & np.uint8(15))
        elif self.dtype in ("q5", "q6"):
            low = _nibbles(padded & np.uint8(15))
            above = _bits_above(padded, int(self.dtype[1]) - 4)
            blocks = np.zeros((rows, row_bytes(columns, self.dtype)), np.uint8)
            blocks[:, : low.shape[1]] = low
            blocks[:, low.shape[1] :][:, : above.shape[1]] = above
        elif self.dtype == "mxfp4":
            pairs = _nibbles(padded).view(np.uint16)
            blocks = _E2M1_PAIRS.take(pairs, mode="clip").view(np.uint8)  # faster than "raise"
        elif self.dtype == "q8":
            halves = padded.view("V16").reshape(rows, -1, 2)  # moved as one
            blocks = np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint8)
        elif self.dtype == "e4m3":
            pairs = padded.view(np.uint16)
            signs = (pairs & 0x80) << 8 | pairs >> 1 & 0x4000
            blocks = (signs | (pairs & 0x7F) << 7 | pairs >> 8 & 0x7F).view(np.uint8)
        else:
            pairs = padded.view(np.uint16)
            blocks = (pairs | pairs >> 4).astype(np.uint8)
        parts = [self.scales] if self.offsets is None else [self.scales, self.offsets]
        pairs = np.stack(parts, axis=-1)
        if self.units is None:
            stored = _stored(pairs, self.grouping.dtype).reshape(rows, -1).view(np.uint8)
        else:
            stored = _beside_units(pairs, self.units, SUPERBLOCK // self.grouping.group)
        scales = np.zeros((rows, self.grouping.row_bytes(columns)), np.uint8)
        scales[:, : stored.shape[1]] = stored
        return blocks.reshape(rows, -1), scales


def _nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The second half of the codes of each block above the first: [rows, blocks of 32 codes of four
    bits] to [rows, blocks of 16 bytes]."""
    halves = codes.view(np.uint64).reshape(-1, 2, 2)
    blocks = np.empty((len(halves), 2), np.uint64)
    for i in range(2):  # long runs of words: numpy is slow on many short ones
        np.bitwise_or(halves[:, 0, i], halves[:, 1, i] << 4, out=blocks[:, i])
    return blocks.view(np.uint8).reshape(len(codes), -1)


def _bits_above(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The one or two bits above the lowest four of codes [rows, blocks of 32], [rows, bytes] as
    kernels/gpu/tensor.py has them."""
    above = codes >> np.uint8(4) & np.uint8((1 << bits) - 1)
    if bits == 1:  # the two halves share a byte
        above = _nibbles(above)
    words = above.view(np.uint32).reshape(-1, 4)
    joined = words[:, 0].copy()
    for m in range(1, 4):
        joined |= words[:, m] << np.uint32(m * bits)
    return joined.view(np.uint8).reshape(len(codes), -1)


def _beside_units(pairs: Array, units: Array, groups: int) -> NDArray[np.uint8]:
    """The f16 units of so many groups, then their int8 scales and offsets [rows, groups, 1 or 2],
    and so on: [rows, bytes]."""
    rows, count, _ = pairs.shape
    missing = units.shape[1] * groups - count
    padded = np.pad(pairs, [(0, 0), (0, missing), (0, 0)]) if missing else pairs
    integers = padded.reshape(*units.shape[:2], -1)
    stored = np.concatenate([units.view(np.uint8), integers.view(np.uint8)], axis=-1)
    return stored.reshape(rows, -1)


def _stored(values: Array, dtype: str) -> NDArray[Any]:
    """Values of a float type as numbers of the dtype, bf16 as its bits, e8m0 as exponents."""
    if dtype == "bf16":
        return to_bf16(values)
    if dtype == "e8m0":
        return (values.astype(np.float32).view(np.uint32) >> 23).astype(np.uint8)
    return values.astype(np.float16 if dtype == "f16" else np.float32, copy=False)


def write(device: Device, tensor: GpuTensor, values: Array, first: int = 0) -> None:
    """Fill a weight of floats with values of its shape, or its rows from `first` on."""
    matrix = values.reshape(1, -1) if values.ndim == 1 else values
    width = row_bytes(matrix.shape[1], tensor.dtype)
    for shard in tensor.shards:
        top, bottom = max(shard.start, first), min(shard.start + shard.rows, first + len(matrix))
        if top >= bottom:
            continue
        part = np.ascontiguousarray(matrix[top - first : bottom - first])
        raw = _stored(part, tensor.dtype)
        padded = np.zeros((part.shape[0], width), np.uint8)
        padded[:, : raw.shape[1] * raw.itemsize] = raw.view(np.uint8).reshape(part.shape[0], -1)
        device.write(shard.buffer, padded, (top - shard.start) * width)
