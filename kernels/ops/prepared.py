"""Activations as projections want to read them: made by the kernel before, or by one of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from infer.kernels.gpu.device import Buffer
from infer.kernels.gpu.plan import Grid
from infer.kernels.gpu.tensor import BLOCK, GpuTensor
from infer.kernels.lowering.arena import Operand, Scratch
from infer.kernels.lowering.graph import Value, source
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import Target, padded_rows, stride

HALVES = "f16"
"""The form of activations that matmul_matrix reads: f16, with an f32 scale for each row."""


@dataclass(frozen=True, eq=False)
class Norm:
    """The norm of whole rows that goes into projections: its weights are multiplied into what they
    read, and the mean square is applied to what comes out. of_logits: of the logits' rows."""

    weight: GpuTensor
    eps: float
    of_logits: bool = False


@dataclass(frozen=True)
class Form:
    """The form in which projections read an activation. It may come after a norm; it is int8 with
    scales of some kind (quantize_block.wgsl), f16 (half_rows.wgsl) or, without scales, f32. alone:
    nothing else reads the activation."""

    norm: Norm | None
    scales: str
    alone: bool = False

    @property
    def int8(self) -> bool:
        return bool(self.scales)

    @property
    def keep(self) -> bool:
        """Whether the activation itself is needed as well, for its squares or by another reader."""
        return not (self.int8 and self.alone)

    @property
    def bindings(self) -> int:
        """The number of buffers that the kernel binds which makes the activation: the activation,
        the form, and the norm's weights."""
        return self.keep + (2 if self.int8 else 1) + (self.norm is not None)

    def fits(self, maker: Maker, target: Target, bound: int) -> bool:
        """Whether a kernel can write this form that binds `bound` buffers for other things."""
        if self.scales == HALVES and not maker.writes_halves:
            return False
        if self.bindings + bound > target.device.limits.storage_buffers:
            return False
        if self.norm is not None and self.norm.of_logits and not target.kind.single:
            return False  # the logits' rows are copied first
        if not self.int8:
            return True
        return maker.width % BLOCK == 0 and (target.kind.single or maker.quantizes_rows)


@dataclass(eq=False, repr=False)
class Prepared(Value):
    """x in a form: its values times the norm's weights, f32; or, with scales, integers and those
    (quantize_block.wgsl). order: of its columns, u32 [width].

    rows: of x, at most. parts: side by side in x, each a row of its own (results of experts).
    keep: whether x itself is needed too. made: the kernel that makes x makes this too.
    """

    x: Value
    norm: Norm | None
    scales: str
    rows: int
    order: Buffer | None = None
    parts: int = 1
    part: int = 0
    keep: bool = True
    made: bool = False
    operands: list[Operand] = field(init=False)

    def checked_width(self) -> int:
        self.part = self.part or self.x.width
        rows = padded_rows(self.rows) if self.parts == 1 else self.rows * self.parts
        blocks = -(-self.part // BLOCK) * rows
        if self.scales == HALVES:
            self.operands = half_operands(rows, self.part)
        elif self.scales:
            self.operands = [Scratch(blocks * BLOCK), Scratch(blocks * 16)]
        else:
            self.operands = [Scratch(4 * self.rows * stride(self.part))]
        return self.x.width

    @property
    def scale_rows(self) -> int:
        """The rows whose scales lie side by side, rounded up to a multiple of 4."""
        return -(-self.rows // 4) * 4

    @property
    def written(self) -> list[Operand]:
        """The operands that the kernel that makes x binds to write this form."""
        return [*self.operands, *([] if self.norm is None else [self.norm.weight.buffer])]

    def lower(self, low: Lowering) -> None:
        if self.made:
            return
        x = source(self.x)[0]
        order = [] if self.order is None else [self.order]
        if self.scales == HALVES:
            lower_half_rows(
                low,
                [x, *self.operands, *order],
                low.row_grid(self, 1)
                if self.parts == 1
                else lambda rows, kv_len: (1, rows * self.parts, 1),
                self.part,
                stride(self.part),
                self.parts,
            )
            return
        groups, parts = -(-self.part // (8 * BLOCK)), self.parts
        low.emit(
            "quantize",
            (x, *self.written, *order),
            low.row_grid(self, groups)
            if parts == 1
            else lambda rows, kv_len: (groups, rows * parts, 1),
            {
                "K": self.part,
                "X_STRIDE": stride(self.part),
                "NORM": self.norm is not None,
                "ORDER": self.order is not None,
                "QUANTIZE": True,
                **scale_params(self),
            },
        )


def half_operands(rows: int, width: int) -> list[Operand]:
    """Returns the buffers that half_rows writes: rows of f16, whose width is padded to a multiple
    of 64, and the scale of each row in f32."""
    return [Scratch(rows * -(-width // 64) * 128), Scratch(4 * rows)]


def lower_half_rows(
    low: Lowering,
    operands: Sequence[Operand],
    grid: Grid,
    width: int,
    x_stride: int,
    parts: int = 1,
) -> None:
    """The kernel half_rows for the first `width` values of rows of x, which lie x_stride apart.
    operands: x, those of half_operands, and the order of columns, if there is one."""
    low.emit(
        "half_rows",
        operands,
        grid,
        {
            "K": width,
            "X_STRIDE": x_stride,
            "ORDER": len(operands) > 3,
            "WG": low.tuning.workgroup(width),
            "SUBGROUPS": low.device.subgroups,
        },
        moved=lambda rows, kv_len: 6 * rows * parts * width,
    )


def scale_params(form: Prepared | None) -> dict[str, Any]:
    """Returns the parameters of quantize_block.wgsl; those of a single row without a form."""
    if form is None or form.scales in ("", HALVES):
        return {"X_SCALES": "halves", "SCALE_ROWS": 0}
    return {"X_SCALES": form.scales, "SCALE_ROWS": form.scale_rows}


@dataclass(eq=False, repr=False)
class Maker(Value):
    """An operation whose kernel can also write its result as projections want to read it.

    Rules add: prepares: that form. quantizes_rows: its kernel writes int8 for more rows than one.
    writes_halves: its kernel can write f16.
    """

    quantizes_rows: ClassVar[bool] = False
    writes_halves: ClassVar[bool] = False
    prepares: Prepared | None = field(default=None, kw_only=True)

    def writes(self, form: Form, target: Target) -> bool:
        """Whether the kernel that this operation has chosen can write a form."""
        raise NotImplementedError

    def write(self, form: Prepared, target: Target) -> None:
        """Have that kernel write this form, in the variant that is for it."""
        self.prepares = form
        self.choose(target)

    @property
    def output_params(self) -> dict[str, bool]:
        """The parameters that say what the kernel writes (next_input.wgsl)."""
        form = self.prepares
        return {
            "KEEP": form is None or form.keep,
            "QUANTIZE": form is not None and form.scales not in ("", HALVES),
            "NEXT_NORM": form is not None and form.norm is not None,
        }

    @property
    def outputs_bound(self) -> list[Operand]:
        """The operands that the kernel binds for its result."""
        if self.prepares is None:
            return [self]
        return [*([self] if self.prepares.keep else []), *self.prepares.written]
