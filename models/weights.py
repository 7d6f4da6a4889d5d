"""Weights: from a checkpoint, or from a random generator, into GPU buffers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.arrays import from_bf16, to_bf16
from infer.kernels.device import Buffer, Device
from infer.kernels.errors import CheckpointError, UnsupportedError
from infer.kernels.plan import Dispatch, dispatch, linear_grid
from infer.kernels.record import run
from infer.kernels.shader import KernelSpec
from infer.kernels.tensor import ITEMSIZE, GpuTensor, Shard, allocate, row_bytes
from infer.kernels.upload import PIECE_BYTES, Uploader
from infer.models.checkpoint import Checkpoint, TensorInfo, listed

# bf16 is kept as its bits: numpy has no such type.
_STORAGE: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}

# Values converted at a time: their temporaries fit in a core's cache, and cost the host no memory.
_BLOCK = 1 << 18

# The parameters of wgsl/fill_random.wgsl.
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
    """A tensor of the checkpoint and the shape it must have."""

    key: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightSpec:
    """A weight of the model: a matrix (rows, columns) or a vector (columns,). Several sources are
    stacked along their first axis, as q, k and v are into one projection."""

    name: str
    sources: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = sum(source.shape[0] for source in self.sources)
        return (first, *self.sources[0].shape[1:])


def stored_dtype(spec: WeightSpec, checkpoint: Checkpoint, dtype: str | None = None) -> str:
    """The dtype of a weight on the GPU: f32 for a vector, else `dtype`, else its sources' own.
    Sources of different dtypes are widened to f32, which holds each of them exactly."""
    if len(spec.shape) == 1:
        return "f32"
    if dtype is not None:
        return dtype
    dtypes = {checkpoint.tensors[source.key].dtype for source in spec.sources}
    return dtypes.pop() if len(dtypes) == 1 else "f32"


def load_weights(
    device: Device,
    specs: Sequence[WeightSpec],
    checkpoint: Checkpoint,
    *,
    ignorable: Callable[[str], bool] = lambda name: False,
    dtype: str | None = None,
    allocated: Callable[[dict[str, GpuTensor]], None] = lambda weights: None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, GpuTensor]:
    """The weights by name. All are checked, then all are allocated, then the files are read.
    `allocated` is called between: to allocate, or to compile, what else the model needs.

    Vectors become f32. Matrices keep their dtype (see `stored_dtype`) unless `dtype` gives another
    ("f32", "f16", "bf16"), to which values are rounded to nearest, ties to even. Surplus tensors
    are errors unless `ignorable` holds for their name. `progress` gets bytes done and bytes in all.

    Raises CheckpointError for tensors that are missing, surplus, of another shape or too large for
    the dtype; UnsupportedError for a dtype that is not implemented; OutOfMemoryError. Whatever is
    raised, an interrupt too, nothing stays allocated.
    """
    if dtype is not None:
        _check_dtype(dtype)
    check_checkpoint(specs, checkpoint, ignorable)
    _check_rows(device, specs)
    with _allocated(device, specs, lambda spec: stored_dtype(spec, checkpoint, dtype)) as weights:
        allocated(weights)
        transfers = [t for spec in specs for t in _transfers(spec, weights[spec.name], checkpoint)]
        transfers.sort(key=lambda t: (t.info.file, t.info.offset))  # as the disk has them
        total, done = sum(t.nbytes for t in transfers), 0

        def on_submitted(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, total)

        with Uploader(device, total, on_submitted) as uploader:
            for t in transfers:
                uploader.write(t.buffer, t.offset, t.nbytes, t.fill, t.stride)
        return weights


def random_weights(
    device: Device, specs: Sequence[WeightSpec], dtype: str, seed: int = 0
) -> dict[str, GpuTensor]:
    """Weights of the given shapes with random values, made on the GPU: for benchmarks and tests.

    Matrices are of `dtype`, their values uniform with a standard deviation of 1/sqrt(columns).
    Vectors are within 1 ± 0.1 where the name contains "norm", else within ± 0.02. The values
    depend on seed, name and place alone. Raises UnsupportedError and OutOfMemoryError.
    """
    _check_dtype(dtype)
    _check_rows(device, specs)
    params: list[Buffer] = []
    with _allocated(device, specs, lambda spec: dtype) as weights:
        try:
            fills = []
            for name, tensor in weights.items():
                for shard in tensor.shards:
                    params.append(device.upload(_fill_params(name, tensor, shard, seed)))
                    fills.append(_fill(device, tensor.dtype, params[-1], shard.buffer))
            run(device, fills)
            device.wait()
        finally:
            device.destroy(params)
        return weights


@contextmanager
def _allocated(
    device: Device, specs: Sequence[WeightSpec], dtype_of: Callable[[WeightSpec], str]
) -> Iterator[dict[str, GpuTensor]]:
    """The weights, zero-filled; freed when the block fails."""
    weights: dict[str, GpuTensor] = {}
    try:
        for spec in specs:
            weights[spec.name] = allocate(device, spec.shape, dtype_of(spec), spec.name)
        yield weights
    except BaseException:
        device.destroy(shard.buffer for tensor in weights.values() for shard in tensor.shards)
        raise


# What is checked


def check_checkpoint(
    specs: Sequence[WeightSpec],
    checkpoint: Checkpoint,
    ignorable: Callable[[str], bool] = lambda name: False,
) -> None:
    """Whether a checkpoint holds the weights, and nothing else but what is `ignorable`.

    Raises CheckpointError for tensors that are missing, surplus or of another shape, and
    UnsupportedError for a dtype that is not implemented."""
    wanted = {source.key: source.shape for spec in specs for source in spec.sources}
    found, folder = checkpoint.tensors, checkpoint.folder
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
    if dtype not in ITEMSIZE:
        raise UnsupportedError(f"Weights cannot be stored as {dtype!r}. Use {listed(ITEMSIZE)}.")


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
    """`rows` rows of a source, from its value `first` on, to byte `offset` of a buffer. Each row is
    `columns` values there and `stride` bytes, padding included, here."""

    info: TensorInfo
    first: int
    rows: int
    columns: int
    dtype: str
    buffer: Buffer
    offset: int
    stride: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.stride

    def fill(self, view: memoryview, start: int) -> None:
        """Write the rows from byte `start` on, as many as `view` holds."""
        info, width = self.info, ITEMSIZE[self.info.dtype]
        value = self.first + start // self.stride * self.columns
        if info.dtype == self.dtype and self.stride == self.columns * width:
            info.read_into(view, value * width)
            return
        rows = np.frombuffer(view, _STORAGE[self.dtype]).reshape(len(view) // self.stride, -1)
        values = np.empty((len(rows), self.columns), _STORAGE[info.dtype])
        info.read_into(values.data.cast("B"), value * width)
        step = max(1, _BLOCK // self.columns)
        for i in range(0, len(rows), step):
            rows[i : i + step, : self.columns] = self._convert(values[i : i + step])
        rows[:, self.columns :] = 0

    def _convert(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of the source's dtype in the weight's, rounded to nearest, ties to even."""
        source, target = self.info.dtype, self.dtype
        if source == target:
            return values
        with np.errstate(over="ignore", invalid="ignore"):
            exact = from_bf16(values) if source == "bf16" else values.astype(np.float32, copy=False)
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


def _transfers(spec: WeightSpec, tensor: GpuTensor, checkpoint: Checkpoint) -> Iterator[_Transfer]:
    """What brings the sources, one below the other, into the shards."""
    columns = 1 if len(tensor.shape) == 1 else tensor.shape[1]
    stride = ITEMSIZE["f32"] if len(tensor.shape) == 1 else row_bytes(columns, tensor.dtype)
    top = 0
    for source in spec.sources:
        bottom = top + source.shape[0]
        for shard in tensor.shards:
            count = tensor.shape[0] if len(tensor.shape) == 1 else shard.rows
            start, end = max(top, shard.start), min(bottom, shard.start + count)
            if start < end:
                yield _Transfer(
                    checkpoint.tensors[source.key],
                    (start - top) * columns,
                    end - start,
                    columns,
                    tensor.dtype,
                    shard.buffer,
                    (start - shard.start) * stride,
                    stride,
                )
        top = bottom


# From the random generator


def _fill_params(name: str, tensor: GpuTensor, shard: Shard, seed: int) -> NDArray[Any]:
    columns = tensor.shape[-1]
    if len(tensor.shape) == 2:
        mean, spread = 0.0, (3 / columns) ** 0.5  # uniform in ± sqrt(3) deviates by 1
    else:
        mean, spread = (1.0, 0.1) if "norm" in name else (0.0, 0.02)
    stride = row_bytes(columns, tensor.dtype) // ITEMSIZE[tensor.dtype]
    own_seed = zlib.crc32(name.encode(), seed & 0xFFFFFFFF)
    return np.array((shard.rows, columns, stride, shard.start, own_seed, mean, spread, 0), _FILL)


def _fill(device: Device, dtype: str, params: Buffer, buffer: Buffer) -> Dispatch:
    groups = -(-buffer.nbytes // (256 * 16))
    spec = KernelSpec.of("fill_random", DTYPE=dtype)
    grid = linear_grid(groups, device.limits.max_workgroups)
    return dispatch(device, spec, [params, buffer], grid)
