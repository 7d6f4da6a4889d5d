"""Allocates the weights of a plan on the GPU, then reads them from the files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.errors import CheckpointError, UnsupportedError
from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.pack import from_bf16, to_bf16
from infer.kernels.gpu.plan import Dispatch
from infer.kernels.gpu.quantize import Quantizer
from infer.kernels.gpu.row_scales import scale_rows
from infer.kernels.gpu.tensor import ITEMSIZE, GpuTensor, Shard, row_bytes
from infer.kernels.gpu.upload import PIECE_BYTES, Fill, Uploader
from infer.models.loading.checkpoint import listed
from infer.models.loading.formats.packed import Packed
from infer.models.loading.packing import PackedRows
from infer.models.loading.plan import LoadPlan, Part, PlannedWeight
from infer.models.loading.tensors import TensorInfo
from infer.models.loading.weights import View

# bf16 is kept as its bits: numpy has no such type.
_STORAGE: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}

# Values converted at a time: their temporaries fit in a core's cache, and cost the host no memory.
_AT_ONCE = 1 << 18

# A change adds to rows [first, first + count) of a tensor the product of two factors in f32,
# [count, rank] and [rank, columns].
Factors = tuple[NDArray[np.float32], NDArray[np.float32]]
Change = Callable[[int, int], Factors]


def load_weights(
    device: Device,
    plan: LoadPlan,
    *,
    changes: Mapping[str, Change] = MappingProxyType({}),
    allocated: Callable[[dict[str, GpuTensor]], None] = lambda weights: None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, GpuTensor]:
    """The weights by name. All are allocated, then the files are read. `allocated` is called
    between: to allocate, or to compile, what else the model needs. Kernels of a weight that has
    `row_scales` in the end are others than were known then.

    To "f32", "f16" and "bf16" values are rounded to nearest, ties to even; to "q8" and "q4" they
    are quantised on the GPU, from rows as the files have them. changes: what is added to tensors
    that are not quantised in the files, by their names, in f32, before they are rounded. `progress`
    gets bytes done and bytes in all.

    Raises CheckpointError for values too large for the dtype or, if quantised, not finite;
    UnsupportedError for rows that no binding holds; OutOfMemoryError. Whatever is raised, an
    interrupt too, nothing stays allocated.
    """
    with allocated_weights(device, plan) as weights:
        allocated(weights)
        with Quantizer(
            device, {w.name: weights[w.name] for w in plan.weights if w.quantized}
        ) as quantizer:
            reading = _Reading(changes, quantizer, _Matrices())
            transfers = [t for w in plan.weights for t in reading.transfers(w, weights[w.name])]
            transfers.sort(key=lambda t: t.place)  # as the disk has them
            total, done = sum(t.nbytes for t in transfers), 0

            def on_submitted(nbytes: int) -> None:
                nonlocal done
                done += nbytes
                if progress is not None:
                    progress(done, total)

            with Uploader(device, total, on_submitted) as uploader:
                for t in transfers:
                    uploader.write(t.buffer, t.offset, t.nbytes, t.fill, t.unit)
                    if t.then is not None:
                        uploader.run(t.then)
            quantizer.check()
        if device.matrices:
            scale_rows(device, weights.values())
        return weights


@contextmanager
def allocated_weights(device: Device, plan: LoadPlan) -> Iterator[dict[str, GpuTensor]]:
    """The weights, zero-filled but for those of ones; freed when the block fails. Raises
    UnsupportedError and OutOfMemoryError."""
    _check_rows(device, plan)
    weights: dict[str, GpuTensor] = {}
    try:
        for weight in plan.weights:
            weights[weight.name] = weight.allocate(device)
            if weight.spec.ones:
                device.write(weights[weight.name].buffer, np.ones(weight.spec.ones, np.float32))
        yield weights
    except BaseException:
        device.destroy(buffer for tensor in weights.values() for buffer in tensor.buffers)
        raise


def _check_rows(device: Device, plan: LoadPlan) -> None:
    """No row, and no vector, is ever split: it must fit in a binding, and in what is staged."""
    limit = min(device.limits.max_binding, device.limits.max_buffer, PIECE_BYTES)
    odd = [
        f"{weight.name} {weight.shape}"
        for weight in plan.weights
        if min(weight.shape) < 1 or row_bytes(weight.shape[-1], "f32") > limit
    ]
    if odd:
        raise UnsupportedError(
            f"Weights that are empty or have rows of more than {limit:,} bytes are not implemented "
            f"for {device.adapter.name}: {listed(odd)}. Check the sizes in config.json."
        )


# From the files to a buffer


@dataclass(frozen=True)
class _Transfer:
    """nbytes bytes to byte `offset` of a buffer, in units of `unit` bytes, as `fill` makes them of
    what lies at `place`: a file, and the byte there."""

    place: tuple[Path, int]
    buffer: Buffer
    offset: int
    nbytes: int
    unit: int
    fill: Fill
    then: Dispatch | None = None  # what makes the weight of them, if these are not its rows


@dataclass(frozen=True)
class _Reading:
    """The objects that the transfers of all weights share."""

    changes: Mapping[str, Change]
    quantizer: Quantizer
    matrices: _Matrices

    def transfers(self, weight: PlannedWeight, tensor: GpuTensor) -> Iterator[_Transfer]:
        """Yields the transfers of a weight's parts, one below the other, into the shards."""
        top = 0
        for part in weight.parts:
            bottom = top + part.view.shape[0]
            for shard in tensor.shards:
                count = tensor.shape[0] if len(tensor.shape) == 1 else shard.rows
                start, end = max(top, shard.start), min(bottom, shard.start + count)
                if start < end:
                    own = part.rows(range(start - top, end - top))
                    yield from self._transfers(weight, own, shard, start - shard.start)
            top = bottom

    def _transfers(
        self, weight: PlannedWeight, part: Part, shard: Shard, first: int
    ) -> Iterator[_Transfer]:
        """Yields the transfers of a part into the rows from `first` on of a shard."""
        how, rows, columns = weight.stored, part.view.shape[0], part.view.shape[-1]
        if how.packed:
            assert isinstance(part.tensor, Packed)
            packed = PackedRows(part.tensor, part.view.rows, part.view.across, how)
            strides = row_bytes(columns, how.dtype), how.grouping.row_bytes(columns)
            fills = packed.fill_blocks, packed.fill_scales  # scales are known once blocks are made
            for buffer, stride, own_fill in zip(shard.buffers, strides, fills, strict=True):
                offset, nbytes = first * stride, rows * stride
                yield _Transfer(_place(part), buffer, offset, nbytes, stride, own_fill)
            return
        change = self.changes.get(part.source.key)
        if not weight.quantized:
            vector = len(weight.shape) == 1
            stride = ITEMSIZE["f32"] if vector else row_bytes(columns, how.dtype)
            fill = _Floats(part, how.dtype, stride, self.matrices, change).fill
            nbytes = rows * stride
            yield _Transfer(_place(part), shard.buffer, first * stride, nbytes, stride, fill)
            return
        dtype = part.dtype if change is None else "f32"
        stride, at_once = row_bytes(columns, dtype), self.quantizer.rows_at_once(columns, dtype)
        for done in range(0, rows, at_once):
            own = part.rows(range(done, min(done + at_once, rows)))
            count = own.view.shape[0]
            fill = _Floats(own, dtype, stride, self.matrices, change).fill
            kernel = self.quantizer.quantize(weight.name, shard, first + done, count, dtype)
            buffer, nbytes = self.quantizer.buffer, count * stride
            yield _Transfer(_place(own), buffer, 0, nbytes, stride, fill, kernel)


def _place(part: Part) -> tuple[Path, int]:
    """Returns where a tensor's bytes begin."""
    tensor, view = part.tensor, part.view
    if isinstance(tensor, Packed):
        return tensor.tensors[0].file, tensor.tensors[0].offset
    value = view.rows[0] * part.width + view.across[0]
    return tensor.file, tensor.offset + value * ITEMSIZE[tensor.dtype]


class _Matrices:
    """Rows of tensors of which columns become rows. The last two that were asked for are kept, so
    that the threads that want columns of one read it once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept = OrderedDict[tuple[TensorInfo | Packed, range], NDArray[Any]]()

    def read(self, part: Part) -> NDArray[Any]:
        """All columns of the part's rows, as the file has them. Raises CheckpointError."""
        place = part.tensor, part.view.rows
        with self._lock:
            if place not in self._kept:
                self._kept[place] = _values(part, part.view.rows, range(part.width))
                if len(self._kept) > 2:
                    self._kept.popitem(last=False)
            return self._kept[place]


def _values(part: Part, rows: range, columns: range) -> NDArray[Any]:
    """Returns values of the part's tensor: as the file has them, or in f32 where it has them
    quantised."""
    tensor, span = part.tensor, rows.step * part.width
    if isinstance(tensor, Packed):
        return tensor.take(rows).dequantize()[:, columns.start : columns.stop]
    assert columns.step == 1
    values = np.empty((len(rows), span), _STORAGE[tensor.dtype])
    found = values.reshape(-1)[: values.size - span + len(columns)]
    first = rows.start * part.width + columns.start
    tensor.read_into(found.data.cast("B"), first * ITEMSIZE[tensor.dtype])
    return values[:, : len(columns)]


@dataclass(frozen=True)
class _Floats:
    """A part on its way to the GPU, where each row is `stride` bytes, padding included, of `dtype`.
    change: of its tensor."""

    part: Part
    dtype: str
    stride: int
    matrices: _Matrices
    change: Change | None

    def fill(self, data: memoryview, start: int) -> None:
        """Write the rows from byte `start` on, as many as `data` holds."""
        first, count = start // self.stride, len(data) // self.stride
        part = self.part.rows(range(first, first + count))
        tensor, view = part.tensor, part.view
        if self._copies and isinstance(tensor, TensorInfo):
            tensor.read_into(data, view.rows.start * self.stride)
            return
        if view.transposed:
            own = view.across
            values = self.matrices.read(part)[:, own.start : own.stop : own.step].T
        else:
            values = _values(part, view.rows, view.across)
        changed = None if self.change is None else _of_part(self.change, view)
        rows = np.frombuffer(data, _STORAGE[self.dtype]).reshape(count, -1)
        columns = values.shape[1]
        step = max(1, _AT_ONCE // columns)
        for i in range(0, count, step):
            own_rows = slice(i, i + step)
            factors = None if changed is None else (changed[0][own_rows], changed[1])
            rows[own_rows, :columns] = self._convert(values[own_rows], factors)
        if view.factor != 1.0:
            rows[:, :columns] *= view.factor
        if view.added:
            rows[:, :columns] += view.added
        rows[:, columns:] = 0

    @property
    def _copies(self) -> bool:
        """Whether the rows of a weight are the file's bytes as they are."""
        part, view = self.part, self.part.view
        close = not view.transposed and view.rows.step == 1 and len(view.across) == part.width
        same = (view.factor, view.added, self.change) == (1.0, 0.0, None)
        padded = self.stride != part.width * ITEMSIZE[part.dtype]
        return close and same and part.dtype == self.dtype and not padded

    def _convert(self, values: NDArray[Any], factors: Factors | None) -> NDArray[Any]:
        """Values of the part's dtype in the weight's, rounded to nearest, ties to even; before, the
        product of the factors is added."""
        source, target = self.part.dtype, self.dtype
        if source == target and factors is None:
            return values
        with np.errstate(over="ignore", invalid="ignore"):
            exact = widened(values, source)
            if factors is not None:
                exact = exact + factors[0] @ factors[1]
            if target == "f32":
                return exact
            if target == "f16":
                rounded: NDArray[Any] = exact.astype(np.float16)
                overflow = np.isinf(rounded)
            else:
                rounded = to_bf16(exact)
                overflow = (rounded & 0x7FFF) == 0x7F80
        overflow &= np.isfinite(exact)
        if overflow.any():
            raise CheckpointError(
                f"{self.part.tensor.name} has the value {exact[overflow][0]:g}, too large for "
                f"{target}. Load the model with another `dtype`: bf16 or f32."
            )
        return rounded


def _of_part(change: Change, view: View) -> Factors:
    """That of a tensor, for a view of consecutive rows; a transposed one is as the model has it."""
    rows, columns = view.rows, view.across
    if view.transposed:
        rows, columns = columns, rows
    left, right = change(rows.start, len(rows))
    return left, right[:, columns.start : columns.stop]


def widened(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Values as files have them (bf16: its bits) in f32."""
    return from_bf16(values) if dtype == "bf16" else values.astype(np.float32, copy=False)
