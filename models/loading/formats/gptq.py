"""GPTQ (Frantar et al. 2022), as AutoGPTQ and GPTQModel publish it, and AutoRound (Cheng et al.
2023) where its packing_format says so.

For a module of `columns` inputs and `rows` outputs, with codes of b bits as one stream in int32:

    qweight  int32 [columns * b / 32, rows]   codes, packed along the inputs
    qzeros   int32 [groups, rows * b / 32]    zero points, packed along the outputs
    scales   float [groups, rows]
    g_idx    int32 [columns]                  the group of each input

A value is scale * (code - zero). The layout "gptq" stores zero - 1, which wraps around in b bits;
"gptq_v2" stores the zero point. Symmetric quantisation has the zero point 2^(b - 1) everywhere:
then codes are read as signed integers. With act-order (desc_act) the inputs of a group are not
neighbours; see Grouped.order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.errors import CheckpointError, UnsupportedError
from infer.models.loading.checkpoint import Checkpoint
from infer.models.loading.config import RawConfig
from infer.models.loading.formats.format import FLOATS, Format, matrix_shape, part
from infer.models.loading.formats.grouped import Grouped, Scheme, split, to_signed, unpack
from infer.models.loading.formats.packed import Packed, column_order, read_columns, read_flat


class Gptq(Format):
    """2, 3, 4 and 8 bits; groups of any size; symmetric or not; act-order or not."""

    method = "gptq"

    def __init__(self, config: RawConfig) -> None:
        config.expect("bits", 4, 2, 3, 8)
        self.bits: int = config.get("bits", 4, int)
        self.group: int = config.get("group_size", 128, int)
        if self.group != -1 and self.group < 1:
            raise UnsupportedError(f"{config.place}: group_size = {self.group} is not a size.")
        self.symmetric: bool = config.get("sym", True, bool)
        self.act_order: bool = config.get("desc_act", False, bool)
        config.expect("is_marlin_format", False)
        config.expect("pack_dtype", "int32")
        key = "checkpoint_format" if "checkpoint_format" in config.values else "format"
        config.expect(key, "gptq", "gptq_v2")
        self.zero_shift = 1 if config.get(key, "gptq") == "gptq" else 0
        if config.get("quant_method", None, str) == "auto-round":
            _check_auto_round(config)
        overrides = config.get("dynamic", {}, dict)
        if any(not rule.startswith("-:") for rule in overrides):  # "-:" leaves modules as they are
            raise UnsupportedError(f"{config.place}: dynamic, sizes by module, is not implemented.")

    def matrix(self, checkpoint: Checkpoint, key: str, shape: Sequence[int]) -> Packed | None:
        module = key.removesuffix(".weight")
        if f"{module}.qweight" not in checkpoint.tensors:
            return None
        rows, columns = matrix_shape(checkpoint, key, shape)
        bits, group = self.bits, columns if self.group == -1 else min(self.group, columns)
        if rows % 32 or columns % 32:
            raise UnsupportedError(
                f"{checkpoint.folder}: {module} is ({rows}, {columns}); GPTQ packs multiples of 32."
            )
        groups = -(-columns // group)
        weight = part(checkpoint, f"{module}.qweight", [(columns * bits // 32, rows)], ["I32"])
        zeros = part(checkpoint, f"{module}.qzeros", [(groups, rows * bits // 32)], ["I32"])
        scales = part(checkpoint, f"{module}.scales", [(groups, rows)], FLOATS)
        tensors, order = [weight, zeros, scales], None
        if self.act_order or f"{module}.g_idx" in checkpoint.tensors:
            tensors.append(part(checkpoint, f"{module}.g_idx", [(columns,)], ["I32"]))
            order = column_order(tensors[-1], group)
        scheme = Scheme(
            "int", bits, group, scales.dtype, signed=self.symmetric, zeros=not self.symmetric
        )
        return _Matrix(key, (rows, columns), scheme, tuple(tensors), self.zero_shift, order=order)

    def ignorable(self, checkpoint: Checkpoint, name: str) -> bool:
        """A bias of nothing but zeros, which AutoGPTQ gives to every module."""
        info = checkpoint.tensors[name]
        packed = f"{name.removesuffix('.bias')}.qweight" in checkpoint.tensors
        if not (name.endswith(".bias") and packed and info.dtype in FLOATS):
            return False
        return not read_flat(info, 0, int(np.prod(info.shape))).any()


def _check_auto_round(config: RawConfig) -> None:
    """Its other layouts have other zero points, or other numbers; lists of its layers are of those
    that stay floats."""
    config.get("packing_format", kind=str)
    config.expect("packing_format", "auto_round:auto_gptq", "auto_round:gptq")
    config.expect("data_type", "int")
    config.expect("act_bits", None, 16)
    for key in ("super_bits", "super_group_size", "rotation_config", "spinquant_config"):
        config.expect(key, None)
    layers = config.section("extra_config")
    if any(layers.section(name).get("bits", 0, int) < 16 for name in layers.values):
        raise UnsupportedError(f"{layers.place}: sizes by layer are not implemented.")


@dataclass(frozen=True, eq=False)
class _Matrix(Packed):
    zero_shift: int
    by_columns = True

    def read(self, start: int, stop: int) -> Grouped:
        weight, zeros, scales = self.tensors[:3]
        bits, columns = self.scheme.bits, self.shape[1]
        words = read_columns(weight, start, stop)
        if self.order is None or 32 % bits:
            codes = unpack(_bytes(words.T), bits, columns)
            codes = codes if self.order is None else codes.take(self.order, axis=1)
        else:  # whole columns move faster
            of_columns = split(words, bits, range(0, 32, bits)).reshape(columns, -1)
            codes = np.ascontiguousarray(of_columns[self.order].T)
        first, last = start // 32, -(-stop // 32)  # 32 codes are whole int32
        packed = _bytes(read_columns(zeros, first * bits, last * bits))
        stored = unpack(packed, bits, (last - first) * 32)[:, start - first * 32 :]
        zero = (stored[:, : stop - start].T + np.uint8(self.zero_shift)) & np.uint8((1 << bits) - 1)
        scale = np.ascontiguousarray(read_columns(scales, start, stop).T)
        if not self.scheme.signed:
            return Grouped(self.scheme, codes, scale, zero.astype(np.int16), order=self.order)
        if (zero != 1 << (bits - 1)).any():
            raise CheckpointError(
                f"{zeros.file}: {zeros.name} has other zero points than {1 << (bits - 1)}, but the "
                "config says that quantisation is symmetric (sym). One of them is of another model."
            )
        return Grouped(self.scheme, to_signed(codes, bits), scale, order=self.order)


def _bytes(words: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(words).view(np.uint8)
