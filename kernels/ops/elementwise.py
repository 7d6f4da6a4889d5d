"""Operations on each value by itself: activation functions, gates, scales. Sums and products of two
activations are `+` and `*` (graph.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.lowering.arena import Operand
from infer.kernels.lowering.graph import Value, source
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import stride


@dataclass(eq=False, repr=False)
class _Each(Value):
    """Computes every value of x from one, by the kernel of that name."""

    x: Value

    kernel = ""

    @property
    def moved(self) -> int:
        """Values that are read and written, for each of the result."""
        return 2

    def checked_width(self) -> int:
        return self.x.width

    def params(self) -> dict[str, Any]:
        return {}

    def operands(self, low: Lowering) -> list[Operand]:
        """Returns the operands that the kernel binds before x."""
        return []

    def lower(self, low: Lowering) -> None:
        x, x_stride, offset = source(self.x)
        low.emit(
            self.kernel,
            (*self.operands(low), x, self),
            low.row_grid(self, -(-self.width // 64)),
            self.params()
            | {
                "WIDTH": self.width,
                "X_STRIDE": x_stride,
                "X_OFFSET": offset,
                "Y_STRIDE": stride(self.width),
            },
            moved=lambda rows, kv_len: 4 * rows * self.width * self.moved,
        )


@dataclass(eq=False, repr=False)
class Activation(_Each):
    """silu, gelu, gelu_tanh, relu or relu2 of each value (activate.wgsl).

    Rules add: gated: times what lies beside its input, as wide as it.
    """

    function: str
    gated: bool = False

    kernel = "activation"

    @property
    def moved(self) -> int:
        return 2 + self.gated

    def params(self) -> dict[str, Any]:
        return {"ACTIVATION": self.function, "GATED": self.gated}


@dataclass(eq=False, repr=False)
class Softcap(_Each):
    """cap * tanh(x / cap) (Gemma Team 2024)."""

    cap: float

    kernel = "softcap"

    def params(self) -> dict[str, Any]:
        return {"SOFTCAP": float(self.cap)}


@dataclass(eq=False, repr=False)
class Clip(_Each):
    """x, no further from zero than limit."""

    limit: float

    kernel = "clip"

    def params(self) -> dict[str, Any]:
        return {"LIMIT": float(self.limit)}


@dataclass(eq=False, repr=False)
class XIELU(_Each):
    """xIELU of each value (xielu.wgsl). shape [4]: alpha_p, alpha_n, beta, eps."""

    shape: GpuTensor

    kernel = "xielu"

    def checked_width(self) -> int:
        if self.shape.shape != (4,):
            raise ValueError(f"xIELU has 4 parameters, not {self.shape.shape}")
        return self.x.width

    def operands(self, low: Lowering) -> list[Operand]:
        return [self.shape.buffer]


@dataclass(eq=False, repr=False)
class Scale(_Each):
    """x times a number; factor [1]."""

    factor: GpuTensor

    kernel = "scale"

    def checked_width(self) -> int:
        if self.factor.shape != (1,):
            raise ValueError(f"a factor is one value, not {self.factor.shape}")
        return self.x.width

    def operands(self, low: Lowering) -> list[Operand]:
        return [self.factor.buffer]


@dataclass(eq=False, repr=False)
class PositionScale(_Each):
    """x times 1 + beta log(1 + floor(position / interval)) (Llama 4, Meta 2025)."""

    beta: float
    interval: int

    kernel = "position_scale"

    def operands(self, low: Lowering) -> list[Operand]:
        return [low.step]

    def params(self) -> dict[str, Any]:
        return {"BETA": float(self.beta), "INTERVAL": self.interval}


@dataclass(eq=False, repr=False)
class SigmoidGate(Value):
    """x * sigmoid(gate), the gate a single value for each row, or as wide as x."""

    x: Value
    gate: Value

    def checked_width(self) -> int:
        if self.gate.width not in (1, self.x.width):
            raise ValueError(
                f"a gate of {self.gate.width} values does not fit rows of {self.x.width}"
            )
        return self.x.width

    def lower(self, low: Lowering) -> None:
        x, x_stride, _ = source(self.x)
        gate, gate_stride, gate_offset = source(self.gate)
        low.emit(
            "sigmoid_gate",
            (x, gate, self),
            low.row_grid(self, -(-self.width // 64)),
            {
                "WIDTH": self.width,
                "STRIDE": x_stride,
                "GATE_STRIDE": gate_stride,
                "GATE_OFFSET": gate_offset,
                "GATES": self.gate.width,
            },
            moved=lambda rows, kv_len: 8 * rows * self.width,
        )
