"""Weights: from a checkpoint, or from a random generator, into GPU buffers."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.checks.arrays import Codes, from_bf16, to_bf16
from infer.kernels.errors import CheckpointError, UnsupportedError
from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.plan import Dispatch, dispatch, linear_grid
from infer.kernels.gpu.quantize import Quantizer
from infer.kernels.gpu.record import run
from infer.kernels.gpu.shader import KernelSpec
from infer.kernels.gpu.tensor import (
    ITEMSIZE,
    QUANTIZED,
    SUPERBLOCK,
    GpuTensor,
    Shard,
    allocate,
    row_bytes,
)
from infer.kernels.gpu.upload import PIECE_BYTES, Fill, Uploader
from infer.models.loading.checkpoint import Checkpoint, TensorInfo, listed
from infer.models.loading.packing import (
    WIDENED,
    PackedRows,
    Stored,
    TurnedRows,
    WidenedRows,
    stored_packed,
    stored_schemes,
)
from infer.models.loading.shapes import Published

# bf16 is kept as its bits: numpy has no such type.
_STORAGE: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}

# Values converted at a time: their temporaries fit in a core's cache, and cost the host no memory.
_BLOCK = 1 << 18

# What is added to rows [first, first + count) of a tensor, as (first, count) -> two factors in f32,
# [count, rank] and [rank, columns].
Factors = tuple[NDArray[np.float32], NDArray[np.float32]]
Change = Callable[[int, int], Factors]

# Tensors that a checkpoint lacks, and parts of weights, before nobody looks for more: published
# models have a quarter of a million parts at most.
_LACKING, _PARTS = 1000, 1 << 20

# What embeddings and the output projection are stored as in a model quantised to q4.
EMBEDDING_DTYPE = "q8"
_EMBEDDINGS = ("embed_tokens", "embed_tokens_per_layer", "embed_positions", "lm_head")
_ROUTER = ".router"

# The parameters of fill_random.wgsl.
_FILL = np.dtype(
    [
        ("rows", "<u4"),
        ("columns", "<u4"),
        ("stride", "<u4"),
        ("first_row", "<u4"),
        ("seed", "<u4"),
        ("mean", "<f4"),
        ("spread", "<f4"),
        ("unused", "<u4"),
    ]
)


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint and the shape it must have; of it, all rows or those of `part`,
    and all columns or those of `across`. transposed: where it is of floats, each of its matrices
    has columns for rows in the file; `part` lies in one of them. turned: the rows of `part` become
    the columns of the weight. factor: of a vector's values."""

    key: str
    shape: tuple[int, ...]
    part: range | None = None
    transposed: bool = False
    turned: bool = False
    across: range | None = None
    factor: float = 1.0

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Of a tensor of floats."""
        if not self.transposed:
            return self.shape
        *stack, rows, columns = self.shape
        return (*stack, columns, rows)

    def in_file(self, info: TensorInfo | None) -> Source:
        """The same as a file has it: in some, stacks are not transposed that are in others."""
        stack = len(self.shape) > 2
        as_they_are = stack and info is not None and info.shape == self.shape != self.file_shape
        return replace(self, transposed=False) if as_they_are else self

    @property
    def start(self) -> int:
        return self.part.start if self.part is not None and not self.turned else 0

    @property
    def step(self) -> int:
        return self.part.step if self.part is not None else 1

    @property
    def columns(self) -> tuple[int, ...]:
        """Of the weight; none of a vector."""
        if self.turned:
            assert self.part is not None
            return (len(self.part),)
        if self.across is not None:
            return (len(self.across),)
        return self.shape[1:][-1:]

    @property
    def rows(self) -> int:
        """Of the weight; a stack of matrices counts as one matrix."""
        if self.turned:
            return self.shape[-1]
        if self.part is not None:
            return len(self.part)
        return self.shape[0] if len(self.shape) == 1 else prod(self.shape[:-1])


@dataclass(frozen=True)
class WeightSpec:
    """A weight of the model: a matrix (rows, columns) or a vector (columns,). Several sources are
    stacked along their first axis, as q, k and v are into one projection. Some checkpoints may have
    `others` instead, with the same rows. No shard ends inside of `unit` rows. added: to every value
    of a vector, as some checkpoints hold a norm's weights less one. Without sources it is a vector
    of `ones`. vector: it is one even where the sources are matrices, whose values follow each
    other; a `part` is of these. heads: it is what `Ops.head_linear` multiplies by. last: what its
    last rows are made of, where two weights are `joined`."""

    name: str
    sources: tuple[Source, ...]
    others: tuple[Source, ...] = ()
    unit: int = 1
    added: float = 0.0
    ones: int = 0
    vector: bool = False
    heads: bool = False
    last: WeightSpec | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if not self.sources:
            return (self.ones,)
        first = sum(source.rows for source in self.sources)
        first += self.last.shape[0] if self.last else 0
        return (first,) if self.vector else (first, *self.sources[0].columns)

    def found(self, checkpoint: Checkpoint) -> tuple[Source, ...]:
        """Those of the sources that the checkpoint has."""
        known = checkpoint.tensors, checkpoint.packed
        has_others = any(source.key in those for source in self.others for those in known)
        found = self.others if has_others else self.sources
        last = self.last.found(checkpoint) if self.last else ()
        if checkpoint.upright:
            return *(replace(source, transposed=False) for source in found), *last
        return *(source.in_file(checkpoint.tensors.get(source.key)) for source in found), *last


def stored(spec: WeightSpec, checkpoint: Checkpoint, dtype: str | None = None) -> Stored:
    """How a weight lies on the GPU: f32 for a vector, else in `converted_dtype`, else as its
    sources are. Sources of different dtypes are widened to f32, which holds each of them exactly;
    so are quantised ones beside others that are not, or that have no form in common with them,
    those of a router, those that are turned, and parts of groups of columns.

    Raises UnsupportedError for a conversion of what is quantised already.
    """
    sources = spec.found(checkpoint)
    packed = [checkpoint.packed[s.key] for s in sources if s.key in checkpoint.packed]
    if packed and dtype is not None:
        raise UnsupportedError(
            f"{checkpoint.folder} is quantised already ({checkpoint.format}): its weights are not "
            f"converted to {dtype}. Leave out --dtype and --quantize."
        )
    exact = spec.name.endswith(_ROUTER) or any(
        source.turned or _cuts_groups(source, checkpoint) for source in sources
    )
    if packed and (len(packed) < len(sources) or exact):
        return WIDENED
    if packed:
        how = stored_packed(packed, spec.name)
        return WIDENED if spec.heads and how.order is not None else how
    if dtype is not None or len(spec.shape) == 1:
        return Stored(converted_dtype(spec, dtype or "f32"))
    dtypes = {checkpoint.tensors[source.key].dtype for source in sources}
    return Stored(dtypes.pop() if len(dtypes) == 1 else "f32")


def _cuts_groups(source: Source, checkpoint: Checkpoint) -> bool:
    matrix = checkpoint.packed.get(source.key)
    return bool(matrix and source.across and not matrix.divides(len(source.across)))


def converted_dtype(spec: WeightSpec, dtype: str) -> str:
    """The dtype of a weight in a model that is converted to `dtype`. Routers are not quantised:
    they are small, and what they choose must not change. Nor are the gates of a state, where an
    error would grow with every position."""
    exact = spec.name.endswith((_ROUTER, ".gates")) and dtype in QUANTIZED
    if len(spec.shape) == 1 or exact:
        return "f32"
    return EMBEDDING_DTYPE if dtype == "q4" and spec.name in _EMBEDDINGS else dtype


def joined(
    specs: Iterable[WeightSpec],
    stored: Callable[[WeightSpec], Stored],
    apart: Container[str] = (),
) -> list[WeightSpec]:
    """The weights, with the expert that all tokens share as the last of its layer's, or as several
    where it is as wide as these: if none has biases, it is not among those named `apart`, and lies
    on the GPU as the others do (`stored`), so that nothing is widened for that."""
    found, end = {spec.name: spec for spec in specs}, "shared_expert.down_proj"
    for layer in [name.removesuffix(end) for name in found if name.endswith(f".{end}")]:
        names = [name for name in found if name.startswith(f"{layer}shared_expert.")]
        theirs = {name for name in found if name.startswith(f"{layer}experts.")}
        of_stacks = {name.replace(".shared_expert.", ".experts."): found[name] for name in names}
        biases = any(len(found[name].shape) == 1 for name in (*names, *theirs))
        width, inner = (found[f"{layer}{own}"].shape[1] for own in (end, "experts.down_proj"))
        if of_stacks.keys() != theirs or biases or width % inner:
            continue
        stacks: dict[str, WeightSpec] = {}
        for name, shared in of_stacks.items():
            stack, last = found[name], _as_experts(shared, width, inner)
            whole = replace(stack, last=last)
            hows = [stored(spec) for spec in (stack, shared, whole)]
            alike = len({(how.dtype, how.grouping, how.packed) for how in hows}) == 1
            fits = last.shape == (width // inner * stack.unit, stack.shape[1])
            if alike and fits and WIDENED not in hows and shared.name not in apart:
                stacks[name] = whole
        if len(stacks) == len(names):
            found |= stacks
            for name in names:
                del found[name]
    return list(found.values())


def _as_experts(shared: WeightSpec, width: int, inner: int) -> WeightSpec:
    """A weight of an MLP of that width as those of several that are `inner` wide, which add up to
    it, one below the other."""
    if width == inner:
        return shared
    starts, down = range(0, width, inner), shared.name.endswith(".down_proj")

    def cut(sources: tuple[Source, ...]) -> tuple[Source, ...]:
        if down:
            columns = [(source, source.across or range(source.shape[-1])) for source in sources]
            return tuple(
                replace(source, across=own[start : start + inner])
                for start in starts
                for source, own in columns
            )
        rows = [(source, source.part or range(source.rows)) for source in sources]
        tops = [(source, own[top:]) for source, own in rows for top in range(0, len(own), width)]
        return tuple(
            replace(source, part=own[start : start + inner])
            for start in starts
            for source, own in tops  # gate and up, whether or not they are one tensor
        )

    return replace(shared, sources=cut(shared.sources), others=cut(shared.others))


def random_storage(spec: WeightSpec, dtype: str, published: Published | None) -> Stored:
    """How `random_weights` stores a weight."""
    if published is None or len(spec.shape) == 1:
        return Stored(converted_dtype(spec, dtype))
    others = published.embeddings
    if spec.name.endswith(_ROUTER):  # `stored` widens them where they are packed
        return Stored(others or "f32")
    if others is not None and (spec.name in _EMBEDDINGS or published.part not in spec.name):
        return Stored(others)
    return stored_schemes([published.scheme], spec.shape[1], spec.name)


def load_weights(
    device: Device,
    specs: Sequence[WeightSpec],
    checkpoint: Checkpoint,
    *,
    ignorable: Callable[[str], bool] = lambda name: False,
    dtype: str | None = None,
    changes: Mapping[str, Change] = MappingProxyType({}),
    allocated: Callable[[dict[str, GpuTensor]], None] = lambda weights: None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, GpuTensor]:
    """The weights by name. All are checked, then all are allocated, then the files are read.
    `allocated` is called between: to allocate, or to compile, what else the model needs.

    Vectors become f32. Matrices keep their dtype (see `stored`) unless `dtype` gives another:
    to "f32", "f16" and "bf16" values are rounded to nearest, ties to even; to "q8" and "q4" they
    are quantised on the GPU, from rows as the files have them. changes: what is added to tensors
    that are not quantised in the files, by their names, in f32, before they are rounded. Surplus
    tensors are errors unless `ignorable` holds for their name. `progress` gets bytes done and bytes
    in all.

    Raises CheckpointError for tensors that are missing, surplus, of another shape, too large for
    the dtype or, if quantised, not finite; UnsupportedError for a dtype that is not implemented;
    OutOfMemoryError. Whatever is raised, an interrupt too, nothing stays allocated.
    """
    if dtype is not None:
        _check_dtype(dtype)
    check_checkpoint(specs, checkpoint, ignorable)
    _check_rows(device, specs)
    storage = {spec.name: stored(spec, checkpoint, dtype) for spec in specs}
    with _allocated(device, specs, storage) as weights:
        allocated(weights)
        of_floats = {name: w for name, w in weights.items() if not storage[name].packed}
        with Quantizer(device, of_floats) as quantizer:
            transfers: list[_Transfer] = []
            lying = _Lying()
            for spec in specs:
                weight, how = weights[spec.name], storage[spec.name]
                if how.packed:
                    transfers += _packed_transfers(spec, weight, checkpoint, how)
                else:
                    transfers += _transfers(spec, weight, checkpoint, changes, quantizer, lying)
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
        return weights


def random_weights(
    device: Device,
    specs: Sequence[WeightSpec],
    dtype: str,
    seed: int = 0,
    published: Published | None = None,
) -> dict[str, GpuTensor]:
    """Weights of the given shapes with random values, made on the GPU: for benchmarks and tests.

    Matrices are of `dtype`, their values uniform with a standard deviation of 1/sqrt(columns);
    where it is quantised, they are made of those that "bf16" has. Vectors are within 1 ± 0.1 where
    the name contains "norm", else within ± 0.02; those of ones are that. The values depend on seed,
    name and place alone. published: matrices are packed as in checkpoints of that kind instead, of
    random codes. Raises UnsupportedError and OutOfMemoryError.
    """
    _check_dtype(dtype)
    _check_rows(device, specs)
    with (
        _allocated(
            device, specs, {spec.name: random_storage(spec, dtype, published) for spec in specs}
        ) as weights,
        Quantizer(device, weights if published is None else {}) as quantizer,
    ):
        params: list[Buffer] = []
        kernels: list[Dispatch] = []

        def fill(name: str, dtype: str, buffer: Buffer, first: int, rows: int) -> None:
            shape = weights[name].shape
            params.append(device.upload(_fill_params(name, shape, dtype, first, rows, seed)))
            nbytes = buffer.nbytes if dtype == "bits" else rows * row_bytes(shape[-1], dtype)
            kernels.append(_fill(device, dtype, params[-1], buffer, nbytes))

        try:
            for name in (spec.name for spec in specs if spec.sources):
                tensor = weights[name]
                for shard in tensor.shards:
                    if shard.scales is not None and published is not None:
                        _fill_packed(device, tensor, shard)
                        fill(name, "bits", shard.buffer, shard.start, shard.rows)
                        continue
                    if tensor.dtype not in QUANTIZED:
                        fill(name, tensor.dtype, shard.buffer, shard.start, shard.rows)
                        continue
                    at_once = quantizer.rows_at_once(tensor.shape[1], "bf16")
                    for first in range(0, shard.rows, at_once):
                        rows = min(at_once, shard.rows - first)
                        fill(name, "bf16", quantizer.buffer, shard.start + first, rows)
                        kernels.append(quantizer.quantize(name, shard, first, rows, "bf16"))
            run(device, kernels)
            device.wait()
        finally:
            device.destroy(params)
        return weights


@contextmanager
def _allocated(
    device: Device, specs: Sequence[WeightSpec], storage: Mapping[str, Stored]
) -> Iterator[dict[str, GpuTensor]]:
    """The weights, zero-filled but for those of ones; freed when the block fails."""
    weights: dict[str, GpuTensor] = {}
    try:
        for spec in specs:
            how = storage[spec.name]
            weights[spec.name] = allocate(
                device, spec.shape, how.dtype, spec.name, how.grouping, how.order, spec.unit
            )
            if not spec.sources:
                device.write(weights[spec.name].buffer, np.ones(spec.ones, np.float32))
        yield weights
    except BaseException:
        device.destroy(buffer for tensor in weights.values() for buffer in tensor.buffers)
        raise


# What is checked


def asked_for(specs: Iterable[WeightSpec], has: Callable[[str], bool]) -> Iterator[WeightSpec]:
    """The weights, but no more of them than it takes to see that a checkpoint is of another model:
    a config may ask for any number, which nobody lists. has: whether it has a tensor, asked once
    the weight that is made of it has been used. Raises UnsupportedError."""
    parts = lacking = 0
    for spec in specs:
        yield spec
        sources = (*spec.sources, *spec.others)
        parts += len(sources)
        if not any(has(source.key) for source in sources):
            lacking += len(sources)
        if lacking > _LACKING:
            return
        if parts > _PARTS:
            raise UnsupportedError(
                f"config.json asks for weights of more than {_PARTS:,} parts, which no model has. "
                "Get the file that was published with the model."
            )


def check_checkpoint(
    specs: Iterable[WeightSpec],
    checkpoint: Checkpoint,
    ignorable: Callable[[str], bool] = lambda name: False,
) -> None:
    """Whether a checkpoint holds the weights, and nothing else but what is `ignorable`.

    Raises CheckpointError for tensors that are missing, surplus or of another shape, and
    UnsupportedError for a dtype that is not implemented."""
    found, folder = checkpoint.tensors, checkpoint.folder
    wanted = {
        source.key: source.file_shape
        for spec in asked_for(specs, lambda key: key in found or key in checkpoint.packed)
        for source in spec.found(checkpoint)
        if source.key not in checkpoint.packed
    }
    missing = [key for key in wanted if key not in found]
    if missing:
        raise CheckpointError(
            f"{folder} lacks tensors that config.json asks for: {listed(missing)}. Download the "
            "model again, or give the folder of a complete one."
        )
    misshapen = [
        f"{key} is {found[key].shape}, not {shape}"
        for key, shape in wanted.items()
        if found[key].shape != shape
    ]
    if misshapen:
        raise CheckpointError(
            f"{folder} has tensors of other shapes than config.json asks for: {listed(misshapen)}. "
            "Its files are of different models: download all of them again."
        )
    foreign = [f"{key} ({found[key].dtype})" for key in wanted if found[key].dtype not in ITEMSIZE]
    if foreign:
        raise UnsupportedError(
            f"{folder} has tensors of dtypes that are not implemented: {listed(foreign)}. Take a "
            f"version of the model in {listed(ITEMSIZE)}."
        )
    surplus = [name for name in found if name not in wanted and not ignorable(name)]
    if surplus:
        raise CheckpointError(
            f"{folder} has tensors that the model has no use for: {listed(surplus)}. Without them "
            "it would not be the model it was trained as: check model_type in config.json."
        )


def _check_dtype(dtype: str) -> None:
    if dtype not in (*ITEMSIZE, *QUANTIZED):
        raise UnsupportedError(
            f"Weights cannot be stored as {dtype!r}. Use {listed((*ITEMSIZE, *QUANTIZED))}."
        )


def _check_rows(device: Device, specs: Sequence[WeightSpec]) -> None:
    """No row, and no vector, is ever split: it must fit in a binding, and in what is staged."""
    limit = min(device.limits.max_binding, device.limits.max_buffer, PIECE_BYTES)
    odd = [
        f"{spec.name} {spec.shape}"
        for spec in specs
        if min(spec.shape) < 1 or row_bytes(spec.shape[-1], "f32") > limit
    ]
    if odd:
        raise UnsupportedError(
            f"Weights that are empty or have rows of more than {limit:,} bytes are not implemented "
            f"for {device.adapter.name}: {listed(odd)}. Check the sizes in config.json."
        )


# From a file to a buffer


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


class _Lying:
    """Matrices that lie transposed, [columns, rows] values of a stack in a file. The last two that
    were asked for are kept, so that the threads that want rows of one read it once."""

    def __init__(self) -> None:
        self._lock, self._kept = Lock(), OrderedDict[tuple[Path, int], NDArray[Any]]()

    def read(self, info: TensorInfo, matrix: int, shape: tuple[int, int]) -> NDArray[Any]:
        """One of a stack, as the file has it. Raises CheckpointError."""
        start = matrix * prod(shape) * ITEMSIZE[info.dtype]
        place = info.file, info.offset + start
        with self._lock:
            if place not in self._kept:
                values = np.empty(shape, _STORAGE[info.dtype])
                info.read_into(values.data.cast("B"), start)
                self._kept[place] = values
                if len(self._kept) > 2:
                    self._kept.popitem(last=False)
            return self._kept[place]


@dataclass(frozen=True)
class _Rows:
    """Rows of a source, from its value `first` on. Each row is `columns` values there and `stride`
    bytes, padding included, in `dtype` here. From a row there to the next it is so many values.
    lying: what reads them where the source is transposed, of `height` rows. change: only of rows
    that follow each other in one matrix."""

    info: TensorInfo
    first: int
    columns: int
    dtype: str
    stride: int
    row_step: int
    height: int
    lying: _Lying
    added: float = 0.0
    change: Change | None = None
    factor: float = 1.0

    @classmethod
    def of(
        cls,
        source: Source,
        row: int,
        info: TensorInfo,
        columns: int,
        dtype: str,
        stride: int,
        lying: _Lying,
        added: float = 0.0,
        change: Change | None = None,
    ) -> _Rows:
        """From a row of the source on."""
        width = columns if source.across is None else source.shape[-1]
        first, row_step, height = row * width, source.step * width, 0
        if source.across is not None:
            first += source.across.start
        if source.turned and source.part is not None:
            height = source.rows
            info = info.part(info.name, source.part.start, (columns, height))
            first, row_step = row, 1
        elif source.transposed:
            height = source.shape[-2]
            matrix, row = divmod(row, height)
            first, row_step = matrix * height * columns + row, source.step
        own = (added, change, source.factor)
        return cls(info, first, columns, dtype, stride, row_step, height, lying, *own)

    @property
    def place(self) -> tuple[Path, int]:
        """Where they begin."""
        return self.info.file, self.info.offset + self.first * ITEMSIZE[self.info.dtype]

    def fill(self, view: memoryview, start: int) -> None:
        """Write the rows from byte `start` on, as many as `view` holds."""
        info, width = self.info, ITEMSIZE[self.info.dtype]
        value = self.first + start // self.stride * self.row_step
        close = self.row_step == self.columns and not self.height
        as_it_is = info.dtype == self.dtype and not self.added and self.change is None
        if close and as_it_is and self.factor == 1.0 and self.stride == self.columns * width:
            info.read_into(view, value * width)
            return
        rows = np.frombuffer(view, _STORAGE[self.dtype]).reshape(len(view) // self.stride, -1)
        values = self._read(value, len(rows))
        row, left = divmod(value, self.row_step)
        changed = None if self.change is None else self.change(row, len(rows))
        step = max(1, _BLOCK // self.columns)
        for i in range(0, len(rows), step):
            part = slice(i, i + step)
            own = slice(left, left + self.columns)
            factors = None if changed is None else (changed[0][part], changed[1][:, own])
            rows[part, : self.columns] = self._convert(values[part], factors)
        if self.factor != 1.0:
            rows[:, : self.columns] *= self.factor
        if self.added:
            rows[:, : self.columns] += self.added
        rows[:, self.columns :] = 0

    def _read(self, value: int, count: int) -> NDArray[Any]:
        """So many rows from a value of the source on, [count, columns]."""
        info, width = self.info, ITEMSIZE[self.info.dtype]
        if not self.height:
            rows = np.empty((count, self.row_step), _STORAGE[info.dtype])
            found = rows.reshape(-1)[: rows.size - self.row_step + self.columns]
            info.read_into(found.data.cast("B"), value * width)
            return rows[:, : self.columns]
        matrix, row = divmod(value, self.height * self.columns)
        whole = self.lying.read(info, matrix, (self.columns, self.height))
        return whole[:, row : row + (count - 1) * self.row_step + 1 : self.row_step].T

    def _convert(self, values: NDArray[Any], factors: Factors | None) -> NDArray[Any]:
        """Values of the source's dtype in the weight's, rounded to nearest, ties to even; before,
        the product of the factors is added."""
        source, target = self.info.dtype, self.dtype
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
                f"{self.info.name} has the value {exact[overflow][0]:g}, too large for {target}. "
                "Load the model in another dtype: bf16 or f32."
            )
        return rounded


def widened(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Values as files have them (bf16: its bits) in f32."""
    return from_bf16(values) if dtype == "bf16" else values.astype(np.float32, copy=False)


def _transfers(
    spec: WeightSpec,
    tensor: GpuTensor,
    checkpoint: Checkpoint,
    changes: Mapping[str, Change],
    quantizer: Quantizer,
    lying: _Lying,
) -> Iterator[_Transfer]:
    """What brings the sources, one below the other, into the shards."""
    vector = len(tensor.shape) == 1
    columns = 1 if vector else tensor.shape[1]
    stride = ITEMSIZE["f32"] if vector else row_bytes(columns, tensor.dtype)
    added = 0.0 if checkpoint.whole_norms else spec.added
    for source, shard, start, end, row in _placed(spec.found(checkpoint), tensor):
        matrix = checkpoint.packed.get(source.key)
        if matrix is not None:
            info, at = matrix.tensors[0], (start - shard.start) * stride
            fill = WidenedRows(matrix, row, source.step, source.across).fill
            nbytes = (end - start) * stride
            if source.turned and source.part is not None:
                fill = TurnedRows(matrix, source.part, row).fill
            yield _Transfer((info.file, info.offset), shard.buffer, at, nbytes, stride, fill)
            continue
        info, change = checkpoint.tensors[source.key], changes.get(source.key)
        if tensor.dtype not in QUANTIZED:
            rows = _Rows.of(source, row, info, columns, tensor.dtype, stride, lying, added, change)
            at = (start - shard.start) * stride
            nbytes = (end - start) * stride
            yield _Transfer(rows.place, shard.buffer, at, nbytes, stride, rows.fill)
            continue
        own = info.dtype if change is None else "f32"
        own_stride = row_bytes(columns, own)
        at_once = quantizer.rows_at_once(columns, own)
        for done in range(0, end - start, at_once):
            count = min(at_once, end - start - done)
            at = row + done * source.step
            rows = _Rows.of(source, at, info, columns, own, own_stride, lying, change=change)
            first = start - shard.start + done
            kernel = quantizer.quantize(spec.name, shard, first, count, own)
            nbytes = count * own_stride
            yield _Transfer(rows.place, quantizer.buffer, 0, nbytes, own_stride, rows.fill, kernel)


def _packed_transfers(
    spec: WeightSpec, tensor: GpuTensor, checkpoint: Checkpoint, how: Stored
) -> Iterator[_Transfer]:
    """The same of quantised sources: blocks, then their scales."""
    columns = tensor.shape[1]
    for source, shard, start, end, row in _placed(spec.found(checkpoint), tensor):
        matrix = checkpoint.packed[source.key]
        rows = PackedRows(matrix, row, end - start, how, source.step, source.across)
        info = matrix.tensors[0]
        strides = row_bytes(columns, how.dtype), how.grouping.row_bytes(columns)
        fills = rows.fill_blocks, rows.fill_scales
        for buffer, stride, fill in zip(shard.buffers, strides, fills, strict=True):
            at, nbytes = (start - shard.start) * stride, (end - start) * stride
            yield _Transfer((info.file, info.offset), buffer, at, nbytes, stride, fill)


def _placed(
    sources: Sequence[Source], tensor: GpuTensor
) -> Iterator[tuple[Source, Shard, int, int, int]]:
    """For each source and each shard that holds some of it: rows [start, end) of the weight, and
    where in the source's tensor they begin."""
    top = 0
    for source in sources:
        bottom = top + source.rows
        for shard in tensor.shards:
            count = tensor.shape[0] if len(tensor.shape) == 1 else shard.rows
            start, end = max(top, shard.start), min(bottom, shard.start + count)
            if start < end:
                yield source, shard, start, end, source.start + (start - top) * source.step
        top = bottom


# From the random generator


def _fill_params(
    name: str, shape: tuple[int, ...], dtype: str, first: int, rows: int, seed: int
) -> NDArray[Any]:
    columns = shape[-1]
    if len(shape) == 2:
        mean, spread = 0.0, (3 / columns) ** 0.5  # uniform in ± sqrt(3) deviates by 1
    else:
        mean, spread = (1.0, 0.1) if "norm" in name else (0.0, 0.02)
    stride = columns if dtype == "bits" else row_bytes(columns, dtype) // ITEMSIZE[dtype]
    own_seed = zlib.crc32(name.encode(), seed & 0xFFFFFFFF)
    return np.array((rows, columns, stride, first, own_seed, mean, spread, 0), _FILL)


def _fill_packed(device: Device, tensor: GpuTensor, shard: Shard) -> None:
    """Scales with which random codes are about as large as other random weights, around zero."""
    assert shard.scales is not None
    grouping, (_, columns) = tensor.grouping, tensor.shape
    bits = {"q8": 8, "q6": 6, "q5": 5}.get(tensor.dtype, 4)
    size = {"e4m3": 100.0, "mxfp4": 3.0, "nf4": 0.5, "iq4nl": 60.0}.get(tensor.dtype, 2**bits / 3.5)
    scales = np.full((1, grouping.groups(columns)), columns**-0.5 / size)
    offsets = {"none": None, "zero": np.full_like(scales, grouping.shift)}.get(
        grouping.offset, -grouping.shift * scales
    )
    codes, units = np.zeros((1, columns), np.uint8), None
    if grouping.dtype == "int8":
        largest = np.array([scales[0, 0], 0 if offsets is None else offsets[0, 0]], np.float16)
        units = np.tile(largest / 32, (1, -(-columns // SUPERBLOCK), 1))
        scales = np.full(scales.shape, 32, np.int8)
        offsets = None if offsets is None else scales
    _, row = Codes(tensor.dtype, grouping, codes, scales, offsets, units).pack()
    step = max(1, PIECE_BYTES // row.nbytes)
    for first in range(0, shard.rows, step):
        rows = np.repeat(row, min(step, shard.rows - first), axis=0)
        device.write(shard.scales, rows, offset=first * row.nbytes)


def _fill(device: Device, dtype: str, params: Buffer, buffer: Buffer, nbytes: int) -> Dispatch:
    spec = KernelSpec.of("fill_random", DTYPE=dtype)
    grid = linear_grid(-(-nbytes // (256 * 16)), device.limits.max_workgroups)
    return dispatch(device, spec, [params, buffer], grid)
