"""The state that a layer keeps of a sequence instead of keys and values. It does not grow with the
sequence: the last inputs of a convolution, and a matrix for each head.

A step's rows are consecutive positions of one sequence or, in a batch, the next position of each.
Kernels go on from a sequence's state, or from zeros if the first row is at position 0, and leave
the state after the last row, unless the rows have stopped. So nothing has to be cleared to begin
anew. But a state cannot forget positions: it can only go back to where it was saved
(`saved_states`).

With drafts a step may have several rows of each sequence, and leaves the state after the first of
them. The inputs of the other rows are kept. Those of tokens that were right enter the state in the
sequence's next step, which says how many they are (recent.wgsl). A state is small to read but large
to keep many of, and a row's inputs are far smaller ("The Mamba in the Llama", Wang et al. 2024,
does the same).
"""

from __future__ import annotations

from dataclasses import dataclass

from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.record import Piece
from infer.kernels.state.kv_cache import LayerCache


@dataclass(frozen=True)
class StateShape:
    """The sizes of a layer's state: a convolution with so many taps on each of its channels, and,
    if there are heads, a matrix [key_dim][value_dim] of each. Each of the key_heads serves as many
    neighbouring heads."""

    channels: int
    taps: int
    key_heads: int = 0
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of its buffers, all f32."""
        inputs = 4 * (self.taps - 1) * self.channels
        matrices = 4 * self.heads * self.key_dim * self.value_dim
        return tuple(nbytes for nbytes in (inputs, matrices) if nbytes)

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """The bytes of a row's inputs for each of its buffers, all f32: of the convolution, and,
        for the heads, its outputs and four values for each head."""
        inputs, gates = 4 * self.channels, 16 * self.heads
        return (inputs, inputs + gates)[: len(self.sizes)]


NOTHING = StateShape(channels=0, taps=1)  # of a layer that is an MLP alone


@dataclass(frozen=True, eq=False)
class LayerState:
    """The states of one layer, for each of some sequences.

    buffers: the last taps - 1 inputs of the convolution [sequence][taps - 1][channels], the oldest
    first, and, if there are heads, their matrices [sequence][head][key_dim][value_dim]. recent: the
    inputs of recent rows, [sequence][recent_rows][value], a row at its position modulo recent_rows;
    none if nothing is drafted.
    """

    shape: StateShape
    buffers: tuple[Buffer, ...]
    recent: tuple[Buffer, ...]
    recent_rows: int

    @classmethod
    def new(
        cls,
        device: Device,
        shape: StateShape,
        layer: int,
        sequences: int = 1,
        drafts: int = 0,
    ) -> LayerState:
        """drafts: the most tokens drafted for a sequence at once. Raises OutOfMemoryError."""
        recent_rows = 2 * (1 + drafts) if drafts else 0  # those before, and those of a step
        buffers, recent = (
            tuple(
                device.buffer(count * nbytes, label=f"{kind} of layer {layer}")
                for nbytes in sizes
                if count
            )
            for kind, count, sizes in (
                ("state", sequences, shape.sizes),
                ("recent rows", sequences * recent_rows, shape.row_sizes),
            )
        )
        return cls(shape, buffers, recent, recent_rows)

    def pieces(self, sequence: int) -> list[Piece]:
        """Returns where the state of a sequence lies."""
        own = zip(self.buffers, self.shape.sizes, strict=True)
        return [Piece(buffer, sequence * nbytes, nbytes) for buffer, nbytes in own]

    @property
    def inputs(self) -> Buffer:
        """The state of the convolution."""
        return self.buffers[0]

    @property
    def matrices(self) -> Buffer:
        """The state of the heads."""
        return self.buffers[1]


Cache = LayerCache | LayerState
