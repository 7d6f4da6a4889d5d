"""The commands of `infer`, and their arguments.

They are `infer run`, `infer chat`, `infer serve`, `infer ps`, `infer connect`, `infer pull`,
`infer list`, `infer rm`, `infer info`, `infer devices` and `infer bench`. Nothing heavy is
imported before a command runs, so that `infer --help` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

import infer
from infer.cli.chat import Conversation, chat, greet, loaded
from infer.cli.connect import connect
from infer.cli.lines import TypedLines, history_path
from infer.cli.options import (
    AdapterOption,
    ChatTemplateOption,
    Command,
    Commands,
    ContextOption,
    DeviceOption,
    DraftOption,
    DraftQuantizeOption,
    DtypeOption,
    HubArgument,
    InvariantOption,
    JsonOption,
    KVDtype,
    KVDtypeOption,
    ModelArgument,
    OfflineOption,
    OptionalModelArgument,
    Precision,
    PrecisionOption,
    QuantizeOption,
    RevisionOption,
    SpeculateOption,
    VerboseOption,
    WebgpuOption,
    bench_option,
    format_names,
    loading_option,
    names_in_cache,
    output_option,
    parse_bias,
    parse_counts,
    parse_save,
    parse_template_arg,
    prompt_option,
    sampling_option,
    shape_names,
)
from infer.cli.ps import ps
from infer.cli.serve import serve
from infer.cli.terminal import (
    INTERRUPTED,
    exit_codes,
    never_fail_to_encode,
    note,
    of_system,
    read_prompt,
    read_schema,
    read_text,
    show,
    tell,
    uninterrupted,
    warnings_as_notes,
    write,
    write_as_is,
    write_json,
)
from infer.kernels.errors import RequestError
from infer.progress import (
    ProgressLine,
    columns,
    discard,
    is_terminal,
    size,
    visible,
    write_note,
)

if TYPE_CHECKING:
    from infer.kernels.gpu.adapters import AdapterInfo
    from infer.llm import LLM, Stream
    from infer.results import Result

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The program `infer`."""
    never_fail_to_encode()
    if hasattr(signal, "SIGPIPE"):  # help that nobody reads to its end ends like any program's
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        app(prog_name="infer")
    except OSError as error:  # from writing a help text: commands handle their own
        note(f"error: The output cannot be written: {of_system(error)}")
        discard(1)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Run language models on your own GPU, through WebGPU.

    Try it with the model that is included: infer run demo "Once upon a time"

    Results go to standard output, everything else to standard error. Exit codes: 0 for success, 1
    for an error, 2 for a wrong option, value or name, 130 after Ctrl-C.
    """
    if version:
        with exit_codes():
            write(f"infer {infer.__version__}\n")
        raise typer.Exit


@app.command(
    cls=Command,
    epilog="""
Examples:

    infer run demo "Why is the sky blue?"

    cat report.txt | infer run Qwen/Qwen3-0.6B --system "Summarise this." --context 16384

    infer run Qwen/Qwen3-0.6B --file prompts.jsonl --out answers.jsonl
""",
)
def run(
    model: ModelArgument,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT]...",
            show_default=False,
            help="The prompt. With -, or where something is piped in, it is read from standard"
            " input, without its last line end. Without a prompt, a terminal starts a "
            "chat.",
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        prompt_option("--prompt", "-p", metavar="TEXT", help="Another way to give the prompt."),
    ] = None,
    system: Annotated[
        str | None,
        prompt_option(
            metavar="TEXT",
            help="A system message before the prompt, for models with a chat template.",
        ),
    ] = None,
    file: Annotated[
        str | None,
        prompt_option(
            "--file",
            metavar="PATH",
            help="A file of prompts instead of one, or - for standard input, answered many at "
            'once. Each line is a JSON object with a "prompt" or chat "messages", and, if wanted, '
            'an "id", "n" for several answers, and sampling options by the names below, such as '
            '"max_tokens"; or a JSON string; or all lines are those of OpenAI\'s Batch API.',
        ),
    ] = None,
    raw: Annotated[
        bool,
        prompt_option(
            "--raw",
            help="Continue the prompt as plain text, without the model's chat template.",
        ),
    ] = False,
    template_arg: Annotated[
        list[str] | None,
        prompt_option(
            metavar="KEY=JSON",
            help="An argument of the chat template, such as enable_thinking=false. Can be "
            "repeated.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        sampling_option(
            "--max-tokens",
            "-n",
            metavar="N",
            help="The most tokens to generate. By default an answer goes on until the model "
            "ends it, the limit in its generation_config.json is reached, or the context "
            "is full.",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        sampling_option(metavar="TEXT", help="Stop before this text. Can be repeated."),
    ] = None,
    stop_token_ids: Annotated[
        list[int] | None,
        sampling_option(metavar="ID", help="End before this token. Can be repeated."),
    ] = None,
    include_stop_str_in_output: Annotated[
        bool,
        sampling_option(
            "--include-stop-str-in-output",
            help="End behind what --stop or --stop-token-ids names, not before.",
        ),
    ] = False,
    min_tokens: Annotated[
        int,
        sampling_option(metavar="N", help="Nothing ends the answer before so many tokens."),
    ] = 0,
    bad_words: Annotated[
        list[str] | None,
        sampling_option(metavar="TEXT", help="A text that is not in the answer. Can be repeated."),
    ] = None,
    allowed_token_ids: Annotated[
        list[int] | None,
        sampling_option(
            metavar="ID", help="Only this token may be in the answer. Can be repeated."
        ),
    ] = None,
    schema: Annotated[
        str | None,
        sampling_option(
            metavar="PATH",
            help="Generate JSON that is valid under the JSON schema in this file.",
        ),
    ] = None,
    regex: Annotated[
        str | None,
        sampling_option(
            metavar="PATTERN", help="Generate text that matches this regular expression."
        ),
    ] = None,
    choices: Annotated[
        list[str] | None,
        sampling_option(
            metavar="TEXT",
            help="The answer is this text, or another one that is given so. Can be repeated.",
        ),
    ] = None,
    grammar: Annotated[
        str | None,
        sampling_option(
            metavar="PATH",
            help="Generate text that follows the grammar in this file, in llguidance's dialect"
            " of Lark.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        sampling_option(
            metavar="T",
            help="Sampling temperature; 0 is greedy. The defaults of this and the next four "
            "options are those of the model's generation_config.json, or else off.",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        sampling_option(
            metavar="K", help="Sample from the K most probable tokens; 0 turns it off."
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        sampling_option(
            metavar="P",
            help="Sample from the fewest most probable tokens whose probabilities add up to P;"
            " 1 turns it off.",
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        sampling_option(
            metavar="P",
            help="Sample from tokens that are at least P times as probable as the most "
            "probable one; 0 turns it off.",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        sampling_option(
            metavar="X",
            help="Divides positive and multiplies negative logits of tokens that are in the "
            "prompt or the answer; 1 turns it off.",
        ),
    ] = None,
    presence_penalty: Annotated[
        float,
        sampling_option(
            metavar="X",
            help="Subtracted from the logits of tokens that are in the answer, from -2 to 2.",
        ),
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        sampling_option(
            metavar="X",
            help="Subtracted from the logit of a token for each time that it is in the answer,"
            " from -2 to 2.",
        ),
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        sampling_option(
            metavar="ID=X",
            help="Added to the logit of a token, given by its id; at most 100, and -inf "
            "forbids the token. Can be repeated.",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        sampling_option(
            "--ignore-eos",
            help="Do not stop where the model ends the answer: generate --max-tokens tokens.",
        ),
    ] = False,
    seed: Annotated[
        int | None,
        sampling_option(
            metavar="N",
            help="Seed of the sampling: the same seed gives the same answer. Default: a random"
            " one.",
        ),
    ] = None,
    device: DeviceOption = None,
    webgpu: WebgpuOption = None,
    precision: PrecisionOption = Precision.AUTO,
    context: ContextOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    kv_dtype: KVDtypeOption = KVDtype.F16,
    adapter: AdapterOption = None,
    chat_template: ChatTemplateOption = None,
    revision: RevisionOption = None,
    offline: OfflineOption = False,
    max_batch: Annotated[
        int | None,
        loading_option(
            "--max-batch",
            metavar="N",
            help="With --file: how many answers to generate at once, up to 64. Default: 8, or "
            "4 on the CPU.",
        ),
    ] = None,
    invariant: InvariantOption = False,
    speculate: SpeculateOption = None,
    draft: DraftOption = None,
    draft_quantize: DraftQuantizeOption = None,
    no_fuse: Annotated[
        bool,
        loading_option(
            "--no-fuse",
            help="Run every operation as a separate kernel: slower, for debugging.",
        ),
    ] = False,
    out: Annotated[
        str | None,
        output_option(
            "--out",
            metavar="PATH",
            help="With --file: write the answers to this file, a JSON object per line, in the "
            "order of the prompts. Prompts that it has answers to are skipped, so that "
            "after an interrupt the same command continues. Prompts that failed do not "
            "stop the others and are retried by the same command.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        output_option(
            "--json",
            help="Print a single JSON object at the end: text, token ids, finish reason, "
            "statistics, seed, adapter and versions.",
        ),
    ] = False,
    logprobs: Annotated[
        int | None,
        output_option(
            metavar="N",
            help="With --json or --file: include the log probability of each token, and of the"
            " N (0 to 20) most probable tokens in its place.",
        ),
    ] = None,
    quiet: Annotated[
        bool,
        output_option(
            "--quiet", "-q", help="Print only errors on standard error: no statistics and no notes."
        ),
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Answer a prompt, or chat.

    Without a prompt, it starts a chat in a terminal, as `infer chat` does.

    The answer is written to standard output while it is generated; statistics follow on standard
    error. Ctrl-C stops the answer: what has been generated stays, and the exit code is 130.

    With --file, the answers to a file of prompts are written as JSON lines; the exit code is 1 if
    any of them failed.
    """
    with exit_codes(verbose):
        if raw and (system is not None or template_arg or chat_template is not None):
            raise RequestError(
                "--raw uses no chat template. Leave it out, or --system, --template-arg and "
                "--chat-template."
            )
        if logprobs is not None and not as_json and file is None:
            raise RequestError("--logprobs needs --json or --file.")
        bias = dict(map(parse_bias, logit_bias or ()))
        template_args = dict(map(parse_template_arg, template_arg or ()))
        lines: TypedLines | None = None  # typed lines, if this is a conversation
        if prompt is not None and words:
            raise RequestError("Give the prompt either after the model or by --prompt, not both.")
        if file is None:
            for name, given in (("--out", out), ("--max-batch", max_batch)):
                if given is not None:
                    raise RequestError(f"{name} needs --file.")
            given = " ".join(words) if words else prompt
            leaves = raw or as_json  # leaves: the answer is not a conversation
            if given is None and not leaves and is_terminal(sys.stdin) and is_terminal(sys.stdout):
                lines = TypedLines(history_path())
            else:
                text = read_prompt(given)
        else:
            check_file(file, out, prompted=bool(words) or prompt is not None, as_json=as_json)

        from infer.kernels.gpu.adapters import start_drivers

        start_drivers(webgpu)  # while all this is imported

        from infer.cli import report
        from infer.loading import load
        from infer.sampling import SamplingOptions, SamplingParams

        sampling: SamplingOptions = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "logit_bias": bias or None,
            "seed": seed,
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "stop": stop or (),
            "stop_token_ids": stop_token_ids or (),
            "include_stop_str_in_output": include_stop_str_in_output,
            "ignore_eos": ignore_eos,
            "bad_words": bad_words or (),
            "allowed_token_ids": allowed_token_ids or None,
            "logprobs": logprobs,
            "schema": None if schema is None else read_schema(schema),
            "regex": regex,
            "choices": choices or None,
            "grammar": None if grammar is None else read_text(grammar),
        }
        params = SamplingParams(**sampling)
        if params.constrained:
            from infer.engine.constraint import library

            library()  # a missing library shows before the model is read
        if file is not None:
            from infer.cli import batch
            from infer.cli.answer_file import Answers

            requests = batch.read_requests(file, params, template_args, raw=raw)
            answers = Answers(out, requests)
            if answers.done and not quiet:
                note(f"note: {answers} already")
            if len(answers.done) == len(requests):
                answers.sort()
                return
        begin = time.perf_counter()
        with warnings_as_notes(quiet), ProgressLine(False if quiet else None) as progress:
            llm = load(
                model,
                device=device,
                webgpu=webgpu,
                precision=precision,
                context=context,
                dtype=dtype,
                quantize=quantize,
                kv_dtype=kv_dtype,
                max_batch=1 if file is None else max_batch,
                invariant=invariant,
                speculate=speculate,
                draft=draft,
                draft_quantize=draft_quantize,
                adapter=adapter,
                chat_template=chat_template,
                revision=revision,
                offline=offline,
                progress=progress.loading,
                engine={"fuse": not no_fuse},
            )
        with llm:
            params = params.resolved(llm.defaults)
            if file is not None:
                loading = report.Loading(time.perf_counter() - begin, progress.waiting)
                if verbose:
                    note(report.load_details(llm, params, loading))
                ask = partial(make_prompt, llm, system=system, template_args=template_args, raw=raw)
                with warnings_as_notes(quiet):
                    code = batch.run(
                        llm, requests, answers, ask, template_args, loading, quiet=quiet
                    )
                if code:
                    raise typer.Exit(code)
                return
            if lines is not None:
                usual = asdict(SamplingParams())
                own = {name: value for name, value in sampling.items() if value != usual[name]}
                answerer = loaded(llm, own, template_args)
                greet(answerer)
                talk = Conversation(answerer, own, system, typed=True, verbose=verbose)
                talk.run(lines)
                return
            messages = make_prompt(llm, text, system, template_args, raw=raw)
            with warnings_as_notes(quiet):
                stream = llm.stream(messages, params=params, template_args=template_args)
            with stream:
                with progress:
                    of_kernels = partial(progress.loading, "kernels")
                    llm.engine.runner.warm_up(stream.so_far.prompt_tokens, params, of_kernels)
                loading = report.Loading(time.perf_counter() - begin, progress.waiting)
                if verbose:
                    note(report.load_details(llm, params, loading))
                result = generate(stream, streamed=not as_json, quiet=quiet)
            if as_json:
                write_json(report.result_json(llm, result, params, loading))
            elif not quiet:
                note(report.statistics_text(llm, result, loading))
    if result.finish_reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


def make_prompt(
    llm: LLM, text: str, system: str | None, template_args: dict[str, Any], *, raw: bool
) -> str | list[dict[str, str]]:
    """Chat messages for a model with a chat template, unless `raw`; else the text itself."""
    if raw:
        return text
    if llm.tokenizer.has_chat_template:
        before = [] if system is None else [{"role": "system", "content": system}]
        return [*before, {"role": "user", "content": text}]
    if system is not None or template_args:
        raise RequestError(
            f"{llm.name} has no chat template, so --system and --template-arg have no effect. "
            "Put everything into the prompt."
        )
    return text


def check_file(file: str, out: str | None, *, prompted: bool, as_json: bool) -> None:
    """Raises RequestError for what --file leaves no room for."""
    if prompted:
        raise RequestError("Give either a prompt or --file, not both.")
    if as_json:
        raise RequestError("Leave out --json: with --file, each answer is a JSON object anyway.")
    if out is not None and all(map(os.path.exists, (file, out))) and os.path.samefile(file, out):
        raise RequestError(f"{out} is the file of the prompts. Give --out another name.")


def generate(stream: Stream, *, streamed: bool, quiet: bool = False) -> Result:
    """The answer; streamed: written while it comes, and its reasoning on standard error, unless
    quiet. After Ctrl-C, what there is by then."""
    written, thinking = 0, False
    shown = visible if is_terminal(sys.stdout) else str
    try:
        for chunk in stream:
            with uninterrupted():
                if streamed:
                    if chunk.reasoning and not quiet:
                        write_note(visible(chunk.reasoning))
                        thinking = True
                    if thinking and chunk.text:
                        write_note("\n\n")
                        thinking = False
                    write_as_is(shown(chunk.text))
                written += len(chunk.text)
    except KeyboardInterrupt:
        if streamed:
            write(stream.so_far.text[written:])
    finally:
        if streamed:
            write("\n")
    return stream.so_far


app.command(
    cls=Command,
    epilog="""
Examples:

    infer chat Qwen/Qwen3-0.6B --system "Answer in one line."

    infer chat --url http://127.0.0.1:8000
""",
)(chat)


app.command(
    cls=Command,
    epilog="""
Examples:

    infer serve Qwen/Qwen3-0.6B --max-batch 16

    infer serve ./my-model --adapter sql=./sql-lora --host 0.0.0.0 --api-key SECRET
""",
)(serve)

app.command(
    cls=Command,
    epilog="""
Example:

    infer ps --url http://gpu-server:8000
""",
)(ps)

app.command(
    cls=Command,
    epilog="""
Examples:

    infer connect claude-code

    infer connect codex --write --url http://gpu-server:8000
""",
)(connect)


@app.command(
    cls=Command,
    epilog="""
Example:

    infer pull unsloth/Qwen3-0.6B-GGUF:Q4_K_M
""",
)
def pull(
    model: HubArgument, revision: RevisionOption = None, verbose: VerboseOption = False
) -> None:
    """Download a model from the hub, to run it later.

    Downloads what `infer run` would, and nothing else, into the cache that other programs share
    (HF_HOME), and shows where it is and how large. Files that are there already are kept.
    """
    with exit_codes(verbose):
        from infer.cli import cached
        from infer.hub.cache import pull as fetch

        with ProgressLine() as line:
            found = fetch(model, revision=revision, progress=partial(line.loading, "download"))
        tell(cached.pulled_text(found))


@app.command(
    "list",
    cls=Command,
    epilog="""
Examples:

    infer list

    infer list --json
""",
)
def list_(as_json: JsonOption = False, verbose: VerboseOption = False) -> None:
    """List the models in the cache.

    Shows each model's name, size on disk, format, commit and the day it was last used, the most
    recently used first.
    """
    with exit_codes(verbose):
        from infer.cli.cached import CachedReport
        from infer.hub.cache import list_models

        show(CachedReport(list_models()), as_json)


@app.command(
    cls=Command,
    epilog="""
Examples:

    infer rm Qwen/Qwen3-0.6B

    infer rm unsloth/Qwen3-0.6B-GGUF:Q4_K_M --yes
""",
)
def rm(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A model by its name in `infer list`, or the hub id of a repository, for all "
            "models in it.",
            autocompletion=names_in_cache,
        ),
    ],
    revision: RevisionOption = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes", "-y", help="Do not ask for confirmation; needed where there is no terminal."
        ),
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Delete a model from the cache.

    Deletes a repository, one revision of it, or one GGUF model, but no file that other models in
    the cache need. Asks for confirmation first, and shows how much was freed.
    """
    with exit_codes(verbose):
        from infer.cli import cached
        from infer.hub.cache import find_deletion

        deletion = find_deletion(model, revision)
        if not yes and not cached.is_wanted(deletion):
            note("Nothing was deleted.")
            raise typer.Exit(1)
        with uninterrupted():
            freed = deletion.execute()
        tell(f"{deletion.name}: deleted, {size(freed)} freed")


@app.command("show", cls=Command, hidden=True)  # the name in Ollama
@app.command(
    cls=Command,
    epilog="""
Example:

    infer info unsloth/Qwen3-0.6B-GGUF:Q4_K_M --context 4096
""",
)
def info(
    model: ModelArgument,
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
    revision: RevisionOption = None,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Show what a model is, how much memory it needs, and whether it fits.

    Counts the parameters, and the memory for the weights, for the KV cache at a context, and for
    all else. Says whether that fits where it is known how much is free. Reads only the small files
    and the headers of the weights, and works without a GPU; a model from the hub is downloaded
    first.
    """
    with exit_codes(verbose):
        from infer.cli.report import ModelReport
        from infer.inspection import inspect_model

        with ProgressLine() as line:
            found = inspect_model(
                model,
                device=device,
                webgpu=webgpu,
                precision=precision,
                context=context,
                dtype=dtype,
                quantize=quantize,
                kv_dtype=kv_dtype,
                speculate=speculate,
                draft=draft,
                draft_quantize=draft_quantize,
                adapter=adapter,
                revision=revision,
                offline=offline,
                progress=line.loading,
            )
        _note_software(found.adapter)
        show(ModelReport(found), as_json)


@app.command(
    cls=Command,
    epilog="""
Example:

    infer devices --check
""",
)
def devices(
    device: DeviceOption = None,
    webgpu: WebgpuOption = None,
    check: Annotated[
        bool,
        output_option(
            "--check",
            help="Run every kernel on the adapter in use, compare it with its reference, and "
            "show which fail. The exit code is 1 if any does.",
        ),
    ] = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """List the adapters of this machine.

    Shows the type, backend and driver of each, the optional features that kernels use, its limits
    and, where it is known, its memory. A star marks the one in use: discrete GPUs come first, then
    integrated ones, then software. OpenGL is never used. Where both WebGPU libraries are installed,
    what the other one offers comes after; --webgpu asks one alone.
    """
    with exit_codes(verbose):
        from infer.cli.report import Adapters, check_kernels
        from infer.kernels.gpu.adapters import choose_adapter

        if check:
            used = choose_adapter(device, webgpu)
            _note_software(used)
            with ProgressLine() as progress:
                checks = check_kernels(used, progress.show)
            show(checks, as_json)
            raise typer.Exit(0 if checks.ok else 1)
        show(Adapters.find(device, webgpu), as_json)


def _note_software(adapter: AdapterInfo | None) -> None:
    """Prints the note of a software adapter, for commands that load no model."""
    from infer.kernels.gpu.adapters import software_note

    if adapter is not None and adapter.kind == "software":
        note(f"note: {software_note(adapter)}")


@app.command(
    cls=Command,
    epilog="""
Examples:

    infer bench demo

    infer bench --shape llama-3.2-1b --quantize q4 --depth 4096

    infer bench --shape llama-3.2-1b --batch 1,8,64 --clients 16
""",
)
def bench(
    model: OptionalModelArgument = None,
    shape: Annotated[
        str | None,
        bench_option(
            "--shape",
            metavar="SHAPE",
            help="The shape of a known model, such as llama-3.2-1b, with random weights, "
            "instead of a model. A wrong name lists all shapes.",
            autocompletion=shape_names,
        ),
    ] = None,
    format: Annotated[
        str | None,
        bench_option(
            "--format",
            metavar="FORMAT",
            help="With --shape: random weights in this checkpoint format, such as gptq or q4_k.",
            autocompletion=format_names,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        bench_option(
            "--prompt-tokens",
            metavar="N",
            help="Tokens of the prefill test. By default this is 512, --decode-tokens 128 and "
            "--repeats 5, or less on a slow adapter, so that it takes about a minute.",
        ),
    ] = None,
    prefix: Annotated[
        float | None,
        bench_option(
            "--prefix",
            metavar="P",
            help="Also prefill with this share of the prompt in the cache, such as 0.9.",
        ),
    ] = None,
    decode_tokens: Annotated[
        int | None,
        bench_option("--decode-tokens", "-n", metavar="N", help="Tokens of each decode test."),
    ] = None,
    repeats: Annotated[
        int | None,
        bench_option("--repeats", "-r", metavar="N", help="Runs of each test, after a warm-up."),
    ] = None,
    depth: Annotated[
        str | None,
        bench_option(
            "--depth", metavar="N,N", help="Also decode with this many tokens in the cache."
        ),
    ] = None,
    batch: Annotated[
        str | None,
        bench_option(
            "--batch",
            metavar="N,N-N",
            help="Also decode this many answers at once, up to 64: 1,8,64, or 1-64 for all of "
            "them.",
        ),
    ] = None,
    clients: Annotated[
        str | None,
        bench_option(
            "--clients",
            metavar="N,N",
            help="Also serve this many clients at once, each of which sends --repeats "
            "requests, one after the other. Prompts have from an eighth of "
            "--prompt-tokens to all of them, answers have --decode-tokens.",
        ),
    ] = None,
    accept: Annotated[
        float | None,
        bench_option(
            "--accept",
            metavar="P",
            help="Also decode with drafts, alone and with each --batch. Drafted tokens are "
            "verified, but each is accepted with this probability, whatever the model "
            "says.",
        ),
    ] = None,
    draft_rows: Annotated[
        int | None,
        bench_option(
            "--draft-rows",
            metavar="K",
            help="With --accept: draft this many tokens per step, 1 to 7. Default: as many as "
            "--speculate auto would.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        bench_option(
            "--draft",
            metavar="MODEL",
            help="With --accept: the draft model, or with --shape its shape; mtp for the "
            "model's own layer that predicts further tokens.",
        ),
    ] = None,
    draft_quantize: DraftQuantizeOption = None,
    profile: Annotated[bool, bench_option("--profile", help="Time each kernel of a step.")] = False,
    device: DeviceOption = None,
    webgpu: WebgpuOption = None,
    precision: PrecisionOption = Precision.AUTO,
    context: ContextOption = None,
    dtype: DtypeOption = None,
    quantize: QuantizeOption = None,
    kv_dtype: KVDtypeOption = KVDtype.F16,
    invariant: InvariantOption = False,
    adapter: AdapterOption = None,
    revision: RevisionOption = None,
    offline: OfflineOption = False,
    as_json: JsonOption = False,
    save: Annotated[
        str | None,
        output_option(
            "--save",
            metavar="PATH",
            help="Also write the JSON object to this file, or to a new file in this folder.",
        ),
    ] = None,
    verbose: VerboseOption = False,
) -> None:
    """Measure how fast a model runs on this machine.

    Measures the tokens per second of prefill, of decoding, and of decoding with all sampling
    options on, and which share of the adapter's copy bandwidth decoding reaches. With --shape the
    weights are random, as speed does not depend on them, and nothing is downloaded.
    """
    with exit_codes(verbose):
        depths, path = parse_counts(depth, "--depth"), parse_save(save)
        batches, at_once = parse_counts(batch, "--batch"), parse_counts(clients, "--clients")

        from infer.bench import run as benchmark
        from infer.bench.options import BenchTests, Subject
        from infer.bench.report import format_report

        if path is not None:
            benchmark.check_writable(path)
        last = ""

        def say(test: str, number: int, runs: int) -> None:
            nonlocal last
            if line.shown:
                run = f": run {number} of {runs}" if number else ": warm-up" if runs else ""
                line.show(test + run, now=True)
            elif test != last:
                note(test)
            last = test

        with warnings_as_notes(False), ProgressLine() as line:
            result = benchmark.run_bench(
                Subject(
                    model=model,
                    shape=shape,
                    format=format,
                    device=device,
                    webgpu=webgpu,
                    precision=precision,
                    context=context,
                    dtype=dtype,
                    quantize=quantize,
                    kv_dtype=kv_dtype,
                    invariant=invariant,
                    adapter=adapter,
                    revision=revision,
                    offline=offline,
                    draft=draft,
                    draft_quantize=draft_quantize,
                ),
                BenchTests(
                    prompt_tokens=prompt_tokens,
                    prefix=prefix,
                    decode_tokens=decode_tokens,
                    depths=depths,
                    batches=batches,
                    clients=at_once,
                    accept=accept,
                    draft_rows=draft_rows,
                    repeats=repeats,
                    profile=profile,
                ),
                progress=say,
                loading=line.loading,
            )
        if as_json:
            write(result.to_json())
        else:
            width = columns(sys.stdout) if is_terminal(sys.stdout) else None
            write(format_report(result, width) + "\n")
        if path is not None:
            note(f"wrote {benchmark.save(result, path)}")
