"""Servers for tests, what is asked of them, and engines that say what they were told to."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from numpy.typing import NDArray

from infer.engine.pages import PoolStats
from infer.engine.token_engine import EngineStats
from infer.kernels.gpu.adapters import AdapterInfo
from infer.kernels.gpu.device import MemoryStats
from infer.llm import Prompt
from infer.models.loading.plan import Summary
from infer.results import Chunk, Result, TokenLogprob
from infer.sampling import SamplingParams
from infer.text.tools import ToolCallDelta, ToolOptions, add_deltas

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("msgspec")

from infer.server.engine import EngineClient
from infer.server.run import Server, listen, url
from infer.server.service import Host, Served, ServerOptions, Service

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
STORY = "Once upon a time"
MESSAGES = [{"role": "user", "content": "My cat is called Milo. What is my cat called?"}]
ANSWER = "Your cat is called Milo."
JSON = {"Content-Type": "application/json"}
KEEPALIVE = b": keepalive\n\n"


@contextmanager
def serving(served: Served) -> Iterator[str]:
    """Its address."""
    ready = threading.Event()
    with listen("127.0.0.1", 0) as opened:
        address = url(opened)
        server = Server(served, ready.set)
        thread = threading.Thread(target=server.run, args=([opened],))
        thread.start()
        try:
            assert ready.wait(timeout=60)
            yield address
        finally:
            server.should_exit = True
            thread.join()
            if isinstance(served, Host):
                served.close()


def connect(address: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(address).netloc, timeout=300)


def ask(
    address: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] = JSON,
    method: str | None = None,
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = connect(address)
    try:
        given = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        method = method or ("GET" if body is None else "POST")
        connection.request(method, path, given, dict(headers))
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def answer(address: str, path: str, **body: Any) -> dict[str, Any]:
    response, data = ask(address, path, body)
    assert response.status == 200, data
    whole: dict[str, Any] = json.loads(data)
    return whole


def events(data: bytes) -> list[dict[str, Any]]:
    """Returns the events of a stream that has ended as it should."""
    *parts, end, nothing = data.split(b"\n\n")
    assert (end, nothing) == (b"data: [DONE]", b"")
    assert not [part for part in parts if not part.startswith(b"data: {")]
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


def streamed(address: str, path: str, **body: Any) -> list[dict[str, Any]]:
    response, data = ask(address, path, {"stream": True, **body})
    assert response.status == 200
    assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
    return events(data.replace(KEEPALIVE, b""))


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class FakeAnswer:
    """Pieces, and then an end: when the engine lets it go on."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.result = Result("ab", [1, 2, 3], "stop", None, prompt_tokens=3)
        self.pieces = iter([Chunk("a", 1), Chunk("", 2), Chunk("b", 3)])

    @property
    def so_far(self) -> Result:
        """The result so far, as `AsyncStream.so_far` returns it."""
        return self.result

    def __aiter__(self) -> FakeAnswer:
        return self

    async def __anext__(self) -> Chunk:
        for piece in self.pieces:
            return piece
        await asyncio.to_thread(self.engine.go_on.wait)
        if self.engine.error is not None:
            raise self.engine.error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.engine.closed += 1
        self.engine.go_on.set()


class FakeEngine:
    """An EngineClient that notes what it is asked. What it answers is `answer`'s to say."""

    name, context, slots, adapters = "fake", 100, 1, ("sql",)
    special_tokens: Mapping[str, str] = {}
    templates: Mapping[str, str] = {}
    gpu = AdapterInfo(0, "a GPU", "discrete", "Vulkan", "1.2", frozenset(), {})
    model_type, template, embedding_size, is_embedder, infill = "fake", "", 4, True, None
    summary = Summary(1_500_000_000, "gguf", "Q4_K")

    def __init__(self, *, waits: bool = False) -> None:
        self.failure: str | None = None
        self.error: Exception | None = None
        self.closed = 0
        self.go_on = threading.Event()
        if not waits:
            self.go_on.set()
        self.asked: list[tuple[Any, ...]] = []
        self.tools: list[ToolOptions | None] = []
        self.salts: list[str | None] = []
        self.priorities: list[int] = []

    async def encode(
        self,
        prompt: Prompt,
        template_args: Mapping[str, Any],
        add_special_tokens: bool = True,
        most: int | None = None,
        counts: bool = False,
    ) -> list[int]:
        self.asked.append((prompt, dict(template_args)))
        return [1, 2, 3]

    async def decode(self, ids: Sequence[int]) -> str:
        return "abc"

    async def embed(
        self, texts: Sequence[Sequence[int]], adapter: str | None
    ) -> NDArray[np.float32]:
        self.asked.append(([list(ids) for ids in texts], adapter))
        return np.ones((len(texts), 4), np.float32)

    async def prompt_logprobs(
        self, ids: Sequence[int], n: int, adapter: str | None
    ) -> list[TokenLogprob]:
        raise NotImplementedError

    async def stats(self) -> EngineStats:
        own: dict[str, Any] = {"states": 2, "state_places": 3, "window": 20}
        cache = PoolStats(4, 1, 5, 6, 7, 16, **own, window_pages=9, window_pages_used=8)
        return EngineStats(MemoryStats(0, 0, 0, 0, 0), cache, 1, 2, 3, 4, 7, 3, kv_dtype="q8")

    async def save_cache(
        self, path: Path, ids: Sequence[int], adapter: str | None, cache_salt: str | None
    ) -> int:
        path.write_text("saved")
        return len(ids)

    async def load_cache(self, path: Path, adapter: str | None, cache_salt: str | None) -> int:
        return len(path.read_text())

    async def open(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        adapter: str | None,
        tools: ToolOptions | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> FakeAnswer:
        self.asked.append((list(ids), params, adapter))
        self.tools.append(tools)
        self.salts.append(cache_salt)
        self.priorities.append(priority)
        return self.answer()

    def answer(self) -> FakeAnswer:
        return FakeAnswer(self)


def fake_service(engine: EngineClient, **options: Any) -> Service:
    return Service(engine, ServerOptions(**options))


class Scripted(FakeEngine):
    """Answers with these pieces."""

    def __init__(self, *pieces: Chunk, reason: str = "stop") -> None:
        super().__init__()
        self.pieces, self.reason = pieces, reason

    def answer(self) -> FakeAnswer:
        answer = super().answer()
        answer.pieces = iter(self.pieces)
        answer.result = Result(
            "".join(piece.text for piece in self.pieces),
            [1, 2],
            self.reason,
            prompt_tokens=3,
            reasoning="".join(piece.reasoning for piece in self.pieces),
        )
        for piece in self.pieces:
            add_deltas(answer.result.tool_calls, piece.tool_calls)
        return answer


CALLS = (
    Chunk("", 1, reasoning="It is"),
    Chunk("", 2, reasoning=" hot."),
    Chunk("I look", 3),
    Chunk(" it up.", 4),
    Chunk("", 5, tool_calls=(ToolCallDelta(0, "call_1", "get_weather"),)),
    Chunk("", 6, tool_calls=(ToolCallDelta(0, arguments='{"city": '),)),
    Chunk("", 7, tool_calls=(ToolCallDelta(0, arguments='"Rome"}'),)),
    Chunk("", 8, tool_calls=(ToolCallDelta(1, "call_2", "get_weather", "{}"),)),
)
