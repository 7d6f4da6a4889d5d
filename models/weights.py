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
from infer.kernels.quantize import Quantizer
from infer.kernels.record import run
from infer.kernels.shader import KernelSpec
from infer.kernels.tensor import ITEMSIZE, QUANTIZED, GpuTensor, allocate, row_bytes
from infer.kernels.upload import PIECE_BYTES, Uploader
from infer.models.checkpoint import Checkpoint, TensorInfo, listed

# bf16 is kept as its bits: numpy has no such type.
_STORAGE: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}

# Values converted at a time: their temporaries fit in a core's cache, and cost the host no memory.
_BLOCK = 1 << 18

# What embeddings and the output projection are stored as in a model quantised to q4.
EMBEDDING_DTYPE = "q8"
_EMBEDDINGS = ("embed_tokens", "lm_head")

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
    """A tensor of the checkpoint and the shape it must have; of it, all rows or those of `part`."""

    key: str
    shape: tuple[int, ...]
    part: range | None = None

    @property
    def start(self) -> int:
        return self.part.start if self.part is not None else 0

    @property
    def rows(self) -> int:
        return len(self.part) if self.part is not None else self.shape[0]


@dataclass(frozen=True)
class WeightSpec:
    """A weight of the model: a matrix (rows, columns) or a vector (columns,). Several sources are
    stacked along their first axis, as q, k and v are into one projection. added: to every value of
    a vector, as some checkpoints hold a norm's weights less one."""

    name: str
    sources: tuple[Source, ...]
    added: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        first = sum(source.rows for source in self.sources)
        return (first, *self.sources[0].shape[1:])


def stored_dtype(spec: WeightSpec, checkpoint: Checkpoint, dtype: str | None = None) -> str:
    """The dtype of a weight on the GPU: f32 for a vector, else that of `converted_dtype`, else its
    sources' own. Sources of different dtypes are widened to f32, which holds each of them exactly.
    """
    if dtype is not None or len(spec.shape) == 1:
        return converted_dtype(spec, dtype or "f32")
    dtypes = {checkpoint.tensors[source.key].dtype for source in spec.sources}
    return dtypes.pop() if len(dtypes) == 1 else "f32"


def converted_dtype(spec: WeightSpec, dtype: str) -> str:
    """The dtype of a weight in a model that is converted to `dtype`."""
    if len(spec.shape) == 1:
        return "f32"
    return EMBEDDING_DTYPE if dtype == "q4" and spec.name in _EMBEDDINGS else dtype


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

    Vectors become f32. Matrices keep their dtype (see `stored_dtype`) unless `dtype` gives another:
    to "f32", "f16" and "bf16" values are rounded to nearest, ties to even; to "q8" and "q4" they
    are quantised on the GPU, from rows as the files have them. Surplus tensors are errors unless
    `ignorable` holds for their name. `progress` gets bytes done and bytes in all.

    Raises CheckpointError for tensors that are missing, surplus, of another shape, too large for
    the dtype or, if quantised, not finite; UnsupportedError for a dtype that is not implemented;
    OutOfMemoryError. Whatever is raised, an interrupt too, nothing stays allocated.
    """
    if dtype is not None:
        _check_dtype(dtype)
    check_checkpoint(specs, checkpoint, ignorable)
    _check_rows(device, specs)
    with _allocated(device, specs, lambda spec: stored_dtype(spec, checkpoint, dtype)) as weights:
        allocated(weights)
        with Quantizer(device, weights) as quantizer:
            transfers = [
                transfer
                for spec in specs
                for transfer in _transfers(spec, weights[spec.name], checkpoint, quantizer)
            ]
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
                    if t.then is not None:
                        uploader.run(t.then)
            quantizer.check()
        return weights


def random_weights(
    device: Device, specs: Sequence[WeightSpec], dtype: str, seed: int = 0
) -> dict[str, GpuTensor]:
    """Weights of the given shapes with random values, made on the GPU: for benchmarks and tests.

    Matrices are of `dtype`, their values uniform with a standard deviation of 1/sqrt(columns);
    where it is quantised, they are made of those that "bf16" has. Vectors are within 1 ± 0.1 where
    the name contains "norm", else within ± 0.02. The values depend on seed, name and place alone.
    Raises UnsupportedError and OutOfMemoryError.
    """
    _check_dtype(dtype)
    _check_rows(device, specs)
    with (
        _allocated(device, specs, lambda spec: converted_dtype(spec, dtype)) as weights,
        Quantizer(device, weights) as quantizer,
    ):
        params: list[Buffer] = []
        kernels: list[Dispatch] = []

        def fill(name: str, dtype: str, buffer: Buffer, first: int, rows: int) -> None:
            shape = weights[name].shape
            params.append(device.upload(_fill_params(name, shape, dtype, first, rows, seed)))
            nbytes = rows * row_bytes(shape[-1], dtype)
            kernels.append(_fill(device, dtype, params[-1], buffer, nbytes))

        try:
            for name, tensor in weights.items():
                for shard in tensor.shards:
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
    device: Device, specs: Sequence[WeightSpec], dtype_of: Callable[[WeightSpec], str]
) -> Iterator[dict[str, GpuTensor]]:
    """The weights, zero-filled; freed when the block fails."""
    weights: dict[str, GpuTensor] = {}
    try:
        for spec in specs:
            weights[spec.name] = allocate(device, spec.shape, dtype_of(spec), spec.name)
        yield weights
    except BaseException:
        shards = [shard for tensor in weights.values() for shard in tensor.shards]
        device.destroy(buffer for shard in shards for buffer in shard.buffers)
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
    added: float = 0.0
    then: Dispatch | None = None  # what makes the weight of them, if these are not its rows

    @property
    def nbytes(self) -> int:
        return self.rows * self.stride

    def fill(self, view: memoryview, start: int) -> None:
        """Write the rows from byte `start` on, as many as `view` holds."""
        info, width = self.info, ITEMSIZE[self.info.dtype]
        value = self.first + start // self.stride * self.columns
        if info.dtype == self.dtype and self.stride == self.columns * width and not self.added:
            info.read_into(view, value * width)
            return
        rows = np.frombuffer(view, _STORAGE[self.dtype]).reshape(len(view) // self.stride, -1)
        values = np.empty((len(rows), self.columns), _STORAGE[info.dtype])
        info.read_into(values.data.cast("B"), value * width)
        step = max(1, _BLOCK // self.columns)
        for i in range(0, len(rows), step):
            rows[i : i + step, : self.columns] = self._convert(values[i : i + step])
        if self.added:
            rows[:, : self.columns] += self.added
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


def _transfers(
    spec: WeightSpec, tensor: GpuTensor, checkpoint: Checkpoint, quantizer: Quantizer
) -> Iterator[_Transfer]:
    """What brings the sources, one below the other, into the shards."""
    vector = len(tensor.shape) == 1
    columns = 1 if vector else tensor.shape[1]
    stride = ITEMSIZE["f32"] if vector else row_bytes(columns, tensor.dtype)
    top = 0
    for source in spec.sources:
        bottom, info = top + source.rows, checkpoint.tensors[source.key]
        skipped = source.start - top
        for shard in tensor.shards:
            count = tensor.shape[0] if vector else shard.rows
            start, end = max(top, shard.start), min(bottom, shard.start + count)
            if tensor.dtype not in QUANTIZED and start < end:
                yield _Transfer(
                    info,
                    (start + skipped) * columns,
                    end - start,
                    columns,
                    tensor.dtype,
                    shard.buffer,
                    (start - shard.start) * stride,
                    stride,
                    spec.added,
                )
            elif start < end:
                at_once = quantizer.rows_at_once(columns, info.dtype)
                for first in range(start, end, at_once):
                    rows = min(at_once, end - first)
                    yield _Transfer(
                        info,
                        (first + skipped) * columns,
                        rows,
                        columns,
                        info.dtype,
                        quantizer.buffer,
                        0,
                        row_bytes(columns, info.dtype),
                        then=quantizer.quantize(
                            spec.name, shard, first - shard.start, rows, info.dtype
                        ),
                    )
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
    stride = row_bytes(columns, dtype) // ITEMSIZE[dtype]
    own_seed = zlib.crc32(name.encode(), seed & 0xFFFFFFFF)
    return np.array((rows, columns, stride, first, own_seed, mean, spread, 0), _FILL)


def _fill(device: Device, dtype: str, params: Buffer, buffer: Buffer, nbytes: int) -> Dispatch:
    spec = KernelSpec.of("fill_random", DTYPE=dtype)
    grid = linear_grid(-(-nbytes // (256 * 16)), device.limits.max_workgroups)
    return dispatch(device, spec, [params, buffer], grid)
