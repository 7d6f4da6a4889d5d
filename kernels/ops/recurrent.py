"""Layers that keep a state: a short convolution, the gated delta rule, Mamba 2."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from infer.kernels.gpu.plan import Grid
from infer.kernels.gpu.tensor import HALF, GpuTensor
from infer.kernels.lowering.arena import Operand
from infer.kernels.lowering.graph import Value, source
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import Target, stride
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops.prepared import Form, Maker
from infer.kernels.state.layer_state import LayerState

_CONV_ROWS = 16  # of a workgroup
_LARGEST = 3e38  # WGSL has no infinity

Scan = TypeVar("Scan", bound="ScanVariant")


def _recent(target: Target, state: LayerState, index: int) -> tuple[list[Operand], dict[str, int]]:
    """Returns the operands and parameters that a kernel has where tokens are drafted. index: of the
    state's buffer."""
    if not target.kind.drafts:
        return [], {"RECENT": 0}
    return [state.recent[index]], {"RECENT": state.recent_rows}


def _scan_grid(target: Target, columns: int, heads: int) -> Grid:
    if target.kind.batch:
        return lambda rows, kv_len: (columns, heads, rows)
    return (columns, heads, 1)


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
        x, x_stride, offset = source(self.x)
        operands: list[Operand] = [low.step, x, self.weight.buffer, self.state.inputs, self]
        workgroups = -(-self.width // 64)
        rows_each = 1 if low.kind.batch else _CONV_ROWS
        recent, recent_params = _recent(low, self.state, 0)
        low.emit(
            "short_conv",
            [*operands, *([] if self.bias is None else [self.bias.buffer]), *recent],
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
                **recent_params,
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
    variant: DeltaVariant = field(init=False)

    def checked_width(self) -> int:
        shape = self.state.shape
        queries, values = shape.key_heads * shape.key_dim, shape.heads * shape.value_dim
        fours = shape.key_dim % 4 == shape.value_dim % 4 == 0
        if self.x.width != 2 * queries + values or not fours or shape.heads % shape.key_heads:
            raise ValueError(f"rows of {self.x.width} do not fit {shape}")
        if self.gates.width != 2 * shape.heads:
            raise ValueError(f"gates of {self.gates.width} values do not fit {shape.heads} heads")
        return values

    def choose(self, target: Target) -> None:
        key_dim = self.state.shape.key_dim
        self.variant = target.tuning.choose(delta_rule_variant, target.kind.span, key_dim)

    def lower(self, low: Lowering) -> None:
        state, shape, variant = self.state, self.state.shape, self.variant
        (x, x_stride, _), (gates, gates_stride, _) = source(self.x), source(self.gates)
        vectors = self.a_log.buffer, self.dt_bias.buffer
        recent, recent_params = _recent(low, state, 1)
        low.emit(
            "delta_rule",
            (low.step, x, gates, *vectors, state.matrices, self, *recent),
            _scan_grid(low, -(-shape.value_dim // variant.columns), shape.heads),
            variant.params
            | recent_params
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
            variant=variant,
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
    variant: ScanVariant = field(init=False)

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

    def choose(self, target: Target) -> None:
        key_dim = self.state.shape.key_dim
        self.variant = target.tuning.choose(ssm_scan_variant, target.kind.span, key_dim)

    def writes(self, form: Form, target: Target) -> bool:
        halves = self.variant.columns % HALF == self.state.shape.value_dim % HALF == 0
        bound = 7 if target.kind.drafts else 6
        return form.fits(self, target, bound) and (halves or not form.int8)

    def lower(self, low: Lowering) -> None:
        state, shape, variant = self.state, self.state.shape, self.variant
        dt_min, dt_max = self.dt_limit
        (x, x_stride, _), (z, z_stride, z_offset) = source(self.x), source(self.z)
        dt, dt_stride, dt_offset = source(self.dt)
        recent, recent_params = _recent(low, state, 1)
        low.emit(
            "ssm_scan",
            [low.step, x, z, dt, self.heads.buffer, state.matrices, *recent, *self.outputs_bound],
            _scan_grid(low, -(-shape.value_dim // variant.columns), shape.heads),
            variant.params
            | recent_params
            | self.output_params
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
            },
            moved=lambda rows, kv_len: (
                2 * shape.sizes[1] * (rows if low.kind.batch else 1)
                + 4 * rows * (x_stride + self.width)
            ),
            flops=lambda rows, kv_len: 6 * rows * shape.key_dim * self.width,
            variant=variant,
        )


# Variants of scans


@dataclass(frozen=True)
class ScanVariant:
    """ssm_scan: rows whose inputs are in workgroup memory at once, and of the loop's body, columns
    of a matrix in a workgroup and in an invocation (tile: 2 or 4), invocations that share a
    column."""

    rows: int
    unroll: int
    columns: int
    split: int
    tile: int

    @property
    def invocations(self) -> int:
        """Invocations of a workgroup."""
        return self.columns // self.tile * self.split

    @property
    def cluster(self) -> int:
        """Neighbouring invocations that must be in one subgroup; 0: none."""
        return 0

    def storage(self, key_dim: int) -> int:
        """Bytes of workgroup memory."""
        quantized = 2 * self.columns if self.rows == 1 else 0
        return 4 * (self.rows * (2 * key_dim + 4 + self.columns * (1 + self.split)) + quantized)

    def serves(self, key_dim: int) -> bool:
        """Whether a matrix with so many rows can be split as this variant splits it."""
        return key_dim % (4 * self.split) == 0 and self.rows % self.unroll == 0

    def runs(self, tuning: Tuning, key_dim: int) -> bool:
        """Whether a scan of matrices with so many rows can be of this variant."""
        largest = tuning.largest_subgroup
        whole = largest and self.invocations % largest == 0
        return bool(
            self.serves(key_dim)
            and self.invocations <= tuning.limits.max_invocations
            and self.storage(key_dim) <= tuning.limits.workgroup_storage
            and (self.cluster == 0 or (whole and self.cluster <= tuning.subgroup_size))
        )

    @property
    def params(self) -> dict[str, int]:
        """The kernel's."""
        return {
            "ROWS": self.rows,
            "UNROLL": self.unroll,
            "COLUMNS": self.columns,
            "SPLIT": self.split,
            "TILE": self.tile,
        }


@dataclass(frozen=True)
class DeltaVariant(ScanVariant):
    """delta_rule: the fields of a ScanVariant, how many invocations load a row's query and key, and
    whether those that share a column (a power of two) are lanes of a subgroup."""

    loaders: int
    subgroups: bool

    @property
    def cluster(self) -> int:
        return self.split if self.subgroups else 0

    def storage(self, key_dim: int) -> int:
        sums = 0 if self.subgroups else 16 * self.columns * self.split
        return 4 * self.rows * (2 * key_dim + 4 + self.columns + 4 * self.loaders) + sums

    def serves(self, key_dim: int) -> bool:
        return super().serves(key_dim) and self.rows * self.loaders <= self.invocations

    @property
    def params(self) -> dict[str, int]:
        return super().params | {"LOADERS": self.loaders, "SUBGROUPS": self.subgroups}


def ssm_scan_variant(tuning: Tuning, rows: int, key_dim: int) -> ScanVariant:
    """An invocation has 32 values of a matrix where it can be split so."""
    split = next(n for n in (16, 8, 4, 2, 1) if key_dim % (4 * n) == 0)
    variants = (ScanVariant(n, _unroll(tuning, n), 32, split, 4) for n in (8, 4, 2, 1))
    return _first(tuning, variants, rows, key_dim)


def delta_rule_variant(tuning: Tuning, rows: int, key_dim: int) -> DeltaVariant:
    """The same, but with fewer invocations for a column, as all of them need its sums. Lanes of
    a subgroup have them sooner, but read a matrix in smaller pieces, which a single row waits
    for."""
    split = next(n for n in (8, 4, 2, 1) if key_dim % (4 * n) == 0)
    variants = (
        DeltaVariant(n, _unroll(tuning, n), 32, split, 2, 8, subgroups)
        for subgroups in ((True, False) if rows > 1 else (False,))
        for n in (16, 8, 4, 2, 1)
    )
    return _first(tuning, variants, rows, key_dim)


def _unroll(tuning: Tuning, rows: int) -> int:
    return 1 if tuning.software else min(4, rows)


def _first(tuning: Tuning, variants: Iterable[Scan], rows: int, key_dim: int) -> Scan:
    """The first that runs and has no more rows than there are."""
    return next(v for v in variants if v.rows <= rows and v.runs(tuning, key_dim))
