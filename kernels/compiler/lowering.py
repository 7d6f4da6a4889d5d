"""From traced ops to dispatches: which kernel runs each op.

Every op has a kernel of its own; with `fuse`, groups of ops share one (fuse.py). Attention,
experts and layers with a state have modules of their own (lower_attention.py, lower_experts.py,
lower_state.py), and so has where activations lie (arena.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infer.kernels.compiler.arena import Arena, Kernel, Operand, Scratch, colour
from infer.kernels.compiler.fusion import Form, Fusion
from infer.kernels.compiler.graph import Ops, Rope, Value, stride
from infer.kernels.compiler.tuning import MOST_SPLITS, Tuning, VecShape
from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.plan import Count, Dispatch, DispatchPlan, Grid, dispatch, linear_grid
from infer.kernels.gpu.shader import KernelSpec
from infer.kernels.gpu.tensor import BLOCK, HALF, INTEGERS, GpuTensor, Shard
from infer.kernels.ops.attention import NO_KEY, LatentKey, lower_attention
from infer.kernels.ops.experts import lower_down, lower_gate_up, lower_route
from infer.kernels.ops.recurrent import (
    lower_delta_rule,
    lower_short_conv,
    lower_ssm_scan,
)

MAX_VEC_ROWS = 8
# Rows of a tile are those of the step (tile_rows.wgsl).
_UNGROUPED = {"GROUPED": False, "X_SLOTS": 1, "FIRST_EXPERT": 0, "SHARD_EXPERTS": 0}


@dataclass(frozen=True)
class StepKind:
    """A kind of step: at most `rows` rows, of which `logits` get logits (None: all of them).

    Up to MAX_VEC_ROWS rows go through matmul_vec, more through matmul.
    """

    rows: int
    logits: int | None = None

    @property
    def vec(self) -> bool:
        return self.rows <= MAX_VEC_ROWS


class Lowering:
    """The kernels of one kind of step. Make it, then `place` it in an arena."""

    def __init__(
        self,
        device: Device,
        ops: Ops,
        kind: StepKind,
        step: Buffer,
        *,
        output: Value,
        output_buffer: Buffer,
        fuse: bool = True,
        tuning: Tuning | None = None,
    ) -> None:
        self.device, self.kind, self.step = device, kind, step
        self.output, self.output_buffer = output, output_buffer
        self.tuning = tuning or Tuning(device)
        self.fusion = Fusion(ops.values, vec=kind.vec) if fuse else None
        self.absorbed = self.fusion.absorbed if self.fusion else set()
        self.same: dict[Value, Value] = {}  # ops that turn out to be their input
        self.prepared: dict[tuple[Value, Value | None, bool], list[Operand]] = {}
        self.tiles: dict[Value, list[Operand]] = {}  # of a routing: experts and rows of tiles
        self.kernels: list[Kernel] = []
        for value in ops.values:
            if value not in self.absorbed:
                getattr(self, f"_lower_{value.op}")(value)

    # Kernels of each op

    def emit(
        self,
        name: str,
        operands: Sequence[Operand],
        grid: Grid,
        params: dict[str, Any],
        moved: Count | int = 0,
        flops: Count | int = 0,
    ) -> None:
        head = any(isinstance(item, Value) and self._in_head(item) for item in operands)
        if callable(grid) and self.kind.rows == 1 and not name.startswith("attention"):
            grid = grid(1, 0)
        self.kernels.append(
            Kernel(
                KernelSpec.of(name, **params),
                tuple(operands),
                grid,
                moved if callable(moved) else constant(moved),
                flops if callable(flops) else constant(flops),
                head,
            )
        )

    def _in_head(self, value: Value) -> bool:
        return value.of_logits or value is self.output

    def rows(self, value: Value) -> int:
        """Rows of an activation in this kind of step, at most."""
        if value.of_logits and self.kind.logits is not None:
            return self.kind.logits
        return self.kind.rows

    def row_grid(self, value: Value, x: int) -> Grid:
        if value.of_logits and self.kind.logits is not None:
            return (x, self.kind.logits, 1)
        return lambda rows, kv_len: (x, rows, 1)

    def _vec_grid(self, value: Value, count: int, row_each: bool) -> Grid:
        """`count` workgroups, or for each row so many."""
        x, y, _ = linear_grid(count, self.device.limits.max_workgroups)
        if not row_each:
            return (x, y, 1)
        if value.of_logits and self.kind.logits is not None:
            return (x, y, self.kind.logits)
        return lambda rows, kv_len: (x, y, rows)

    def source(self, value: Value) -> tuple[Value, int, int]:
        """Where an operand lies: its activation, that one's row stride, and its first column."""
        offset = 0
        while value.op == "slice" or value in self.same:
            offset += value.attrs["offset"] if value.op == "slice" else 0
            value = value.inputs[0] if value.op == "slice" else self.same[value]
        return value, stride(value.width), offset

    def _lower_input(self, value: Value) -> None:
        pass

    def _lower_slice(self, value: Value) -> None:
        pass

    def _lower_embedding(self, value: Value) -> None:
        self._embedding(value, float(value.attrs["scale"]), by_position=False)

    def _lower_position_embedding(self, value: Value) -> None:
        self._embedding(value, 1.0, by_position=True)

    def _embedding(self, value: Value, scale: float, *, by_position: bool) -> None:
        weight: GpuTensor = value.attrs["weight"]
        groups = stride(value.width) // 8
        for shard in weight.shards:
            self.emit(
                "embedding",
                (self.step, *shard.buffers, value),
                self.row_grid(value, -(-groups // 64)),
                {
                    "K": value.width,
                    "WEIGHT": weight.dtype,
                    **weight.grouping.params,
                    "START": shard.start,
                    "SHARD_ROWS": shard.rows,
                    "SCALE": scale,
                    "BY_POSITION": by_position,
                },
            )

    def _lower_rmsnorm(self, value: Value) -> None:
        self._rmsnorm(value, value)

    def _lower_gated_rmsnorm(self, value: Value) -> None:
        self._rmsnorm(value, value, gate=value.inputs[1])

    def _rmsnorm(
        self,
        value: Value,
        result: Value,
        residual: Value | None = None,
        factor: GpuTensor | None = None,
        gate: Value | None = None,
    ) -> None:
        """result = what the norm `value` computes, gated; + residual, the sum times factor."""
        weight: GpuTensor = value.attrs["weight"]
        groups = int(value.attrs["groups"])
        width = weight.shape[0] // groups
        x, x_stride, offset = self.source(value.inputs[0])
        operands: list[Operand] = [x, weight.buffer]
        gate_stride = gate_offset = 0
        if gate is not None:
            z, gate_stride, gate_offset = self.source(gate)
            operands.append(z)
        if residual is not None:
            operands.append(self.source(residual)[0])
        if factor is not None:
            operands.append(factor.buffer)
        lanes = 1 if (width | offset | gate_offset) % 4 else 4
        form = self.next_form(result, self.device.limits.storage_buffers - len(operands))
        workgroup = self.tuning.workgroup(width)
        fits = 2 * width + 4 * workgroup <= self.device.limits.workgroup_storage
        if form and form.int8 and (lanes == 1 or width % HALF or not fits):
            form = None
        keep = form is None or form.keep
        if keep:
            operands.append(result)
        if form is not None:
            operands += self.prepare(result, form, self.rows(result))
            if form.norm is not None:
                operands.append(form.norm.attrs["weight"].buffer)
        self.emit(
            "rmsnorm",
            operands,
            self.row_grid(result, result.width // width),
            {
                "WG": workgroup,
                "SUBGROUPS": self.device.subgroups,
                "WIDTH": width,
                "GROUPS": groups,
                "EPS": float(value.attrs["eps"]),
                "LANES": lanes,
                "X_STRIDE": x_stride,
                "X_OFFSET": offset,
                "Y_STRIDE": stride(result.width),
                "GATED": gate is not None,
                "GATE_STRIDE": gate_stride,
                "GATE_OFFSET": gate_offset,
                "RESIDUAL": residual is not None,
                "FACTOR": factor is not None,
                "KEEP": keep,
                "QUANTIZE": form is not None and form.int8,
                "NEXT_NORM": form is not None and form.norm is not None,
            },
            moved=lambda rows, kv_len: 8 * rows * result.width,
        )

    def _lower_layernorm(self, value: Value) -> None:
        weight: GpuTensor = value.attrs["weight"]
        bias: GpuTensor | None = value.attrs["bias"]
        groups = int(value.attrs["groups"])
        width = weight.shape[0] // groups
        x, x_stride, offset = self.source(value.inputs[0])
        self.emit(
            "layernorm",
            (x, weight.buffer, value, *([] if bias is None else [bias.buffer])),
            self.row_grid(value, value.width // width),
            {
                "WG": self.tuning.workgroup(width),
                "SUBGROUPS": self.device.subgroups,
                "WIDTH": width,
                "GROUPS": groups,
                "EPS": float(value.attrs["eps"]),
                "X_STRIDE": x_stride,
                "X_OFFSET": offset,
                "Y_STRIDE": stride(value.width),
                "BIAS": bias is not None,
            },
            moved=lambda rows, kv_len: 8 * rows * value.width,
        )

    def _lower_linear(self, value: Value) -> None:
        self._linear(value, value)

    def _linear(
        self,
        value: Value,
        result: Value,
        residual: Value | None = None,
        activation: str = "none",
        gated: bool = False,
        gate: Value | None = None,
        factors: Value | None = None,
    ) -> None:
        """result = what the linear op `value` computes, with what was fused into it. gate: one
        value for each row, whose sigmoid multiplies it; factors: as many as it has itself."""
        weight: GpuTensor = value.attrs["weight"]
        bias: GpuTensor | None = value.attrs["bias"]
        rows = self.rows(value)
        inputs, of_norm = self.projected(value)
        added: list[Operand] = [] if bias is None else [bias.buffer]
        if residual is not None:
            added.append(self.source(residual)[0])
        params = {
            "WEIGHT": weight.dtype,
            "K": weight.shape[1],
            "Y_STRIDE": stride(result.width),
            "SCALE": float(value.attrs["scale"]),
            "BIAS": bias is not None,
            "RESIDUAL": residual is not None,
            "ACTIVATION": activation,
        }
        if rows > MAX_VEC_ROWS:
            self._matmul(weight, rows, inputs, [result, *added], gated, params)
            return
        params |= of_norm | {"SIGMOID_GATE": gate is not None, "FACTORS": factors is not None}
        params |= {"GATE_STRIDE": 0, "GATE_OFFSET": 0}
        gates = gate or factors
        if gates is not None:
            x, gate_stride, offset = self.source(gates)
            added.append(x)
            params |= {"GATE_STRIDE": gate_stride, "GATE_OFFSET": offset}
        # A row that has stopped writes nothing, where rows are those of the step.
        params["STOPS"] = self.kind.rows == 1 or not (value.of_logits and self.kind.logits)
        if params["STOPS"]:
            added.insert(0, self.step)
        self._matmul_vec(weight, rows, inputs, added, result, gated, params)

    def _matmul(
        self,
        weight: GpuTensor,
        rows: int,
        inputs: Sequence[Operand],
        rest: Sequence[Operand],
        gated: bool,
        params: dict[str, Any],
    ) -> None:
        k = weight.shape[1]
        int8 = weight.dtype in INTEGERS
        for shard in weight.shards:
            n = shard.rows
            sums = 4 * padded_rows(rows) * stride(n)
            room = MOST_SPLITS * sums <= self.device.limits.max_binding
            sizes = rows, n, k, room and not gated
            tile = (
                self.tuning.matmul_int8(*sizes, weight.dtype)
                if int8
                else self.tuning.matmul(*sizes)
            )
            own = params | {"START": shard.start, "SPLIT_ROWS": 0}
            written = list(rest)
            if tile.splits > 1:
                own |= {"BIAS": False, "RESIDUAL": False, "ACTIVATION": "none", "SCALE": 1.0}
                own |= {"START": 0, "Y_STRIDE": stride(n), "SPLIT_ROWS": padded_rows(rows)}
                written = [Scratch(tile.splits * sums)]
            self.emit(
                "matmul_int8" if int8 else "matmul",
                [*self.multiplied(shard, inputs), *written],
                tile_grid(-(-n // tile.columns), tile.rows, tile.splits),
                own
                | weight.grouping.params
                | _UNGROUPED
                | self.whole_rows(weight)
                | {"N": n // 2 if gated else n, "GATED": gated}
                | tile.params,
                moved=shard.nbytes,
                flops=per_row(2 * n * k),
            )
            if tile.splits > 1:
                names = ("Y_STRIDE", "SCALE", "BIAS", "RESIDUAL", "ACTIVATION")
                self.emit(
                    "matmul_combine",
                    [*written, *rest],
                    tile_grid(-(-n // 64), 1),
                    {name: params[name] for name in names}
                    | {"N": n, "START": shard.start, "SUMS_STRIDE": stride(n)}
                    | {"SPLITS": tile.splits, "SPLIT_ROWS": padded_rows(rows)},
                    moved=per_row(4 * n * (tile.splits + 1)),
                )

    @staticmethod
    def multiplied(shard: Shard, inputs: Sequence[Operand]) -> list[Operand]:
        """What kernels of projections bind first: weights, an activation and what is beside each
        (see `projected`)."""
        scales = [] if shard.scales is None else [shard.scales]
        return [shard.buffer, inputs[0], *scales, *inputs[1:]]

    def whole_rows(self, weight: GpuTensor) -> dict[str, int]:
        """What matmul, which f32 activations go through, has to know to read whole rows."""
        if weight.dtype in INTEGERS:
            return {}
        heads = {"X_OFFSET": 0, "X_HEAD": 0, "Y_HEAD": 0}
        return heads | {"X_STRIDE": stride(weight.shape[1]), "SOFTWARE": self.device.software}

    def _matmul_vec(
        self,
        weight: GpuTensor,
        rows: int,
        inputs: Sequence[Operand],
        added: Sequence[Operand],
        result: Value,
        gated: bool,
        params: dict[str, Any],
    ) -> None:
        k = weight.shape[1]
        bindings = len(weight.shards[0].buffers) + len(inputs) + len(added)
        form = self.next_form(result, self.device.limits.storage_buffers - bindings)
        whole_blocks = all(shard.rows % ((1 + gated) * BLOCK) == 0 for shard in weight.shards)
        if form and form.int8 and not (whole_blocks and self.tuning.subgroup_size):
            form = None
        int8 = form is not None and form.int8
        variant = self.tuning.matmul_vec(
            VecShape(k, result.width, rows, weight.dtype, gated, quantize=int8)
        )
        keep = form is None or form.keep
        outputs: list[Operand] = [result] if keep else []
        next_norm = form.norm if form else None
        if form is not None:
            outputs += self.prepare(result, form, rows)
        if next_norm is not None:
            outputs.append(next_norm.attrs["weight"].buffer)
        for shard in weight.shards:
            n = shard.rows // 2 if gated else shard.rows
            self.emit(
                "matmul_vec",
                [*self.multiplied(shard, inputs), *added, *outputs],
                self._vec_grid(result, -(-n // variant.per_workgroup), variant.row_each),
                params
                | weight.grouping.params
                | {
                    "N": n,
                    "START": shard.start,
                    "WG": variant.workgroup,
                    "TEAM": variant.team,
                    "SUBGROUPS": self.device.subgroups,
                    "ROWS": 1 if variant.row_each else rows,
                    "ROW_EACH": variant.row_each,
                    "OUTPUTS": variant.outputs,
                    "UNROLL": variant.unroll,
                    "TABLE_COPIES": variant.copies,
                    "GATED": gated,
                    "KEEP": keep,
                    "QUANTIZE": int8,
                    "NEXT_NORM": next_norm is not None,
                },
                moved=shard.nbytes,
                flops=2 * rows * shard.rows * k,
            )

    def _lower_head_linear(self, value: Value) -> None:
        self.head_linear(value)

    def head_linear(self, value: Value, key: LatentKey | None = None) -> bool:
        """Emit the kernels of the op `value`. key: what is to be written beside it. Returns whether
        it is."""
        weight: GpuTensor = value.attrs["weight"]
        k, kept = weight.shape[1], value.attrs["kept"]
        source, rope = value.inputs[0], None
        if source in self.absorbed:
            rope, source = source.attrs["rope"], source.inputs[0]
        head = value.inputs[0].width // value.attrs["heads"]
        vectors = not any(n % 4 for n in (k, head, self.source(source)[2]))
        if not self.kind.vec and vectors and (rope is not None or not kept):
            if rope is not None:
                self._rope(source, value, rope, kept, head)
            self._head_matmul(value, source)
            return False
        return self._head_linear(value, source, rope, key)

    def _head_linear(
        self, value: Value, source: Value, rope: Rope | None, key: LatentKey | None
    ) -> bool:
        """For a few rows, and for what no other kernel does: value = the op of that name, perhaps
        after a turn."""
        weight: GpuTensor = value.attrs["weight"]
        heads, k = value.attrs["heads"], weight.shape[1]
        n = weight.shape[0] // heads
        x, x_stride, offset = self.source(source)
        kept = value.attrs["kept"]
        variant = self.tuning.head_linear(self.kind.rows, k)
        outputs: list[Operand] = [value]
        form = self.next_form(value, self.device.limits.storage_buffers - 4)
        whole_halves = variant.outputs % HALF == 0 and n % variant.outputs == 0
        if kept or not whole_halves or (form and (form.norm is not None or form.keep)):
            form = None
        if form is not None:
            outputs = self.prepare(value, form, self.kind.rows)
        last: list[Operand] = [] if rope is None else [rope.table]
        bindings = 4 + len(weight.shards[0].buffers)
        if (
            key is None
            or key.rope is not rope
            or self.kind.rows > 1
            or len(weight.shards) > 1
            or bindings + len(key.operands) > self.device.limits.storage_buffers
            or variant.storage(k) + key.storage > self.device.limits.workgroup_storage
        ):
            key = None
        if key is not None:
            last += key.operands
        tiles = -(-n // variant.outputs) + (kept > 0) + (key is not None)
        for shard in weight.shards:
            self.emit(
                "head_linear",
                (self.step, *shard.buffers, x, *outputs, *last),
                tile_grid(tiles, variant.rows, shard.rows // n),
                weight.grouping.params
                | {
                    "WEIGHT": weight.dtype,
                    "K": k,
                    "N": n,
                    "KEPT": kept,
                    "ROPE": rope is not None,
                    "ROTARY_DIM": kept if rope is not None else 0,
                    "INTERLEAVED": rope is not None and rope.interleaved,
                    "X_HEAD": value.inputs[0].width // heads,
                    "X_STRIDE": x_stride,
                    "X_OFFSET": offset,
                    "Y_STRIDE": stride(value.width),
                    "FIRST_HEAD": shard.start // n,
                    "ROWS": variant.rows,
                    "WG": variant.workgroup,
                    "TEAM": variant.team,
                    "SUBGROUPS": self.device.subgroups,
                    "QUANTIZE": form is not None,
                    "LATENT": key is not None,
                }
                | (key.params if key is not None else NO_KEY),
                moved=shard.nbytes,
                flops=per_row(2 * shard.rows * k),
            )
        return key is not None

    def _head_matmul(self, value: Value, source: Value) -> None:
        """The same for many rows, but for what is kept: a product of each head in one dispatch."""
        weight: GpuTensor = value.attrs["weight"]
        heads, k = value.attrs["heads"], weight.shape[1]
        n, x_head, y_head = weight.shape[0] // heads, source.width // heads, value.width // heads
        x, x_stride, offset = self.source(source)
        for shard in weight.shards:
            first, count = shard.start // n, shard.rows // n
            tile = self.tuning.matmul(self.kind.rows, n, k, False, count)
            self.emit(
                "matmul",
                [*self.multiplied(shard, [x]), value],
                tile_grid(-(-n // tile.columns), tile.rows, count),
                weight.grouping.params
                | {
                    "WEIGHT": weight.dtype,
                    "K": k,
                    "N": n,
                    "START": first * y_head + value.attrs["kept"],
                    "X_STRIDE": x_stride,
                    "X_OFFSET": offset + first * x_head + x_head - k,
                    "X_HEAD": x_head,
                    "Y_HEAD": y_head,
                    "Y_STRIDE": stride(value.width),
                    "SCALE": 1.0,
                    "ACTIVATION": "none",
                    "GATED": False,
                    "BIAS": False,
                    "RESIDUAL": False,
                    "SPLIT_ROWS": 0,
                    "SOFTWARE": self.device.software,
                }
                | _UNGROUPED
                | tile.params,
                moved=shard.nbytes,
                flops=per_row(2 * shard.rows * k),
            )

    # Activations as projections want to read them

    def next_form(self, value: Value, bindings: int) -> Form | None:
        """The form of an activation that the kernel which makes it also writes, where it has so
        many bindings left for what it writes."""
        form = self.fusion.next_form(value) if self.fusion else None
        if form is None or form.bindings > bindings:
            return None
        if form.norm and form.norm.of_logits and self.kind.rows > 1:
            return None  # the logits' rows are copied first
        if form.int8 and (self.kind.rows > 1 or value.width % BLOCK):
            return None
        return form

    def prepare(self, x: Value, form: Form, rows: int) -> list[Operand]:
        """Where a form of x goes: its values times the norm's weights; or, as int8, integers, and
        the scale and the sum of squares of every half of a block."""
        floats: list[Operand] = [Scratch(4 * rows * stride(x.width))]
        operands = _int8_operands(x, rows) if form.int8 else floats
        self.prepared[x, form.norm, form.int8] = operands
        return operands

    def projected(self, value: Value) -> tuple[list[Operand], dict[str, Any]]:
        """What the projection `value` reads besides its weights: the activation in their form and
        what belongs to that, and the parameters of the norm that goes into a kernel of few rows."""
        weight: GpuTensor = value.attrs["weight"]
        source, norm = value.inputs[0], None
        if source in self.absorbed:
            norm, source = source, source.inputs[0]
        x, _, offset = self.source(source)
        if offset:
            raise ValueError("a projection reads whole rows")
        inputs: list[Operand] = [x]
        int8 = weight.dtype in INTEGERS
        scaled = not int8 and (x, norm, False) in self.prepared
        if int8:
            inputs = self.int8_form(value, x, norm)
        elif scaled:
            inputs += self.prepared[x, norm, False]
        elif norm is not None:
            inputs.append(norm.attrs["weight"].buffer)
        eps = 0.0 if norm is None else float(norm.attrs["eps"])
        return inputs, {"NORM": norm is not None, "SCALED": scaled, "EPS": eps}

    def int8_form(self, value: Value, x: Value, norm: Value | None) -> list[Operand]:
        """The int8 form of x that the projection `value` reads, made here unless x came with it."""
        order: Buffer | None = value.attrs["weight"].order
        if order is None and (x, norm, True) in self.prepared:
            return self.prepared[x, norm, True]
        if order is None:
            operands = self.prepare(x, Form(norm, int8=True), self.rows(value))
        else:  # nobody else's
            operands = _int8_operands(x, self.rows(value))
        norms = [] if norm is None else [norm.attrs["weight"].buffer]
        orders = [] if order is None else [order]
        self.emit(
            "quantize",
            (x, *operands, *norms, *orders),
            self.row_grid(value, -(-x.width // (8 * BLOCK))),
            {
                "K": x.width,
                "X_STRIDE": stride(x.width),
                "NORM": norm is not None,
                "ORDER": order is not None,
                "SHARED": self.rows(value) > MAX_VEC_ROWS,
                "QUANTIZE": True,
            },
        )
        return operands

    def _lower_add(self, value: Value) -> None:
        a, b = value.inputs
        for linear, other in ((b, a), (a, b)):
            if linear.op == "add" and linear in self.absorbed:  # of two projections
                first, second = linear.inputs
                sum_so_far = Value(value.ops, "add", value.width, of_logits=value.of_logits)
                self._onto(first, sum_so_far, other)
                self._onto(second, value, sum_so_far)
                return
            if linear in self.absorbed:
                self._onto(linear, value, other)
                return
        self._elementwise("elementwise_add", value)

    def _onto(self, value: Value, result: Value, residual: Value) -> None:
        """result = the norm, or the projection, perhaps times a sigmoid, `value` + residual."""
        if value.op == "rmsnorm":
            self._rmsnorm(value, result, residual)
        elif value.op == "expert_down":
            lower_down(self, value, result, residual)
        elif value.op == "sigmoid_gate":
            linear, gate = value.inputs
            self._linear(linear, result, residual, gate=gate)
        else:
            self._linear(value, result, residual)

    def _lower_mul(self, value: Value) -> None:
        act, up = value.inputs
        if act not in self.absorbed:
            self._elementwise("elementwise_mul", value)
            return
        (source,) = act.inputs
        if source.op != "slice":
            self._linear(source, value, activation=act.attrs["function"], factors=up)
        elif source.inputs[0] in self.absorbed:
            self._linear(source.inputs[0], value, activation=act.attrs["function"], gated=True)
        else:
            self._activation(act, value, gated=True)

    def _lower_activation(self, value: Value) -> None:
        (source,) = value.inputs
        if source in self.absorbed:
            self._linear(source, value, activation=value.attrs["function"])
        else:
            self._activation(value, value, gated=False)

    def _activation(self, value: Value, result: Value, gated: bool) -> None:
        """result = what the activation op `value` computes, times what lies beside its input."""
        x, x_stride, offset = self.source(value.inputs[0])
        self.emit(
            "activation",
            (x, result),
            self.row_grid(result, -(-result.width // 64)),
            {
                "ACTIVATION": value.attrs["function"],
                "WIDTH": result.width,
                "X_STRIDE": x_stride,
                "X_OFFSET": offset,
                "Y_STRIDE": stride(result.width),
                "GATED": gated,
            },
            moved=lambda rows, kv_len: 4 * rows * result.width * (3 if gated else 2),
        )

    def _lower_softcap(self, value: Value) -> None:
        self._each("softcap", value, {"SOFTCAP": float(value.attrs["cap"])})

    def _lower_clip(self, value: Value) -> None:
        self._each("clip", value, {"LIMIT": float(value.attrs["limit"])})

    def _lower_xielu(self, value: Value) -> None:
        self._each("xielu", value, {}, value.attrs["shape"].buffer)

    def _lower_scale(self, value: Value) -> None:
        factor: GpuTensor = value.attrs["factor"]
        (x,) = value.inputs
        if x not in self.absorbed:
            self._each("scale", value, {}, factor.buffer)
            return
        a, b = x.inputs
        norm, residual = (b, a) if b in self.absorbed else (a, b)
        self._rmsnorm(norm, value, residual, factor)

    def _lower_position_scale(self, value: Value) -> None:
        params = {"BETA": float(value.attrs["beta"]), "INTERVAL": value.attrs["interval"]}
        self._each("position_scale", value, params, self.step)

    def _each(self, name: str, value: Value, params: dict[str, Any], *operands: Operand) -> None:
        """A kernel that computes every value from one."""
        x, x_stride, offset = self.source(value.inputs[0])
        self.emit(
            name,
            (*operands, x, value),
            self.row_grid(value, -(-value.width // 64)),
            params
            | {
                "WIDTH": value.width,
                "X_STRIDE": x_stride,
                "X_OFFSET": offset,
                "Y_STRIDE": stride(value.width),
            },
            moved=lambda rows, kv_len: 8 * rows * value.width,
        )

    def _elementwise(self, name: str, value: Value) -> None:
        (a, a_stride, a_offset), (b, b_stride, b_offset) = map(self.source, value.inputs)
        self.emit(
            name,
            (a, b, value),
            self.row_grid(value, -(-value.width // 64)),
            {
                "WIDTH": value.width,
                "A_STRIDE": a_stride,
                "A_OFFSET": a_offset,
                "B_STRIDE": b_stride,
                "B_OFFSET": b_offset,
                "Y_STRIDE": stride(value.width),
            },
            moved=lambda rows, kv_len: 12 * rows * value.width,
        )

    def _lower_logits_rows(self, value: Value) -> None:
        x, x_stride, _ = self.source(value.inputs[0])
        if self.kind.logits is None or self.kind.rows == 1:
            self.same[value] = x
            return
        self.emit(
            "take_rows",
            (self.step, x, value),
            (-(-x_stride // 64), self.kind.logits, 1),
            {"STRIDE": x_stride},
        )

    def _lower_rope(self, value: Value) -> None:
        head = value.attrs["head_dim"]
        self._rope(value.inputs[0], value, value.attrs["rope"], head, head)

    def _rope(self, source: Value, result: Value, rope: Rope, width: int, head: int) -> None:
        """The first `width` of the `head` values of each head turned, to where the heads of the
        result begin."""
        x, x_stride, offset = self.source(source)
        heads = source.width // head
        self.emit(
            "rope",
            (self.step, rope.table, x, result),
            self.row_grid(result, heads),
            {
                "HEAD_DIM": width,
                "ROTARY_DIM": rope.rotary_dim,
                "INTERLEAVED": rope.interleaved,
                "X_HEAD": head,
                "X_STRIDE": x_stride,
                "X_OFFSET": offset,
                "Y_HEAD": result.width // heads,
                "Y_STRIDE": stride(result.width),
            },
        )

    def _lower_attention(self, value: Value) -> None:
        lower_attention(self, value, value)

    def _lower_route(self, value: Value) -> None:
        lower_route(self, value)

    def _lower_expert_gate_up(self, value: Value) -> None:
        lower_gate_up(self, value)

    def _lower_expert_down(self, value: Value) -> None:
        lower_down(self, value, value)

    def _lower_sigmoid_gate(self, value: Value) -> None:
        if value.inputs[0] in self.absorbed:
            lower_attention(self, value.inputs[0], value)
        else:
            self.sigmoid_gate(value)

    def sigmoid_gate(self, value: Value) -> None:
        """The kernel that only multiplies by the sigmoids."""
        (x, x_stride, _), (gate, gate_stride, gate_offset) = map(self.source, value.inputs)
        self.emit(
            "sigmoid_gate",
            (x, gate, value),
            self.row_grid(value, -(-value.width // 64)),
            {
                "WIDTH": value.width,
                "STRIDE": x_stride,
                "GATE_STRIDE": gate_stride,
                "GATE_OFFSET": gate_offset,
                "GATES": value.inputs[1].width,
            },
            moved=lambda rows, kv_len: 8 * rows * value.width,
        )

    def _lower_short_conv(self, value: Value) -> None:
        lower_short_conv(self, value)

    def _lower_delta_rule(self, value: Value) -> None:
        lower_delta_rule(self, value)

    def _lower_ssm_scan(self, value: Value) -> None:
        lower_ssm_scan(self, value)

    # Placing

    @property
    def sizes(self) -> list[int]:
        """What the activations need of an arena."""
        return [slot.nbytes for slot in colour(self.kernels, self._nbytes)]

    def place(self, arena: Arena) -> DispatchPlan:
        """Give every activation a buffer of the arena, compile, bind."""
        arena.reserve(self.sizes)
        slots = colour(self.kernels, self._nbytes)
        found = {operand: i for i, slot in enumerate(slots) for operand in slot.operands}
        self.device.pipelines(kernel.spec for kernel in self.kernels)

        def buffer(operand: Operand) -> Buffer:
            if isinstance(operand, Buffer):
                return operand
            if isinstance(operand, Value):
                if operand is self.output:
                    return self.output_buffer
                if operand.op == "input":
                    given: Buffer = operand.attrs["buffer"]
                    return given
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

    def _nbytes(self, operand: Value | Scratch) -> int | None:
        if isinstance(operand, Scratch):
            return operand.nbytes
        if operand is self.output or operand.op == "input":
            return None
        return 4 * padded_rows(self.rows(operand)) * stride(operand.width)


def _int8_operands(x: Value, rows: int) -> list[Operand]:
    """The integers, and the scales and sums of squares of the halves of their blocks."""
    blocks = -(-x.width // BLOCK) * padded_rows(rows)
    return [Scratch(blocks * BLOCK), Scratch(blocks * 16)]


def padded_rows(rows: int) -> int:
    """Rows that the buffer of an activation has: matmul reads and writes whole tiles."""
    return rows if rows <= MAX_VEC_ROWS else -(-rows // 128) * 128


def tile_grid(x: int, rows_per_tile: int, z: int = 1) -> Grid:
    return lambda rows, kv_len: (x, -(-rows // rows_per_tile), z)


def per_row(count: int) -> Count:
    """A count that grows with the rows."""
    return lambda rows, kv_len: count * rows


def constant(count: int) -> Count:
    """A count that does not depend on the step."""
    return lambda rows, kv_len: count
