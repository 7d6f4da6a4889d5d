"""compressed-tensors, as llm-compressor publishes it
(https://github.com/vllm-project/compressed-tensors).

For a module of `columns` inputs and `rows` outputs, and codes of b bits:

| format               | weight                                           |
| -------------------- | ------------------------------------------------ |
| pack-quantized       | weight_packed, int32 [rows, columns * b / 32]    |
| int-quantized        | weight, int8 [rows, columns]                     |
| float-quantized      | weight, E4M3 [rows, columns]                     |
| mxfp4-pack-quantized | weight_packed, E2M1 in uint8 [rows, columns / 2] |
| nvfp4-pack-quantized | the same                                         |

    weight_scale       float [rows, groups], [rows, 1], [blocks, blocks] or [1]
    weight_zero_point  asymmetric: int8 like the scales, or where packed, int32 along the rows
    weight_g_idx       int32 [columns], the group of each column, with actorder "group"
    weight_shape       int64 [2], where packed

A value is scale * (code - zero). Packed codes and zero points are stored plus 2^(b - 1). E2M1 has
the first of two in the low nibble, and scales as uint8: E8M0 for 32 columns (mxfp4), or E4M3 for 16
(nvfp4), which are divided by weight_global_scale, float32 [1].

How the config quantises activations and the cache is not used. The weights are used as they are:
those of integers with activations in int8 with scales of their own, as all integers here (see
`INTEGERS`), and those of E4M3 with activations as they come.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infer.kernels.errors import CheckpointError, UnsupportedError
from infer.kernels.gpu.codes import TABLES
from infer.models.loading.checkpoint import Checkpoint
from infer.models.loading.config import RawConfig, shown
from infer.models.loading.formats.format import (
    ACTIVATIONS,
    CACHE,
    FLOATS,
    Format,
    left_out,
    matrix_shape,
    part,
    wrong_shape,
)
from infer.models.loading.formats.grouped import (
    Grouped,
    Scheme,
    from_e8m0,
    to_signed,
    unpack,
)
from infer.models.loading.formats.packed import (
    Packed,
    block_scales,
    column_order,
    read_flat,
    read_rows,
)
from infer.models.loading.tensors import TensorInfo

_FP4 = {"mxfp4-pack-quantized": ("group", 32), "nvfp4-pack-quantized": ("tensor_group", 16)}
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", *_FP4)


@dataclass(frozen=True)
class _Group:
    """A group of modules in the config. size: columns that share a scale, with the strategy
    "group"; block: rows and columns that do, with "block"; else 0."""

    targets: tuple[str, ...]
    packed: bool
    kind: str
    bits: int
    symmetric: bool
    strategy: str
    size: int
    block: tuple[int, int]
    ordered: bool

    def width(self, columns: int) -> int:
        """Columns that share a scale."""
        return {"group": self.size, "block": self.block[1]}.get(self.strategy, columns)

    def height(self, rows: int) -> int:
        """Rows that share a scale."""
        return {"tensor": rows, "block": self.block[0]}.get(self.strategy, 1)

    def scale_shapes(self, rows: int, groups: int) -> list[tuple[int, ...]]:
        """The shapes that scales may have."""
        if self.strategy == "tensor":
            return [(1,), (), (1, 1)]
        blocks = (-(-rows // self.height(rows)), groups)
        return [blocks, (rows,)] if self.strategy == "channel" else [blocks]


class CompressedTensors(Format):
    """Integers of 8 bits or, packed, of 4; E4M3 and E2M1; scales for tensors, channels, groups or
    blocks."""

    method = "compressed-tensors"

    def __init__(self, config: RawConfig) -> None:
        self.place = config.place
        config.expect("transform_config", {})
        config.section("sparsity_config").expect("format", "dense")
        whole = config.get("format", "mixed-precision", str)
        ignored: set[str] = set()
        if config.get("kv_cache_scheme", None, dict):
            ignored.add(CACHE)
        self.groups = []
        groups = config.section("config_groups")
        for group in map(groups.section, groups.values):
            if group.get("input_activations", None, dict):
                ignored.add(ACTIVATIONS)
            group.expect("output_activations", None)
            self.groups.append(_read_group(group, group.get("format", whole, str)))
        self.ignored = tuple(sorted(ignored))

    def matrix(self, checkpoint: Checkpoint, key: str, shape: Sequence[int]) -> Packed | None:
        module = key.removesuffix(".weight")
        if f"{module}.weight_scale" not in checkpoint.tensors:
            return None
        rows, columns = matrix_shape(checkpoint, key, shape)
        group = self._group_of(module)
        if group.kind == "mxfp4":
            return _read_fp4(checkpoint, key, (rows, columns), group.size)
        width, bits = group.width(columns), group.bits
        groups = -(-columns // width)
        scale_shapes = group.scale_shapes(rows, groups)
        scales = part(checkpoint, f"{module}.weight_scale", scale_shapes, FLOATS)
        tensors, zeros, order = [scales], None, None
        if group.packed:
            packed = (rows, -(-columns * bits // 32))
            weight = part(checkpoint, f"{module}.weight_packed", [packed], ["I32"])
            stored = part(checkpoint, f"{module}.weight_shape", [(2,)], ["I64", "I32"])
            if (found := tuple(read_rows(stored).tolist())) != (rows, columns):
                raise wrong_shape(stored, found, (rows, columns))
            tensors.append(stored)
        else:
            dtype = "I8" if group.kind == "int" else "F8_E4M3"
            weight = part(checkpoint, key, [(rows, columns)], [dtype])
        tensors.append(weight)
        if not group.symmetric:
            packed_zeros = (-(-rows * bits // 32), groups)
            shapes, dtype = ([packed_zeros], "I32") if group.packed else (scale_shapes, "I8")
            zeros = part(checkpoint, f"{module}.weight_zero_point", shapes, [dtype])
            tensors.append(zeros)
        if group.ordered:
            tensors.append(part(checkpoint, f"{module}.weight_g_idx", [(columns,)], ["I32"]))
            order = column_order(tensors[-1], width)
        integers = group.kind == "int"
        scheme = Scheme(
            group.kind, bits, width, scales.dtype, signed=integers, zeros=not group.symmetric
        )
        parts = (weight, scales, zeros, group.height(rows))
        return _Matrix(key, (rows, columns), scheme, tuple(tensors), *parts, order=order)

    def ignorable(self, checkpoint: Checkpoint, name: str) -> bool:
        """Scales of activations and of the cache; zero points of zero, which older files have."""
        info = checkpoint.tensors[name]
        if name.endswith(".weight_zero_point") and info.dtype == "I8":
            return not read_flat(info, 0, info.nbytes).any()
        return left_out(name) is not None

    def _group_of(self, module: str) -> _Group:
        """Names count before patterns, and these before classes of modules."""
        for matches in (_by_name, _by_pattern, _by_class):
            for group in self.groups:
                if any(matches(target, module) for target in group.targets):
                    return group
        raise UnsupportedError(f"{self.place}: {module} is quantised, but no group has it.")


def _by_name(target: str, module: str) -> bool:
    return target == module


def _by_pattern(target: str, module: str) -> bool:
    return target.startswith("re:") and re.match(target[3:], module) is not None


# Parts of a pattern that make it take for ever.
_REPETITION, _ENDLESS = re.compile(r"[*+{]"), re.compile(r"\)[*+{]")


def _by_class(target: str, module: str) -> bool:
    return target == ("Embedding" if module.endswith("embed_tokens") else "Linear")


def _read_group(config: RawConfig, layout: str) -> _Group:
    if layout not in _FORMATS:
        raise UnsupportedError(
            f"{config.place}: the format {shown(layout)} is not implemented "
            f"(only {', '.join(_FORMATS)})."
        )
    targets = config.items("targets", kind=str)
    for pattern in (target[3:] for target in targets if target.startswith("re:")):
        try:
            re.compile(pattern)
            endless = _ENDLESS.search(pattern) or len(_REPETITION.findall(pattern)) > 4
        except (re.error, OverflowError, RecursionError):
            endless = True
        if endless:
            raise UnsupportedError(
                f"{config.place}: the target {shown(pattern)} is not a pattern, or repeats too "
                "much."
            )
    weights = config.section("weights")
    weights.expect("dynamic", False)
    weights.expect("type", "int", "float")
    if layout in _FP4:
        return _read_fp4_group(weights, tuple(targets), *_FP4[layout])
    integers, packed = weights.get("type", "int", str) == "int", layout == "pack-quantized"
    bits = weights.get("num_bits", 8, int)
    if packed:
        weights.expect("type", "int")
        weights.expect("num_bits", 8, 4)
    elif not integers:
        weights.expect("num_bits", 8)
    elif not 2 <= bits <= 8:
        raise UnsupportedError(f"{weights.place}: {bits} bits are not implemented.")
    group = weights.get("group_size", None, int)
    default = "tensor" if group is None else "group" if group > 0 else "channel"
    strategy = weights.get("strategy", default, str)
    weights.expect("strategy", default, "tensor", "channel", "group", "block")
    if strategy == "group" and (group is None or group < 1):
        raise UnsupportedError(f"{weights.place}: group_size = {group} is not a size.")
    block = weights.get("block_structure", [0, 0], list)
    if strategy == "block" and not (
        len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise UnsupportedError(f"{weights.place}: block_structure = {shown(block)} is not a size.")
    symmetric = weights.get("symmetric", True, bool)
    if not symmetric and (strategy not in ("group", "channel") or not integers):
        raise UnsupportedError(f"{weights.place}: zero points of a {strategy} are not implemented.")
    order = weights.get("actorder", None)
    weights.expect("actorder", None, False, "weight", "static", "group", "dynamic")
    return _Group(
        tuple(targets),
        packed,
        "int" if integers else "e4m3",
        bits,
        symmetric,
        strategy,
        group if strategy == "group" and group else 0,
        (block[0], block[1]) if strategy == "block" else (0, 0),
        order in ("group", "dynamic"),
    )


def _read_fp4_group(
    weights: RawConfig, targets: tuple[str, ...], strategy: str, size: int
) -> _Group:
    weights.expect("type", "float")
    weights.expect("num_bits", 4)
    weights.expect("strategy", strategy)
    weights.expect("group_size", size)
    weights.expect("symmetric", True)
    weights.expect("actorder", None, False)
    return _Group(targets, True, "mxfp4", 4, True, "group", size, (0, 0), False)


def _read_fp4(checkpoint: Checkpoint, key: str, shape: tuple[int, int], size: int) -> Packed:
    module, (rows, columns) = key.removesuffix(".weight"), shape
    if columns % size:
        raise UnsupportedError(
            f"{checkpoint.folder}: {module} has {columns} columns, no multiple of {size}."
        )
    weight = part(checkpoint, f"{module}.weight_packed", [(rows, columns // 2)], ["U8"])
    dtype = "U8" if size == 32 else "F8_E4M3"
    scales = part(checkpoint, f"{module}.weight_scale", [(rows, columns // size)], [dtype])
    if size == 32:
        return _Fp4(key, shape, Scheme("mxfp4", 4, size, "e8m0"), (weight, scales))
    divisor = part(checkpoint, f"{module}.weight_global_scale", [(1,), ()], ["f32"])
    return _Fp4(key, shape, Scheme("mxfp4", 4, size, "f32"), (weight, scales, divisor))


class _Fp4(Packed):
    def read(self, start: int, stop: int) -> Grouped:
        weight, scales, *divisors = self.tensors
        codes = unpack(read_rows(weight, start, stop), 4, self.shape[1])
        scale = read_rows(scales, start, stop)
        if not divisors:
            return Grouped(self.scheme, codes, from_e8m0(scale))
        divisor = read_flat(divisors[0], 0, 1)
        if not 0 < divisor[0] < np.inf:
            raise CheckpointError(
                f"{divisors[0].file}: {divisors[0].name} is {divisor[0]}, by which nothing can be "
                "divided. Download the model again."
            )
        return Grouped(self.scheme, codes, TABLES["e4m3"][scale] / divisor)


@dataclass(frozen=True, eq=False)
class _Matrix(Packed):
    """height: rows that share a scale."""

    weight: TensorInfo
    scales: TensorInfo
    zeros: TensorInfo | None
    height: int

    def read(self, start: int, stop: int) -> Grouped:
        scheme, columns = self.scheme, self.shape[1]
        codes = read_rows(self.weight, start, stop)
        if self.weight.dtype == "I32":
            codes = to_signed(unpack(codes.view(np.uint8), scheme.bits, columns), scheme.bits)
        if self.order is not None:
            codes = codes.take(self.order, axis=1)
        block = (self.height, scheme.group)
        scale = block_scales(self.scales, block, columns, start, stop)
        zero = None if self.zeros is None else self._zeros(self.zeros, start, stop)
        return Grouped(scheme, codes, scale, zero, order=self.order)

    def _zeros(self, info: TensorInfo, start: int, stop: int) -> NDArray[np.int16]:
        if info.dtype == "I8":
            return read_rows(info, start, stop).reshape(stop - start, -1).astype(np.int16)
        bits, first = self.scheme.bits, start // 32  # 32 codes are whole int32
        words = read_rows(info, first * bits, min(-(-stop // 32) * bits, info.shape[0]))
        packed = np.ascontiguousarray(words.T).view(np.uint8)
        codes = unpack(packed, bits, stop - 32 * first)[:, start - 32 * first :]
        return to_signed(codes, bits).T.astype(np.int16)
