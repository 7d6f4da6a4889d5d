"""The last hidden states of sequences, for layers that predict further tokens."""

from __future__ import annotations

from dataclasses import dataclass

from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.record import Piece

RECENT = 16  # positions: more than a step that verifies drafts has rows, and the one before them


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """The hidden states of some sequences, [sequence][RECENT][stride] in f32, a position at its
    number modulo RECENT."""

    width: int
    buffer: Buffer

    @classmethod
    def new(cls, device: Device, width: int, sequences: int) -> HiddenStates:
        """Raises OutOfMemoryError."""
        return cls(width, device.buffer(sequences * _nbytes(width), label="last hidden states"))

    def pieces(self, sequence: int) -> list[Piece]:
        """Returns where the states of a sequence lie."""
        nbytes = _nbytes(self.width)
        return [Piece(self.buffer, sequence * nbytes, nbytes)]


def _nbytes(width: int) -> int:
    """Bytes of a sequence; rows are a whole number of eight values, as activations are."""
    return 4 * RECENT * -(-width // 8) * 8
