"""Fixtures that all tests share: a device for each setting, opened once in a file, without leaks.

A machine without an adapter fails these tests: Mesa's software adapter serves as well as a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from engines import Compiled, EngineOf, build_engine, sharing
from reference_models import load

import infer
from infer import LLM
from infer.engine import scheduler
from infer.engine.engine import Engine
from infer.hub import DEMO
from infer.kernels.errors import DeviceError
from infer.kernels.gpu.adapters import choose_adapter
from infer.kernels.gpu.device import Device, Settings
from infer.kernels.gpu.native import DEFAULT, VARIABLE
from infer.kernels.ops import matmul_matrix

# Mesa's software adapter compiles a third faster without LLVM's passes, from which kernels that run
# once or twice gain nothing. Drivers read this when they are loaded, here and in processes that
# tests start.
os.environ.setdefault("GALLIVM_PERF", "nopt")

# A process in the background of a script ignores Ctrl-C, and so would what the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

LEAST = Settings(
    subgroups=False,
    f16=False,
    max_binding=128 << 20,
    workgroup_storage=16384,
    max_invocations=256,
    storage_buffers=8,
)
"""Nothing but what every WebGPU device has."""

KEPT_KERNELS = 1000
"""A file leaves at most this many to the next."""

OpenDevice = Callable[[Settings], Device]

OF_A_DEVICE = {"device", "least_device", "own_device", "open_device"}


def _refused() -> str | None:
    """Why the library that INFER_WEBGPU names opens no adapter, unless it is the default."""
    if os.environ.get(VARIABLE, "").strip().lower() in ("", DEFAULT):
        return None
    try:
        choose_adapter()
    except DeviceError as error:
        return str(error)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts every twentieth case of each test of a device into the default run, whose time goes
    mostly into compiling, and the others into the full run; but all models that are named there.
    Where another library than wgpu-native is to run the kernels and cannot, tests are skipped."""
    cases = Counter[tuple[object, str]]()
    refused = _refused()
    for item in items:
        if refused:
            item.add_marker(pytest.mark.skip(refused))
        marked = any(item.get_closest_marker(mark) for mark in ("full", "exhaustive", "live"))
        of_a_device = not OF_A_DEVICE.isdisjoint(getattr(item, "fixturenames", ()))
        if of_a_device:
            item.add_marker(pytest.mark.device)
        if of_a_device and not marked and item.path.name != "test_models.py":
            test = (item.parent, getattr(item, "originalname", item.name))
            if cases[test] % 20:
                item.add_marker(pytest.mark.full)
            cases[test] += 1


@pytest.fixture(scope="module", autouse=True)
def in_f32(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where an adapter multiplies matrices of f16, all tests but those of its kernel do without:
    they hold answers to f32."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__ != "test_matmul_matrix":
            patch.setattr(matmul_matrix, "matrix_shape", lambda tuning: None)
        yield


@pytest.fixture(autouse=True)
def states_of_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of short prompts too the states of layers are saved: tests have no others."""
    monkeypatch.setattr(scheduler, "LEAST_SAVED", 1)


@pytest.fixture(scope="module", autouse=True)
def memory_goes_back(compiled: Compiled) -> Iterator[None]:
    """After the file's devices. glibc keeps what drivers' compilers have freed in pieces, two
    megabytes for each kernel; and of kernels there are many thousands in a full run."""
    yield
    for _, pipelines, _ in compiled.values():
        if len(pipelines) > KEPT_KERNELS:
            pipelines.clear()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


@pytest.fixture(scope="session")
def compiled() -> Iterator[Compiled]:
    """Yields the kernels that `sharing` shares, in all files. Closing a device leaves them alone: a
    kernel is compiled once in a process, and takes a tenth of a megabyte."""
    kept: Compiled = {}
    end = Device.close

    def close(self: Device) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if any(self.native is native for native, _, _ in kept.values()):
                patch.setattr(type(self.handle), "destroy", lambda _: None)
                self._pipelines = {}
            end(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "close", close)
        yield kept
    for native, _, _ in kept.values():
        native.handle.destroy()


@pytest.fixture
def same_kernels(compiled: Compiled) -> Iterator[None]:
    """For tests of what is built on devices that they open."""
    with sharing(compiled):
        yield


@pytest.fixture(scope="module")
def devices() -> Iterator[dict[Settings, Device]]:
    """The devices that are open in a file."""
    opened: dict[Settings, Device] = {}
    yield opened
    for device in opened.values():
        device.close()


@pytest.fixture(scope="module")
def open_device(devices: dict[Settings, Device], compiled: Compiled) -> OpenDevice:
    """The best adapter with these settings, shared by the tests of a file."""

    def open_once(settings: Settings) -> Device:
        if settings not in devices:
            with sharing(compiled):
                devices[settings] = Device.open(settings=settings)
        return devices[settings]

    return open_once


@pytest.fixture(scope="module")
def device(open_device: OpenDevice) -> Device:
    """The best adapter with all that it has."""
    return open_device(Settings())


@pytest.fixture(scope="module")
def least_device(open_device: OpenDevice) -> Device:
    """The best adapter with nothing but what every WebGPU device has."""
    return open_device(LEAST)


@pytest.fixture(scope="module")
def own_device(compiled: Compiled) -> Iterator[Device]:
    """The same, but what tests allocate on it may stay: for engines that a file keeps."""
    with sharing(compiled):
        device = Device.open()
    with device:
        yield device


@pytest.fixture(scope="module")
def engine_of(own_device: Device, tmp_path_factory: pytest.TempPathFactory) -> EngineOf:
    """The engine of a case of tests/data/models with these options: made when first asked for, then
    kept, and without what the last test has left in its cache."""
    engines: dict[tuple[Any, ...], Engine] = {}

    def build(case: str, **options: Any) -> Engine:
        key = (case, *sorted(options.items()))
        if key not in engines:
            folder = load(case).write_checkpoint(tmp_path_factory.mktemp(case) / case)
            engines[key] = build_engine(own_device, folder, **options)
        engines[key].forget()
        return engines[key]

    return build


@pytest.fixture(autouse=True)
def no_leak(devices: dict[Settings, Device]) -> Iterator[None]:
    """A test that leaves memory allocated on a shared device fails; the pool may grow."""

    def used() -> dict[Settings, int]:
        stats = {settings: device.memory_stats() for settings, device in devices.items()}
        return {settings: stat.allocated - stat.pooled for settings, stat in stats.items()}

    before = used()
    yield
    assert used() == dict.fromkeys(devices, 0) | before


@pytest.fixture(scope="session")
def demo_llm(compiled: Compiled) -> Iterator[LLM]:
    with sharing(compiled):
        llm = infer.load(DEMO, max_batch=4)
    with llm:
        yield llm


@pytest.fixture(scope="module")
def llm(demo_llm: LLM) -> LLM:
    """The demo model, loaded once for all files that load none of their own; its cache is empty."""
    demo_llm.engine.forget()
    return demo_llm


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers, the same in every run."""
    return np.random.default_rng(0)


def pytest_collection_finish() -> None:
    """Thousands of tests live as long as the process: no need to look for garbage among them."""
    gc.collect()
    gc.freeze()
