"""Whether weights have a place in f16, which kernels with matrices make of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.errors import UnsupportedError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.plan import Dispatch, dispatch, linear_grid
from infer.kernels.gpu.record import run
from infer.kernels.gpu.shader import KernelSpec
from infer.kernels.gpu.tensor import GpuTensor

LARGEST = float(np.finfo(np.float16).max)


def check_half_range(device: Device, weights: Mapping[str, GpuTensor]) -> None:
    """Raises UnsupportedError for a matrix with a value that f16 does not hold, on a device whose
    kernels multiply in f16."""
    if not device.matrices:
        return
    matrices = {name: tensor for name, tensor in weights.items() if len(tensor.shape) == 2}
    with device.scope():
        found = largest(device, matrices)
    for name, value in found.items():
        if not value <= LARGEST:
            raise UnsupportedError(
                f"{name} has values up to {value:.3g}, and the matrices of {device.adapter.name} "
                f'multiply values up to {LARGEST:,.0f}. `webgpu="wgpu-native"` does without.'
            )


def largest(device: Device, weights: Mapping[str, GpuTensor]) -> dict[str, float]:
    """The largest magnitude in each of these matrices."""
    results = device.upload(np.zeros(len(weights), np.uint32))
    items: list[Dispatch] = []
    for index, tensor in enumerate(weights.values()):
        params: dict[str, Any] = {"K": tensor.shape[1], "WEIGHT": tensor.dtype}
        params |= tensor.grouping.params
        for shard in tensor.shards:
            place = device.upload(np.array([shard.rows, index], np.uint32))
            grid = linear_grid(shard.rows, device.limits.max_workgroups)
            spec = KernelSpec.of("largest", **params)
            items.append(dispatch(device, spec, [*shard.buffers, place, results], grid))
    run(device, items)
    bits: NDArray[np.uint32] = device.read(results, np.uint32, len(weights))
    return dict(zip(weights, bits.view(np.float32).tolist(), strict=True))
