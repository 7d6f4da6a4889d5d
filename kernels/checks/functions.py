"""The kernels by hand: numpy arrays in, numpy arrays out, one function for each kernel.

    >>> from infer.kernels import Device, functions
    >>> with Device.open() as device:
    ...     y = functions.rmsnorm(device, x, weight, eps=1e-6)
    ...     seconds = functions.profile(functions.rmsnorm, device, x, weight, eps=1e-6)

Every function traces its op and lowers it as a model's forward is lowered, so what runs is what the
engine runs. Arrays of activations are [rows, width], of any float type; results are float32. All
take fuse, tuning and timings besides their own arguments (forward.Options). Arguments that do not
fit raise ShaderError or ValueError. The functions allocate, copy and wait, so they are for trying
and testing: `profile` says what a kernel itself takes.

Each operation of ops/functional.py is a function of its own fields here, with arrays for
activations and weights, None where it can do without, and two options: `position` of the first row,
and `dtype`, in which matrices are stored. What needs more than that is a `run_NAME` among
the cases of its family, which is NAME here.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import numpy as np

from infer.kernels.checks.bench import Bench
from infer.kernels.checks.check import FAMILIES
from infer.kernels.checks.forward import Floats, Options
from infer.kernels.compiler.graph import Add, Mul, Value
from infer.kernels.errors import ShaderError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.shader import Param, render_text
from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.ops import functional
from infer.kernels.ops.rope_check import rope_table as rope_table


def profile(
    function: Callable[..., Any], device: Device, *args: Any, **kwargs: Any
) -> dict[str, float]:
    """The seconds that each kernel takes in a call of one of these functions, by its label.

    Raises DeviceError where the adapter has no timestamps.
    """
    timings: dict[str, float] = {}
    function(device, *args, timings=timings, **kwargs)
    return timings


def validate(
    wgsl: str, device: Device | None = None, *, name: str = "shader", **params: Param
) -> list[str]:
    """The preprocessor's and the compiler's messages about WGSL text, `name:line:column: message`;
    none if it is valid. params: those that the text declares. device: by default the best there is.
    """
    try:
        shader = render_text(wgsl, name, **params)
    except ShaderError as error:
        return [str(error)]
    if device is not None:
        return device.validate(shader, name)
    with Device.open() as own:
        return own.validate(shader, name)


def by_hand(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a Bench as one of a device, and of options. What it takes of the GPU's memory
    is free again when it returns."""

    def run(device: Device, /, *args: Any, **kwargs: Any) -> Any:
        options: Any = {name: kwargs.pop(name) for name in Options.__annotations__ & kwargs.keys()}
        with device.scope():
            return function(Bench(device, **options), *args, **kwargs)

    _, *own = signature(function).parameters.values()
    vars(run)["__signature__"] = Signature([_DEVICE, *own])
    run.__name__, run.__doc__ = name, function.__doc__
    return run


_DEVICE = Parameter("device", Parameter.POSITIONAL_ONLY, annotation=Device)


def of_operation(operation: type[Value]) -> Callable[..., Floats]:
    """An operation as a function of a Bench."""
    own, hints = signature(operation).parameters, get_type_hints(operation)
    kinds = {name: (hints[name], *get_args(hints[name])) for name in own}

    def run(
        bench: Bench, *args: Any, position: int = 0, dtype: str = "f32", **kwargs: Any
    ) -> Floats:
        def operand(name: str, value: Any) -> Any:
            if value is not None and Value in kinds[name]:
                return bench.input(value)
            if value is not None and GpuTensor in kinds[name]:
                return bench.weight(np.atleast_1d(value) if np.isscalar(value) else value, dtype)
            return value

        given = signature(operation).bind_partial(*args, **kwargs).arguments
        left_out = {name: None for name, kind in kinds.items() if type(None) in kind}
        operands = {name: operand(name, value) for name, value in (left_out | given).items()}
        return bench.run(operation(**operands), position=position)

    bench, _, position, dtype, _ = signature(run).parameters.values()
    vars(run)["__signature__"] = Signature([bench, *own.values(), position, dtype])
    run.__doc__ = operation.__doc__
    return run


_OTHERWISE = ("input", "linear", "logits_rows")  # matmul_vec and matmul, take_rows
_OPERATIONS = {
    name: operation
    for name, operation in vars(functional).items()
    if name.islower() and isinstance(operation, type) and name not in _OTHERWISE
} | {"elementwise_add": Add, "elementwise_mul": Mul}
_RUNS = {name: of_operation(operation) for name, operation in _OPERATIONS.items()} | {
    name.removeprefix("run_"): function
    for family in FAMILIES
    for name, function in vars(family).items()
    if name.startswith("run_")
}
globals().update({name: by_hand(name, run) for name, run in _RUNS.items()})
__all__ = sorted([*_RUNS, "profile", "rope_table", "validate"])

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Any]: ...
