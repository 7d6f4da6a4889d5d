"""The command line: `infer run`, `infer chat`, `infer serve`, `infer ps`, `infer pull`,
`infer list`, `infer rm`, `infer info`, `infer devices`, `infer bench`.

Nothing heavy is imported before a command runs, so that `infer --help` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

import infer
from infer.cli.chat import chat
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
    TextWriter,
    exit_codes,
    never_fail_to_encode,
    note,
    of_system,
    read_prompt,
    read_schema,
    read_text,
    show,
    uninterrupted,
    warnings_as_notes,
    write,
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
    except OSError as error:  # of a help text: commands tell theirs
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
    for an error, which is explained, 2 for wrong usage, 130 after Ctrl-C.
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
            help="The text to answer. With - it is read from standard input, and without it too "
            "where something is piped in; one line end at its end is dropped.",
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
            help="Instead of a prompt a file of them, or - for standard input, answered many at "
            'once. Each line is a JSON object: "prompt" or chat "messages", an "id", sampling '
            "options of its own by their names below, such as max_tokens; or a JSON string.",
        ),
    ] = None,
    raw: Annotated[
        bool,
        prompt_option(
            "--raw",
            help="Continue the prompt as it is. Without it, a model that has a chat template gets "
            "the prompt as a user's message.",
        ),
    ] = False,
    template_arg: Annotated[
        list[str] | None,
        prompt_option(
            metavar="KEY=JSON",
            help="A value for the chat template, such as enable_thinking=false. Can be repeated.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        sampling_option(
            "--max-tokens",
            "-n",
            metavar="N",
            help="End after so many tokens. Without it the answer ends where the model ends it, "
            "after what its generation_config.json says, or when the context is full.",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        sampling_option(metavar="TEXT", help="End before this text. Can be repeated."),
    ] = None,
    schema: Annotated[
        str | None,
        sampling_option(
            metavar="PATH",
            help="The answer is JSON that is valid under the JSON schema in this file.",
        ),
    ] = None,
    regex: Annotated[
        str | None,
        sampling_option(
            metavar="PATTERN", help="The answer is what this regular expression matches."
        ),
    ] = None,
    grammar: Annotated[
        str | None,
        sampling_option(
            metavar="PATH",
            help="The answer is derived by the grammar in this file, in llguidance's dialect of "
            "Lark.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        sampling_option(
            metavar="T",
            help="Divides the logits; 0 is greedy. Where this or one of the next four is left out, "
            "the model's generation_config.json counts; without one too, it is off.",
        ),
    ] = None,
    top_k: Annotated[
        int | None, sampling_option(metavar="K", help="Keep the K most probable tokens; 0 is off.")
    ] = None,
    top_p: Annotated[
        float | None,
        sampling_option(
            metavar="P",
            help="Keep the fewest of the most probable tokens that reach this probability "
            "together; 1 is off.",
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        sampling_option(
            metavar="P",
            help="Keep tokens at least this fraction as probable as the best; 0 is off.",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        sampling_option(
            metavar="X",
            help="Divides positive and multiplies negative logits of tokens in prompt and answer; "
            "1 is off.",
        ),
    ] = None,
    presence_penalty: Annotated[
        float,
        sampling_option(
            metavar="X", help="Subtracted from the logits of tokens in the answer; from -2 to 2."
        ),
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        sampling_option(metavar="X", help="The same, for each time that a token is there."),
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        sampling_option(
            metavar="ID=X",
            help="Added to the logit of a token id; at most 100, and -inf forbids the token. Can "
            "be repeated.",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        sampling_option(
            "--ignore-eos", help="Go on after the model's own end, up to --max-tokens."
        ),
    ] = False,
    seed: Annotated[
        int | None,
        sampling_option(
            metavar="N",
            help="The same seed samples the same answer. Without it every run has a new one.",
        ),
    ] = None,
    device: DeviceOption = None,
    webgpu: WebgpuOption = None,
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
            help="With --file: answers that are generated at once, up to 64. Without it 8, or 4 "
            "where the CPU computes.",
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
            help="Run every operation as a kernel of its own: slower, to find a fault with.",
        ),
    ] = False,
    out: Annotated[
        str | None,
        output_option(
            "--out",
            metavar="PATH",
            help="With --file: write the answers there, a JSON object in each line, in the order "
            "of the prompts. What the file has already is not answered again, but for errors: "
            "after an interrupt, the same command goes on.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        output_option(
            "--json",
            help="Print nothing while generating, and in the end one JSON object: text, token ids, "
            "finish reason, statistics, seed, adapter and versions.",
        ),
    ] = False,
    logprobs: Annotated[
        int | None,
        output_option(
            metavar="N",
            help="With --json or --file: the log probability of each token, and those of the N "
            "(0 to 20) most probable in its place.",
        ),
    ] = None,
    quiet: Annotated[
        bool,
        output_option("--quiet", "-q", help="Nothing but errors on standard error: no statistics."),
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Answer a prompt.

    The answer appears on standard output as it is generated, followed by a line end; statistics
    follow on standard error. Ctrl-C ends the answer where it is: what has been generated stays,
    the statistics follow, and the exit code is 130.

    With --file, the answers to a file of prompts are written as JSON lines; the exit code is 1 if
    one of them failed.
    """
    with exit_codes(verbose):
        if raw and (system is not None or template_arg or chat_template is not None):
            raise typer.BadParameter("it leaves no chat template to fill", param_hint="--raw")
        if logprobs is not None and not as_json and file is None:
            raise typer.BadParameter("only --json shows them", param_hint="--logprobs")
        bias = dict(map(parse_bias, logit_bias or ()))
        template_args = dict(map(parse_template_arg, template_arg or ()))
        if prompt is not None and words:
            raise typer.BadParameter("there is a prompt after the model", param_hint="--prompt")
        if file is None:
            for name, given in (("--out", out), ("--max-batch", max_batch)):
                if given is not None:
                    raise typer.BadParameter("it belongs to --file", param_hint=name)
            text = read_prompt(" ".join(words) if words else prompt)
        else:
            check_file(file, out, prompted=bool(words) or prompt is not None, as_json=as_json)

        from infer.kernels.gpu.adapters import start_drivers

        start_drivers()  # while all this is imported

        from infer.cli import report
        from infer.loading import load
        from infer.sampling import SamplingParams

        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=bias or None,
            seed=seed,
            max_tokens=max_tokens,
            stop=stop or (),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            schema=None if schema is None else read_schema(schema),
            regex=regex,
            grammar=None if grammar is None else read_text(grammar),
        )
        if params.constrained:
            from infer.engine.constraint import library

            library()  # what is missing shows before the model is read
        if file is not None:
            from infer.cli import batch

            requests = batch.read_requests(file, params, raw=raw)
            answers = batch.Answers(out, requests)
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
            if llm.device.software and not quiet:
                note(
                    f"note: {llm.device.adapter.name} is a software adapter: it computes on the "
                    "CPU, slowly"
                )
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
            messages = make_prompt(llm, text, system, template_args, raw=raw)
            with warnings_as_notes(quiet):
                stream = llm.stream(messages, params=params, template_args=template_args)
            with stream:
                with progress:
                    of_kernels = partial(progress.loading, "kernels")
                    llm.engine.warm_up(stream.so_far.prompt_tokens, params, of_kernels)
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
            f"{llm.name} has no chat template, so --system and --template-arg mean nothing to it. "
            "Put everything into the prompt."
        )
    return text


def check_file(file: str, out: str | None, *, prompted: bool, as_json: bool) -> None:
    """Raises typer.BadParameter for what --file leaves no room for."""
    if prompted:
        raise typer.BadParameter("there is a prompt beside it", param_hint="--file")
    if as_json:
        raise typer.BadParameter("with --file each line is JSON without it", param_hint="--json")
    if out is not None and all(map(os.path.exists, (file, out))) and os.path.samefile(file, out):
        raise typer.BadParameter("it is the file of the prompts", param_hint="--out")


def generate(stream: Stream, *, streamed: bool, quiet: bool = False) -> Result:
    """The answer; streamed: written while it comes, and its reasoning on standard error, unless
    quiet. After Ctrl-C, what there is by then."""
    writer, written, thinking = TextWriter() if streamed else None, 0, False
    try:
        for chunk in stream:
            with uninterrupted():
                if writer is not None:
                    if chunk.reasoning and not quiet:
                        write_note(visible(chunk.reasoning))
                        thinking = True
                    if thinking and chunk.text:
                        write_note("\n\n")
                        thinking = False
                    writer.write(chunk.text)
                written += len(chunk.text)
    except KeyboardInterrupt:
        if writer is not None:
            writer.write(stream.so_far.text[written:])
    finally:
        if writer is not None:
            writer.end()
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
    """Fetch a model from the hub, to run it later.

    Fetches what `infer run` would fetch, and nothing else, into the cache that other programs share
    (HF_HOME). Says where it is and how large; what is there already is not fetched again.
    """
    with exit_codes(verbose):
        from infer.cli import cached
        from infer.hub.cache import pull as fetch

        with ProgressLine() as line:
            found = fetch(model, revision=revision, progress=partial(line.loading, "download"))
        write(cached.pulled_text(found) + "\n")


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

    Those that can be run, with the name to run each by, its size on the disk, its format, the
    commit that it is of and the day that it was last used; those used last come first.
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
            help="A model by its name in `infer list`, or the hub id of a repository, of which all "
            "models are meant.",
            autocompletion=names_in_cache,
        ),
    ],
    revision: RevisionOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask. Without a terminal it is needed.")
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Delete a model from the cache.

    A repository with all that is cached of it, one revision of it, or one GGUF model, and nothing
    that others in the cache need. Asks first, and says what was freed.
    """
    with exit_codes(verbose):
        from infer.cli import cached
        from infer.hub.cache import find_deletion

        deletion = find_deletion(model, revision)
        if not yes and not cached.is_wanted(deletion):
            note("nothing was deleted")
            raise typer.Exit(1)
        with uninterrupted():
            freed = deletion.execute()
        write(f"{deletion.name}: deleted, {size(freed)} freed\n")


@app.command("show", cls=Command, hidden=True)  # what Ollama calls it
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
    """Say what a model is, what it needs, and whether it fits.

    Counts its parameters, and the bytes that would be allocated: for the weights, for the KV cache
    at a context, and besides. Where the platform tells how much memory is free, says whether they
    fit. Reads nothing but the small files and the headers of the weights, and works without a GPU;
    a model from the hub is fetched first.
    """
    with exit_codes(verbose):
        from infer.cli.report import ModelReport
        from infer.inspection import inspect_model

        with ProgressLine() as line:
            found = inspect_model(
                model,
                device=device,
                webgpu=webgpu,
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
            help="Run every kernel on the adapter that is used, compare it with its reference, and "
            "say which fail. The exit code is 1 if one does.",
        ),
    ] = False,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """List the adapters of this machine.

    Each with its type, backend and driver, the features that the kernels make use of, its limits
    and, where the platform tells, its memory. A star marks the one that is used: discrete GPUs come
    first, then integrated ones, then software. OpenGL is never used.
    """
    with exit_codes(verbose):
        from infer.cli.report import Adapters, check_kernels

        adapters = Adapters.find(device, webgpu)
        if check:
            with ProgressLine() as progress:
                checks = check_kernels(adapters.used, progress.show)
            show(checks, as_json)
            raise typer.Exit(0 if checks.ok else 1)
        show(adapters, as_json)


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
            help="Instead of a model: the shape of one, such as llama-3.2-1b, on random weights. "
            "An unknown name is answered with all that there are.",
            autocompletion=shape_names,
        ),
    ] = None,
    format: Annotated[
        str | None,
        bench_option(
            "--format",
            metavar="FORMAT",
            help="Random weights as checkpoints of that kind have them, such as gptq or q4_k.",
            autocompletion=format_names,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        bench_option(
            "--prompt-tokens",
            metavar="N",
            help="Of the prefill test. Where this or one of the next two is left out, it is 512, "
            "128 and 5, or less, so that a slow adapter ends in about a minute.",
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
        bench_option("--decode-tokens", "-n", metavar="N", help="Of every decode test."),
    ] = None,
    repeats: Annotated[
        int | None,
        bench_option("--repeats", "-r", metavar="N", help="Runs of a test, after a warm-up."),
    ] = None,
    depth: Annotated[
        str | None,
        bench_option(
            "--depth", metavar="N,N", help="Also decode with so many tokens in the cache before."
        ),
    ] = None,
    batch: Annotated[
        str | None,
        bench_option(
            "--batch",
            metavar="N,N-N",
            help="Also decode so many answers at once, up to 64: 1,8,64, or 1-64 for all of them.",
        ),
    ] = None,
    clients: Annotated[
        str | None,
        bench_option(
            "--clients",
            metavar="N,N",
            help="Also serve so many clients at once, each of which sends a request, reads the "
            "answer and sends its next, --repeats times. Prompts have an eighth of --prompt-tokens "
            "to all of them, answers have --decode-tokens.",
        ),
    ] = None,
    accept: Annotated[
        float | None,
        bench_option(
            "--accept",
            metavar="P",
            help="Also decode with drafts, alone and with each --batch. They are verified, but "
            "each is taken to be right with this probability, whatever the model says.",
        ),
    ] = None,
    draft_rows: Annotated[
        int | None,
        bench_option(
            "--draft-rows",
            metavar="K",
            help="With --accept: draft so many tokens for each step, 1 to 7. Without it as many as "
            "--speculate auto would.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        bench_option(
            "--draft",
            metavar="MODEL",
            help="With --accept: the model that drafts, or for a --shape another shape; mtp: the "
            "layer of the model itself that predicts further tokens.",
        ),
    ] = None,
    draft_quantize: DraftQuantizeOption = None,
    profile: Annotated[bool, bench_option("--profile", help="Time all kernels of a step.")] = False,
    device: DeviceOption = None,
    webgpu: WebgpuOption = None,
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
            help="Write the JSON object to a file too, or under a name of its own into a folder.",
        ),
    ] = None,
    verbose: VerboseOption = False,
) -> None:
    """Measure how fast a model runs on this machine.

    The prefill of a prompt, decoding, and decoding with all sampling options on: tokens a second,
    and the share that decoding reaches of the bandwidth that a copy on the same adapter has. All
    weights may be random, as speed does not depend on them: with --shape nothing is fetched.
    """
    with exit_codes(verbose):
        depths, path = parse_counts(depth, "--depth"), parse_save(save)
        batches, at_once = parse_counts(batch, "--batch"), parse_counts(clients, "--clients")

        from infer.bench import run as benchmark
        from infer.bench.report import format_report

        if path is not None:
            benchmark.check_writable(path)
        last = ""

        def tell(test: str, number: int, runs: int) -> None:
            nonlocal last
            if line.shown:
                run = f": run {number} of {runs}" if number else ": warm-up" if runs else ""
                line.show(test + run, now=True)
            elif test != last:
                note(test)
            last = test

        with ProgressLine() as line:
            result = benchmark.run_bench(
                model,
                shape,
                device=device,
                webgpu=webgpu,
                context=context,
                dtype=dtype,
                quantize=quantize,
                format=format,
                kv_dtype=kv_dtype,
                adapter=adapter,
                revision=revision,
                offline=offline,
                invariant=invariant,
                prompt_tokens=prompt_tokens,
                prefix=prefix,
                decode_tokens=decode_tokens,
                depths=depths,
                batches=batches,
                clients=at_once,
                accept=accept,
                draft_rows=draft_rows,
                draft=draft,
                draft_quantize=draft_quantize,
                repeats=repeats,
                profile=profile,
                progress=tell,
                loading=line.loading,
            )
        if as_json:
            write(result.to_json())
        else:
            width = columns(sys.stdout) if is_terminal(sys.stdout) else None
            write(format_report(result, width) + "\n")
        if path is not None:
            note(f"wrote {benchmark.save(result, path)}")
