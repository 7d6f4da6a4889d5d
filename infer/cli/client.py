"""HTTP to a server of models, for `infer ps` and `infer chat --url`."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from infer.boundaries import shown
from infer.kernels.errors import InferError, RequestError


class Client:
    """An HTTP client of a server. url: the address to show to people, without a password and
    without the /v1 that it may have been given with."""

    def __init__(self, url: str, api_key: str | None, seconds: float) -> None:
        """seconds: of silence, after which the server is given up. Raises RequestError."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if parts.scheme not in ("http", "https") or host is None:
            raise RequestError(
                f"{shown(url)} is not the address of a server, such as http://127.0.0.1:8000."
            )
        self._secure, self._host, self._port = parts.scheme == "https", host, port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._seconds = seconds
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"

    @contextmanager
    def ask(
        self, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """The response to a GET request, or to a POST request with a body. Raises InferError for
        status 401, and if there is no response."""
        with ExitStack() as opened:
            try:
                connection = opened.enter_context(closing(self._connection()))
                if body is None:
                    connection.request("GET", self._path + path, headers=self._headers)
                else:
                    headers = self._headers | {"Content-Type": "application/json"}
                    data = json.dumps(body).encode()
                    connection.request("POST", self._path + path, data, headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                raise InferError(
                    f"No server answers at {self.url}: {reason}. Start one with infer serve "
                    "MODEL, or give the address of another with --url."
                ) from error
            if response.status == 401:
                given = "Authorization" in self._headers
                wrong = (
                    "refuses this API key: give another by" if given else "needs an API key: give"
                )
                raise InferError(
                    f"The server at {self.url} {wrong} --api-key, or set INFER_API_KEY."
                )
            yield response

    def _connection(self) -> http.client.HTTPConnection:
        if not self._secure:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._seconds)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=self._seconds, context=ssl.create_default_context()
        )
