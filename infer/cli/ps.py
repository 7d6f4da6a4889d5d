"""`infer ps`: what a server is doing, as its own endpoints tell."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPException
from typing import Annotated, Any

from infer.cli.client import Client
from infer.cli.options import ApiKeyOption, JsonOption, VerboseOption, server_option
from infer.cli.terminal import exit_codes, show
from infer.kernels.errors import InferError
from infer.progress import size, visible

DEFAULT_URL = "http://127.0.0.1:8000"  # the default of `infer serve`
_SECONDS = 10.0  # that it has to answer
_BYTES = 16 << 20  # size of a response, at most


def ps(
    url: Annotated[
        str, server_option("--url", metavar="URL", help="The address of the server.")
    ] = DEFAULT_URL,
    api_key: ApiKeyOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Show the models of a running server, and how busy it is.

    For each loaded model: its GPU memory, how much of the KV cache is in use, and how many answers
    are running and waiting.
    """
    with exit_codes(verbose):
        show(find(url, api_key), as_json)


@dataclass(frozen=True)
class Served:
    """A model of a server. Values that are not known are None, such as those of a model that is not
    loaded. parent: the model of a LoRA adapter. gpu: the GPU that computes the model. cache: the
    share of the cache that is in use, from 0 to 1."""

    name: str
    parent: str | None = None
    gpu: str | None = None
    context: int | None = None
    memory_bytes: int | None = None
    cache: float | None = None
    running: int | None = None
    waiting: int | None = None


@dataclass(frozen=True)
class ServerReport:
    """The output of `infer ps`. status: the health of the server, such as "ok" or "loading"."""

    url: str
    status: str
    models: Sequence[Served]

    def json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        rows = [("model", "GPU", "memory", "context", "cache", "running", "waiting")]
        for each in self.models:
            name = each.name if each.parent is None else f"{each.name} (adapter)"
            rows.append(
                (
                    visible(name).replace("\n", "\\n"),
                    visible(each.gpu or ""),
                    "" if each.memory_bytes is None else size(each.memory_bytes),
                    "" if each.context is None else f"{each.context:,}",
                    "" if each.cache is None else f"{100 * each.cache:.0f} %",
                    "" if each.running is None else f"{each.running}",
                    "" if each.waiting is None else f"{each.waiting}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                [*map(str.ljust, row[:2], widths), *map(str.rjust, row[2:], widths[2:])]
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", f"{self.url}: {visible(self.status)}"])


def find(url: str, api_key: str | None) -> ServerReport:
    """Ask a server for its models and their load. Raises InferError."""
    client = Client(url, api_key, _SECONDS)
    health = _parsed(_get(client, "/health", known=(200, 503)))
    models = _parsed(_get(client, "/v1/models")).get("data")
    metrics = _metrics(_get(client, "/metrics", known=(200, 404)))
    try:
        served = [
            _served(model, metrics[model["id"]])
            for model in models or ()
            if "root" not in model  # with it, it is another name of a model
        ]
        return ServerReport(client.url, str(health.get("status", "unknown")), served)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _other(client) from error


def _served(model: dict[str, Any], metrics: dict[str, float]) -> Served:
    def count(name: str) -> int | None:
        return None if name not in metrics else int(metrics[name])

    return Served(
        str(model["id"]),
        model.get("parent"),
        (model.get("gpu") or {}).get("name"),
        model.get("max_model_len"),
        count("gpu_memory_bytes"),
        metrics.get("kv_cache_usage_perc"),
        count("num_requests_running"),
        count("num_requests_waiting"),
    )


def _metrics(data: bytes) -> defaultdict[str, dict[str, float]]:
    """The values in a text of Prometheus, by model and name, of metrics that have no label but the
    model."""
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    lines = re.findall(r'^vllm:(\w+)\{model_name="(.*)"\} (\S+)$', data.decode(), re.M)
    for name, model, value in lines:
        found[re.sub(r"\\(.)", r"\1", model)][name] = float(value)
    return found


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data or b"{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def _get(client: Client, path: str, known: Sequence[int] = (200,)) -> bytes:
    with client.ask(path) as response:
        if response.status not in known:
            raise _other(client)
        try:
            return response.read(_BYTES)
        except (OSError, HTTPException) as error:
            raise _other(client) from error


def _other(client: Client) -> InferError:
    return InferError(f"The server at {client.url} is not infer.")
