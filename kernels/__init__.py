"""WGSL kernels and the code that runs them: usable without the rest of infer.

`functions` has each kernel as a function of numpy arrays; `ops` and `lower` make plans of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer.kernels import functions
    from infer.kernels.adapters import AdapterInfo, choose_adapter, is_available, list_adapters
    from infer.kernels.check import CheckResult, check_device
    from infer.kernels.device import Buffer, Device, Limits, MemoryStats, Settings
    from infer.kernels.functions import validate
    from infer.kernels.profile import profile_dispatches
    from infer.kernels.shader import KernelSpec, render

# numpy and wgpu are imported when one of these is first used.
_LAZY = {
    "AdapterInfo": "adapters",
    "Buffer": "device",
    "CheckResult": "check",
    "Device": "device",
    "KernelSpec": "shader",
    "Limits": "device",
    "MemoryStats": "device",
    "Settings": "device",
    "check_device": "check",
    "choose_adapter": "adapters",
    "is_available": "adapters",
    "list_adapters": "adapters",
    "profile_dispatches": "profile",
    "render": "shader",
    "validate": "functions",
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
            return import_module("infer.kernels.functions")
        if name in _LAZY:
            return getattr(import_module(f"infer.kernels.{_LAZY[name]}"), name)
        raise AttributeError(f"module 'infer.kernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
