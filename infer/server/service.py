"""The models of a server. Each is loaded in a process of its own when it is first asked for. When
memory runs out, the model that was used longest ago is unloaded."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from msgspec import structs

from infer.boundaries import shown
from infer.engine.host_memory import HostMemory
from infer.kernels.errors import (
    ClosedError,
    DeviceError,
    InferError,
    ModelError,
    RequestError,
    TokenizerError,
)
from infer.keywords import Progress
from infer.llm import LLM
from infer.server.admission import Admission, Bodies
from infer.server.engine import EngineClient, LLMClient
from infer.server.errors import ApiError
from infer.server.metrics import Metrics
from infer.server.protocol import Gpu, Health, Model, Models

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_WAITING = 256  # the most requests that wait for models to be loaded
STALLED = 60.0  # seconds without a sign of life after which an engine counts as failed

# The most warnings in the log, and the most characters of one: some have words of clients in them.
_MOST_NOTED, _LONGEST = 1000, 500


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server. names: the model's names for clients, of which answers have the
    first; "*" admits any other name; none: the model's own name. api_keys: keys of which all
    endpoints but /health ask for one; none: no keys are asked for. strict: refuse unknown
    parameters. cors_origins: origins whose web pages may send requests; "*": all. queue: how many
    answers may wait for each answer that can run. max_body: the most bytes of a request's body, and
    a 16th of what all bodies that are received or in work may have. keepalive: seconds without an
    event after which a stream shows that it lives. allowed_hosts: names by which clients may call
    the server beside this machine's own; None, or "*": any name. cache_folder: the folder for files
    of the cache; None: no such files are kept."""

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
    """The models that a server serves. stopped: set when all answers have to end. webgpu: the
    library that runs the models' kernels, as for `load`."""

    options: ServerOptions
    webgpu: str | None
    stopped: asyncio.Event
    metrics: Metrics
    bodies: Bodies

    @abstractmethod
    def services(self) -> Sequence[Service]:
        """Returns the services of the models that are loaded."""

    @abstractmethod
    def using(self, model: str | None) -> AbstractAsyncContextManager[Service]:
        """Opens a block with the service of a model or an adapter, which stays loaded in the block.
        model: its name; None: the first model. Raises ApiError (404, 503), and the errors of
        loading."""

    async def unload(self, model: str | None) -> str:
        """Unloads a model once nobody uses it. Returns the model's name. Raises ApiError (400,
        404)."""
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
        """Begins to load models. It is called once the event loop runs."""

    @abstractmethod
    def drain(self) -> None:
        """Lets no answer begin any more."""


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
        """Returns the name under which a model answers, and the adapter that the name means, or
        None. name: as the request has it; None: the model itself. Raises ApiError (404) for an
        unknown name."""
        if name is None:
            return self.name, None
        found = find(name, (*self.names, *self.engine.adapters))
        return found, found if found in self.engine.adapters else None

    def note(self, warnings: Sequence[str]) -> None:
        """Logs those of the warnings that have not been logged before."""
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
        adapters = [
            structs.replace(own, id=name, parent=self.name) for name in self.engine.adapters
        ]
        others = [
            structs.replace(own, id=name, root=self.name) for name in self.names[1:] if name != "*"
        ]
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


class Source(Protocol):
    """A place from which a model is loaded. Its methods may take long."""

    def find(self, progress: Progress) -> str:
        """Fetches the model's files. Returns the model's name."""

    def load(self, progress: Progress) -> LLM: ...


@dataclass(eq=False)
class _Entry:
    """A model of a host, loaded or not. names: the names of the model and of its adapters, once it
    has been loaded. users: how many requests use it now. waiting: how many requests wait for it.
    used: when it was last used or loaded, by time.monotonic; 0 before. leaves: whether it is
    unloaded as soon as nobody uses it. expires: the timer that unloads it later."""

    source: Source
    name: str = ""
    names: tuple[str, ...] = ()
    llm: LLM | None = None
    service: Service | None = None
    loading: asyncio.Task[Service] | None = None
    users: int = 0
    waiting: int = 0
    used: float = 0.0
    leaves: bool = False
    expires: asyncio.TimerHandle | None = None


@dataclass(eq=False)
class Host(Served):
    """All models of a server.

    keep_alive: seconds after which an unused model is unloaded; None: never. ready: called once the
    server can answer. webgpu: the library that `sources` load for. ended: called when the server
    can answer no more; `error` then has the reason. memory: host memory that all models share, for
    cached prompts that the GPU has no room for; None without it.
    """

    sources: Sequence[Source]
    options: ServerOptions
    keep_alive: float | None = None
    ready: Callable[[Host], None] = lambda host: None
    webgpu: str | None = None
    ended: Callable[[], None] = lambda: None
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    error: Exception | None = None
    memory: HostMemory | None = None

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.options.max_body)
        self._entries = [_Entry(source) for source in self.sources]
        self._loads = asyncio.Lock()
        self._freed = asyncio.Condition()  # notified when a model has one user less
        self._found = asyncio.Event()  # set once the files of all models are found
        self._draining = False
        self._waiting = 0  # how many requests wait for a model
        self._report = "", 0, 0
        self._tasks = set[asyncio.Task[None]]()

    # From its start to its end

    def start(self) -> None:
        """Finds the files of all models. If there is only one model, it is loaded."""
        self._loop = asyncio.get_running_loop()
        self._do(self._start())

    async def _start(self) -> None:
        try:
            for entry in self._entries:
                found = await self._in_thread(entry.source.find)
                entry.name = names_of(self.options, found)[0]
                if any(entry.name == each.name for each in self._entries if each is not entry):
                    raise RequestError(f"Two models are called {shown(entry.name)}: give one.")
            self._found.set()
            if len(self._entries) == 1:
                await self._loaded(self._entries[0])
            self.ready(self)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._draining:
            self.error = error
            self.ended()

    def drain(self) -> None:
        self._draining = True
        for entry in self._entries:
            if entry.service is not None:
                entry.service.admission.draining = True
        self._found.set()

    def close(self) -> None:
        """Ends the processes of all models."""
        self._draining = True
        if self.memory is not None:
            self.memory.is_ending = True
        for entry in self._entries:
            if entry.llm is not None:
                entry.llm.close()
        if self.memory is not None:
            self.memory.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Models that are served

    def models(self) -> Models:
        found: list[Model] = []
        for entry in self._entries:
            if entry.service is not None:
                found += entry.service.models().data
            elif entry.name:
                found.append(Model(id=entry.name, created=self.created))
        return Models(found)

    def health(self) -> Health:
        if self._draining:
            return Health("draining", "The server is shutting down.")
        if self.error is not None:
            return Health("failed", str(self.error))
        alone = self._entries[0] if len(self._entries) == 1 else None
        never_used = alone is not None and alone.service is None and not alone.used
        what, done, total = self._report
        doing, progress = _DOING.get(what, "opening"), done / total if total else 0.0
        if not self._found.is_set() or never_used:
            return Health("loading", doing, progress)
        fine = Health("ok")
        for entry in self._entries:
            if entry.service is None or entry.llm is None:
                continue
            health = entry.service.health()
            if health.status != "ok":
                return health
            fine = health
            if entry.llm.restarts:
                return Health("restarting", f"The engine of {entry.name} is started again.")
            if entry.llm.silent > STALLED:
                return Health(
                    "stalled",
                    f"The engine of {entry.name} has not answered for {entry.llm.silent:.0f} s.",
                )
        for entry in self._entries:
            if entry.loading is not None and not entry.loading.done():
                doing = f"Loading {entry.name}: {doing}"
                return Health("ok", doing, progress, fine.webgpu)
        return fine

    @property
    def only(self) -> LLM | None:
        """The model, if the server has only one and it is loaded."""
        return self._entries[0].llm if len(self._entries) == 1 else None

    def services(self) -> list[Service]:
        """Returns the services of the models that are loaded."""
        return [entry.service for entry in self._entries if entry.service is not None]

    # Use

    @asynccontextmanager
    async def using(self, model: str | None) -> AsyncIterator[Service]:
        if self._waiting >= MOST_WAITING:
            raise ApiError(
                503,
                f"A model is being loaded, {MOST_WAITING} requests wait for it, and no more are "
                "taken. Try again later.",
                code="loading",
                headers={"Retry-After": "5"},
            )
        self._waiting += 1
        try:
            await self._found.wait()
            entry = self._entry(model)
            entry.waiting += 1
            try:
                service = await self._loaded(entry)
            except (RequestError, TokenizerError) as error:
                # the options or files are wrong, not the request
                raise ModelError(f"{entry.name} cannot be loaded: {error}") from error
            finally:
                entry.waiting -= 1
        finally:
            self._waiting -= 1
        entry.users += 1
        entry.leaves = False  # the request that comes last decides
        try:
            yield service
        finally:
            entry.users -= 1
            entry.used = time.monotonic()
            if not entry.users:
                self._idle(entry)

    def _entry(self, model: str | None) -> _Entry:
        if self._draining:
            raise ApiError(503, "The server is shutting down.")
        first = self._entries[0]
        if model is None:
            return first
        if len(self._entries) == 1:
            if first.names:
                find(model, first.names)
            return first
        name = find(model, [entry.name for entry in self._entries])
        return next(entry for entry in self._entries if entry.name == name)

    def _idle(self, entry: _Entry) -> None:
        async def tell() -> None:
            async with self._freed:
                self._freed.notify_all()

        self._do(tell())
        if entry.expires is not None:
            entry.expires.cancel()
        if entry.service is None:
            return
        seconds = 0.0 if entry.leaves else self.keep_alive
        if seconds is not None:
            entry.expires = self._loop.call_later(seconds, lambda: self._do(self._expire(entry)))

    async def unload(self, model: str | None) -> str:
        await self._found.wait()
        entry = self._entry(model)
        if entry.service is None:
            return entry.name
        name, _ = entry.service.model(model)
        entry.leaves = True
        if not entry.users:
            self._idle(entry)
        return name

    async def _expire(self, entry: _Entry) -> None:
        async with self._loads:
            used = entry.users or entry.waiting
            if not used and entry.service is not None and not self._draining:
                await self._unload(entry)

    # Loading

    async def _loaded(self, entry: _Entry) -> Service:
        while entry.service is None:
            if entry.loading is None or entry.loading.done():
                entry.loading = asyncio.ensure_future(self._load(entry))
            stopping = asyncio.ensure_future(self.stopped.wait())
            try:  # a request that gives up does not end the loading for others
                await asyncio.wait([entry.loading, stopping], return_when="FIRST_COMPLETED")
            finally:
                stopping.cancel()
            if not entry.loading.done():
                raise ApiError(503, "The server is shutting down.")
            entry.loading.result()
        return entry.service

    async def _load(self, entry: _Entry) -> Service:
        async with self._loads:
            while True:
                self._report = "", 0, 0
                try:
                    llm = await self._in_thread(entry.source.load)
                    break
                except DeviceError:  # out of memory, or an error that a driver gives instead
                    others = [each for each in self._entries if each.service is not None]
                    if not others:
                        raise
                    await self._unload(min(others, key=lambda each: (each.users > 0, each.used)))
            llm.watch(self._lost)
            try:
                options = replace(self.options, names=names_of(self.options, entry.name))
                service = Service(LLMClient(llm), options, self.stopped, self.metrics)
            except BaseException:
                llm.close()
                raise
            entry.llm, entry.service, entry.used = llm, service, time.monotonic()
            entry.names = (*service.names, *llm.adapters)
            service.admission.draining = self._draining
            self._idle(entry)  # requests that wait for the model are its users from now on
            return service

    def _lost(self, error: InferError) -> None:
        """Takes note that an engine cannot be started again. Another thread calls this."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._fail, error)

    async def _unload(self, entry: _Entry) -> None:
        """Unloads a model once nobody uses it. A request that comes meanwhile has it loaded
        again."""
        llm, entry.service = entry.llm, None
        async with self._freed:
            await self._freed.wait_for(lambda: not entry.users)
        entry.llm = None
        assert llm is not None
        await self._in_thread(lambda _: llm.close())

    async def _in_thread(self, work: Callable[[Progress], T]) -> T:
        """Calls work() with a function for its progress, in a thread that does not keep the program
        from ending. Returns its result."""
        future = self._loop.create_future()

        def progress(what: str, done: int, total: int) -> None:
            if self._draining:
                raise ClosedError("The server is shutting down.")
            self._report = what, done, total

        def run() -> None:
            try:
                result, error = work(progress), None
            except BaseException as raised:
                result, error = None, raised

            def tell() -> None:
                if future.cancelled():
                    return
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

            try:
                self._loop.call_soon_threadsafe(tell)
            except RuntimeError:  # the loop is closed
                if isinstance(result, LLM):
                    result.close()

        threading.Thread(target=run, name="infer load", daemon=True).start()
        return await future  # type: ignore[no-any-return]


_DOING = {
    "download": "fetching the model",
    "weights": "reading weights",
    "kernels": "compiling kernels",
}


def names_of(options: ServerOptions, own: str) -> tuple[str, ...]:
    """Returns a model's names for clients: first the name that answers have, and last "*" if any
    name is admitted. own: the model's own name, which counts if the options give none."""
    given = dict.fromkeys(options.names)
    named = [name for name in given if name != "*"] or [own]
    return (*named, "*") if "*" in given else (*named,)


def find(name: str, known: Sequence[str]) -> str:
    """Returns the known name that a client means. As in Ollama, a name without a tag has the tag
    "latest". If "*" is known, a name that fits no other means the first. Raises ApiError (404) for
    an unknown name."""
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
