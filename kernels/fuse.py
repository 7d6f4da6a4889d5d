"""Which ops of a traced forward share a kernel.

rmsnorm -> linear                     the norm goes into matmul_vec (decode)
route -> experts                      the choice goes into their first projection (decode)
linear -> + residual                  the sum goes into the projection
a + b -> + residual                   each adds what came before it, if both are projections
linear * sigmoid(gate) in such a sum  the gate goes into the projection (decode)
linear -> activation                  into the projection
activation(gate) * up                 into the gate/up projection, or one kernel
norm, rope of q and k, cache write    rope_kv_write, or attention (decode)
activation -> norm or int8 -> linear  the kernel that makes the activation prepares it (decode)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from infer.kernels.ops import Rope, Value
from infer.kernels.tensor import INTEGERS

PROJECTIONS = ("linear", "expert_gate_up", "expert_down")  # of whole rows of their first input


@dataclass(frozen=True)
class Form:
    """How a projection reads an activation: after a norm, as int8; alone: nothing else reads it."""

    norm: Value | None
    int8: bool
    alone: bool = False

    @property
    def keep(self) -> bool:
        """Whether the activation itself is needed too: for its squares, or by another reader."""
        return not (self.int8 and self.alone)

    @property
    def bindings(self) -> int:
        """What the kernel that makes it binds: the activation, the form, the norm's weights."""
        return self.keep + (2 if self.int8 else 1) + (self.norm is not None)


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
            if users and all(user.op in PROJECTIONS for user in users):
                self.absorbed.add(value)
        elif value.op == "route" and self.vec:
            readers = [user.op for user in self.consumers[value]]
            alone = readers[:1] == ["expert_gate_up"] and set(readers[1:]) <= {"expert_down"}
            if alone and value.attrs["correction"] is value.attrs["expert_scales"] is None:
                self.absorbed.add(value)
        elif value.op == "add":
            linear, both = self._residual_of(value), self._sum_in(value)
            if linear is not None:
                self.absorbed.add(linear)
            elif both is not None:
                first = both.inputs[0]
                self.absorbed.update((both, first, self._ungated(first)))
        elif value.op == "activation":
            (source,) = value.inputs
            if source.op == "linear" and self.consumers[source] == [value]:
                self.absorbed.add(source)
        elif value.op == "mul":
            halves = self._gated(value)
            if halves is not None:
                self.absorbed.update(value.inputs)
                if _is_whole(halves):
                    self.absorbed.add(halves)
        elif value.op == "attention" and self.projection(value) is not None:
            self.absorbed.update(self._turned(value))

    def _whole_row(self, norm: Value) -> bool:
        whole = norm.attrs["weight"].shape[0] == norm.width and norm.attrs["groups"] == 1
        return bool(whole and norm.inputs[0].op != "slice")

    def _residual_of(self, value: Value) -> Value | None:
        """The projection whose result is only added to something: the later operand first."""
        for linear, other in (value.inputs[::-1], value.inputs):
            alone = self.consumers[linear] == [value] and other is not linear
            if linear.op in ("linear", "expert_down") and alone:
                return linear if other.op != "slice" and linear not in self.absorbed else None
        return None

    def _sum_in(self, value: Value) -> Value | None:
        """The sum of two projections, of which the second has taken in the first (perhaps times a
        sigmoid), that is only added to something."""
        for both, other in (value.inputs[::-1], value.inputs):
            if both.op != "add" or self.consumers[both] != [value] or other.op == "slice":
                continue
            first, second = both.inputs
            linear = self._ungated(first)
            alone = self.consumers[first] == [both] and linear not in self.absorbed
            if linear.op == "linear" and alone and second in self.absorbed:
                return both
        return None

    def _ungated(self, value: Value) -> Value:
        """The projection that `value` is, but for the sigmoid of one number for each row."""
        if value.op != "sigmoid_gate" or value.inputs[1].width > 1 or not self.vec:
            return value
        linear = value.inputs[0]
        alone = self.consumers[linear] == [value] and linear.attrs.get("bias") is None
        return linear if alone else value

    def _gated(self, value: Value) -> Value | None:
        """The activation whose halves are gate and up, when value is activation(gate) * up."""
        act, up = value.inputs
        if act.op != "activation" or up.op != "slice" or act.inputs[0].op != "slice":
            return None
        gate = act.inputs[0]
        source = gate.inputs[0]
        halves = (gate.attrs["offset"], up.attrs["offset"]) == (0, value.width)
        alone = [self.consumers[v] for v in (gate, act, up)] == [[act], [value], [value]]
        both = source is up.inputs[0] and self.consumers[source] == [gate, up]
        return source if halves and alone and both else None

    def next_form(self, value: Value) -> Form | None:
        """The one form, if there is one, in which projections want to read an activation that is
        made for them: int8, or multiplied by the weights of the norm that goes into them. Where
        some read int8 and others not, as a router does, those read the activation itself."""
        forms: set[Form] = set()
        others = False
        for user in self._readers(value):
            norm = user if user.op == "rmsnorm" and user in self.absorbed else None
            linears = self.consumers[user] if norm else [user]
            int8 = {linear.op in PROJECTIONS and _integers(linear) for linear in linears}
            if any(_ordered(linear) for linear in linears):
                others = True
                continue
            if True in int8 or norm:
                forms.add(Form(norm, True in int8))
            others = others or len(int8) > 1 or not (norm or True in int8)
        return replace(forms.pop(), alone=not others) if len(forms) == 1 else None

    def _readers(self, value: Value) -> list[Value]:
        """Its consumers; a choice of rows for the logits is none where there is one row."""
        found: list[Value] = []
        for user in self.consumers.get(value, []):  # none of what lowering has put in between
            found += self.consumers[user] if user.op == "logits_rows" else [user]
        return found

    def projection(self, value: Value) -> Value | None:
        """The q, k, v projection that attention takes apart, heads perhaps normed and turned."""
        if len(value.inputs) == 1:  # keys and values are in the cache already
            return None
        q, q_norm, q_rope = self.head_chain(value.inputs[0])
        k, k_norm, k_rope = self.head_chain(value.inputs[1])
        parts = (q, k, value.inputs[2])
        if q_rope is not k_rope or (q_norm is None) != (k_norm is None):
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


def _is_whole(source: Value) -> bool:
    """Whether it is a projection whose kernel has every row of the weight, and scales none."""
    linear = source.op == "linear" and source.attrs["scale"] == 1.0
    return linear and len(source.attrs["weight"].shards) == 1


def _ordered(linear: Value) -> bool:
    """Whether it wants the columns of its input in an order of its own."""
    return linear.op == "linear" and linear.attrs["weight"].order is not None


def _integers(linear: Value) -> bool:
    return linear.attrs["weight"].dtype in INTEGERS
