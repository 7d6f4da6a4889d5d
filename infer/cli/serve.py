"""`infer serve`: models behind HTTP."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infer.cli.options import (
    ChatTemplateOption,
    ContextOption,
    DeviceOption,
    DraftOption,
    DraftQuantizeOption,
    DtypeOption,
    InvariantOption,
    KVDtype,
    KVDtypeOption,
    ModelsArgument,
    OfflineOption,
    Precision,
    PrecisionOption,
    QuantizeOption,
    RevisionOption,
    SpeculateOption,
    VerboseOption,
    WebgpuOption,
    loading_option,
    parse_adapter,
    parse_bytes,
    parse_host,
    parse_origin,
    server_option,
)
from infer.cli.ps import DEFAULT_URL
from infer.cli.terminal import exit_codes, note, table, warnings_as_notes, wrapped, write
from infer.kernels.errors import InferError, RequestError
from infer.progress import ProgressLine, size

if TYPE_CHECKING:
    from infer.engine.pages import PoolStats
    from infer.keywords import Progress
    from infer.llm import LLM
    from infer.server.service import Host


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve(
    models: ModelsArgument,
    host: Annotated[
        str,
        server_option(
            "--host",
            metavar="HOST",
            help="The address to listen on; 0.0.0.0 for all addresses of this machine, so that"
            " other machines can connect.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        server_option(
            "--port",
            metavar="N",
            min=0,
            max=65535,
            help="The port to listen on; 0 picks a free one.",
        ),
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        server_option(
            "--api-key",
            metavar="KEY",
            envvar="INFER_API_KEY",
            help="Require this API key. Can be repeated: requests with different keys share no"
            " cached prompts. Default: none, so that everybody who can connect is served.",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        server_option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Allow requests of web pages from this origin, such as https://example.org; *"
            " allows all. Can be repeated. Default: none but the server's own page.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        server_option(
            "--allowed-host",
            metavar="NAME",
            help="Also answer requests to this host name, such as one that a proxy passes on; "
            "* allows any. Can be repeated. Default: this machine's own names, or any "
            "with a --host that other machines can connect to.",
        ),
    ] = None,
    strict: Annotated[
        bool,
        server_option(
            "--strict",
            help="Refuse requests with unknown parameters. By default, these are ignored and "
            "named in the header X-Infer-Warning.",
        ),
    ] = False,
    log_level: Annotated[
        LogLevel,
        server_option(
            "--log-level",
            metavar="LEVEL",
            help="How much to log on standard error: error, warning, info (a line for each "
            "request, without its content) or debug (also for /health and /metrics).",
        ),
    ] = LogLevel.INFO,
    served_name: Annotated[
        list[str] | None,
        server_option(
            "--served-name",
            metavar="NAME",
            help="The model's name for clients. Can be repeated: the first one is in its answers; "
            "'*' is any other name. Default: its own name.",
        ),
    ] = None,
    keep_alive: Annotated[
        float | None,
        server_option(
            "--keep-alive",
            metavar="SECONDS",
            min=0,
            help="Unload a model that has not been used for this long; the next request loads "
            "it again. By default, a model is unloaded only when another one needs its "
            "memory.",
        ),
    ] = None,
    device: DeviceOption = None,
    webgpu: WebgpuOption = None,
    precision: PrecisionOption = Precision.AUTO,
    context: ContextOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    kv_dtype: KVDtypeOption = KVDtype.F16,
    adapter: Annotated[
        list[str] | None,
        loading_option(
            "--adapter",
            metavar="NAME=PATH",
            help="A LoRA adapter, a folder or a hub id, for requests that name it as their "
            "model. Can be repeated.",
        ),
    ] = None,
    chat_template: ChatTemplateOption = None,
    revision: RevisionOption = None,
    offline: OfflineOption = False,
    max_batch: Annotated[
        int | None,
        loading_option(
            "--max-batch",
            metavar="N",
            help="How many answers to generate at once, up to 64. Default: 8, or 4 on the CPU.",
        ),
    ] = None,
    cache_memory: Annotated[
        str | None,
        loading_option(
            "--cache-memory",
            metavar="SIZE",
            help="Memory for the KV cache of all answers, such as 4GB. Default: what one full "
            "context takes, and 1,024 tokens for each other answer.",
        ),
    ] = None,
    host_cache: Annotated[
        str | None,
        loading_option(
            "--host-cache",
            metavar="SIZE",
            help="Host memory, such as 8GiB, for what the KV cache has no room for, of all models. "
            "Prompts go on from there where that is faster than computing. Default: none.",
        ),
    ] = None,
    cache_folder: Annotated[
        Path | None,
        server_option(
            "--cache-folder",
            file_okay=False,
            help="A folder for what clients save of the cache, by names, with /v1/cache/save. "
            "Default: they can save nothing.",
        ),
    ] = None,
    invariant: InvariantOption = False,
    speculate: SpeculateOption = None,
    draft: DraftOption = None,
    draft_quantize: DraftQuantizeOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Serve models over HTTP: APIs for programs, and a page to chat on.

    The APIs are those of OpenAI, Anthropic and Ollama. Up to --max-batch answers are generated at
    once; others wait. Of several models, each is loaded at its first request, and the least
    recently used one is unloaded when memory runs out. Ctrl-C, or SIGTERM, stops the server after
    running answers have ended, or after 30 seconds.
    """
    with exit_codes(verbose):
        nbytes = parse_bytes(cache_memory, "--cache-memory")
        host_bytes = parse_bytes(host_cache, "--host-cache")
        if "" in (api_key or ()):
            raise typer.BadParameter("the key must not be empty", param_hint="--api-key")
        if "" in (served_name or ()):
            raise typer.BadParameter("the name must not be empty", param_hint="--served-name")
        origins = [parse_origin(each) for each in cors_origin or ()]
        allowed = [parse_host(each) for each in allowed_host or ()]
        adapters = dict(map(parse_adapter, adapter or ()))
        of_one = (
            *(served_name or None, revision, adapters or None),
            *(chat_template, draft, draft_quantize),
        )
        if len(models) > 1 and any(given is not None for given in of_one):
            raise RequestError(
                "--served-name, --revision, --adapter, --chat-template, --draft and "
                "--draft-quantize can only be given with a single model."
            )
        with needs_extra("infer serve"):
            from infer.server.run import is_local, listen, logging_to_stderr, url
            from infer.server.run import serve as serve_until_signal
            from infer.server.service import Host, ServerOptions
        from infer.engine.host_memory import CAN_SHARE, HostMemory
        from infer.text.chat import own_template

        memory = HostMemory(host_bytes) if host_bytes is not None and CAN_SHARE else None
        load_options: dict[str, Any] = {
            "device": device,
            "webgpu": webgpu,
            "precision": precision,
            "context": context,
            "dtype": dtype,
            "quantize": quantize,
            "kv_dtype": kv_dtype,
            "max_batch": max_batch,
            "cache_memory": nbytes,
            "host_cache": host_bytes if memory is None else None,
            "host_memory": memory,
            "invariant": invariant,
            "speculate": speculate,
            "draft": draft,
            "draft_quantize": draft_quantize,
            "adapters": adapters or None,
            "chat_template": None if chat_template is None else own_template(chat_template),
            "offline": offline,
        }
        if len(models) > 1:  # several models are loaded when clients ask for them
            from infer.loading import check_options

            check_options(**load_options)
        sources = [_Source(model, revision, load_options) for model in models]
        # First: a port that is taken shows before the model is read.
        with listen(host, port) as opened:
            address = url(opened)
            if is_local(opened):
                allowed.append(host)
            options = ServerOptions(
                names=served_name or (),
                api_keys=api_key or (),
                strict=strict,
                cors_origins=origins or (),
                allowed_hosts=allowed or None,
                cache_folder=cache_folder,
            )
            ready = lambda host: write(_screen(host, address))  # noqa: E731
            with logging_to_stderr(log_level.value):
                served = Host(sources, options, keep_alive, ready, webgpu, memory=memory)
                serve_until_signal(served, opened)
        note("stopped")


class _Source:
    """A model to serve, by the name that the command was given."""

    def __init__(self, model: str, revision: str | None, options: Mapping[str, Any]) -> None:
        self._model, self._revision, self._options = model, revision, options
        self._path: Path | None = None

    def find(self, progress: Progress) -> str:
        from infer.hub import resolve

        with ProgressLine() as line:
            found = resolve(
                self._model,
                revision=self._revision,
                offline=self._options["offline"],
                progress=partial(_both(line.loading, progress), "download"),
            )
        self._path = found.path
        return found.name

    def load(self, progress: Progress) -> LLM:
        from infer.loading import load

        assert self._path is not None
        with warnings_as_notes(False), ProgressLine() as line:
            progress = _both(line.loading, progress)
            return load(self._path, **self._options, isolate=True, progress=progress)


def _both(first: Progress, second: Progress) -> Progress:
    def report(what: str, done: int, total: int) -> None:
        first(what, done, total)
        second(what, done, total)

    return report


@contextmanager
def needs_extra(what: str) -> Iterator[None]:
    """Raises InferError if a package that the block imports is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InferError(
            f"{what} needs the package {error.name}. Install all that it needs: "
            "pip install 'infer-wgpu[serve]', or in a checkout pip install '.[serve]'."
        ) from error


def cache_text(cache: PoolStats) -> str:
    """Returns what the KV cache has room for."""
    text = f"{cache.tokens:,} tokens of all answers"
    if not cache.window:
        return text
    tokens = f"{cache.window_tokens:,} in layers that see the last {cache.window:,} of each"
    return f"{text}; {tokens}"


def _screen(host: Host, address: str) -> str:
    """Returns what `infer serve` prints once the server answers: its addresses, models and GPU."""

    names = [model.id for model in host.models().data]
    rows = {
        "address": f"{address}/v1",
        "chat": f"{address}/ in a browser",
        "model": ", ".join(names) + (", or any other name" if "*" in host.options.names else ""),
    }
    chat, asked = True, ""
    if (llm := host.only) is not None:
        stats = llm.stats()
        rows["memory"] = f"{size(stats.memory.allocated)} on {llm.gpu.name}, more as it is used"
        rows["slots"] = f"{llm.slots} answers at once, each of up to {llm.context:,} tokens"
        rows["cache"] = cache_text(stats.cache)
        chat = llm.tokenizer.has_chat_template
    else:
        rows["loaded"] = "each at its first request"
        asked = f'"model": {json.dumps(names[0])}, '
    asked += '"messages": [{"role": "user", "content": "Hello"}]' if chat else '"prompt": "Hello"'
    key = " -H 'Authorization: Bearer KEY'" if host.options.api_keys else ""
    url = "" if address == DEFAULT_URL else f" --url {address}"
    about = wrapped(table(rows), sys.stdout)
    return (
        f"{about}\n\ncurl {address}/v1/{'chat/' * chat}completions{key} \\\n"
        f"  -H 'Content-Type: application/json' -d '{{{asked}, \"max_tokens\": 50}}'\n\n"
        f"Coding agents: infer connect claude-code{url} (or codex, opencode, ...)\n"
        "Ctrl-C stops the server.\n"
    )
