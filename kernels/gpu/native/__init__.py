"""The libraries that implement WebGPU: wgpu-native, which is always there, and Dawn, an extra.

All C functions of either library are called in this package, and nowhere else.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from infer.kernels.errors import DeviceError, UnknownDeviceError
from infer.kernels.gpu.native.library import Library, NativeDevice

__all__ = ["DEFAULT", "VARIABLE", "Library", "NativeDevice", "installed", "library"]

VARIABLE = "INFER_WEBGPU"
DEFAULT = "wgpu-native"

# A library's name -> the module whose LIBRARY it is, and the package that it comes with.
_MODULES = {"wgpu-native": ("wgpu_native", "wgpu"), "dawn": ("dawn", "wgpudawn")}


def installed() -> list[str]:
    """The names of the libraries whose packages are installed, wgpu-native first."""
    return [name for name, (_, package) in _MODULES.items() if find_spec(package) is not None]


def library(name: str | None = None) -> Library:
    """The library of that name; without one, the library that the variable INFER_WEBGPU names, or
    else wgpu-native.

    Raises:
        DeviceError: there is no library of that name, or its package is not installed.
    """
    return _load(name or os.environ.get(VARIABLE, "").strip().lower() or DEFAULT)


@cache
def _load(name: str) -> Library:
    if name not in _MODULES:
        raise UnknownDeviceError(
            f"No WebGPU library is called {name!r}. Give {' or '.join(_MODULES)} (`webgpu`, or the "
            f"variable {VARIABLE})."
        )
    try:
        found: Library = import_module(f"{__name__}.{_MODULES[name][0]}").LIBRARY
    except ImportError as error:
        raise DeviceError(
            f"The WebGPU library {name} cannot be loaded ({error}). Install it: pip install "
            f"'infer-wgpu[{name}]', or in a checkout pip install '.[{name}]'. Or take {DEFAULT} "
            f"(`webgpu`, or the variable {VARIABLE})."
        ) from error
    return found
