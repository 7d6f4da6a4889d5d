"""Runs code that others wrote, such as the tokenizers library and chat templates, and raises its
failures as errors of this project."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from infer.kernels.errors import InferError, TokenizerError

T = TypeVar("T")


@contextmanager
def foreign(what: str, kind: type[InferError] = TokenizerError, hint: str = "") -> Iterator[None]:
    """Whatever goes wrong in the block is an error of this kind: "{what}: ... {hint}"."""
    try:
        yield
    except InferError:
        raise
    except BaseException as error:
        # A panic of Rust is no Exception. Nor are Ctrl-C and the end of the program, which pass.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise kind(f"{what}: {reason(error)} {hint}".rstrip()) from error


def reason(error: BaseException) -> str:
    """Returns an error's text as a sentence, cut off after 1,000 characters; the name of its class
    where it has no text."""
    text = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    text = text if len(text) < 1000 else f"{text[:1000]} ..."
    return text if text.endswith((".", "!", "?")) else f"{text or type(error).__name__}."


def shown(value: object) -> str:
    """A wrong value for a message, of whatever kind and size it is."""
    try:
        text = repr(value)
    except Exception:  # of its own, or an integer of thousands of digits
        return f"one of the type {type(value).__name__}"
    return text if len(text) < 200 else f"{text[:200]} ..."


def within(seconds: float, call: Callable[[], T]) -> T:
    """call(), in a thread that is left behind if it takes longer: for code that cannot be
    interrupted but lets other threads run. Raises TimeoutError."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="infer text").start()
    return future.result(seconds)
