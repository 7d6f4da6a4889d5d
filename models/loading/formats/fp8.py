"""E4M3 weights with a scale for each block, as DeepSeek, Qwen3 and others publish them
(quant_method "fp8").

For a module of `columns` inputs and `rows` outputs, and weight_block_size (h, w):

    weight            E4M3 [rows, columns]
    weight_scale_inv  float or E8M0 [ceil(rows / h), ceil(columns / w)], or one value for all

A value is scale * code: despite its name, the scale is not inverted. Files with one scale for a
tensor or a row may call it weight_scale.

The matrices of a layer's experts may be a stack X, as in Mistral Small 4:

    X            E4M3 [experts, rows, columns]
    X_scale_inv  [experts, ceil(rows / h), ceil(columns / w)], or one value for each expert, or two:
                 for its gate and its up

Activations and the cache are not quantised, which is nearer to the model before its weights were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from infer.kernels.errors import UnsupportedError
from infer.models.loading.checkpoint import Checkpoint
from infer.models.loading.config import RawConfig, shown
from infer.models.loading.formats.format import (
    ACTIVATIONS,
    FLOATS,
    Format,
    left_out,
    matrix_shape,
    part,
)
from infer.models.loading.formats.grouped import Grouped, Scheme
from infer.models.loading.formats.packed import Packed, block_scales, read_rows


class Fp8(Format):
    """Blocks of any size, rows or whole tensors; scales of activations are ignored."""

    method = "fp8"
    ignored = (ACTIVATIONS,)

    def __init__(self, config: RawConfig) -> None:
        config.expect("fmt", "e4m3", "float8_e4m3fn")
        config.expect("activation_scheme", "dynamic", "static")
        config.expect("expert_dtype", "fp8")
        block = config.get("weight_block_size", None, list)
        if block is not None and not (
            len(block) == 2 and all(type(size) is int and size > 0 for size in block)
        ):
            raise UnsupportedError(
                f"{config.place}: weight_block_size = {shown(block)} is not a size."
            )
        self.block: tuple[int, int] | None = (block[0], block[1]) if block else None

    def matrix(self, checkpoint: Checkpoint, key: str, shape: Sequence[int]) -> Packed | None:
        info = checkpoint.tensors.get(key)
        if info is None or info.dtype != "F8_E4M3":
            return None
        stack = tuple(shape[:1]) if len(shape) == 3 else ()
        total, columns = matrix_shape(
            checkpoint, key, (shape[0] * shape[1], shape[2]) if stack else shape
        )
        if stack and info.shape == (*stack, shape[2], shape[1]) != tuple(shape):
            raise UnsupportedError(
                f"{checkpoint.folder}: {key} is quantised and lies transposed, which is not "
                "implemented."
            )
        rows, name = shape[-2], f"{key}_scale_inv"
        if self.block is not None:
            height, group = min(self.block[0], rows), min(self.block[1], columns)
            if stack and rows % height:
                raise UnsupportedError(
                    f"{checkpoint.folder}: {key} has {rows} rows for each expert, which are not "
                    f"blocks of {height}."
                )
            shapes = [(*stack, -(-rows // height), -(-columns // group))]
        else:
            group = columns
            shapes = [(), (1,), (1, 1), (*stack, rows, 1)]
            if stack:
                shapes += [stack, (*stack, 1), (*stack, 1, 1), (*stack, 2, 1)]
            elif name not in checkpoint.tensors:
                name = f"{key}_scale"
        scales = part(checkpoint, name, shapes, [*FLOATS, "F8_E8M0"])
        if self.block is None:
            height = total // prod(scales.shape)
        scales = replace(scales, shape=(-(-total // height), -(-columns // group)))
        weight = replace(part(checkpoint, key, [tuple(shape)], ["F8_E4M3"]), shape=(total, columns))
        dtype = "e8m0" if scales.dtype == "F8_E8M0" else scales.dtype
        scheme = Scheme("e4m3", 8, group, dtype)
        return _Matrix(key, (total, columns), scheme, (weight, scales), height)

    def ignorable(self, checkpoint: Checkpoint, name: str) -> bool:
        """Scales of activations and of the cache."""
        return left_out(name) is not None


@dataclass(frozen=True, eq=False)
class _Matrix(Packed):
    """height: rows that share a scale."""

    height: int

    def read(self, start: int, stop: int) -> Grouped:
        weight, scales = self.tensors
        block = (self.height, self.scheme.group)
        scale = block_scales(scales, block, self.shape[1], start, stop)
        return Grouped(self.scheme, read_rows(weight, start, stop), scale)
