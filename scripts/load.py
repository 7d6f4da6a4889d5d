"""Puts a load of requests on a server with OpenAI's API, this project's or another.

    python scripts/load.py --clients 32 --requests 320           clients that wait for their answers
    python scripts/load.py --rate 4 --seconds 60                 arrivals that do not (Poisson)
    python scripts/load.py --clients 64 --shared 0.5 --cancel 0.1 --pid $(pgrep -f 'infer serve')
    python scripts/load.py --clients 64 --stub                   what this client itself can take
    python scripts/load.py --clients 8 --extra '{"ignore_eos": true}'    other engines

Prompts are of an eighth of --prompt-tokens to all of them, as in `infer bench --clients`: random
ids, sent to /v1/completions, or random words where a server takes text alone (--words, --chat).
Answers have --tokens: let nothing end them earlier, by a model without stop ids (make_shape.py), or
by what the server knows for it in --extra, such as ignore_eos or a logit_bias; how many were
shorter is said. All are streamed. Times are what a client sees: to the first token (TTFT), from one
event with text to the next (ITL), and to the end (e2e), in seconds, the median and the 99th
percentile. --json writes all of it to scripts/results/serve/.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import socket
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS.parent))

from infer.bench.measure import percentiles, prompts  # noqa: E402

WORDS = ("a", "bird", "cat", "day", "each", "fish", "green", "house", "in", "just", "moon", "new")


# Requests and answers


@dataclass
class Request:
    """A request of the load. Times are in seconds since the beginning of the load. status: 200,
    another status, or in words what went wrong. leave: the number of tokens after which the client
    goes away. times: when events with text came."""

    sent: float
    leave: int | None
    status: int | str = "no answer"
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    left: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Sample:
    """The resources of the server's processes together: bytes of memory, threads, sockets,
    files."""

    at: float
    memory: int
    threads: int
    sockets: int
    files: int


@dataclass(frozen=True)
class LoadReport:
    """model to commit: as the server tells them; None and {} where it does not. errors: how many,
    by status or in words. short: whole answers with fewer tokens than asked for. tps: tokens per
    second. client_share: of a core, that this client took: near 1 it is what was measured.
    per_second: requests sent, those that ended, and tokens."""

    date: str
    url: str
    model: str | None
    context: int | None
    adapter: str | None
    adapter_kind: str | None
    backend: str | None
    driver: str | None
    versions: dict[str, str]
    commit: str | None
    options: dict[str, Any]
    requests: int
    whole: int
    left: int
    errors: dict[str, int]
    short: int
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    seconds: float
    tps: float
    ttft_seconds: tuple[float, float] | None
    itl_seconds: tuple[float, float] | None
    e2e_seconds: tuple[float, float] | None
    client_share: float
    per_second: list[tuple[int, int, int]]
    server: list[Sample]

    def __str__(self) -> str:
        def times(name: str, pair: tuple[float, float] | None) -> str:
            if pair is None:
                return f"{name:10} none"
            return f"{name:10} p50 {1e3 * pair[0]:,.1f} ms, p99 {1e3 * pair[1]:,.1f} ms"

        errors = ", ".join(f"{n} x {name}" for name, n in self.errors.items()) or "none"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [
            f"server     {self.model or 'unknown'}, {self.adapter or 'adapter unknown'}"
            + (f", {versions}" if versions else "")
            + (f" ({self.commit})" if self.commit else ""),
            f"requests   {self.requests:,} in {self.seconds:.1f} s: {self.whole:,} whole, "
            f"{self.left:,} left by the client",
            f"errors     {errors}",
            f"tokens     {self.tokens:,} of answers, {self.tps:,.1f} tokens/s; "
            f"{self.prompt_tokens:,} of prompts, {self.cached_tokens:,} of them cached",
            times("TTFT", self.ttft_seconds),
            times("ITL", self.itl_seconds),
            times("e2e", self.e2e_seconds),
            f"client     {100 * self.client_share:.0f} % of a core",
        ]
        if self.short:
            lines.append(f"short      {self.short:,} answers have less than --tokens")
        if self.server:
            lines += ["", "server         s  memory MiB  threads  sockets  files"]
            step = max(1, len(self.server) // 10)
            lines += [
                f"{each.at:16.0f}  {each.memory / 2**20:10.1f}  {each.threads:7}  "
                f"{each.sockets:7}  {each.files:5}"
                for each in [*self.server[::step], self.server[-1]]
            ]
        return "\n".join(lines)


# One request


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content)))


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_read_event = msgspec.json.Decoder(_Event).decode


class Connection(asyncio.Protocol):
    """A connection that carries one request after the other, as long as the server keeps it
    open."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._transport: asyncio.Transport | None = None
        self._request: Request | None = None
        self._done: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: Request, head_and_body: bytes, seconds: float) -> None:
        """Send a request and read its answer, until it has ended or nothing came for `seconds`."""
        assert self._transport is not None
        self._request, self._rest, self._is_stream = request, b"", False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head_and_body)
        try:
            await asyncio.wait_for(self._done, seconds)
        except TimeoutError:
            request.status = "timeout"
            self.close()
        finally:
            request.ended = time.perf_counter() - self._begin
            self._request = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._request is not None and not self._request.left:
            self._request.status = "connection lost"
        self._end()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._request is not None and not self._request.left:
                self._request.status = f"no HTTP: {error}"
            self.close()

    def on_headers_complete(self) -> None:
        assert self._request is not None
        self._request.status = self._parser.get_status_code()
        self._is_stream = self._request.status == 200
        self._leave_in_time()

    def on_body(self, data: bytes) -> None:
        request = self._request
        if request is None or not self._is_stream:
            return
        now = time.perf_counter() - self._begin
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for text in events:
            if not text.startswith(b"data: {"):  # a comment, or the end
                continue
            event = _read_event(text[6:])
            if event.error is not None:
                request.status = "error event"
            if event.usage is not None:
                usage = event.usage
                request.prompt_tokens, request.tokens = usage.prompt_tokens, usage.completion_tokens
                details = usage.prompt_tokens_details or {}
                request.cached_tokens = details.get("cached_tokens") or 0
            if any(choice.has_text for choice in event.choices):
                request.times.append(now)
        self._leave_in_time()

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        self._end()

    def _leave_in_time(self) -> None:
        request = self._request
        if request is None or request.leave is None or len(request.times) < request.leave:
            return
        if self._is_stream:
            request.left = True
            self.close()
            self._end()

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


# The server's versions, model and metrics


def told(url: str, api_key: str | None, model: str | None) -> dict[str, Any]:
    """Returns the fields of LoadReport that the server itself tells. url: the address that --url
    gave. model: the model's name, or None for the server's first."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def ask(url: str) -> Any:
        request = urllib.request.Request(url, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.load(answer)
        except (OSError, HTTPException, ValueError):  # no server, or one that does not tell
            return {}

    base = url.rstrip("/")
    listed = ask(f"{base}/models").get("data") or [{}]
    own = next((each for each in listed if each.get("id") == model), listed[0])
    gpu = own.get("gpu") or {}
    version = ask(f"{base.removesuffix('/v1')}/version")
    alone = {own.get("owned_by", "server"): version["version"]} if "version" in version else {}
    return {
        "model": own.get("id"),
        "context": own.get("max_model_len"),
        "adapter": gpu.get("name"),
        "adapter_kind": gpu.get("type"),
        "backend": gpu.get("backend"),
        "driver": gpu.get("driver"),
        "versions": version.get("versions", alone),
        "commit": version.get("commit"),
    }


# All of them


@dataclass
class Load:
    """The load of requests. args: the options of the command line."""

    args: argparse.Namespace
    requests: list[Request] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        args = self.args
        self._draw = random.Random(3)
        ids: Sequence[Any] = WORDS if args.words or args.chat else range(*args.ids)
        self._prompts = prompts(ids, args.prompt_tokens)
        self._shared = [self._draw.choice(ids) for _ in range(args.prompt_tokens)]
        self._idle: list[Connection] = []
        place = urlsplit(args.url)
        self._address = place.hostname or "", place.port or 80
        path = place.path.rstrip("/") + ("/chat/completions" if args.chat else "/completions")
        key = f"Authorization: Bearer {args.api_key}\r\n" if args.api_key else ""
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: {place.netloc}\r\n{key}"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()

    async def run(self) -> LoadReport:
        args = self.args
        self._told = await asyncio.to_thread(told, args.url, args.api_key, args.model)
        self._begin = time.perf_counter()
        if args.warm_up:
            await asyncio.gather(*(self._request() for _ in range(args.clients or 1)))
            for connection in self._idle:
                connection.close()
            self.requests.clear()
            self._begin = time.perf_counter()
        cpu = time.process_time()
        watching = asyncio.create_task(self._watch())
        if args.clients:
            await asyncio.gather(*(self._client() for _ in range(args.clients)))
        else:
            await self._arrivals()
        watching.cancel()
        cpu = time.process_time() - cpu
        if args.pid:
            self.samples.append(sample(args.pid, self._now()))
        for connection in self._idle:
            connection.close()
        return self._report(cpu / self._now())

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    def _is_over(self) -> bool:
        args = self.args
        if args.seconds is not None:
            return self._now() >= args.seconds
        return len(self.requests) >= args.requests

    async def _client(self) -> None:
        while not self._is_over():
            request = await self._request()
            if request.status != 200:
                await asyncio.sleep(0.1)  # like a client that tries again

    async def _arrivals(self) -> None:
        at = 0.0
        async with asyncio.TaskGroup() as tasks:
            while not self._is_over():
                tasks.create_task(self._request())
                at += self._draw.expovariate(self.args.rate)
                await asyncio.sleep(max(0.0, at - self._now()))

    async def _request(self) -> Request:
        args = self.args
        leave = self._draw.randrange(args.tokens) if self._draw.random() < args.cancel else None
        request = Request(self._now(), leave)
        self.requests.append(request)
        body = msgspec.json.encode(self._body())
        data = b"%s%d\r\n\r\n%s" % (self._head, len(body), body)
        connection = next((c for c in self._taken() if c.is_open), None)
        if connection is None:
            try:
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(
                    lambda: Connection(self._begin), *self._address
                )
            except OSError as error:
                request.status, request.ended = f"no connection: {error.strerror}", self._now()
                return request
        await connection.send(request, data, args.timeout)
        if connection.is_open:
            self._idle.append(connection)
        return request

    def _taken(self) -> Iterator[Connection]:
        while self._idle:
            yield self._idle.pop()

    def _body(self) -> dict[str, Any]:
        args = self.args
        prompt: Any = next(self._prompts)
        if self._draw.random() < args.shared:
            half = len(prompt) // 2
            prompt = self._shared[:half] + prompt[half:]
        if args.words or args.chat:
            prompt = " ".join(prompt)
        asked = {"messages": [{"role": "user", "content": prompt}]} if args.chat else None
        body: dict[str, Any] = asked or {"prompt": prompt}
        body |= {"max_tokens": args.tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if args.model is not None:
            body["model"] = args.model
        if args.schema is not None:
            schema = {"name": "schema", "schema": args.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body | args.extra

    async def _watch(self) -> None:
        while self.args.pid:
            self.samples.append(sample(self.args.pid, self._now()))
            await asyncio.sleep(1)

    def _report(self, client_share: float) -> LoadReport:
        good = [each for each in self.requests if each.status == 200]
        whole = [each for each in good if not each.left]
        for each in good:
            each.tokens = each.tokens or len(each.times)  # where no usage came
        first = min((each.sent for each in self.requests), default=0.0)
        seconds = max((each.ended for each in self.requests), default=0.0) - first
        sent = Counter(int(each.sent) for each in self.requests)
        ended = Counter(int(each.ended) for each in self.requests)
        tokens = Counter(int(at) for each in good for at in each.times)
        made = sum(each.tokens for each in good)
        args = self.args
        shown = {k: v for k, v in vars(args).items() if k not in ("api_key", "url", "json", "pid")}
        return LoadReport(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            url=args.url,
            **self._told,
            options=shown,
            requests=len(self.requests),
            whole=len(whole),
            left=sum(each.left for each in self.requests),
            errors=dict(Counter(str(r.status) for r in self.requests if r.status != 200)),
            short=sum(each.tokens < args.tokens for each in whole),
            prompt_tokens=sum(each.prompt_tokens for each in whole),
            cached_tokens=sum(each.cached_tokens for each in whole),
            tokens=made,
            seconds=seconds,
            tps=made / seconds if seconds else 0.0,
            ttft_seconds=_of(each.times[0] - each.sent for each in good if each.times),
            itl_seconds=_of(b - a for each in good for a, b in pairwise(each.times)),
            e2e_seconds=_of(each.ended - each.sent for each in whole),
            client_share=client_share,
            per_second=[(sent[s], ended[s], tokens[s]) for s in range(int(self._now()) + 1)],
            server=self.samples,
        )


def _of(values: Iterable[float]) -> tuple[float, float] | None:
    own = list(values)
    return percentiles(own) if own else None


# The server's process


def sample(pid: int, at: float) -> Sample:
    """Returns the resources of a process and its children, from Linux's /proc; zeros if there is no
    /proc."""
    memory = threads = sockets = files = 0
    for each in _family(pid):
        with suppress(OSError):
            status = Path(f"/proc/{each}/status").read_text()
            numbers = {name: int(n) for name, n in re.findall(r"(VmRSS|Threads):\s+(\d+)", status)}
            memory += 1024 * numbers.get("VmRSS", 0)
            threads += numbers.get("Threads", 0)
            for descriptor in Path(f"/proc/{each}/fd").iterdir():
                files += 1
                with suppress(OSError):
                    sockets += str(descriptor.readlink()).startswith("socket:")
    return Sample(at, memory, threads, sockets, files)


def _family(pid: int) -> Iterator[int]:
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in path.read_text().split():
                yield from _family(int(child))


# A server that answers at once


@contextmanager
def stub() -> Iterator[str]:
    """Run a server without a model in a process of its own, and yield its URL."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as opened:
        process = multiprocessing.get_context("fork").Process(target=_stub, args=(opened,))
        process.start()
        try:
            yield f"http://127.0.0.1:{opened.getsockname()[1]}/v1"
        finally:
            process.terminate()
            process.join()


def _stub(opened: socket.socket) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET "):
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    continue
                length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
                tokens = json.loads(await reader.readexactly(length))["max_tokens"]
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                for _ in range(tokens):
                    writer.write(b"%x\r\n%s\r\n" % (len(event), event))
                    await asyncio.sleep(0)
                end = b"data: [DONE]\n\n"
                writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(end), end))
                await writer.drain()
        writer.close()

    choice = '{"index":0,"text":" word","logprobs":null,"finish_reason":null}'
    event = (
        f'data: {{"id":"cmpl-{"0" * 32}","object":"text_completion","created":1700000000,'
        f'"model":"stub","choices":[{choice}],"usage":null}}\n\n'
    ).encode()

    async def main() -> None:
        server = await asyncio.start_server(answer, sock=opened)
        await server.serve_forever()

    asyncio.run(main())


# The command line


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    add("--api-key")
    add("--model", help="default: the server's own")
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--clients", type=_count, help="each of which waits for its answer")
    load.add_argument("--rate", type=float, help="requests a second")
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--requests", type=_count, default=100, help="default: %(default)s")
    end.add_argument("--seconds", type=float, help="in which requests are sent")
    add(
        "--warm-up",
        action="store_true",
        help="a request of each client before, that does not count: those after it are of the same "
        "lengths as in infer bench --clients",
    )
    add("--prompt-tokens", type=_count, default=512, help="at most; default: %(default)s")
    add("--tokens", type=_count, default=128, help="of each answer; default: %(default)s")
    add(
        "--ids", type=_ids, default=(100, 1000), metavar="A-B", help="of prompts; default: 100-1000"
    )
    add("--words", action="store_true", help="prompts of words, not of ids")
    add("--chat", action="store_true", help="to /v1/chat/completions, in words")
    add("--shared", type=_share, default=0.0, help="of prompts, whose first half is the same")
    add("--cancel", type=_share, default=0.0, help="of requests, left in the middle of the answer")
    add("--schema", type=_json_file, metavar="FILE", help="of all answers")
    add("--extra", type=_object, default={}, metavar="JSON", help="for the body of requests")
    add("--timeout", type=float, default=600.0, help="seconds of a request; default: %(default)s")
    add("--pid", type=int, help="of the server on this machine, to watch")
    add("--stub", action="store_true", help="a server that answers at once, in place of --url")
    add("--json", metavar="NAME", help="of the report in scripts/results/serve, after the date")
    return parser.parse_args(given)


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _share(text: str) -> float:
    if not 0 <= float(text) <= 1:
        raise ValueError
    return float(text)


def _ids(text: str) -> tuple[int, int]:
    first, last = map(int, text.split("-"))
    if first > last:
        raise ValueError
    return first, last + 1


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _json_file(path: str) -> dict[str, Any]:
    return _object(Path(path).read_text())


def main() -> None:
    args = arguments()
    if args.stub:
        with stub() as args.url:
            report = asyncio.run(Load(args).run())
    else:
        report = asyncio.run(Load(args).run())
    print(report)
    if args.json:
        folder = SCRIPTS / "results" / "serve"
        folder.mkdir(exist_ok=True)
        path = folder / f"{report.date[:10]}-{args.json}.json"
        path.write_text(json.dumps({"schema": 1, **asdict(report)}, indent=1) + "\n")
    if report.errors:
        sys.exit(1)


if __name__ == "__main__":
    main()
