"""Finds out which parts of messages a chat template shows, and the form in which it reads them.

A template takes a content as text, as a list of parts, or as both, and it may treat one role
otherwise than another. That is found out by rendering short chats and looking for their words in
the result, as llama.cpp does. vLLM looks for loops over contents in the syntax tree instead, which
tells nothing of roles, nor of what becomes of a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from infer.boundaries import foreign
from infer.kernels.errors import TokenizerError
from infer.text.template import render_template
from infer.text.tool_messages import joined, with_arguments

_SECONDS = 1.0  # the most time to render one of the short chats

_TURNS = ("user", "assistant", "tool")  # roles of messages that may stand anywhere
_ROLES = ("system", "developer", *_TURNS)

# Words that no template has of its own.
_OTHER = "zyxrole"
_FIRST, _SECOND, _NO_TEXT = "zyxfirst", "zyxsecond", "zyxnotext"
_KEY, _VALUE = "zyxkey", "zyxvalue"
_USER = {"role": "user", "content": "zyxuser"}
# The id has nine letters and digits, as Mistral's templates want.
_OF_RESULT = {"tool_call_id": "zyxcall01", "name": "zyxtool"}
_PARTS = [{"type": "text", "text": _FIRST, _NO_TEXT: ""}, {"type": "text", "text": _SECOND}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "zyxtool",
        "description": "zyxtool",
        "parameters": {
            "type": "object",
            "properties": {"zyxname": {"type": "string", "description": "zyxname"}},
            "required": ["zyxname"],
        },
    },
}
_CALL = {
    "id": _OF_RESULT["tool_call_id"],
    "type": "function",
    "function": {"name": "zyxtool", "arguments": {_KEY: _VALUE}},
}

# Ways to say that a message with calls has no content; transformers leaves it out.
_NO_CONTENT: tuple[dict[str, Any], ...] = ({}, {"content": ""}, {"content": None})


class Kind(NamedTuple):
    """The properties by which a template may tell messages apart. role: a usual role, or one that
    the template names, else a stand-in for all others. later: whether the message is not the first
    one and its role is none of user, assistant and tool. calls: whether it has calls of
    functions."""

    role: str
    later: bool = False
    calls: bool = False


@dataclass(frozen=True)
class ContentForms:
    """The forms of a message's content in which a template shows all of the text. text: a string.
    part: a list with one part. parts: a list with several parts. failed: whether the template
    raised an error for a string."""

    text: bool
    part: bool
    parts: bool
    failed: bool

    @property
    def is_left_out(self) -> bool:
        return not (self.text or self.part or self.failed)


@dataclass(frozen=True)
class CallForms:
    """The forms in which a template reads calls. as_text: whether arguments are JSON text, and not
    objects. without: the ways to leave out the content with which the template shows the calls, the
    usual way first. with_content: whether it shows the calls of messages that have a content.
    failed: whether it raised an error each time."""

    as_text: bool
    without: Sequence[Mapping[str, Any]]
    with_content: bool
    failed: bool


class TemplateForms:
    """The forms of one template. Each is found out when it is first needed.

    texts: the kinds of messages without calls that are known to be read if their content is a text.
    Each is a role, and whether the message is not the first one.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        """variables: all other variables that the template may read, made of JSON types. Of these,
        tools is true if there are any."""
        self._source = source
        self._variables = {**variables, "tools": [_TOOL] if variables["tools"] else None}
        self.texts = set[tuple[str, bool]]()
        self._contents: dict[Kind, ContentForms] = {}
        self._calls: CallForms | None = None

    def content(self, kind: Kind) -> ContentForms:
        if kind not in self._contents:
            self._contents[kind] = self._find_content(kind)
            if self._contents[kind].text and not kind.calls and kind.role != _OTHER:
                follows = (True, False) if kind.role in _TURNS else (kind.later,)
                self.texts.update((kind.role, each) for each in follows)
        return self._contents[kind]

    @property
    def calls(self) -> CallForms:
        if self._calls is None:
            self._calls = self._find_calls()
        return self._calls

    def fitted(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns the messages in the forms that the template reads."""
        return [self._fitted(message, self._kind(message, i)) for i, message in enumerate(messages)]

    def left_out(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yields, in words, the parts of the messages that the template leaves out."""
        kinds = (self._kind(message, i) for i, message in enumerate(messages))
        has_content = (bool(message.get("content")) for message in messages)
        for kind, full in dict.fromkeys(zip(kinds, has_content, strict=True)):
            if full and self.content(kind).is_left_out:
                whose = f"of the role {kind.role!r}" if kind.role != _OTHER else "of other roles"
                if kind.calls:
                    yield f"the text of messages {whose} that have calls"
                else:
                    yield f"messages {whose}{' that are not the first' * kind.later}"
            if kind.calls and not self.calls.failed:
                if not self.calls.without:
                    yield "calls of functions"
                elif full and not self.calls.with_content:
                    yield "the calls of messages that have a text"

    def _kind(self, message: Mapping[str, Any], index: int) -> Kind:
        role, source = message["role"], self._source
        if role not in _ROLES and f"'{role}'" not in source and f'"{role}"' not in source:
            role = _OTHER
        later = index > 0 and role not in _TURNS
        return Kind(role, later, "tool_calls" in message)

    def _fitted(self, message: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
        own = dict(message)
        if kind.calls:
            calls = self.calls
            own = with_arguments(own, as_text=calls.as_text)
            if not joined(own.get("content") or ""):
                given = {"content": own.pop("content")} if "content" in own else {}
                usual = calls.without[0] if calls.without else {"content": ""}
                return {**own, **(given if given in calls.without else usual)}
        content, forms = own["content"], self.content(kind)
        if isinstance(content, str) or len(content) < 2 or not forms.parts:
            own["content"] = joined(content)
            if forms.part and not forms.text:
                own["content"] = [{"type": "text", "text": own["content"]}]
        return own

    def _find_content(self, kind: Kind) -> ContentForms:
        asked = ((_FIRST, [_FIRST]), (_PARTS[:1], [_FIRST]), (_PARTS, [_FIRST, _SECOND]))
        texts = [self._render(self._chat(kind, content)) for content, _ in asked]
        text, part, parts = (
            each is not None and all(word in each for word in words) and _NO_TEXT not in each
            for each, (_, words) in zip(texts, asked, strict=True)
        )
        return ContentForms(text, part, parts, failed=texts[0] is None)

    def _chat(self, kind: Kind, content: Any) -> list[dict[str, Any]]:
        """Returns a short chat with a message of this kind."""
        message = {"role": kind.role, "content": content}
        if kind.role == "user":
            return [message]
        user = self._fitted(_USER, Kind("user"))
        if kind.calls:
            return self._chat_with_call(message, self.calls.as_text)
        if kind.role == "tool":
            called = {"role": "assistant", "tool_calls": [_CALL]}
            called = self._fitted(called, Kind("assistant", calls=True))
            return [user, called, message | _OF_RESULT]
        if kind.role == "assistant" or kind.later:
            return [user, message, user]
        return [message, user]

    def _chat_with_call(self, message: Mapping[str, Any], as_text: bool) -> list[dict[str, Any]]:
        user = self._fitted(_USER, Kind("user"))
        called = with_arguments({**message, "tool_calls": [_CALL]}, as_text=as_text)
        return [user, called, {"role": "tool", "content": "zyxresult", **_OF_RESULT}]

    def _find_calls(self) -> CallForms:
        failed = True

        def shows(content: Mapping[str, Any], as_text: bool) -> bool:
            nonlocal failed
            text = self._render(self._chat_with_call({"role": "assistant", **content}, as_text))
            failed &= text is None
            # Objects that a template does not write as JSON have Python's quotes.
            return text is not None and _VALUE in text and f"'{_KEY}'" not in text

        for as_text in (False, True):
            if without := [each for each in _NO_CONTENT if shows(each, as_text)]:
                contents = ({"content": _FIRST}, {"content": _PARTS[:1]})
                with_content = any(shows(content, as_text) for content in contents)
                return CallForms(as_text, without, with_content, False)
        return CallForms(False, (), False, failed)

    def _render(self, messages: list[dict[str, Any]]) -> str | None:
        """Returns the text that the template makes of the messages, or None if the template
        fails."""
        try:
            with foreign("The chat template failed"):
                variables = {**self._variables, "messages": messages}
                return render_template(self._source, variables, _SECONDS)
        except TokenizerError:
            return None


@lru_cache(maxsize=64)
def kept_forms(source: str, variables: str) -> TemplateForms:
    """Returns the forms of a template. They are kept for each source and variables, which are a
    JSON object."""
    return TemplateForms(source, json.loads(variables))
