"""How fast an adapter copies memory: the yardstick of everything that memory bounds."""

from __future__ import annotations

import math
import time

from infer.kernels.errors import OutOfMemoryError
from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.plan import Dispatch, dispatch, linear_grid
from infer.kernels.gpu.profile import profile_dispatches
from infer.kernels.gpu.record import RawQueue, Recording
from infer.kernels.gpu.shader import KernelSpec

PER_WORKGROUP = 256 * 16  # bytes that a workgroup of copy.wgsl copies
_LEAST_BYTES = 64 << 20  # beyond the last cache of most adapters
_SUBMISSION_SECONDS = 0.05  # long enough that submitting costs nothing beside it


def copy_bandwidth(
    device: Device, nbytes: int | None = None, seconds: float = 0.5, least_runs: int = 5
) -> float:
    """Bytes read plus bytes written per second when one buffer is copied into another.

    nbytes: size of each buffer, a multiple of PER_WORKGROUP; None takes 1 GiB (64 MiB on a software
    adapter), or less where that does not fit. The copy is repeated for so many seconds, which also
    brings up the clock of an idle GPU, and the best of the runs counts, by the GPU's own timestamps
    where it has them. Raises OutOfMemoryError.
    """
    limit = (
        min(device.limits.max_binding, device.limits.max_buffer) // PER_WORKGROUP * PER_WORKGROUP
    )
    size = min(nbytes or (_LEAST_BYTES if device.software else 1 << 30), limit)
    while True:
        try:
            with device.scope():
                buffers = [device.buffer(size, label="copy") for _ in range(2)]
                return _best(device, copy(device, *buffers), 2 * size, seconds, least_runs)
        except OutOfMemoryError:
            if size <= _LEAST_BYTES:
                raise
            size //= 2


def copy(device: Device, source: Buffer, target: Buffer) -> Dispatch:
    """Copies a buffer into another of its size, a multiple of PER_WORKGROUP."""
    spec = KernelSpec.of("copy", VECTORS=source.nbytes // 16)
    grid = linear_grid(source.nbytes // PER_WORKGROUP, device.limits.max_workgroups)
    return dispatch(device, spec, [source, target], grid)


def _best(device: Device, item: Dispatch, moved: int, seconds: float, least_runs: int) -> float:
    queue = RawQueue(device)

    def run(count: int) -> float:
        recording = Recording([item] * count)
        begin = time.perf_counter()
        queue.wait(queue.submit(recording, 1, 0, ()))
        return count * moved / (time.perf_counter() - begin)

    run(1)  # touches the memory
    count = max(1, math.ceil(_SUBMISSION_SECONDS * run(1) / moved))
    end = time.perf_counter() + seconds
    results: list[float] = []
    while len(results) < least_runs or time.perf_counter() < end:
        results.append(run(count))
    if device.timestamps:  # without what lies between two copies
        times = profile_dispatches(device, [item] * least_runs, repeats=least_runs)
        results.append(moved / min(times))
    return max(results)
