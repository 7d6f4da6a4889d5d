"""A WebGPU device: its limits, its buffers, its pipelines. Nothing in this package is global."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import wgpu

from infer.kernels.errors import (
    ClosedError,
    DeviceError,
    InferError,
    OutOfMemoryError,
    RequestError,
    ShaderError,
    Uncopied,
)
from infer.kernels.gpu.adapters import AdapterInfo, check_process, choose_adapter, is_forked
from infer.kernels.gpu.multiprocessors import multiprocessors
from infer.kernels.gpu.native import NativeDevice, library
from infer.kernels.gpu.native.library import MATRICES, MatrixShape
from infer.kernels.gpu.shader import KernelSpec, Shader, render

_USAGE = {
    # Everything on the GPU may be read back and written: by tests, by the loader, by rollback.
    "storage": wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST,
    "read": wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST,
    "write": wgpu.BufferUsage.MAP_WRITE | wgpu.BufferUsage.COPY_SRC,
    "query": wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC,
}
_LIMITS = (
    "max-storage-buffer-binding-size",
    "max-buffer-size",
    "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-compute-workgroups-per-dimension",
    "max-storage-buffers-per-shader-stage",
)

# Lanes that compilers choose from for each kernel, by a word of an adapter's name.
_CHOSEN = {"intel": (8, 16, 32), "amd": (32, 64), "radeon": (32, 64)}


_SWITCHES = ("subgroups", "f16", "matrices", "bounds_checks")


@dataclass(frozen=True)
class Settings:
    """Limits and features of an adapter that are used: for tests, weak adapters and drivers' bugs.

    None leaves a limit (bytes, invocations, bindings) as the adapter has it. Every kernel has a
    path for each of these switched off or set to the least that WebGPU guarantees. bounds_checks
    keeps the run-time checks that the WebGPU library adds to kernels, which check by themselves
    what they read: 3 % slower in decode, 20 % in prefill.
    """

    subgroups: bool = True
    f16: bool = True
    matrices: bool = True
    max_binding: int | None = None
    workgroup_storage: int | None = None
    max_invocations: int | None = None
    storage_buffers: int | None = None
    bounds_checks: bool = False

    def __post_init__(self) -> None:
        """Raises RequestError for values of other kinds, and limits below one."""
        for name, value in vars(self).items():
            if name in _SWITCHES:
                right, kind = isinstance(value, bool), "true or false"
            else:
                right = value is None or (type(value) is int and value > 0)
                kind = "a positive integer or None"
            if not right:
                raise RequestError(f"The setting {name} must be {kind}, not {value!r:.200}.")


@dataclass(frozen=True)
class Limits:
    """Bytes of one binding, one buffer and a workgroup's memory; invocations; workgroups a side;
    storage buffers that a kernel can bind.

    The defaults are what every WebGPU device has.
    """

    max_binding: int = 128 << 20
    max_buffer: int = 256 << 20
    workgroup_storage: int = 16384
    max_invocations: int = 256
    max_workgroups: int = 65535
    storage_buffers: int = 8

    @classmethod
    def of(cls, limits: Mapping[str, int]) -> Limits:
        """Returns the limits from a mapping that has WebGPU's names for them."""
        return cls(
            max_binding=limits["max-storage-buffer-binding-size"],
            max_buffer=limits["max-buffer-size"],
            workgroup_storage=limits["max-compute-workgroup-storage-size"],
            max_invocations=limits["max-compute-invocations-per-workgroup"],
            max_workgroups=limits["max-compute-workgroups-per-dimension"],
            storage_buffers=limits["max-storage-buffers-per-shader-stage"],
        )


@dataclass(eq=False)
class Buffer:
    """GPU memory. nbytes is a multiple of 16; usage is a key of `_USAGE`. `Device.grow` replaces
    the handle."""

    handle: Any
    nbytes: int
    usage: str
    label: str


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A compiled kernel."""

    spec: KernelSpec
    shader: Shader
    handle: Any
    layout: Any


@dataclass(frozen=True)
class MemoryStats:
    """Bytes in GPU buffers now and at most so far; bytes of them waiting in the pool for reuse;
    how often the pool could serve a request (hits) and how often it had to allocate (misses)."""

    allocated: int
    peak: int
    pooled: int
    hits: int
    misses: int


class Device(Uncopied):
    """One open adapter. Close it, or use it in `with`; its buffers go with it."""

    instead = "Let threads share it as it is, or call Device.open() in the other process."

    def __init__(self, adapter: AdapterInfo, settings: Settings | None = None) -> None:
        if not isinstance(settings, Settings | None):
            raise RequestError(f"settings must be Settings, not {type(settings).__name__}.")
        self.adapter, self.settings = adapter, settings or Settings()
        wanted = {"subgroups": self.settings.subgroups, "shader-f16": self.settings.f16}
        features = [name for name, use in wanted.items() if use and name in adapter.features]
        if "timestamp-query" in adapter.features:
            features.append("timestamp-query")
        needed = {"subgroups", "shader-f16"} <= set(features)
        self.matrices = adapter.matrices if needed and self.settings.matrices else ()
        if self.matrices:
            features.append(MATRICES)
        check_process()
        try:
            with enough_threads():
                # wgpu-py never frees a device whose own thread does not start: see that one does.
                thread = threading.Thread(target=int)
                thread.start()
                thread.join()
                self.native: NativeDevice = library(adapter.webgpu).open(
                    adapter.handle,
                    features,
                    self._required_limits(),
                    bounds_checks=self.settings.bounds_checks,
                )
        except RuntimeError as error:
            raise DeviceError(f"{adapter} could not be opened: {error}") from error
        # A library may give more than was asked for: Dawn no less than WebGPU's defaults.
        given, asked = self.handle.limits, self._required_limits()
        self.limits = Limits.of({name: min(given[name], most) for name, most in asked.items()})
        self.subgroups = "subgroups" in features
        self.f16 = "shader-f16" in features
        self.timestamps = "timestamp-query" in features
        self.software = adapter.kind == "software"
        self.multiprocessors = multiprocessors(adapter)
        self._lock = threading.RLock()
        self._buffers: set[Buffer] = set()
        self._pool: dict[tuple[int, str], list[Buffer]] = {}
        self._pipelines: dict[KernelSpec, Pipeline] = {}
        self._layouts: dict[tuple[str, ...], Any] = {}
        self._scopes = threading.local()
        self._allocated = self._peak = self._hits = self._misses = 0
        self.closed = self._stopped = False
        try:
            sizes = self._probe_subgroups() if self.subgroups else (0, 0)
        except BaseException:
            self.close()
            raise
        self.subgroup_size, self.largest_subgroup = sizes

    @property
    def handle(self) -> Any:
        """The device of wgpu-py's public API."""
        return self.native.handle

    @classmethod
    def open(
        cls,
        selector: str | int | None = None,
        settings: Settings | None = None,
        webgpu: str | None = None,
    ) -> Device:
        """The adapter that `selector` and `webgpu` name (see `choose_adapter`), opened."""
        return cls(choose_adapter(selector, webgpu), settings)

    def _probe_subgroups(self) -> tuple[int, int]:
        """Lanes that a subgroup has at least and at most: wgpu-native does not tell, so a kernel
        does, and the name of the adapter."""
        size = self.upload(np.zeros(4, np.uint32))
        pipeline = self.pipeline(KernelSpec.of("subgroup_size"))
        encoder = self.handle.create_command_encoder()
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(pipeline.handle)
        compute.set_bind_group(0, self.bind(pipeline, [size]))
        compute.dispatch_workgroups(1)
        compute.end()
        self.handle.queue.submit([encoder.finish()])
        lanes = int(self.read(size, np.uint32)[0])
        self.destroy([size, *(buffer for free in self._pool.values() for buffer in free)])
        self._pool.clear()
        self._peak = self._hits = self._misses = 0
        name = self.adapter.name.lower()
        chosen = [size for word, sizes in _CHOSEN.items() if word in name for size in sizes]
        return min([lanes, *chosen]), max([lanes, *chosen])

    def _required_limits(self) -> dict[str, int]:
        # Without asking for the adapter's own limits a binding would end at 128 MiB.
        limits = {name: self.adapter.limits[name] for name in _LIMITS}
        own = {
            "max-storage-buffer-binding-size": self.settings.max_binding,
            "max-compute-workgroup-storage-size": self.settings.workgroup_storage,
            "max-compute-invocations-per-workgroup": self.settings.max_invocations,
            "max-compute-workgroup-size-x": self.settings.max_invocations,
            "max-storage-buffers-per-shader-stage": self.settings.storage_buffers,
        }
        return limits | {name: value for name, value in own.items() if value is not None}

    # Errors

    def error(self, cause: object) -> DeviceError:
        """Returns the error to raise where WebGPU fails. cause: the library's error or its text."""
        text = _first_cause(cause)
        if isinstance(cause, self.native.library.out_of_memory):
            return OutOfMemoryError(
                f"{self.adapter.name} has no room left ({self._allocated:,} bytes are in use by "
                "this process). Close other programs that use it, or load with a smaller context."
            )
        if _is_loss(cause):
            return DeviceError(
                f"{self.adapter.name} was lost: its driver was reset, it was removed, or something "
                "in this process has destroyed it. Load the model again."
            )
        return DeviceError(
            f"{self.adapter.name} failed ({text}): the device may be lost. Load the model again."
        )

    @contextmanager
    def errors(self) -> Iterator[None]:
        """A block in which errors of the WebGPU library become DeviceErrors."""
        try:
            yield
        except self.native.library.errors as error:
            raise self.error(error) from error

    # Buffers

    def buffer(self, nbytes: int, usage: str = "storage", label: str = "") -> Buffer:
        """New memory, zero-filled, rounded up to 16 bytes. Raises OutOfMemoryError."""
        self.check_open()
        nbytes = max(16, -(-nbytes // 16) * 16)
        if nbytes > self.limits.max_buffer:
            raise OutOfMemoryError(
                f"{label or 'A buffer'} needs {nbytes:,} bytes; one buffer of {self.adapter.name} "
                f"holds {self.limits.max_buffer:,}."
            )
        try:
            handle = self.handle.create_buffer(size=nbytes, usage=_USAGE[usage], label=label)
        except self.native.library.errors as error:
            if _is_loss(error):
                raise self.error(error) from error
            raise OutOfMemoryError(
                f"{self.adapter.name} has no room for {label or 'a buffer'} of {nbytes:,} bytes "
                f"({self._allocated:,} are in use by this process)."
            ) from error
        buffer = Buffer(handle, nbytes, usage, label)
        for scope in getattr(self._scopes, "open", [])[-1:]:
            scope.append(buffer)
        with self._lock:
            self._buffers.add(buffer)
            self._allocated += nbytes
            self._peak = max(self._peak, self._allocated)
        return buffer

    def upload(self, data: np.ndarray[Any, Any], label: str = "") -> Buffer:
        """A storage buffer that holds `data`."""
        buffer = self.buffer(data.nbytes, label=label)
        self.write(buffer, data)
        return buffer

    def made(self, nbytes: int, make: Callable[[], np.ndarray[Any, Any]], label: str) -> Buffer:
        """A storage buffer of what `make` returns, which has so many bytes and is made once there
        is room for it."""
        buffer = self.buffer(nbytes, label=label)
        self.write(buffer, make())
        return buffer

    def destroy(self, buffers: Iterable[Buffer]) -> None:
        """Free memory. wgpu keeps what submitted work still uses until that work is done."""
        if is_forked():  # the memory is the other process's
            return
        with self._lock:
            for buffer in list(buffers):
                if buffer in self._buffers:
                    self._buffers.remove(buffer)
                    self._allocated -= buffer.nbytes
                    buffer.handle.destroy()

    def grow(self, buffer: Buffer, nbytes: int, kept: Sequence[tuple[int, int, int]]) -> None:
        """Give a buffer more memory, in order with submitted work. kept: (from, to, nbytes) of what
        it keeps; the rest is zeros. What binds the buffer has to bind it anew, and nothing that was
        recorded before may be submitted any more. Raises OutOfMemoryError, and the buffer is as it
        was."""
        larger = self.buffer(nbytes, buffer.usage, buffer.label)
        with self.errors():
            encoder = self.handle.create_command_encoder()
            for source, to, count in kept:
                encoder.copy_buffer_to_buffer(buffer.handle, source, larger.handle, to, count)
            self.handle.queue.submit([encoder.finish()])
        for name in ("handle", "nbytes"):
            own, other = getattr(buffer, name), getattr(larger, name)
            setattr(buffer, name, other)
            setattr(larger, name, own)
        self.destroy([larger])

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Destroys at its end every buffer that this thread has made in it, less the pool's."""
        scopes = self._scopes.__dict__.setdefault("open", [])
        scopes.append([])
        try:
            yield
        finally:
            self.destroy(scopes.pop())

    def acquire(self, nbytes: int, usage: str = "storage") -> Buffer:
        """Memory of at least nbytes from the pool, with whatever it last held."""
        size = 1 << max(8, (nbytes - 1).bit_length())
        with self._lock:
            free = self._pool.get((size, usage))
            if free:
                self._hits += 1
                return free.pop()
            self._misses += 1
        buffer = self.buffer(size, usage, label=f"pool {size}")
        for scope in getattr(self._scopes, "open", [])[-1:]:
            scope.remove(buffer)
        return buffer

    def release(self, *buffers: Buffer) -> None:
        """Give memory back to the pool. Later work on the queue runs after what still uses it."""
        with self._lock:
            for buffer in buffers:
                self._pool.setdefault((buffer.nbytes, buffer.usage), []).append(buffer)

    def write(self, buffer: Buffer, data: np.ndarray[Any, Any] | bytes, offset: int = 0) -> None:
        """Copy host memory (a multiple of 4 bytes) into a buffer, in order with submitted work."""
        self.check_open()
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data)
        with self.errors():
            self.handle.queue.write_buffer(buffer.handle, offset, data)

    def read(
        self, buffer: Buffer, dtype: Any = np.float32, count: int = -1, offset: int = 0
    ) -> np.ndarray[Any, Any]:
        """`count` values (-1: all) from byte `offset` on, after all submitted work."""
        self.check_open()
        itemsize = np.dtype(dtype).itemsize
        nbytes = buffer.nbytes - offset if count < 0 else count * itemsize
        padded = -(-nbytes // 4) * 4
        staging = self.acquire(padded, "read")
        with self.errors():
            encoder = self.handle.create_command_encoder()
            encoder.copy_buffer_to_buffer(buffer.handle, offset, staging.handle, 0, padded)
            self.handle.queue.submit([encoder.finish()])
            staging.handle.map_sync(wgpu.MapMode.READ, 0, padded)
            try:
                mapped = staging.handle.read_mapped(0, padded)
                data = np.frombuffer(mapped, np.uint8)[:nbytes].copy()
            finally:
                staging.handle.unmap()
                self.release(staging)
        return data.view(dtype)

    def wait(self) -> None:
        """Wait until all submitted work is done."""
        if is_forked():  # it never is, without the driver's threads
            return
        self.native.wait()

    def memory_stats(self) -> MemoryStats:
        with self._lock:
            pooled = sum(buffer.nbytes for free in self._pool.values() for buffer in free)
            return MemoryStats(self._allocated, self._peak, pooled, self._hits, self._misses)

    # Pipelines

    def pipeline(self, spec: KernelSpec) -> Pipeline:
        """The kernel, compiled on its first use. Raises ShaderError with file and line."""
        self.check_open()
        with self._lock:
            known = self._pipelines.get(spec)
        if known is not None:
            return known
        pipeline = self.compile(spec, render(spec))
        with self._lock:
            return self._pipelines.setdefault(spec, pipeline)

    def pipelines(
        self, specs: Iterable[KernelSpec], progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Compile several kernels at once, in threads: a large one can take seconds. `progress`
        gets how many of them are done, and how many there are."""
        distinct = list(dict.fromkeys(specs))
        with enough_threads(), ThreadPoolExecutor(max_workers=8) as pool:
            for done, _ in enumerate(pool.map(self.pipeline, distinct), 1):
                if progress is not None:
                    progress(done, len(distinct))

    @property
    def n_pipelines(self) -> int:
        """How many kernels have been compiled."""
        return len(self._pipelines)

    def compile(self, spec: KernelSpec, shader: Shader) -> Pipeline:
        """A pipeline of rendered WGSL with the entry point `main`. It runs as it is written: the
        library adds bounds checks of its own only if the settings ask for them. Raises ShaderError.
        """
        storage, most = shader.workgroup_storage, self.limits.workgroup_storage
        if storage > most:  # wgpu-native does not look, and a driver may crash
            raise ShaderError(
                f"{spec.label} needs {storage:,} bytes of workgroup memory; {self.adapter.name} "
                f"has {most:,}."
            )
        checks = self.settings.bounds_checks
        try:
            module = self.native.module(shader.code, spec.label, bounds_checks=checks)
        except self.native.library.errors as error:
            if _is_loss(error):
                raise self.error(error) from error
            message = self._located(str(error), shader)
            raise ShaderError(f"{spec.label} does not compile:\n{message}") from None
        layout = self._layout(tuple(binding.access for binding in shader.bindings))
        try:
            handle = self.handle.create_compute_pipeline(
                label=spec.label,
                layout=self.handle.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={"module": module, "entry_point": "main"},
            )
        except self.native.library.errors as error:
            if _is_loss(error):
                raise self.error(error) from error
            raise ShaderError(
                f"{self.adapter.name} refuses {spec.label}: {_first_cause(error)}"
            ) from error
        return Pipeline(spec, shader, handle, layout)

    def validate(self, shader: Shader, label: str = "") -> list[str]:
        """The compiler's messages about rendered WGSL, each with its source file and line."""
        try:
            self.native.module(shader.code, label, bounds_checks=True)
        except self.native.library.errors as error:
            return [self._located(str(error), shader)]
        return []

    def _located(self, message: str, shader: Shader) -> str:
        """The compiler's message, headed by the source file, line and column it speaks of."""
        text = message.partition("error: ")[2].strip() or message
        place = self.native.library.place(message)
        if place is None:
            return text
        line, column = place
        return f"{shader.place(line)}:{column}: {text}"

    def _layout(self, accesses: tuple[str, ...]) -> Any:
        kinds = {"read": "read-only-storage", "read_write": "storage", "uniform": "uniform"}
        with self._lock, self.errors():
            if accesses not in self._layouts:
                self._layouts[accesses] = self.handle.create_bind_group_layout(
                    entries=[
                        {
                            "binding": index,
                            "visibility": wgpu.ShaderStage.COMPUTE,
                            "buffer": {"type": kinds[access]},
                        }
                        for index, access in enumerate(accesses)
                    ]
                )
            return self._layouts[accesses]

    def bind(self, pipeline: Pipeline, buffers: Sequence[Buffer]) -> Any:
        """A bind group of whole buffers, in the order of the kernel's bindings."""
        bindings = pipeline.shader.bindings
        if len(buffers) != len(bindings):
            raise ShaderError(
                f"{pipeline.spec.label} has {len(bindings)} bindings, not {len(buffers)}"
            )
        largest = max(buffer.nbytes for buffer in buffers)
        if largest > self.limits.max_binding:  # Dawn does not look
            raise DeviceError(
                f"{pipeline.spec.label} would bind {largest:,} bytes; {self.adapter.name} binds at "
                f"most {self.limits.max_binding:,}."
            )
        with self.errors():
            return self.handle.create_bind_group(
                layout=pipeline.layout,
                entries=[
                    {
                        "binding": binding.index,
                        "resource": {"buffer": buffer.handle, "offset": 0, "size": buffer.nbytes},
                    }
                    for binding, buffer in zip(bindings, buffers, strict=True)
                ],
            )

    # End

    def stop(self) -> None:
        """Let other threads make nothing more on it: what they begin ends with a ClosedError."""
        self._stopped = True

    def close(self) -> None:
        """Free everything. Safe to call twice."""
        if self.closed or is_forked():
            return
        self.wait()
        self.destroy(list(self._buffers))
        self.closed = True
        self._pool.clear()
        self._pipelines.clear()
        self.handle.destroy()

    def __repr__(self) -> str:
        used = f"{self._allocated / 2**20:.1f} MiB in use"
        return f"<{type(self).__name__} {self.adapter}: {'closed' if self.closed else used}>"

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_open(self) -> None:
        """Raises ClosedError, and DeviceError in a process that was forked."""
        check_process()
        if self.closed or self._stopped:
            raise ClosedError("This device has been closed.")


class DryDevice(Device):
    """Counts what a device would allocate, and allocates nothing."""

    def __init__(self, limits: Limits, adapter: AdapterInfo | None = None) -> None:
        self.limits, self.settings, self.closed = limits, Settings(), False
        self.subgroups, self.subgroup_size, self.largest_subgroup = True, 32, 32
        self.matrices: tuple[MatrixShape, ...] = () if adapter is None else adapter.matrices
        self.software = adapter is not None and adapter.kind == "software"
        self.multiprocessors = multiprocessors(adapter)
        self.allocated = 0

    def __repr__(self) -> str:
        return f"<DryDevice: {self.allocated:,} bytes counted>"

    def buffer(self, nbytes: int, usage: str = "storage", label: str = "") -> Buffer:
        nbytes = max(16, -(-nbytes // 16) * 16)
        self.allocated += nbytes
        return Buffer(None, nbytes, usage, label)

    def grow(self, buffer: Buffer, nbytes: int, kept: Sequence[tuple[int, int, int]]) -> None:
        self.allocated += nbytes - buffer.nbytes
        buffer.nbytes = nbytes

    def write(self, buffer: Buffer, data: np.ndarray[Any, Any] | bytes, offset: int = 0) -> None:
        pass

    def made(self, nbytes: int, make: Callable[[], np.ndarray[Any, Any]], label: str) -> Buffer:
        return self.buffer(nbytes, label=label)

    def destroy(self, buffers: Iterable[Buffer]) -> None:
        pass


@contextmanager
def enough_threads() -> Iterator[None]:
    """A block in which a system that starts no more threads raises an InferError."""
    try:
        yield
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise
        raise InferError(
            "The system lets this process start no more threads, and loading a model takes about "
            "20. Raise the limit (ulimit -u, or that of the container), or end other processes."
        ) from error


def _is_loss(error: object) -> bool:
    return re.search(r"\bdevice\]? is lost", str(error).lower()) is not None


def _first_cause(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and line != "Caused by:")
