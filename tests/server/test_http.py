"""Clients that are slow, broken or mean no good, over real sockets: each is cut off in the end, and
others are served meanwhile. Limits of time are made so short that they pass at once."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from typing import Any
from urllib.parse import urlsplit

import pytest
from serving import (
    CHAT,
    COMPLETIONS,
    JSON,
    FakeAnswer,
    FakeEngine,
    ask,
    connect,
    events,
    fake_service,
    serving,
    wait_for,
)

from infer.llm import Prompt
from infer.results import Chunk
from infer.server.admission import LARGE
from infer.server.http import HEAD_BYTES, Connection, most_connections

HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
BODY = json.dumps({"prompt": "x"}).encode()
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    place = urlsplit(address)
    with socket.create_connection((place.hostname, place.port or 0), timeout=60) as opened:
        yield opened


def told(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    data = b""
    try:
        while part := client.recv(1 << 16):
            data += part
    except ConnectionError:  # what was sent meanwhile is not read any more
        pass
    return data


def status(data: bytes) -> int:
    """Returns the status of a response whose body is an error of OpenAI's kind."""
    head, _, body = data.partition(b"\r\n\r\n")
    assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
    return int(head.split()[1])


@pytest.fixture
def address() -> Iterator[str]:
    with serving(fake_service(FakeEngine(), max_body=1000)) as address:
        yield address
        assert ask(address, COMPLETIONS, {"prompt": "x"})[0].status == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\r\n",
        HEAD[:9],
        HEAD,
        HEAD + b"Content-Length: 10\r\n\r\n{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        REQUEST + HEAD,
        REQUEST + b"\r\n",
    ],
)
def test_a_request_that_never_comes(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.server.http.REQUEST_SECONDS", 0.05)
    monkeypatch.setattr("infer.server.run.IDLE_SECONDS", 0.05)
    with serving(fake_service(FakeEngine())) as address, connected(address) as client:
        client.sendall(sent)
        told(client)  # which ends


def test_one_that_does_not_come_is_told_so(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.server.http.REQUEST_SECONDS", 0.05)
    for sent in (HEAD[:9], HEAD + b"Content-Length: 10\r\n\r\n{"):
        with connected(address) as client:
            client.sendall(sent)
            assert status(told(client)) == 408


def test_an_answer_may_take_longer_than_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that come after the request, such as the newline of old clients, change nothing."""
    monkeypatch.setattr("infer.server.http.REQUEST_SECONDS", 0.01)
    late = []
    own = Connection._late
    monkeypatch.setattr(Connection, "_late", lambda self: (late.append(self), own(self)))
    engine = FakeEngine(waits=True)
    with serving(fake_service(engine)) as address, connected(address) as client:
        client.sendall(REQUEST)
        wait_for(lambda: len(engine.asked) == 2)
        client.sendall(b"\r\n")
        wait_for(lambda: len(late) > 2)
        engine.go_on.set()
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * HEAD_BYTES,
        b"GET /health HTTP/1.1\r\n" + b"X-Many: x\r\n" * (HEAD_BYTES // 11 + 1),
        b"GET /" + b"x" * HEAD_BYTES,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X-After: x\r\n" * HEAD_BYTES,
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * HEAD_BYTES + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Many: x\r\n" * 6000 + b"\r\n",
        b"GET /?" + b"x" * HEAD_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        HEAD
        + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"
        + b"X-After: x\r\n" * 6000
        + b"\r\n"
        + REQUEST,
    ],
)
def test_a_head_that_is_too_large(address: str, sent: bytes) -> None:
    """Whether it has an end, and comes at once, or not."""
    with connected(address) as client:
        client.sendall(sent)
        assert status(told(client)) == 431


def test_a_head_that_is_just_small_enough(address: str) -> None:
    sent = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    with connected(address) as client:
        client.sendall(sent + b"X-Long: " + b"x" * (HEAD_BYTES - 100) + b"\r\n\r\n")
        assert told(client).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_chunks_are_for_those_who_know_them(version: bytes) -> None:
    """RFC 9112, 6.1 and 6.3: a stream to HTTP/1.0 ends with its connection."""
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/" + version) + b"Connection: close\r\n"
    with serving(fake_service(FakeEngine())) as address:
        for stream in (True, False):
            body = json.dumps({"prompt": "x", "stream": stream}).encode()
            with connected(address) as client:
                client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                got, _, data = told(client).partition(b"\r\n\r\n")
            assert got.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"\r\nconnection: close" in got
            chunked = stream and version == b"1.1"
            assert (b"transfer-encoding" in got) == chunked
            if not stream:
                assert b"content-length: %d" % len(data) in got
                assert json.loads(data)["choices"][0]["text"] == "ab"
            elif not chunked:
                assert "".join(e["choices"][0]["text"] for e in events(data)) == "ab"


# Its own name


def asked_as(address: str, *hosts: str, version: str = "1.1") -> bytes:
    sent = f"GET /health HTTP/{version}\r\nConnection: close\r\n"
    sent += "".join(f"Host: {host}\r\n" for host in hosts) + "\r\n"
    with connected(address) as client:
        client.sendall(sent.encode())
        return told(client)


OWN = [
    *("localhost", "LocalHost.:80", "127.0.0.1", "127.0.0.1:8000", "127.1.2.3:1", "[::1]:8000"),
    *("[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "0.0.0.0:8000", "a.localhost", "192.168.1.7:8000"),
    *("host.docker.internal:8000", "box.local:8000", socket.gethostname().upper() + ":8000"),
    *("example.org", "Example.ORG.:443"),
]
FOREIGN = [
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
    *("sub.example.org", "example.org.evil", "local", "notlocal", "8.8.8.8", "[2606:4700::1]", ""),
]


def test_names_of_the_server() -> None:
    """A page of the web can have its own name mean this machine. As Ollama answers since
    CVE-2024-28224 (`allowedHostsMiddleware`)."""
    options = {"allowed_hosts": ["example.ORG"], "cors_origins": ["*"], "api_keys": ["secret"]}
    with serving(fake_service(FakeEngine(), **options)) as address:
        for host in OWN:
            assert asked_as(address, host).startswith(b"HTTP/1.1 200 "), host
        for host in FOREIGN:
            data = asked_as(address, host)
            assert status(data) == 403, host
            assert f"--allowed-host {host.removesuffix(':8000')}".encode() in data
        for path in ("/", "/v1/models", CHAT, "/openapi.json"):
            told_so, data = ask(address, path, headers={"Host": "evil.example"})
            assert (told_so.status, b"not called 'evil.example'" in data) == (403, True)
        forbidden = ask(address, "/v1/messages", {}, {"Host": "evil.example"})[1]
        assert json.loads(forbidden)["error"]["type"] == "permission_error"


def test_one_name_is_given() -> None:
    """RFC 9112, 3.2."""
    wrong = [
        "a b",
        "a@b",
        "::1",
        "localhost:x",
        "localhost:80:80",
        "[::1",
        "http://localhost",
        "$x",
    ]
    for options in ({}, {"allowed_hosts": ["example.org"]}):
        with serving(fake_service(FakeEngine(), **options)) as address:
            for hosts in ((), ("localhost", "localhost"), *((each,) for each in wrong)):
                assert status(asked_as(address, *hosts)) == 400, hosts
            assert asked_as(address, version="1.0").startswith(b"HTTP/1.1 200 ")
    for options in ({}, {"allowed_hosts": ["*"]}):  # {}: where others may connect
        with serving(fake_service(FakeEngine(), **options)) as address:
            assert asked_as(address, "evil.example").startswith(b"HTTP/1.1 200 ")


def test_a_body_that_is_compressed(address: str) -> None:
    body = gzip.compress(BODY)
    for coding in ("gzip", "GZIP", "br", "identity, zstd"):
        response, data = ask(address, COMPLETIONS, body, JSON | {"Content-Encoding": coding})
        assert response.status == 415
        assert f"Content-Encoding: {coding.lower()}".encode() in data
    chunks = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    with connected(address) as client:
        head = HEAD + b"Connection: close\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"
        client.sendall(head + chunks)
        assert status(told(client)) == 501  # RFC 9112, 6.1
    for coding in ("identity", ""):
        assert ask(address, COMPLETIONS, BODY, JSON | {"Content-Encoding": coding})[0].status == 200


def test_what_is_no_http(address: str, caplog: pytest.LogCaptureFixture) -> None:
    for sent in (
        b"\x00\xff\r\n\r\n",
        b"GET / HTTP/7\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
    ):
        with connected(address) as client:
            client.sendall(sent)
            assert status(told(client)) == 400
    assert not caplog.records


def test_no_http_in_the_middle_of_a_stream() -> None:
    service = fake_service(FakeEngine(waits=True), keepalive=600)
    with serving(service) as address, connected(address) as client:
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")
        client.sendall(b"\x00\xff\r\n\r\n")
        assert b"HTTP" not in told(client)
        wait_for(lambda: service.admission.count == 0)


def test_one_that_goes_away_in_its_request(caplog: pytest.LogCaptureFixture) -> None:
    service = fake_service(FakeEngine())
    with serving(service) as address:
        with connected(address) as client:
            client.sendall(HEAD + b"Content-Length: 10\r\n\r\n{")
            wait_for(lambda: service.bodies.nbytes == 1)
        wait_for(lambda: service.bodies.nbytes == 0)
    assert not caplog.records


def test_many_large_requests_at_once() -> None:
    service = fake_service(FakeEngine(), max_body=1000)
    with serving(service) as address:
        clients = []
        for number in range(16):
            client = socket.create_connection(urlsplit(address).netloc.split(":"), timeout=60)
            client.sendall(HEAD + b"Content-Length: 1000\r\n\r\n" + b" " * 999)
            clients.append(client)
            wait_for(lambda sent=number + 1: service.bodies.nbytes == 999 * sent)
        response, data = ask(address, COMPLETIONS, b" " * 50)
        assert response.status == 503
        assert b"Too many large requests" in data
        for client in clients:
            client.close()
        wait_for(lambda: service.bodies.nbytes == 0)
        assert ask(address, COMPLETIONS, {"prompt": "x"})[0].status == 200


class Slow(FakeEngine):
    """Long prompts are encoded when it is let go on."""

    encodes = 0

    async def encode(self, prompt: Prompt, *given: Any, **more: Any) -> list[int]:
        self.asked.append((prompt,))
        self.encodes += 1
        try:
            while len(prompt) > 1 and not self.go_on.is_set():
                await asyncio.sleep(0.01)
        finally:
            self.encodes -= 1
        return [1, 2, 3]


def test_large_requests_take_turns() -> None:
    engine = Slow(waits=True)
    service = fake_service(engine)
    with serving(service) as address:
        body = json.dumps({"prompt": "x" * LARGE}).encode()
        clients = []
        for number in range(1, 5):
            clients.append(connect(address))
            clients[-1].request("POST", COMPLETIONS, body, JSON)
            wait_for(lambda number=number: service.bodies.nbytes == number * len(body))
            wait_for(lambda number=number: engine.encodes == min(number, 2))
        small = json.loads(ask(address, "/tokenize", {"prompt": "x"})[1])
        assert small["count"] == 3
        assert ask(address, "/health")[0].status == 200
        clients.pop().close()  # its turn never comes
        wait_for(lambda: service.bodies.nbytes == 3 * len(body))
        engine.go_on.set()
        for client in clients:
            assert client.getresponse().status == 200
            client.close()
        wait_for(lambda: service.bodies.nbytes == 0)
        assert [len(prompt) for (prompt, *_) in engine.asked].count(LARGE) == 3


def test_large_requests_leave_room_for_small_ones() -> None:
    engine = Slow(waits=True)
    service = fake_service(engine, max_body=LARGE + 100)
    with serving(service) as address:
        body = json.dumps({"prompt": "x" * (LARGE + 50)}).encode()
        clients = []
        for number in range(1, 13):
            clients.append(connect(address))
            clients[-1].request("POST", "/tokenize", body, JSON)
            wait_for(lambda number=number: service.bodies.nbytes == number * len(body))
        response, data = ask(address, "/tokenize", body)
        assert (response.status, response.getheader("retry-after")) == (503, "1")
        assert b"Too many large requests" in data
        assert ask(address, "/tokenize", {"prompt": "x"})[0].status == 200
        engine.go_on.set()
        for client in clients:
            assert client.getresponse().status == 200
            client.close()
        assert ask(address, "/tokenize", body)[0].status == 200


def test_one_that_drains_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """To those who connect then, too, until the last answer has ended."""
    engine = FakeEngine(waits=True)
    service = fake_service(engine)
    with ExitStack() as running:
        address = running.enter_context(serving(service))
        connection = connect(address)
        connection.request("POST", COMPLETIONS, BODY, JSON)
        wait_for(lambda: len(engine.asked) == 2)
        ending = threading.Thread(target=running.close)
        ending.start()
        wait_for(lambda: service.admission.draining)
        for _ in range(3):
            response, data = ask(address, "/health")
            assert (response.status, json.loads(data)["status"]) == (503, "draining")
            assert ask(address, "/metrics")[0].status == 200
            response, data = ask(address, COMPLETIONS, BODY)
            assert (response.status, b"shutting down" in data) == (503, True)
        engine.go_on.set()
        assert connection.getresponse().status == 200
        connection.close()
        ending.join(timeout=60)
        assert not ending.is_alive()
        with pytest.raises(ConnectionError):
            ask(address, "/health")


def test_who_waits_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "most", 2)

    def ask_again(client: socket.socket) -> None:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        data = b""
        while not data.endswith(b"}"):
            data += client.recv(1 << 16)
        assert data.startswith(b"HTTP/1.1 200 OK\r\n")

    with serving(fake_service(FakeEngine())) as address:
        with connected(address) as one, connected(address) as two:
            for client in (one, two, one):
                ask_again(client)
            with connected(address) as three:
                assert told(two) == b""
                for client in (one, three):
                    ask_again(client)
        wait_for(lambda: ask(address, "/health")[0].status == 200)


def test_who_is_answered_makes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "most", 1)
    engine = FakeEngine(waits=True)
    with serving(fake_service(engine)) as address, connected(address) as one:
        one.sendall(REQUEST)
        wait_for(lambda: len(engine.asked) == 2)
        with connected(address) as two:
            assert status(told(two)) == 503
        engine.go_on.set()
        assert one.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    ("connections", "most"),
    [(300, 100), pytest.param(3000, 1000, marks=pytest.mark.full)],
)
def test_a_flood_of_connections(
    monkeypatch: pytest.MonkeyPatch, connections: int, most: int
) -> None:
    """Idle ones, and those in the middle of a head or of a body."""
    if most_connections() < 2 * connections:
        pytest.skip("the limit of open files is too low")
    monkeypatch.setattr(Connection, "most", most)
    begun = b"", HEAD, HEAD + b"Content-Length: 100000\r\n\r\nx"
    with serving(fake_service(FakeEngine())) as address, ExitStack() as opened:
        clients = [opened.enter_context(connected(address)) for _ in range(connections)]
        for client, data in zip(clients, cycle(begun), strict=False):
            with suppress(ConnectionError):  # it was refused
                client.sendall(data)
            if client in clients[:: connections // 10]:
                assert ask(address, COMPLETIONS, {"prompt": "x"})[0].status == 200
        cut = connections + 10 + 1 - most  # the last request has a place, too
        assert ask(address, "/health")[0].status == 200
        assert [status(told(client)) for client in clients[: cut // 2]] == [503] * (cut // 2)
        clients[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            clients[-1].recv(1)


class Endless(FakeAnswer):
    async def __anext__(self) -> Chunk:
        await asyncio.sleep(0.001)
        return Chunk("x" * 100_000, 1)


def test_one_that_does_not_read_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.server.http.WRITE_SECONDS", 0.05)
    engine = FakeEngine()
    monkeypatch.setattr(engine, "answer", lambda: Endless(engine))
    service = fake_service(engine)
    with serving(service) as address, connected(address) as client:
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_for(lambda: service.admission.count == 1)
        wait_for(lambda: service.admission.count == 0)
