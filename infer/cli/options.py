"""The options of the commands: how their help looks, the groups in it, options that several
commands take, and values that typer cannot read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from infer.boundaries import shown
from infer.cli.terminal import OPTIONS
from infer.progress import parse_size


def _tidied(params: Iterable[Any]) -> list[Any]:
    """Parameters whose help shows no placeholder for flags and no Python types, and whose errors
    show the value that was given."""
    params = list(params)
    for param in params:
        if "process_value" not in vars(param):
            param.process_value = partial(_process, param.process_value)
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
        elif param.is_flag:
            param.metavar = ""
    return params


def _process(process: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    try:
        return process(ctx, value)
    except typer.BadParameter as error:
        if isinstance(value, str) and (found := _TOLD.match(error.message)):
            error.message = found[2] or f"must be {found[1]}, not {shown(value)}"
        raise


_TOLD = re.compile(r"Input should be ([^,]*)|Value error, (.*)", re.S)  # typer's messages


class Command(TyperCommand):
    """A command whose usage shows its arguments by their metavars."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _tidied(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        OPTIONS.set({p.name or "": p.opts[0] for p in self.params if p.opts[0].startswith("--")})
        return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [p.metavar or "" for p in self.params if p.param_type_name == "argument"]
        return [self.options_metavar or "", *arguments]


class Commands(TyperGroup):
    """The group of all commands. If a command does not exist, the error names a similar one, and
    all commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _tidied(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            close = get_close_matches(args[0], self.commands, 1)
            meant = f"Did you mean {close[0]!r}? " if close else ""
            shown = ", ".join(name for name, each in self.commands.items() if not each.hidden)
            ctx.fail(
                f"There is no command {args[0]!r}. {meant}The commands are: {shown}. "
                'To run a model: infer run MODEL "PROMPT".'
            )
        return super().resolve_command(ctx, args)


class Dtype(StrEnum):
    """The dtypes that weight matrices can be converted to."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"


class Quantize(StrEnum):
    """The dtypes that weight matrices can be quantised to."""

    Q8 = "q8"
    Q4 = "q4"


class Speculate(StrEnum):
    """The sources of drafted tokens."""

    OFF = "off"
    AUTO = "auto"
    LOOKUP = "lookup"
    DRAFT = "draft"
    MTP = "mtp"


class Precision(StrEnum):
    """The precision of products."""

    AUTO = "auto"
    F32 = "f32"


class KVDtype(StrEnum):
    """The dtypes that keys and values can be stored in."""

    F16 = "f16"
    F32 = "f32"
    Q8 = "q8"


def prompt_option(*names: str, help: str, metavar: str | None = None) -> Any:
    """An option about the prompt."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Prompt")


def sampling_option(*names: str, help: str, metavar: str | None = None) -> Any:
    """An option about how tokens are chosen, and when to stop."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Sampling")


def loading_option(*names: str, help: str, metavar: str | None = None) -> Any:
    """An option about the model and where it runs."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Model and device")


def server_option(*names: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    """An option about a server: the one that is started, or the one that is asked."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Server", **more)


def output_option(*names: str, help: str, metavar: str | None = None) -> Any:
    """An option about what is printed."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Output")


def bench_option(
    *names: str, help: str, metavar: str | None = None, autocompletion: Any = None
) -> Any:
    """An option about what is measured."""
    return typer.Option(
        *names,
        metavar=metavar,
        help=help,
        rich_help_panel="Tests",
        autocompletion=autocompletion,
    )


# Completions for shells


def shape_names(incomplete: str) -> list[str]:
    from infer.models.loading.shapes import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]


def format_names(incomplete: str) -> list[str]:
    from infer.models.loading.shapes import PUBLISHED

    return [name for name in PUBLISHED if name.startswith(incomplete)]


def model_names(incomplete: str) -> list[str]:
    """Names of models in the cache, for shells to complete. If there are none, shells complete
    names of files."""
    return [name for name in ("demo", *names_in_cache("")) if name.startswith(incomplete)]


def names_in_cache(incomplete: str) -> list[str]:
    from infer.hub.cache import cached_names
    from infer.kernels.errors import InferError

    try:
        return [name for name in cached_names() if name.startswith(incomplete)]
    except InferError:  # a cache that cannot be read
        return []


# Options of several commands

_MODEL = (
    "A hub id such as HuggingFaceTB/SmolLM2-135M-Instruct, or its URL, downloaded"
    " on first use; one GGUF model of a repository, such as "
    "unsloth/Qwen3-0.6B-GGUF:Q4_K_M or org/name/file.gguf; a folder with "
    "config.json, tokenizer.json and *.safetensors; a .gguf file; or demo, the "
    "small model that is included in the package."
)


def _model_argument(metavar: str) -> Any:
    return typer.Argument(
        metavar=metavar, show_default=False, help=_MODEL, autocompletion=model_names
    )


ModelArgument = Annotated[str, _model_argument("MODEL")]
ModelsArgument = Annotated[list[str], _model_argument("MODEL...")]
OptionalModelArgument = Annotated[str | None, _model_argument("[MODEL]")]
HubArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A hub id such as HuggingFaceTB/SmolLM2-135M-Instruct, or its URL, or one GGUF model "
        "of a repository, such as unsloth/Qwen3-0.6B-GGUF:Q4_K_M or org/name/file.gguf.",
    ),
]
DeviceOption = Annotated[
    str | None,
    loading_option(
        "--device",
        metavar="DEVICE",
        help="The adapter to use: its index in `infer devices`, or a part of its name. "
        "Default: the one that the variable INFER_DEVICE names, or else the best.",
    ),
]
WebgpuOption = Annotated[
    str | None,
    loading_option(
        "--webgpu",
        metavar="LIBRARY",
        help="The WebGPU library: wgpu-native, or dawn, which can use tensor cores and is "
        "an extra of this package. Default: the one that the variable INFER_WEBGPU "
        "names, or else wgpu-native.",
    ),
]
PrecisionOption = Annotated[
    Precision,
    loading_option(
        "--precision",
        help="auto: where GPU and library have matrices for that (tensor cores), many rows, as of "
        "a prompt, are multiplied in f16, with sums in f32. f32: never, which is slower.",
    ),
]
ContextOption = Annotated[
    int | None,
    loading_option(
        "--context",
        metavar="N",
        help="Context length in tokens, for prompt and answer together. Default: the "
        "model's own, up to 131072 (8192 on a CPU), or less if that does not fit. Memory is "
        "taken as it is used.",
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    loading_option(
        "--dtype",
        help="Convert the weight matrices to this type while loading. Default: the type "
        "that they have in the files.",
    ),
]
QuantizeOption = Annotated[
    Quantize | None,
    loading_option(
        "--quantize",
        help="Quantise the weight matrices to 8 or 4 bits while loading. With q4, "
        "embeddings and output projection have 8 bits.",
    ),
]
KVDtypeOption = Annotated[
    KVDtype,
    loading_option(
        "--kv-dtype", help="Type of the KV cache: q8 takes about half the memory of f16."
    ),
]
InvariantOption = Annotated[
    bool,
    loading_option(
        "--invariant",
        help="Compute each answer bit for bit the same, whatever else is generated at the "
        "same time and whatever is cached: slower.",
    ),
]
SpeculateOption = Annotated[
    Speculate | None,
    loading_option(
        "--speculate",
        metavar="HOW",
        help="Speculative decoding: draft tokens and verify many in one step; answers stay"
        " the same. draft: drafts of the model that --draft names. mtp: drafts of the"
        " model's own layer for that, which some models have. lookup: drafts of what "
        "came after the same tokens before. auto: the first of these that is "
        "possible, where it is measured to be faster. off: no drafts. Default: auto "
        "with --draft, or else off.",
    ),
]
DraftOption = Annotated[
    str | None,
    loading_option(
        "--draft",
        metavar="MODEL",
        help="A smaller model with the same tokenizer, which drafts tokens for MODEL to "
        "verify, such as demo-draft for demo. Answers stay the same.",
    ),
]
DraftQuantizeOption = Annotated[
    Quantize | None,
    loading_option(
        "--draft-quantize",
        help="Quantise the draft model's weights, instead of what --dtype and --quantize "
        "say for both models.",
    ),
]
AdapterOption = Annotated[
    str | None,
    loading_option(
        "--adapter",
        metavar="PATH",
        help="A LoRA adapter of the model: a folder as PEFT saves it, or a hub id. It is "
        "merged into the weights, or applied beside them if the files are quantised.",
    ),
]
ChatTemplateOption = Annotated[
    Path | None,
    loading_option(
        "--chat-template",
        metavar="FILE",
        help="A file with a Jinja chat template to use instead of the model's own.",
    ),
]
ApiKeyOption = Annotated[
    str | None,
    server_option(
        "--api-key", metavar="KEY", envvar="INFER_API_KEY", help="The API key of the server."
    ),
]
RevisionOption = Annotated[
    str | None,
    loading_option("--revision", metavar="REV", help="Branch, tag or commit of a hub id."),
]
OfflineOption = Annotated[
    bool,
    loading_option("--offline", help="Use only what has been downloaded before, and no network."),
]
JsonOption = Annotated[
    bool, output_option("--json", help="Print a JSON object, with more details than the text.")
]
VerboseOption = Annotated[
    bool,
    output_option("--verbose", "-v", help="Print more on standard error, including tracebacks."),
]


def parse_bias(option: str) -> tuple[int, float]:
    """The token id and the number of ID=X. Raises typer.BadParameter."""
    token, _, value = option.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise typer.BadParameter(
            f"{shown(option)} is not a token id, = and a number, as in 42=-1.5",
            param_hint="--logit-bias",
        ) from None


def parse_template_arg(option: str) -> tuple[str, Any]:
    """The name and the value of KEY=JSON. Raises typer.BadParameter."""
    name, _, value = option.partition("=")
    try:
        if name:
            return name, json.loads(value)
    except (ValueError, RecursionError):
        pass
    raise typer.BadParameter(
        f"{shown(option)} is not a name, = and a JSON value, as in effort='\"high\"'",
        param_hint="--template-arg",
    )


def parse_adapter(option: str) -> tuple[str, str]:
    """The name and the path of NAME=PATH. Raises typer.BadParameter."""
    name, _, path = option.partition("=")
    if name and path:
        return name, path
    raise typer.BadParameter(
        f"{shown(option)} is not a name, = and a folder or hub id, as in sql=org/sql-lora",
        param_hint="--adapter",
    )


def parse_host(option: str) -> str:
    """The name of a host. Raises typer.BadParameter."""
    if re.fullmatch(r"[\w.-]+|\[[\w:.%]+]|\*", option, re.ASCII):
        return option
    raise typer.BadParameter(
        f"{shown(option)} is not a host name, such as example.org, without a port",
        param_hint="--allowed-host",
    )


def parse_origin(option: str) -> str:
    """The origin of web pages, as browsers send it. Raises typer.BadParameter."""
    if re.fullmatch(r"[a-z][a-z0-9+.-]*://[^A-Z\s/?#]+|null|\*", option):
        return option
    raise typer.BadParameter(
        f"{shown(option)} is not an origin, such as https://example.org, without a path",
        param_hint="--cors-origin",
    )


def parse_bytes(option: str | None, name: str) -> int | None:
    """4GB, 512MiB or a number, as bytes; name: of the option. Raises typer.BadParameter."""
    if option is None:
        return None
    nbytes = parse_size(option)
    if nbytes is None:
        raise typer.BadParameter(
            f"{shown(option)} is not an amount of memory, such as 4GB or 512MiB", param_hint=name
        )
    return nbytes


_MOST_COUNTS = 1024  # numbers in a range, at most


def parse_counts(option: str | None, name: str) -> list[int]:
    """The numbers in a list such as "1,8,64", in which "1-64" means every number from 1 to 64.
    name: the option, for the error. Raises typer.BadParameter."""
    counts: list[int] = []
    for part in option.split(",") if option is not None else ():
        found = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part, re.ASCII)
        first, last = (int(n or found[1]) for n in found.groups()) if found else (1, 0)
        if not first <= last < first + _MOST_COUNTS:
            example = "4096,16384" if name == "--depth" else "1,8,64 or 1-64"
            raise typer.BadParameter(
                f"{shown(option)} is not a list of numbers like {example}", param_hint=name
            )
        counts += range(first, last + 1)
    return counts


def parse_save(option: str | None) -> Path | None:
    """The path of a file or a folder. Raises typer.BadParameter if it can be neither."""
    if option is None:
        return None
    if not option or (option[-1] in "/\\" and not Path(option).is_dir()):
        raise typer.BadParameter(
            f"{option!r} is neither a file name nor a folder", param_hint="--save"
        )
    return Path(option)
