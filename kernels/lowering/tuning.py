"""The choice of kernel variants: small rules on shapes and the adapter's limits.

A rule is a function of `Tuning` and of a shape; it stands beside the operation whose kernel it is
for. docs/decisions.md has the measurements behind the rules. None of them changes a result beyond
rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, TypeVarTuple

from infer.kernels.gpu.device import Device

Call = TypeVarTuple("Call")
Variant = TypeVar("Variant")

NARROW_SOFTWARE = 256  # values of a row for which compiling a large tile takes longer than it saves
_INVOCATIONS = 2048  # that a multiprocessor has at once
# After so many passes, of all loops together, Mesa's software adapter ends every loop of an
# invocation, and reports nothing (LP_MAX_TGSI_LOOP_ITERATIONS in lp_bld_limits.h).
_SOFTWARE_PASSES = 65_535


def power_of_two(value: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, value - 1).bit_length()


def loop_passes(iterations: int, inner: int = 0) -> int:
    """The most passes through a loop, as `Tuning.loop_passes` counts them: one more than it has
    iterations, for the end of a loop is found in a pass of its own. inner: passes through the loops
    inside it in an iteration."""
    return (iterations + 1) * (1 + inner)


class Tuning:
    """The facts of a device that rules use. instead: which rules are asked in place of others."""

    instead: Mapping[Any, Any] = MappingProxyType({})

    def __init__(self, device: Device) -> None:
        self.limits, self.software = device.limits, device.software
        self.subgroup_size = device.subgroup_size
        self.largest_subgroup = device.largest_subgroup
        self.matrices = device.matrices
        self.multiprocessors = device.multiprocessors
        # Passes that an invocation may make through its loops, all of them together.
        self.loop_passes = _SOFTWARE_PASSES if self.software else sys.maxsize
        # A power of two of invocations that fill the GPU.
        self.filling = power_of_two(self.multiprocessors * _INVOCATIONS + 1) // 2

    def choose(self, rule: Callable[[Tuning, *Call], Variant], *call: *Call) -> Variant:
        """The variant that a rule chooses, or the one that is asked instead."""
        own: Any = self.instead.get(rule, rule)
        chosen: Variant = own(self, *call)
        return chosen

    def overflows(self, invocations: int) -> bool:
        """Whether so many invocations need a second round of workgroups, which would be mostly
        empty."""
        return self.filling < invocations <= self.filling * 3 // 2

    def workgroup(self, width: int) -> int:
        """Invocations for a kernel that reduces `width` values."""
        return max(32, min(256, self.limits.max_invocations, power_of_two(-(-width // 4))))
