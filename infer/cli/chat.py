"""`infer chat`: a conversation in a terminal."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from infer.boundaries import shown
from infer.cli.answers import THINKING, Answerer, Model, Server
from infer.cli.clipboard import copy
from infer.cli.lines import Lines, PipedLines, TypedLines, history_path
from infer.cli.options import (
    AdapterOption,
    ApiKeyOption,
    ChatTemplateOption,
    ContextOption,
    DeviceOption,
    DraftOption,
    DraftQuantizeOption,
    DtypeOption,
    KVDtype,
    KVDtypeOption,
    OfflineOption,
    OptionalModelArgument,
    Precision,
    PrecisionOption,
    QuantizeOption,
    RevisionOption,
    SpeculateOption,
    VerboseOption,
    WebgpuOption,
    parse_template_arg,
    prompt_option,
    sampling_option,
    server_option,
)
from infer.cli.terminal import (
    MarkdownWriter,
    exit_codes,
    note,
    of_system,
    table,
    tell,
    uninterrupted,
    warnings_as_notes,
)
from infer.kernels.errors import InferError, RequestError
from infer.progress import ProgressLine, is_terminal, size, visible, write_note

if TYPE_CHECKING:
    from infer.llm import LLM

_MOST_BYTES = 16 << 20  # size of a conversation in a file

_COMMANDS = {
    "/system TEXT": "set the system message; /system none removes it, /system alone shows it",
    "/params NAME=X": "set sampling options, such as /params temperature=0.7 seed=1; NAME= resets "
    "one to the model's default, /params alone shows them",
    "/think on|off": "turn thinking on or off, if the model can do both",
    "/verbose": "show the speed after each answer, or stop showing it",
    "/tokens": "show how much of the context is used",
    "/retry": "answer the last message again",
    "/edit": "edit the last message, in $EDITOR if that is set, and answer it again",
    "/copy": "copy the last answer to the clipboard",
    "/reset": "start over, with the same system message and options",
    "/save FILE": "write the conversation to a file, as JSON, and what is computed of it to "
    "FILE.cache",
    "/load FILE": "continue a conversation that /save wrote; what FILE.cache has of it is not "
    "computed again",
    "/exit": "leave, as Ctrl-D does",
}
_HELP = f"""\
{table(_COMMANDS)}

Enter sends the message; Alt-Enter, or a backslash before Enter, starts a new line. Ctrl-C stops \
the answer. To send a message that starts with /, put a space before it."""


def chat(
    model: OptionalModelArgument = None,
    system: Annotated[
        str | None, prompt_option("--system", metavar="TEXT", help="A system message.")
    ] = None,
    template_arg: Annotated[
        list[str] | None,
        prompt_option(
            "--template-arg",
            metavar="KEY=JSON",
            help="An argument of the chat template, such as enable_thinking=false. Can be "
            "repeated.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        sampling_option("--max-tokens", "-n", metavar="N", help="The most tokens of each answer."),
    ] = None,
    temperature: Annotated[
        float | None,
        sampling_option(
            "--temperature",
            metavar="T",
            help="Sampling temperature; 0 is greedy. Defaults are those of the model's "
            "generation_config.json; /params sets all other options.",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        sampling_option(
            "--top-p",
            metavar="P",
            help="Sample from the fewest most probable tokens whose probabilities add up to P;"
            " 1 turns it off.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        sampling_option(
            "--seed",
            metavar="N",
            help="Seed of the sampling: the same seed gives the same answer. Default: a random"
            " one.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        server_option(
            "--url",
            metavar="URL",
            help="Chat with a server that has OpenAI's API, such as http://127.0.0.1:8000, "
            "instead of loading a model. MODEL is then a name there; default: the "
            "server's first.",
        ),
    ] = None,
    api_key: ApiKeyOption = None,
    device: DeviceOption = None,
    webgpu: WebgpuOption = None,
    precision: PrecisionOption = Precision.AUTO,
    context: ContextOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    kv_dtype: KVDtypeOption = KVDtype.F16,
    speculate: SpeculateOption = None,
    draft: DraftOption = None,
    draft_quantize: DraftQuantizeOption = None,
    adapter: AdapterOption = None,
    chat_template: ChatTemplateOption = None,
    revision: RevisionOption = None,
    offline: OfflineOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Chat with a model.

    In a terminal, the up arrow brings back earlier messages, and /help lists the commands. Ctrl-C
    stops an answer; Ctrl-D, or Ctrl-C twice, ends the chat. Without a terminal, each line of
    standard input is a message; answers go to standard output, and the model's reasoning to
    standard error.

    --verbose shows the speed after each answer.
    """
    with exit_codes(verbose), ExitStack() as stack:
        if model is None and url is None:
            raise RequestError("Give a model, or the --url of a server.")
        loading = {
            "--device": device,
            "--webgpu": webgpu,
            "--precision": precision if precision != Precision.AUTO else None,
            "--context": context,
            "--dtype": dtype,
            "--quantize": quantize,
            "--kv-dtype": kv_dtype if kv_dtype != KVDtype.F16 else None,
            "--speculate": speculate,
            "--draft": draft,
            "--draft-quantize": draft_quantize,
            "--adapter": adapter,
            "--chat-template": chat_template,
            "--revision": revision,
            "--offline": offline or None,
        }
        for name, value in loading.items():
            if url is not None and value is not None:
                raise RequestError(f"{name} has no effect with --url. Leave it out.")
        given = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
        }
        params: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
        template_args = dict(map(parse_template_arg, template_arg or ()))
        typed = is_terminal(sys.stdin) and is_terminal(sys.stdout)
        lines: Lines = TypedLines(history_path()) if typed else PipedLines()
        check_params(params, params)
        answerer: Answerer
        if url is not None:
            answerer = Server(url, model, api_key, template_args)
        else:
            from infer.loading import load

            assert model is not None
            with warnings_as_notes(False), ProgressLine() as progress:
                llm = load(
                    model,
                    device=device,
                    webgpu=webgpu,
                    precision=precision,
                    context=context,
                    dtype=dtype,
                    quantize=quantize,
                    kv_dtype=kv_dtype,
                    max_batch=1,
                    speculate=speculate,
                    draft=draft,
                    draft_quantize=draft_quantize,
                    adapter=adapter,
                    chat_template=chat_template,
                    revision=revision,
                    offline=offline,
                    progress=progress.loading,
                )
                stack.enter_context(llm)
                answerer = loaded(llm, params, template_args)
        if typed:
            greet(answerer)
        talk = Conversation(answerer, params, system or None, typed=typed, verbose=verbose)
        talk.run(lines)


def loaded(llm: LLM, params: Mapping[str, Any], template_args: Mapping[str, Any]) -> Model:
    """The answerer of a loaded model, whose kernels are compiled. Raises RequestError if the model
    cannot chat."""
    from infer.sampling import SamplingParams

    model = Model(llm, template_args)
    llm.engine.runner.warm_up(
        min(64, llm.context - 1), SamplingParams(**params).resolved(llm.defaults)
    )
    return model


def greet(answerer: Answerer) -> None:
    note(f"{answerer.name}: /help lists the commands, Ctrl-D ends the chat")


def check_params(params: Mapping[str, Any], given: Iterable[str]) -> None:
    """Raises RequestError if a value is wrong, or if a name of `given` does not exist."""
    from infer.calls import check_names
    from infer.sampling import SamplingOptions, SamplingParams

    names = SamplingOptions.__optional_keys__ - {"logit_bias", "logprobs"}
    check_names(given, names, (), "")
    SamplingParams(**params)


@dataclass
class Conversation:
    """A conversation and its commands. typed: a person types it, so Ctrl-C and errors end only one
    answer; otherwise they end the program."""

    answerer: Answerer
    params: dict[str, Any]
    system: str | None
    typed: bool
    verbose: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    pace: str | None = None  # speed of the last answer

    def run(self, lines: Lines) -> None:
        """Read and answer lines until they end."""
        self._lines = lines
        leaving = False  # whether another Ctrl-C ends
        while True:
            try:
                line = lines.read()
            except KeyboardInterrupt:
                if not self.typed:
                    raise
                if leaving:
                    return
                leaving = True
                note("Press Ctrl-C again, or Ctrl-D, to leave.")
                continue
            leaving = False
            if line is None or line.rstrip() == "/exit":
                return
            try:
                found = re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", line, re.S)
                if found and self._is_command(found[1]):
                    getattr(self, f"_do_{found[1]}")((found[2] or "").strip())
                elif line.strip():
                    self._answer({"role": "user", "content": line})
            except (InferError, OSError) as error:
                if not self.typed:
                    raise
                note(f"error: {of_system(error) if isinstance(error, OSError) else error}")

    def _answer(self, *new: dict[str, str]) -> None:
        """Answer the conversation, which ends with new messages. If no answer comes, the new
        messages are forgotten. Raises InferError."""
        asked = [*self.messages, *new]
        writer = MarkdownWriter()
        text = ""
        begin = time.perf_counter()
        first = last = None
        pieces = 0
        thinks = False
        try:
            with closing(self.answerer.answer([*self._system(), *asked], self.params)) as answer:
                for piece in answer:
                    with uninterrupted():
                        if not piece.text:
                            continue
                        last = time.perf_counter()
                        first = first or last
                        pieces += 1
                        if thinks and not piece.reasoning:
                            self._end_thoughts(writer)
                        thinks = piece.reasoning
                        if not thinks:
                            text += piece.text
                        if thinks and not self.typed:
                            write_note(visible(piece.text))
                            continue
                        writer.dim = thinks
                        writer.write(piece.text)
        except KeyboardInterrupt:
            if not self.typed:
                raise
        finally:
            if thinks and not self.typed:
                write_note("\n")
            elif first is not None:
                writer.end()
        if self.answerer.finish_reason == "length":
            note("note: the answer stopped at the limit of tokens")
        if not text:
            note("note: the answer is empty")
            return
        self.messages = [*asked, {"role": "assistant", "content": text}]
        if first is not None and last is not None:
            tokens = self.answerer.tokens or pieces
            self.pace = _pace(tokens, first - begin, last - first)
            if self.verbose:
                note(self.pace)

    def _system(self) -> list[dict[str, str]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _end_thoughts(self, writer: MarkdownWriter) -> None:
        """Write an empty line between thoughts and answer."""
        if self.typed:
            writer.end()
            writer.end()
        else:
            write_note("\n\n")

    # Commands

    def _is_command(self, name: str) -> bool:
        """Whether a command of this name exists. If not, raises RequestError in a terminal;
        otherwise the line is a message, and a note says so."""
        if hasattr(self, f"_do_{name}"):
            return True
        if self.typed:
            raise RequestError(
                f"There is no command /{name}; /help lists the commands. To send a message that "
                "starts with /, put a space before it."
            )
        note(f"note: /{name} is not a command, so the line is sent as a message")
        return False

    def _do_help(self, rest: str) -> None:
        tell(_HELP)

    def _do_system(self, rest: str) -> None:
        if rest:
            self.system = None if rest == "none" else rest
        else:
            note("There is no system message." if self.system is None else self.system)

    def _do_reset(self, rest: str) -> None:
        self.messages = []

    def _do_retry(self, rest: str) -> None:
        if not self.messages:
            raise RequestError("There is no message to answer again.")
        self._answer_instead(len(self.messages) - (self.messages[-1]["role"] == "assistant"))

    def _do_edit(self, rest: str) -> None:
        asked = [i for i, each in enumerate(self.messages) if each["role"] == "user"]
        if not asked:
            raise RequestError("There is no message to edit.")
        last = self.messages[asked[-1]]["content"]
        with suppress(KeyboardInterrupt):  # leaves it as it is
            text = self._lines.edit(last)
            if text is not None and text.strip() and text != last:
                self._answer_instead(asked[-1], {"role": "user", "content": text})
                return
        note("The message was not changed.")

    def _answer_instead(self, place: int, *new: dict[str, str]) -> None:
        """Answer the conversation up to the message at `place`, with new messages in place of the
        rest. If no answer comes, the rest stays."""
        before, self.messages = self.messages, self.messages[:place]
        try:
            self._answer(*new)
        finally:
            if not self.messages or self.messages[-1]["role"] != "assistant":
                self.messages = before

    def _do_copy(self, rest: str) -> None:
        answers = [each["content"] for each in self.messages if each["role"] == "assistant"]
        if not answers:
            raise RequestError("There is no answer to copy.")
        copy(answers[-1])
        note(f"copied {len(answers[-1]):,} characters")

    def _do_tokens(self, rest: str) -> None:
        if not self.messages:
            note("The conversation is empty.")
            return
        used, context = self.answerer.count([*self._system(), *self.messages])
        note(f"{used:,} of {context:,} tokens of the context are used ({used / context:.0%})")

    def _do_think(self, rest: str) -> None:
        if rest not in ("on", "off"):
            raise RequestError("Give on or off: /think on, /think off.")
        self.answerer.check_thinking()
        self.answerer.template_args |= dict.fromkeys(THINKING, rest == "on")
        note(f"thinking is {rest}")

    def _do_verbose(self, rest: str) -> None:
        self.verbose = not self.verbose
        note(f"the speed is {'shown after each answer' if self.verbose else 'no longer shown'}")

    def _do_params(self, rest: str) -> None:
        if not rest:
            shown_ = [f"{name}={json.dumps(value)}" for name, value in self.params.items()]
            note(" ".join(shown_) or "All sampling options have the model's defaults.")
            if self.pace is not None:
                note(self.pace)
            return
        params, names = dict(self.params), []
        for name, given, value in (word.partition("=") for word in rest.split()):
            if not given:
                raise RequestError(f"{shown(name)} is not NAME=X, as in temperature=0.7.")
            names.append(name)
            if not value:
                params.pop(name, None)
                continue
            try:
                params[name] = json.loads(value)
            except (ValueError, RecursionError):
                params[name] = value  # a text needs no quotes
        check_params(params, names)
        self.params = params

    def _do_save(self, rest: str) -> None:
        if not rest:
            raise RequestError("Give a file name: /save FILE.")
        path, messages = Path(rest).expanduser(), [*self._system(), *self.messages]
        cache = _cache_of(path)
        for each in (path, cache):
            if each.exists():
                raise RequestError(f"{each} exists already. Choose another name.")
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        note(f"wrote {len(messages)} messages to {rest}")
        if not self.messages:
            return
        try:
            tokens = self.answerer.save_cache(cache, messages)
        except InferError as error:
            note(f"note: what is computed of them was not saved: {error}")
            return
        if tokens is not None:
            note(f"wrote {tokens:,} computed tokens, {size(cache.stat().st_size)}, to {cache}")

    def _do_load(self, rest: str) -> None:
        if not rest:
            raise RequestError("Give a file name: /load FILE.")
        wrong = RequestError(f"{rest} is not a conversation that /save wrote.")
        with Path(rest).expanduser().open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise wrong
        try:
            messages = json.loads(data)["messages"]
            messages = [{"role": m["role"], "content": m["content"]} for m in messages]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise wrong from None
        if not all(isinstance(text, str) for message in messages for text in message.values()):
            raise wrong
        first = messages[0] if messages else {}
        self.system = first["content"] if first.get("role") == "system" else None
        self.messages = messages[self.system is not None :]
        note(f"read {len(messages)} messages from {rest}")
        cache = _cache_of(Path(rest).expanduser())
        if not cache.exists():
            return
        try:
            tokens = self.answerer.load_cache(cache)
        except InferError as error:
            note(f"note: the messages will be computed again: {error}")
            return
        if tokens is not None:
            note(f"read {tokens:,} computed tokens from {cache}")


def _cache_of(path: Path) -> Path:
    """The file beside a conversation's that has what is computed of it."""
    return path.with_name(f"{path.name}.cache")


def _pace(tokens: int, first: float, rest: float) -> str:
    # Tokens that came at once have no rate.
    rate = f", {(tokens - 1) / rest:.1f} tokens/s" if tokens > 1 and rest > 0.01 else ""
    return f"{tokens:,} token{'s' * (tokens != 1)}{rate}, first token after {first:.2f} s"
