"""Which ops of a traced forward share a kernel.

rmsnorm -> linear                     the norm goes into matmul_vec (decode)
linear -> + residual                  the sum goes into the projection
silu(gate) * up                       one kernel; into the gate/up projection (decode)
norm, rope of q and k, cache write    rope_kv_write
"""

from __future__ import annotations

from collections.abc import Sequence

from infer.kernels.ops import Rope, Value


class Fusion:
    """The values that another op's kernel computes (`absorbed`), for steps of a few rows (vec) or
    of many."""

    def __init__(self, values: Sequence[Value], *, vec: bool) -> None:
        self.vec = vec
        self.absorbed: set[Value] = set()
        self.consumers: dict[Value, list[Value]] = {value: [] for value in values}
        for value in values:
            for source in value.inputs:
                self.consumers[source].append(value)
        for value in values:
            self._absorb(value)

    def _absorb(self, value: Value) -> None:
        if value.op == "rmsnorm" and self.vec and self._whole_row(value):
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
                if self.vec and len(linear.attrs["weight"].shards) == 1:
                    self.absorbed.add(linear)
        elif value.op == "attention" and self.projection(value) is not None:
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

    def projection(self, value: Value) -> Value | None:
        """The q, k, v projection that attention takes apart, heads turned and perhaps normed."""
        q, q_norm, q_rope = self.head_chain(value.inputs[0])
        k, k_norm, k_rope = self.head_chain(value.inputs[1])
        parts = (q, k, value.inputs[2])
        if q_rope is None or q_rope is not k_rope or (q_norm is None) != (k_norm is None):
            return None
        if any(part.op != "slice" or part.inputs[0] is not q.inputs[0] for part in parts):
            return None
        if [part.attrs["offset"] for part in parts] != [0, q.width, q.width + k.width]:
            return None
        if q_norm and k_norm and q_norm.attrs["eps"] != k_norm.attrs["eps"]:
            return None
        head_dim = value.attrs["cache"].head_dim
        for step in self._turned(value):
            width = step.attrs["head_dim"] if step.op == "rope" else step.attrs["weight"].shape[0]
            if width != head_dim or len(self.consumers[step]) != 1:
                return None
        return q.inputs[0]

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
    def head_chain(value: Value) -> tuple[Value, Value | None, Rope | None]:
        rope = norm = None
        if value.op == "rope":
            rope, value = value.attrs["rope"], value.inputs[0]
        if value.op == "rmsnorm":
            norm, value = value, value.inputs[0]
        return value, norm, rope
