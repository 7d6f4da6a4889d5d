"""Recording and submitting steps: the hot loop's only contact with WebGPU.

`RawQueue` calls the C functions of the WebGPU library: it records three times faster than the
public API, maps a staging buffer without a submission of its own, and waits for one submission
instead of the whole queue. `PublicQueue` does the same through the public API; it is the reference
that tests hold RawQueue to.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import wgpu
from numpy.typing import NDArray

from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.native.library import READ, CopyItem, Item, Size, pointer
from infer.kernels.gpu.plan import Dispatch, needed

# A thread that sleeps in the driver is woken up to 0.2 ms after the GPU is done, one that naps is
# not. Of a step longer than so many seconds that is little. On Windows naps are longer than that.
_NAP, _NAPPING = 50e-6, 0.0 if sys.platform == "win32" else 0.02

SizeAt = Callable[[int, int], Size]


class Copy(NamedTuple):
    """A copy at the end of a step: nbytes from an offset in one buffer to an offset in another."""

    source: tuple[Buffer, int]
    to: tuple[Buffer, int]
    nbytes: int


class Piece(NamedTuple):
    """A piece of a buffer: nbytes from an offset on."""

    buffer: Buffer
    offset: int
    nbytes: int


class Part(NamedTuple):
    """A recording that comes before another, for so many rows and so long a cache."""

    recording: Recording
    rows: int
    kv_len: int


class Recording:
    """Dispatches with their C pointers looked up once."""

    def __init__(self, dispatches: Sequence[Dispatch]) -> None:
        self.dispatches = tuple(dispatches)  # also keeps the handles alive
        self._parts: dict[int, list[Recording]] = {}
        self.grids: list[SizeAt] = []
        self.items: list[Item] = []
        for item in self.dispatches:
            pipeline, group = pointer(item.pipeline.handle), pointer(item.bind_group)
            if not callable(item.grid):
                self.items.append(Item(pipeline, group, item.grid, 0))
                continue
            if item.grid not in self.grids:
                self.grids.append(item.grid)
            self.items.append(Item(pipeline, group, None, self.grids.index(item.grid)))

    def sizes(self, rows: int, kv_len: int) -> list[Size]:
        """Returns the sizes that the items' `grid` indexes, for a step of so many rows and
        positions."""
        return [grid(rows, kv_len) for grid in self.grids]

    def parts(self, count: int) -> list[Recording]:
        """Cuts the recording into at most `count`, to be submitted one after the other."""
        if count == 1:
            return [self]
        if count not in self._parts:
            size = -(-len(self.dispatches) // count)
            starts = range(0, len(self.dispatches), size)
            self._parts[count] = [Recording(self.dispatches[i : i + size]) for i in starts]
        return self._parts[count]


EMPTY = Recording([])


@dataclass(eq=False)
class Recorded:
    """A step that is to be sent or dropped, once. is_finished: sending it takes half as long, but
    wgpu-native never frees it if it is not sent."""

    handle: Any
    is_finished: bool


class StepQueue(Protocol):
    """Submits steps and reads back what they copied into staging buffers."""

    def submit(self, recording: Recording, rows: int, kv_len: int, copies: Sequence[Copy]) -> Any:
        """Record and submit one step; returns what `read` waits for. copies: in their order."""

    def record(
        self,
        recording: Recording,
        rows: int,
        kv_len: int,
        copies: Sequence[Copy],
        before: Sequence[Part] = (),
        *,
        finish: bool = False,
    ) -> Recorded:
        """Records one step without submitting it. before: parts that come first. finish: the step
        will most likely be sent."""

    def send(self, recorded: Recorded) -> Any:
        """Submit what was recorded; returns what `read` waits for."""

    def drop(self, recorded: Recorded) -> None:
        """Free what was recorded and is not to be sent."""

    def wait(self, submission: Any) -> None:
        """Wait until a submission is done."""

    def read(
        self, staging: Buffer, nbytes: int, submission: Any, urgent: bool = False
    ) -> NDArray[np.uint32]:
        """Returns the first nbytes that a submission copied into `staging`, once it is done.
        urgent: the GPU has nothing to do until the host has read them."""


class RawQueue:
    """One encoder, one pass, one command buffer and one submission a step; nothing else is made."""

    def __init__(self, device: Device) -> None:
        self.device, self._native = device, device.native
        self._errors = device.native.library.errors
        self._mapping = device.native.mapping()

    def submit(self, recording: Recording, rows: int, kv_len: int, copies: Sequence[Copy]) -> Any:
        return self.send(self.record(recording, rows, kv_len, copies))

    def record(
        self,
        recording: Recording,
        rows: int,
        kv_len: int,
        copies: Sequence[Copy],
        before: Sequence[Part] = (),
        *,
        finish: bool = False,
    ) -> Recorded:
        encoder = self._native.record(
            [
                (part.recording.items, part.recording.sizes(part.rows, part.kv_len))
                for part in (*before, Part(recording, rows, kv_len))
            ],
            [
                CopyItem(source.handle, start, to.handle, at, nbytes)
                for (source, start), (to, at), nbytes in copies
            ],
            ahead=finish,
        )
        recorded = Recorded(encoder, is_finished=False)
        if finish:
            self._finish(recorded)
        return recorded

    def _finish(self, recorded: Recorded) -> None:
        """Raises DeviceError where that fails, as on a lost device."""
        encoder, recorded.handle = recorded.handle, None  # which is released, whatever happens
        try:
            recorded.handle = self._native.finish(encoder)
        except self._errors as error:
            raise self.device.error(error) from error
        recorded.is_finished = True

    def send(self, recorded: Recorded) -> Any:
        if not recorded.is_finished:
            self._finish(recorded)
        try:
            return self._native.submit(recorded.handle)
        except self._errors as error:
            raise self.device.error(error) from error
        finally:
            self.drop(recorded)

    def drop(self, recorded: Recorded) -> None:
        handle, recorded.handle = recorded.handle, None
        if handle is not None:
            self._native.drop(handle, is_finished=recorded.is_finished)

    def wait(self, submission: Any) -> None:
        self._native.wait(submission)

    def _nap(self) -> None:
        """Wait until the buffer is mapped, or for _NAPPING seconds."""
        end = time.perf_counter() + _NAPPING
        while not self._mapping.is_mapped() and time.perf_counter() < end:
            time.sleep(_NAP)

    def read(
        self, staging: Buffer, nbytes: int, submission: Any, urgent: bool = False
    ) -> NDArray[np.uint32]:
        mapping = self._mapping
        try:
            mapping.ask(staging.handle, nbytes, READ)
            if urgent:
                self._nap()
            return np.frombuffer(mapping.wait(submission), np.uint32).copy()
        except self._errors as error:
            raise self.device.error(error) from error
        finally:
            mapping.unmap()


class PublicQueue:
    """Submits steps through the public API of the library."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def submit(self, recording: Recording, rows: int, kv_len: int, copies: Sequence[Copy]) -> None:
        self.send(self.record(recording, rows, kv_len, copies))

    def record(
        self,
        recording: Recording,
        rows: int,
        kv_len: int,
        copies: Sequence[Copy],
        before: Sequence[Part] = (),
        *,
        finish: bool = False,
    ) -> Recorded:
        with self.device.errors():
            encoder = self.device.handle.create_command_encoder()
            compute = encoder.begin_compute_pass()
            for part in (*before, Part(recording, rows, kv_len)):
                for item in needed(part.recording.dispatches, part.rows, part.kv_len):
                    compute.set_pipeline(item.pipeline.handle)
                    compute.set_bind_group(0, item.bind_group)
                    compute.dispatch_workgroups(*item.size(part.rows, part.kv_len))
            compute.end()
            for (source, start), (to, at), nbytes in copies:
                encoder.copy_buffer_to_buffer(source.handle, start, to.handle, at, nbytes)
            return Recorded(encoder.finish() if finish else encoder, finish)

    def send(self, recorded: Recorded) -> None:
        with self.device.errors():
            handle = recorded.handle if recorded.is_finished else recorded.handle.finish()
            self.device.handle.queue.submit([handle])

    def drop(self, recorded: Recorded) -> None:
        """Python does."""

    def wait(self, submission: None) -> None:
        self.device.wait()

    def read(
        self, staging: Buffer, nbytes: int, submission: None, urgent: bool = False
    ) -> NDArray[np.uint32]:
        with self.device.errors():
            staging.handle.map_sync(wgpu.MapMode.READ, 0, nbytes)
            try:
                return np.frombuffer(staging.handle.read_mapped(0, nbytes), np.uint32).copy()
            finally:
                staging.handle.unmap()


def run(device: Device, dispatches: Sequence[Dispatch], rows: int = 1, kv_len: int = 0) -> None:
    """Submit some dispatches once: for everything but the hot loop."""
    PublicQueue(device).submit(Recording(dispatches), rows, kv_len, ())
