"""The GPUs that WebGPU offers here, and which of them to use."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infer.kernels.errors import DeviceError
from infer.kernels.gpu.native import DEFAULT, Library, library
from infer.kernels.gpu.native.library import MatrixShape

# OpenGL is never a choice: it lacks storage bindings, f16 and subgroups, and lists adapters twice.
_BACKENDS = ("Vulkan", "Metal", "D3D12")
_KINDS = {"DiscreteGPU": "discrete", "IntegratedGPU": "integrated", "CPU": "software"}
_ORDER = ("discrete", "integrated", "other", "software")

_lock = threading.Lock()  # the libraries do not hold one while they make the process's instance
_used: set[Library] = set()  # in this process, or in one that it was forked from
_forked = False  # from one in which a library had been used

INSTALL_HINT = (
    "Install your GPU's Vulkan driver, or Mesa's software adapter "
    "(Debian, Ubuntu: apt-get install mesa-vulkan-drivers)."
)


@dataclass(frozen=True)
class AdapterInfo:
    """One GPU, or software that stands in for one.

    index is its place in `list_adapters()`; kind is "discrete", "integrated", "other" or
    "software"; features and limits are named as in WebGPU. webgpu is the name of the library that
    opens it, matrices what that multiplies at once by subgroups.
    """

    index: int
    name: str
    kind: str
    backend: str
    # What is long is not shown.
    driver: str = field(repr=False)
    features: frozenset[str] = field(repr=False)
    limits: dict[str, int] = field(repr=False)
    webgpu: str = DEFAULT
    matrices: tuple[MatrixShape, ...] = field(repr=False, default=())
    handle: Any = field(repr=False, compare=False, default=None)

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.backend})"


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of memory that an adapter allocates from: in all and free now, None where unknown."""

    total: int | None
    free: int | None


def list_adapters(webgpu: str | None = None) -> list[AdapterInfo]:
    """All usable adapters of a WebGPU library, best first: discrete, integrated, other, software.

    webgpu: "wgpu-native" or "dawn". None: the one that the variable INFER_WEBGPU names, or
    wgpu-native. Raises DeviceError where there is no such library.
    """
    found, native = [], library(webgpu)
    for handle in _handles(native):
        info = handle.info
        if info["backend_type"] in _BACKENDS:
            kind = _KINDS.get(info["adapter_type"], "other")
            found.append((_ORDER.index(kind), _BACKENDS.index(info["backend_type"]), handle, kind))
    found.sort(key=lambda entry: entry[:2])
    return [
        AdapterInfo(
            index=index,
            name=handle.info["device"],
            kind=kind,
            backend=handle.info["backend_type"],
            driver=handle.info["description"],
            features=native.features(handle),
            limits=dict(handle.limits),
            webgpu=native.name,
            matrices=native.matrices(handle),
            handle=handle,
        )
        for index, (_, _, handle, kind) in enumerate(found)
    ]


def start_drivers() -> None:
    """Let the GPUs' drivers start in a thread, while something else is done: the first
    `list_adapters()` of a process waits for them. What they fail with, the next one raises."""
    webgpu = library()  # not in the thread, where importing it would compete for Python's lock

    def start() -> None:
        with suppress(Exception):
            _handles(webgpu)

    threading.Thread(target=start, name="drivers").start()


def is_forked() -> bool:
    """Whether this process was forked from one that had started WebGPU: nothing of it works here,
    because the driver's threads stayed there, and what is on the GPU is the other process's."""
    return _forked


def check_process() -> None:
    """Raises DeviceError where `is_forked`."""
    if _forked:
        raise DeviceError(
            "This process was forked from one that had used the GPU, which it can't share. Start "
            'processes with multiprocessing.get_context("spawn"), or use the GPU only in them.'
        )


def _start(webgpu: Library) -> None:
    """Before a library is used in this process."""
    if not _used and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)
    _used.add(webgpu)


def _after_fork() -> None:
    global _forked
    _forked = True
    for webgpu in _used:
        webgpu.forget()


def _handles(webgpu: Library) -> list[Any]:
    """A library's handles of all adapters."""
    check_process()
    _start(webgpu)
    with _lock, _runtime_dir():
        return webgpu.adapters()


@contextmanager
def _runtime_dir() -> Iterator[None]:
    """Where XDG_RUNTIME_DIR is empty or not set, the search of Vulkan's drivers for a display
    complains on standard error, in containers mostly: it has a value in the block."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    if before:
        yield
        return
    os.environ["XDG_RUNTIME_DIR"] = os.sep
    try:
        yield
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before


def is_available() -> bool:
    """Whether this machine has an adapter that infer can use."""
    return bool(list_adapters())


def choose_adapter(selector: str | int | None = None, webgpu: str | None = None) -> AdapterInfo:
    """The adapter of that index or with that text in its name; without one, the best. webgpu: the
    library, as for `list_adapters`.

    The variable INFER_DEVICE, unless it is empty, stands in for a missing selector. Raises
    DeviceError, with the adapters there are, when none matches.
    """
    adapters = list_adapters(webgpu)
    if not adapters:
        name = library(webgpu).name
        found = "No GPU adapter was found."
        if name != DEFAULT:
            found = f"{name} accepts no GPU adapter here; it wants newer drivers than {DEFAULT}."
        raise DeviceError(f"{found} {INSTALL_HINT}")
    if selector is None:
        selector = os.environ.get("INFER_DEVICE", "").strip() or 0
    text = str(selector).strip()
    if text.isdigit() and int(text) < len(adapters):
        return adapters[int(text)]
    matches = [a for a in adapters if text.lower() in a.name.lower()]
    if not matches or not text or text.isdigit():
        listing = "\n".join(f"  {a.index}: {a}" for a in adapters)
        raise DeviceError(
            f"No adapter matches {text!r}. Give an index or a part of a name:\n{listing}"
        )
    return matches[0]


def memory_info(adapter: AdapterInfo) -> MemoryInfo:
    """The memory of an adapter, where the platform tells; WebGPU itself does not."""
    if adapter.kind in ("software", "integrated"):
        return _host_memory()
    if "nvidia" in adapter.name.lower() or "geforce" in adapter.name.lower():
        return _nvidia_memory(adapter.name)
    return _drm_memory()


def _host_memory() -> MemoryInfo:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return MemoryInfo(None, None)
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return MemoryInfo(kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024)


def _nvidia_memory(name: str) -> MemoryInfo:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader"]
    try:
        rows = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return MemoryInfo(None, None)
    for row in rows.splitlines():
        card, total, free = (part.strip() for part in row.rsplit(",", 2))
        if card == name:
            return MemoryInfo(*(int(size.split()[0]) << 20 for size in (total, free)))
    return MemoryInfo(None, None)


def _drm_memory() -> MemoryInfo:
    cards = list(Path("/sys/class/drm").glob("card*/device/mem_info_vram_total"))
    if len(cards) != 1:  # with several cards, none can be told to be this adapter
        return MemoryInfo(None, None)
    try:
        total = int(cards[0].read_text())
        return MemoryInfo(total, total - int(cards[0].with_name("mem_info_vram_used").read_text()))
    except (OSError, ValueError):
        return MemoryInfo(None, None)
