"""Devices: which adapter, with what limits, and what becomes of their memory."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cffi
import numpy as np
import pytest
from conftest import OpenDevice
from wgpu.backends.wgpu_native._ffi import get_wgpu_header

from infer.kernels.checks import functions
from infer.kernels.errors import (
    ClosedError,
    DeviceError,
    OutOfMemoryError,
    RequestError,
    ShaderError,
)
from infer.kernels.gpu import adapters, native
from infer.kernels.gpu.adapters import (
    PRECISIONS,
    AdapterInfo,
    choose_adapter,
    is_available,
    list_adapters,
    memory_info,
)
from infer.kernels.gpu.device import Device, DryDevice, Limits, Settings
from infer.kernels.gpu.multiprocessors import MEASURED, _amd, multiprocessors
from infer.kernels.gpu.native import Library, library, wgpu_native
from infer.kernels.gpu.native.library import MatrixShape
from infer.kernels.gpu.record import EMPTY, Copy, RawQueue
from infer.kernels.gpu.shader import KernelSpec, render_text
from infer.kernels.gpu.tensor import allocate
from infer.kernels.gpu.upload import Uploader


@pytest.fixture
def own() -> Iterator[Device]:
    """A device that the test may close or fill."""
    with Device.open() as device:
        yield device


# Adapters


def fake(index: int, name: str, kind: str, **more: Any) -> AdapterInfo:
    return AdapterInfo(index, name, kind, "Vulkan", "", frozenset(), {}, **more)


class Handle:
    """An adapter, as libraries give it."""

    features: tuple[str, ...] = ()
    limits: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, name: str, kind: str, backend: str) -> None:
        self.info = {
            "device": name,
            "adapter_type": kind,
            "backend_type": backend,
            "description": "",
        }


THREE = [
    fake(0, "GeForce RTX 4090", "discrete"),
    fake(1, "Radeon 780M", "integrated"),
    fake(2, "llvmpipe (LLVM 15)", "software"),
]


@pytest.mark.parametrize(
    ("selector", "index"),
    [(None, 0), (1, 1), ("1", 1), (" 2 ", 2), ("radeon", 1), ("LLVM", 2), ("r", 0)],
)
def test_an_adapter_is_chosen_by_index_or_name(
    monkeypatch: pytest.MonkeyPatch, selector: str | int | None, index: int
) -> None:
    monkeypatch.delenv("INFER_DEVICE", raising=False)
    monkeypatch.setattr(adapters, "list_adapters", lambda _: THREE)
    assert choose_adapter(selector) is THREE[index]


def test_a_variable_stands_in_for_a_missing_selector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "list_adapters", lambda _: THREE)
    monkeypatch.setenv("INFER_DEVICE", "radeon")
    assert choose_adapter() is THREE[1]
    assert choose_adapter(0) is THREE[0]
    monkeypatch.setenv("INFER_DEVICE", "2")
    assert choose_adapter() is THREE[2]
    monkeypatch.setenv("INFER_DEVICE", " ")
    assert choose_adapter() is THREE[0]
    monkeypatch.setenv("INFER_DEVICE", "Voodoo")
    with pytest.raises(DeviceError, match="Voodoo"):
        choose_adapter()


def test_precision_f32_leaves_matrices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(THREE[0], matrices=(MatrixShape(16, 16, 16),))
    monkeypatch.setattr(adapters, "list_adapters", lambda _: [own])
    chosen = [choose_adapter(0, None, precision) for precision in PRECISIONS]
    assert [adapter.products for adapter in chosen] == ["f16", "f32"]
    assert [adapter.matrices for adapter in chosen] == [own.matrices, ()]


@pytest.mark.parametrize("selector", ["arc", 3, "3", "4090!", -1, ""])
def test_an_unknown_adapter_is_answered_with_the_list(
    monkeypatch: pytest.MonkeyPatch, selector: str | int
) -> None:
    monkeypatch.setattr(adapters, "list_adapters", lambda _: THREE)
    with pytest.raises(DeviceError, match=rf"'{selector}'") as caught:
        choose_adapter(selector)
    for adapter in THREE:
        assert f"{adapter.index}: {adapter}" in str(caught.value)


def test_without_an_adapter_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapters, "list_adapters", lambda *_: [])
    assert not is_available()
    with pytest.raises(DeviceError, match="mesa-vulkan-drivers"):
        Device.open()


def test_a_library_that_accepts_no_adapter_says_which_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = replace(THREE[2], driver="Mesa 22.3.6 (LLVM 15)")
    found = {"dawn": [], "wgpu-native": [old]}
    monkeypatch.setattr(adapters, "list_adapters", lambda name: found[name])
    monkeypatch.setattr(adapters, "library", lambda name: SimpleNamespace(name=name))
    with pytest.raises(DeviceError) as caught:
        choose_adapter(webgpu="dawn")
    assert str(caught.value) == (
        "dawn does not accept llvmpipe (LLVM 15) (driver Mesa 22.3.6 (LLVM 15)): it wants newer "
        "drivers than wgpu-native. Update the driver. Mesa 25 is known to be new enough, 22.3 is "
        "not. Or take wgpu-native (webgpu, or the variable INFER_WEBGPU)."
    )
    found["wgpu-native"] = []
    with pytest.raises(DeviceError, match=r"No GPU adapter was found.*mesa-vulkan-drivers"):
        choose_adapter(webgpu="dawn")


def test_adapters_are_listed_best_first_and_never_opengl(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = [
        Handle("cpu", "CPU", "Vulkan"),
        Handle("gl", "DiscreteGPU", "OpenGL"),
        Handle("directx", "DiscreteGPU", "D3D12"),
        Handle("vulkan", "DiscreteGPU", "Vulkan"),
        Handle("odd", "Unknown", "Metal"),
        Handle("small", "IntegratedGPU", "Vulkan"),
    ]
    monkeypatch.setattr(adapters, "_handles", lambda _: handles)
    listed = list_adapters("wgpu-native")
    assert [adapter.name for adapter in listed] == ["vulkan", "directx", "small", "odd", "cpu"]
    assert [adapter.index for adapter in listed] == list(range(5))


def test_there_is_an_adapter_here() -> None:
    assert is_available()
    for adapter in list_adapters():
        assert adapter.name
        assert adapter.backend in ("Vulkan", "Metal", "D3D12")
        assert adapter.kind in ("discrete", "integrated", "other", "software")


@pytest.mark.parametrize("value", [None, "", "/run/user/1000"])
def test_drivers_do_not_complain_of_a_missing_folder(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    list_adapters("wgpu-native")  # Dawn warns of adapters, and nobody can ask it not to
    assert capfd.readouterr().err == ""
    assert os.environ.get("XDG_RUNTIME_DIR") == value


def test_types_parsed_quickly_are_those_of_cffi() -> None:
    plain, quick = cffi.FFI(), cffi.FFI()
    for ffi in (plain, quick):
        ffi.cdef(get_wgpu_header())
    wgpu_native._parse_types_quickly(quick)
    parsed = []
    parse = quick._parser._parse
    quick._parser._parse = lambda source: parsed.append(source) or parse(source)
    for name in (
        "WGPUDeviceDescriptor *",
        "WGPUBindGroupEntry[]",
        "WGPUDevice const *",
        "void(*)(WGPUMapAsyncStatus, WGPUStringView, void *)",
        "struct WGPULimits",
        "uint8_t []",
    ):
        assert quick.typeof(name).cname == plain.typeof(name).cname
        assert quick.sizeof("WGPULimits") == plain.sizeof("WGPULimits")
    assert len(parsed) == 7  # cffi still comes this way
    with pytest.raises(cffi.CDefError, match="Nonsense"):
        quick.typeof("Nonsense *")
    quick.cdef("typedef struct { WGPULimits own; } Later;")
    assert quick.sizeof("Later") == plain.sizeof("WGPULimits")


def test_drivers_that_fail_to_start_do_so_where_adapters_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def fail(_: Library) -> None:
        calls.append(threading.current_thread().name)
        raise RuntimeError("no instance")

    monkeypatch.setattr(adapters, "_handles", fail)
    adapters.start_drivers()
    for thread in threading.enumerate():
        if thread.name == "drivers":
            thread.join()
    assert calls == ["drivers"]
    with pytest.raises(RuntimeError, match="no instance"):
        list_adapters()


def test_drivers_are_started_by_the_library_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[object] = []
    monkeypatch.setattr(adapters, "library", lambda name: name)
    monkeypatch.setattr(adapters, "_handles", started.append)
    adapters.start_drivers("dawn")
    for thread in threading.enumerate():
        if thread.name == "drivers":
            thread.join()
    assert started == ["dawn"]


def test_adapters_of_opengl_are_not_even_opened() -> None:
    handles = adapters._handles(library("wgpu-native"))
    assert all(handle.info["backend_type"] != "OpenGL" for handle in handles)


def test_memory_of_a_software_adapter_is_the_hosts() -> None:
    info = memory_info(fake(0, "llvmpipe", "software"))
    if info.total is not None and info.free is not None:  # where the platform tells
        assert 0 < info.free <= info.total


def test_of_equal_cards_each_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> Any:
        assert command[:2] == ["nvidia-smi", "--query-gpu=uuid,name,memory.total,memory.free"]
        rows = [
            "GPU-11111111-0000-0000-0000-000000000000, NVIDIA T4, 15360 MiB, 15000 MiB",
            "GPU-22222222-0000-0000-0000-000000000000, NVIDIA T4, 15360 MiB, 1000 MiB",
        ]
        return SimpleNamespace(stdout="\n".join(rows))

    monkeypatch.setattr(adapters.subprocess, "run", run)

    def free(name: str, uuid: str | None) -> int | None:
        found = memory_info(fake(0, name, "discrete", uuid=uuid)).free
        return None if found is None else found >> 20

    assert free("NVIDIA T4", "22222222-0000-0000-0000-000000000000") == 1000
    assert free("NVIDIA T4", "11111111-0000-0000-0000-000000000000") == 15000
    assert free("NVIDIA T4", None) == 15000
    assert free("NVIDIA L4", None) is None


# Limits and features


def test_multiprocessors_are_found_or_those_of_the_measured_card(tmp_path: Path) -> None:
    for kind in ("integrated", "discrete", "software"):
        assert multiprocessors(fake(0, "a card that nobody knows", kind)) == MEASURED
    cpu, gpu = tmp_path / "0", tmp_path / "1"
    for node, simds in ((cpu, 0), (gpu, 192)):  # as a Radeon RX 7900 XTX has them
        node.mkdir()
        (node / "properties").write_text(f"cpu_cores_count 16\nsimd_count {simds}\nsimd_per_cu 2\n")
    assert _amd(tmp_path) == 96
    shutil.copytree(gpu, tmp_path / "2")
    assert _amd(tmp_path) is None


@pytest.mark.live
def test_multiprocessors_are_those_that_cuda_counts(device: Device) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA, to compare with")
    assert device.multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count


def test_settings_limit_the_device(device: Device, least_device: Device) -> None:
    limits = least_device.limits
    assert (limits.max_binding, limits.workgroup_storage, limits.max_invocations) == (
        128 << 20,
        16384,
        256,
    )
    assert not least_device.subgroups
    assert not least_device.f16
    text = """
    @group(0) @binding(0) var<storage, read_write> y: array<f32>;
    @compute @workgroup_size(257)
    fn main(@builtin(local_invocation_index) i: u32) { y[i] = 1; }
    """
    with pytest.raises(ShaderError, match="257"):
        least_device.compile(KernelSpec.of("wide"), render_text(text))
    if device.limits.max_invocations > 256:
        device.compile(KernelSpec.of("wide"), render_text(text))


@pytest.mark.parametrize(
    ("name", "least", "largest"), [("Intel(R) Arc(TM)", 8, 32), ("AMD Radeon", 32, 64), ("", 0, 0)]
)
def test_a_compiler_may_choose_the_lanes_of_subgroups(
    device: Device, name: str, least: int, largest: int
) -> None:
    """The size of subgroups that a kernel sees is only one of those that the GPU chooses from."""
    lanes = device.subgroup_size
    with Device(replace(device.adapter, name=name)) as named:
        assert named.subgroup_size == min(lanes, least or lanes)
        assert named.largest_subgroup == max(lanes, largest)


def test_bindings_end_at_the_limit(open_device: OpenDevice) -> None:
    small = open_device(Settings(max_binding=1 << 20))
    pipeline = small.pipeline(KernelSpec.of("copy", VECTORS=1 << 16))
    with small.scope():
        large, fits = small.buffer((1 << 20) + 16), small.buffer(1 << 20)
        small.bind(pipeline, [fits, fits])
        with pytest.raises(DeviceError, match="at most 1,048,576"):
            small.bind(pipeline, [large, fits])
        assert [shard.rows for shard in allocate(small, (600, 512), "f32").shards] == [512, 88]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"f16": 1}, "The setting f16 must be true or false, not 1"),
        ({"subgroups": None}, "subgroups must be true or false, not None"),
        ({"max_binding": "x"}, "max_binding must be a positive integer or None, not 'x'"),
        ({"storage_buffers": 0}, "storage_buffers must be a positive integer or None, not 0"),
        ({"workgroup_storage": True}, "workgroup_storage must be a positive integer"),
    ],
)
def test_settings_of_other_kinds_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Settings(**settings)


def test_features_that_are_off_are_refused(least_device: Device) -> None:
    half = "#enable f16\n@compute @workgroup_size(1)\nfn main() { var x = 1.0h; x += 1.0h; }"
    assert least_device.validate(render_text(half))
    with Device.open() as full:
        if full.f16:
            assert full.validate(render_text(half)) == []


def test_a_device_takes_what_the_adapter_has(device: Device) -> None:
    offered = device.adapter.features
    assert device.subgroups == ("subgroups" in offered)
    assert device.f16 == ("shader-f16" in offered)
    assert device.timestamps == ("timestamp-query" in offered)
    assert device.limits == Limits.of(device.adapter.limits)


def test_more_than_the_adapter_has_is_refused() -> None:
    with pytest.raises(DeviceError, match="could not be opened"):
        Device.open(settings=Settings(workgroup_storage=1 << 30))


# Memory


def test_what_is_written_is_read(device: Device, rng: np.random.Generator) -> None:
    data = rng.standard_normal(1000, np.float32)
    with device.scope():
        buffer = device.upload(data)
        assert (device.read(buffer, count=1000) == data).all()
        assert (device.read(buffer, np.uint32, 10, offset=4) == data.view(np.uint32)[1:11]).all()
        assert (device.read(buffer, np.uint8, 3, offset=8) == data.view(np.uint8)[8:11]).all()
        device.write(buffer, data[:4].tobytes(), offset=16)
        assert (device.read(buffer, count=8)[4:] == data[:4]).all()
        device.write(buffer, data.reshape(10, 100)[:, ::2][:1])  # not contiguous
        assert (device.read(buffer, count=50) == data[:100:2]).all()
        assert not device.read(device.buffer(100)).any()


def in_use(device: Device) -> int:
    """Bytes of buffers that somebody holds."""
    stats = device.memory_stats()
    return stats.allocated - stats.pooled


def test_statistics_count_every_buffer(own: Device) -> None:
    before = own.memory_stats()
    assert in_use(own) == 0
    first, second = own.buffer(1), own.buffer(1000)
    assert (first.nbytes, second.nbytes) == (16, 1008)
    assert in_use(own) == 1024
    own.destroy([first])
    own.destroy([first])  # twice does no harm
    stats = own.memory_stats()
    assert in_use(own) == 1008
    assert stats.peak == before.allocated + 1024
    own.destroy([second])
    assert own.memory_stats().allocated == before.allocated


def test_the_pool_gives_back_what_was_released(own: Device) -> None:
    before = own.memory_stats()
    first = own.acquire(1000)
    assert first.nbytes >= 1000
    second = own.acquire(1000)
    assert second is not first
    own.release(first)
    assert own.memory_stats().pooled == before.pooled + first.nbytes
    assert own.acquire(1000, "read") is not first
    assert own.acquire(first.nbytes + 1) is not first
    assert own.acquire(900) is first
    stats = own.memory_stats()
    assert (stats.hits, stats.misses) == (before.hits + 1, before.misses + 4)


def test_a_scope_frees_what_was_made_in_it_by_this_thread(own: Device) -> None:
    kept: list[Any] = []

    def elsewhere() -> None:
        kept.append(own.buffer(160))

    own.buffer(16)
    with own.scope():
        own.buffer(32)
        with own.scope():
            own.buffer(64)
        assert in_use(own) == 48
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        pooled = own.acquire(5000)
        own.release(pooled)
    assert in_use(own) == 16 + 160
    assert own.acquire(5000) is pooled


def test_a_scope_frees_after_an_error_too(own: Device) -> None:
    def fail() -> None:
        with own.scope():
            own.buffer(64)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert in_use(own) == 0


def test_out_of_memory_leaves_the_device_usable(
    own: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OutOfMemoryError, match=r"weights needs .* one buffer of"):
        own.buffer(own.limits.max_buffer + 16, label="weights")
    # Beyond the limit of a buffer it is the driver that refuses.
    monkeypatch.setattr(own, "limits", replace(own.limits, max_buffer=1 << 62))
    with pytest.raises(OutOfMemoryError, match="no room for weights of"):
        own.buffer(1 << 60, label="weights")
    assert in_use(own) == 0
    x = np.ones((1, 4))
    assert (functions.elementwise_add(own, x, x) == 2).all()


def test_memory_that_submitted_work_uses_may_be_destroyed(own: Device) -> None:
    x = np.ones((2, 64))
    for _ in range(3):  # each call frees its buffers as soon as it has read the result
        assert (functions.elementwise_add(own, x, x) == 2).all()
    assert in_use(own) == 0


def test_a_closed_device_says_so(own: Device) -> None:
    buffer = own.buffer(16)
    own.close()
    own.close()
    assert own.closed
    assert own.memory_stats().allocated == 0
    for use in (
        lambda: own.buffer(16),
        lambda: own.upload(np.zeros(4)),
        lambda: own.write(buffer, b"1234"),
        lambda: own.read(buffer),
        lambda: own.pipeline(KernelSpec.of("take_rows", STRIDE=8)),
        lambda: functions.activation(own, np.zeros((1, 4)), "silu"),
    ):
        with pytest.raises(ClosedError):
            use()


def test_two_devices_live_side_by_side(own: Device) -> None:
    x = np.arange(8.0)[None]
    with Device.open() as other:
        for device in (own, other, own):
            assert (functions.elementwise_mul(device, x, x) == x * x).all()
    assert (functions.elementwise_mul(own, x, x) == x * x).all()


def test_a_dry_device_counts_what_a_device_would_allocate(own: Device) -> None:
    dry = DryDevice(own.limits)
    for nbytes in (1, 16, 1000, 70_001):
        assert dry.buffer(nbytes).nbytes == own.buffer(nbytes).nbytes
    dry.upload(np.zeros(9))
    own.upload(np.zeros(9))
    assert dry.allocated == in_use(own)


# Pipelines


def test_a_kernel_is_compiled_once(own: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [KernelSpec.of("take_rows", STRIDE=stride) for stride in (8, 16, 24)]
    compiled = []
    compile_kernel = own.compile

    def compile_and_note(spec: KernelSpec, shader: Any) -> Any:
        compiled.append(spec)
        return compile_kernel(spec, shader)

    monkeypatch.setattr(own, "compile", compile_and_note)
    own.pipelines([*specs, *specs])
    assert own.pipeline(specs[0]) is own.pipeline(KernelSpec.of("take_rows", STRIDE=8))
    assert sorted(compiled, key=repr) == sorted(specs, key=repr)


def test_an_error_of_a_thread_that_compiles_is_raised(own: Device) -> None:
    with pytest.raises(ShaderError, match="needs the parameter STRIDE"):
        own.pipelines([KernelSpec.of("take_rows")])


def test_bindings_are_counted(own: Device) -> None:
    pipeline = own.pipeline(KernelSpec.of("take_rows", STRIDE=8))
    with pytest.raises(ShaderError, match="has 3 bindings, not 1"):
        own.bind(pipeline, [own.buffer(16)])


# Libraries


def test_the_library_is_chosen_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFER_WEBGPU", raising=False)
    assert library().name == "wgpu-native"
    monkeypatch.setenv("INFER_WEBGPU", " WGPU-Native ")
    assert library() is library("wgpu-native")
    monkeypatch.setenv("INFER_WEBGPU", "metal")
    with pytest.raises(DeviceError, match=r"'metal'. Give wgpu-native or dawn"):
        list_adapters()


def test_a_library_that_is_not_installed_says_how_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wgpudawn", None)
    monkeypatch.delitem(sys.modules, "infer.kernels.gpu.native.dawn", raising=False)
    native._load.cache_clear()
    with pytest.raises(DeviceError, match=r"pip install 'infer-wgpu\[dawn\]'"):
        library("dawn")
    native._load.cache_clear()


def test_equal_cards_of_dawn_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the list has them in another order when one is opened."""
    pytest.importorskip("wgpudawn")
    dawn = importlib.import_module("infer.kernels.gpu.native.dawn")

    class Card(Handle):
        def __init__(self, number: int) -> None:
            super().__init__("NVIDIA T4", "DiscreteGPU", "Vulkan")
            self.number = number

    order, opened = [1, 2], []

    def request(handle: Card, **_: Any) -> Any:
        opened.append(handle.number)
        raise RuntimeError("seen enough")

    def properties(handle: Card) -> dict[str, Any]:
        return {"vulkan_uuids": {"device_uuid": bytes([handle.number] * 16)}}

    monkeypatch.setattr(
        dawn.gpu, "_enumerate_all_adapters", lambda: map(Card, order), raising=False
    )
    monkeypatch.setattr(dawn.extras, "set_instance_extras", lambda **_: None)
    monkeypatch.setattr(dawn.extras, "get_adapter_properties", properties)
    monkeypatch.setattr(dawn.extras, "request_device_sync", request)
    monkeypatch.setattr(dawn.LIBRARY, "_has_instance", True)
    listed = list_adapters("dawn")
    assert [adapter.uuid for adapter in listed] == [
        "01010101-0101-0101-0101-010101010101",
        "02020202-0202-0202-0202-020202020202",
    ]
    order.reverse()
    for adapter in listed:
        with pytest.raises(RuntimeError, match="seen enough"):
            dawn.LIBRARY.open(adapter.handle, (), {}, bounds_checks=False)
    assert opened == [1, 2]
    monkeypatch.setattr(dawn.extras, "get_adapter_properties", lambda _: {})  # as of Metal
    listed = list_adapters("dawn")
    assert [adapter.uuid for adapter in listed] == [None, None]
    with pytest.raises(RuntimeError, match="seen enough"):
        dawn.LIBRARY.open(listed[1].handle, (), {}, bounds_checks=False)
    assert opened[-1] == listed[1].handle.number


@pytest.mark.dawn
def test_dawn_computes_what_wgpu_native_does(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """With a kernel that uses subgroups, an upload through mapped memory, and a step that is read
    back. Dawn needs a newer driver than wgpu-native: Mesa 22.3 is too old, 25 is not."""
    pytest.importorskip("wgpudawn")
    monkeypatch.setenv("INFER_WEBGPU", "dawn")
    if not list_adapters():
        pytest.skip("Dawn accepts no adapter here")
    x, weight = rng.standard_normal((3, 256)), rng.standard_normal(256)
    with Device.open() as dawn:
        assert dawn.adapter.webgpu == "dawn"
        y = functions.rmsnorm(dawn, x, weight, eps=0.0)
        with Device(dawn.adapter) as again:  # an adapter of Dawn's makes one device alone
            assert (functions.rmsnorm(again, x, weight, eps=0.0) == y).all()
        with pytest.raises(ShaderError, match="broken:1:22: expected '='"):
            dawn.compile(KernelSpec.of("broken"), render_text("fn main() { nonsense }", "broken"))
        data, buffer = rng.integers(0, 256, 100_000, np.uint8), dawn.buffer(100_000)
        with Uploader(dawn, 30_000) as uploader:
            uploader.write(buffer, 0, 100_000, lambda view, at: fill_from(data, view, at))
        assert (dawn.read(buffer, np.uint8, 100_000) == data).all()
        queue, staging = RawQueue(dawn), dawn.buffer(1024, "read")
        step = queue.submit(EMPTY, 1, 0, [Copy((buffer, 16), (staging, 0), 1024)])
        assert (queue.read(staging, 1024, step).view(np.uint8) == data[16:1040]).all()
        queue.wait(step)
    expected = weight * x / np.sqrt((x * x).mean(1, keepdims=True))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def fill_from(data: np.ndarray, view: memoryview, at: int) -> None:
    view[:] = data[at : at + len(view)].data
