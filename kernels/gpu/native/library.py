"""The interface of a WebGPU library, and the part of its code that all libraries share.

Python packages for WebGPU have one public API, that of wgpu-py, whose objects are called handles
here. This module is about what the public API does not offer, or offers too slowly: recording
steps, waiting for one submission, mapping a buffer without a submission of its own. Every library
has the C functions of webgpu.h, which its package's `lib` and `ffi` call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Size = tuple[int, int, int]  # workgroups of a dispatch
NOTHING: Size = (0, 0, 0)  # the size of a dispatch that a step does not need: it is not recorded

MATRICES = "subgroup-matrices"  # a feature that WebGPU has no name for yet

READ, WRITE = 1, 2
"""The modes in which a buffer is mapped, by WebGPU's numbers."""


class MatrixShape(NamedTuple):
    """Matrices that a subgroup multiplies at once: [m, k] times [k, n], f16 with sums in f32."""

    m: int
    n: int
    k: int


class Item(NamedTuple):
    """A dispatch as C pointers. size: None where it depends on the step; then `grid` is its place
    among the step's sizes."""

    pipeline: Any
    bind_group: Any
    size: Size | None
    grid: int


class CopyItem(NamedTuple):
    """A copy of nbytes bytes between two buffers, whose handles and byte offsets these are."""

    source: Any
    start: int
    target: Any
    at: int
    nbytes: int


def pointer(handle: Any) -> Any:
    """The C pointer of an object of the public API, which has to be kept alive beside it."""
    return handle._internal


class Library(ABC):
    """A WebGPU library.

    name: as users write it. errors: the exceptions that its package raises where WebGPU fails.
    out_of_memory: those of them that say that memory is exhausted.
    """

    name: str
    errors: tuple[type[Exception], ...]
    out_of_memory: tuple[type[Exception], ...]

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """The versions of the package and of the library in it, by their names."""

    @abstractmethod
    def adapters(self) -> list[Any]:
        """The handles of all adapters. Not to be called by two threads at once."""

    @abstractmethod
    def features(self, adapter: Any) -> frozenset[str]:
        """Returns the features that an adapter offers, by WebGPU's names."""

    def matrices(self, adapter: Any) -> tuple[MatrixShape, ...]:
        """The matrices that an adapter multiplies, where the library offers them."""
        return ()

    def uuid(self, adapter: Any) -> str | None:
        """Returns the UUID by which other programs tell equal cards apart; None where the library
        does not know it."""
        return None

    @abstractmethod
    def open(
        self,
        adapter: Any,
        features: Sequence[str],
        limits: Mapping[str, int],
        *,
        bounds_checks: bool,
    ) -> NativeDevice:
        """Open an adapter. features: those the device must have, by WebGPU's names, or MATRICES.
        limits: those it must have, by WebGPU's names. bounds_checks: whether kernels are compiled
        with the library's own run-time checks. Raises RuntimeError."""

    @abstractmethod
    def forget(self) -> None:
        """From now on release nothing: this process was forked, and all there is belongs to the
        other one."""

    @abstractmethod
    def place(self, message: str) -> tuple[int, int] | None:
        """The line and the column, from 1, that a compiler's message speaks of, if it names any."""


class BufferMapping(ABC):
    """Maps one buffer at a time into host memory, for one thread at a time.

    lib and ffi: the library's C functions and types.
    """

    lib: Any
    ffi: Any

    @abstractmethod
    def ask(self, buffer: Any, nbytes: int, mode: int) -> None:
        """Ask for the first nbytes bytes of a buffer, to READ or to WRITE them. They are mapped
        once the work is done that was submitted before and uses the buffer. A buffer that is still
        mapped is given back."""

    @abstractmethod
    def is_mapped(self) -> bool:
        """Whether the buffer is mapped by now, or the mapping failed. Does not wait."""

    @abstractmethod
    def wait(self, submission: Any) -> memoryview:
        """The mapped memory, once it is there. submission: the last one that uses the buffer; None
        waits for all. Raises an error of the library."""

    @abstractmethod
    def unmap(self) -> None:
        """Give the buffer back to the GPU, or give up asking for it, if there is one."""

    def _memory(self, buffer: Any, nbytes: int, mode: int) -> memoryview:
        """The first nbytes bytes of a buffer that is mapped to READ or to WRITE them."""
        read = mode == READ
        get = self.lib.wgpuBufferGetConstMappedRange if read else self.lib.wgpuBufferGetMappedRange
        return memoryview(self.ffi.buffer(get(pointer(buffer), 0, nbytes), nbytes))


class NativeDevice(ABC):
    """An open adapter. lib and ffi: the library's C functions and types."""

    lib: Any
    ffi: Any
    submitted_first = 0
    """Dispatches of a step recorded ahead that are a submission of their own, 0 for none: the GPU
    has these to do while the library submits the others."""

    def __init__(self, library: Library, handle: Any) -> None:
        self.library, self.handle = library, handle
        self._device, self._queue = pointer(handle), pointer(handle.queue)
        self._commands = self.ffi.new("WGPUCommandBuffer[1]")

    @property
    @abstractmethod
    def timestamp_period(self) -> float:
        """Seconds of a timestamp's tick."""

    @abstractmethod
    def module(self, code: str, label: str, *, bounds_checks: bool) -> Any:
        """The handle of a shader module. Raises an error of the library, with the compiler's
        message, for code that does not compile."""

    def record(
        self,
        parts: Iterable[tuple[Sequence[Item], Sequence[Size]]],
        copies: Iterable[CopyItem],
        *,
        ahead: bool = False,
    ) -> list[Any]:
        """C encoders of a step, each to be a submission: one compute pass of all parts, and the
        copies after it. A part is its dispatches, and the sizes that these refer to. ahead: the GPU
        has nothing to do once the step is submitted, so that a long one may become two encoders."""
        parts = list(parts)
        count = sum(len(items) for items, _ in parts)
        if not (ahead and 0 < 2 * self.submitted_first <= count):
            return [self._encode(parts, copies)]
        first, rest, left = [], [], self.submitted_first
        for items, sizes in parts:
            first.append((items[:left], sizes))
            rest.append((items[left:], sizes))
            left = max(0, left - len(items))
        encoders = [self._encode(first, ())]
        try:
            encoders.append(self._encode(rest, copies))
        except BaseException:
            self.drop(encoders, is_finished=False)
            raise
        return encoders

    def _encode(
        self, parts: Iterable[tuple[Sequence[Item], Sequence[Size]]], copies: Iterable[CopyItem]
    ) -> Any:
        """A C encoder of these parts and copies."""
        lib, null = self.lib, self.ffi.NULL
        set_pipeline = lib.wgpuComputePassEncoderSetPipeline
        set_bind_group = lib.wgpuComputePassEncoderSetBindGroup
        dispatch = lib.wgpuComputePassEncoderDispatchWorkgroups
        encoder = lib.wgpuDeviceCreateCommandEncoder(self._device, null)
        try:
            compute = lib.wgpuCommandEncoderBeginComputePass(encoder, null)
            try:
                last = None
                for items, sizes in parts:
                    for pipeline, group, size, grid in items:
                        size = size or sizes[grid]
                        if size is NOTHING:
                            continue
                        if pipeline is not last:
                            set_pipeline(compute, pipeline)
                            last = pipeline
                        set_bind_group(compute, 0, group, 0, null)
                        dispatch(compute, *size)
                lib.wgpuComputePassEncoderEnd(compute)
            finally:
                lib.wgpuComputePassEncoderRelease(compute)
            for source, start, target, at, nbytes in copies:
                lib.wgpuCommandEncoderCopyBufferToBuffer(
                    encoder, pointer(source), start, pointer(target), at, nbytes
                )
        except BaseException:
            lib.wgpuCommandEncoderRelease(encoder)
            raise
        return encoder

    def finish(self, encoders: Sequence[Any]) -> list[Any]:
        """The C command buffers of encoders, which are released. Raises an error of the library, as
        on a lost device."""
        commands: list[Any] = []
        try:
            commands.extend(self._finish(each) for each in encoders)
        except BaseException:
            self.drop(commands, is_finished=True)
            raise
        finally:
            self.drop(encoders, is_finished=False)
        return commands

    @abstractmethod
    def _finish(self, encoder: Any) -> Any:
        """The C command buffer of an encoder, which stays the caller's to release."""

    def drop(self, recorded: Iterable[Any], *, is_finished: bool) -> None:
        """Release C command buffers, or, if they are not finished, encoders."""
        for each in recorded:
            if is_finished:
                self.lib.wgpuCommandBufferRelease(each)
            else:
                self.lib.wgpuCommandEncoderRelease(each)

    @abstractmethod
    def submit(self, commands: Sequence[Any]) -> Any:
        """Submit C command buffers, one after the other. They stay the caller's to release. Returns
        what `wait` takes. Raises an error of the library."""

    @abstractmethod
    def wait(self, submission: Any = None) -> None:
        """Until a submission is done; without one, until everything is that was submitted."""

    @abstractmethod
    def mapping(self) -> BufferMapping:
        """A new mapping of buffers of this device."""
