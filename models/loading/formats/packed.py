"""A quantised matrix of a checkpoint: what it is made of, and any rows of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from infer.kernels.errors import CheckpointError
from infer.kernels.gpu.pack import from_bf16
from infer.kernels.gpu.tensor import SUPERBLOCK
from infer.models.loading.formats.grouped import Floats, Grouped, Scheme, from_e8m0
from infer.models.loading.tensors import HeldTensor, TensorInfo

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

    def take(self, rows: range) -> Grouped:
        """Returns these rows of the matrix."""
        grouped = self.read(rows[0], rows[-1] + 1)
        return grouped if rows.step == 1 else grouped.every(rows.step)

    def divides(self, columns: int) -> bool:
        """Whether matrices can be cut after every `columns` columns: their groups end there, or all
        columns are one group."""
        group = SUPERBLOCK if self.scheme.scale_dtype == "int8" else self.scheme.group
        return self.order is None and (columns % group == 0 or group >= self.shape[1])

    def held(self) -> Packed:
        """Returns the matrix for reading many of its rows: with its tensors in memory if it is by
        columns. Raises CheckpointError."""
        if not self.by_columns:
            return self
        return replace(self, tensors=tuple(tensor.held() for tensor in self.tensors))


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
