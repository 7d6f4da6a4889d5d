"""Powers of two for rows of weights that f16 does not hold, where matrices of f16 multiply them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.plan import Dispatch, dispatch, linear_grid
from infer.kernels.gpu.record import run
from infer.kernels.gpu.shader import KernelSpec
from infer.kernels.gpu.tensor import GpuTensor, Shard


def scale_rows(device: Device, weights: Iterable[GpuTensor]) -> None:
    """Give `row_scales` to each weight of which f16 does not hold every row as it is: the row's
    largest value is above 65,504, or below 2^-14 and not zero. Raises OutOfMemoryError."""
    matrices = [weight for weight in weights if len(weight.shape) == 2]
    if not matrices:
        return
    rows = max(shard.rows for weight in matrices for shard in weight.shards)
    with device.scope():
        unused = device.buffer(4 * rows, label="row scales")
        flags = _fill(device, matrices, [dict.fromkeys(w.shards, unused) for w in matrices])
    scaled = [weight for weight, flag in zip(matrices, flags, strict=True) if flag]
    for weight in scaled:
        for shard in weight.shards:
            weight.row_scales[shard] = device.buffer(4 * shard.rows, label="row scales")
    if scaled:
        with device.scope():
            _fill(device, scaled, [weight.row_scales for weight in scaled])


def _fill(
    device: Device, weights: Sequence[GpuTensor], row_scales: Sequence[Mapping[Shard, Buffer]]
) -> list[bool]:
    """Fill the buffers of each weight's shards; whether f16 fails to hold a row of it."""
    flags = device.upload(np.zeros(len(weights), np.uint32))
    items: list[Dispatch] = []
    for index, (tensor, buffers) in enumerate(zip(weights, row_scales, strict=True)):
        params: dict[str, Any] = {"K": tensor.shape[1], "WEIGHT": tensor.dtype}
        spec = KernelSpec.of("row_scales", **params | tensor.grouping.params)
        for shard in tensor.shards:
            place = device.upload(np.array([shard.rows, index], np.uint32))
            bound = [*shard.buffers, place, buffers[shard], flags]
            grid = linear_grid(shard.rows, device.limits.max_workgroups)
            items.append(dispatch(device, spec, bound, grid))
    run(device, items)
    found: list[bool] = device.read(flags, np.uint32, len(weights)).astype(bool).tolist()
    return found
