"""Checkpoints: a folder of safetensors files, checked before a byte of a tensor is read.

The format (https://huggingface.co/docs/safetensors): eight bytes with the length of a header, the
header (JSON: dtype, shape and byte range of each tensor), the tensors. The `safetensors` library
validates a header, above all that its byte ranges tile the file without gap or overlap; the
tensors themselves are read from the file as bytes, since numpy has no bf16.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from infer.kernels.errors import CheckpointError, ModelNotFoundError
from infer.models.loading.files import open_file, read_text
from infer.models.loading.formats.packed import Packed
from infer.models.loading.tensors import TensorInfo, same_bytes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"

_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_AGAIN = "Download it again."


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder (or a GGUF file) by name. packed: quantised matrices by the names of
    the tensors that a model asks for; what these are made of is not among the tensors. format: how
    they are packed. ignored: what the files quantise besides weights, in a way that is not used.
    part_of: the model_type of the model that has other parts, which are left out. whole_norms: the
    weights of norms are whole where the hub has them less one. upright: no matrix lies transposed.
    notes: what the user should know of the files.
    """

    folder: Path
    tensors: dict[str, TensorInfo]
    packed: Mapping[str, Packed] = field(default_factory=dict)
    format: str | None = None
    ignored: tuple[str, ...] = ()
    part_of: str | None = None
    whole_norms: bool = False
    upright: bool = False
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the files that the model uses."""
        parts = [tensor for matrix in self.packed.values() for tensor in matrix.tensors]
        return sum(tensor.nbytes for tensor in {*self.tensors.values(), *parts})

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """The checkpoint in `folder`: model.safetensors, or model.safetensors.index.json and its
        shards, or the only *.safetensors file there is.

        Raises ModelNotFoundError for a folder that is none, and CheckpointError, with the file and
        what is wrong with it, for files that are missing, damaged or contradict each other.
        """
        try:
            names = sorted(path.name for path in folder.iterdir())
        except OSError as error:
            raise ModelNotFoundError(
                f"{folder} is not a folder that can be read ({error.strerror}). Give the folder "
                "that holds config.json and the *.safetensors files."
            ) from error
        files = [name for name in names if name.endswith(".safetensors")]
        if SINGLE in files:
            return cls(folder, read_header(folder / SINGLE))
        if INDEX in names:
            return cls(folder, _read_shards(folder))
        if len(files) == 1:
            return cls(folder, read_header(folder / files[0]))
        if files:
            raise CheckpointError(
                f"{folder} holds {listed(files)} but no {INDEX} that says what belongs together. "
                "Download that file too."
            )
        raise CheckpointError(
            f"{folder} holds no *.safetensors file, only {listed(names) or 'nothing at all'}. "
            "Other formats (.bin, .pt, .gguf) are not read: take a repository with safetensors."
        )


def listed(names: Iterable[str], limit: int = 10) -> str:
    """The names for a message, at most `limit` of them and how many more."""
    names = list(names)
    more = [f"{len(names) - limit} more"] if len(names) > limit else []
    return ", ".join([*names[:limit], *more])


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one file, by name. Raises CheckpointError for a file that is damaged."""
    try:
        with open_file(file) as stream:
            if stream.read(23) == b"version https://git-lfs":
                raise CheckpointError(
                    f"{file} is only a Git LFS pointer to the weights. Run `git lfs pull` there."
                )
        with safe_open(file, framework="numpy"):  # validates the header
            pass
        with open_file(file) as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = json.loads(stream.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged or incomplete ({error}). {_AGAIN}") from error
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
        shape = tuple(entry["shape"])
        tensors[name] = TensorInfo(name, dtype, shape, file, 8 + length + start, end - start)
    return tensors


def _read_shards(folder: Path) -> dict[str, TensorInfo]:
    """The tensors of all files that the index names, by name."""
    file_of = read_index(folder / INDEX)
    files = sorted(set(file_of.values()))
    missing = [file for file in files if not os.path.exists(folder / file)]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {listed(missing)}, which {INDEX} names. Download the rest of the "
            "model: the download was interrupted."
        )
    found: dict[str, list[TensorInfo]] = {}
    for file in files:
        for name, info in read_header(folder / file).items():
            found.setdefault(name, []).append(info)
    tensors = {name: _named(copies, file_of.get(name)) for name, copies in found.items()}
    lost = [name for name, file in file_of.items() if not _holds(tensors, name, folder / file)]
    if lost:
        raise CheckpointError(
            f"{folder / INDEX} places tensors in files that do not hold them: {listed(lost)}. "
            "Download the model again: its files are of different versions."
        )
    # transformers takes the last one, whatever the index says.
    differ = [name for name, copies in found.items() if not same_bytes(copies[-1], tensors[name])]
    if differ:
        raise CheckpointError(
            f"{folder} has tensors with other values in a later file than in the one that {INDEX} "
            f"names: {listed(differ)}. Download the model again: its files are of different "
            "versions."
        )
    return tensors


def _named(copies: Sequence[TensorInfo], file: str | None) -> TensorInfo:
    """The copy in the file that the index names, else the last."""
    return next((info for info in copies if info.file.name == file), copies[-1])


def _holds(tensors: dict[str, TensorInfo], name: str, file: Path) -> bool:
    return name in tensors and tensors[name].file == file


def read_index(file: Path) -> dict[str, str]:
    """The file name of each tensor."""
    try:
        index = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged ({error}). {_AGAIN}") from error
    file_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(file_of, dict) or not file_of:
        raise CheckpointError(f'{file} has no "weight_map" of tensors to files. {_AGAIN}')
    # A name with a folder in it could reach any file of the machine.
    odd = [
        name
        for name, shard in file_of.items()
        if not (isinstance(shard, str) and shard == Path(shard).name)
        or not shard.endswith(".safetensors")
    ]
    if odd:
        raise CheckpointError(
            f"{file} does not give the name of a *.safetensors file for {listed(odd)}. {_AGAIN}"
        )
    return file_of
