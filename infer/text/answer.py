"""The answer to a chat, while it arrives: its text, reasoning, and calls of functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from infer.text.answer_reader import Reader, Steps
from infer.text.tool_formats import HARMONY_ENDS, HERMES, ToolFormat, find_format

# The markers before and after a thought, at the beginning of an answer.
_THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
)


@dataclass(frozen=True)
class AnswerStyle:
    """The way in which a model writes answers. tools: the format of its calls. thought: the texts
    that begin and end a thought. thinks: whether the chat template mentions thoughts; an answer may
    still come without one."""

    tools: ToolFormat
    thought: tuple[str, str]
    thinks: bool

    def markers(self, *, with_tools: bool) -> tuple[str, ...]:
        """Returns the markers of the style that may be special tokens."""
        if with_tools or self.tools.whole:
            return (*self.thought, *self.tools.markers)
        return self.thought

    def is_thinking(self, begun: str) -> bool:
        """Whether the prompt has begun a thought and not ended it. begun: the end of the prompt,
        which belongs to the answer."""
        if self.tools.whole:
            return "<|channel|>analysis" in self.opened(begun)
        begin, end = self.thought
        _, begins, thought = begun.rpartition(begin)
        return begins != "" and end not in thought

    def opened(self, begun: str) -> str:
        """Returns the header of the message that the prompt has begun, for models whose answers are
        messages; "" for others."""
        header, opens, text = begun.partition("<|message|>")
        is_open = self.tools.whole and opens != "" and not any(end in text for end in HARMONY_ENDS)
        return header.removeprefix("assistant") + opens if is_open else ""


@lru_cache(maxsize=32)
def answer_style(template: str) -> AnswerStyle:
    """Returns the style of the answers to a chat template's prompts."""
    tools = find_format(template) or HERMES
    found = next((each for each in _THOUGHTS if any(mark in template for mark in each)), None)
    return AnswerStyle(tools, found or _THOUGHTS[0], tools.whole or found is not None)


class AnswerParser(Reader):
    """Parses one answer while it arrives. functions: the schemas of the functions that it may call;
    with None, text that looks like a call stays text."""

    def __init__(
        self,
        style: AnswerStyle,
        functions: Mapping[str, Mapping[str, Any]] | None,
        *,
        most: int | None = None,
        thinking: bool = False,
        tokens: Collection[str] = (),
    ) -> None:
        """most: the number of calls after which the answer is done. thinking: whether the prompt
        has begun the thought. tokens: markers that are one token, which no limit cuts."""
        self._style, self._thinking = style, thinking
        self._with_tools = functions is not None
        super().__init__(functions or {}, most, short_ids=style.tools.short_ids, tokens=tokens)

    def parse(self) -> Steps[None]:
        begin, end = self._style.thought
        if not self._style.tools.whole and (self._thinking or (yield from self.accept(begin))):
            yield from self.think_until(end)
        if self._with_tools or self._style.tools.whole:
            yield from self._style.tools.read(self)
