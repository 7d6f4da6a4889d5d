"""The memory of a plan's activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.plan import Count, Grid
from infer.kernels.gpu.shader import KernelSpec
from infer.kernels.lowering.target import Intermediate


@dataclass(eq=False)
class Scratch:
    """Memory between kernels that is not an activation. is_routing: it holds chosen experts."""

    nbytes: int
    is_routing: bool = False


Operand = Intermediate | Scratch | Buffer


@dataclass(frozen=True, eq=False)
class Kernel:
    """A dispatch before its buffers are known. operands: in the order of the bindings; the shader
    says which are written. variant: of the kernel, where a rule chose it."""

    spec: KernelSpec
    operands: tuple[Operand, ...]
    grid: Grid
    moved: Count
    flops: Count
    head: bool
    variant: object = None


class Arena:
    """The buffers of activations, shared by all plans of a model: steps run one after another."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.slots: list[Buffer] = []

    def reserve(self, sizes: Sequence[int]) -> None:
        """Make room for at least these slots. Plans placed earlier keep their buffers, so the
        largest kind of step should come first."""
        for index, size in enumerate(sizes):
            if index == len(self.slots):
                self.slots.append(self.device.buffer(size, label=f"activations {index}"))
            elif self.slots[index].nbytes < size:
                self.slots[index] = self.device.buffer(size, label=f"activations {index}")


@dataclass
class Slot:
    """Operands that share a buffer, and the bytes that the largest needs."""

    operands: list[Intermediate | Scratch]
    nbytes: int
    free_from: int  # the index of the last kernel that uses it


def colour(
    kernels: Sequence[Kernel], nbytes: Callable[[Intermediate | Scratch], int | None]
) -> list[Slot]:
    """Slots for what kernels pass on. Operands that are never needed at the same time share a slot;
    no kernel reads and writes the same. Routings share with nothing: they say how much work experts
    have, and a profile runs kernels out of order. nbytes: None for an operand with its own buffer.
    """
    last_use = {operand: i for i, kernel in enumerate(kernels) for operand in kernel.operands}
    slots: list[Slot] = []
    seen: set[Operand] = set()
    for index, kernel in enumerate(kernels):
        for operand in kernel.operands:
            size = None if isinstance(operand, Buffer) or operand in seen else nbytes(operand)
            if isinstance(operand, Buffer) or size is None:
                continue
            seen.add(operand)
            slot = next((slot for slot in slots if slot.free_from < index), None)
            if slot is None or operand.is_routing:
                slot = Slot([], 0, 0)
                slots.append(slot)
            slot.operands.append(operand)
            slot.nbytes = max(slot.nbytes, size)
            slot.free_from = len(kernels) if operand.is_routing else last_use[operand]
    return sorted(slots, key=lambda slot: -slot.nbytes)  # those of other plans are alike
