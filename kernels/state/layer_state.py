"""What a layer keeps of a sequence instead of keys and values, and does not grow with it: the last
inputs of a convolution, and a matrix for each head.

A step's rows are consecutive positions of one sequence or, in a batch, each the next of its own.
Kernels go on from a sequence's state, or from zeros where the first row is at position 0, and leave
the state after the last row, unless the rows have stopped. So nothing has to be cleared to start
anew; but a state cannot forget positions: it goes back only to where it was saved.

Where tokens are drafted a step may have several rows of each sequence, and the state that is left
is that after the first. The inputs of the others are kept: those of tokens that were right go into
the state in the sequence's next step, which says how many they are (recent.wgsl). A state is small
to read and large to keep many of, and a row's inputs are far less ("The Mamba in the Llama", Wang
et al. 2024, does the same).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.record import Copy
from infer.kernels.state.kv_cache import LayerCache


@dataclass(frozen=True)
class StateShape:
    """The sizes of a layer's state: a convolution with so many taps on each of its channels, and
    heads, if there are any, with a matrix [key_dim][value_dim] each. Each of the key_heads serves
    as many neighbouring heads."""

    channels: int
    taps: int
    key_heads: int = 0
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of its buffers, all f32."""
        inputs = 4 * (self.taps - 1) * self.channels
        matrices = 4 * self.heads * self.key_dim * self.value_dim
        return tuple(nbytes for nbytes in (inputs, matrices) if nbytes)

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Bytes of what goes into each of its buffers in a row, all f32: of the heads, what the
        convolution gives, and four values for each."""
        inputs, gates = 4 * self.channels, 16 * self.heads
        return (inputs, inputs + gates)[: len(self.sizes)]


NOTHING = StateShape(channels=0, taps=1)  # of a layer that is an MLP alone


@dataclass(frozen=True, eq=False)
class LayerState:
    """The states of one layer, which cannot be trimmed, for each of some sequences, and copies that
    were saved, each in a place of its own.

    buffers: the last taps - 1 inputs of the convolution [sequence][taps - 1][channels], oldest
    first, and, where there are heads, their matrices [sequence][head][key_dim][value_dim]. saved:
    the same, by places. recent: what went into each, [sequence][recent_rows][value], a row at its
    position modulo recent_rows; none where nothing is drafted.
    """

    shape: StateShape
    buffers: tuple[Buffer, ...]
    saved: tuple[Buffer, ...]
    recent: tuple[Buffer, ...]
    recent_rows: int

    @classmethod
    def new(
        cls,
        device: Device,
        shape: StateShape,
        layer: int,
        sequences: int = 1,
        places: int = 1,
        drafts: int = 0,
    ) -> LayerState:
        """places: of copies. drafts: tokens drafted for a sequence at once, at most. Raises
        OutOfMemoryError."""
        recent_rows = 2 * (1 + drafts) if drafts else 0  # those before, and those of a step
        buffers, saved, recent = (
            tuple(
                device.buffer(count * nbytes, label=f"{kind} of layer {layer}")
                for nbytes in sizes
                if count
            )
            for kind, count, sizes in (
                ("state", sequences, shape.sizes),
                ("saved state", places, shape.sizes),
                ("recent rows", sequences * recent_rows, shape.row_sizes),
            )
        )
        return cls(shape, buffers, saved, recent, recent_rows)

    @property
    def inputs(self) -> Buffer:
        """Of the convolution."""
        return self.buffers[0]

    @property
    def matrices(self) -> Buffer:
        """Of the heads."""
        return self.buffers[1]


Cache = LayerCache | LayerState


def copies(states: Sequence[LayerState], sequence: int, place: int, *, back: bool) -> list[Copy]:
    """What to copy to save all states of a sequence in a place, or to go back to what is there."""
    found = []
    for state in states:
        for own, saved, nbytes in zip(state.buffers, state.saved, state.shape.sizes, strict=True):
            ends = (own, sequence * nbytes), (saved, place * nbytes)
            found.append(Copy(*(ends[::-1] if back else ends), nbytes))
    return found
