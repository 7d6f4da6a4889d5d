"""AWQ (Lin et al. 2023), in the "gemm" layout of AutoAWQ.

For a module of `columns` inputs and `rows` outputs:

    qweight  int32 [columns, rows / 8]   codes of 4 bits, packed along the outputs
    qzeros   int32 [groups, rows / 8]    zero points, likewise
    scales   float [groups, rows]

From its lowest nibble on, an int32 holds outputs 0, 2, 4, 6, 1, 3, 5, 7 of its eight. A value is
scale * (code - zero).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.errors import UnsupportedError
from infer.models.loading.checkpoint import Checkpoint
from infer.models.loading.config import RawConfig
from infer.models.loading.formats.format import FLOATS, Format, matrix_shape, part
from infer.models.loading.formats.grouped import Grouped, Scheme, split
from infer.models.loading.formats.packed import Packed, read_columns
from infer.models.loading.tensors import TensorInfo

_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)  # of each output


class Awq(Format):
    """4 bits with zero points, in the layout "gemm"."""

    method = "awq"

    def __init__(self, config: RawConfig) -> None:
        config.expect("w_bit" if "w_bit" in config.values else "bits", 4)
        config.expect("zero_point", True)
        config.expect("version" if "version" in config.values else "format", "gemm", "GEMM")
        config.expect("backend", "auto", "autoawq")
        key = "q_group_size" if "q_group_size" in config.values else "group_size"
        self.group: int = config.get(key, 128, int)
        if self.group != -1 and self.group < 1:
            raise UnsupportedError(f"{config.place}: {key} = {self.group} is not a size.")

    def matrix(self, checkpoint: Checkpoint, key: str, shape: Sequence[int]) -> Packed | None:
        module = key.removesuffix(".weight")
        if f"{module}.qweight" not in checkpoint.tensors:
            return None
        rows, columns = matrix_shape(checkpoint, key, shape)
        group = columns if self.group == -1 else self.group
        if rows % 8 or columns % group:
            raise UnsupportedError(
                f"{checkpoint.folder}: {module} is ({rows}, {columns}); AWQ packs multiples of 8 "
                f"rows and {group} columns."
            )
        weight = part(checkpoint, f"{module}.qweight", [(columns, rows // 8)], ["I32"])
        zeros = part(checkpoint, f"{module}.qzeros", [(columns // group, rows // 8)], ["I32"])
        scales = part(checkpoint, f"{module}.scales", [(columns // group, rows)], FLOATS)
        scheme = Scheme("int", 4, group, scales.dtype, zeros=True)
        return _Matrix(key, (rows, columns), scheme, (weight, zeros, scales))


class _Matrix(Packed):
    by_columns = True

    def read(self, start: int, stop: int) -> Grouped:
        weight, zeros, scales = self.tensors
        codes = _nibbles(weight, start, stop)
        zero = _nibbles(zeros, start, stop).astype(np.int16)
        scale = np.ascontiguousarray(read_columns(scales, start, stop).T)
        return Grouped(self.scheme, codes, scale, zero)


def _nibbles(info: TensorInfo, start: int, stop: int) -> NDArray[np.uint8]:
    """Rows [start, stop) of the matrix whose columns `info` packs."""
    first, last = start // 8, -(-stop // 8)
    words: NDArray[Any] = np.ascontiguousarray(read_columns(info, first, last).T)
    rows = split(words, 4, (4 * nibble for nibble in _NIBBLE))
    return rows.reshape(-1, words.shape[1])[start - 8 * first : stop - 8 * first]
