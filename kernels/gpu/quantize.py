"""Quantising weights on the GPU, from rows in a temporary buffer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType

import numpy as np

from infer.kernels.errors import CheckpointError
from infer.kernels.gpu.device import Buffer, Device, Limits
from infer.kernels.gpu.plan import Dispatch, dispatch, linear_grid
from infer.kernels.gpu.shader import KernelSpec
from infer.kernels.gpu.tensor import BLOCK, QUANTIZED, GpuTensor, Shard, row_bytes

BUFFER_BYTES = 32 << 20  # of rows at a time


def buffer_bytes(shapes: Iterable[tuple[int, ...]], limits: Limits) -> int:
    """Bytes of the temporary buffer that matrices of these shapes need, of any float dtype."""
    most = min(BUFFER_BYTES, limits.max_binding, limits.max_buffer)
    return min(most, max((r * row_bytes(c, "f32") for r, c in shapes), default=0))


class Quantizer:
    """Quantises rows into weights; use it in `with`, which frees its buffers.

    Rows are written into `buffer`, at its start, as a matrix of float dtype stores them; then what
    `quantize` returned is run. All of that may wait in a queue. In the end call `check`.
    weights: by name, zero-filled so far; those that are not quantised do not count. Raises
    OutOfMemoryError.
    """

    def __init__(self, device: Device, weights: Mapping[str, GpuTensor]) -> None:
        self._device = device
        self._weights = {n: tensor for n, tensor in weights.items() if tensor.dtype in QUANTIZED}
        self._names = list(self._weights)
        self._buffers: list[Buffer] = []
        try:
            shapes = [tensor.shape for tensor in self._weights.values()]
            self.buffer = self._new(buffer_bytes(shapes, device.limits), "rows to quantize")
            self._faults = self._new(4 * len(self._names), "faults of quantizing")
        except BaseException:
            device.destroy(self._buffers)
            raise

    def _new(self, nbytes: int, label: str) -> Buffer:
        self._buffers.append(self._device.buffer(nbytes, label=label))
        return self._buffers[-1]

    def rows_at_once(self, columns: int, dtype: str) -> int:
        """Rows of a float dtype that the buffer holds."""
        return self.buffer.nbytes // row_bytes(columns, dtype)

    def quantize(self, name: str, shard: Shard, first: int, rows: int, dtype: str) -> Dispatch:
        """The kernel that quantises the buffer's first `rows` rows, of `dtype`, into the rows from
        `first` on of a weight's shard."""
        tensor, index = self._weights[name], self._names.index(name)
        columns = tensor.shape[1]
        params = self._device.upload(np.array((rows, columns, first, index), np.uint32))
        self._buffers.append(params)
        pairs = -(-columns // (2 * BLOCK))
        return dispatch(
            self._device,
            KernelSpec.of("quantize_weight", WEIGHT=dtype, FORMAT=tensor.dtype),
            [params, self.buffer, *shard.buffers, self._faults],
            linear_grid(-(-rows * pairs // 64), self._device.limits.max_workgroups),
        )

    def check(self) -> None:
        """Wait for all that was submitted. Raises CheckpointError for weights with values that are
        not finite, or too large: their blocks are NaN."""
        if not self._names:
            return
        faults = self._device.read(self._faults, np.uint32, len(self._names))
        faulty = [name for name, fault in zip(self._names, faults, strict=True) if fault]
        if faulty:
            shown = ", ".join(faulty[:10]) + (", …" if len(faulty) > 10 else "")
            raise CheckpointError(
                f"Values that are infinite, not numbers or too large cannot be quantised: {shown}. "
                "Load the model without `quantize`, or download it again if it is damaged."
            )

    def __enter__(self) -> Quantizer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._device.destroy(self._buffers)
