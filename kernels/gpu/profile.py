"""How long dispatches take on the GPU, by its own clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import wgpu
from numpy.typing import NDArray

from infer.kernels.errors import DeviceError
from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.plan import Dispatch, needed
from infer.kernels.gpu.record import Copy

PASSES = 2048  # timed by one query set: WebGPU allows 4096 queries
WARM_UP = 0.05  # seconds of work before the first sample: an idle GPU lowers its clock
MOST_WARM_UPS = 100

Pass = Sequence[Dispatch]


def profile_dispatches(
    device: Device, dispatches: Pass, rows: int = 1, kv_len: int = 0, repeats: int = 10
) -> list[float]:
    """Seconds of each dispatch in a compute pass of its own, which costs a few microseconds more
    than in the middle of one. Otherwise as `profile_passes`."""
    return profile_passes(device, [[item] for item in dispatches], rows, kv_len, repeats)


def profile_passes(
    device: Device,
    passes: Sequence[Pass],
    rows: int = 1,
    kv_len: int = 0,
    repeats: int = 10,
    *,
    least_seconds: float = 0.0,
    before: Sequence[Copy] = (),
) -> list[float]:
    """Seconds of each compute pass: the median of `repeats` runs of them all in their order.

    A pass runs its dispatches one after another, as a step does, with a timestamp at either end. In
    one that takes less than least_seconds they run several times over, and one round's share is
    returned. In front of every pass are the copies `before`: to restore what dispatches (a
    sampler's) change. All runs are queued at once, behind others that bring the clock up.

    Raises DeviceError where the adapter has no timestamps.
    """
    if not device.timestamps:
        raise DeviceError(
            f"{device.adapter.name} has no timestamp queries, so its kernels cannot be timed one "
            "by one. Measure whole steps instead, or use another adapter."
        )
    if not passes:
        return []
    period = device.native.timestamp_period
    run = _Run(device, passes, rows, kv_len, before)
    with device.scope():
        run.submit(1)  # touches the memory
        estimate = period * run.submit(1)[0]
        rounds = [max(1, math.ceil(least_seconds / max(s, period))) for s in estimate.tolist()]
        warm_ups = math.ceil(WARM_UP / max(estimate @ rounds, WARM_UP / MOST_WARM_UPS))
        run.rounds = rounds
        ticks = run.submit(warm_ups + repeats)[warm_ups:]
    seconds: list[float] = (np.median(ticks, axis=0) * period / rounds).tolist()
    return seconds


class _Run:
    """All the passes, each with its dispatches `rounds` times over."""

    def __init__(
        self,
        device: Device,
        passes: Sequence[Pass],
        rows: int,
        kv_len: int,
        before: Sequence[Copy],
    ) -> None:
        self.device, self.before = device, before
        self.passes = [needed(items, rows, kv_len) for items in passes]
        self.rows, self.kv_len = rows, kv_len
        self.rounds = [1] * len(passes)

    def submit(self, count: int) -> NDArray[np.int64]:
        """Ticks that each pass took, [count, passes], when all runs were queued at once."""
        commands: list[Any] = []
        times = [self._record(commands) for _ in range(count)]
        for command in commands:
            self.device.handle.queue.submit([command])
        return np.array([np.concatenate([self._durations(part) for part in run]) for run in times])

    def _record(self, commands: list[Any]) -> list[Buffer]:
        """Append a run's command buffers; returns where the times of its passes will be."""
        times = []
        for start in range(0, len(self.passes), PASSES):
            encoder = self.device.handle.create_command_encoder()
            count = 2 * len(self.passes[start : start + PASSES])
            queries = self.device.handle.create_query_set(
                type=wgpu.QueryType.timestamp, count=count
            )
            for query in range(0, count, 2):
                self._record_pass(encoder, start + query // 2, queries, query)
            times.append(self.device.buffer(8 * count, "query", "timestamps"))
            encoder.resolve_query_set(queries, 0, count, times[-1].handle, 0)
            commands.append(encoder.finish())
        return times

    def _record_pass(self, encoder: Any, index: int, queries: Any, query: int) -> None:
        for (source, start), (to, at), nbytes in self.before:
            encoder.copy_buffer_to_buffer(source.handle, start, to.handle, at, nbytes)
        timed = encoder.begin_compute_pass(
            timestamp_writes={
                "query_set": queries,
                "beginning_of_pass_write_index": query,
                "end_of_pass_write_index": query + 1,
            }
        )
        for _ in range(self.rounds[index]):
            last = None
            for item in self.passes[index]:
                if item.pipeline is not last:
                    timed.set_pipeline(item.pipeline.handle)
                    last = item.pipeline
                timed.set_bind_group(0, item.bind_group)
                timed.dispatch_workgroups(*item.size(self.rows, self.kv_len))
        timed.end()

    def _durations(self, times: Buffer) -> NDArray[np.int64]:
        ticks: NDArray[np.int64] = self.device.read(times, np.int64).reshape(-1, 2)
        return ticks[:, 1] - ticks[:, 0]
