"""A tensor of a checkpoint: where its bytes lie in the file, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from infer.kernels.errors import CheckpointError
from infer.models.loading.files import open_file


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: nbytes bytes from byte `offset` of `file` on, row-major and little-endian.

    dtype is "f32", "f16" or "bf16", or what the file calls another one, as in "F8_E4M3".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    def part(self, name: str, start: int, shape: tuple[int, ...]) -> TensorInfo:
        """Rows from `start` on as a tensor of its own. The rows of a stack of matrices are those of
        all of them."""
        stride = self.nbytes // (prod(self.shape[:-1]) if len(self.shape) > 1 else self.shape[0])
        rows = prod(shape[:-1]) if len(self.shape) > 1 else shape[0]
        offset = self.offset + start * stride
        return TensorInfo(name, self.dtype, shape, self.file, offset, rows * stride)

    def held(self) -> HeldTensor:
        """Returns a tensor that is read whole into memory. Raises CheckpointError, as read_into
        does."""
        data = np.empty(self.nbytes, np.uint8)
        self.read_into(data.data)
        own = (self.name, self.dtype, self.shape, self.file, self.offset, self.nbytes)
        return HeldTensor(*own, data)

    def read_into(self, view: memoryview, start: int = 0) -> None:
        """Fill `view` with the bytes of the tensor from byte `start` on. Safe in several threads.

        Raises CheckpointError when the file has changed or cannot be read.
        """
        done = 0
        try:
            with open_file(self.file) as file:
                file.seek(self.offset + start)
                while done < len(view):
                    count = file.readinto(view[done:])
                    if not count:
                        raise CheckpointError(
                            f"{self.file} ends inside the tensor {self.name}: it was cut or "
                            f"replaced while it was being read. Download it again."
                        )
                    done += count
        except OSError as error:
            raise CheckpointError(
                f"{self.file} could not be read ({error.strerror}). Check the disk and the file's "
                "permissions, or download it again."
            ) from error


_AT_ONCE = 16 << 20  # bytes compared at a time


def same_bytes(a: TensorInfo, b: TensorInfo) -> bool:
    """Whether two tensors are equal, byte by byte, as they lie in the files. Raises
    CheckpointError, as read_into does."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    starts = range(0, 0 if a == b else a.nbytes, _AT_ONCE)
    return all(_bytes(a, start) == _bytes(b, start) for start in starts)


def _bytes(tensor: TensorInfo, start: int) -> bytearray:
    data = bytearray(min(_AT_ONCE, tensor.nbytes - start))
    tensor.read_into(memoryview(data), start)
    return data


@dataclass(frozen=True)
class HeldTensor(TensorInfo):
    """A tensor whose bytes are in memory."""

    data: NDArray[np.uint8] = field(repr=False, compare=False)

    def held(self) -> HeldTensor:
        return self

    def read_into(self, view: memoryview, start: int = 0) -> None:
        view[:] = self.data.data[start : start + len(view)]
