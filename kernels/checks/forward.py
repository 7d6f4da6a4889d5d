"""One forward traced by hand and run on numpy arrays: what functions, checks and tests stand on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from infer.kernels.checks.arrays import Array, from_rows, to_rows
from infer.kernels.compiler.compile import NO_CHANGES, lower, target_of
from infer.kernels.errors import ShaderError
from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.plan import Dispatch, dispatch
from infer.kernels.gpu.profile import profile_dispatches
from infer.kernels.gpu.record import run
from infer.kernels.lowering.arena import Arena
from infer.kernels.lowering.graph import Input, Value
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import StepKind, padded_rows
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops.linear import Changes
from infer.kernels.state.step import StepRow, pack_prompts, pack_rows, step_bytes

Ids = Sequence[int] | NDArray[np.integer[Any]]
Floats = NDArray[np.float32]


class Timings(TypedDict, total=False):
    """timings is filled with the seconds of each kernel, by its label."""

    timings: dict[str, float]


class Options(Timings, total=False):
    """The keyword arguments that the functions of all operations share.

    fuse=False gives each op a kernel of its own. tuning chooses the variants.
    """

    fuse: bool
    tuning: Tuning


class Forward:
    """A forward traced by hand: make inputs, apply operations to them, `run` the result.

    rows: of the activations. plan_rows: the most rows that its plan is made for, as an engine's
    plan serves steps of fewer rows; more than MAX_VEC_ROWS give the kernels of prefill. drafts:
    tokens drafted for each sequence of a batch, at most; 0: all rows are of one sequence, or of
    `prompts`: of each of these, 0, 1, 2…, how many rows and the first one's position. logits_rows:
    the rows that `LogitsRows` takes. changes: what lies beside weights.
    """

    def __init__(
        self,
        device: Device,
        rows: int,
        *,
        plan_rows: int = 0,
        drafts: int = 0,
        logits_rows: Sequence[int] | None = None,
        prompts: Sequence[tuple[int, int]] = (),
        fuse: bool = True,
        tuning: Tuning | None = None,
        timings: dict[str, float] | None = None,
        changes: Changes = NO_CHANGES,
    ) -> None:
        self.device, self.rows = device, rows
        self.logits_rows, self.prompts, self.fuse = logits_rows, prompts, fuse
        self.tuning, self.timings, self.changes = tuning, timings, changes
        logits = None if logits_rows is None else len(logits_rows)
        several = max(1, len(prompts))
        self.kind = StepKind(
            max(rows, plan_rows), logits, batch=drafts > 0, prompts=several, drafts=drafts
        )

    def input(self, values: Array) -> Value:
        """An activation of these values, [rows, width]. Padding is NaN: nothing may read it."""
        if values.ndim != 2 or values.shape[0] != self.rows or values.size == 0:
            raise ShaderError(f"an input must be [{self.rows}, width], not {list(values.shape)}")
        rows = to_rows(values, padded_rows(self.kind.rows))
        return Input(self.device.upload(rows), values.shape[1])

    def lower(
        self,
        output: Value,
        *,
        position: int = 0,
        tokens: Ids | None = None,
        adapters: Ids = (0,),
        batch: Sequence[StepRow] = (),
    ) -> tuple[Lowering, Buffer]:
        """The kernels that make `output`, and the buffer that it will be in."""
        ids = np.zeros(self.rows, np.int64) if tokens is None else tokens
        step = self.device.buffer(step_bytes(self.kind.rows), label="step")
        logits_rows = self.logits_rows or ()
        chunks, end = [], 0
        numbers = np.broadcast_to(adapters, self.rows)
        for sequence, (count, first) in enumerate(self.prompts or [(self.rows, position)]):
            own = slice(end, end + count)
            chunks.append((ids[own], first, sequence, numbers[own]))
            end += count
        packed = pack_prompts(chunks, logits_rows)
        self.device.write(step, pack_rows(batch, self.rows) if batch else packed)
        buffer = unwritten(self.device, padded_rows(self._rows(output)), output.width)
        target = target_of(self.device, self.kind, fuse=self.fuse, tuning=self.tuning)
        return lower(target, output, step, buffer, changes=self.changes), buffer

    def run(
        self,
        output: Value,
        *,
        position: int = 0,
        tokens: Ids | None = None,
        adapters: Ids = (0,),
        batch: Sequence[StepRow] = (),
    ) -> Floats:
        """The values of `output`, [rows, width]; the first row is at `position`. adapters: of each
        row the number, or one of all. batch: the rows, where they are of several sequences."""
        lowering, buffer = self.lower(
            output, position=position, tokens=tokens, adapters=adapters, batch=batch
        )
        arena = Arena(self.device)
        plan = lowering.place(arena)
        for slot in arena.slots:
            self.device.write(slot, np.full(slot.nbytes // 4, np.nan, np.float32))
        self._submit([*plan.body, *plan.head], position)
        rows = min(self.rows, self._rows(output))
        return from_rows(self.device.read(buffer), rows, output.width).copy()

    def run_alone(self, name: str, output: Value, position: int, **buffers: Buffer) -> None:
        """Run only the kernel `name` of those that make `output`. `buffers` are bound where, by
        the names in the kernel, others would have left something or would find it."""
        lowering, _ = self.lower(output, position=position)
        kernel = next(kernel for kernel in lowering.kernels if kernel.spec.name == name)
        bound: list[Buffer] = []
        bindings = self.device.pipeline(kernel.spec).shader.bindings
        for binding, operand in zip(bindings, kernel.operands, strict=True):
            bound.append(operand if isinstance(operand, Buffer) else buffers[binding.name])
        self._submit([dispatch(self.device, kernel.spec, bound, kernel.grid)], position)

    def _submit(self, dispatches: Sequence[Dispatch], position: int) -> None:
        longest = max(map(sum, self.prompts), default=position + self.rows)
        submit(self.device, dispatches, self.rows, longest, self.timings)

    def _rows(self, value: Value) -> int:
        """Rows of an activation in this plan."""
        chosen = value.of_logits and self.kind.logits is not None
        return (self.kind.logits if chosen else None) or self.kind.rows


def submit(
    device: Device,
    dispatches: Sequence[Dispatch],
    rows: int,
    kv_len: int,
    timings: dict[str, float] | None,
) -> None:
    """Run the dispatches, or time them, which runs them too."""
    if timings is None:
        run(device, dispatches, rows, kv_len)
        return
    seconds = profile_dispatches(device, dispatches, rows, kv_len)
    for item, time in zip(dispatches, seconds, strict=True):
        label = item.pipeline.spec.label
        timings[label] = timings.get(label, 0.0) + time


def unwritten(device: Device, rows: int, width: int) -> Buffer:
    """An activation that shows what no kernel has written."""
    return device.upload(to_rows(np.full((rows, width), np.nan), rows))
