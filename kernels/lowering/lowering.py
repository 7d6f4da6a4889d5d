"""From kernels to dispatches: operations emit them, then activations are placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from infer.kernels.gpu.device import Buffer
from infer.kernels.gpu.plan import Count, Dispatch, DispatchPlan, Grid, dispatch
from infer.kernels.gpu.shader import KernelSpec
from infer.kernels.lowering.arena import Arena, Kernel, Operand, Scratch, colour
from infer.kernels.lowering.target import (
    ContextGrid,
    Intermediate,
    Target,
    constant,
    padded_rows,
    stride,
)

NO_PARAMS: Mapping[str, Any] = MappingProxyType({})


class Lowering(Target):
    """The kernels of one kind of step, which `place` makes a plan of. step: the buffer of its rows.
    output: what ends up in output_buffer."""

    def __init__(
        self, target: Target, output: Intermediate, step: Buffer, output_buffer: Buffer
    ) -> None:
        super().__init__(target.device, target.kind, target.tuning, target.fuse, target.given)
        self.step, self.output, self.output_buffer = step, output, output_buffer
        self.kernels: list[Kernel] = []

    def emit(
        self,
        name: str,
        operands: Sequence[Operand],
        grid: Grid,
        params: Mapping[str, Any] = NO_PARAMS,
        moved: Count | int = 0,
        flops: Count | int = 0,
        variant: object = None,
    ) -> None:
        """Add a kernel. operands: in the order of its bindings. variant: as of Kernel."""
        head = any(isinstance(item, Intermediate) and self._in_head(item) for item in operands)
        if callable(grid) and self.kind.rows == 1 and not isinstance(grid, ContextGrid):
            grid = grid(1, 0)
        self.kernels.append(
            Kernel(
                KernelSpec.of(name, **params),
                tuple(operands),
                grid,
                moved if callable(moved) else constant(moved),
                flops if callable(flops) else constant(flops),
                head,
                variant,
            )
        )

    def _in_head(self, value: Intermediate) -> bool:
        return value.of_logits or value is self.output

    @property
    def sizes(self) -> list[int]:
        """The sizes of the arena's buffers that the activations need."""
        return [slot.nbytes for slot in colour(self.kernels, self._nbytes)]

    def place(self, arena: Arena) -> DispatchPlan:
        """Give every activation a buffer of the arena, compile the kernels, bind the buffers."""
        arena.reserve(self.sizes)
        slots = colour(self.kernels, self._nbytes)
        found = {operand: i for i, slot in enumerate(slots) for operand in slot.operands}
        self.device.pipelines(kernel.spec for kernel in self.kernels)

        def buffer(operand: Operand) -> Buffer:
            if isinstance(operand, Buffer):
                return operand
            if operand is self.output:
                return self.output_buffer
            return arena.slots[found[operand]]

        parts: tuple[list[Dispatch], list[Dispatch]] = ([], [])
        for kernel in self.kernels:
            buffers = [buffer(operand) for operand in kernel.operands]
            parts[kernel.head].append(
                dispatch(
                    self.device,
                    kernel.spec,
                    buffers,
                    kernel.grid,
                    moved=kernel.moved,
                    flops=kernel.flops,
                )
            )
        return DispatchPlan(tuple(parts[0]), tuple(parts[1]))

    def _nbytes(self, operand: Intermediate | Scratch) -> int | None:
        if isinstance(operand, Scratch):
            return operand.nbytes
        if operand is self.output:
            return None
        return 4 * padded_rows(self.rows(operand)) * stride(operand.width)
