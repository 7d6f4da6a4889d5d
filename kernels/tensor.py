"""Weights on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from infer.kernels.device import Buffer, Device
from infer.kernels.errors import OutOfMemoryError

ITEMSIZE = {"f32": 4, "f16": 2, "bf16": 2}


def row_bytes(columns: int, dtype: str) -> int:
    """Bytes of one row of a weight, padded to groups of eight values."""
    return -(-columns // 8) * 8 * ITEMSIZE[dtype]


@dataclass(frozen=True, eq=False)
class Shard:
    """Rows [start, start + rows) of a weight, in a buffer of their own."""

    buffer: Buffer
    start: int
    rows: int


@dataclass(frozen=True, eq=False)
class GpuTensor:
    """A weight: dtype "f32", "f16" or "bf16"; shape (rows, columns), or (columns,) for a vector,
    which is always f32. A tensor larger than one binding lies in several shards of whole rows."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]

    @property
    def nbytes(self) -> int:
        return sum(shard.buffer.nbytes for shard in self.shards)

    @property
    def buffer(self) -> Buffer:
        """The only shard's buffer, of a tensor that is never split."""
        (shard,) = self.shards
        return shard.buffer


def allocate(device: Device, shape: tuple[int, ...], dtype: str, label: str = "") -> GpuTensor:
    """A zero-filled weight of (rows, columns), or an f32 vector (columns,).

    Raises OutOfMemoryError.
    """
    if len(shape) == 1:
        buffer = device.buffer(row_bytes(shape[0], "f32"), label=label)
        return GpuTensor("f32", shape, (Shard(buffer, 0, 1),))
    rows, columns = shape
    stride = row_bytes(columns, dtype)
    per_shard = min(device.limits.max_binding, device.limits.max_buffer) // stride
    shards: list[Shard] = []
    try:
        for start in range(0, rows, per_shard):
            count = min(per_shard, rows - start)
            shards.append(Shard(device.buffer(count * stride, label=label), start, count))
    except OutOfMemoryError:
        device.destroy(shard.buffer for shard in shards)
        raise
    return GpuTensor(dtype, shape, tuple(shards))
