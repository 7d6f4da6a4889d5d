"""Many GPUs behind one API, by Ray Serve. Needs the extra `ray`.

    serve run infer.server.ray:application model=Qwen/Qwen3-0.6B replicas=4

The ingress is the server without an engine: its `EngineClient` calls replicas through a handle.
Each replica has a model on a GPU of its own. A prompt goes to the replica that likely has most of
it in its cache, unless that one is busy (`infer.server.prefixes`). Ray starts replicas again that
fail, and drains those that it replaces; an answer whose replica ends goes on with another.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import ray
from numpy.typing import NDArray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.types import ASGIApp

from infer.engine.token_engine import EngineStats
from infer.kernels.errors import DeviceError, InferError, RequestError
from infer.kernels.gpu.adapters import AdapterInfo, list_adapters
from infer.llm import Prompt
from infer.loading import check_options, load
from infer.models.loading.plan import Summary
from infer.results import Chunk, Result, TokenLogprob
from infer.sampling import SamplingParams
from infer.server.app import create_app
from infer.server.engine import EngineClient, LLMClient
from infer.server.prefixes import Prefixes
from infer.server.run import DRAIN_SECONDS
from infer.server.service import ServerOptions, Service
from infer.text.chat import own_template
from infer.text.infill import Infill
from infer.text.tools import ToolOptions

T = TypeVar("T")

_TRIES = 3  # how often a call is made if replicas end before they have answered it
_HEALTH_SECONDS = 5  # between two checks of a replica's health
_INFO_SECONDS = 3


class Options(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The options of the application. replicas: the number of copies of the model. gpus: how many
    of Ray's GPUs each replica has to itself; with 0, `device` says where the replica runs.
    served_name (one name or several) and api_keys: as for `infer serve`. allowed_hosts: the names
    by which requests may call the server beside the machine's own; None: any. All other options: as
    for `infer.load`."""

    model: str
    replicas: int = 1
    gpus: float = 1
    served_name: str | list[str] = []
    api_keys: list[str] = []
    allowed_hosts: list[str] | None = None
    device: str | None = None
    precision: str = "auto"
    context: int | None = None
    dtype: str | None = None
    quantize: str | None = None
    kv_dtype: str = "f16"
    max_batch: int = 8
    cache_memory: int | None = None
    host_cache: int | None = None
    invariant: bool = False
    speculate: str | None = None
    draft: str | None = None
    draft_quantize: str | None = None
    adapters: dict[str, str] | None = None
    chat_template: str | None = None
    revision: str | None = None
    offline: bool = False

    def of_load(self) -> dict[str, Any]:
        own = ("model", "replicas", "gpus", "served_name", "api_keys", "allowed_hosts", "device")
        return {
            name: value for name, value in msgspec.structs.asdict(self).items() if name not in own
        }

    def of_server(self) -> ServerOptions:
        names = [self.served_name] if isinstance(self.served_name, str) else self.served_name
        return ServerOptions(
            names=tuple(names),
            api_keys=tuple(self.api_keys),
            allowed_hosts=self.allowed_hosts,
        )


def application(args: Mapping[str, Any]) -> serve.Application:
    """Builds the application that `serve run` deploys. args: `Options`, or their values by name, as
    `serve run` passes NAME=VALUE and config files pass `args`. Raises RequestError for options that
    are wrong."""
    try:
        options = msgspec.convert(dict(args), Options, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"These are no options of the application: {error}.") from None
    if "" in options.of_server().names:
        raise RequestError("`served_name` must not be empty.")
    # A replica may run on a machine that does not have the file.
    if options.chat_template is not None:
        options.chat_template = own_template(options.chat_template)
    # Checked here, so that a mistake is told once and not by each replica.
    check_options(**options.of_load())
    engine = serve.deployment(
        Replica,
        name="engine",
        num_replicas=options.replicas,
        # Answers that run, answers that wait for a place, and calls that take no place.
        max_ongoing_requests=4 * options.max_batch,
        ray_actor_options={"num_gpus": options.gpus},
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        health_check_period_s=_HEALTH_SECONDS,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        max_ongoing_requests=1 << 16,  # the server has limits of its own
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        health_check_period_s=_HEALTH_SECONDS,
    )
    return ingress.bind(engine.bind(options), options)


# Replicas


@dataclass
class Info:
    """The attributes of an EngineClient that are fixed once its model is loaded."""

    name: str
    model_type: str
    summary: Summary
    template: str
    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    context: int
    slots: int
    gpu: AdapterInfo
    adapters: Sequence[str]
    embedding_size: int
    is_embedder: bool
    infill: Infill | None

    @classmethod
    def of(cls, engine: EngineClient) -> Info:
        return cls(**{each.name: getattr(engine, each.name) for each in fields(cls)})


class Replica:
    """A copy of the model on one GPU, in a process that Ray starts."""

    def __init__(self, options: Options) -> None:
        device = own_device(options.device)
        self._llm = load(options.model, device=device, isolate=True, **options.of_load())
        self._engine = LLMClient(self._llm)

    def check_health(self) -> None:
        """Raises DeviceError if the device is lost. Ray replaces a replica for which this
        raises."""
        if self._engine.failure is not None:
            raise DeviceError(self._engine.failure)

    def __del__(self) -> None:
        if hasattr(self, "_llm"):
            self._llm.close()

    async def info(self) -> Info:
        return Info.of(self._engine)

    async def call(self, method: str, *given: Any) -> Any:
        """Calls a method of the EngineClient by its name. An error that is meant for users is
        returned, not raised: Ray would log a raised one with its traceback."""
        try:
            return await getattr(self._engine, method)(*given)
        except InferError as error:
            return error

    async def answer(self, *given: Any) -> AsyncIterator[list[Chunk] | Result | InferError]:
        """Yields an empty list once the answer is opened, then lists of its pieces, as many at a
        time as have come, and at its end the whole result, or the error that ended it."""
        try:
            answer = await self._engine.open(*given)
        except InferError as error:
            yield error
            return
        yield []
        pieces: asyncio.Queue[Chunk | Result | InferError] = asyncio.Queue()

        async def read() -> None:
            try:
                async for chunk in answer:
                    pieces.put_nowait(chunk)
                pieces.put_nowait(answer.result)
            except InferError as error:
                pieces.put_nowait(error)

        reading = asyncio.create_task(read())
        try:
            while True:
                came = [await pieces.get()]
                while not pieces.empty():
                    came.append(pieces.get_nowait())
                if chunks := [each for each in came if isinstance(each, Chunk)]:
                    yield chunks
                if not isinstance(came[-1], Chunk):
                    yield came[-1]
                    return
        finally:
            reading.cancel()
            await answer.aclose()


def own_device(device: str | None) -> str | int | None:
    """Returns the given device or, if it is None, the index in `list_adapters` of the GPU that Ray
    has given this process. Ray counts GPUs in CUDA's order, which may differ from WebGPU's;
    different indices are different GPUs in both."""
    given = ray.get_gpu_ids()
    if not given or device is not None:
        return device
    gpus = [adapter.index for adapter in list_adapters() if adapter.kind == "discrete"]
    number = int(given[0])
    if number >= len(gpus):
        raise DeviceError(
            f"Ray has given GPU {number} to this replica, and WebGPU finds {len(gpus)} of them "
            "here: is the Vulkan driver installed? infer devices lists what there is."
        )
    return gpus[number]


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends each prompt to the replica that most likely has its beginning in the cache."""

    def initialize_state(self, **_: Any) -> None:
        self._prefixes = Prefixes()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Returns the replicas in groups, the best first. Ray takes the first group in which a
        replica has room."""
        prompt = _prompt(pending_request)
        if prompt is None:
            return [list(candidate_replicas)]
        by_id = {each.replica_id: each for each in candidate_replicas}
        answers = {each: self.replica_queue_len_cache.get(each) or 0 for each in by_id}
        return [[by_id[each]] for each in self._prefixes.best_first(*prompt, answers)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        prompt = _prompt(pending_request)
        if prompt is not None:
            self._prefixes.sent(*prompt, replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._prefixes.keep(each.replica_id for each in replicas)


def _prompt(request: PendingRequest | None) -> tuple[Sequence[int], tuple[Any, ...]] | None:
    """Returns the token ids of a call of `Replica.answer`, and what else its keys and values depend
    on: adapter and salt. None for any other call."""
    if request is None or request.metadata.call_method != "answer":
        return None
    ids, _, adapter, _, salt, _ = request.args
    return ids, (adapter, salt)


# The ingress


class Ingress:
    """Takes in HTTP requests, and sends the responses."""

    async def __init__(  # type: ignore[misc]
        self, engine: DeploymentHandle[Replica], options: Options
    ) -> None:
        self._engine, self._replicas = engine, options.replicas
        self._client = RayEngine(engine, await self._info())
        self._service = Service(self._client, options.of_server())

    async def _info(self) -> Info:
        info: Info = await self._engine.info.remote()
        return replace(info, slots=info.slots * self._replicas)

    async def check_health(self) -> None:
        """Looks whether replicas have been replaced by others. A replica that fails is no failure
        of this deployment."""
        with suppress(Exception):
            async with asyncio.timeout(_INFO_SECONDS):
                self._client.describe(await self._info())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return create_app(self._service)


class RayEngine(Info):
    """All replicas together, as one EngineClient. A replica that fails is replaced, so the client
    as a whole never counts as failed."""

    failure: str | None = None

    def __init__(self, handle: Any, info: Info) -> None:
        self._handle = handle
        self.describe(info)

    def describe(self, info: Info) -> None:
        vars(self).update(vars(info))

    async def _call(self, method: str, *given: Any) -> Any:
        found = await _tried(partial(self._handle.call.remote, method, *given))
        if isinstance(found, InferError):
            raise found
        return found

    async def encode(
        self,
        prompt: Prompt,
        template_args: Mapping[str, Any],
        add_special_tokens: bool = True,
        most: int | None = None,
        counts: bool = False,
    ) -> list[int]:
        given = prompt, dict(template_args), add_special_tokens, most, counts
        ids: list[int] = await self._call("encode", *given)
        return ids

    async def decode(self, ids: Sequence[int]) -> str:
        text: str = await self._call("decode", ids)
        return text

    async def open(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        adapter: str | None,
        tools: ToolOptions | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> RayAnswer:
        if params.seed is None:  # with a seed, another replica can make the answer again
            params = replace(params, seed=secrets.randbits(53))
        answer = RayAnswer(self._handle, (ids, params, adapter, tools, cache_salt, priority))
        await _tried(answer.begin)
        return answer

    async def save_cache(
        self, path: Path, ids: Sequence[int], adapter: str | None, cache_salt: str | None
    ) -> int:
        raise RequestError("Replicas keep no files of their caches.")

    async def load_cache(self, path: Path, adapter: str | None, cache_salt: str | None) -> int:
        raise RequestError("Replicas keep no files of their caches.")

    async def embed(
        self, texts: Sequence[Sequence[int]], adapter: str | None
    ) -> NDArray[np.float32]:
        vectors: NDArray[np.float32] = await self._call("embed", texts, adapter)
        return vectors

    async def prompt_logprobs(
        self, ids: Sequence[int], n: int, adapter: str | None
    ) -> list[TokenLogprob]:
        found: list[TokenLogprob] = await self._call("prompt_logprobs", ids, n, adapter)
        return found

    async def stats(self) -> EngineStats:
        """Returns the statistics of one of the replicas, which Ray picks."""
        stats: EngineStats = await self._call("stats")
        return stats


async def _tried(call: Callable[[], Awaitable[T]]) -> T:
    """Calls a replica, and tries again where the replica ends before it has answered."""
    for left in reversed(range(_TRIES)):
        try:
            return await call()
        except RayActorError as error:
            if not left:
                raise _ended(error) from None
    raise AssertionError


def _ended(error: RayActorError) -> InferError:
    return DeviceError(f"The replicas of the model ended: {error}")


class RayAnswer:
    """An answer from a replica. If the replica ends meanwhile, another one generates the answer
    anew. The two answers agree but for rounding; the part that they have in common and that was
    already told is not told again."""

    def __init__(self, handle: Any, given: tuple[Any, ...]) -> None:
        self._handle, self._given = handle, given
        self._told: list[int | None] = []  # the token of each piece that the client has been given
        self._came = deque[Chunk]()
        self._deaths = 0
        self.result = Result(prompt_tokens=len(given[0]))
        self._ended = False

    async def begin(self) -> None:
        self._stream = self._handle.options(stream=True).answer.remote(*self._given)
        opened = await anext(self._stream)
        if isinstance(opened, InferError):
            raise opened
        self._again = 0  # how many pieces another replica has made a second time

    def __aiter__(self) -> RayAnswer:
        return self

    async def __anext__(self) -> Chunk:
        while True:
            while self._came:
                chunk = self._came.popleft()
                if self._again == len(self._told):
                    self._again += 1
                    self._told.append(chunk.token_id)
                    return chunk
                if self._told[self._again] != chunk.token_id:
                    raise DeviceError(
                        "The replica that made this answer has ended, and another one makes a "
                        "different answer. Ask again."
                    )
                self._again += 1
            if self._ended:
                raise StopAsyncIteration
            try:
                came = await anext(self._stream)
            except RayActorError as error:
                self._deaths += 1
                if self._deaths == _TRIES:
                    raise _ended(error) from None
                await _tried(self.begin)
                continue
            if isinstance(came, InferError):
                raise came
            if isinstance(came, Result):
                self.result, self._ended = came, True
            else:
                self._came += came

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            self._stream.cancel()
