"""Every kernel against its reference on one device: what `infer devices --check` runs.

Shapes are small and awkward: widths that are no multiple of what a kernel loads at once, contexts
that cross a page, rows that end in the middle of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pkgutil import iter_modules

from infer.kernels import checks
from infer.kernels.checks.bench import Case, CheckResult
from infer.kernels.gpu.device import Device

# Every family of operations, and sampling.
FAMILIES = tuple(
    import_module(f"{checks.__name__}.{module.name}")
    for module in iter_modules(checks.__path__)
    if module.name.endswith("_check")
)


def check_device(
    device: Device, progress: Callable[[CheckResult], None] | None = None
) -> list[CheckResult]:
    """Run every kernel, its fused forms and its storage types. progress is called after each case.

    A kernel that does not compile, and a device that fails, are failed checks, not exceptions.
    """
    results = []
    for case in cases():
        results.append(case.check(device))
        if progress is not None:
            progress(results[-1])
    return results


def cases() -> Iterator[Case]:
    """Returns all cases of all kernels, family by family."""
    for family in FAMILIES:
        yield from family.cases()
