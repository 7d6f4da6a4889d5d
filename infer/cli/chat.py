"""`infer chat`: a conversation in a terminal."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from infer.cli.answers import Answerer, Model, Server
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
    uninterrupted,
    warnings_as_notes,
    write,
)
from infer.foreign import shown
from infer.kernels.errors import InferError, RequestError
from infer.progress import ProgressLine, is_terminal, visible, write_note

_MOST_BYTES = 16 << 20  # of a conversation in a file

_HELP = """\
/system TEXT     the system message; /system none for none, /system alone shows it
/params NAME=X   sampling, such as /params temperature=0.7 seed=1; NAME= leaves it
                 to the model; /params alone shows what is set, and the last pace
/retry           answers the last message anew
/reset           begins anew, with the same system message and sampling
/save FILE       writes the conversation to a file, as JSON
/load FILE       goes on with one
/exit            ends, as Ctrl-D does

Enter sends; Alt-Enter, or a backslash before Enter, begins a line. A space before / makes a
message of the line.
Ctrl-C stops an answer.
"""


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
            help="A value for the chat template, such as enable_thinking=false. Can be repeated.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        sampling_option("--max-tokens", "-n", metavar="N", help="End each answer after so many."),
    ] = None,
    temperature: Annotated[
        float | None,
        sampling_option(
            "--temperature",
            metavar="T",
            help="Divides the logits; 0 is greedy. What is left out comes from the model's "
            "generation_config.json; /params sets all the others.",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        sampling_option(
            "--top-p", metavar="P", help="Keep the fewest tokens that reach this probability."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        sampling_option("--seed", metavar="N", help="The same seed samples the same answer."),
    ] = None,
    url: Annotated[
        str | None,
        server_option(
            "--url",
            metavar="URL",
            help="Talk to a server with OpenAI's API, such as http://127.0.0.1:8000, instead of "
            "loading a model. MODEL is then the name there, or its first.",
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
    """Talk with a model.

    In a terminal, lines can be edited and those of earlier conversations come back with the up
    arrow; /help lists the commands. Ctrl-C stops an answer, and twice at the prompt, or Ctrl-D,
    ends. Without a terminal each line of standard input is a message, the answers go to standard
    output, and what the model thinks before them to standard error.

    --verbose tells how fast each answer came.
    """
    with exit_codes(verbose), ExitStack() as stack:
        if model is None and url is None:
            raise typer.BadParameter("give a model, or --url of a server", param_hint="MODEL")
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
                raise typer.BadParameter("the server of --url has its model", param_hint=name)
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
        check_params(params)
        answerer: Answerer
        if url is not None:
            answerer = Server(url, model, api_key, template_args)
        else:
            from infer.loading import load
            from infer.sampling import SamplingParams

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
                answerer = Model(llm, template_args)
                llm.engine.warm_up(
                    min(64, llm.context - 1), SamplingParams(**params).resolved(llm.defaults)
                )
        if typed:
            note(f"{answerer.name}: /help lists the commands, Ctrl-D ends")
        talk = Conversation(answerer, params, system or None, typed=typed, verbose=verbose)
        talk.run(lines)


def check_params(params: Mapping[str, Any]) -> None:
    """Raises RequestError for a name or a value that is wrong."""
    from infer.calls import check_names
    from infer.sampling import SamplingOptions, SamplingParams

    names = SamplingOptions.__optional_keys__ - {"logit_bias", "logprobs"}
    check_names(params, names, (), "")
    SamplingParams(**params)


@dataclass
class Conversation:
    """typed: whether in a terminal, where Ctrl-C stops an answer alone, and an error the message
    alone; else both end the program."""

    answerer: Answerer
    params: dict[str, Any]
    system: str | None
    typed: bool
    verbose: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    pace: str | None = None  # of the last answer

    def run(self, lines: Lines) -> None:
        """Until the lines end."""
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
                note("Ctrl-C again, or Ctrl-D, ends")
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
        """Have the conversation answered, with new messages at its end. Raises InferError, and
        forgets these, if nothing comes."""
        asked = [*self.messages, *new]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        writer = MarkdownWriter()
        text = ""
        begin = time.perf_counter()
        first = last = None
        pieces = 0
        thinks = False
        try:
            with closing(self.answerer.answer([*system, *asked], self.params)) as answer:
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
            note("note: the answer reached the limit of tokens")
        if not text:
            note("nothing was answered")
            return
        self.messages = [*asked, {"role": "assistant", "content": text}]
        if first is not None and last is not None:
            tokens = self.answerer.tokens or pieces
            self.pace = _pace(tokens, first - begin, last - first)
            if self.verbose:
                note(self.pace)

    def _end_thoughts(self, writer: MarkdownWriter) -> None:
        """An empty line before the answer."""
        if self.typed:
            writer.end()
            writer.end()
        else:
            write_note("\n\n")

    # Commands

    def _is_command(self, name: str) -> bool:
        """Without a terminal, what is none is a message, and that is noted. Raises RequestError."""
        if hasattr(self, f"_do_{name}"):
            return True
        if self.typed:
            raise RequestError(
                f"There is no command /{name}. /help lists those there are; a message that begins "
                "so has a space before it."
            )
        note(f"note: /{name} is no command, so the line is a message")
        return False

    def _do_help(self, rest: str) -> None:
        write(_HELP)

    def _do_system(self, rest: str) -> None:
        if rest:
            self.system = None if rest == "none" else rest
        else:
            note("There is no system message." if self.system is None else self.system)

    def _do_reset(self, rest: str) -> None:
        self.messages = []

    def _do_retry(self, rest: str) -> None:
        if not self.messages:
            raise RequestError("There is nothing to answer anew.")
        before = self.messages
        self.messages = before[: len(before) - (before[-1]["role"] == "assistant")]
        try:
            self._answer()
        finally:
            if not self.messages or self.messages[-1]["role"] != "assistant":
                self.messages = before  # there is no other answer

    def _do_params(self, rest: str) -> None:
        if not rest:
            shown_ = [f"{name}={json.dumps(value)}" for name, value in self.params.items()]
            note(" ".join(shown_) or "Everything is left to the model.")
            if self.pace is not None:
                note(self.pace)
            return
        params = dict(self.params)
        for name, given, value in (word.partition("=") for word in rest.split()):
            if not given:
                raise RequestError(f"{shown(name)} is not NAME=X, as in temperature=0.7.")
            if not value:
                params.pop(name, None)
                continue
            try:
                params[name] = json.loads(value)
            except (ValueError, RecursionError):
                params[name] = value  # a text needs no quotes
        check_params(params)
        self.params = params

    def _do_save(self, rest: str) -> None:
        if not rest:
            raise RequestError("Give a file's name: /save FILE.")
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, *self.messages]
        try:
            with Path(rest).expanduser().open("x", encoding="utf-8") as file:
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        except FileExistsError:
            raise RequestError(f"{rest} is there already. Choose another name.") from None
        note(f"wrote {len(messages)} messages to {rest}")

    def _do_load(self, rest: str) -> None:
        if not rest:
            raise RequestError("Give a file's name: /load FILE.")
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
        note(f"{len(messages)} messages")


def _pace(tokens: int, first: float, rest: float) -> str:
    # What came at once tells nothing.
    rate = f", {(tokens - 1) / rest:.1f} tokens/s" if tokens > 1 and rest > 0.01 else ""
    return f"{tokens:,} token{'s' * (tokens != 1)}{rate}, first after {first:.2f} s"
