"""The errors of infer. Each message says what was wrong and what to do.

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


class InferError(Exception):
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


class InferWarning(UserWarning):
    """A model asks for something that changes its answers and is not implemented, or its chat
    template leaves out a part of a chat."""
