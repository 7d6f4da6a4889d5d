"""The code that all endpoints share: options, models by name, bodies of requests."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace
from starlette.requests import Request

from infer.foreign import shown
from infer.kernels.errors import RequestError
from infer.server.admission import Admission, Bodies, Body, too_large
from infer.server.engine import EngineClient
from infer.server.errors import ApiError
from infer.server.metrics import Metrics
from infer.server.protocol import Gpu, Health, Model, Models

log = logging.getLogger(__name__)

# Warnings in the log, and their characters: some have words of clients in them.
_MOST_NOTED, _LONGEST = 1000, 500


@dataclass(frozen=True)
class ServerOptions:
    """names: the model's names for clients, the first of which it has in answers; "*": any other
    too; none: its own name. api_keys: all endpoints but /health ask for one of these; none: no
    keys. strict: refuse unknown parameters. cors_origins: the origins whose web pages may ask; "*":
    all. queue: answers that may wait, for each that is generated. max_body: bytes of a request's
    body, and a 16th of all that are received or in work. keepalive: seconds without an event after
    which a stream shows that it lives. allowed_hosts: names by which clients may call the server,
    beside those of this machine; None, or "*": any. cache_folder: for files of the cache; None:
    none are kept."""

    names: Sequence[str] = ()
    api_keys: Sequence[str] = ()
    strict: bool = False
    cors_origins: Sequence[str] = ()
    queue: int = 4
    max_body: int = 16 << 20
    keepalive: float = 5.0
    allowed_hosts: Sequence[str] | None = None
    cache_folder: Path | None = None


class Served(ABC):
    """The models that are served. stopped: set when all answers have to end. webgpu: the library
    that runs their kernels, as for `load`."""

    options: ServerOptions
    webgpu: str | None
    stopped: asyncio.Event
    metrics: Metrics
    bodies: Bodies

    @abstractmethod
    def services(self) -> Sequence[Service]:
        """The services of the models that are loaded."""

    @abstractmethod
    def using(self, model: str | None) -> AbstractAsyncContextManager[Service]:
        """The service of a model or adapter, which stays loaded in the block. None: the first
        model. Raises ApiError (404, 503), and what loading raises."""

    async def unload(self, model: str | None) -> str:
        """Unload a model once nobody uses it. Returns its name. Raises ApiError (400, 404)."""
        raise ApiError(
            400,
            "keep_alive cannot be 0 here: this server never unloads its model.",
            param="keep_alive",
            code="unsupported_parameter",
        )

    @abstractmethod
    def models(self) -> Models: ...

    @abstractmethod
    def health(self) -> Health: ...

    @abstractmethod
    def start(self) -> None:
        """Called once the event loop runs."""

    @abstractmethod
    def drain(self) -> None:
        """Let nothing begin any more."""

    async def read_body(self, request: Request) -> Body:
        """The body of a request. Raises ApiError if it is too large (413), if it is compressed
        (415), or if it comes from a web page and is not declared as JSON (415): browsers send such
        requests for any page, without asking first."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and "origin" in request.headers:
            raise ApiError(415, "Send JSON, with the header Content-Type: application/json.")
        coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
        if coding not in ("", "identity"):
            raise ApiError(
                415,
                f"The body is compressed (Content-Encoding: {shown(coding)[1:-1]}), which is not "
                "supported: send it as it is.",
                headers={"Accept-Encoding": "identity"},
            )
        transfer = request.headers.get("transfer-encoding", "chunked").strip().lower()
        if transfer != "chunked":
            raise ApiError(
                501, f"The transfer coding {shown(transfer)} is not supported: chunked is."
            )
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self.bodies.most:
            raise too_large(self.bodies.most)
        body = Body(self.bodies)
        try:
            async for part in request.stream():
                body.add(part)
        except BaseException:
            body.release()
            raise
        return body


@dataclass
class Service(Served):
    """A model that is loaded."""

    engine: EngineClient
    options: ServerOptions
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.names = names_of(self.options, self.engine.name)
        self.name = self.names[0]
        for name in {*self.names} & {*self.engine.adapters}:
            raise RequestError(f"Both the model and an adapter are called {shown(name)}.")
        self.webgpu = self.engine.gpu.webgpu
        self.admission = Admission(self.engine.slots * (1 + self.options.queue))
        self.bodies = Bodies(self.options.max_body)
        self.keepalive = self.options.keepalive
        self._noted = set[str]()

    def model(self, name: str | None) -> tuple[str, str | None]:
        """The name under which it answers, and the adapter that the name means. None: the model
        itself. Raises ApiError (404)."""
        if name is None:
            return self.name, None
        found = find(name, (*self.names, *self.engine.adapters))
        return found, found if found in self.engine.adapters else None

    def note(self, warnings: Sequence[str]) -> None:
        """Tell the log what it has not been told before."""
        for warning in warnings:
            text = "".join(c if c.isprintable() else "?" for c in warning[:_LONGEST])
            if text not in self._noted and len(self._noted) < _MOST_NOTED:
                self._noted.add(text)
                log.warning("%s: %s", self.name, text)

    def models(self) -> Models:
        gpu = self.engine.gpu
        own = Model(
            id=self.name,
            created=self.created,
            context=self.engine.context,
            gpu=Gpu(gpu.name, gpu.kind, gpu.backend, gpu.driver, gpu.webgpu),
        )
        adapters = [replace(own, id=name, parent=self.name) for name in self.engine.adapters]
        others = [replace(own, id=name, root=self.name) for name in self.names[1:] if name != "*"]
        return Models([own, *others, *adapters])

    def services(self) -> list[Service]:
        return [self]

    def health(self) -> Health:
        if self.admission.draining:
            return Health("draining", "The server is shutting down.")
        failure = self.engine.failure
        return Health("ok", webgpu=self.webgpu) if failure is None else Health("failed", failure)

    @asynccontextmanager
    async def using(self, model: str | None) -> AsyncIterator[Service]:
        yield self

    def start(self) -> None:
        pass

    def drain(self) -> None:
        self.admission.draining = True


def names_of(options: ServerOptions, own: str) -> tuple[str, ...]:
    """A model's names for clients: first its name in answers, last "*" if it has any. own: its name
    where it was given none."""
    given = dict.fromkeys(options.names)
    named = [name for name in given if name != "*"] or [own]
    return (*named, "*") if "*" in given else (*named,)


def find(name: str, known: Sequence[str]) -> str:
    """The one of these names that a client means: as Ollama has it, who says no tag says "latest".
    It is the first one if "*" is among them, and no other is meant. Raises ApiError (404)."""
    for each in known:
        if name.removesuffix(":latest") == each.removesuffix(":latest"):
            return each
    if "*" in known:
        return known[0]
    raise not_found(name, known)


def not_found(name: str, known: Sequence[str]) -> ApiError:
    return ApiError(
        404,
        f"There is no model {shown(name)} here. There are: {', '.join(known)}.",
        param="model",
        code="model_not_found",
    )
