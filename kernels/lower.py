"""From traced ops to dispatches: which kernel runs each op, what is fused, where activations lie.

Every op has a kernel of its own. With `fuse`, groups of ops share one:
  rmsnorm -> linear                     the norm goes into matmul_vec (decode)
  linear -> + residual                  the sum goes into the projection
  silu(gate) * up                       one kernel; into the gate/up projection (decode)
  norm, rope of q and k, cache write    rope_kv_write
  scores, softmax, weighted sum         attention (decode) or attention_tiled (prefill)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from infer.kernels.device import Buffer, Device
from infer.kernels.kv_cache import PAGE, LayerCache
from infer.kernels.ops import Ops, Rope, Value, stride
from infer.kernels.plan import Dispatch, DispatchPlan, Grid, dispatch, linear_grid
from infer.kernels.shader import KernelSpec
from infer.kernels.tensor import ITEMSIZE, GpuTensor
from infer.kernels.tuning import AttentionVariant, Tuning, power_of_two

MAX_VEC_ROWS = 8
Count = Callable[[int, int], int]


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


@dataclass(eq=False)
class Scratch:
    """Memory between two kernels that is not an activation: so many bytes."""

    nbytes: int


Operand = Value | Scratch | Buffer


@dataclass(frozen=True, eq=False)
class Kernel:
    """A dispatch before its buffers are known. operands are in the order of the bindings; which
    of them are written is in the shader."""

    spec: KernelSpec
    operands: tuple[Operand, ...]
    grid: Grid
    moved: Count
    flops: Count
    head: bool


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
        self.device, self.kind, self.step, self.fuse = device, kind, step, fuse
        self.output, self.output_buffer = output, output_buffer
        self.tuning = tuning or Tuning(device)
        self.consumers: dict[Value, list[Value]] = {value: [] for value in ops.values}
        for value in ops.values:
            for source in value.inputs:
                self.consumers[source].append(value)
        self.absorbed: set[Value] = set()
        self.same: dict[Value, Value] = {}  # ops that turn out to be their input
        self.kernels: list[Kernel] = []
        if fuse:
            for value in ops.values:
                self._fuse(value)
        for value in ops.values:
            if value not in self.absorbed:
                getattr(self, f"_lower_{value.op}")(value)

    # What is fused

    def _fuse(self, value: Value) -> None:
        if value.op == "rmsnorm" and self.kind.vec and self._whole_row(value):
            users = self.consumers[value]
            if users and all(user.op == "linear" for user in users):
                self.absorbed.add(value)
        elif value.op == "add":
            linear = self._residual_of(value)
            if linear is not None:
                self.absorbed.add(linear)
        elif value.op == "mul":
            linear = self._gated(value)
            if linear is not None:
                self.absorbed.update(value.inputs)
                if self.kind.vec and len(linear.attrs["weight"].shards) == 1:
                    self.absorbed.add(linear)
        elif value.op == "attention" and self._projection(value) is not None:
            self.absorbed.update(self._turned(value))

    def _whole_row(self, norm: Value) -> bool:
        return bool(norm.attrs["weight"].shape[0] == norm.width and norm.inputs[0].op != "slice")

    def _residual_of(self, value: Value) -> Value | None:
        """The projection whose result is only added to something: the later operand first."""
        for linear, other in (value.inputs[::-1], value.inputs):
            if linear.op == "linear" and self.consumers[linear] == [value] and other is not linear:
                return linear if other.op != "slice" and linear not in self.absorbed else None
        return None

    def _gated(self, value: Value) -> Value | None:
        """The projection whose halves are gate and up, when value is silu(gate) * up."""
        silu, up = value.inputs
        if silu.op != "silu" or up.op != "slice" or silu.inputs[0].op != "slice":
            return None
        gate = silu.inputs[0]
        linear = gate.inputs[0]
        halves = (gate.attrs["offset"], up.attrs["offset"]) == (0, value.width)
        alone = [self.consumers[v] for v in (gate, silu, up)] == [[silu], [value], [value]]
        both = linear is up.inputs[0] and self.consumers[linear] == [gate, up]
        return linear if halves and alone and both and linear.op == "linear" else None

    def _projection(self, value: Value) -> Value | None:
        """The q, k, v projection whose slices attention takes, turned and perhaps normed."""
        (q, q_norm, q_rope), (k, k_norm, k_rope), v = (
            self._head_chain(value.inputs[0]),
            self._head_chain(value.inputs[1]),
            value.inputs[2],
        )
        parts = (q, k, v)
        if any(part.op != "slice" for part in parts) or q_rope is None or k_rope is None:
            return None
        starts = [part.attrs["offset"] for part in parts]
        fits = starts == [0, q.width, q.width + k.width] and q_rope is k_rope
        fits = fits and (q_norm is None) == (k_norm is None)
        fits = fits and all(part.inputs[0] is q.inputs[0] for part in parts)
        if q_norm is not None and k_norm is not None:
            fits = fits and q_norm.attrs["eps"] == k_norm.attrs["eps"]
        alone = all(len(self.consumers[turned]) == 1 for turned in self._turned(value))
        return q.inputs[0] if fits and alone else None

    @staticmethod
    def _turned(value: Value) -> list[Value]:
        """The norms and ropes between attention and the slices of its projection."""
        found = []
        for source in value.inputs[:2]:
            while source.op in ("rope", "rmsnorm"):
                found.append(source)
                source = source.inputs[0]
        return found

    @staticmethod
    def _head_chain(value: Value) -> tuple[Value, Value | None, Rope | None]:
        rope = norm = None
        if value.op == "rope":
            rope, value = value.attrs["rope"], value.inputs[0]
        if value.op == "rmsnorm":
            norm, value = value, value.inputs[0]
        return value, norm, rope

    # Kernels of each op

    def _emit(
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

    def _rows(self, value: Value) -> int:
        """Rows of an activation in this kind of step, at most."""
        if value.of_logits and self.kind.logits is not None:
            return self.kind.logits
        return self.kind.rows

    def _row_grid(self, value: Value, x: int) -> Grid:
        if value.of_logits and self.kind.logits is not None:
            return (x, self.kind.logits, 1)
        return lambda rows, kv_len: (x, rows, 1)

    def _source(self, value: Value) -> tuple[Value, int, int]:
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
        weight: GpuTensor = value.attrs["weight"]
        groups = stride(value.width) // 8
        for shard in weight.shards:
            self._emit(
                "embedding",
                (self.step, shard.buffer, value),
                self._row_grid(value, -(-groups // 64)),
                {
                    "WIDTH": value.width,
                    "WEIGHT": weight.dtype,
                    "START": shard.start,
                    "SHARD_ROWS": shard.rows,
                    "SCALE": float(value.attrs["scale"]),
                },
            )

    def _lower_rmsnorm(self, value: Value) -> None:
        weight: GpuTensor = value.attrs["weight"]
        (width,) = weight.shape
        x, x_stride, offset = self._source(value.inputs[0])
        self._emit(
            "rmsnorm",
            (x, weight.buffer, value),
            self._row_grid(value, value.width // width),
            {
                "WG": self.tuning.workgroup(width),
                "SUBGROUPS": self.device.subgroups,
                "WIDTH": width,
                "EPS": float(value.attrs["eps"]),
                "X_STRIDE": x_stride,
                "X_OFFSET": offset,
                "Y_STRIDE": stride(value.width),
            },
            moved=lambda rows, kv_len: 8 * rows * value.width,
        )

    def _lower_linear(self, value: Value) -> None:
        self._linear(value, value)

    def _linear(
        self, value: Value, result: Value, residual: Value | None = None, gated: bool = False
    ) -> None:
        """result = what the linear op `value` computes, with what was fused into it."""
        weight: GpuTensor = value.attrs["weight"]
        bias: GpuTensor | None = value.attrs["bias"]
        source, norm = value.inputs[0], None
        if source in self.absorbed:
            norm, source = source, source.inputs[0]
        x, _, offset = self._source(source)
        if offset:
            raise ValueError("a projection reads whole rows")
        k = weight.shape[1]
        rows = self._rows(value)
        after: list[Operand] = []
        if norm is not None:
            after.append(norm.attrs["weight"].buffer)
        if bias is not None:
            after.append(bias.buffer)
        if residual is not None:
            after.append(self._source(residual)[0])
        for shard in weight.shards:
            n = shard.rows // 2 if gated else shard.rows
            params = {
                "WEIGHT": weight.dtype,
                "K": k,
                "N": n,
                "START": shard.start,
                "Y_STRIDE": stride(result.width),
                "BIAS": bias is not None,
                "RESIDUAL": residual is not None,
            }
            weight_bytes = shard.rows * stride(k) * ITEMSIZE[weight.dtype]
            operands = (shard.buffer, x, result, *after)
            if rows <= MAX_VEC_ROWS:
                variant = self.tuning.matmul_vec(k, n, rows, gated)
                self._emit(
                    "matmul_vec",
                    operands,
                    linear_grid(-(-n // variant.outputs), self.device.limits.max_workgroups),
                    params
                    | {
                        "WG": variant.workgroup,
                        "SUBGROUPS": self.device.subgroups,
                        "ROWS": rows,
                        "OUTPUTS": variant.outputs,
                        "UNROLL": variant.unroll,
                        "NORM": norm is not None,
                        "EPS": float(norm.attrs["eps"]) if norm is not None else 0.0,
                        "GATED": gated,
                    },
                    moved=weight_bytes,
                    flops=2 * rows * shard.rows * k,
                )
            else:
                tile = self.tuning.matmul(rows, n)
                self._emit(
                    "matmul",
                    operands,
                    tile_grid(-(-n // tile.columns), tile.rows),
                    params | {"M_TILE": tile.m_tile, "N_TILE": tile.n_tile, "DOUBLE": tile.double},
                    moved=weight_bytes,
                    flops=per_row(2 * shard.rows * k),
                )

    def _lower_add(self, value: Value) -> None:
        a, b = value.inputs
        for linear, other in ((b, a), (a, b)):
            if linear in self.absorbed:
                self._linear(linear, value, residual=other)
                return
        self._elementwise("elementwise_add", value)

    def _lower_mul(self, value: Value) -> None:
        silu, up = value.inputs
        if silu not in self.absorbed:
            self._elementwise("elementwise_mul", value)
            return
        linear = up.inputs[0]
        if linear in self.absorbed:
            self._linear(linear, value, gated=True)
        else:
            self._silu(silu.inputs[0], value, gated=True)

    def _lower_silu(self, value: Value) -> None:
        self._silu(value.inputs[0], value, gated=False)

    def _silu(self, source: Value, result: Value, gated: bool) -> None:
        x, x_stride, offset = self._source(source)
        self._emit(
            "silu",
            (x, result),
            self._row_grid(result, -(-result.width // 64)),
            {
                "WIDTH": result.width,
                "X_STRIDE": x_stride,
                "X_OFFSET": offset,
                "Y_STRIDE": stride(result.width),
                "GATED": gated,
            },
            moved=lambda rows, kv_len: 4 * rows * result.width * (3 if gated else 2),
        )

    def _elementwise(self, name: str, value: Value) -> None:
        (a, a_stride, a_offset), (b, b_stride, b_offset) = map(self._source, value.inputs)
        self._emit(
            name,
            (a, b, value),
            self._row_grid(value, -(-value.width // 64)),
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
        x, x_stride, _ = self._source(value.inputs[0])
        if self.kind.logits is None or self.kind.rows == 1:
            self.same[value] = x
            return
        self._emit(
            "take_rows",
            (self.step, x, value),
            (-(-x_stride // 64), self.kind.logits, 1),
            {"STRIDE": x_stride},
        )

    def _lower_rope(self, value: Value) -> None:
        rope: Rope = value.attrs["rope"]
        x, x_stride, offset = self._source(value.inputs[0])
        self._emit(
            "rope",
            (self.step, rope.table, x, value),
            self._row_grid(value, value.width // value.attrs["head_dim"]),
            {
                "HEAD_DIM": value.attrs["head_dim"],
                "ROTARY_DIM": rope.rotary_dim,
                "INTERLEAVED": rope.interleaved,
                "X_STRIDE": x_stride,
                "X_OFFSET": offset,
                "Y_STRIDE": stride(value.width),
            },
        )

    # Attention

    def _lower_attention(self, value: Value) -> None:
        cache: LayerCache = value.attrs["cache"]
        projection = self._projection(value) if self.fuse else None
        if projection is not None:
            query: Value = self._rope_kv_write(value, projection)
        else:
            query = value.inputs[0]
            self._kv_write(value)
        q, q_stride, q_offset = self._source(query)
        group = value.width // (cache.n_kv_heads * cache.head_dim)
        common = {
            **_kv_params(cache),
            "WINDOW": value.attrs["window"],
            "GROUP": group,
            "SCALE": float(value.attrs["scale"]),
            "Q_STRIDE": q_stride,
            "Q_OFFSET": q_offset,
        }
        variant = self.tuning.attention(group, cache.n_kv_heads, cache.head_dim)
        if self.fuse and not self.kind.vec:
            self._attention_tiled(value, q, common)
        elif self.fuse and variant is not None:
            self._attention_split(value, q, common, variant)
        else:
            self._attention_chain(value, q, common)

    def _rope_kv_write(self, value: Value, projection: Value) -> Value:
        cache: LayerCache = value.attrs["cache"]
        _, q_norm, rope = self._head_chain(value.inputs[0])
        _, k_norm, _ = self._head_chain(value.inputs[1])
        assert rope is not None  # _projection found it
        x, x_stride, _ = self._source(projection)
        query = Value(value.ops, "query", value.width)
        operands: list[Operand] = [self.step, cache.pages, rope.table, x, query]
        operands += [cache.keys, cache.values]
        if q_norm is not None and k_norm is not None:
            operands += [q_norm.attrs["weight"].buffer, k_norm.attrs["weight"].buffer]
        n_heads = value.width // cache.head_dim
        self._emit(
            "rope_kv_write",
            operands,
            self._row_grid(value, n_heads + 2 * cache.n_kv_heads),
            {
                **_kv_params(cache),
                "WG": max(32, min(128, cache.head_dim // 2)) if cache.head_dim % 64 == 0 else 32,
                "SUBGROUPS": self.device.subgroups,
                "ROTARY_DIM": rope.rotary_dim,
                "INTERLEAVED": rope.interleaved,
                "N_HEADS": n_heads,
                "N_KV_HEADS": cache.n_kv_heads,
                "NORM": q_norm is not None,
                "EPS": float(q_norm.attrs["eps"]) if q_norm is not None else 0.0,
                "X_STRIDE": x_stride,
                "Y_STRIDE": stride(value.width),
            },
        )
        return query

    def _kv_write(self, value: Value) -> None:
        cache: LayerCache = value.attrs["cache"]
        (k, k_stride, k_offset), (v, v_stride, v_offset) = map(self._source, value.inputs[1:])
        self._emit(
            "kv_write",
            (self.step, cache.pages, k, v, cache.keys, cache.values),
            self._row_grid(value, cache.n_kv_heads),
            {
                **_kv_params(cache),
                "K_STRIDE": k_stride,
                "K_OFFSET": k_offset,
                "V_STRIDE": v_stride,
                "V_OFFSET": v_offset,
            },
        )

    def _attention_chain(self, value: Value, q: Value, common: dict[str, Any]) -> None:
        """attention_scores, softmax, weighted_sum."""
        cache: LayerCache = value.attrs["cache"]
        n_heads = value.width // cache.head_dim
        scores_stride = cache.pages_per_sequence * PAGE
        scores = Scratch(4 * self.kind.rows * n_heads * scores_stride)
        probabilities = Scratch(scores.nbytes)
        heads = self._row_grid(value, n_heads)
        self._emit(
            "attention_scores",
            (self.step, cache.pages, q, cache.keys, scores),
            lambda rows, kv_len: (-(-kv_len // 64), n_heads, rows),
            common | {"SCORES_STRIDE": scores_stride},
        )
        self._emit(
            "softmax",
            (self.step, scores, probabilities),
            heads,
            {
                "WG": self.tuning.workgroup(1024),
                "SUBGROUPS": self.device.subgroups,
                "WINDOW": common["WINDOW"],
                "STRIDE": scores_stride,
            },
        )
        weighted = {name: common[name] for name in (*_kv_params(cache), "WINDOW", "GROUP")}
        self._emit(
            "weighted_sum",
            (self.step, cache.pages, probabilities, cache.values, value),
            heads,
            weighted
            | {
                "SCORES_STRIDE": scores_stride,
                "Y_STRIDE": stride(value.width),
                "LANES": self.tuning.lanes(cache.head_dim),
            },
        )

    def _attention_split(
        self, value: Value, q: Value, common: dict[str, Any], variant: AttentionVariant
    ) -> None:
        cache: LayerCache = value.attrs["cache"]
        n_heads = value.width // cache.head_dim
        stored = variant.count(cache.pages_per_sequence * PAGE)
        split = {
            "WINDOW": common["WINDOW"],
            "SPLITS": variant.splits,
            "MIN_SPLIT": variant.min_split,
            "MAX_SPLIT": variant.max_split,
            "STORED_SPLITS": stored,
        }
        partial = Scratch(4 * self.kind.rows * n_heads * stored * cache.head_dim)
        weights = Scratch(8 * self.kind.rows * n_heads * stored)
        window = common["WINDOW"]

        def splits(kv_len: int) -> int:
            return variant.count(min(kv_len, window) if window else kv_len)

        self._emit(
            "attention",
            (self.step, cache.pages, q, cache.keys, cache.values, partial, weights),
            lambda rows, kv_len: (splits(kv_len), n_heads // variant.heads, rows),
            common
            | split
            | {
                "WG": variant.workgroup,
                "HEADS": variant.heads,
                "CLUSTER": variant.cluster,
                "CLUSTER_BITS": variant.cluster.bit_length() - 1,
                "PER_LANE": variant.per_lane,
                "BATCH": variant.batch,
            },
            moved=lambda rows, kv_len: rows * _read_bytes(cache, kv_len, window),
        )
        self._emit(
            "attention_combine",
            (self.step, partial, weights, value),
            lambda rows, kv_len: (n_heads, rows, 1),
            split
            | {
                "WG": max(32, min(128, power_of_two(cache.head_dim))),
                "SUBGROUPS": self.device.subgroups,
                "HEAD_DIM": cache.head_dim,
                "Y_STRIDE": stride(value.width),
            },
        )

    def _attention_tiled(self, value: Value, q: Value, common: dict[str, Any]) -> None:
        cache: LayerCache = value.attrs["cache"]
        n_heads = value.width // cache.head_dim
        lanes = min(64, 256 // (cache.head_dim // 8))
        self._emit(
            "attention_tiled",
            (self.step, cache.pages, q, cache.keys, cache.values, value),
            lambda rows, kv_len: (-(-rows // 64), n_heads, 1),
            common | {"Y_STRIDE": stride(value.width), "ROWS_PER_LANE": -(-64 // lanes)},
            flops=lambda rows, kv_len: 2 * rows * value.width * (2 * kv_len - rows),
        )

    # Placing

    def reserve(self, arena: Arena) -> None:
        """Make room for the activations."""
        arena.reserve([size for _, size in self._colour()])

    def place(self, arena: Arena) -> DispatchPlan:
        """Give every activation a buffer of the arena, compile, bind."""
        self.reserve(arena)
        slots = self._colour()
        found = {
            operand: index for index, (operands, _) in enumerate(slots) for operand in operands
        }
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

    def _nbytes(self, operand: Value | Scratch) -> int:
        if isinstance(operand, Scratch):
            return operand.nbytes
        rows = self._rows(operand)
        if rows > MAX_VEC_ROWS:  # matmul reads and writes whole tiles
            rows = -(-rows // 128) * 128
        return 4 * rows * stride(operand.width)

    def _colour(self) -> list[tuple[list[Operand], int]]:
        """Activations that are never needed at once share a slot; no kernel reads and writes one.

        Returns each slot's operands and its size in bytes.
        """
        last_use: dict[Operand, int] = {}
        for index, kernel in enumerate(self.kernels):
            for operand in kernel.operands:
                last_use[operand] = index
        slots: list[tuple[list[Operand], int]] = []
        free_from: list[int] = []
        seen: set[Operand] = set()
        for index, kernel in enumerate(self.kernels):
            for operand in kernel.operands:
                fixed = isinstance(operand, Buffer) or operand is self.output
                fixed = fixed or (isinstance(operand, Value) and operand.op == "input")
                if fixed or operand in seen:
                    continue
                assert not isinstance(operand, Buffer)
                seen.add(operand)
                size = self._nbytes(operand)
                unused = (slot for slot, free in enumerate(free_from) if free < index)
                slot = next(unused, len(slots))
                if slot == len(slots):
                    slots.append(([], 0))
                    free_from.append(0)
                slots[slot][0].append(operand)
                slots[slot] = (slots[slot][0], max(slots[slot][1], size))
                free_from[slot] = last_use[operand]
        return slots


class Arena:
    """The buffers of activations, shared by all plans of a model: steps run one after another."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.slots: list[Buffer] = []

    def reserve(self, sizes: Sequence[int]) -> None:
        """At least these slots. Plans placed earlier keep the buffers that they were bound to, so
        the largest kind of step should come first."""
        for index, size in enumerate(sizes):
            if index == len(self.slots):
                self.slots.append(self.device.buffer(size, label=f"activations {index}"))
            elif self.slots[index].nbytes < size:
                self.slots[index] = self.device.buffer(size, label=f"activations {index}")


def tile_grid(x: int, rows_per_tile: int) -> Grid:
    return lambda rows, kv_len: (x, -(-rows // rows_per_tile), 1)


def per_row(count: int) -> Count:
    """A count that grows with the rows."""
    return lambda rows, kv_len: count * rows


def constant(count: int) -> Count:
    """A count that does not depend on the step."""
    return lambda rows, kv_len: count


def _kv_params(cache: LayerCache) -> dict[str, Any]:
    return {
        "KV": cache.dtype,
        "HEAD_DIM": cache.head_dim,
        "KV_SLOTS": cache.slots,
        "PAGE": PAGE,
        "PAGES_PER_SEQUENCE": cache.pages_per_sequence,
    }


def _read_bytes(cache: LayerCache, kv_len: int, window: int) -> int:
    """Bytes of keys and values that a row reads."""
    positions = min(kv_len, window) if window else kv_len
    size = 2 if cache.dtype == "f16" else 4
    return 2 * positions * cache.n_kv_heads * cache.head_dim * size
