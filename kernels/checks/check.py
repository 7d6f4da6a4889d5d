"""Every kernel against its reference on one device: what `infer devices --check` runs.

Shapes are small and awkward: widths that are no multiple of what a kernel loads at once, contexts
that cross a page, rows that end in the middle of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from infer.kernels.checks.bench import Case, CheckResult
from infer.kernels.gpu.device import Device
from infer.kernels.ops.attention import check as attention
from infer.kernels.ops.elementwise import check as elementwise
from infer.kernels.ops.embedding import check as embedding
from infer.kernels.ops.experts import check as experts
from infer.kernels.ops.linear import check as linear
from infer.kernels.ops.norm import check as norm
from infer.kernels.ops.recurrent import check as recurrent
from infer.kernels.ops.rope import check as rope
from infer.kernels.state.sampler import check as sampler

FAMILIES = (embedding, norm, elementwise, linear, experts, recurrent, rope, attention, sampler)


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
