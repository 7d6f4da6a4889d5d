"""Where code that others wrote meets this project: what goes wrong in libraries and chat templates,
and calls with arguments that do not fit, raise errors of this project."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

from infer.calls import check_names, misfit
from infer.kernels.errors import InferError, RequestError, TokenizerError

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def foreign(what: str, kind: type[InferError] = TokenizerError, hint: str = "") -> Iterator[None]:
    """Opens a block that runs code of others. An exception in it becomes an error of the class
    `kind`, whose text is "{what}: ... {hint}"; an InferError passes unchanged."""
    try:
        yield
    except InferError:
        raise
    except BaseException as error:
        # A panic of Rust is no Exception. Ctrl-C and the end of the program are none either; they
        # pass.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise kind(f"{what}: {reason(error)} {hint}".rstrip()) from error


def reason(error: BaseException) -> str:
    """Returns an error's text as a sentence, cut off after 1,000 characters; the name of its class
    if it has no text."""
    text = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    text = text if len(text) < 1000 else f"{text[:1000]} ..."
    return text if text.endswith((".", "!", "?")) else f"{text or type(error).__name__}."


def shown(value: object) -> str:
    """Returns a wrong value as text for a message. The value may be of any type and size."""
    try:
        text = repr(value)
    except Exception:  # the value's own repr fails, or it is an integer of thousands of digits
        return f"one of the type {type(value).__name__}"
    return text if len(text) < 200 else f"{text[:200]} ..."


def within(seconds: float, call: Callable[[], T]) -> T:
    """Calls call() in a thread and returns its result. If it takes longer, the thread is left
    behind and TimeoutError is raised: for code that cannot be interrupted but lets other threads
    run."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="infer text").start()
    return future.result(seconds)


def checked(
    options: Collection[str] = (),
    others: Collection[str] = (),
    place: str = "",
    *,
    renamed: Mapping[str, str] | None = None,
    hint: str = "",
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Returns a decorator for functions that users call: arguments that do not fit raise
    RequestError instead of TypeError.

    options: the names that the function takes as **options; without any it takes all names. others,
    place: as for `check_names`. renamed: second names of arguments, each with its first name. hint:
    what to do instead, whatever is wrong with a call.
    """
    second_names = renamed or {}

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        own = signature(function)
        fixed = [p.name for p in own.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        known = frozenset([*fixed, *options]) - {"self"}
        takes_any = len(fixed) < len(own.parameters) and not options

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if not (takes_any or known.issuperset(kwargs)):
                for second in second_names.keys() & kwargs.keys():
                    kwargs.setdefault(second_names[second], kwargs.pop(second))
                if not hint:
                    check_names(kwargs, known, others, place)
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise  # the function itself raised it
                raise RequestError(hint or misfit(function, own, args, kwargs)) from None

        return call

    return decorate
