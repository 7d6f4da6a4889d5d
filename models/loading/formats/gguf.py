"""GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): a model in one file, or in
several that are numbered. Here its header is read; gguf_config.py says what it means, and
gguf_blocks.py how its tensors are packed.

All is little-endian: "GGUF", a version, the number of tensors and of metadata; then key, type and
value of each, where a string is its length and its bytes; then name, sizes (columns first), type
and offset of each tensor; then, aligned, the tensors.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.errors import CheckpointError, ModelNotFoundError, UnsupportedError
from infer.kernels.gpu.tensor import ITEMSIZE
from infer.models.loading.checkpoint import listed
from infer.models.loading.files import open_file
from infer.models.loading.formats.gguf_blocks import BLOCKS
from infer.models.loading.tensors import TensorInfo

_VERSIONS = (2, 3)
_HEADER_BYTES = 1 << 27  # of a whole header; large vocabularies take a tenth of it
_PIECE = 1 << 20  # read at once
_MAX_SIZES = 4
_AGAIN = "Download it again."

# Types of metadata.
_SCALARS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9

# Types of tensors: names of dtypes, or of blocks. Some of the latter are not implemented.
_TYPES = {
    0: "f32",
    1: "f16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "bf16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}

_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class Gguf:
    """The metadata and tensors of a model in a GGUF file, or in several.

    metadata: numbers, truth values and text as Python has them; arrays of text as lists, others as
        numpy arrays.
    tensors: by the file's own names; shapes are (rows, columns), dtypes those of TensorInfo or
        names of blocks, such as "Q4_K".
    """

    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, file: Path) -> Gguf:
        """Read the header of a file and, if it is the first of several, of the others.

        Raises ModelNotFoundError for a file that is not there, CheckpointError for one that is
        damaged or incomplete, UnsupportedError for versions and types that are not implemented.
        """
        metadata, tensors = _read_file(file)
        count = metadata.get("split.count", 0)
        if not isinstance(count, int) or count <= 1:
            return cls(file, metadata, tensors)
        parts = gguf_parts(file.name)
        if len(parts) != count or parts[0] != file.name:
            raise CheckpointError(
                f"{file} is one of {count} files. Give the first, whose name must end in "
                f"-00001-of-{count:05}.gguf, with the others beside it."
            )
        for part in map(file.with_name, parts[1:]):
            _, more = _read_file(part)
            if twice := tensors.keys() & more.keys():
                raise CheckpointError(f"{part} repeats tensors: {listed(sorted(twice))}. {_AGAIN}")
            tensors |= more
        return cls(file, metadata, tensors)

    def numbers(self, key: str, count: int, kinds: str) -> list[Any]:
        """A number for each of so many things, of metadata that have one for all or one for each.
        kinds: of numpy's dtypes. Raises CheckpointError."""
        values = np.asarray(self.metadata.get(key))
        if values.dtype.kind not in kinds or values.shape not in ((), (count,)):
            raise CheckpointError(f"{self.file}: {key} are not {count} numbers.")
        numbers: list[Any] = np.broadcast_to(values, count).tolist()
        return numbers


def gguf_parts(name: str) -> list[str]:
    """The names of the files that are one model with this one: itself alone, or all by number."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match[1]}-{n:05}-of-{match[2]}.gguf" for n in range(1, int(match[2]) + 1)]


def _read_file(file: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    try:
        with open_file(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            return _read_header(_Header(file, stream, size), size)
    except FileNotFoundError:
        raise ModelNotFoundError(f"There is no file {file}.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}).") from error


class _Header:
    """Reads the parts of a header, none beyond the end of the file or of what a header may be."""

    def __init__(self, file: Path, stream: IO[bytes], size: int) -> None:
        self.file, self.stream = file, stream
        self.limit = min(size, _HEADER_BYTES)
        self.data, self.at = bytearray(), 0  # what was read of the file, and how far it is used

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file} is damaged or incomplete ({what}). {_AGAIN}")

    def take(self, nbytes: int) -> bytearray:
        """The next bytes."""
        start, end = self.at, self.at + nbytes
        if end > self.limit:
            raise self.damaged(f"{nbytes} bytes at {start} reach beyond its end")
        if end > len(self.data):
            self.data += self.stream.read(max(end - len(self.data), _PIECE))
        self.at = end
        return self.data[start:end]

    def numbers(self, dtype: str, count: int) -> NDArray[Any]:
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype)

    def number(self, dtype: str) -> Any:
        return self.numbers(dtype, 1)[0].item()

    def count(self, least: int) -> int:
        """A number of things that take at least so many bytes each."""
        count = int.from_bytes(self.take(8), "little")
        if count * least > self.limit - self.at:
            raise self.damaged(f"it cannot hold {count} entries")
        return count

    def text(self) -> str:
        data = self.take(self.count(1))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"{error}") from error

    def value(self, kind: int) -> Any:
        """A value of metadata."""
        if kind == _STRING:
            return self.text()
        if kind == 6:  # the decimal number that an f32 was written from
            return float(str(self.numbers("<f4", 1)[0]))
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.damaged(f"there is no type {kind} of metadata")
        of = self.number("<u4")
        if of == _STRING:
            return [self.text() for _ in range(self.count(8))]
        if of not in _SCALARS:
            raise self.damaged(f"there are no arrays of type {of}")
        return self.numbers(_SCALARS[of], self.count(1))


def _read_header(header: _Header, size: int) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    file = header.file
    magic = header.take(4)
    if magic != b"GGUF":
        lfs = magic == b"vers"
        raise CheckpointError(
            f"{file} is not a GGUF file. "
            + ("It is a Git LFS pointer: run `git lfs pull` there." if lfs else _AGAIN)
        )
    version = header.number("<u4")
    if version not in _VERSIONS:
        odd = " (or big-endian)" if version > 0xFFFF else ""
        raise UnsupportedError(
            f"{file} is of GGUF version {version}{odd}, which is not implemented (only "
            f"{listed(map(str, _VERSIONS))})."
        )
    tensor_count, metadata_count = header.count(32), header.count(13)
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = header.text()
        if key in metadata:
            raise header.damaged(f"{key} is there twice")
        metadata[key] = header.value(header.number("<u4"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise header.damaged(f"an alignment of {alignment}")
    found = list(_read_tensors(header, tensor_count))
    start = -(-header.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    end = start
    for info in sorted(found, key=lambda info: info.offset):
        if info.name in tensors:
            raise header.damaged(f"{info.name} is there twice")
        if start + info.offset < end or info.offset % alignment:
            raise header.damaged(f"{info.name} lies in another tensor")
        end = start + info.offset + info.nbytes
        if end > size:
            raise header.damaged(f"it ends inside or before {info.name}")
        tensors[info.name] = TensorInfo(
            info.name, info.dtype, info.shape, file, start + info.offset, info.nbytes
        )
    return metadata, tensors


def _read_tensors(header: _Header, count: int) -> Iterator[TensorInfo]:
    """The tensors, their offsets counted from where tensors begin."""
    for _ in range(count):
        name = header.text()
        dimensions = header.number("<u4")
        if not 1 <= dimensions <= _MAX_SIZES:
            raise header.damaged(f"{name} has {dimensions} dimensions")
        shape = tuple(reversed(header.numbers("<u8", dimensions).tolist()))
        kind, offset = header.number("<u4"), header.number("<u8")
        dtype = _TYPES.get(kind, f"type {kind}")
        if dtype in ITEMSIZE:
            nbytes = math.prod(shape) * ITEMSIZE[dtype]
        elif dtype in BLOCKS:
            block = BLOCKS[dtype]
            if shape[-1] % block.values:
                raise header.damaged(f"{name} has {shape[-1]} columns in blocks of {block.values}")
            nbytes = math.prod(shape) // block.values * block.nbytes
        else:
            raise UnsupportedError(
                f"{header.file}: {name} is of type {dtype}, which is not implemented (only "
                f"{listed([*ITEMSIZE, *BLOCKS], limit=20)}). Take another version of the model."
            )
        yield TensorInfo(name, dtype, shape, header.file, offset, nbytes)
