"""What the commands' options are made of: their groups in the help, those that several commands
take, and the values that typer cannot read."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

import typer

from infer.foreign import shown


class Dtype(StrEnum):
    """What weight matrices can be converted to."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"


class Quantize(StrEnum):
    """What weight matrices can be quantised to."""

    Q8 = "q8"
    Q4 = "q4"


class KVDtype(StrEnum):
    """What keys and values can be stored as."""

    F16 = "f16"
    F32 = "f32"
    Q8 = "q8"


def prompt_option(*names: str, help: str, metavar: str | None = None) -> Any:
    """An option about what is asked."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Prompt")


def sampling_option(*names: str, help: str, metavar: str) -> Any:
    """An option about how tokens are chosen, and when to stop."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Sampling")


def loading_option(*names: str, help: str, metavar: str | None = None) -> Any:
    """An option about the model and where it runs."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Model and device")


def output_option(*names: str, help: str, metavar: str | None = None) -> Any:
    """An option about what is printed."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="Output")


# What several commands take

ModelArgument = Annotated[
    str,
    typer.Argument(
        show_default=False,
        help="A hub id such as HuggingFaceTB/SmolLM2-135M-Instruct, fetched on its first use; one "
        "GGUF model of a repository, such as unsloth/Qwen3-0.6B-GGUF:Q4_K_M or org/name/file.gguf; "
        "a folder with config.json, tokenizer.json and *.safetensors; a .gguf file; or demo, the "
        "small model that comes with this package.",
    ),
]
DeviceOption = Annotated[
    str | None,
    loading_option(
        "--device",
        metavar="DEVICE",
        help="The adapter to use: its index in `infer devices`, or a part of its name. Without it, "
        "the one that the variable INFER_DEVICE names, else the best there is.",
    ),
]
ContextOption = Annotated[
    int | None,
    loading_option(
        "--context",
        metavar="N",
        help="Positions for prompt and answer together. Without it, the smaller of the model's own "
        "number and 8192, or less where that does not fit.",
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    loading_option(
        "--dtype",
        help="Convert the weight matrices while they are loaded. Without it they stay as the files "
        "have them.",
    ),
]
QuantizeOption = Annotated[
    Quantize | None,
    loading_option(
        "--quantize",
        help="Quantise the weight matrices while they are loaded, to 8 or 4 bits. With q4, "
        "embeddings and output projection take 8.",
    ),
]
KVDtypeOption = Annotated[
    KVDtype,
    loading_option(
        "--kv-dtype", help="How keys and values are stored: q8 takes about half the memory of f16."
    ),
]
AdapterOption = Annotated[
    str | None,
    loading_option(
        "--adapter",
        metavar="PATH",
        help="A LoRA adapter of the model: a folder with adapter_config.json and "
        "adapter_model.safetensors, or a hub id. It is merged into the weights, or applied beside "
        "those that the files have quantised.",
    ),
]
RevisionOption = Annotated[
    str | None,
    loading_option("--revision", metavar="REV", help="Branch, tag or commit of a hub id."),
]
OfflineOption = Annotated[
    bool, loading_option("--offline", help="Use what has been fetched before, and no network.")
]
JsonOption = Annotated[
    bool, output_option("--json", help="Print one JSON object, with more in it than the text has.")
]
VerboseOption = Annotated[
    bool, output_option("--verbose", "-v", help="Tell more on standard error, tracebacks included.")
]


def parse_bias(option: str) -> tuple[int, float]:
    """ID=X as a token id and a number. Raises typer.BadParameter."""
    token, _, value = option.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise typer.BadParameter(
            f"{shown(option)} is not a token id, = and a number, as in 42=-1.5",
            param_hint="--logit-bias",
        ) from None


def parse_template_arg(option: str) -> tuple[str, Any]:
    """KEY=JSON as a name and a value. Raises typer.BadParameter."""
    name, _, value = option.partition("=")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        raise typer.BadParameter(
            f"{shown(option)} is not a name, = and a JSON value, as in effort='\"high\"'",
            param_hint="--template-arg",
        ) from None
