"""Operations on symbolic activations: what a model's forward is written in.

A forward is traced, not run: each op returns a Value, and the list of Values is later turned into
a plan of dispatches (lower.py). An activation is f32, [rows of the step][width]; rows lie
`stride(width)` values apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from infer.kernels.gpu.device import Buffer
from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.state.kv_cache import LayerCache
from infer.kernels.state.layer_state import LayerState


def stride(width: int) -> int:
    """Values from one row of an activation to the next: kernels read eight at a time."""
    return -(-width // 8) * 8


@dataclass(eq=False)
class Value:
    """A symbolic activation [rows, width]: the op that makes it, from which inputs.

    of_logits says that it has only the rows that get logits.
    """

    ops: Ops = field(repr=False)
    op: str
    width: int
    inputs: tuple[Value, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    of_logits: bool = False

    def __add__(self, other: Value) -> Value:
        return self.ops.add(self, other)

    def __mul__(self, other: Value) -> Value:
        return self.ops.mul(self, other)


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary embedding: a table of (cos, sin), [positions][rotary_dim / 2], f32."""

    table: Buffer
    rotary_dim: int
    interleaved: bool = False


@dataclass(frozen=True, eq=False)
class LowRank:
    """A change b a of a weight [out, in] that lies beside it: a [rank, in], b [out, rank]."""

    a: GpuTensor
    b: GpuTensor


# By the weights themselves, which no two names share unless they are one.
Changes = Mapping[GpuTensor, LowRank]


class Ops:
    """Traces a forward. Every method takes and returns Values; widths are checked at once. `linear`
    adds the changes of its weight, so that a model does not know of them."""

    def __init__(self, changes: Changes = MappingProxyType({})) -> None:
        self.values: list[Value] = []
        self.changes = changes

    def _value(
        self,
        op: str,
        width: int,
        *inputs: Value,
        of_logits: bool | None = None,
        **attrs: Any,
    ) -> Value:
        if of_logits is None:
            of_logits = any(value.of_logits for value in inputs)
        value = Value(self, op, width, inputs, attrs, of_logits)
        self.values.append(value)
        return value

    def input(self, buffer: Buffer, width: int) -> Value:
        """An activation that is there already."""
        return self._value("input", width, buffer=buffer)

    def embedding(self, weight: GpuTensor, scale: float = 1.0) -> Value:
        """The rows of `weight` [vocab, width] for the step's tokens, times scale."""
        return self._value("embedding", weight.shape[1], weight=weight, scale=scale)

    def position_embedding(self, weight: GpuTensor) -> Value:
        """The rows of `weight` [positions, width] for the step's positions."""
        return self._value("position_embedding", weight.shape[1], weight=weight)

    def rmsnorm(self, x: Value, weight: GpuTensor, eps: float, groups: int = 1) -> Value:
        """x / rms(x) * weight (Zhang & Sennrich 2019), over each part of x as wide as the weight:
        the whole row, or head by head. Or over each of so many groups of what the weight covers,
        with weights of their own."""
        (width,) = weight.shape
        if x.width % width or width % groups:
            raise ValueError(f"a norm of {width} values cannot cover rows of {x.width}")
        return self._value("rmsnorm", x.width, x, weight=weight, eps=eps, groups=groups)

    def gated_rmsnorm(self, x: Value, gate: Value, weight: GpuTensor, eps: float) -> Value:
        """rmsnorm(x) * silu(gate)."""
        self._same_width(x, gate)
        own: dict[str, Any] = {"weight": weight, "eps": eps, "groups": 1}
        return self._value("gated_rmsnorm", x.width, x, gate, **own)

    def layernorm(
        self, x: Value, weight: GpuTensor, bias: GpuTensor | None, eps: float, groups: int = 1
    ) -> Value:
        """(x - mean(x)) / std(x) * weight + bias (Ba et al. 2016), over such parts as `rmsnorm`."""
        (width,) = weight.shape
        if x.width % width or width % groups:
            raise ValueError(f"a norm of {width} values cannot cover rows of {x.width}")
        own: dict[str, Any] = {"weight": weight, "bias": bias, "eps": eps, "groups": groups}
        return self._value("layernorm", x.width, x, **own)

    def linear(
        self, x: Value, weight: GpuTensor, bias: GpuTensor | None = None, scale: float = 1.0
    ) -> Value:
        """scale * (x W^T + bias); weight [out, in]."""
        y = self._linear(x, weight, bias, scale)
        change = self.changes.get(weight)
        if change is None:
            return y
        # In this order, because the later projection is the one that takes the sum in (fuse.py).
        return self._linear(self._linear(x, change.a), change.b, scale=scale) + y

    def _linear(
        self, x: Value, weight: GpuTensor, bias: GpuTensor | None = None, scale: float = 1.0
    ) -> Value:
        n, k = weight.shape
        if x.width != k:
            raise ValueError(f"rows of {x.width} do not fit a weight of {weight.shape}")
        return self._value("linear", n, x, weight=weight, bias=bias, scale=scale)

    def head_linear(self, x: Value, weight: GpuTensor, heads: int, *, keep: bool = False) -> Value:
        """W_h x_h^T for each of the heads that lie side by side in x, where x_h is as many of its
        last values as W_h has columns; weight [heads * out, in]. The values before them are left
        out or, with `keep`, go in front of the result."""
        rows, k = weight.shape
        own, n = x.width // heads, rows // heads
        if x.width % heads or rows % heads or own < k:
            raise ValueError(f"{heads} heads in rows of {x.width} do not fit {weight.shape}")
        if any(shard.start % n or shard.rows % n for shard in weight.shards):
            raise ValueError("shards end inside of a head")
        kept = own - k if keep else 0
        own_attrs: dict[str, Any] = {"weight": weight, "heads": heads, "kept": kept}
        return self._value("head_linear", heads * (kept + n), x, **own_attrs)

    def split(self, x: Value, *widths: int) -> tuple[Value, ...]:
        """Columns of x side by side, as views: nothing is copied."""
        if sum(widths) != x.width:
            raise ValueError(f"{widths} do not add up to {x.width}")
        starts = [sum(widths[:i]) for i in range(len(widths))]
        return tuple(
            self._value("slice", width, x, offset=start)
            for width, start in zip(widths, starts, strict=True)
        )

    def rope(self, x: Value, rope: Rope, head_dim: int) -> Value:
        """The heads of x turned by their position (Su et al. 2021)."""
        return self._value("rope", x.width, x, rope=rope, head_dim=head_dim)

    def attention(
        self,
        q: Value,
        k: Value | None,
        v: Value | None,
        cache: LayerCache,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: GpuTensor | None = None,
    ) -> Value:
        """k and v appended to the cache, then softmax(scale * q k^T) v over what each row sees:
        all positions up to its own, or the last `window` of them. With a softcap, the scores go
        through `softcap` before softmax. Without k and v nothing is appended: another attention has
        done so. sinks [heads]: logits that take part in softmax beside the scores, without a
        value (Xiao et al. 2023). In a latent cache k and v, side by side, are one key, and values
        are the keys (DeepSeek-AI 2024)."""
        return self._value(
            "attention",
            q.width,
            *(part for part in (q, k, v) if part is not None),
            cache=cache,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )

    def short_conv(
        self,
        x: Value,
        weight: GpuTensor,
        bias: GpuTensor | None,
        state: LayerState,
        *,
        gated: bool = False,
        activation: str = "none",
    ) -> Value:
        """Each channel convolved with its last inputs, those before the step from the state;
        weight [channels * taps], the latest input's last. gated: x is B, C and x side by side, and
        this is C * conv(B * x). activation: none, or a function of `activation`."""
        shape = state.shape
        if x.width != (3 if gated else 1) * shape.channels:
            raise ValueError(f"rows of {x.width} do not fit {shape.channels} channels")
        if weight.shape != (shape.channels * shape.taps,) or shape.taps < 2:
            raise ValueError(f"a weight of {weight.shape} does not fit {shape}")
        return self._value(
            "short_conv",
            shape.channels,
            x,
            weight=weight,
            bias=bias,
            state=state,
            gated=gated,
            activation=activation,
        )

    def delta_rule(
        self, x: Value, gates: Value, a_log: GpuTensor, dt_bias: GpuTensor, state: LayerState
    ) -> Value:
        """The gated delta rule (Yang et al. 2024) on the state's matrices; x is queries, keys and
        values side by side, gates is b, then a, of each head (delta_rule.wgsl)."""
        shape = state.shape
        queries, values = shape.key_heads * shape.key_dim, shape.heads * shape.value_dim
        fours = shape.key_dim % 4 == shape.value_dim % 4 == 0
        if x.width != 2 * queries + values or not fours or shape.heads % shape.key_heads:
            raise ValueError(f"rows of {x.width} do not fit {shape}")
        if gates.width != 2 * shape.heads:
            raise ValueError(f"gates of {gates.width} values do not fit {shape.heads} heads")
        return self._value(
            "delta_rule", values, x, gates, a_log=a_log, dt_bias=dt_bias, state=state
        )

    def ssm_scan(
        self,
        x: Value,
        z: Value,
        dt: Value,
        heads: GpuTensor,
        state: LayerState,
        dt_limit: tuple[float, float] = (0.0, math.inf),
    ) -> Value:
        """The state space model of Mamba 2 (Dao & Gu 2024) on the state's matrices, times silu(z);
        x is x, B and C side by side, dt one value for each head. heads [3 * heads]: A_log, dt_bias
        and D. dt_limit: of the time steps, behind softplus (ssm_scan.wgsl)."""
        shape = state.shape
        values, inputs = shape.heads * shape.value_dim, shape.key_heads * shape.key_dim
        if x.width != values + 2 * inputs or shape.key_dim % 4 or shape.value_dim % 4:
            raise ValueError(f"rows of {x.width} do not fit {shape}")
        if z.width != values or dt.width != shape.heads or shape.heads % shape.key_heads:
            raise ValueError(f"gates of {z.width} and {dt.width} values do not fit {shape}")
        if heads.shape != (3 * shape.heads,):
            raise ValueError(f"a weight of {heads.shape} does not fit {shape.heads} heads")
        own: dict[str, Any] = {"heads": heads, "state": state, "dt_limit": dt_limit}
        return self._value("ssm_scan", values, x, z, dt, **own)

    def activation(self, x: Value, function: str) -> Value:
        """silu, gelu, gelu_tanh, relu or relu2 of each value (activate.wgsl)."""
        return self._value("activation", x.width, x, function=function)

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap) (Gemma Team 2024)."""
        return self._value("softcap", x.width, x, cap=cap)

    def clip(self, x: Value, limit: float) -> Value:
        """x, no further from zero than limit."""
        return self._value("clip", x.width, x, limit=limit)

    def xielu(self, x: Value, shape: GpuTensor) -> Value:
        """xIELU of each value (xielu.wgsl). shape [4]: alpha_p, alpha_n, beta, eps."""
        if shape.shape != (4,):
            raise ValueError(f"xIELU has 4 parameters, not {shape.shape}")
        return self._value("xielu", x.width, x, shape=shape)

    def scale(self, x: Value, factor: GpuTensor) -> Value:
        """x times a number; factor [1]."""
        if factor.shape != (1,):
            raise ValueError(f"a factor is one value, not {factor.shape}")
        return self._value("scale", x.width, x, factor=factor)

    def position_scale(self, x: Value, beta: float, interval: int) -> Value:
        """x times 1 + beta log(1 + floor(position / interval)) (Llama 4, Meta 2025)."""
        return self._value("position_scale", x.width, x, beta=beta, interval=interval)

    def route(
        self,
        logits: Value,
        slots: int,
        *,
        normalize: bool,
        sigmoid: bool = False,
        correction: GpuTensor | None = None,
        expert_scales: GpuTensor | None = None,
        scale: float = 1.0,
        epsilon: float = 0.0,
        groups: tuple[int, int] = (1, 1),
        shared: int = 0,
        shared_scale: float = 1.0,
        gated: bool = False,
    ) -> Value:
        """The experts of each row: those with the `slots` largest logits, and their softmax over
        all experts; normalize: over those chosen. Rows are ids, best first, then weights, times
        scale. With sigmoid, scores are sigmoids and not a softmax; epsilon: is added to what they
        are divided by. correction [experts]: is added to the scores for the choice, and not for the
        weights (DeepSeek-AI 2024). expert_scales [experts]: the weights are multiplied by
        them. groups: that many of equal size, and how many of them the choice is limited to: those
        whose best expert, or with a correction whose best two together, have the largest score.
        shared: so many experts behind those come last in all rows, with the weight shared_scale;
        gated: times the sigmoid of one more logit, the last."""
        (count, chosen), experts = groups, logits.width - gated
        if not 0 < chosen <= count or experts % count:
            raise ValueError(f"{experts} experts cannot be chosen of {groups} groups")
        if not 0 < slots <= experts // count * chosen:
            raise ValueError(f"{slots} experts cannot be chosen of {experts}")
        if epsilon and not (sigmoid and normalize):
            raise ValueError("only sigmoids are divided by their sum and an epsilon")
        if gated and not shared:
            raise ValueError("there is no shared expert for the gate")
        return self._value(
            "route",
            2 * (slots + shared),
            logits,
            slots=slots + shared,
            experts=experts + shared,
            normalize=normalize,
            sigmoid=sigmoid,
            correction=correction,
            expert_scales=expert_scales,
            scale=scale,
            epsilon=epsilon,
            groups=groups,
            shared=shared,
            shared_scale=shared_scale,
            gated=gated,
        )

    def expert_gate_up(
        self,
        x: Value,
        routing: Value,
        weight: GpuTensor,
        bias: GpuTensor | None = None,
        function: str = "silu",
        *,
        gated: bool = True,
    ) -> Value:
        """function(x gate^T) * (x up^T), or clamped_swiglu of both (activate.wgsl), by each of
        a row's experts, one result after the other, each in stride(inner) values. weight [experts *
        2 * inner, width]: gate, then up, of each expert; bias [experts * 2 * inner] likewise. Not
        gated: function(x up^T), and there are no gates in them."""
        inner = self._expert_rows(routing, weight, 1 + gated)
        if weight.shape[1] != x.width:
            raise ValueError(f"rows of {x.width} do not fit a weight of {weight.shape}")
        width = routing.attrs["slots"] * stride(inner)
        own: dict[str, Any] = {"bias": bias, "function": function, "outputs": inner, "gated": gated}
        return self._value("expert_gate_up", width, x, routing, weight=weight, **own)

    def expert_down(
        self, x: Value, routing: Value, weight: GpuTensor, bias: GpuTensor | None = None
    ) -> Value:
        """What a row's experts make of their results x, each times its weight in `routing`, added
        up in the order of the ids; weight [experts * width, inner], bias [experts * width]."""
        width = self._expert_rows(routing, weight, 1)
        if routing.attrs["slots"] * stride(weight.shape[1]) != x.width:
            raise ValueError(f"rows of {x.width} do not fit a weight of {weight.shape}")
        own: dict[str, Any] = {"bias": bias, "function": "none", "outputs": width, "gated": False}
        return self._value("expert_down", width, x, routing, weight=weight, **own)

    @staticmethod
    def _expert_rows(routing: Value, weight: GpuTensor, parts: int) -> int:
        rows, rest = divmod(weight.shape[0], parts * int(routing.attrs["experts"]))
        if rest or any(shard.start % (parts * rows) for shard in weight.shards):
            raise ValueError(f"a weight of {weight.shape} does not fit the experts")
        return rows

    def sigmoid_gate(self, x: Value, gate: Value) -> Value:
        """x * sigmoid(gate), the gate a single value for each row, or as wide as x."""
        if gate.width not in (1, x.width):
            raise ValueError(f"a gate of {gate.width} values does not fit rows of {x.width}")
        return self._value("sigmoid_gate", x.width, x, gate)

    def add(self, a: Value, b: Value) -> Value:
        return self._value("add", self._same_width(a, b), a, b)

    def mul(self, a: Value, b: Value) -> Value:
        return self._value("mul", self._same_width(a, b), a, b)

    def logits_rows(self, x: Value) -> Value:
        """The rows of x that get logits."""
        return self._value("logits_rows", x.width, x, of_logits=True)

    @staticmethod
    def _same_width(a: Value, b: Value) -> int:
        if a.width != b.width:
            raise ValueError(f"rows of {a.width} and {b.width} do not fit")
        return a.width
