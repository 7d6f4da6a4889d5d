"""Chooses the parser of the answer to a chat, and the grammar or schema that it must follow."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from infer.engine.constraint import WHITESPACE, schema_error
from infer.kernels.errors import RequestError
from infer.sampling import SamplingParams
from infer.text.answer import AnswerParser, AnswerStyle, answer_style
from infer.text.argument_grammars import escaped
from infer.text.chat import choose_template
from infer.text.schemas import loose_argument_ways
from infer.text.tokenizer import Tokenizer
from infer.text.tool_grammars import answer_grammar
from infer.text.tools import Tools

_MOST = 1 << 16  # the most characters of the schema of a function's arguments


@dataclass(frozen=True)
class Reading:
    """The way in which the answer to a chat is read. thinking: whether the prompt has begun the
    thought. may_think: whether the answer may begin one. keep: the ids of special tokens that the
    text needs, because they are in markers of the style. opened: the header of the message that the
    prompt has begun, in formats whose answers are messages."""

    style: AnswerStyle
    tools: Tools
    thinking: bool
    may_think: bool
    keep: frozenset[int]
    special_tokens: Mapping[str, int]
    text_tokens: Mapping[str, int]
    ends: frozenset[int]
    opened: str = ""

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, tools: Tools, prompt_ids: Sequence[int], template: str | None
    ) -> Reading:
        """Finds the style of the answer, and what of the answer the prompt has begun. template: the
        name or source of the chat template; None: the model's own, if it has one."""
        with_tools = tools.offered is not None
        source = ""
        if tokenizer.has_chat_template or template:
            source = choose_template(tokenizer.templates, template, with_tools=with_tools)
        style = answer_style(source)
        keep = tokenizer.named_in(style.markers(with_tools=with_tools))
        begun = _begun(tokenizer, prompt_ids, keep - tokenizer.named_in(("<|start|>",)))
        thinking = style.is_thinking(begun)
        may_think = style.thinks and not begun.rstrip().endswith(style.thought[1])
        return cls(
            style,
            tools,
            thinking,
            may_think,
            keep,
            tokenizer.special_names,
            tokenizer.added_text_ids,
            tokenizer.eos_token_ids,
            style.opened(begun),
        )

    def parser(self) -> AnswerParser:
        most = None if self.tools.parallel else 1
        parser = AnswerParser(
            self.style,
            self.tools.functions,
            most=most,
            thinking=self.thinking,
            tokens=self.special_tokens.keys() | self.text_tokens.keys(),
        )
        parser.add(self.opened)
        return parser

    @property
    def is_strict(self) -> bool:
        """Whether calls must follow the grammar: one has to come, or a function is strict."""
        offered = self.tools.offered or ()
        return self.tools.required or any(tool["function"].get("strict") for tool in offered)

    def held(self, params: SamplingParams) -> SamplingParams:
        """Returns the sampling parameters with a grammar for calls, and for the answer behind a
        thought; unchanged if no grammar is needed. Raises RequestError for parameters that leave no
        room for a call that has to come, and for a strict function whose schema cannot be
        followed."""
        if params.ignore_eos and self.tools.functions:
            raise RequestError("`ignore_eos` leaves no end for a call: leave it or the tools out.")
        if params.constrained and self.tools.required:
            raise RequestError(
                "tool_choice asks for a call, which leaves no room for an answer by a schema, a "
                "regex or a grammar: give one of them."
            )
        if params.grammar is not None:
            return params
        if self.opened and not self.thinking:
            if self.tools.required:
                raise RequestError(
                    "tool_choice asks for a call, and this model writes none in a message that is "
                    "begun: leave tool_choice or continue_final_message out."
                )
            return params
        grammar = answer_grammar(
            self.style,
            self.tools,
            thinking=self.thinking,
            may_think=self.may_think,
            special_tokens=self._kept(self.special_tokens),
            text_tokens=self._kept(self.text_tokens),
            loose={*self.special_tokens.values()} - self.keep - self.ends,
            schema_of=_schema_of,
            error_of=lambda schema: _error(json.dumps(schema)),
            content=_content(params),
        )
        if grammar is None:
            return params
        try:
            return replace(params, schema=None, regex=None, choices=None, grammar=grammar)
        except RequestError as error:  # the grammar is too long
            if params.constrained or self.is_strict:
                raise RequestError(f"tools are too many to hold calls to: {error}") from error
            return params

    def _kept(self, ids: Mapping[str, int]) -> Mapping[str, int]:
        return {name: i for name, i in ids.items() if i in self.keep}


def _begun(tokenizer: Tokenizer, prompt_ids: Sequence[int], markers: Collection[int]) -> str:
    """Returns the beginning of the answer that a prompt already has: its text behind the last added
    token that is none of the markers around roles. The role's name may stand in front of it."""
    begin = len(prompt_ids)
    while begin and (
        prompt_ids[begin - 1] in markers or not tokenizer.is_added(prompt_ids[begin - 1])
    ):
        begin -= 1
    return tokenizer.decode(prompt_ids[begin:], skip_special_tokens=False)


def _content(params: SamplingParams) -> str | None:
    """Returns the grammar in Lark of an answer without calls and thoughts; None if it may be any
    text. Raises RequestError for a schema that cannot be followed."""
    if params.schema is not None:
        if error := _error(json.dumps(params.schema)):
            raise RequestError(f"`schema` cannot be followed: {error}")
        return f"%json {json.dumps(_spaced(cast(Mapping[str, Any], params.schema)))}"
    if (pattern := params.pattern) is not None:
        return f"/{escaped(pattern)}/"
    return None


def _schema_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the JSON schema to which a function's arguments are held. It allows any object if the
    function is not strict and its own schema cannot be followed. Raises RequestError if it is
    strict."""
    schema = {"type": "object"} | function["parameters"]
    named = {name for way in loose_argument_ways(schema) for name in way.get("properties", ())}
    # Without this, models make up other arguments.
    if "properties" in schema and named <= schema["properties"].keys():
        schema = {"additionalProperties": False} | schema
    text = json.dumps(schema)
    error = _error(text) if len(text) <= _MOST else f"more than {_MOST:,} characters."
    if error is None:
        return _spaced(schema)
    if function.get("strict"):
        raise RequestError(
            f"tools: the parameters of {function['name']} cannot be followed: {error}"
        )
    return _spaced({"type": "object"})


@lru_cache(maxsize=256)
def _error(schema: str) -> str | None:
    return schema_error(json.loads(schema))


def _spaced(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
