"""Weights and activations on the GPU from numpy arrays, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.gpu.device import Device
from infer.kernels.gpu.pack import Codes, from_bf16, to_bf16, write
from infer.kernels.gpu.quantize import Quantizer
from infer.kernels.gpu.record import run
from infer.kernels.gpu.tensor import QUANTIZED, GpuTensor, allocate

Array = NDArray[Any]  # of any float type


def rounded(values: Array, dtype: str) -> NDArray[np.float32]:
    """The values as a weight, or a scale, of that dtype holds them."""
    if dtype == "bf16":
        return from_bf16(to_bf16(values))
    if dtype == "e8m0":
        return (values.astype(np.float32).view(np.uint32) & 0x7F800000).view(np.float32)
    return values.astype(np.float16 if dtype == "f16" else np.float32).astype(np.float32)


def to_gpu(device: Device, values: Array | Codes, dtype: str = "f32", unit: int = 1) -> GpuTensor:
    """A matrix [rows, columns] in that dtype (Codes: as they are), or a vector in f32, as a weight
    on the GPU. unit: as in tensor.allocate."""
    if isinstance(values, Codes):
        return _codes_to_gpu(device, values)
    tensor = allocate(device, values.shape, dtype, unit=unit)
    if dtype in QUANTIZED:
        _quantize(device, tensor, values)
    else:
        write(device, tensor, values)
    return tensor


def _codes_to_gpu(device: Device, rows: Codes) -> GpuTensor:
    tensor = allocate(device, rows.codes.shape, rows.dtype, grouping=rows.grouping)
    blocks, scales = rows.pack()
    for shard in tensor.shards:
        own = slice(shard.start, shard.start + shard.rows)
        for buffer, part in zip(shard.buffers, (blocks, scales), strict=True):
            device.write(buffer, np.ascontiguousarray(part[own]))
    return tensor


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
