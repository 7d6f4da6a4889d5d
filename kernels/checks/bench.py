"""Cases: one kernel each, on small and awkward inputs, against its formula in float64.

Every family of operations has its own in a module, NAME_check.py. They trace operations on a Bench,
which turns numpy arrays into what these take; functions.py offers the same to users.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from infer.kernels.checks.arrays import Array, to_gpu
from infer.kernels.checks.forward import Floats, Forward, Ids, Options
from infer.kernels.checks.reference import nmse
from infer.kernels.errors import InferError
from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.pack import Codes
from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.lowering.graph import Value
from infer.kernels.lowering.tuning import Tuning
from infer.kernels.ops.attention import attention_matrix_variant
from infer.kernels.ops.matmul_matrix import expert_matrix_variant, matmul_matrix_variant
from infer.kernels.ops.matmul_rows import MOST_ROWS
from infer.kernels.state.step import StepRow

F32_LIMIT = 1e-10  # of arithmetic in f32, whatever the storage
EPS = 1e-6
TILED = MOST_ROWS + 1  # rows of a plan that has the kernels of prefill

Outcome = tuple[Array, Array]  # what the kernel gave, what it should have given


def never(tuning: Tuning, *call: Any) -> None:
    """The rule for a kernel that is not taken."""


class WithoutMatrices(Tuning):
    """Takes kernels that multiply in f32 or in exact integers, as the references do."""

    instead: Mapping[Any, Any] = {
        matmul_matrix_variant: never,
        expert_matrix_variant: never,
        attention_matrix_variant: never,
    }


class Bench:
    """A device, on which operations run on numpy arrays, and random numbers: the same every time.

    The inputs of a forward have the rows of the first one.
    """

    def __init__(self, device: Device, **options: Unpack[Options]) -> None:
        self.device, self.options = device, options
        self.rng = np.random.default_rng(0)
        self.rows = 0

    def random(self, *shape: int) -> Array:
        """Standard normal values in f32."""
        return self.rng.standard_normal(shape, np.float32)

    def input(self, values: Array) -> Value:
        """An activation of these values, [rows, width]. Padding is NaN: nothing may read it."""
        self.rows = self.rows or len(values)
        return self.forward(self.rows, plan_rows=TILED).input(values)

    def weight(self, values: Array | Codes, dtype: str = "f32", unit: int = 1) -> GpuTensor:
        """A matrix in that dtype (Codes: as they are), or a vector in f32. unit: as in
        tensor.allocate."""
        return to_gpu(self.device, values, dtype, unit)

    def vector(self, values: Array | None) -> GpuTensor | None:
        """All values one after the other, if there are any."""
        return None if values is None else self.weight(values.reshape(-1))

    def forward(self, rows: int, **own: Any) -> Forward:
        """Returns a `Forward` of so many rows with the options of this bench. It computes in f32
        unless a tuning is given."""
        options = {"tuning": WithoutMatrices(self.device), **self.options, **own}
        return Forward(self.device, rows, **options)

    def run(
        self,
        output: Value,
        *,
        rows: int = 0,
        position: int = 0,
        tokens: Ids | None = None,
        adapters: Ids = (0,),
        batch: Sequence[StepRow] = (),
        **own: Any,
    ) -> Floats:
        """The values of `output`, [rows, width]; the first row is at `position`. rows: where there
        are no inputs. adapters, batch: as of Forward.run. own: options of Forward."""
        forward = self.forward(self.rows or rows, **own)
        return forward.run(output, position=position, tokens=tokens, adapters=adapters, batch=batch)

    def run_alone(self, kernel: str, output: Value, *, position: int, **own: Any) -> None:
        """Only one of the kernels that make `output`. own: buffers as of Forward.run_alone, and
        options of Forward."""
        buffers = {name: value for name, value in own.items() if isinstance(value, Buffer)}
        options = {name: value for name, value in own.items() if name not in buffers}
        self.forward(self.rows, **options).run_alone(kernel, output, position, **buffers)


@dataclass(frozen=True)
class CheckResult:
    """How one kernel did in one case.

    error is the normalised mean square error, of the sampler the share of wrong tokens; NaN where
    the kernel did not run, and message says why.
    """

    kernel: str
    case: str
    error: float
    limit: float
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True)
class Case:
    """One kernel in one case, and the largest error that it may have. exact: the outcome is
    tokens."""

    kernel: str
    name: str
    run: Callable[[Bench], Outcome]
    exact: bool = False
    most: float = F32_LIMIT

    def check(self, device: Device) -> CheckResult:
        limit = 0.0 if self.exact else self.most
        try:
            with device.scope():
                y, expected = self.run(Bench(device))
        except InferError as error:
            return CheckResult(self.kernel, self.name, math.nan, limit, str(error))
        wrong = float((y != expected).mean()) if self.exact else nmse(y, expected)
        return CheckResult(self.kernel, self.name, wrong, limit)
