"""Every kernel against its reference on one device: what `infer devices --check` runs.

Shapes are small and awkward: widths that are no multiple of what a kernel loads at once, contexts
that cross a page, rows that end in the middle of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from infer.kernels.checks.bench import Case, CheckResult
from infer.kernels.gpu.device import Device
from infer.kernels.ops import (
    attention_check,
    elementwise_check,
    embedding_check,
    experts_check,
    linear_check,
    norm_check,
    recurrent_check,
    rope_check,
)
from infer.kernels.state import sampler_check

FAMILIES = (
    embedding_check,
    norm_check,
    elementwise_check,
    linear_check,
    experts_check,
    recurrent_check,
    rope_check,
    attention_check,
    sampler_check,
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
    """All of them, family by family."""
    for family in FAMILIES:
        yield from family.cases()
