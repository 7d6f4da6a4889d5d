"""The versions of this code, and of the libraries and drivers that change answers or speed."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path

import numpy

import infer
from infer.kernels.gpu.native import library


def versions(webgpu: str | None = None) -> dict[str, str]:
    """Returns the versions of this package and of all on which its speed and results depend, by
    name. webgpu: the library that runs the kernels, as for `load`."""
    return {
        "infer": infer.__version__,
        **library(webgpu).versions(),
        "numpy": numpy.__version__,
        "Python": platform.python_version(),
        platform.system(): platform.machine(),
    }


@cache
def commit() -> str | None:
    """The commit of this package, "-dirty" when files differ from it; None where git has none."""
    folder = Path(infer.__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # else the repository is another's
        return git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=12")
    except (OSError, subprocess.CalledProcessError):
        return None
