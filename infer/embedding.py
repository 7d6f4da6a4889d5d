"""Reads from a model's files how a text becomes an embedding, in the form of sentence-transformers,
which publishes most embedding models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.boundaries import reason, shown
from infer.kernels.errors import CheckpointError
from infer.models.loading.files import read_text

MODULES, POOLING = "modules.json", "1_Pooling/config.json"
POOLINGS = ("mean", "last")  # of the hidden states of a text's tokens

# The names of poolings in those files: as flags of their own or, in newer files, in pooling_mode.
_FLAG = "pooling_mode_"
_NAMES = {"mean_tokens": "mean", "mean": "mean", "lasttoken": "last"}


@dataclass(frozen=True)
class EmbeddingConfig:
    """pooling: one of POOLINGS. normalize: whether embeddings have length 1. refused: what else the
    files ask for, which is not implemented. is_stated: whether the files say anything of it."""

    pooling: str = "mean"
    normalize: bool = True
    refused: str = ""
    is_stated: bool = True


def read_embedding_config(path: Path) -> EmbeddingConfig:
    """Reads the pooling from the files in a model's folder; defaults where there are none, as for
    GGUF files. Raises CheckpointError for damaged files."""
    if not (path / MODULES).is_file():
        return EmbeddingConfig(is_stated=False)
    modules = _read(path / MODULES, list)
    kinds = [str(m.get("type")).rpartition(".")[2] for m in modules if isinstance(m, dict)]
    if set(kinds) - {"Normalize"} != {"Transformer", "Pooling"}:
        return EmbeddingConfig(
            refused=f"{path / MODULES} asks for the modules {', '.join(kinds) or 'none'}, where "
            "Transformer, Pooling and Normalize are implemented."
        )
    config = _read(path / POOLING, dict)
    given = config.get("pooling_mode")
    if given is None:
        flags = [name for name, value in config.items() if value is True]
        given = [name.removeprefix(_FLAG) for name in flags if name.startswith(_FLAG)]
    modes = given if isinstance(given, list) else [given]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _NAMES:
        return EmbeddingConfig(
            refused=f"{path / POOLING} asks for the pooling {shown(given)}, where mean_tokens and "
            "lasttoken are implemented."
        )
    return EmbeddingConfig(_NAMES[modes[0]], "Normalize" in kinds)


def _read(file: Path, kind: type) -> Any:
    """The list or the object in a JSON file."""
    try:
        value = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {reason(error)} Fetch the model again."
        ) from error
    if not isinstance(value, kind):
        name = "list" if kind is list else "object"
        raise CheckpointError(f"{file} must hold a JSON {name}. Fetch the model again.")
    return value
