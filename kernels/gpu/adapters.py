"""The GPUs that WebGPU offers here, and which of them to use."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infer.kernels.errors import DeviceError, UnknownDeviceError, UnsupportedError
from infer.kernels.gpu.native import DEFAULT, VARIABLE, Library, library
from infer.kernels.gpu.native.library import MatrixShape

# OpenGL is never a choice: it lacks storage bindings, f16 and subgroups, and lists adapters twice.
_BACKENDS = ("Vulkan", "Metal", "D3D12")
_KINDS = {"DiscreteGPU": "discrete", "IntegratedGPU": "integrated", "CPU": "software"}
_ORDER = ("discrete", "integrated", "other", "software")

_lock = threading.Lock()  # the libraries do not hold one while they make the process's instance
_used: set[Library] = set()  # in this process, or in one that it was forked from
_forked = False  # from one in which a library had been used

PRECISIONS = ("auto", "f32")
"""The precisions of projections of many rows. "auto": f16 with sums in f32 where the adapter
multiplies matrices of f16, otherwise f32. "f32": always f32."""

INSTALL_HINT = (
    "Install your GPU's Vulkan driver, or Mesa's software adapter "
    "(Debian, Ubuntu: apt-get install mesa-vulkan-drivers)."
)


@dataclass(frozen=True)
class AdapterInfo:
    """One GPU, or software that stands in for one.

    index is its place in `list_adapters()`; kind is "discrete", "integrated", "other" or
    "software"; features and limits are named as in WebGPU. webgpu is the name of the library that
    opens it, matrices what that multiplies at once by subgroups. uuid tells equal cards apart: it
    is the driver's, None where the library does not know it.
    """

    index: int
    name: str
    kind: str
    backend: str
    # Long values are left out of repr().
    driver: str = field(repr=False)
    features: frozenset[str] = field(repr=False)
    limits: dict[str, int] = field(repr=False)
    webgpu: str = DEFAULT
    matrices: tuple[MatrixShape, ...] = field(repr=False, default=())
    uuid: str | None = field(repr=False, default=None)
    handle: Any = field(repr=False, compare=False, default=None)

    @property
    def products(self) -> str:
        """The dtype in which projections of many rows are multiplied: "f16" where the adapter has
        matrices, with sums in f32, otherwise "f32"."""
        return "f16" if self.matrices else "f32"

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.backend})"


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of memory that an adapter allocates from: in all and free now, None where unknown."""

    total: int | None
    free: int | None


def software_note(adapter: AdapterInfo) -> str:
    """Returns the sentence that tells users of a software adapter what it is."""
    return f"{adapter.name} is a software adapter: it computes on the CPU, slowly."


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
            uuid=native.uuid(handle),
            handle=handle,
        )
        for index, (_, _, handle, kind) in enumerate(found)
    ]


def start_drivers(webgpu: str | None = None) -> None:
    """Let the GPUs' drivers start in a thread, while something else is done: the first
    `list_adapters()` of a process waits for them. What they fail with, the next one raises.

    webgpu: the library that starts them, as for `list_adapters`. Raises DeviceError where there is
    no such library.
    """
    native = library(webgpu)  # not in the thread: importing it would compete for Python's lock

    def start() -> None:
        with suppress(Exception):
            _handles(native)

    threading.Thread(target=start, name="drivers").start()


def is_forked() -> bool:
    """Whether this process was forked from one that had started WebGPU. Nothing of WebGPU works
    here then: the driver's threads stayed in the other process, and what is on the GPU belongs to
    it."""
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
    """A block in which XDG_RUNTIME_DIR has a value. Without one, as in most containers, Vulkan's
    drivers complain on standard error while they look for a display."""
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


def choose_adapter(
    selector: str | int | None = None, webgpu: str | None = None, precision: str = "auto"
) -> AdapterInfo:
    """The adapter of that index or with that text in its name; without one, the best. webgpu: the
    library, as for `list_adapters`. precision: one of PRECISIONS; with "f32" the adapter is given
    without its matrices, so that kernels use none.

    The variable INFER_DEVICE, unless it is empty, stands in for a missing selector. Raises
    DeviceError where there is no adapter; UnknownDeviceError, with those there are, when none
    matches; UnsupportedError for another precision.
    """
    check_precision(precision)
    chosen = _choose(selector, webgpu)
    return replace(chosen, matrices=()) if precision == "f32" else chosen


def check_precision(precision: str) -> None:
    """Raises UnsupportedError for what is none of PRECISIONS."""
    if precision not in PRECISIONS:
        raise UnsupportedError(
            f"precision must be one of {', '.join(PRECISIONS)}, not {precision!r:.200}."
        )


def _choose(selector: str | int | None, webgpu: str | None) -> AdapterInfo:
    adapters = list_adapters(webgpu)
    if not adapters:
        name = library(webgpu).name
        others = [] if name == DEFAULT else list_adapters(DEFAULT)
        if others:
            raise DeviceError(
                f"{not_accepted(name, others)} Or take {DEFAULT} (`webgpu`, or the variable "
                f"{VARIABLE})."
            )
        raise DeviceError(f"No GPU adapter was found. {INSTALL_HINT}")
    if selector is None:
        selector = os.environ.get("INFER_DEVICE", "").strip() or 0
    text = str(selector).strip()
    if text.isdigit() and int(text) < len(adapters):
        return adapters[int(text)]
    matches = [a for a in adapters if text.lower() in a.name.lower()]
    if not matches or not text or text.isdigit():
        listing = "\n".join(f"  {a.index}: {a}" for a in adapters)
        raise UnknownDeviceError(
            f"No adapter matches {text!r}. Give an index or a part of a name:\n{listing}"
        )
    return matches[0]


def not_accepted(webgpu: str, adapters: Iterable[AdapterInfo]) -> str:
    """Returns the message about adapters that another library offers and `webgpu` does not."""
    names = ", ".join(f"{adapter.name} (driver {adapter.driver})" for adapter in adapters)
    known = " Mesa 25 is known to be new enough, 22.3 is not." if "Mesa" in names else ""
    return (
        f"{webgpu} does not accept {names}: it wants newer drivers than {DEFAULT}. Update the "
        f"driver.{known}"
    )


def memory_info(adapter: AdapterInfo) -> MemoryInfo:
    """The memory of an adapter, where the platform tells; WebGPU itself does not."""
    if adapter.kind in ("software", "integrated"):
        return _host_memory()
    if "nvidia" in adapter.name.lower() or "geforce" in adapter.name.lower():
        return _nvidia_memory(adapter)
    return _drm_memory()


def _host_memory() -> MemoryInfo:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return MemoryInfo(None, None)
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return MemoryInfo(kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024)


def _nvidia_memory(adapter: AdapterInfo) -> MemoryInfo:
    query = "--query-gpu=uuid,name,memory.total,memory.free"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return MemoryInfo(None, None)
    cards: list[tuple[bool, MemoryInfo]] = []
    for row in ran.stdout.splitlines():
        card, total, free = (part.strip() for part in row.rsplit(",", 2))
        uuid, _, name = card.partition(", ")
        if name == adapter.name:
            sizes = (int(size.split()[0]) << 20 for size in (total, free))
            cards.append((uuid == f"GPU-{adapter.uuid}", MemoryInfo(*sizes)))
    # Where cards have the same name, it is the one with this UUID, or else the first.
    return max(cards, key=lambda card: card[0], default=(False, MemoryInfo(None, None)))[1]


def _drm_memory() -> MemoryInfo:
    cards = list(Path("/sys/class/drm").glob("card*/device/mem_info_vram_total"))
    if len(cards) != 1:  # with several cards, none can be told to be this adapter
        return MemoryInfo(None, None)
    try:
        total = int(cards[0].read_text())
        return MemoryInfo(total, total - int(cards[0].with_name("mem_info_vram_used").read_text()))
    except (OSError, ValueError):
        return MemoryInfo(None, None)
