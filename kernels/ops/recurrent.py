"""Layers that keep a state: a short convolution, the gated delta rule, Mamba 2."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from infer.kernels.compiler.arena import Operand
from infer.kernels.compiler.graph import Value, stride
from infer.kernels.compiler.lowering import Lowering
from infer.kernels.compiler.target import Target
from infer.kernels.gpu.plan import Grid
from infer.kernels.gpu.tensor import HALF, GpuTensor
from infer.kernels.ops.prepared import Form, Maker
from infer.kernels.state.layer_state import LayerState

_CONV_ROWS = 16  # of a workgroup
_LARGEST = 3e38  # WGSL has no infinity


def _span(target: Target) -> int:
    """Rows of one sequence in a step, at most."""
    return 1 if target.kind.batch else target.kind.rows


def _scan_grid(target: Target, columns: int, heads: int) -> Grid:
    return (
        (lambda rows, kv_len: (columns, heads, rows)) if target.kind.batch else (columns, heads, 1)
    )


@dataclass(eq=False, repr=False)
class ShortConv(Value):
    """Each channel convolved with its last inputs, those before the step from the state; weight
    [channels * taps], the latest input's last. gated: x is B, C and x side by side, and this is C *
    conv(B * x). activation: none, or a function of Activation."""

    x: Value
    weight: GpuTensor
    bias: GpuTensor | None
    state: LayerState
    gated: bool = field(default=False, kw_only=True)
    activation: str = field(default="none", kw_only=True)

    def checked_width(self) -> int:
        shape = self.state.shape
        if self.x.width != (3 if self.gated else 1) * shape.channels:
            raise ValueError(f"rows of {self.x.width} do not fit {shape.channels} channels")
        if self.weight.shape != (shape.channels * shape.taps,) or shape.taps < 2:
            raise ValueError(f"a weight of {self.weight.shape} does not fit {shape}")
        return shape.channels

    def lower(self, low: Lowering) -> None:
        x, x_stride, offset = low.source(self.x)
        operands: list[Operand] = [low.step, x, self.weight.buffer, self.state.inputs, self]
        workgroups = -(-self.width // 64)
        rows_each = 1 if low.kind.batch else _CONV_ROWS
        low.emit(
            "short_conv",
            operands if self.bias is None else [*operands, self.bias.buffer],
            lambda rows, kv_len: (workgroups, -(-rows // rows_each), 1),
            {
                "CHANNELS": self.width,
                "TAPS": self.state.shape.taps,
                "ROWS": rows_each,
                "BATCH": low.kind.batch,
                "GATED": self.gated,
                "BIAS": self.bias is not None,
                "ACTIVATION": self.activation,
                "X_STRIDE": x_stride,
                "X_OFFSET": offset,
                "Y_STRIDE": stride(self.width),
            },
            moved=lambda rows, kv_len: 4 * rows * (self.x.width + self.width),
        )


@dataclass(eq=False, repr=False)
class DeltaRule(Value):
    """The gated delta rule (Yang et al. 2024) on the state's matrices; x is queries, keys and
    values side by side, gates is b, then a, of each head (delta_rule.wgsl)."""

    x: Value
    gates: Value
    a_log: GpuTensor
    dt_bias: GpuTensor
    state: LayerState

    def checked_width(self) -> int:
        shape = self.state.shape
        queries, values = shape.key_heads * shape.key_dim, shape.heads * shape.value_dim
        fours = shape.key_dim % 4 == shape.value_dim % 4 == 0
        if self.x.width != 2 * queries + values or not fours or shape.heads % shape.key_heads:
            raise ValueError(f"rows of {self.x.width} do not fit {shape}")
        if self.gates.width != 2 * shape.heads:
            raise ValueError(f"gates of {self.gates.width} values do not fit {shape.heads} heads")
        return values

    def lower(self, low: Lowering) -> None:
        state, shape = self.state, self.state.shape
        variant = low.tuning.delta_rule(_span(low), shape.key_dim)
        (x, x_stride, _), (gates, gates_stride, _) = low.source(self.x), low.source(self.gates)
        vectors = self.a_log.buffer, self.dt_bias.buffer
        low.emit(
            "delta_rule",
            (low.step, x, gates, *vectors, state.matrices, self),
            _scan_grid(low, -(-shape.value_dim // variant.columns), shape.heads),
            variant.params
            | {
                "BATCH": low.kind.batch,
                "KEY_HEADS": shape.key_heads,
                "HEADS": shape.heads,
                "KEY_DIM": shape.key_dim,
                "VALUE_DIM": shape.value_dim,
                "X_STRIDE": x_stride,
                "GATES_STRIDE": gates_stride,
                "Y_STRIDE": stride(self.width),
            },
            moved=lambda rows, kv_len: (
                2 * shape.sizes[1] * (rows if low.kind.batch else 1)
                + 4 * rows * (x_stride + self.width)
            ),
            flops=lambda rows, kv_len: 6 * rows * shape.key_dim * self.width,
        )


@dataclass(eq=False, repr=False)
class SSMScan(Maker):
    """The state space model of Mamba 2 (Dao & Gu 2024) on the state's matrices, times silu(z); x is
    x, B and C side by side, dt one value for each head. heads [3 * heads]: A_log, dt_bias and D.
    dt_limit: of the time steps, behind softplus (ssm_scan.wgsl).

    Rules add: what the next projection reads.
    """

    x: Value
    z: Value
    dt: Value
    heads: GpuTensor
    state: LayerState
    dt_limit: tuple[float, float] = (0.0, math.inf)

    def checked_width(self) -> int:
        shape = self.state.shape
        values, inputs = shape.heads * shape.value_dim, shape.key_heads * shape.key_dim
        if self.x.width != values + 2 * inputs or shape.key_dim % 4 or shape.value_dim % 4:
            raise ValueError(f"rows of {self.x.width} do not fit {shape}")
        widths = self.z.width, self.dt.width
        if widths != (values, shape.heads) or shape.heads % shape.key_heads:
            raise ValueError(f"gates of {widths[0]} and {widths[1]} values do not fit {shape}")
        if self.heads.shape != (3 * shape.heads,):
            raise ValueError(f"a weight of {self.heads.shape} does not fit {shape.heads} heads")
        return values

    def writes(self, form: Form, target: Target) -> bool:
        variant = target.tuning.ssm_scan(_span(target), self.state.shape.key_dim)
        halves = variant.columns % HALF == self.state.shape.value_dim % HALF == 0
        return form.fits(self, target, 6) and (halves or not form.int8)

    def lower(self, low: Lowering) -> None:
        state, shape, form = self.state, self.state.shape, self.prepares
        dt_min, dt_max = self.dt_limit
        variant = low.tuning.ssm_scan(_span(low), shape.key_dim)
        (x, x_stride, _), (z, z_stride, z_offset) = low.source(self.x), low.source(self.z)
        dt, dt_stride, dt_offset = low.source(self.dt)
        keep = form is None or form.keep
        low.emit(
            "ssm_scan",
            [low.step, x, z, dt, self.heads.buffer, state.matrices, *self.outputs_bound],
            _scan_grid(low, -(-shape.value_dim // variant.columns), shape.heads),
            variant.params
            | {
                "BATCH": low.kind.batch,
                "GROUPS": shape.key_heads,
                "HEADS": shape.heads,
                "STATE_DIM": shape.key_dim,
                "HEAD_DIM": shape.value_dim,
                "DT_MIN": float(dt_min),
                "DT_MAX": min(float(dt_max), _LARGEST),
                "X_STRIDE": x_stride,
                "Z_STRIDE": z_stride,
                "Z_OFFSET": z_offset,
                "DT_STRIDE": dt_stride,
                "DT_OFFSET": dt_offset,
                "Y_STRIDE": stride(self.width),
                "KEEP": keep,
                "QUANTIZE": form is not None and form.int8,
                "NEXT_NORM": form is not None and form.norm is not None,
            },
            moved=lambda rows, kv_len: (
                2 * shape.sizes[1] * (rows if low.kind.batch else 1)
                + 4 * rows * (x_stride + self.width)
            ),
            flops=lambda rows, kv_len: 6 * rows * shape.key_dim * self.width,
        )
