"""Functions of a Bench as public functions of a device, which refuse what does not fit.

Annotations say what an argument has to be, and `by_hand` holds every call to them:

* `Annotated[Array, "rows, n_heads * head_dim"]`: numbers of this shape, as an array or as lists. A
  name that stands in several shapes, or is another argument, is one size in all of them.
* `Annotated[Ids, "rows", "vocab"]`: whole numbers from 0 to vocab - 1, of this shape.
* `Annotated[tuple[Array, float], "width"]`: an array of this shape, and a number.
* `Annotated[str, ("f32", "f16")]`: one of these texts.
* `int`: a whole number, which may be 0 only where that is the default. `float`: a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, signature
from numbers import Integral, Real
from types import UnionType
from typing import (
    Annotated,
    Any,
    Concatenate,
    ParamSpec,
    Required,
    TypeVar,
    Union,
    get_args,
    get_origin,
)
from typing import get_type_hints as hints_of

import numpy as np
from numpy.typing import NDArray

from infer.kernels.checks.bench import Bench
from infer.kernels.checks.forward import Ids, Options
from infer.kernels.errors import ShaderError
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.pack import Codes
from infer.kernels.gpu.tensor import ITEMSIZE, QUANTIZED

P = ParamSpec("P")
R = TypeVar("R")

Dtype = Annotated[str, (*ITEMSIZE, *QUANTIZED)]  # in which a matrix is stored

_MAY_BE_EMPTY = {"past", "prompt_tokens", "n_drafts", "n_stop_ids"}  # names of sizes that may be 0


def by_hand(
    function: Callable[Concatenate[Bench, P], R],
) -> Callable[Concatenate[Device | Bench, P], R]:
    """The function `run_NAME` of a Bench as the public function NAME of a device.

    What a call takes of the GPU's memory is free again when it returns. Arguments that do not fit
    raise ShaderError, which says NAME. The Options are for the Bench: a function names them in its
    signature alone. With a Bench in place of the device, nothing is checked.
    """
    name = function.__name__.removeprefix("run_")
    takes = _signature(function)
    of_bench: Callable[..., R] = function

    @wraps(function)
    def run(device: Device | Bench, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if isinstance(device, Bench):
            return function(device, *args, **kwargs)
        try:
            if not isinstance(device, Device):
                found = type(device).__name__
                raise ShaderError(f"the first argument must be a Device, not {found}")
            given: Any = _Call(takes, args, kwargs).checked()
            options: Any = {key: given.pop(key) for key in _OPTIONS & given.keys()}
            with device.scope():
                return of_bench(Bench(device, **options), **given)
        except (ShaderError, ValueError) as error:
            raise ShaderError(f"{name}: {error}") from error

    shown = [each.replace(annotation=_shown(each.annotation)) for each in takes.parameters.values()]
    result = _shown(takes.return_annotation)
    vars(run)["__signature__"] = Signature([_DEVICE, *shown], return_annotation=result)
    run.__name__ = run.__qualname__ = name
    return run


class _Shown(str):
    """A text that is shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


_OPTIONS = Options.__optional_keys__
_DEVICE = Parameter("device", Parameter.POSITIONAL_ONLY, annotation=_Shown("Device"))
_LEFT_OUT = _Shown("...")  # the default of an option that a function has for its own


def _signature(function: Callable[..., Any]) -> Signature:
    """Returns the signature of a function without its Bench, with each of its **options as a
    parameter."""
    hints = hints_of(function, include_extras=True)
    _, *own = signature(function).parameters.values()
    parameters: list[Parameter] = []
    for each in own:
        if each.kind is not Parameter.VAR_KEYWORD:
            parameters.append(each.replace(annotation=hints[each.name]))
            continue
        (options,) = get_args(hints[each.name])
        named = hints_of(options, include_extras=True)
        for name in sorted(named, key=lambda name: name in _OPTIONS):
            required, kind = get_origin(named[name]) is Required, Parameter.KEYWORD_ONLY
            hint = get_args(named[name])[0] if required else named[name]
            default = Parameter.empty if required else _LEFT_OUT
            parameters.append(Parameter(name, kind, default=default, annotation=hint))
    return Signature(parameters, return_annotation=hints["return"])


def _shown(hint: Any) -> _Shown:
    """Returns how help() shows the annotation of an argument or of a result."""
    kind, says = _parts(hint)
    arms = _arms(kind)
    none = " | None" if type(None) in arms else ""
    if says and _is_tuple(arms):
        return _Shown(f"([{'], ['.join(says)}], number){none}")
    if _is_tuple(arms):
        return _Shown(f"({', '.join(map(_shown, get_args(kind)))})")
    if says:
        text = f"[{says[0]}]" if isinstance(says[0], str) else " | ".join(map(repr, says[0]))
        return _Shown(text + none)
    return _Shown(kind.__name__ if type(kind) is type else re.sub(r"(\w+\.)+", "", str(kind)))


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type, and what its annotation says of values."""
    if get_origin(hint) is Annotated:
        return hint.__origin__, hint.__metadata__
    return hint, ()


def _arms(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the type."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_tuple(arms: Sequence[Any]) -> bool:
    return any(get_origin(each) is tuple for each in arms)


def _names_in(dim: str) -> list[str]:
    """The names in an expression of a shape."""
    return list(dict.fromkeys(re.findall(r"[a-z]\w*", dim)))


class _Call:
    """The arguments of one call. sizes: by the names in shapes."""

    def __init__(self, takes: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.parameters = takes.parameters
        for name in kwargs.keys() - self.parameters.keys():
            close = get_close_matches(name, self.parameters, n=1)
            meant = f" (was {close[0]!r} meant?)" if close else ""
            raise ShaderError(f"there is no argument {name!r}{meant}; it takes {self._names}")
        try:
            self.given = takes.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ShaderError(f"{error}; it takes {self._names}") from None
        self.sizes: dict[str, int] = {}

    @property
    def _names(self) -> str:
        return ", ".join(self.parameters)

    def checked(self) -> dict[str, Any]:
        """The arguments, with arrays in place of lists. Raises ShaderError."""
        shaped: list[tuple[str, str, tuple[int, ...]]] = []
        ids: list[tuple[str, NDArray[np.int64], str]] = []
        for name, value in self.given.items():
            kind, says = _parts(self.parameters[name].annotation)
            if value is None and type(None) in _arms(kind):
                continue
            if not says:
                self.given[name] = self._plain(name, kind, value)
            elif kind == Ids:
                self.given[name] = whole = _ids(name, value)
                shaped.append((name, says[0], whole.shape))
                ids.append((name, whole, says[1]))
            elif says and not isinstance(says[0], str):
                _check_choice(name, value, says[0])
            elif isinstance(value, Codes):
                shaped.append((name, says[0], value.codes.shape))
            elif _is_tuple(_arms(kind)):
                self.given[name], shapes = _with_number(name, value, len(says))
                shaped += [(name, *both) for both in zip(says, shapes, strict=True)]
            else:
                array = floats(name, value)
                if says == ("1",) and not array.ndim:
                    array = array.reshape(1)
                self.given[name] = array
                shaped.append((name, says[0], array.shape))
        self._check_shapes(shaped)
        for name, whole, count in ids:
            check_ids(name, whole, self._value(count))
        return self.given

    def _plain(self, name: str, kind: Any, value: Any) -> Any:
        """A value that is no array."""
        if int in _arms(kind):
            least = 0 if self.parameters[name].default in (0, _LEFT_OUT) else 1
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise ShaderError(f"{name} must be a whole number from {least} on, not {value!r}")
            self.sizes[name] = int(value)
            return int(value)
        if float in _arms(kind):
            return number(name, value)
        if isinstance(kind, type) and not isinstance(value, kind):
            raise ShaderError(f"{name} must be {kind.__name__}, not {type(value).__name__}")
        return value

    def _check_shapes(self, shaped: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
        """Shapes are compared as soon as all but one of their names have a size."""
        wait = [(name, shape.split(", "), found) for name, shape, found in shaped]
        for name, dims, found in wait:
            if len(dims) != len(found):
                raise ShaderError(f"{_wanted(name, dims)}, not {list(found)}")
            if any(not n and dim not in _MAY_BE_EMPTY for dim, n in zip(dims, found, strict=True)):
                raise ShaderError(f"{name} has no values: its shape is {list(found)}")
        before = -1
        while before != len(self.sizes):
            before = len(self.sizes)
            for name, dims, found in wait:
                for dim, size in zip(dims, found, strict=True):
                    if not self._fits(dim, size):
                        known = [
                            f"{n} = {self.sizes[n]}" for n in _names_in(dim) if n in self.sizes
                        ]
                        where = f" with {', '.join(known)}" if known else ""
                        raise ShaderError(f"{_wanted(name, dims)}{where}, not {list(found)}")

    def _fits(self, dim: str, size: int) -> bool:
        """Whether an array has the size that an expression says. A name in the expression that has
        no size yet takes the one that makes it true."""
        missing = set(_names_in(dim)) - self.sizes.keys()
        if len(missing) > 1:
            return True
        if not missing:
            return self._value(dim) == size
        (name,) = missing
        none, one = (self._value(dim, {name: value}) for value in (0, 1))
        value, rest = divmod(size - none, one - none)
        if rest or value < (name not in _MAY_BE_EMPTY):
            return False
        self.sizes[name] = value
        return True

    def _value(self, dim: str, more: Mapping[str, int] | None = None) -> int:
        """Returns the value of an expression in an annotation. It has numbers, names, +, -, * and
        brackets. more: values of names besides `sizes`."""
        value: int = eval(dim, {}, self.sizes | dict(more or {}))
        return value


def _wanted(name: str, dims: Sequence[str]) -> str:
    return f"{name} must be [{', '.join(dims)}]"


def floats(name: str, value: Any) -> NDArray[np.float32]:
    """An array, or lists, of numbers in float32. Raises ShaderError."""
    try:
        array: NDArray[Any] = np.asarray(value)
    except ValueError:
        raise ShaderError(f"{name} has rows of unlike lengths") from None
    if array.dtype.kind in "cOSUmM":
        raise ShaderError(f"{name} must be real numbers, not {_kind(value, array)}")
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _kind(value: Any, array: NDArray[Any]) -> str:
    return f"an array of {array.dtype}" if array.ndim else type(value).__name__


def _ids(name: str, value: Any) -> NDArray[np.int64]:
    """An array, or lists, of whole numbers. Raises ShaderError."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise ShaderError(f"{name} has rows of unlike lengths") from None
    if array.size and array.dtype.kind not in "iu":
        raise ShaderError(f"{name} must be whole numbers, not {_kind(value, array)}")
    return array.astype(np.int64)


def check_ids(name: str, ids: Any, count: int) -> None:
    """Raises ShaderError where one is not from 0 to count - 1."""
    wrong = [int(each) for each in np.ravel(ids) if not 0 <= each < count]
    if wrong:
        raise ShaderError(f"{name} must be from 0 to {count - 1}, not {wrong[0]}")


def number(name: str, value: Any) -> float:
    """Raises ShaderError for what is no number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ShaderError(f"{name} must be a number, not {type(value).__name__}")
    return float(value)


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ShaderError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _with_number(name: str, value: Any, arrays: int) -> tuple[Any, list[tuple[int, ...]]]:
    """Returns `value`, which must be so many arrays and then a number, and the arrays' shapes."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != arrays + 1:
        wanted = "an array and a number" if arrays == 1 else f"{arrays} arrays and a number"
        raise ShaderError(f"{name} must be {wanted}")
    given = [floats(name, each) for each in value[:-1]]
    return (*given, number(name, value[-1])), [each.shape for each in given]
