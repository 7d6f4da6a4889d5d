"""WGSL kernels and the code that runs them: usable without the rest of infer.

`functions` has each kernel as a function of numpy arrays; `ops` and `lower` make plans of them.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # as type checkers know it; typing takes long to import

if TYPE_CHECKING:
    from typing import Any

    from infer.kernels.checks import functions
    from infer.kernels.checks.bench import CheckResult
    from infer.kernels.checks.check import check_device
    from infer.kernels.checks.functions import validate
    from infer.kernels.gpu.adapters import AdapterInfo, choose_adapter, is_available, list_adapters
    from infer.kernels.gpu.device import Buffer, Device, Limits, MemoryStats, Settings
    from infer.kernels.gpu.profile import profile_dispatches
    from infer.kernels.gpu.shader import KernelSpec, render

# numpy and wgpu are imported when one of these is first used.
_LAZY = {
    "AdapterInfo": "gpu.adapters",
    "Buffer": "gpu.device",
    "CheckResult": "checks.bench",
    "Device": "gpu.device",
    "KernelSpec": "gpu.shader",
    "Limits": "gpu.device",
    "MemoryStats": "gpu.device",
    "Settings": "gpu.device",
    "check_device": "checks.check",
    "choose_adapter": "gpu.adapters",
    "is_available": "gpu.adapters",
    "list_adapters": "gpu.adapters",
    "profile_dispatches": "gpu.profile",
    "render": "gpu.shader",
    "validate": "checks.functions",
}

__all__ = [
    "AdapterInfo",
    "Buffer",
    "CheckResult",
    "Device",
    "KernelSpec",
    "Limits",
    "MemoryStats",
    "Settings",
    "check_device",
    "choose_adapter",
    "functions",
    "is_available",
    "list_adapters",
    "profile_dispatches",
    "render",
    "validate",
]


if not TYPE_CHECKING:  # for type checkers, a name that is not above is a mistake

    def __getattr__(name: str) -> Any:
        if name == "functions":
            return import_module("infer.kernels.checks.functions")
        if name in _LAZY:
            return getattr(import_module(f"infer.kernels.{_LAZY[name]}"), name)
        raise AttributeError(f"module 'infer.kernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
