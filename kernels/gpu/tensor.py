"""Weights on the GPU.

A float matrix is rows of values. The others have two buffers. The first, array<vec4<u32>>, is

* q4, q5, q6 and q8, integers of so many bits in two's complement: KB = ceil(columns / 32) blocks a
  row, the last one padded with zeros. q4: unit k of a row is block k; its byte i holds value i in
  the low nibble and value 16 + i in the high one. q5 and q6: the same of the lowest four bits, then
  those above, 4 and 8 bytes a block, padded to 16: of values 4 m + j and 16 + 4 m + j, bits m and
  4 + m of byte j; or bits 2 m and 2 m + 1 of byte j and of byte 4 + j. q8, two planes: units
  [0, KB) the first 16 values of each block, units [KB, 2 KB) the other 16.
* mxfp4, E2M1: blocks as of q4, whose integers stand for others (e2m1.wgsl).
* e4m3 and nf4, codes of floats (weight.wgsl), and iq4nl, codes of integers: rows of pairs of
  bytes or of nibbles, the first column of nibbles in the lowest bits, padded to 16 bytes. Products
  take nf4 for integers of 16 bits (table_int8.wgsl), 7.9e-6 at most from the floats.

The second is scales, [rows][groups, padded with zeros to 16 bytes], one for each group of columns,
and what lies beside them: see `Grouping`. What is quantised here has an f16 scale for 32 columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.errors import OutOfMemoryError, UnsupportedError
from infer.kernels.gpu.device import Buffer, Device

ITEMSIZE = {"f32": 4, "f16": 2, "bf16": 2}
SCALE_ITEMSIZE = ITEMSIZE | {"e8m0": 1, "int8": 1}
SUPERBLOCK = 256  # columns that share the units of int8 scales
QUANTIZED = ("q8", "q4")
CODED = {"e4m3": 8, "mxfp4": 4, "nf4": 4, "iq4nl": 4}  # codes of so many bits
LOOKED_UP = ("iq4nl", "nf4")  # codes that kernels find in a table in workgroup memory
INTEGERS = (*QUANTIZED, "q6", "q5", "mxfp4", *LOOKED_UP)  # multiplied as int8; the others as f32
PLANES = {"nf4": 2}  # int8 numbers that make an integer, where it takes more than one
BLOCK = 32  # columns of a block
HALF = BLOCK // 2  # columns of activations in int8 that share a scale
_BLOCK_BYTES = {"q8": 32, "q6": 24, "q5": 20, "q4": 16}
_SHARD_ROWS = 32  # shards of what has scales start at a multiple of this


def row_bytes(columns: int, dtype: str) -> int:
    """Bytes of one row of a weight, padded to groups of eight values, or to whole blocks (without
    their scales)."""
    if dtype in _BLOCK_BYTES:
        return -(-(-(-columns // BLOCK) * _BLOCK_BYTES[dtype]) // 16) * 16
    if dtype in CODED:
        return -(-columns * CODED[dtype] // 128) * 16
    return -(-columns // 8) * 8 * ITEMSIZE[dtype]


@dataclass(frozen=True)
class Grouping:
    """How the integers of a quantised weight become values, for each group of columns of a row.

    group: columns of a group: 16, or a multiple of 32; the last group of a row may be short.
    dtype: of scales and what lies beside them: "f16", "bf16", "f32"; "e8m0", powers of two, by
        their exponents; or "int8", times an f16 unit of scales, and another of what lies beside
        them, for SUPERBLOCK columns: the two units, then the integers of these columns.
    offset: "none": value = scale * integer; "zero": scale * (integer - zero); "bias": scale *
        integer + bias, where zero or bias lies beside the scale.
    shift: what was taken from unsigned integers to make them signed; the formulas mean the former.
    """

    group: int = BLOCK
    dtype: str = "f16"
    offset: str = "none"
    shift: int = 0

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of scales.wgsl."""
        return {
            "GROUP_SIZE": self.group,
            "SCALES": self.dtype,
            "OFFSET": self.offset,
            "SHIFT": self.shift,
        }

    def groups(self, columns: int) -> int:
        """Groups of a row."""
        return -(-columns // self.group)

    def row_bytes(self, columns: int) -> int:
        """Bytes of the scales of a row, padded to 16."""
        pair = 1 if self.offset == "none" else 2
        nbytes = self.groups(columns) * pair * SCALE_ITEMSIZE[self.dtype]
        if self.dtype == "int8":
            nbytes = -(-columns // SUPERBLOCK) * (4 + SUPERBLOCK // self.group * pair)
        return -(-nbytes // 16) * 16


OWN = Grouping()  # that of weights which are quantised here


@dataclass(frozen=True, eq=False)
class Shard:
    """Rows [start, start + rows) of a weight, in a buffer of their own, or two if quantised."""

    buffer: Buffer
    start: int
    rows: int
    scales: Buffer | None = None

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers that a kernel binds: values or blocks, then scales if there are any."""
        return (self.buffer,) if self.scales is None else (self.buffer, self.scales)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True, eq=False)
class GpuTensor:
    """A weight: dtype a key of ITEMSIZE, one of INTEGERS or a key of CODED; shape (rows, columns),
    or (columns,) for a vector, which is always f32. A tensor larger than one binding lies in
    shards of whole rows. grouping: of one that has scales. order: of its columns, u32 [columns],
    where these are not in their own; column i goes with the activation's value order[i].
    row_scales: f32 [rows] of each shard, powers of two, where f16 does not hold some row unless it
    is divided by its own (`row_scales.scale_rows`); empty where it holds all of them, or where
    nobody has looked."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]
    grouping: Grouping = OWN
    order: Buffer | None = None
    row_scales: dict[Shard, Buffer] = field(default_factory=dict)

    @property
    def buffers(self) -> list[Buffer]:
        """All that it is made of."""
        order = [] if self.order is None else [self.order]
        values = [buffer for shard in self.shards for buffer in shard.buffers]
        return [*values, *order, *self.row_scales.values()]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def buffer(self) -> Buffer:
        """The only shard's buffer, of a tensor that is never split."""
        (shard,) = self.shards
        return shard.buffer


def allocate(
    device: Device,
    shape: tuple[int, ...],
    dtype: str,
    label: str = "",
    grouping: Grouping = OWN,
    order: NDArray[np.int64] | None = None,
    unit: int = 1,
) -> GpuTensor:
    """A zero-filled weight of (rows, columns), or an f32 vector (columns,). No shard ends inside of
    `unit` rows.

    Raises OutOfMemoryError, and UnsupportedError where these, or a row to be quantised, are larger
    than a binding.
    """
    if len(shape) == 1:
        buffer = device.buffer(row_bytes(shape[0], "f32"), label=label)
        return GpuTensor("f32", shape, (Shard(buffer, 0, 1),))
    rows, columns = shape
    scaled = dtype not in ITEMSIZE
    stride, scale_stride = row_bytes(columns, dtype), grouping.row_bytes(columns) if scaled else 0
    per_shard = min(device.limits.max_binding, device.limits.max_buffer) // max(
        stride, scale_stride
    )
    if scaled:
        per_shard = per_shard // _SHARD_ROWS * _SHARD_ROWS
        if per_shard == 0:
            raise UnsupportedError(
                f"{label or 'A weight'} of {columns} columns cannot be quantised for "
                f"{device.adapter.name}: {_SHARD_ROWS} rows do not fit in one binding."
            )
        unit = lcm(unit, _SHARD_ROWS)
    if per_shard < rows:
        per_shard = per_shard // unit * unit
        if per_shard == 0:
            raise UnsupportedError(
                f"An expert of {label or 'a layer'}, {unit * stride:,} bytes in {dtype}, is larger "
                "than one binding of this device. Take another `device`."
            )
    buffers: list[Buffer] = []

    def new(nbytes: int, label: str) -> Buffer:
        buffers.append(device.buffer(nbytes, label=label))
        return buffers[-1]

    shards: list[Shard] = []
    try:
        for start in range(0, rows, per_shard):
            count = min(per_shard, rows - start)
            blocks = new(count * stride, label)
            scales = new(count * scale_stride, f"{label} scales") if scaled else None
            shards.append(Shard(blocks, start, count, scales))
        if order is not None:
            buffers.append(device.upload(order.astype(np.uint32), label=f"{label} order"))
    except OutOfMemoryError:
        device.destroy(buffers)
        raise
    return GpuTensor(dtype, shape, tuple(shards), grouping, None if order is None else buffers[-1])
