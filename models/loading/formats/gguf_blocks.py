"""The blocks that GGUF tensors are packed in (https://github.com/ggml-org/ggml: ggml-common.h,
ggml-quants.c).

Rows are cut into blocks of 32 or 256 columns. In a block of 256, groups of 16 or 32 columns have
scales that are quantised themselves, as integers times an f16 number d; their biases likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.models.loading.checkpoint import Checkpoint
from infer.models.loading.config import RawConfig
from infer.models.loading.formats.format import Format, matrix_shape, wrong_shape
from infer.models.loading.formats.grouped import Grouped, Scheme, from_e8m0, to_signed
from infer.models.loading.formats.packed import Packed
from infer.models.loading.tensors import TensorInfo

Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]
# Codes [blocks, values], scales [blocks, groups], biases like these, and, in blocks of 256, where
# both are int8, the numbers [blocks, 2] that they are multiples of.
Parts = tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None, Halves | None]


@dataclass(frozen=True)
class BlockType:
    """values: columns of a block. nbytes: its bytes. decode: from blocks [blocks, nbytes]."""

    values: int
    nbytes: int
    scheme: Scheme
    decode: Callable[[Bytes], Parts]


@dataclass(frozen=True)
class SwappedColumns(TensorInfo):
    """A matrix with columns [a, b, c] in the file, [b, a, c] on the hub. Floats are read as on the
    hub; blocks, which several of [a, b] may share, as they are, with the order of their columns."""

    sizes: tuple[int, int, int]

    @property
    def order(self) -> NDArray[np.int64]:
        """Where each column of the file is on the hub."""
        a, b, c = self.sizes
        return np.arange(a * b * c).reshape(b, a, c).swapaxes(0, 1).reshape(-1)

    def read_into(self, view: memoryview, start: int = 0) -> None:
        if self.dtype in BLOCKS:
            super().read_into(view, start)
            return
        rows, columns = self.shape
        stride = self.nbytes // rows
        first, last = start // stride, -(-(start + len(view)) // stride)
        whole = np.empty((last - first, columns, stride // columns), np.uint8)
        super().read_into(whole.data.cast("B"), first * stride)
        whole[:, self.order] = whole.copy()
        at = start - first * stride
        view[:] = whole.reshape(-1)[at : at + len(view)].data.cast("B")


class GgufBlocks(Format):
    """The tensors of a GGUF file that hold blocks."""

    method = "gguf"

    def __init__(self, config: RawConfig) -> None:
        """Each tensor of a file says for itself what it holds."""

    def matrix(self, checkpoint: Checkpoint, key: str, shape: Sequence[int]) -> Packed | None:
        info = checkpoint.tensors.get(key)
        if info is None or info.dtype not in BLOCKS:
            return None
        rows, columns = matrix_shape(checkpoint, key, shape)
        if info.shape != (rows, columns):
            raise wrong_shape(info, info.shape, (rows, columns))
        order = info.order if isinstance(info, SwappedColumns) else None
        return _Matrix(key, (rows, columns), BLOCKS[info.dtype].scheme, (info,), order=order)


class _Matrix(Packed):
    def read(self, start: int, stop: int) -> Grouped:
        (info,) = self.tensors
        block, rows = BLOCKS[info.dtype], stop - start
        stride = self.shape[1] // block.values * block.nbytes
        data = np.empty((rows * stride // block.nbytes, block.nbytes), np.uint8)
        info.read_into(data.data.cast("B"), start * stride)
        codes, scales, biases, units = block.decode(data)
        return Grouped(
            self.scheme,
            codes.reshape(rows, -1),
            scales.reshape(rows, -1),
            biases=None if biases is None else biases.reshape(rows, -1),
            units=None if units is None else units.reshape(rows, -1, 2),
            order=self.order,
        )


# Parts of blocks


def _part(blocks: Bytes, start: int, stop: int) -> Bytes:
    """The bytes [start, stop) of each block, contiguous."""
    run = f"V{stop - start}"  # moved as one: numpy is slow on many short runs of bytes
    return np.ascontiguousarray(blocks[:, start:stop].view(run)).view(np.uint8)


def _halves(blocks: Bytes, at: int, count: int = 1) -> Halves:
    """The f16 numbers from a byte on [blocks, count]."""
    return _part(blocks, at, at + 2 * count).view("<f2")


def _scaled(
    scales: NDArray[Any], d: Halves, minima: Bytes | None = None
) -> tuple[NDArray[np.int8], NDArray[np.int8] | None, Halves]:
    """Scales, biases and units from the integers of groups; d: [blocks, 1], or 2 with minima."""
    if minima is None:
        return scales.view(np.int8), None, np.append(d, np.zeros_like(d), axis=1)
    return scales.view(np.int8), -minima.view(np.int8), d


def _planes(packed: Bytes, bits: int, width: int) -> Bytes:
    """Codes of so many bits. Each `width` bytes hold, in their lowest bits, as many consecutive
    codes, in the next bits those that follow, and so on."""
    run = f"V{width}"
    codes = np.empty((packed.size // width, 8 // bits), run)
    for i in range(8 // bits):
        plane = packed >> i * bits
        plane &= (1 << bits) - 1
        codes[:, i] = plane.view(run).reshape(-1)
    return codes.view(np.uint8).reshape(len(packed), -1)


def _joined(low: Bytes, high: Bytes, bits: int) -> Bytes:
    """Codes from their lowest `bits` bits and those above."""
    return low | high * np.uint8(1 << bits)  # numpy shifts bytes left ten times as slowly


def _bits(packed: Bytes) -> Bytes:
    """Bits from the lowest of the first byte on [blocks, 8 * bytes]."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _k_scales(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight scales and eight minima of 6 bits, from 12 bytes, in Q4_K and Q5_K."""
    words = packed.view(np.uint32)
    first = words[:, :2] & 0x3F3F3F3F  # of four scales, then of four minima
    second = words[:, :2] >> 2 & 0x30303030  # their upper bits
    second[:, 0] |= words[:, 2] & 0x0F0F0F0F
    second[:, 1] |= words[:, 2] >> 4 & 0x0F0F0F0F
    both = np.stack([first, second], axis=-1).view(np.uint8)
    return both[:, 0], both[:, 1]


# Blocks of 32


def _q4_0(blocks: Bytes) -> Parts:
    return to_signed(_planes(_part(blocks, 2, 18), 4, 16), 4), _halves(blocks, 0), None, None


def _q4_1(blocks: Bytes) -> Parts:
    return _planes(_part(blocks, 4, 20), 4, 16), _halves(blocks, 0), _halves(blocks, 2), None


def _q5_0(blocks: Bytes) -> Parts:
    codes = _joined(_planes(_part(blocks, 6, 22), 4, 16), _bits(_part(blocks, 2, 6)), 4)
    return to_signed(codes, 5), _halves(blocks, 0), None, None


def _q5_1(blocks: Bytes) -> Parts:
    codes = _joined(_planes(_part(blocks, 8, 24), 4, 16), _bits(_part(blocks, 4, 8)), 4)
    return codes, _halves(blocks, 0), _halves(blocks, 2), None


def _q8_0(blocks: Bytes) -> Parts:
    return _part(blocks, 2, 34).view(np.int8), _halves(blocks, 0), None, None


def _iq4_nl(blocks: Bytes) -> Parts:
    return _planes(_part(blocks, 2, 18), 4, 16), _halves(blocks, 0), None, None


def _mxfp4(blocks: Bytes) -> Parts:
    return _planes(_part(blocks, 1, 17), 4, 16), from_e8m0(_part(blocks, 0, 1)), None, None


# Blocks of 256


def _q2_k(blocks: Bytes) -> Parts:
    packed = _part(blocks, 0, 16)
    scaled = _scaled(packed & np.uint8(15), _halves(blocks, 80, 2), packed >> np.uint8(4))
    return _planes(_part(blocks, 16, 80), 2, 32), *scaled


def _q3_k(blocks: Bytes) -> Parts:
    high, low, packed = _part(blocks, 0, 32), _part(blocks, 32, 96), _part(blocks, 96, 108)
    scales = _joined(_planes(packed[:, :8], 4, 8), _planes(packed[:, 8:], 2, 4), 4)
    codes = _joined(_planes(low, 2, 32), _planes(high, 1, 32), 2)
    return to_signed(codes, 3), *_scaled(to_signed(scales, 6), _halves(blocks, 108))


def _q4_k(blocks: Bytes) -> Parts:
    scales, minima = _k_scales(_part(blocks, 4, 16))
    codes = _planes(_part(blocks, 16, 144), 4, 32)
    return codes, *_scaled(scales, _halves(blocks, 0, 2), minima)


def _q5_k(blocks: Bytes) -> Parts:
    scales, minima = _k_scales(_part(blocks, 4, 16))
    codes = _joined(
        _planes(_part(blocks, 48, 176), 4, 32), _planes(_part(blocks, 16, 48), 1, 32), 4
    )
    return codes, *_scaled(scales, _halves(blocks, 0, 2), minima)


def _q6_k(blocks: Bytes) -> Parts:
    codes = _joined(
        _planes(_part(blocks, 0, 128), 4, 64), _planes(_part(blocks, 128, 192), 2, 32), 4
    )
    return to_signed(codes, 6), *_scaled(_part(blocks, 192, 208), _halves(blocks, 208))


def _iq4_xs(blocks: Bytes) -> Parts:
    scales = _joined(_planes(_part(blocks, 4, 8), 4, 1), _planes(_part(blocks, 2, 4), 2, 1), 4)
    return _planes(_part(blocks, 8, 136), 4, 16), *_scaled(to_signed(scales, 6), _halves(blocks, 0))


def _signed(bits: int, group: int, dtype: str) -> Scheme:
    return Scheme("int", bits, group, dtype, signed=True)


def _biased(bits: int, group: int, dtype: str) -> Scheme:
    return Scheme("int", bits, group, dtype, biases=True)


BLOCKS = {
    "Q4_0": BlockType(32, 18, _signed(4, 32, "f16"), _q4_0),
    "Q4_1": BlockType(32, 20, _biased(4, 32, "f16"), _q4_1),
    "Q5_0": BlockType(32, 22, _signed(5, 32, "f16"), _q5_0),
    "Q5_1": BlockType(32, 24, _biased(5, 32, "f16"), _q5_1),
    "Q8_0": BlockType(32, 34, _signed(8, 32, "f16"), _q8_0),
    "Q2_K": BlockType(256, 84, _biased(2, 16, "int8"), _q2_k),
    "Q3_K": BlockType(256, 110, _signed(3, 16, "int8"), _q3_k),
    "Q4_K": BlockType(256, 144, _biased(4, 32, "int8"), _q4_k),
    "Q5_K": BlockType(256, 176, _biased(5, 32, "int8"), _q5_k),
    "Q6_K": BlockType(256, 210, _signed(6, 16, "int8"), _q6_k),
    "IQ4_NL": BlockType(32, 18, Scheme("iq4nl", 4, 32, "f16"), _iq4_nl),
    "IQ4_XS": BlockType(256, 136, Scheme("iq4nl", 4, 32, "int8"), _iq4_xs),
    "MXFP4": BlockType(32, 17, Scheme("mxfp4", 4, 32, "e8m0"), _mxfp4),
}
