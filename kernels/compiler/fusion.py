"""Which ops of a traced forward share a kernel.

rmsnorm -> linear                     the norm goes into matmul_vec (decode)
route -> experts                      the choice goes into their first projection (decode)
linear -> + residual                  the sum goes into the projection
a + b -> + residual                   each adds what came before it, if both are projections
linear * sigmoid(gate) in such a sum  the gate goes into the projection (decode)
rmsnorm -> + residual -> * factor     the sum and the product go into the norm
linear -> activation                  into the projection
activation(gate) * up                 into the gate/up projection, or one kernel
activation(linear) * factors          the product goes into the projection (decode)
norm, rope of q and k, cache write    rope_kv_write, or attention_decode
attention * sigmoid(gates)            the gates go into attention (decode)
rope -> head_linear                   what it keeps is turned there
rope, norm, write of a latent         latent_write, or head_linear of the queries (decode)
activation -> norm or int8 -> linear  the kernel that makes the activation prepares it (decode)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from infer.kernels.compiler.graph import Rope, Value
from infer.kernels.gpu.tensor import INTEGERS

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
            absorb = getattr(self, f"_absorb_{value.op}", None)
            if absorb is not None:
                absorb(value)

    # What each op absorbs, or is absorbed by

    def _absorb_rmsnorm(self, value: Value) -> None:
        if self.vec and self._whole_row(value) and self._is_projected(value):
            self.absorbed.add(value)

    def _absorb_route(self, value: Value) -> None:
        users, attrs = self.consumers[value], value.attrs
        readers = [user.op for user in users]
        alone = readers[:1] == ["expert_gate_up"] and set(readers[1:]) <= {"expert_down"}
        plain = attrs["expert_scales"] is None and attrs["groups"] == (1, 1)
        # Eight bindings have room for a correction or biases.
        if self.vec and alone and plain and None in (attrs["correction"], users[0].attrs["bias"]):
            self.absorbed.add(value)

    def _absorb_add(self, value: Value) -> None:
        one = self._residual_of(value) or self._norm_in(value)
        both = self._sum_in(value)
        if one is not None:
            self.absorbed.add(one)
        elif both is not None:
            first = both.inputs[0]
            self.absorbed.update((both, first, self._ungated(first)))

    def _absorb_scale(self, value: Value) -> None:
        (total,) = value.inputs
        norms = (part.op == "rmsnorm" and part in self.absorbed for part in total.inputs)
        if total.op == "add" and any(norms) and self.consumers[total] == [value]:
            self.absorbed.add(total)

    def _absorb_activation(self, value: Value) -> None:
        (source,) = value.inputs
        if source.op == "linear" and self.consumers[source] == [value]:
            self.absorbed.add(source)

    def _absorb_mul(self, value: Value) -> None:
        halves = self._gated(value)
        if halves is not None:
            self.absorbed.update(value.inputs)
            if _is_whole(halves):
                self.absorbed.add(halves)
        elif self.vec and self._is_activated_alone(value.inputs[0], value):
            self.absorbed.add(value.inputs[0])

    def _absorb_attention(self, value: Value) -> None:
        if self.projection(value) is not None:
            self.absorbed.update(self._turned(value))
        elif self.latent(value) is not None:
            self.absorbed.update(value.inputs[1:])
            query = value.inputs[0]
            if query.op == "head_linear" and self.consumers[query] == [value]:
                self.absorbed.add(query)

    def _absorb_sigmoid_gate(self, value: Value) -> None:
        attention, gates = value.inputs
        alone = self.consumers[attention] == [value] and gates.width == value.width
        if self.vec and attention.op == "attention" and alone and _is_aligned(gates):
            self.absorbed.add(attention)

    def _absorb_head_linear(self, value: Value) -> None:
        (source,) = value.inputs
        if source.op == "rope" and self.consumers[source] == [value]:
            whole = source.attrs["rope"].rotary_dim == value.attrs["kept"]
            own = source.attrs["head_dim"] * value.attrs["heads"] == source.width
            if whole and own:
                self.absorbed.add(source)

    # What they ask for

    def _whole_row(self, norm: Value) -> bool:
        whole = norm.attrs["weight"].shape[0] == norm.width and norm.attrs["groups"] == 1
        return bool(whole and norm.inputs[0].op != "slice")

    def _is_projected(self, value: Value) -> bool:
        """Whether projections are all that reads it."""
        users = self.consumers[value]
        return bool(users) and all(user.op in PROJECTIONS for user in users)

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

    def _norm_in(self, value: Value) -> Value | None:
        """The norm of whole rows that is only added to something: the later operand first."""
        for norm, other in (value.inputs[::-1], value.inputs):
            alone = self.consumers[norm] == [value] and other.op != "slice"
            if norm.op == "rmsnorm" and alone and self._whole_row(norm):
                return norm
        return None

    def _ungated(self, value: Value) -> Value:
        """The projection that `value` is, but for the sigmoid of one number for each row."""
        if value.op != "sigmoid_gate" or value.inputs[1].width > 1 or not self.vec:
            return value
        linear = value.inputs[0]
        alone = self.consumers[linear] == [value] and linear.attrs.get("bias") is None
        return linear if alone else value

    def _is_activated_alone(self, act: Value, value: Value) -> bool:
        """Whether `act` is a projection and its activation, which only `value` reads."""
        activated = act.op == "activation" and act.inputs[0] in self.absorbed
        return activated and self.consumers[act] == [value]

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
            is_norm = user.op == "rmsnorm" and user in self.absorbed and self._is_projected(user)
            norm = user if is_norm else None
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
        """The projection that attention takes apart: of q, k and v, of q and k, which is v too, or
        of q alone; heads perhaps normed, or, in steps of a few rows, all of q and all of k; those
        of q and k turned."""
        chains = [self.head_chain(source) for source in value.inputs]
        parts, norms, ropes = (list(items) for items in zip(*chains, strict=True))
        q: Value = parts[0]
        turned = self._turned(value)
        if any(part.op != "slice" or part.inputs[0] is not q.inputs[0] for part in parts):
            return None
        offsets = [part.attrs["offset"] for part in parts]
        if offsets not in ([0], [0, q.width, q.width], [0, q.width, q.width + parts[-1].width]):
            return None
        normed = [norm is not None for norm in norms]
        if normed[1:] not in ([], [normed[0], False], [normed[0], normed[0]]):
            return None
        if any(rope is not own for rope, own in zip(ropes[1:], (ropes[0], None), strict=False)):
            return None
        if len({norm.attrs["eps"] for norm in norms if norm}) > 1:
            return None
        if len({self.turns_first(source) for source in value.inputs[:2]}) > 1:
            return None
        if len(parts) == 1 and not turned:
            return None  # nothing is left to do
        whole = self.norms_rows(value)
        if whole and (not self.vec or any(norms[2:]) or self.turns_first(value.inputs[0])):
            return None
        head_dim = value.attrs["cache"].head_dim
        for step in turned:
            if step.op == "rope":
                fits = step.attrs["head_dim"] == head_dim
            else:
                width = step.width if whole else head_dim
                fits = step.attrs["weight"].shape[0] == width and step.attrs["groups"] == 1
            if not fits or len(self.consumers[step]) != 1:
                return None
        return q.inputs[0]

    def latent(self, value: Value) -> Value | None:
        """The key of a latent cache, that turns, and the latent behind it, which is normed, as
        columns side by side: the first of them."""
        if len(value.inputs) == 1 or not value.attrs["cache"].shape.latent:
            return None
        rope, norm = value.inputs[1:]
        if rope.op != "rope" or norm.op != "rmsnorm" or len(norm.attrs["weight"].shape) != 1:
            return None
        if any(self.consumers[part] != [value] for part in (rope, norm)):
            return None
        k, v = rope.inputs[0], norm.inputs[0]
        side_by_side = k.op == v.op == "slice" and k.inputs[0] is v.inputs[0]
        if not side_by_side or k.attrs["offset"] + k.width != v.attrs["offset"]:
            return None
        whole = rope.attrs["rope"].rotary_dim == rope.attrs["head_dim"] == k.width
        return k if whole and norm.attrs["weight"].shape == (v.width,) else None

    @staticmethod
    def _turned(value: Value) -> list[Value]:
        """The norms and ropes between attention and the slices of its projection."""
        found = []
        for source in value.inputs:
            while source.op in ("rope", "rmsnorm"):
                found.append(source)
                source = source.inputs[0]
        return found

    @staticmethod
    def head_chain(value: Value) -> tuple[Value, Value | None, Rope | None]:
        """What a head is before its norm and its turn, in whatever order, and these."""
        rope = norm = None
        while (value.op == "rope" and not rope) or (value.op == "rmsnorm" and not norm):
            if value.op == "rope":
                rope = value.attrs["rope"]
            else:
                norm = value
            value = value.inputs[0]
        return value, norm, rope

    @staticmethod
    def norms_rows(value: Value) -> bool:
        """Whether the norm of queries, if they have one, is of more than a head."""
        _, norm, _ = Fusion.head_chain(value.inputs[0])
        return norm is not None and norm.attrs["weight"].shape[0] > value.attrs["cache"].head_dim

    @staticmethod
    def turns_first(value: Value) -> bool:
        """Whether a head is turned and then normed."""
        return value.op == "rmsnorm" and value.inputs[0].op == "rope"


def _is_aligned(value: Value) -> bool:
    """Whether it begins with a vector of four."""
    while value.op == "slice":
        if value.attrs["offset"] % 4:
            return False
        value = value.inputs[0]
    return True


def _is_whole(source: Value) -> bool:
    """Whether it is a projection whose kernel has every row of the weight, and scales none."""
    linear = source.op == "linear" and source.attrs["scale"] == 1.0
    return linear and len(source.attrs["weight"].shards) == 1


def _ordered(linear: Value) -> bool:
    """Whether it wants the columns of its input in an order of its own."""
    return linear.op == "linear" and linear.attrs["weight"].order is not None


def _integers(linear: Value) -> bool:
    return linear.attrs["weight"].dtype in INTEGERS
