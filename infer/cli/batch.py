"""A file of prompts, answered many at once: JSON lines in, JSON lines out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from infer.boundaries import reason, shown
from infer.calls import check_names
from infer.cli.answer_file import Answers, Id, Progress, Written, is_id
from infer.cli.report import Loading, answer_json
from infer.cli.terminal import INTERRUPTED, note, read_file, table
from infer.kernels.errors import ModelError, RequestError, TokenizerError
from infer.llm import LLM, Chat, Stream, samples
from infer.models.loading.checkpoint import listed
from infer.progress import ProgressLine, is_terminal, size
from infer.sampling import SamplingOptions, SamplingParams

if TYPE_CHECKING:
    from infer.cli.openai_batch import BatchLine

_OWN = ("id", "prompt", "messages", "n")
_MOST_SAMPLES = 256  # answers to a prompt, at most
_TOLD, _NUMBERED = 20, 200  # wrong lines shown with their error, and shown by number only
_FAILURES = (RequestError, TokenizerError, ModelError)  # errors of one answer: others go on


@dataclass(frozen=True)
class Request:
    """A line of the file: a text to be answered or chat messages, n times."""

    id: Id
    prompt: str | list[dict[str, Any]]
    params: SamplingParams
    n: int = 1


def read_requests(
    path: str, params: SamplingParams, template_args: Mapping[str, Any], *, raw: bool
) -> list[Request] | list[BatchLine]:
    """The requests in the lines of a file, or of standard input if path is "-". Either all lines
    are OpenAI's, or none is. params and template_args: defaults for what a line leaves out. raw:
    prompts are continued as they are, so messages are refused. Raises RequestError with the numbers
    of all wrong lines."""
    name = "standard input" if path == "-" else path
    if path != "-":
        content = read_file(path)
    else:
        content = b"" if sys.stdin is None else sys.stdin.buffer.read()
    requests: list[Request | BatchLine] = []
    lines: dict[Id, int] = {}
    wrong: dict[int, str] = {}
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = _parsed(line)
            request: Request | BatchLine
            if isinstance(value, dict) and "custom_id" in value:
                from infer.cli.openai_batch import batch_line  # needs an extra

                request = batch_line(value, params, template_args)
            else:
                request = _request(value, number, params, raw)
            if requests and type(request) is not type(requests[0]):
                raise RequestError("Either all lines have a custom_id, as OpenAI's, or none has.")
            if request.id in lines:
                raise RequestError(
                    f"The id {shown(request.id)} is that of line {lines[request.id]} too. Give "
                    "each line its own."
                )
        except RequestError as error:
            wrong[number] = str(error)
        else:
            lines[request.id] = number
            requests.append(request)
    if wrong:
        raise RequestError(_all_wrong(name, wrong))
    if not requests:
        raise RequestError(
            f'There is no prompt in {name}. Give one in each line, as in {{"prompt": "Why?"}}.'
        )
    return cast("list[Request] | list[BatchLine]", requests)


def _all_wrong(name: str, wrong: Mapping[int, str]) -> str:
    """The error message about wrong lines. wrong: the error of each wrong line, by its number."""
    (number, first), *others = wrong.items()
    if not others:
        return f"{name}, line {number}: {first}"
    told = [f"  line {number}: {text}" for number, text in [*wrong.items()][:_TOLD]]
    if len(wrong) > _TOLD:
        told.append(f"  and lines {listed(map(str, [*wrong][_TOLD:]), limit=_NUMBERED)}")
    return "\n".join([f"{len(wrong):,} lines of {name} are wrong:", *told])


def are_openais(
    requests: list[Request] | list[BatchLine],
) -> TypeGuard[list[BatchLine]]:
    """Whether the requests are lines of OpenAI's Batch API."""
    return not isinstance(requests[0], Request)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        wrong = f"it is not UTF-8: byte {line[error.start]:#04x} at {error.start}."
    except json.JSONDecodeError as error:
        wrong = f"{error.msg} at column {error.colno}."
    except (ValueError, RecursionError) as error:
        wrong = reason(error)
    raise RequestError(f'A line must be a JSON object, such as {{"prompt": "Why?"}}: {wrong}')


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _request(value: Any, number: int, params: SamplingParams, raw: bool) -> Request:
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise RequestError(f"A line must be an object or a string, not {shown(value)}.")
    names = SamplingOptions.__optional_keys__
    check_names(value, (*_OWN, *sorted(names)), (), "")
    given, prompt = value.get("id", number), value.get("prompt")
    if not is_id(given):
        raise RequestError(f"id must be a string or a number, not {shown(given)}.")
    if ("prompt" in value) == ("messages" in value):
        raise RequestError("Give either prompt or messages.")
    if "messages" in value:
        prompt = value["messages"]
        if raw:
            raise RequestError(
                "--raw uses no chat template, which messages need. Give a prompt, or leave "
                "out --raw."
            )
        if not (isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt)):
            raise RequestError(
                'messages must be a list such as [{"role": "user", "content": "Why?"}], not '
                f"{shown(prompt)}."
            )
    elif not (isinstance(prompt, str) and prompt):
        raise RequestError(f"prompt must be text that is not empty, not {shown(prompt)}.")
    own = {name: value[name] for name in value if name in names}
    if isinstance(own.get("logit_bias"), dict):  # JSON's keys are strings
        with suppress(ValueError):
            own["logit_bias"] = {int(token): bias for token, bias in own["logit_bias"].items()}
    n = value.get("n", 1)
    if type(n) is not int or not 1 <= n <= _MOST_SAMPLES:
        raise RequestError(f"n must be an integer from 1 to {_MOST_SAMPLES}, not {shown(n)}.")
    return Request(given, prompt, replace(params, **own) if own else params, n)


def answer_all(
    llm: LLM,
    requests: list[Request],
    answers: Answers,
    *,
    ask: Callable[[str], Chat],
    template_args: Mapping[str, Any],
    tell: Callable[[Progress], None],
) -> Progress:
    """Answer the requests that are not in `answers`, and write the answers there in the order of
    the requests. After Ctrl-C and errors, answers that are ready behind the first missing one are
    written too. ask: turns a prompt that is text into a chat. Twice as many answers as `max_batch`
    are open, so that some wait when one ends."""
    left = [request for request in requests if request.id not in answers.done]
    progress = Progress(len(left))
    written = Written(answers, [request.id for request in left], progress)
    most = 2 * llm.engine.options.max_batch
    # By place in `left`, and in its order: the samples that go on, each with its number, and those
    # that have ended.
    opened: dict[int, dict[Stream, int]] = {}
    ended: dict[int, dict[int, dict[str, Any]]] = {}
    begun = 0

    def begin(place: int) -> None:
        opened[place], ended[place] = {}, {}
        request = left[place]
        text = request.prompt
        prompt = ask(text) if isinstance(text, str) else text
        params = request.params.resolved(llm.defaults)
        for i, (each, options) in enumerate(samples(prompt, request.n, {"params": params})):
            stream = llm.stream(each, template_args=template_args, **options)
            opened[place][stream] = i
            stream._begin()

    def end(place: int, answer: dict[str, Any]) -> None:
        for stream in opened.pop(place):
            stream.close()
        del ended[place]
        written.put(place, answer, failed="error" in answer)

    try:
        while written.count < len(left):
            while begun < len(left) and sum(map(len, opened.values())) < most:
                begun += 1
                try:
                    begin(begun - 1)
                except _FAILURES as error:
                    end(begun - 1, {"error": str(error)})
            # The first takes a step of the model if it has to, which all get their tokens from.
            waits = True
            for place, streams in list(opened.items()):
                try:
                    for stream, i in list(streams.items()):
                        try:
                            while waits or stream._is_ready():
                                waits = False
                                progress.tokens += next(stream).token_id is not None
                        except StopIteration:
                            del streams[stream]
                            ended[place][i] = answer_json(stream.result) | {
                                "seed": stream.result.seed
                            }
                            # The samples of a prompt share its prefill, so its tokens count once.
                            progress.prompt_tokens += 0 if i else stream.result.prompt_tokens
                    if not streams:
                        several = [ended[place][i] for i in sorted(ended[place])]
                        end(place, several[0] if len(several) == 1 else {"choices": several})
                except _FAILURES as error:
                    end(place, {"error": str(error)})
            tell(progress)
    finally:
        written.put_rest()
        for streams in opened.values():
            for stream in streams:
                stream.close()
    answers.sort()
    return progress


def run(
    llm: LLM,
    requests: list[Request] | list[BatchLine],
    answers: Answers,
    ask: Callable[[str], Chat],
    template_args: Mapping[str, Any],
    loading: Loading,
    *,
    quiet: bool,
) -> int:
    """Answer all requests, and show progress and statistics on standard error. Returns the exit
    code."""
    # On a terminal the answers themselves show how far it is.
    shown = not quiet and (answers.path is not None or not is_terminal(sys.stdout))
    try:
        with ProgressLine(None if shown else False) as line:
            tell = lambda progress: line.show(str(progress))  # noqa: E731
            if are_openais(requests):
                from infer.cli.openai_batch import answer_lines

                progress = answer_lines(llm, requests, answers, tell=tell)
            else:
                progress = answer_all(
                    llm,
                    cast(list[Request], requests),
                    answers,
                    ask=ask,
                    template_args=template_args,
                    tell=tell,
                )
    except KeyboardInterrupt:
        again = "" if answers.path is None else "; the same command continues from there"
        note(f"interrupted: {answers}{again}")
        return INTERRUPTED
    if not quiet:
        note(batch_text(llm, progress, loading))
    if not progress.failed:
        return 0
    again = (
        "" if answers.path is None else f" {answers.path} says why; the same command retries them."
    )
    note(f"error: {progress.failed:,} of {len(requests):,} prompts failed.{again}")
    return 1


def batch_text(llm: LLM, progress: Progress, loading: Loading) -> str:
    """The statistics of all answers together, in the form in which `infer run --verbose` prints
    them for one."""
    memory = llm.stats().memory
    return table(
        {
            "answers": f"{progress.answers - progress.failed:,}, {progress.failed:,} failed",
            "prompts": f"{progress.prompt_tokens:,} tokens",
            "generation": f"{progress.tokens:,} tokens, {progress.tps:,.1f} tokens/s",
            "memory": f"{size(memory.allocated)} on {llm.device.adapter.name} "
            f"({size(memory.peak)} peak)",
            "loading": str(loading),
        }
    )
