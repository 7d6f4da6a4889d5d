"""Saved copies of the states of sequences (`layer_state`, `hidden`), from which other sequences go
on that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.record import Copy, Piece


class State(Protocol):
    """A state that is kept of each sequence."""

    def pieces(self, sequence: int) -> list[Piece]:
        """Returns where it lies, of the same sizes for all sequences."""


class SavedStates:
    """Copies of some states of a sequence, in numbered places. A place is one buffer: the states,
    one behind the other. It has memory from its first use on, the first few at once."""

    def __init__(self, device: Device, states: Sequence[State], places: int) -> None:
        """places: that have memory at once. Raises OutOfMemoryError."""
        self._device, self._states = device, tuple(states)
        self.nbytes = sum(piece.nbytes for state in states for piece in state.pieces(0))
        self._buffers: list[Buffer] = []
        self.reserve(places)

    @property
    def places(self) -> int:
        """Places that have memory."""
        return len(self._buffers)

    def reserve(self, places: int) -> None:
        """Have memory for at least so many places. Raises OutOfMemoryError."""
        while len(self._buffers) < places:
            label = f"saved state {len(self._buffers)}"
            self._buffers.append(self._device.buffer(self.nbytes, label=label))

    def pieces(self, place: int) -> list[Piece]:
        """Returns where a saved state lies."""
        return [Piece(self._buffers[place], 0, self.nbytes)]

    def copies(self, sequence: int, place: int, *, back: bool) -> list[Copy]:
        """Returns the copies that save the state of a sequence in a place or, with back, restore
        it."""
        found, at = list[Copy](), 0
        for state in self._states:
            for buffer, offset, nbytes in state.pieces(sequence):
                ends = (buffer, offset), (self._buffers[place], at)
                found.append(Copy(*(ends[::-1] if back else ends), nbytes))
                at += nbytes
        return found
