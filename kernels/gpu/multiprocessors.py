"""How many multiprocessors a GPU has (NVIDIA's SMs, AMD's CUs), where the platform tells: WebGPU
does not. The rules for tiles count in rounds of workgroups, one for each."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from pathlib import Path

from infer.kernels.gpu.adapters import AdapterInfo

MEASURED = 132
"""The multiprocessors of the GPU that the rules were measured on, assumed where unknown."""

_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
_NARROW = {(6, 0), (7, 0), (7, 2), (7, 5), (8, 0)}  # compute capabilities of 64 cores each
_NAME_BYTES = 96


def multiprocessors(adapter: AdapterInfo | None) -> int:
    """Returns how many multiprocessors a GPU has; MEASURED where the platform does not tell."""
    found = None
    if adapter is not None and adapter.kind == "discrete":
        name = adapter.name.lower()
        if "nvidia" in name or "geforce" in name:
            found = _nvidia(adapter.name)
        elif "amd" in name or "radeon" in name:
            found = _amd(_NODES)
    return found or MEASURED


@cache
def _nvidia(name: str) -> int | None:
    """By NVML, which comes with the driver: cores, over those of a multiprocessor."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        count, cores = ctypes.c_uint(), ctypes.c_uint()
        major, minor = ctypes.c_int(), ctypes.c_int()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            card, own = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(card))
            failed = failed or nvml.nvmlDeviceGetName(card, own, _NAME_BYTES)
            if failed or own.value.decode(errors="replace") != name:
                continue
            capability = ctypes.byref(major), ctypes.byref(minor)
            if nvml.nvmlDeviceGetCudaComputeCapability(card, *capability):
                return None
            if nvml.nvmlDeviceGetNumGpuCores(card, ctypes.byref(cores)):
                return None
            return cores.value // (64 if (major.value, minor.value) in _NARROW else 128)
        return None
    except AttributeError:  # a library that is too old to know
        return None
    finally:
        nvml.nvmlShutdown()


def _amd(nodes: Path) -> int | None:
    """By the kernel's driver for computing; None with several cards, which it does not name."""
    found = []
    for file in nodes.glob("*/properties"):
        with suppress(OSError, ValueError):
            words = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
            if int(words.get("simd_count", 0)):
                found.append(int(words["simd_count"]) // int(words["simd_per_cu"]))
    return found[0] if len(found) == 1 else None
