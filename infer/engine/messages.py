"""The messages between an LLM and the process of its engine: pickled, each after its length.

Both ends are this program's own, and nobody else can write into their pipes.
"""

from __future__ import annotations

import pickle
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from infer.engine.options import EngineOptions
from infer.engine.token_engine import EngineStats, Request
from infer.kernels.errors import InferError
from infer.kernels.gpu.adapters import AdapterInfo
from infer.models.blocks.layers import DecoderConfig
from infer.models.loading.plan import Summary
from infer.sampling import Logprobs

_LENGTH = struct.Struct("<Q")


def packed(message: object) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Pipe:
    """Messages to and from one process. Any thread may send; one receives."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self._reader, self._writer = reader, writer
        self._sends = threading.Lock()

    def send(self, message: object) -> None:
        """Sends a message. Raises OSError if nobody reads any more."""
        self.write(packed(message))

    def write(self, data: bytes) -> None:
        """Sends messages that are `packed` already. Raises OSError if nobody reads any more."""
        with self._sends:
            self._writer.write(data)
            self._writer.flush()

    def receive(self) -> Any:
        """The next message. Raises EOFError at the end, in the middle of a message too."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return pickle.loads(self._read(length))

    def _read(self, count: int) -> bytes:
        data = self._reader.read(count)
        if len(data) < count:
            raise EOFError
        return data


# To the engine


@dataclass(frozen=True)
class Load:
    """The first message. model: its files. options: further arguments of `load`. memory: the
    descriptor and the capacity of host memory that what the GPU has no room for is kept in, if it
    is to outlive the process."""

    model: str
    options: Mapping[str, Any]
    memory: tuple[int, int] | None = None


@dataclass(frozen=True)
class Begin:
    """The message that begins an answer. The request is without its constraint, which the engine's
    process makes from the sampling parameters."""

    key: int
    request: Request


@dataclass(frozen=True)
class Call:
    """Calls `TokenEngine.call` with the name of a method; the first `skip` parts are not wanted."""

    key: int
    method: str
    arguments: tuple[Any, ...]
    skip: int


@dataclass(frozen=True)
class More:
    """A part was taken: the next may come."""

    key: int


@dataclass(frozen=True)
class Cancel:
    """Cancels an answer or a call."""

    key: int


@dataclass(frozen=True)
class Ask:
    """Asks for Stats, which also show that the engine lives."""


@dataclass(frozen=True)
class Leave:
    """The end comes, and host memory outlives it: what is cached goes there."""


# From the engine


@dataclass(frozen=True)
class Progress:
    """The progress of loading, as `load` reports it."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class Ready:
    gpu: AdapterInfo
    config: DecoderConfig
    options: EngineOptions
    adapter_names: tuple[str, ...]
    stats: EngineStats
    summary: Summary
    notes: tuple[str, ...]  # what `load` warned of


@dataclass(frozen=True)
class Failed:
    """The model cannot be loaded."""

    error: InferError


@dataclass(frozen=True)
class Made:
    """Everything that steps have made since the last message. steps: (answer, token, log
    probabilities). begun: (answer, cached tokens of its prompt, seconds that its prompt took).
    drafts: (answer, tokens drafted so far, those of them that were right). ended: (answer, the
    error if there was one)."""

    steps: Sequence[tuple[int, int, Logprobs | None]]
    begun: Sequence[tuple[int, int, float]]
    drafts: Sequence[tuple[int, int, int]]
    ended: Sequence[tuple[int, InferError | None]]


@dataclass(frozen=True)
class Part:
    """A part that a call yields."""

    key: int
    value: Any


@dataclass(frozen=True)
class Returned:
    """A call ended."""

    key: int
    error: InferError | None


@dataclass(frozen=True)
class Stats:
    stats: EngineStats
