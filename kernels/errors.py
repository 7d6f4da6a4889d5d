"""The errors of infer. Each message says what was wrong and what to do.

A message is written with what users choose by a name in backticks, such as `context` or
`kv_dtype="f32"`: str() has the keyword of Python, without the backticks, and the command line has
its option (`named`).

InferError
├── DeviceError            no adapter, or a lost device
│   ├── UnknownDeviceError no adapter, or no WebGPU library, of that name (a RequestError, too)
│   └── OutOfMemoryError   buffers that do not fit
├── ShaderError            a kernel that does not compile, or arguments that do not fit one
├── ModelError             a model that cannot be loaded
│   ├── ModelNotFoundError no such folder, repository or revision
│   ├── ModelAccessError   a gated or private repository
│   ├── CheckpointError    damaged, incomplete or surplus weights
│   └── UnsupportedError   an architecture, dtype or config value not implemented
├── TokenizerError         tokenizer or chat template missing or broken
│   └── NoChatTemplateError a model that has none was given messages
├── RequestError           a prompt or sampling value that cannot be served
└── ClosedError            a closed LLM or stream was used
"""

import re
from collections.abc import Mapping
from typing import ClassVar, NoReturn

_NAMED = re.compile(r"`(\w+)(?:=([^`]*))?`")


def named(marked: str, options: Mapping[str, str] | None = None) -> str:
    """A message whose names in backticks are those of Python, or, where `options` have one by that
    name, the option of a command: --context, or --kv-dtype f32."""

    def name(found: re.Match[str]) -> str:
        option, value = (options or {}).get(found[1]), found[2]
        if option is None:
            return found[0].strip("`")
        if value is None or value == "True":
            return option
        return f"{option} {value.strip(chr(34))}"

    return _NAMED.sub(name, marked)


class _Marked:
    """marked: the message as it was written, with backticks."""

    def __init__(self, message: object = "") -> None:
        self.marked = str(message)
        plain = named(message) if isinstance(message, str) else message
        super().__init__(plain)  # type: ignore[call-arg]


class InferError(_Marked, Exception):
    """Base of every error that infer raises on purpose."""


class DeviceError(InferError):
    """No usable adapter, or a lost device."""


class OutOfMemoryError(DeviceError):
    """Buffers that the device cannot hold."""


class ShaderError(InferError):
    """A kernel that does not compile, or arguments and parameters that do not fit one."""


class ModelError(InferError):
    """A model that cannot be loaded."""


class ModelNotFoundError(ModelError):
    """No such folder, file, repository or revision."""


class ModelAccessError(ModelError):
    """A gated or private repository."""


class CheckpointError(ModelError):
    """Damaged, incomplete, wrongly shaped or surplus weights."""


class UnsupportedError(ModelError):
    """An architecture, dtype or config value that is not implemented."""


class TokenizerError(InferError):
    """A missing or broken tokenizer or chat template."""


class NoChatTemplateError(TokenizerError):
    """Messages for a model that has no chat template."""


class RequestError(InferError, ValueError):
    """A prompt or a sampling value that cannot be served."""


class UnknownDeviceError(DeviceError, RequestError):
    """No adapter, or no WebGPU library, of the given name."""


class ClosedError(InferError):
    """A closed LLM, device or stream was used."""


class Uncopied:
    """Base of objects that hold memory of a GPU: to copy, pickle or send one raises InferError.
    instead: the sentence of the message that says what to do in place of that."""

    instead: ClassVar[str]

    def __reduce__(self) -> NoReturn:
        raise InferError(
            f"This {type(self).__name__} can be neither copied nor sent to another process: memory "
            f"of a GPU belongs to one object in one process. {self.instead}"
        )


class InferWarning(_Marked, UserWarning):
    """A model asks for something that changes its answers and is not implemented, its chat template
    leaves out a part of a chat, or the adapter is software, which computes slowly."""
