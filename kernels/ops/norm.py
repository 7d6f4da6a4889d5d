"""Norms: of whole rows, of heads, or of groups of either."""

from __future__ import annotations

from dataclasses import dataclass, field

from infer.kernels.gpu.tensor import BLOCK, HALF, GpuTensor
from infer.kernels.lowering.arena import Operand
from infer.kernels.lowering.graph import Slice, Value, same_width, source
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import Target, stride
from infer.kernels.ops.prepared import HALVES, Form, Maker, scale_params


def _checked(x: Value, weight: GpuTensor, groups: int) -> int:
    (width,) = weight.shape
    if x.width % width or width % groups:
        raise ValueError(f"a norm of {width} values cannot cover rows of {x.width}")
    return x.width


@dataclass(eq=False, repr=False)
class RMSNorm(Maker):
    """x / rms(x) * weight (Zhang & Sennrich 2019), over each part of x as wide as the weight: the
    whole row, or head by head. Or over each of so many groups of what the weight covers, with
    weights of their own. gate: times silu(gate), as wide as x.

    Rules add: a residual [as x], then a factor [1]; what the next projection reads.
    """

    quantizes_rows = True
    writes_halves = True
    x: Value
    weight: GpuTensor
    eps: float
    groups: int = 1
    gate: Value | None = None
    residual: Value | None = field(default=None, kw_only=True)
    factor: GpuTensor | None = field(default=None, kw_only=True)

    def checked_width(self) -> int:
        if self.gate is not None:
            same_width(self.x, self.gate)
        return _checked(self.x, self.weight, self.groups)

    @property
    def part(self) -> int:
        """Values that are normed together."""
        return self.weight.shape[0] // self.groups

    @property
    def of_whole_rows(self) -> bool:
        return self.part == self.width and not isinstance(self.x, Slice) and self.gate is None

    def writes(self, form: Form, target: Target) -> bool:
        optional = (self.gate, self.residual, self.factor)
        bound = 2 + sum(item is not None for item in optional)
        if not form.scales:
            return form.fits(self, target, bound)
        if form.scales == HALVES:
            can = self.part == self.width and self.part % 64 == 0
        else:
            whole = self.part % (HALF if form.scales == "halves" else BLOCK) == 0
            can = whole and target.tuning.subgroup_size >= BLOCK // 4
        return can and self._lanes() == 4 and form.fits(self, target, bound)

    def _lanes(self) -> int:
        offsets = [source(x)[2] for x in (self.x, self.gate) if x is not None]
        return 1 if any(n % 4 for n in (self.part, *offsets)) else 4

    def lower(self, low: Lowering) -> None:
        x, x_stride, offset = source(self.x)
        operands: list[Operand] = [x, self.weight.buffer]
        gate_stride = gate_offset = 0
        if self.gate is not None:
            gate, gate_stride, gate_offset = source(self.gate)
            operands.append(gate)
        if self.residual is not None:
            operands.append(source(self.residual)[0])
        if self.factor is not None:
            operands.append(self.factor.buffer)
        low.emit(
            "rmsnorm",
            [*operands, *self.outputs_bound],
            low.row_grid(self, self.width // self.part),
            {
                "WG": low.tuning.workgroup(self.part),
                "SUBGROUPS": low.device.subgroups,
                "WIDTH": self.part,
                "GROUPS": self.groups,
                "EPS": float(self.eps),
                "LANES": self._lanes(),
                "X_STRIDE": x_stride,
                "X_OFFSET": offset,
                "Y_STRIDE": stride(self.width),
                "GATED": self.gate is not None,
                "GATE_STRIDE": gate_stride,
                "GATE_OFFSET": gate_offset,
                "RESIDUAL": self.residual is not None,
                "FACTOR": self.factor is not None,
                **self.output_params,
                **scale_params(self.prepares),
                "HALVES": self.prepares is not None and self.prepares.scales == HALVES,
            },
            moved=lambda rows, kv_len: 8 * rows * self.width,
        )


@dataclass(eq=False, repr=False)
class LayerNorm(Value):
    """(x - mean(x)) / std(x) * weight + bias (Ba et al. 2016), over such parts as RMSNorm."""

    x: Value
    weight: GpuTensor
    bias: GpuTensor | None
    eps: float
    groups: int = 1

    def checked_width(self) -> int:
        return _checked(self.x, self.weight, self.groups)

    def lower(self, low: Lowering) -> None:
        width = self.weight.shape[0] // self.groups
        x, x_stride, offset = source(self.x)
        low.emit(
            "layernorm",
            (x, self.weight.buffer, self, *([] if self.bias is None else [self.bias.buffer])),
            low.row_grid(self, self.width // width),
            {
                "WG": low.tuning.workgroup(width),
                "SUBGROUPS": low.device.subgroups,
                "WIDTH": width,
                "GROUPS": self.groups,
                "EPS": float(self.eps),
                "X_STRIDE": x_stride,
                "X_OFFSET": offset,
                "Y_STRIDE": stride(self.width),
                "BIAS": self.bias is not None,
            },
            moved=lambda rows, kv_len: 8 * rows * self.width,
        )
