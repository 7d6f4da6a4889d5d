"""Weights from a random generator, for benchmarks and tests."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.pack import Codes
from infer.kernels.gpu.plan import Dispatch, dispatch, linear_grid
from infer.kernels.gpu.quantize import Quantizer
from infer.kernels.gpu.record import run
from infer.kernels.gpu.shader import KernelSpec
from infer.kernels.gpu.tensor import ITEMSIZE, SUPERBLOCK, GpuTensor, Shard, row_bytes
from infer.kernels.gpu.upload import PIECE_BYTES
from infer.models.loading.load import allocated_weights
from infer.models.loading.plan import LoadPlan

# The parameters of fill_random.wgsl.
_FILL = np.dtype(
    [
        ("rows", "<u4"),
        ("columns", "<u4"),
        ("stride", "<u4"),
        ("first_row", "<u4"),
        ("seed", "<u4"),
        ("mean", "<f4"),
        ("spread", "<f4"),
        ("unused", "<u4"),
    ]
)


def random_weights(device: Device, plan: LoadPlan, seed: int = 0) -> dict[str, GpuTensor]:
    """Weights of the given shapes with random values, made on the GPU.

    Values of floats are uniform with a standard deviation of 1/sqrt(columns); what is quantised is
    made of those that "bf16" has, what is packed of random codes. Vectors are within 1 ± 0.1 where
    the name contains "norm", else within ± 0.02; those of ones are that. The values depend on seed,
    name and place alone. Raises UnsupportedError and OutOfMemoryError.
    """
    with (
        allocated_weights(device, plan) as weights,
        Quantizer(device, {w.name: weights[w.name] for w in plan.weights if w.quantized}) as own,
    ):
        params: list[Buffer] = []
        kernels: list[Dispatch] = []

        def fill(name: str, dtype: str, buffer: Buffer, first: int, rows: int) -> None:
            shape = weights[name].shape
            params.append(device.upload(_fill_params(name, shape, dtype, first, rows, seed)))
            nbytes = buffer.nbytes if dtype == "bits" else rows * row_bytes(shape[-1], dtype)
            kernels.append(_fill(device, dtype, params[-1], buffer, nbytes))

        try:
            for weight in (weight for weight in plan.weights if weight.spec.sources):
                name, tensor = weight.name, weights[weight.name]
                for shard in tensor.shards:
                    if weight.stored.packed:
                        _fill_packed(device, tensor, shard)
                        fill(name, "bits", shard.buffer, shard.start, shard.rows)
                        continue
                    if not weight.quantized:
                        fill(name, tensor.dtype, shard.buffer, shard.start, shard.rows)
                        continue
                    at_once = own.rows_at_once(tensor.shape[1], "bf16")
                    for first in range(0, shard.rows, at_once):
                        rows = min(at_once, shard.rows - first)
                        fill(name, "bf16", own.buffer, shard.start + first, rows)
                        kernels.append(own.quantize(name, shard, first, rows, "bf16"))
            run(device, kernels)
            device.wait()
        finally:
            device.destroy(params)
        return weights


def _fill_params(
    name: str, shape: tuple[int, ...], dtype: str, first: int, rows: int, seed: int
) -> NDArray[Any]:
    columns = shape[-1]
    if len(shape) == 2:
        mean, spread = 0.0, (3 / columns) ** 0.5  # uniform in ± sqrt(3) deviates by 1
    else:
        mean, spread = (1.0, 0.1) if "norm" in name else (0.0, 0.02)
    stride = columns if dtype == "bits" else row_bytes(columns, dtype) // ITEMSIZE[dtype]
    own_seed = zlib.crc32(name.encode(), seed & 0xFFFFFFFF)
    return np.array((rows, columns, stride, first, own_seed, mean, spread, 0), _FILL)


def _fill_packed(device: Device, tensor: GpuTensor, shard: Shard) -> None:
    """Scales with which random codes are about as large as other random weights, around zero."""
    assert shard.scales is not None
    grouping, (_, columns) = tensor.grouping, tensor.shape
    bits = {"q8": 8, "q6": 6, "q5": 5}.get(tensor.dtype, 4)
    size = {"e4m3": 100.0, "mxfp4": 3.0, "nf4": 0.5, "iq4nl": 60.0}.get(tensor.dtype, 2**bits / 3.5)
    scales = np.full((1, grouping.groups(columns)), columns**-0.5 / size)
    offsets = {"none": None, "zero": np.full_like(scales, grouping.shift)}.get(
        grouping.offset, -grouping.shift * scales
    )
    codes, units = np.zeros((1, columns), np.uint8), None
    if grouping.dtype == "int8":
        largest = np.array([scales[0, 0], 0 if offsets is None else offsets[0, 0]], np.float16)
        units = np.tile(largest / 32, (1, -(-columns // SUPERBLOCK), 1))
        scales = np.full(scales.shape, 32, np.int8)
        offsets = None if offsets is None else scales
    _, row = Codes(tensor.dtype, grouping, codes, scales, offsets, units).pack()
    step = max(1, PIECE_BYTES // row.nbytes)
    for first in range(0, shard.rows, step):
        rows = np.repeat(row, min(step, shard.rows - first), axis=0)
        device.write(shard.scales, rows, offset=first * row.nbytes)


def _fill(device: Device, dtype: str, params: Buffer, buffer: Buffer, nbytes: int) -> Dispatch:
    spec = KernelSpec.of("fill_random", DTYPE=dtype)
    grid = linear_grid(-(-nbytes // (256 * 16)), device.limits.max_workgroups)
    return dispatch(device, spec, [params, buffer], grid)
