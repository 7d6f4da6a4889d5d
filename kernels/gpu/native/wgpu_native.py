"""wgpu-native, by the package wgpu (wgpu-py)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import wgpu
from wgpu.backends import wgpu_native
from wgpu.backends.wgpu_native import GPUShaderModule, _api, ffi, lib

from infer.kernels.gpu.native.library import (
    READ,
    BufferMapping,
    Library,
    NativeDevice,
    pointer,
)

# WebGPU's names of features that wgpu-native calls otherwise.
_OWN_NAMES = {"subgroups": "subgroup"}


def _parse_types_quickly(ffi: Any) -> None:
    """Spare a process a second: the package names C types by strings, and for each new one cffi
    parses the names of all typedefs in the header again, for 20 ms. The names in the string are
    enough."""
    parser: Any = getattr(ffi, "_parser", None)
    if not hasattr(parser, "_declarations"):
        return  # another cffi than is known: it does the same more slowly

    def parse(source: str) -> Any:
        few, declared = type(parser)(), parser._declarations
        keys = {f"typedef {name}" for name in re.findall(r"\w+", source)}
        few._declarations = {key: declared[key] for key in keys & declared.keys()}
        return few._parse(source)

    parser._parse = parse


_parse_types_quickly(ffi)


class WgpuNative(Library):
    """wgpu-native. Its C functions that change the GPU's state are called through `_api.libf`,
    which raises what they report."""

    name = "wgpu-native"
    errors = (wgpu.GPUError, wgpu.GPUPipelineError, RuntimeError)
    out_of_memory = (wgpu.GPUOutOfMemoryError,)

    def versions(self) -> dict[str, str]:
        return {
            "wgpu": wgpu.__version__,
            "wgpu-native": ".".join(map(str, wgpu_native.lib_version_info)),
        }

    def adapters(self) -> list[Any]:
        """The package's own `enumerate_adapters_sync` opens those of OpenGL too, and wgpu-native
        aborts the process when one thread lets go of them while another opens them."""
        options = ffi.new("WGPUInstanceEnumerateAdapterOptions *")
        options.backends = wgpu_native._mappings.native_flags["InstanceBackend.Primary"]
        instance = wgpu_native._helpers.get_wgpu_instance()
        count = lib.wgpuInstanceEnumerateAdapters(instance, options, ffi.NULL)
        handles = ffi.new("WGPUAdapter[]", count)
        lib.wgpuInstanceEnumerateAdapters(instance, options, handles)
        return [wgpu_native.gpu._create_adapter(handle) for handle in handles]

    def features(self, adapter: Any) -> frozenset[str]:
        names = {own: name for name, own in _OWN_NAMES.items()}
        return frozenset(names.get(each, each) for each in adapter.features)

    def open(
        self,
        adapter: Any,
        features: Sequence[str],
        limits: Mapping[str, int],
        *,
        bounds_checks: bool,
    ) -> NativeDevice:
        handle = adapter.request_device_sync(
            required_features=[_OWN_NAMES.get(each, each) for each in features],
            required_limits=dict(limits),
        )
        return _Device(self, handle)

    def forget(self) -> None:
        # The package then releases nothing, as at the end of a process: drivers would wait for
        # their threads, or free what the other process uses.
        _api.libf = None

    def place(self, message: str) -> tuple[int, int] | None:
        found = re.search(r"┌─ .*:(\d+):(\d+)$", message, re.M)
        if found is None:
            return None
        # An invalid function is placed at its start; the expression at fault is underlined in it.
        inner = re.search(r"^ *(\d+) │ │ .*\n *│ │ ( *)\^", message, re.M)
        if inner is not None:
            return int(inner[1]), len(inner[2]) + 1
        return int(found[1]), int(found[2])


class _Mapping(BufferMapping):
    lib, ffi = lib, ffi

    def __init__(self, device: Any) -> None:
        self._device, self._index = device, ffi.new("WGPUSubmissionIndex *")
        self._buffer: Any = None  # that is asked for or mapped
        self._nbytes, self._mode = 0, READ
        self._status = 0  # what the library calls back with
        self._interrupt: BaseException | None = None
        # Kept here, because the library calls it later.
        self._callback = ffi.callback(
            "void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)",
            self._mapped,
            onerror=self._interrupted,
        )
        self._info = ffi.new("WGPUBufferMapCallbackInfo *")
        self._info.mode = lib.WGPUCallbackMode_AllowProcessEvents
        self._info.callback = self._callback

    def _mapped(self, status: int, *_: Any) -> None:
        self._status = status

    def _interrupted(self, kind: type, error: BaseException, trace: TracebackType) -> None:
        self._interrupt = error  # Ctrl-C in the callback, which C code cannot raise

    def ask(self, buffer: Any, nbytes: int, mode: int) -> None:
        self.unmap()  # what an interrupt has left
        self._buffer, self._nbytes, self._mode, self._status = buffer, nbytes, mode, 0
        try:
            _api.libf.wgpuBufferMapAsync(pointer(buffer), mode, 0, nbytes, self._info[0])
        except wgpu.GPUError:
            self._buffer = None
            raise

    def is_mapped(self) -> bool:
        lib.wgpuDevicePoll(self._device, False, ffi.NULL)
        return self._status != 0

    def wait(self, submission: int | None) -> memoryview:
        _wait(self._device, self._index, submission)
        if self._interrupt is not None:
            error, self._interrupt = self._interrupt, None
            raise error
        if self._status != lib.WGPUMapAsyncStatus_Success:
            raise RuntimeError(f"a buffer was not mapped: status {self._status}")
        return self._memory(self._buffer, self._nbytes, self._mode)

    def unmap(self) -> None:
        asked_or_mapped = self._status in (0, lib.WGPUMapAsyncStatus_Success)
        if self._buffer is not None and asked_or_mapped:
            lib.wgpuBufferUnmap(pointer(self._buffer))
        self._buffer = None


def _wait(device: Any, cell: Any, submission: int | None) -> None:
    """Wait until a submission is done, or everything if the submission is None. cell: memory for
    its index."""
    if submission is not None:
        cell[0] = submission
    lib.wgpuDevicePoll(device, True, ffi.NULL if submission is None else cell)


class _Device(NativeDevice):
    lib, ffi = lib, ffi

    def __init__(self, library: Library, handle: Any) -> None:
        super().__init__(library, handle)
        self._index = ffi.new("WGPUSubmissionIndex *")

    @property
    def timestamp_period(self) -> float:
        return float(lib.wgpuQueueGetTimestampPeriod(self._queue)) * 1e-9

    def module(self, code: str, label: str, *, bounds_checks: bool) -> Any:
        if bounds_checks:
            return self.handle.create_shader_module(label=label, code=code)
        # Without the bounds checks and loop counters that wgpu-native adds to a shader.
        text, title = ffi.new("char[]", code.encode()), ffi.new("char[]", label.encode())
        source = ffi.new("WGPUShaderSourceWGSL *")
        source.chain.sType = lib.WGPUSType_ShaderSourceWGSL
        source.code.data, source.code.length = text, len(text) - 1
        descriptor = ffi.new("WGPUShaderModuleDescriptor *")
        descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", source)
        descriptor.label.data, descriptor.label.length = title, len(title) - 1
        module = _api.libf.wgpuDeviceCreateShaderModuleTrusted(
            self._device, descriptor, lib.WGPUShaderRuntimeChecks_None
        )
        return GPUShaderModule(label, module, self.handle)

    def _finish(self, encoder: Any) -> Any:
        _api.error_handler.capture("finish")
        try:
            commands = lib.wgpuCommandEncoderFinish(encoder, ffi.NULL)
        finally:
            failed = _api.error_handler.release("finish")
        if failed is not None:  # the library would end the process when it is submitted
            lib.wgpuCommandBufferRelease(commands)
            raise wgpu.GPUError(failed[1])
        return commands

    def submit(self, commands: Sequence[Any]) -> int:
        for each in commands:
            self._commands[0] = each
            index = int(lib.wgpuQueueSubmitForIndex(self._queue, 1, self._commands))
        return index

    def wait(self, submission: int | None = None) -> None:
        _wait(self._device, self._index, submission)

    def mapping(self) -> BufferMapping:
        return _Mapping(self._device)


LIBRARY = WgpuNative()
