"""The errors of infer. Each message says what was wrong and what to do.

InferError
├── DeviceError            no adapter, none of that name, a lost device
│   └── OutOfMemoryError   buffers that do not fit
├── ShaderError            a kernel that does not compile, or wrong parameters for one
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

from typing import ClassVar, NoReturn


class InferError(Exception):
    """Base of every error that infer raises on purpose."""


class DeviceError(InferError):
    """No usable adapter, no adapter of the given name, or a lost device."""


class OutOfMemoryError(DeviceError):
    """Buffers that the device cannot hold."""


class ShaderError(InferError):
    """A kernel that does not compile, or parameters that it does not declare."""


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


class ClosedError(InferError):
    """A closed LLM, device or stream was used."""


class Uncopied:
    """What holds memory of a GPU. To copy, pickle or send it raises InferError. instead: what to do
    in place of that."""

    instead: ClassVar[str]

    def __reduce__(self) -> NoReturn:
        raise InferError(
            f"This {type(self).__name__} can be neither copied nor sent to another process: memory "
            f"of a GPU belongs to one object in one process. {self.instead}"
        )


class InferWarning(UserWarning):
    """A model asks for something that changes its answers and is not implemented, or its chat
    template leaves out a part of a chat."""
