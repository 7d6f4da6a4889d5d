"""Weights and their numpy arrays: packing to the GPU's layouts, and bf16, which numpy lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.codes import E2M1_NIBBLES
from infer.kernels.device import Device
from infer.kernels.quantize import Quantizer
from infer.kernels.record import run
from infer.kernels.tensor import (
    BLOCK,
    CODED,
    QUANTIZED,
    SUPERBLOCK,
    GpuTensor,
    Grouping,
    allocate,
    row_bytes,
)

Array = NDArray[Any]  # of any float type


def to_bf16(values: Array) -> NDArray[np.uint16]:
    """The upper halves of f32 values, rounded to nearest even."""
    exact = np.ascontiguousarray(values, np.float32)
    bits = exact.view(np.uint32)
    halves = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    quiet = bits >> 16 | 0x40  # rounding could carry a NaN into the sign bit
    return np.where(np.isnan(exact), quiet, halves).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: Array, dtype: str) -> NDArray[np.float32]:
    """The values as a weight, or a scale, of that dtype holds them."""
    if dtype == "bf16":
        return from_bf16(to_bf16(values))
    if dtype == "e8m0":
        return (values.astype(np.float32).view(np.uint32) & 0x7F800000).view(np.float32)
    return values.astype(np.float16 if dtype == "f16" else np.float32).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Codes:
    """Rows of a quantised matrix: signed integers int8 [rows, columns] of a dtype like "q4", or
    uint8 codes of a CODED one, and f32 [rows, groups] scales and the offsets (zero points or
    biases) that `grouping` speaks of. units: f32 [rows, superblocks, 2], of scales and of offsets,
    where these are int8."""

    dtype: str
    grouping: Grouping
    codes: NDArray[Any]
    scales: Array
    offsets: Array | None = None
    units: Array | None = None

    def pack(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """The bytes of blocks and of scales, [rows, bytes] each, as kernels/tensor.py has them."""
        rows, columns = self.codes.shape
        block = 128 // CODED[self.dtype] if self.dtype in CODED else BLOCK
        padded = np.zeros((rows, -(-columns // block) * block), np.uint8)
        raw = self.codes.view(np.uint8)
        padded[:, :columns] = E2M1_NIBBLES[raw] if self.dtype == "mxfp4" else raw
        halves = padded.reshape(rows, -1, 2, block // 2)
        if self.dtype in ("q4", "q5", "q6", "mxfp4"):
            blocks: NDArray[Any] = halves[:, :, 0] & 15 | halves[:, :, 1] << 4
            if self.dtype in ("q5", "q6"):
                above = _bits_above(halves, int(self.dtype[1]) - 4)
                blocks = np.concatenate([blocks.reshape(rows, -1), above], axis=1)
                missing = row_bytes(columns, self.dtype) - blocks.shape[1]
                blocks = np.pad(blocks, [(0, 0), (0, missing)])
        elif self.dtype == "q8":
            blocks = halves.swapaxes(1, 2)
        elif self.dtype == "e4m3":
            first, second = padded[:, ::2].astype(np.uint16), padded[:, 1::2].astype(np.uint16)
            signs = (first & 0x80) << 8 | (second & 0x80) << 7
            blocks = (signs | (first & 0x7F) << 7 | second & 0x7F).view(np.uint8)
        else:
            blocks = padded[:, ::2] | padded[:, 1::2] << 4
        parts = [self.scales] if self.offsets is None else [self.scales, self.offsets]
        pairs = np.stack(parts, axis=-1)
        if self.units is None:
            stored = _stored(pairs, self.grouping.dtype).reshape(rows, -1).view(np.uint8)
        else:
            stored = _in_units(pairs, self.units, SUPERBLOCK // self.grouping.group)
        scales = np.zeros((rows, self.grouping.row_bytes(columns)), np.uint8)
        scales[:, : stored.shape[1]] = stored
        return blocks.reshape(rows, -1), scales

    def to_gpu(self, device: Device, label: str = "") -> GpuTensor:
        """All rows as a weight."""
        tensor = allocate(device, self.codes.shape, self.dtype, label, self.grouping)
        blocks, scales = self.pack()
        for shard in tensor.shards:
            rows = slice(shard.start, shard.start + shard.rows)
            for buffer, part in zip(shard.buffers, (blocks, scales), strict=True):
                device.write(buffer, np.ascontiguousarray(part[rows]))
        return tensor


def _bits_above(halves: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """The one or two bits above the lowest four of values [rows, blocks, 2, 16], [rows, bytes] as
    kernels/tensor.py has them."""
    above = (halves >> np.uint8(4) & np.uint8((1 << bits) - 1)).reshape(*halves.shape[:2], 2, 4, 4)
    if bits == 1:  # the two halves share a byte
        above = above[:, :, 0] | above[:, :, 1] << np.uint8(4)
    joined: NDArray[np.uint8] = above[..., 0, :].copy()
    for m in range(1, 4):
        joined |= above[..., m, :] << m * bits
    return joined.reshape(len(halves), -1)


def _in_units(pairs: Array, units: Array, groups: int) -> NDArray[np.uint8]:
    """Scales and offsets [rows, groups, 1 or 2] as f16 units and int8 multiples of them, the units
    of so many groups before these: [rows, bytes]."""
    rows, count, width = pairs.shape
    each = units[:, :, None, :width]
    padded = np.zeros((rows, units.shape[1] * groups, width), np.float32)
    padded[:, :count] = pairs
    values = padded.reshape(rows, -1, groups, width)
    whole = (each != 0) & np.isfinite(each)
    multiples = np.divide(values, each, out=np.zeros_like(values), where=whole)
    integers = np.rint(multiples).astype(np.int8).reshape(*units.shape[:2], -1)
    stored = np.concatenate(
        [units.astype(np.float16).view(np.uint8), integers.view(np.uint8)], axis=-1
    )
    return stored.reshape(rows, -1)


def _stored(values: Array, dtype: str) -> NDArray[Any]:
    """Values of a float type as numbers of the dtype, bf16 as its bits, e8m0 as exponents."""
    if dtype == "bf16":
        return to_bf16(values)
    if dtype == "e8m0":
        return (values.astype(np.float32).view(np.uint32) >> 23).astype(np.uint8)
    return values.astype(np.float16 if dtype == "f16" else np.float32)


def to_gpu(
    device: Device, values: Array | Codes, dtype: str = "f32", label: str = "", unit: int = 1
) -> GpuTensor:
    """A matrix [rows, columns] in that dtype (Codes: as they are), or a vector in f32, as a weight
    on the GPU. unit: as in tensor.allocate."""
    if isinstance(values, Codes):
        return values.to_gpu(device, label)
    tensor = allocate(device, values.shape, dtype, label, unit=unit)
    write(device, tensor, values)
    return tensor


def write(device: Device, tensor: GpuTensor, values: Array) -> None:
    """Fill a weight with values of its shape."""
    matrix = values.reshape(1, -1) if values.ndim == 1 else values
    stored = tensor.dtype
    if stored in QUANTIZED:
        _quantize(device, tensor, matrix)
        return
    width = row_bytes(matrix.shape[1], stored)
    for shard in tensor.shards:
        part = np.ascontiguousarray(matrix[shard.start : shard.start + shard.rows])
        raw = _stored(part, stored)
        padded = np.zeros((part.shape[0], width), np.uint8)
        padded[:, : raw.shape[1] * raw.itemsize] = raw.view(np.uint8).reshape(part.shape[0], -1)
        device.write(shard.buffer, padded)


def _quantize(device: Device, tensor: GpuTensor, matrix: Array) -> None:
    with Quantizer(device, {"": tensor}) as quantizer:
        step = quantizer.rows_at_once(matrix.shape[1], "f32")
        for shard in tensor.shards:
            for first in range(0, shard.rows, step):
                rows = matrix[shard.start + first : shard.start + min(first + step, shard.rows)]
                device.write(quantizer.buffer, to_rows(rows, len(rows), padding=0.0))
                run(device, [quantizer.quantize("", shard, first, len(rows), "f32")])
        quantizer.check()


def from_rows(flat: Array, rows: int, width: int) -> Array:
    """The [rows, width] of an activation's buffer, whose rows are padded to eight values."""
    stride = -(-width // 8) * 8
    return flat[: rows * stride].reshape(rows, stride)[:, :width]


def to_rows(values: Array, rows: int, padding: float = np.nan) -> NDArray[np.float32]:
    """An activation's buffer: padded rows, and NaN wherever no kernel may read a meaning."""
    stride = -(-values.shape[1] // 8) * 8
    padded = np.full((rows, stride), padding, np.float32)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded
