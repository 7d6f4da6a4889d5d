"""What every format offers: which tensors make a matrix, and rows of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from infer.kernels.checks.arrays import from_bf16
from infer.kernels.errors import CheckpointError, UnsupportedError
from infer.kernels.gpu.tensor import SUPERBLOCK
from infer.models.loading.checkpoint import Checkpoint, HeldTensor, TensorInfo, listed
from infer.models.loading.config import RawConfig
from infer.models.loading.formats.grouped import Floats, Grouped, Scheme, from_e8m0

FLOATS = ("f32", "f16", "bf16")

# What files may quantise besides weights, and how the tensors with its scales end.
ACTIVATIONS, CACHE = "activations", "the KV cache"
_LEFT_OUT = {
    CACHE: (".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale"),
    ACTIVATIONS: (
        ".input_scale",
        ".input_global_scale",
        ".input_zero_point",
        ".output_scale",
        ".activation_scale",
        "_proj_activation_scale",
    ),
}

# Names of dtypes, as in TensorInfo, to how numpy reads them. What it has no type for stays bits.
_NUMPY = {
    "f32": "<f4",
    "f16": "<f2",
    "bf16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "U32": "<u4",
    "I8": "i1",
    "U8": "u1",
    "F8_E4M3": "u1",
    "F8_E8M0": "u1",
}


@dataclass(frozen=True, eq=False)
class Packed(ABC):
    """A matrix (rows, columns) of a checkpoint, as its format packs it.

    tensors: all that it is made of, so that none of them counts as surplus.
    order: the order of columns that each Grouped of it has.
    by_columns: the files have it column by column, so that a row lies all over them.
    """

    by_columns: ClassVar[bool] = False

    name: str
    shape: tuple[int, int]
    scheme: Scheme
    tensors: tuple[TensorInfo, ...]
    order: NDArray[np.int64] | None = field(default=None, kw_only=True)

    @abstractmethod
    def read(self, start: int, stop: int) -> Grouped:
        """Rows [start, stop). Reads no more than these need, and keeps nothing. Safe in several
        threads. Raises CheckpointError when a file cannot be read or holds what it must not."""

    def every(self, step: int, start: int, count: int) -> Grouped:
        """The same of `count` rows, every `step`-th from `start` on."""
        grouped = self.read(start, start + (count - 1) * step + 1)
        return grouped if step == 1 else grouped.every(step)

    def divides(self, columns: int) -> bool:
        """Whether every so many columns have groups of their own, or all columns are one."""
        group = SUPERBLOCK if self.scheme.scale_dtype == "int8" else self.scheme.group
        return self.order is None and (columns % group == 0 or group >= self.shape[1])

    def held(self) -> Packed:
        """The same for reading many of its rows: with its tensors in memory if it is by columns.
        Raises CheckpointError."""
        if not self.by_columns:
            return self
        return replace(self, tensors=tuple(tensor.held() for tensor in self.tensors))


class Format(ABC):
    """A way of publishing quantised matrices, as a config describes it.

    ignored: what the config quantises besides weights, in words for people. How it does that is not
    used: activations are as the kernels of the weights want them, int8 with scales of their own
    where weights are integers, and the cache is as its option says.
    """

    method: ClassVar[str]
    ignored: tuple[str, ...] = ()

    @abstractmethod
    def __init__(self, config: RawConfig) -> None:
        """Raises UnsupportedError for a variant that is not implemented."""

    @abstractmethod
    def matrix(self, checkpoint: Checkpoint, key: str, shape: Sequence[int]) -> Packed | None:
        """The matrix that the model asks for as tensor `key`, or None where the checkpoint holds it
        as a tensor of floats, or not at all: what is in the files decides which modules are
        quantised, and lists of exceptions in the config need not be read.

        Raises CheckpointError for parts that are missing or of wrong shape, and UnsupportedError
        for those of a dtype or group size that is not implemented. Reads headers alone, or indices
        of columns.
        """

    def ignorable(self, checkpoint: Checkpoint, name: str) -> bool:
        """Whether a tensor that belongs to no matrix says nothing that is computed with."""
        return False


def left_out(name: str) -> str | None:
    """What a tensor is a scale of that is not used; None for any other."""
    return next((of for of, ends in _LEFT_OUT.items() if name.endswith(ends)), None)


# Parts of a matrix


def part(
    checkpoint: Checkpoint, name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]
) -> TensorInfo:
    """A tensor of one of these shapes and dtypes. Raises CheckpointError and UnsupportedError."""
    info = checkpoint.tensors.get(name)
    if info is None:
        raise CheckpointError(
            f"{checkpoint.folder} lacks {name}, a part of a quantised matrix. Download the model "
            "again, or give the folder of a complete one."
        )
    if info.shape not in shapes:
        raise wrong_shape(info, info.shape, " or ".join(map(str, shapes)))
    if info.dtype not in dtypes:
        raise UnsupportedError(
            f"{checkpoint.folder}: {name} is of dtype {info.dtype}, which is not implemented there "
            f"(only {listed(dtypes)})."
        )
    return info


def wrong_shape(info: TensorInfo, found: object, wanted: object) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: {info.name} is {found}, not {wanted}. The files and the config are of "
        "different models: download all of them again."
    )


def matrix_shape(checkpoint: Checkpoint, key: str, shape: Sequence[int]) -> tuple[int, int]:
    """The shape as (rows, columns). Raises UnsupportedError for a tensor that is no matrix."""
    if len(shape) != 2:
        raise UnsupportedError(
            f"{checkpoint.folder}: {key} of shape {tuple(shape)} is quantised, which is only "
            "implemented for matrices."
        )
    return shape[0], shape[1]


# Reading


def read_rows(info: TensorInfo, start: int = 0, stop: int | None = None) -> NDArray[Any]:
    """Rows [start, stop) of a tensor, by default all. Values of a float dtype become float32."""
    stop = info.shape[0] if stop is None else stop
    values = np.empty((stop - start, *info.shape[1:]), _NUMPY[info.dtype])
    width = values.itemsize * int(np.prod(info.shape[1:]))
    info.read_into(values.data.cast("B"), start * width)
    return _widened(values, info.dtype)


def read_columns(info: TensorInfo, start: int, stop: int) -> NDArray[Any]:
    """Columns [start, stop) of a matrix. Values of a float dtype become float32."""
    rows, columns = info.shape
    dtype = np.dtype(_NUMPY[info.dtype])
    if isinstance(info, HeldTensor):
        whole = info.data.view(dtype).reshape(rows, columns)
        return _widened(whole[:, start:stop].copy(), info.dtype)
    values = np.empty((rows, stop - start), dtype)
    view, step = values.data.cast("B"), values.strides[0]
    for row in range(rows):
        at = (row * columns + start) * dtype.itemsize
        info.read_into(view[row * step : (row + 1) * step], at)
    return _widened(values, info.dtype)


def read_flat(info: TensorInfo, start: int, stop: int) -> NDArray[Any]:
    """Values [start, stop) of a tensor, whatever its shape, row after row."""
    values = np.empty(stop - start, _NUMPY[info.dtype])
    info.read_into(values.data.cast("B"), start * values.itemsize)
    return _widened(values, info.dtype)


def _widened(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    if dtype == "bf16":
        return from_bf16(values)
    if dtype == "F8_E8M0":
        return from_e8m0(values)
    return values.astype(np.float32) if dtype == "f16" else values


def block_scales(
    info: TensorInfo, block: tuple[int, int], columns: int, start: int, stop: int
) -> Floats:
    """Scales float32 [stop - start, groups] of rows from a tensor that has one for each `block` of
    rows and columns; a tensor of one value has it for all."""
    height, _ = block
    if info.shape in ((), (1,), (1, 1)):
        whole = read_flat(info, 0, 1)
        return np.full((stop - start, -(-columns // block[1])), whole[0], np.float32)
    first = start // height
    scales = read_rows(info, first, -(-stop // height)).reshape(-(-stop // height) - first, -1)
    return np.repeat(scales, height, axis=0)[start - first * height :][: stop - start]


def column_order(info: TensorInfo, group: int) -> NDArray[np.int64] | None:
    """The order that makes groups consecutive, None where they are, from g_idx: the group of each
    column. Raises CheckpointError where groups are not of `group` columns each."""
    (columns,) = info.shape
    groups = read_rows(info).astype(np.int64)
    expected = np.arange(columns) // group
    if np.array_equal(groups, expected):
        return None
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], expected):
        raise CheckpointError(
            f"{info.file}: {info.name} does not have {group} columns in each group. Download it "
            "again, or take another version of the model."
        )
    return order
