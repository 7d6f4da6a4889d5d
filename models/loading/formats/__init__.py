"""Quantised checkpoints as they are published: one file for each way of writing them.

A `Format` is made from what the config says and finds, for a weight of the model, the tensors of
the checkpoint that make it: a `Packed` matrix. That one is checked by headers alone, says by its
`Scheme` what it will need, and reads any of its rows into a `Grouped`, which is the same for all
formats: integers, or indices into a table, and a scale for each group of columns.

To add a format:

1. Write a file with a `Format` and a `Packed`, whose docstring shows the tensors with their shapes
   and dtypes, and the formula of a value. Every key of the config that changes what is computed is
   read with `config.expect` or `config.get`, so that a variant that is not implemented is an
   UnsupportedError with its name. Parts are found with `part`, so that one that is missing or of
   another shape is a CheckpointError before anything is allocated.
2. Keep values exact. If a new `Scheme.kind` is needed, add its table in kernels/gpu/codes.py.
3. Register it in `FORMATS`, of which scripts/make_tables.py makes the table in docs/models.md.
4. Prove it: a case in scripts/make_format_references.py, where the format's own library packs and
   unpacks a few rows, which tests/models/test_formats.py reads from tests/data/formats.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from infer.models.loading.checkpoint import Checkpoint
    from infer.models.loading.config import RawConfig
    from infer.models.loading.formats.format import Format
    from infer.models.loading.formats.packed import Packed
    from infer.models.loading.weights import WeightSpec

# Keys of config.json in the order in which they count: MLX writes its own under the first two.
QUANTIZATION_KEYS = ("quantization", "quantization_config", "compression_config")


class FormatEntry(NamedTuple):
    """A class and its module; its name for people, and which variants of it are read."""

    module: str
    cls: str
    name: str
    bits: str
    detail: str


FORMATS = {  # by quant_method
    "gptq": FormatEntry(
        "gptq",
        "Gptq",
        "GPTQ",
        "2, 3, 4, 8",
        "groups or rows; symmetric or not; act-order; also by AutoRound",
    ),
    "awq": FormatEntry("awq", "Awq", "AWQ", "4", "`gemm`"),
    "compressed-tensors": FormatEntry(
        "compressed_tensors",
        "CompressedTensors",
        "compressed-tensors",
        "4, 8",
        "int4 and int8 (`pack-quantized`), w8a16 (`int-quantized`), FP8 (`float-quantized`), "
        "MXFP4 and NVFP4 (`mxfp4-` and `nvfp4-pack-quantized`)",
    ),
    "fp8": FormatEntry(
        "fp8",
        "Fp8",
        "FP8",
        "8",
        "blocks, rows or tensors (`weight_scale_inv`), as DeepSeek, Qwen3 and Mistral publish it",
    ),
    "mxfp4": FormatEntry("mxfp4", "Mxfp4", "MXFP4", "4", "experts, as gpt-oss publishes them"),
    "bitsandbytes": FormatEntry(
        "bitsandbytes",
        "BitsAndBytes",
        "bitsandbytes",
        "4, 8",
        "NF4, also with double quantisation, and int8",
    ),
    "mlx": FormatEntry(
        "mlx",
        "Mlx",
        "MLX",
        "2 to 6, 8",
        "affine, sizes by layer; mxfp4, nvfp4, mxfp8",
    ),
    "gguf": FormatEntry(
        "gguf_blocks",
        "GgufBlocks",
        "GGUF",
        "2 to 8",
        "a `.gguf` file as the model, of almost all architectures that llama.cpp has too: "
        "F32, F16, BF16, Q8_0, Q4_0 to Q5_1, Q2_K to Q6_K, IQ4_NL, IQ4_XS, MXFP4",
    ),
}


# quant_method -> that of the same layout, of which the format checks the rest.
_ALIASES = {"auto-round": "gptq"}

# Where AutoGPTQ said first how weights are quantised.
OLD_GPTQ = "quantize_config.json"


def find_format(raw: RawConfig, folder: Path | None = None) -> Format | None:
    """The format of a model's quantised weights, None for a model that has none. folder: of the
    model, for older files.

    Raises UnsupportedError for a method, or a variant of one, that is not implemented.
    """
    from infer.kernels.errors import UnsupportedError
    from infer.models.loading.config import RawConfig, shown

    found = {key: raw.get(key, {}, dict) for key in QUANTIZATION_KEYS}  # all count as read
    key = next((key for key, value in found.items() if value), None)
    if key is not None:
        config = RawConfig(found[key], f"{raw.place}: {key}")
    elif folder is not None and (folder / OLD_GPTQ).exists():
        config = RawConfig.open(folder, OLD_GPTQ).with_defaults(quant_method="gptq")
    else:
        return None
    method = "mlx" if key == "quantization" else _method(config)
    if method not in FORMATS:
        raise UnsupportedError(
            f"{config.place}: weights quantised by {shown(method)} are not implemented. "
            f"Implemented: {', '.join(FORMATS)}."
        )
    entry = FORMATS[method]
    cls = getattr(import_module(f"infer.models.loading.formats.{entry.module}"), entry.cls)
    format_: Format = cls(config)
    return format_


def _method(config: RawConfig) -> str:
    """Returns quant_method, or bitsandbytes by keys that it alone has: its first files have no
    quant_method."""
    from infer.kernels.errors import UnsupportedError

    of_bitsandbytes = any(config.get(key, False) for key in ("load_in_4bit", "load_in_8bit"))
    method: str = config.get("quant_method", "bitsandbytes" if of_bitsandbytes else "", str)
    if not method:
        raise UnsupportedError(
            f"{config.place} has no quant_method, so that nobody can tell how the weights are "
            "quantised. Get the config.json that was published with them."
        )
    return _ALIASES.get(method, method)


def find_packed(
    checkpoint: Checkpoint, found: Format | None, specs: Iterable[WeightSpec]
) -> Checkpoint:
    """The checkpoint with those of the model's weights that are quantised as packed matrices.

    Raises CheckpointError and UnsupportedError, as Format.matrix does, and CheckpointError for
    quantised weights of no known format.
    """
    from infer.kernels.errors import CheckpointError
    from infer.models.loading.formats.format import left_out
    from infer.models.loading.weights import asked_for

    if found is None:
        scales = next((name for name in checkpoint.tensors if name.endswith(".scales")), None)
        if scales is not None:
            raise CheckpointError(
                f"{checkpoint.folder} has quantised weights ({scales} belongs to one), but its "
                "config.json does not say how they are quantised: it has no quantization (MLX) or "
                "quantization_config. Download it again from where the weights are from."
            )
        return checkpoint
    packed: dict[str, Packed] = {}
    seen: set[str] = set()
    for spec in asked_for(specs, lambda key: key in checkpoint.tensors or key in packed):
        for key, shape in {s.key: s.shape for s in (*spec.sources, *spec.others)}.items():
            matrix = None if key in seen else found.matrix(checkpoint, key, shape)
            seen.add(key)
            if matrix is not None:
                packed[key] = matrix
    parts = {tensor.name for matrix in packed.values() for tensor in matrix.tensors}
    others = [name for name in checkpoint.tensors if name not in parts]
    unused = {name for name in others if found.ignorable(checkpoint, name)}
    tensors = {name: checkpoint.tensors[name] for name in others if name not in unused}
    ignored = tuple(sorted({*found.ignored, *filter(None, map(left_out, unused))}))
    return replace(checkpoint, tensors=tensors, packed=packed, format=found.method, ignored=ignored)
