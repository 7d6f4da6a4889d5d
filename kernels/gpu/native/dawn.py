"""Google's Dawn, by the package wgpudawn, which has wgpu-py's public API."""

from __future__ import annotations

import logging
import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import wgpudawn
from wgpudawn.backends.dawn import _api, _helpers, extras, gpu, lib_version_info
from wgpudawn.backends.dawn._ffi import c_callback, callbacks, ffi, lib

from infer.kernels.gpu.native.library import (
    MATRICES,
    READ,
    BufferMapping,
    Library,
    MatrixShape,
    NativeDevice,
    pointer,
)

# Switches of Dawn ("toggles") for all adapters and devices: without them NVIDIA's have no f16.
_ALWAYS = ("allow_unsafe_apis", "vulkan_enable_f16_on_nvidia")
# Switches of a device, on and off: no checks of every access to memory; exact timestamps.
_FAST = ("disable_robustness",)
_SLOW = ("timestamp_quantization",)
_OWN_NAMES = {MATRICES: "chromium-experimental-subgroup-matrix"}
# Always asked for: without it no two threads may call Dawn at once.
_THREADS = "implicit-device-synchronization"
# Nanoseconds after which a wait lets Python look for Ctrl-C.
_PATIENCE = 100_000_000


class _Pending(threading.local):
    """The errors that Dawn has reported and nobody has raised, as the package keeps them, but of
    each thread by itself: several compile kernels, and an error belongs to the call that caused it.
    """

    def __init__(self) -> None:
        self._errors: list[tuple[str, str]] = []

    def __bool__(self) -> bool:
        return bool(self._errors)

    def __getitem__(self, index: slice) -> list[tuple[str, str]]:
        return self._errors[index]

    def append(self, error: tuple[str, str]) -> None:
        self._errors.append(error)

    def clear(self) -> None:
        self._errors.clear()


def _keep_errors_by_thread() -> None:
    """The package keeps one list for the process, and raises from it in whichever thread comes
    first."""
    handler = _helpers.ErrorHandler(logging.getLogger("wgpudawn"))
    handler.pending = _Pending()
    _api.error_handler = handler
    _api.libf = _helpers.SafeLibCalls(lib, handler)


class Dawn(Library):
    """Dawn. Its C functions that may fail are called through `_api.libf`, which raises what they
    report."""

    name = "dawn"
    errors = (wgpudawn.GPUError, wgpudawn.GPUPipelineError, RuntimeError)
    out_of_memory = (wgpudawn.GPUOutOfMemoryError,)

    def __init__(self) -> None:
        _keep_errors_by_thread()
        self._has_instance, self._lock = False, threading.Lock()
        self._places = weakref.WeakKeyDictionary[Any, int]()  # of adapters in the library's list

    def versions(self) -> dict[str, str]:
        return {"wgpudawn": wgpudawn.__version__, "Dawn": ".".join(map(str, lib_version_info))}

    def adapters(self) -> list[Any]:
        with self._lock:
            if not self._has_instance:
                extras.set_instance_extras(enable_toggles=_ALWAYS)
                self._has_instance = True
            # The public list has one of several equal cards.
            found = list(gpu._enumerate_all_adapters())
            self._places.update({adapter: place for place, adapter in enumerate(found)})
        return found

    def features(self, adapter: Any) -> frozenset[str]:
        names = {own: name for name, own in _OWN_NAMES.items()}
        return frozenset(names.get(each, each) for each in adapter.features)

    def matrices(self, adapter: Any) -> tuple[MatrixShape, ...]:
        if MATRICES not in self.features(adapter):
            return ()
        return tuple(
            MatrixShape(each["m"], each["n"], each["k"])
            for each in extras.get_adapter_properties(adapter).get("subgroup_matrix_configs", ())
            if (each["component_type"], each["result_component_type"]) == ("f16", "f32")
        )

    def uuid(self, adapter: Any) -> str | None:
        known = extras.get_adapter_properties(adapter).get("vulkan_uuids")
        return str(UUID(bytes=known["device_uuid"])) if known else None

    def _again(self, adapter: Any) -> Any:
        """A new handle of an adapter, of which each makes one device and no more. Equal cards are
        told apart by their UUIDs, or else by their places in the list."""
        found, wanted = self.adapters(), self.uuid(adapter)
        same = [each for each in found if wanted is not None and self.uuid(each) == wanted]
        return same[0] if len(same) == 1 else found[self._places[adapter]]

    def open(
        self,
        adapter: Any,
        features: Sequence[str],
        limits: Mapping[str, int],
        *,
        bounds_checks: bool,
    ) -> NativeDevice:
        handle = extras.request_device_sync(
            self._again(adapter),
            required_features=[*(_OWN_NAMES.get(each, each) for each in features), _THREADS],
            required_limits=dict(limits),
            enable_toggles=() if bounds_checks else _FAST,
            disable_toggles=_SLOW,
        )
        return _Device(self, handle, features)

    def forget(self) -> None:
        _api.libf = None  # without it the package releases nothing

    def place(self, message: str) -> tuple[int, int] | None:
        found = re.search(r":(\d+):(\d+) error:", message)
        return (int(found[1]) - 1, int(found[2])) if found else None  # less the prelude


def _is_done(future: int, info: Any, nanoseconds: int = 0) -> bool:
    """Whether a future has ended, after waiting for so long at most; its callback has run then.
    info: memory for a WGPUFutureWaitInfo that no other thread uses."""
    info.future.id, info.completed = future, False
    lib.wgpuInstanceWaitAny(_helpers.get_wgpu_instance(), 1, info, nanoseconds)
    return bool(info.completed)


def _wait_for(future: int, info: Any) -> None:
    while not _is_done(future, info, _PATIENCE):
        pass


class _Mapping(BufferMapping):
    lib, ffi = lib, ffi

    def __init__(self) -> None:
        self._future, self._waited = 0, ffi.new("WGPUFutureWaitInfo *")
        self._buffer: Any = None  # that is asked for or mapped
        self._nbytes, self._mode = 0, READ
        status = self._status = [0]  # what the library calls back with

        def mapped(result: int, *_: Any) -> None:
            status[0] = result

        self._info = ffi.new("WGPUBufferMapCallbackInfo *")
        self._info.mode = lib.WGPUCallbackMode_WaitAnyOnly
        self._info.callback = c_callback("WGPUBufferMapCallback")
        self._info.userdata1 = callbacks.register(mapped, once=False)
        weakref.finalize(self, callbacks.unregister, self._info.userdata1)

    def ask(self, buffer: Any, nbytes: int, mode: int) -> None:
        self.unmap()  # what an interrupt has left
        self._buffer, self._nbytes, self._mode = buffer, nbytes, mode
        self._status[0] = 0
        try:
            asked = _api.libf.wgpuBufferMapAsync(pointer(buffer), mode, 0, nbytes, self._info[0])
        except wgpudawn.GPUError:
            self._buffer = None
            raise
        self._future = asked.id

    def is_mapped(self) -> bool:
        return self._status[0] != 0 or _is_done(self._future, self._waited)

    def wait(self, submission: int | None) -> memoryview:
        if self._status[0] == 0:
            _wait_for(self._future, self._waited)
        if submission is not None:
            # A future that nobody waits for is kept for ever.
            _wait_for(submission, self._waited)
        if self._status[0] != lib.WGPUMapAsyncStatus_Success:
            raise RuntimeError(f"a buffer was not mapped: status {self._status[0]}")
        return self._memory(self._buffer, self._nbytes, self._mode)

    def unmap(self) -> None:
        if self._buffer is not None:
            lib.wgpuBufferUnmap(pointer(self._buffer))
        self._buffer = None


class _Device(NativeDevice):
    lib, ffi = lib, ffi
    timestamp_period = 1e-9
    # Dawn makes the driver's commands of a step when it is submitted, not when it is finished.
    submitted_first = 40

    def __init__(self, library: Library, handle: Any, features: Sequence[str]) -> None:
        super().__init__(library, handle)
        # Tint wants subgroups declared, and takes branches that are uniform in fact for such as
        # may not be.
        words = {
            "subgroups": "enable subgroups; diagnostic(off, subgroup_uniformity);",
            MATRICES: "diagnostic(off, chromium.subgroup_matrix_uniformity);",
        }
        self._prelude = " ".join(words[name] for name in features if name in words)
        self._done = ffi.new("WGPUQueueWorkDoneCallbackInfo *")
        self._done.mode = lib.WGPUCallbackMode_WaitAnyOnly
        self._done.callback = c_callback("WGPUQueueWorkDoneCallback")
        self._done.userdata1 = callbacks.register(lambda *_: None, once=False)
        weakref.finalize(self, callbacks.unregister, self._done.userdata1)

    def module(self, code: str, label: str, *, bounds_checks: bool) -> Any:
        return self.handle.create_shader_module(label=label, code=f"{self._prelude}\n{code}")

    def _finish(self, encoder: Any) -> Any:
        return _api.libf.wgpuCommandEncoderFinish(encoder, ffi.NULL)

    def submit(self, commands: Sequence[Any]) -> int:
        for each in commands:
            self._commands[0] = each
            _api.libf.wgpuQueueSubmit(self._queue, 1, self._commands)
        return self._submitted()

    def _submitted(self) -> int:
        """A future that ends once all is done that has been submitted so far."""
        done = _api.libf.wgpuQueueOnSubmittedWorkDone(self._queue, self._done[0])
        future: int = done.id
        return future

    def wait(self, submission: int | None = None) -> None:
        if submission is None:
            try:
                submission = self._submitted()
            except wgpudawn.GPUError:  # the device is lost, and nothing is in work any more
                return
        _wait_for(submission, ffi.new("WGPUFutureWaitInfo *"))  # several threads may wait

    def mapping(self) -> BufferMapping:
        return _Mapping()


LIBRARY = Dawn()
