"""Packs the quantised matrices of checkpoints (formats/) into the GPU layouts of tensor.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Event, Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.errors import UnsupportedError
from infer.kernels.gpu.codes import TABLES
from infer.kernels.gpu.pack import Codes
from infer.kernels.gpu.tensor import BLOCK, CODED, OWN, Grouping, row_bytes
from infer.models.loading.checkpoint import listed
from infer.models.loading.formats.grouped import Grouped, Scheme
from infer.models.loading.formats.packed import Packed


@dataclass(frozen=True, eq=False)
class Stored:
    """How a weight lies on the GPU: see GpuTensor. packed: it is made of a quantised matrix, not of
    floats."""

    dtype: str
    grouping: Grouping = OWN
    packed: bool = False
    order: NDArray[np.int64] | None = None


# Values packed at a time: more would leave a core's caches, fewer keep threads waiting for
# Python's lock.
_VALUES = 1 << 20

# At the least so many rows of a matrix that lies by columns: shorter runs are slow to gather.
_ROWS = 64

# How matrices lie that no kernel has a common form for: as f32, which is what they stand for.
WIDENED = Stored("f32")


def stored_packed(matrices: Sequence[Packed], name: str) -> Stored:
    """Returns the storage that holds all these matrices exactly, one below the other in the weight
    `name`: floats where no integers do, and where columns are quantised in different orders
    (act-order).

    Raises UnsupportedError for kinds and groups that have no kernel.
    """
    first = matrices[0]
    if any(not _same_order(matrix, first) for matrix in matrices):
        return WIDENED
    stored = stored_schemes([matrix.scheme for matrix in matrices], first.shape[1], name)
    return replace(stored, order=first.order) if stored.packed else stored


def stored_schemes(schemes: Sequence[Scheme], columns: int, name: str) -> Stored:
    """Returns the storage that holds exactly all matrices of these schemes and so many columns.
    Raises UnsupportedError for kinds and groups that have no kernel."""
    kinds = {(scheme.kind, scheme.signed) for scheme in schemes}
    if not {kind for kind, _ in kinds} <= {"int", *CODED}:
        raise UnsupportedError(
            f"{name} is made of weights of the kind {listed(sorted(kind for kind, _ in kinds))}, "
            "which is not implemented."
        )
    mixed = len(kinds) > 1
    if mixed and max(map(_integer_bits, schemes)) > 8:
        return WIDENED
    kind = "int" if mixed else schemes[0].kind
    group = math.gcd(*(_whole(scheme.group, columns) for scheme in schemes))
    if group % BLOCK and group != BLOCK // 2:
        raise UnsupportedError(
            f"{name} has a scale for {group} columns, which is not implemented: only for 16, and "
            "for multiples of 32."
        )
    bits = max(_integer_bits(scheme) if mixed else scheme.bits for scheme in schemes)
    unsigned = kind == "int" and not schemes[0].signed and not mixed
    shift = 1 << bits - 1 if unsigned and bits in (4, 5, 6, 8) else 0  # fewer bits fit as they are
    offsets = {_offset(scheme) for scheme in schemes}
    offset = "bias" if "bias" in offsets else "zero" if "zero" in offsets else "none"
    dtypes = {scheme.scale_dtype for scheme in schemes}
    if offsets >= {"bias", "zero"}:
        dtypes.add("f32")  # zero points become biases: products that f32 holds
    scales = dtypes.pop() if len(dtypes) == 1 else "f32"
    dtype = kind if kind in CODED else f"q{next(size for size in (4, 5, 6, 8) if bits <= size)}"
    return Stored(dtype, Grouping(group, scales, offset, shift), packed=True)


def _integer_bits(scheme: Scheme) -> int:
    """Bits that hold what is scaled, as integers in two's complement; 9 where not even eight do."""
    if scheme.kind == "int":
        return scheme.bits + (not scheme.signed)
    return 8 if scheme.kind == "iq4nl" else 9  # a table of integers, or of others


def _offset(scheme: Scheme) -> str:
    return "zero" if scheme.zeros else "bias" if scheme.biases else "none"


def _whole(group: int, columns: int) -> int:
    """Columns of a group, those of whole blocks where a row has one scale."""
    return -(-columns // BLOCK) * BLOCK if group >= columns else group


def _same_order(a: Packed, b: Packed) -> bool:
    if a.order is None or b.order is None:
        return a.order is b.order
    return np.array_equal(a.order, b.order)


def codes(grouped: Grouped, stored: Stored) -> Codes:
    """Rows of a matrix as `stored` has them: the same values."""
    scheme, grouping = grouped.scheme, stored.grouping
    columns = grouped.codes.shape[1]
    values, units = grouped.codes, grouped.units
    scales, biases = grouped.scales, grouped.biases
    if scheme.kind != stored.dtype and scheme.kind in CODED:
        values = TABLES[scheme.kind].astype(np.int8).take(values)
    elif grouping.shift:
        values = values.view(np.uint8) - np.uint8(grouping.shift)
    if units is not None and grouping.dtype != "int8":
        (scales, biases), units = grouped.numbers(), None
    offsets = None
    if grouping.offset == "zero":
        offsets = np.zeros_like(scales) if grouped.zeros is None else grouped.zeros
    elif grouping.offset == "bias" and grouped.zeros is not None:
        offsets = -scales * grouped.zeros
    elif grouping.offset == "bias":
        offsets = np.zeros_like(scales) if biases is None else biases
    times = _whole(scheme.group, columns) // grouping.group

    def spread(parts: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(parts, times, axis=1)[:, : grouping.groups(columns)]

    if times > 1:
        scales, offsets = spread(scales), None if offsets is None else spread(offsets)
    return Codes(stored.dtype, grouping, values, scales, offsets, units)


class PackedRows:
    """Rows of a matrix, these columns of each, on their way to the GPU: what fills the staging
    memory of blocks and then of scales. A row is unpacked once, in any thread."""

    def __init__(self, matrix: Packed, rows: range, columns: range, stored: Stored) -> None:
        assert columns.step == 1
        self._rows, self._columns, self._stored = rows, columns, stored
        self._matrix = self._files = matrix
        self._stride = row_bytes(len(columns), stored.dtype)
        scale_stride = stored.grouping.row_bytes(len(columns))
        self._scales = np.empty((len(rows), scale_stride), np.uint8)
        self._lock, self._left, self._done = Lock(), len(rows), Event()

    def fill_blocks(self, view: memoryview, start: int) -> None:
        """The bytes of blocks from byte `start` on, whole rows."""
        row, count = start // self._stride, len(view) // self._stride
        try:
            with self._lock:
                matrix = self._matrix = self._matrix.held()
            filled, scales = np.frombuffer(view, np.uint8).reshape(count, -1), self._scales[row:]
            at_once = max(_ROWS if matrix.by_columns else 1, _VALUES // matrix.shape[1])
            for i in range(0, count, at_once):
                part = slice(i, min(i + at_once, count))
                grouped = matrix.take(self._rows[row + part.start : row + part.stop])
                if len(self._columns) < matrix.shape[1]:
                    grouped = grouped.across(self._columns)
                filled[part], scales[part] = codes(grouped, self._stored).pack()
        except BaseException:
            self._done.set()  # nobody shall wait for what will not come
            raise
        with self._lock:
            self._left -= count
            if self._left == 0:
                self._matrix = self._files  # what was held is no longer needed
                self._done.set()

    def fill_scales(self, view: memoryview, start: int) -> None:
        """Fills a view with bytes of the scales from `start` on. It waits until the blocks, which
        must be asked for before, are made."""
        self._done.wait()
        np.frombuffer(view, np.uint8)[:] = self._scales.reshape(-1)[start : start + len(view)]
