"""MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss publishes the matrices of its experts
(quant_method "mxfp4").

For `experts` matrices of `columns` inputs and `rows` outputs in one weight X:

    X_blocks  uint8 [experts, rows, columns / 32, 16]   E2M1, the first of two in the low nibble
    X_scales  uint8 [experts, rows, columns / 32]       E8M0

A value is scale * code. The experts' rows are one matrix here, one expert below the other; the
rows of gate_up_proj alternate between gate and up, as the model has them.
"""

from __future__ import annotations

from collections.abc import Sequence

from infer.kernels.errors import UnsupportedError
from infer.models.loading.checkpoint import Checkpoint
from infer.models.loading.config import RawConfig
from infer.models.loading.formats.format import Format, part
from infer.models.loading.formats.grouped import Grouped, Scheme, from_e8m0, unpack
from infer.models.loading.formats.packed import Packed, read_flat


class Mxfp4(Format):
    """The tensors X_blocks and X_scales."""

    method = "mxfp4"

    def __init__(self, config: RawConfig) -> None:
        """Nothing in the config changes the layout."""

    def matrix(self, checkpoint: Checkpoint, key: str, shape: Sequence[int]) -> Packed | None:
        """Returns the matrix of a shape (experts, rows, columns) or, without experts, (rows,
        columns); None where the checkpoint does not have it in this format."""
        name = key.removesuffix(".weight") if f"{key}_blocks" not in checkpoint.tensors else key
        if f"{name}_blocks" not in checkpoint.tensors:
            return None
        *rows, columns = shape
        if not rows or columns % 32:
            raise UnsupportedError(
                f"{checkpoint.folder}: {key} has {columns} columns, no multiple of 32."
            )
        groups = columns // 32
        blocks = part(checkpoint, f"{name}_blocks", [(*rows, groups, 16)], ["U8"])
        scales = part(checkpoint, f"{name}_scales", [(*rows, groups)], ["U8"])
        count = 1
        for size in rows:
            count *= size
        scheme = Scheme("mxfp4", 4, 32, "e8m0")
        return _Matrix(key, (count, columns), scheme, (blocks, scales))


class _Matrix(Packed):
    def read(self, start: int, stop: int) -> Grouped:
        return self.take(range(start, stop))

    def take(self, rows: range) -> Grouped:
        """Rows between are read, but not unpacked."""
        blocks, scales = self.tensors
        start, stop, step, columns = rows[0], rows[-1] + 1, rows.step, self.shape[1]
        half, groups = columns // 2, columns // 32
        packed = read_flat(blocks, start * half, stop * half).reshape(-1, half)[::step]
        scale = read_flat(scales, start * groups, stop * groups).reshape(-1, groups)[::step]
        return Grouped(self.scheme, unpack(packed, 4, columns), from_e8m0(scale))
