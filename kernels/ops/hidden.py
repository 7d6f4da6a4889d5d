"""Hidden states from row to row, and from step to step."""

from __future__ import annotations

from dataclasses import dataclass

from infer.kernels.lowering.graph import Value, source
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import stride
from infer.kernels.state.hidden_states import RECENT, HiddenStates


@dataclass(eq=False, repr=False)
class HiddenBefore(Value):
    """The hidden state of the position before each row: that of the row before it in x, where there
    is an x and that row is of the same sequence, else the one that was kept; zeros at position 0.
    """

    x: Value | None
    kept: HiddenStates

    def checked_width(self) -> int:
        if self.x is not None and self.x.width != self.kept.width:
            raise ValueError(f"rows of {self.x.width} and {self.kept.width} do not fit")
        return self.kept.width

    def lower(self, low: Lowering) -> None:
        rows = [] if self.x is None else [source(self.x)[0]]
        low.emit(
            "hidden_before",
            (low.step, self.kept.buffer, self, *rows),
            low.row_grid(self, -(-stride(self.width) // 64)),
            {"STRIDE": stride(self.width), "RECENT": RECENT, "ROWS": bool(rows)},
        )


@dataclass(eq=False, repr=False)
class KeepHidden(Value):
    """The last rows of x of each sequence, to be read in later steps; nothing reads the result but
    there."""

    x: Value
    kept: HiddenStates

    def checked_width(self) -> int:
        return self.x.width

    def lower(self, low: Lowering) -> None:
        low.emit(
            "keep_hidden",
            (low.step, source(self.x)[0], self.kept.buffer),
            low.row_grid(self, -(-stride(self.width) // 64)),
            {"STRIDE": stride(self.width), "RECENT": RECENT},
        )
