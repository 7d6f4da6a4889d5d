"""The last hidden states of sequences, for layers that predict further tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.record import Copy

RECENT = 16  # positions: more than a step that verifies drafts has rows, and the one before them


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """The hidden states of some sequences, [sequence][RECENT][stride] in f32, a position at its
    number modulo RECENT; and saved copies, each in a place of its own."""

    width: int
    buffer: Buffer
    saved: Buffer | None

    @classmethod
    def new(cls, device: Device, width: int, sequences: int, places: int) -> HiddenStates:
        """places: of copies. Raises OutOfMemoryError."""
        nbytes = _nbytes(width)
        saved = device.buffer(places * nbytes, label="saved hidden states") if places else None
        kept = device.buffer(sequences * nbytes, label="last hidden states")
        return cls(width, kept, saved)

    def copies(self, sequence: int, place: int, *, back: bool) -> Sequence[Copy]:
        """Returns the copies that save a sequence's states at a place or, with back, restore
        them."""
        if self.saved is None:
            return ()
        nbytes = _nbytes(self.width)
        ends = (self.buffer, sequence * nbytes), (self.saved, place * nbytes)
        return (Copy(*(ends[::-1] if back else ends), nbytes),)


def _nbytes(width: int) -> int:
    """Bytes of a sequence; rows are a whole number of eight values, as activations are."""
    return 4 * RECENT * -(-width // 8) * 8
