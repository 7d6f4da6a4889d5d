"""A server from its socket to its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address

import uvicorn

from infer.kernels.errors import RequestError
from infer.server.app import create_app
from infer.server.http import ACCEPTED, BACKLOG, IDLE_SECONDS, Connection, State
from infer.server.service import Host, Served

DRAIN_SECONDS = 30  # the time that running answers have after a signal
_LAST_SECONDS = 5  # the time after that for connections whose clients have been told of the end


def listen(host: str, port: int) -> socket.socket:
    """Returns a bound socket that accepts no connections yet. port: 0 for any free port. Raises
    RequestError if the address is taken or does not exist."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":  # on Windows this would let two programs listen on one port
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
        except BaseException:
            opened.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(
            f"Nothing can listen on {host}, port {port}: {reason}. Choose others (--host, --port)."
        ) from error
    return opened


def is_local(opened: socket.socket) -> bool:
    """Whether only this machine can connect to the socket."""
    return ip_address(opened.getsockname()[0]).is_loopback


def url(opened: socket.socket) -> str:
    """Returns the URL by which clients on this machine reach the socket."""
    host, port = opened.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves until a signal comes or `should_exit` is set. From then on nothing begins, and running
    answers may end; meanwhile requests are still answered, with the error that the server is
    shutting down."""

    def __init__(self, served: Served, ready: Callable[[], None] = lambda: None) -> None:
        """ready: called once the server listens."""
        config = uvicorn.Config(
            create_app(served),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # mistakes of clients are not logged as warnings
            access_log=False,
            server_header=False,
            backlog=ACCEPTED,
            timeout_keep_alive=IDLE_SECONDS,
        )
        super().__init__(config)
        self.server_state = State()
        self._served, self._ready = served, ready

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        await super().startup(list(sockets or ()))
        for each in sockets or ():
            each.listen(BACKLOG)
        self._served.start()
        self._ready()

    async def shutdown(self, sockets: Sequence[socket.socket] | None = None) -> None:
        self._served.drain()
        asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._served.stopped.set)
        running, begun = set(self.server_state.tasks), time.monotonic()
        while running and not self._served.stopped.is_set() and not self.force_exit:
            _, running = await asyncio.wait(running, timeout=0.1)
        left = DRAIN_SECONDS + _LAST_SECONDS - (time.monotonic() - begun)
        self.config.timeout_graceful_shutdown = max(1, round(left))
        await super().shutdown(list(sockets or ()))


@contextmanager
def logging_to_stderr(level: str) -> Iterator[None]:
    """Opens a block in which the server's messages of this level and above go to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    own = logging.getLogger("infer")
    before = own.level
    own.addHandler(handler)
    own.setLevel(level.upper())
    try:
        yield
    finally:
        own.removeHandler(handler)
        own.setLevel(before)


def serve(host: Host, opened: socket.socket) -> None:
    """Serves until Ctrl-C or SIGTERM, and then until running answers have ended, for at most
    DRAIN_SECONDS; a second Ctrl-C ends them at once. Only the main thread may call it. Raises the
    error with which the host fails."""
    server = Server(host)

    def end() -> None:
        server.should_exit = True

    host.ended = end
    signals = (signal.SIGINT, signal.SIGTERM)
    # uvicorn raises the signal again at its end. By then it has been obeyed.
    before = [signal.signal(each, lambda *_: None) for each in signals]
    try:
        server.run(sockets=[opened])
    finally:
        host.close()
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
    if host.error is not None:
        raise host.error
