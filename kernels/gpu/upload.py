"""Bulk upload: a ring of mapped staging buffers that threads fill while the GPU copies from others.

On a discrete GPU this is two to four times as fast as `queue.write_buffer`, and the host holds no
more than the ring. A staging buffer goes round: mapped and filled by several threads, unmapped,
copied from in one submission, mapped again. The public `map_async` would not do: on wgpu-native it
wakes a thread that waits for the whole queue.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from infer.kernels.errors import DeviceError
from infer.kernels.gpu.device import Buffer, Device, enough_threads
from infer.kernels.gpu.native.library import WRITE, pointer
from infer.kernels.gpu.plan import Dispatch

RING = 4  # staging buffers
STAGING_BYTES = 32 << 20  # of each
SOFTWARE_STAGING_BYTES = 8 << 20  # the same where "GPU" memory is the host's own
PIECE_BYTES = 4 << 20  # what one thread fills at a time
MAX_THREADS = 8

# Writes bytes [start, start + len(view)) of some data into view.
Fill = Callable[[memoryview, int], None]


@dataclass(frozen=True)
class _Copy:
    source: int
    buffer: Buffer
    offset: int
    nbytes: int


class _Staging:
    """One buffer of the ring."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.device = device
        self.buffer = device.buffer(nbytes, "write", "staging")
        self.used = 0
        self.fills: list[Future[None]] = []
        self.commands: list[_Copy | Dispatch] = []
        self._submission: Any = None
        self._mapping = device.native.mapping()
        self._map()

    def _map(self) -> None:
        with self.device.errors():
            self._mapping.ask(self.buffer.handle, self.buffer.nbytes, WRITE)

    def view(self) -> memoryview:
        """The mapped memory, once the GPU has copied what it last held."""
        with self.device.errors():
            return self._mapping.wait(self._submission)

    def submit(self) -> int:
        """Once it is filled, copy it to where it belongs, and run the kernels between the copies.
        Returns how many bytes were copied."""
        for fill in self.fills:
            fill.result()
        with self.device.errors():
            nbytes = self._submit()
        self._map()
        self.used, self.fills, self.commands = 0, [], []
        return nbytes

    def _submit(self) -> int:
        self._mapping.unmap()
        encoder = self.device.handle.create_command_encoder()
        nbytes = 0
        for command in self.commands:
            if isinstance(command, Dispatch):
                _record(encoder, command)
                continue
            encoder.copy_buffer_to_buffer(
                self.buffer.handle,
                command.source,
                command.buffer.handle,
                command.offset,
                command.nbytes,
            )
            nbytes += command.nbytes
        commands = encoder.finish()  # held in a name: it is released once Python has forgotten it
        self._submission = self.device.native.submit([pointer(commands)])
        return nbytes


def _record(encoder: Any, item: Dispatch) -> None:
    compute = encoder.begin_compute_pass()
    compute.set_pipeline(item.pipeline.handle)
    compute.set_bind_group(0, item.bind_group)
    compute.dispatch_workgroups(*item.size(1, 0))
    compute.end()


class Uploader:
    """Writes host data into GPU buffers; use it in `with`, which at its end waits for all of it.

    nbytes is about how much will be written: little data gets a small ring. on_submitted is told
    the bytes of each staging buffer as it goes to the GPU. A failure, an interrupt too, leaves the
    `with` without a thread still running and with the ring freed. Raises OutOfMemoryError.
    """

    def __init__(
        self, device: Device, nbytes: int, on_submitted: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        software = device.adapter.kind == "software"
        most = SOFTWARE_STAGING_BYTES if software else STAGING_BYTES
        self._device, self._on_submitted = device, on_submitted
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
        self._ring: list[_Staging] = []
        try:
            for _ in range(RING):
                self._ring.append(_Staging(device, min(nbytes, most)))
            self._view = self._ring[0].view()
        except BaseException:
            self._close()
            raise

    def write(self, buffer: Buffer, offset: int, nbytes: int, fill: Fill, unit: int = 4) -> None:
        """Put nbytes bytes at byte `offset` of `buffer`, both multiples of 4.

        `fill` runs later, in several threads, on parts of the data that are cut at multiples of
        `unit` bytes. What it raises comes out of a later `write` or `flush`. Raises DeviceError
        for a unit larger than a staging buffer.
        """
        unit = math.lcm(unit, 4)  # copies are of whole words
        if unit > self._ring[0].buffer.nbytes:
            raise DeviceError(
                f"Data in units of {unit:,} bytes cannot go through staging buffers of "
                f"{self._ring[0].buffer.nbytes:,}. Cut it into smaller ones."
            )
        start = 0
        while start < nbytes:
            staging = self._ring[0]
            free = min(staging.buffer.nbytes - staging.used, max(PIECE_BYTES, unit))
            size = min(nbytes - start, free // unit * unit)
            if size == 0:
                self._next()
                continue
            view = self._view[staging.used : staging.used + size]
            with enough_threads():
                staging.fills.append(self._threads.submit(fill, view, start))
            staging.commands.append(_Copy(staging.used, buffer, offset + start, size))
            staging.used += -(-size // 16) * 16
            start += size

    def run(self, kernel: Dispatch) -> None:
        """Run a kernel after what has been written so far, and before what will be."""
        self._ring[0].commands.append(kernel)

    def flush(self) -> None:
        """Wait until everything that was written is in its buffers, and every kernel has run."""
        for _ in self._ring:
            self._next()
        self._device.wait()

    def _next(self) -> None:
        """Go on to the staging buffer that was filled the longest ago."""
        self._device.check_open()
        self._ring.append(self._ring.pop(0))
        staging = self._ring[0]
        if staging.commands:
            self._on_submitted(staging.submit())
        self._view = staging.view()

    def _close(self) -> None:
        # Until the threads are done they write into the mapped memory, and until the queue is
        # empty the library may still call back.
        self._threads.shutdown(cancel_futures=True)
        self._device.wait()
        self._device.destroy(staging.buffer for staging in self._ring)

    def __enter__(self) -> Uploader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self._close()
