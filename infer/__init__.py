"""Local LLM inference on WebGPU.

>>> import infer
>>> print(infer.generate("demo", "Once upon a time").text)
"""

from __future__ import annotations

import os
from importlib import import_module

TYPE_CHECKING = False  # as type checkers know it; typing takes longer to import than all of this

# In a checkout kernels/ and models/ lie beside this folder. Links to them are in it too, where git
# makes links, for tools that do not run this.
_above = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
if all(os.path.isfile(f"{_above}/{name}") for name in ("pyproject.toml", "kernels/__init__.py")):
    __path__.append(_above)

from infer.kernels.errors import (  # noqa: E402
    CheckpointError,
    ClosedError,
    DeviceError,
    InferError,
    InferWarning,
    ModelAccessError,
    ModelError,
    ModelNotFoundError,
    NoChatTemplateError,
    OutOfMemoryError,
    RequestError,
    ShaderError,
    TokenizerError,
    UnknownDeviceError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from typing import Any

    from infer.aio import AsyncStream
    from infer.engine.token_engine import EngineStats
    from infer.kernels.gpu.adapters import AdapterInfo, is_available, list_adapters
    from infer.kernels.gpu.device import Device, MemoryStats, Settings
    from infer.llm import LLM, Stream
    from infer.loading import load
    from infer.results import Chunk, Result, Score, TokenLogprob, TopLogprob
    from infer.sampling import SamplingParams
    from infer.shortcuts import chat, embed, generate, stream
    from infer.text.tools import ToolCall, ToolCallDelta

__version__: str = import_module("infer.version").VERSION

# numpy and wgpu are imported when one of these is first used.
_LAZY = {
    "LLM": "infer.llm",
    "AdapterInfo": "infer.kernels.gpu.adapters",
    "AsyncStream": "infer.aio",
    "Chunk": "infer.results",
    "Device": "infer.kernels.gpu.device",
    "EngineStats": "infer.engine.token_engine",
    "MemoryStats": "infer.kernels.gpu.device",
    "Result": "infer.results",
    "SamplingParams": "infer.sampling",
    "Score": "infer.results",
    "Settings": "infer.kernels.gpu.device",
    "Stream": "infer.llm",
    "TokenLogprob": "infer.results",
    "ToolCall": "infer.text.tools",
    "ToolCallDelta": "infer.text.tools",
    "TopLogprob": "infer.results",
    "chat": "infer.shortcuts",
    "embed": "infer.shortcuts",
    "generate": "infer.shortcuts",
    "is_available": "infer.kernels.gpu.adapters",
    "list_adapters": "infer.kernels.gpu.adapters",
    "load": "infer.loading",
    "stream": "infer.shortcuts",
}

__all__ = [
    "LLM",
    "AdapterInfo",
    "AsyncStream",
    "CheckpointError",
    "Chunk",
    "ClosedError",
    "Device",
    "DeviceError",
    "EngineStats",
    "InferError",
    "InferWarning",
    "MemoryStats",
    "ModelAccessError",
    "ModelError",
    "ModelNotFoundError",
    "NoChatTemplateError",
    "OutOfMemoryError",
    "RequestError",
    "Result",
    "SamplingParams",
    "Score",
    "Settings",
    "ShaderError",
    "Stream",
    "TokenLogprob",
    "TokenizerError",
    "ToolCall",
    "ToolCallDelta",
    "TopLogprob",
    "UnknownDeviceError",
    "UnsupportedError",
    "chat",
    "embed",
    "generate",
    "is_available",
    "list_adapters",
    "load",
    "stream",
]


if not TYPE_CHECKING:  # for type checkers, a name that is not above is a mistake

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            return getattr(import_module(_LAZY[name]), name)
        raise AttributeError(f"module 'infer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
