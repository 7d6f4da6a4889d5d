"""bitsandbytes: NF4 (QLoRA, Dettmers et al. 2023) and int8 (LLM.int8(), Dettmers et al. 2022).

NF4, for a weight W of n = rows * columns values in blocks of b, counted through all rows:

    W                                      uint8 [n / 2, 1]   the first of two in the high nibble
    W.absmax                               float32 or, quantised, uint8 [n / b]
    W.quant_map                            float32 [16]
    W.nested_absmax, W.nested_quant_map    float32 [n / b / 256], [256], of a quantised absmax
    W.quant_state.bitsandbytes__nf4        JSON as uint8: b, shape, nested_offset

A value is scale * quant_map[code]; the scale is absmax or, if that is quantised,
nested_quant_map[absmax] * nested_absmax + nested_offset, each step rounded to float32.

int8, for a weight X.weight:

    X.weight  int8 [rows, columns]
    X.SCB     float32 [rows], the largest magnitude of each row

A value is code * (SCB / 127). LLM.int8() also quantises the rows of activations, but for columns of
outliers; here each 16 or 32 columns of a row have a scale, as with all weights of integers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer.kernels.errors import CheckpointError, UnsupportedError
from infer.kernels.gpu.codes import TABLES
from infer.models.loading.checkpoint import Checkpoint
from infer.models.loading.config import RawConfig
from infer.models.loading.formats.format import ACTIVATIONS, Format, matrix_shape, part, wrong_shape
from infer.models.loading.formats.grouped import Floats, Grouped, Scheme, unpack
from infer.models.loading.formats.packed import Packed, read_flat, read_rows
from infer.models.loading.tensors import TensorInfo

_STATE = ".quant_state.bitsandbytes__nf4"
_STATE_BYTES = 1 << 16  # far more than there ever are


class BitsAndBytes(Format):
    """NF4 whose blocks do not span rows, and int8."""

    method = "bitsandbytes"

    def __init__(self, config: RawConfig) -> None:
        self.int8: bool = config.get("load_in_8bit", False, bool)
        if self.int8:
            self.ignored = (ACTIVATIONS,)
        else:
            config.expect("load_in_4bit", True)
            config.expect("bnb_4bit_quant_type", "nf4")
            config.expect("bnb_4bit_quant_storage", "uint8")

    def matrix(self, checkpoint: Checkpoint, key: str, shape: Sequence[int]) -> Packed | None:
        if self.int8:
            name = f"{key.removesuffix('.weight')}.SCB"
            if name not in checkpoint.tensors:
                return None
            rows, columns = matrix_shape(checkpoint, key, shape)
            weight = part(checkpoint, key, [(rows, columns)], ["I8"])
            scales = part(checkpoint, name, [(rows,)], ["f32"])
            scheme = Scheme("int", 8, columns, "f32", signed=True)
            return _Int8(key, (rows, columns), scheme, (weight, scales))
        if f"{key}{_STATE}" not in checkpoint.tensors:
            return None
        return _read_nf4(checkpoint, key, matrix_shape(checkpoint, key, shape))

    def ignorable(self, checkpoint: Checkpoint, name: str) -> bool:
        """weight_format says how GPUs want int8 laid out; files have rows."""
        return self.int8 and name.endswith(".weight_format")


class _Int8(Packed):
    def read(self, start: int, stop: int) -> Grouped:
        weight, scales = self.tensors
        scale = np.divide(read_rows(scales, start, stop)[:, None], 127, dtype=np.float32)
        return Grouped(self.scheme, read_rows(weight, start, stop), scale)


def _read_nf4(checkpoint: Checkpoint, key: str, shape: tuple[int, int]) -> Packed:
    rows, columns = shape
    info = checkpoint.tensors[key + _STATE]
    state = _read_state(info)
    block = state.get("blocksize")
    if type(block) is not int or block < 1 or columns % block:
        raise UnsupportedError(
            f"{info.file}: {key} has {columns} columns, no multiple of its blocks of {block}."
        )
    if state.get("shape") != [rows, columns]:
        raise wrong_shape(info, state.get("shape"), [rows, columns])
    count = rows * columns // block
    weight = part(checkpoint, key, [(rows * columns // 2, 1)], ["U8"])
    table = part(checkpoint, f"{key}.quant_map", [(16,)], ["f32"])
    if not np.array_equal(read_rows(table), TABLES["nf4"]):
        raise UnsupportedError(f"{info.file}: {table.name} is not the table of NF4.")
    absmax = part(checkpoint, f"{key}.absmax", [(count,)], ["f32", "U8"])
    tensors, nested = [weight, absmax, table, info], None
    if absmax.dtype == "U8":
        size, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if type(size) is not int or size < 1 or type(offset) not in (int, float):
            raise CheckpointError(f"{info.file}: {info.name} lacks the scales' own scales.")
        outer = part(checkpoint, f"{key}.nested_absmax", [(-(-count // size),)], ["f32"])
        inner = part(checkpoint, f"{key}.nested_quant_map", [(256,)], ["f32"])
        tensors += [outer, inner]
        nested = _Nested(outer, inner, size, np.float32(offset))
    return _Nf4(key, shape, Scheme("nf4", 4, block, "f32"), tuple(tensors), nested)


def _read_state(info: TensorInfo) -> dict[str, Any]:
    """The JSON in a tensor."""
    try:
        if info.dtype != "U8" or info.nbytes > _STATE_BYTES:
            raise ValueError(f"{info.nbytes} bytes of {info.dtype}")
        state = json.loads(read_flat(info, 0, info.nbytes).tobytes())
        if not isinstance(state, dict):
            raise ValueError("no object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{info.file}: {info.name} is damaged ({error}).") from error
    return state


@dataclass(frozen=True, eq=False)
class _Nested:
    """A quantised absmax: it is map[absmax] * outer + offset, in blocks of `size`."""

    outer: TensorInfo
    map: TensorInfo
    size: int
    offset: np.float32

    def decode(self, codes: Any, start: int) -> Floats:
        """The values of codes from number `start` on."""
        first, stop = start // self.size, start + len(codes)
        outer = read_rows(self.outer, first, -(-stop // self.size))
        spread = np.repeat(outer, self.size)[start - first * self.size :][: len(codes)]
        scaled: Floats = read_rows(self.map)[codes] * spread
        return scaled + self.offset


@dataclass(frozen=True, eq=False)
class _Nf4(Packed):
    nested: _Nested | None

    def read(self, start: int, stop: int) -> Grouped:
        weight, absmax = self.tensors[:2]
        columns, groups = self.shape[1], self.shape[1] // self.scheme.group
        packed = read_flat(weight, start * columns // 2, stop * columns // 2)
        swapped = packed * np.uint8(16) | packed >> np.uint8(4)  # shifts to the left are slow
        codes = unpack(swapped.reshape(stop - start, -1), 4, columns)
        scale = read_flat(absmax, start * groups, stop * groups)
        if self.nested is not None:
            scale = self.nested.decode(scale, start * groups)
        return Grouped(self.scheme, codes, scale.reshape(stop - start, groups))
