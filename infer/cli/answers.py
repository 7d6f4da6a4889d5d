"""The source of answers in `infer chat`: a model in this process, or a server."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from infer.cli.client import Client
from infer.cli.terminal import note, warnings_as_notes
from infer.kernels.errors import InferError, RequestError

if TYPE_CHECKING:
    from infer.llm import LLM


THINKING = ("enable_thinking", "thinking")
"""The names that chat templates have for the option that turns thinking on or off."""
_LINE = 16 << 20  # bytes of an event, or of an error's body, at most
_SILENCE = 300.0  # seconds without a byte after which a server is given up


@dataclass(frozen=True)
class Piece:
    """A part of an answer, or of the reasoning that comes before it."""

    text: str
    reasoning: bool = False


Messages = Sequence[Mapping[str, str]]
Pieces = Generator[Piece, None, None]


class Answerer(Protocol):
    """Answers chats. tokens: the number of tokens of the last answer, None if it is not known.
    finish_reason: why the last answer ended. template_args: variables for the chat template."""

    name: str
    template_args: dict[str, Any]
    tokens: int | None
    finish_reason: str | None

    def answer(self, messages: Messages, params: Mapping[str, Any]) -> Pieces:
        """Answer a chat. params: options of SamplingParams. Closing the result ends the answer.
        Raises InferError."""

    def count(self, messages: Messages) -> tuple[int, int]:
        """The number of tokens of the messages, and of the context. Raises InferError if they are
        not known."""

    def check_thinking(self) -> None:
        """Raises RequestError if it is known that thinking has no switch."""

    def save_cache(self, path: Path, messages: Messages) -> int | None:
        """Save in a file what the next message's prompt has in common with these messages, as it is
        computed. Returns how many tokens that are; None where there is no such file. Raises
        InferError."""

    def load_cache(self, path: Path) -> int | None:
        """Let prompts go on from such a file. Returns how many tokens it has; None where it is of
        no use. Raises InferError."""


class Model:
    """Answers of a model in this process."""

    def __init__(self, llm: LLM, template_args: Mapping[str, Any]) -> None:
        if not llm.tokenizer.has_chat_template:
            raise RequestError(
                f"{llm.name} has no chat template, so it cannot chat. To have it continue a text: "
                'infer run MODEL "TEXT".'
            )
        self._llm, self.template_args = llm, dict(template_args)
        self.name = llm.name
        self.tokens: int | None = None
        self.finish_reason: str | None = None
        self._told: set[str] = set()

    def answer(self, messages: Messages, params: Mapping[str, Any]) -> Pieces:
        with warnings_as_notes(False, self._told):
            stream = self._llm.stream(list(messages), template_args=self.template_args, **params)
        with stream:
            try:
                for chunk in stream:
                    if chunk.reasoning:
                        yield Piece(chunk.reasoning, reasoning=True)
                    if chunk.text:
                        yield Piece(chunk.text)
            finally:
                self.tokens = stream.so_far.completion_tokens
                self.finish_reason = stream.so_far.finish_reason

    def count(self, messages: Messages) -> tuple[int, int]:
        args = self.template_args | {"add_generation_prompt": False}
        return len(self._llm.encode([dict(each) for each in messages], **args)), self._llm.context

    def check_thinking(self) -> None:
        from infer.text.template import reads

        templates = self._llm.tokenizer.templates.values()
        if not any(reads(template, name) for template in templates for name in THINKING):
            raise RequestError(
                f"Thinking cannot be turned on or off: {self.name}'s chat template has no such "
                "option."
            )

    def save_cache(self, path: Path, messages: Messages) -> int | None:
        # Templates write the last answer in another way once a message follows it.
        following = ({"role": "user", "content": text} for text in ("a", "1"))
        prompts = [self._llm.encode([*messages, each], **self.template_args) for each in following]
        common = takewhile(lambda ids: ids[0] == ids[1], zip(*prompts, strict=False))
        return self._llm.save_cache(path, [ids[0] for ids in common])

    def load_cache(self, path: Path) -> int | None:
        return self._llm.load_cache(path)


class Server:
    """Answers of a server with OpenAI's API."""

    def __init__(
        self,
        url: str,
        model: str | None,
        api_key: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        """model: the server's first, if left out. Raises InferError if it has none."""
        self._client = Client(url, api_key, _SILENCE)
        self.template_args = dict(template_args or {})
        self.tokens: int | None = None
        self.finish_reason: str | None = None
        self._told: set[str] = set()
        self.name = model or self._first_model()

    def _first_model(self) -> str:
        with self._ask("/models") as response:
            try:
                return str(json.loads(response.read(_LINE))["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise InferError(
                    f"The server at {self._client.url} lists no model. Give one: "
                    "infer chat MODEL --url …"
                ) from None

    @contextmanager
    def _ask(
        self, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """A response with status 200. Raises InferError."""
        with self._client.ask(f"/v1{path}", body) as response:
            if response.status != 200:
                raise InferError(_told(response, self._client.url))
            yield response

    def answer(self, messages: Messages, params: Mapping[str, Any]) -> Pieces:
        self.tokens = self.finish_reason = None
        body: dict[str, Any] = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **params,
        }
        if self.template_args:
            body["chat_template_kwargs"] = self.template_args
        with self._ask("/chat/completions", body) as response:
            warning = response.getheader("X-Infer-Warning")
            if warning is not None and warning not in self._told:
                self._told.add(warning)
                note(f"note: {warning}")
            for event in _events(response):
                if "error" in event:
                    raise InferError(str(event["error"].get("message", "The answer failed.")))
                if event.get("usage"):
                    self.tokens = event["usage"]["completion_tokens"]
                for choice in event.get("choices", ()):
                    delta = choice.get("delta", {})
                    self.finish_reason = choice.get("finish_reason") or self.finish_reason
                    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
                    if reasoning:
                        yield Piece(reasoning, reasoning=True)
                    if delta.get("content"):
                        yield Piece(delta["content"])

    def count(self, messages: Messages) -> tuple[int, int]:
        body = {
            "model": self.name,
            "messages": list(messages),
            "add_generation_prompt": False,
            "chat_template_kwargs": self.template_args,
        }
        with self._client.ask("/tokenize", body) as response:  # vLLM has this endpoint, too
            try:
                told = json.loads(response.read(_LINE))
                return int(told["count"]), int(told["max_model_len"])
            except (ValueError, LookupError, TypeError):
                raise InferError(
                    f"The server at {self._client.url} does not count tokens."
                ) from None

    def check_thinking(self) -> None:
        """Does nothing: servers ignore variables that their templates do not read, so nobody can
        tell."""

    def save_cache(self, path: Path, messages: Messages) -> int | None:
        return None  # it is the server's own

    def load_cache(self, path: Path) -> int | None:
        return None


def _told(response: http.client.HTTPResponse, url: str) -> str:
    """Returns a server's message about a request that it refuses."""
    try:
        return str(json.loads(response.read(_LINE))["error"]["message"])
    except (ValueError, LookupError, TypeError):
        status = f"{response.status} {response.reason}".strip()
        if response.status == 404:
            return f"The server at {url} does not have OpenAI's API (status {status})."
        return f"The server at {url} answered with status {status}."


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yields the server-sent events of a response, up to [DONE]. Raises InferError where the stream
    ends before."""
    lost = "The connection to the server was lost before the answer was complete."
    try:
        while line := response.readline(_LINE):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if isinstance(event, dict):
                yield event
    except (OSError, http.client.HTTPException) as error:
        raise InferError(lost) from error
    except ValueError as error:
        raise InferError("The server's answer does not have the form of OpenAI's API.") from error
    raise InferError(lost)
