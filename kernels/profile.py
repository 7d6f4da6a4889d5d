"""How long dispatches take on the GPU, by its own clock."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import wgpu
from numpy.typing import NDArray
from wgpu.backends.wgpu_native import lib

from infer.kernels.device import Buffer, Device
from infer.kernels.errors import DeviceError
from infer.kernels.plan import Dispatch

PASSES = 2048  # timed by one query set: WebGPU allows 4096 queries
WARM_UP = 0.05  # seconds of work before the first sample: an idle GPU lowers its clock


def profile_dispatches(
    device: Device,
    dispatches: Sequence[Dispatch],
    rows: int = 1,
    kv_len: int = 0,
    repeats: int = 10,
) -> list[float]:
    """Seconds that each dispatch takes: the median of `repeats` runs of them all in their order.

    Each dispatch is a compute pass of its own with a timestamp at either end, so the time includes
    what a pass costs. All runs are submitted before the first is read, so that the clock stays up
    between them. Dispatches that change their own input (a sampler's) advance it with every run.

    Raises DeviceError where the adapter has no timestamps.
    """
    if not device.timestamps:
        raise DeviceError(
            f"{device.adapter.name} has no timestamp queries, so its kernels cannot be timed one "
            "by one. Measure whole steps instead, or use another adapter."
        )
    if not dispatches:
        return []
    parts = [dispatches[start : start + PASSES] for start in range(0, len(dispatches), PASSES)]
    with device.scope():
        begin = time.perf_counter()
        while time.perf_counter() - begin < WARM_UP:
            for part in parts:
                _submit(device, part, rows, kv_len)
            device.wait()
        runs = [[_submit(device, part, rows, kv_len) for part in parts] for _ in range(repeats)]
        ticks = [np.concatenate([_durations(device, times) for times in run]) for run in runs]
    period = lib.wgpuQueueGetTimestampPeriod(device.handle.queue._internal)  # nanoseconds
    seconds: list[float] = (np.median(ticks, axis=0) * period * 1e-9).tolist()
    return seconds


def _submit(device: Device, dispatches: Sequence[Dispatch], rows: int, kv_len: int) -> Buffer:
    """Run the dispatches; returns where the times will be at which each began and ended."""
    n_queries = 2 * len(dispatches)
    queries = device.handle.create_query_set(type=wgpu.QueryType.timestamp, count=n_queries)
    times = device.buffer(8 * n_queries, "query", "timestamps")
    encoder = device.handle.create_command_encoder()
    for index, item in enumerate(dispatches):
        timed = encoder.begin_compute_pass(
            timestamp_writes={
                "query_set": queries,
                "beginning_of_pass_write_index": 2 * index,
                "end_of_pass_write_index": 2 * index + 1,
            }
        )
        timed.set_pipeline(item.pipeline.handle)
        timed.set_bind_group(0, item.bind_group)
        timed.dispatch_workgroups(*item.size(rows, kv_len))
        timed.end()
    encoder.resolve_query_set(queries, 0, n_queries, times.handle, 0)
    device.handle.queue.submit([encoder.finish()])
    return times


def _durations(device: Device, times: Buffer) -> NDArray[np.int64]:
    ticks: NDArray[np.int64] = device.read(times, np.int64).reshape(-1, 2)
    return ticks[:, 1] - ticks[:, 0]
