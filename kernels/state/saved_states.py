"""Saved copies of the states of sequences (`layer_state`, `hidden`), from which other sequences go
on that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.record import Copy


class Part(NamedTuple):
    """One buffer of the states of all sequences, of `nbytes` for each, one behind the other."""

    buffer: Buffer
    nbytes: int


class SavedStates:
    """Copies of all parts of a sequence's state, in numbered places. A place is one buffer: the
    parts, one behind the other. It has memory from its first use on, the first few at once."""

    def __init__(self, device: Device, parts: Sequence[Part], places: int) -> None:
        """places: that have memory at once. Raises OutOfMemoryError."""
        self._device, self._parts = device, tuple(parts)
        self.nbytes = sum(part.nbytes for part in parts)  # of a place
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

    def copies(self, sequence: int, place: int, *, back: bool) -> list[Copy]:
        """Returns the copies that save the state of a sequence in a place or, with back, restore
        it."""
        found, at = list[Copy](), 0
        for buffer, nbytes in self._parts:
            ends = (buffer, sequence * nbytes), (self._buffers[place], at)
            found.append(Copy(*(ends[::-1] if back else ends), nbytes))
            at += nbytes
        return found
