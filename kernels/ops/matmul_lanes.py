"""matmul_lanes: projections on adapters that compute on a CPU, of any number of rows."""

from __future__ import annotations

from dataclasses import dataclass

from infer.kernels.gpu.tensor import INTEGERS, LOOKED_UP
from infer.kernels.lowering.tuning import Tuning

_LEAST_LANES, _MOST_LANES = 4, 32
_M_TILE, _INT8_M_TILE, _N_TILE = 16, 8, 4


@dataclass(frozen=True)
class LanesShape:
    """A product for matmul_lanes: rows of activations and the weights' dtype."""

    rows: int
    dtype: str


@dataclass(frozen=True)
class LanesVariant:
    """matmul_lanes: lanes of a subgroup, which is a workgroup; rows of x and of W of each."""

    lanes: int
    m_tile: int
    n_tile: int

    @property
    def w_rows(self) -> int:
        """Rows of W of a workgroup."""
        return self.lanes * self.n_tile

    @property
    def params(self) -> dict[str, int]:
        """The kernel's. Eight columns of all rows of x are spread over the lanes, in vectors as
        large as can be."""
        vector = max(1, min(4, 8 * self.m_tile // self.lanes))
        return {
            "LANES": self.lanes,
            "M_TILE": self.m_tile,
            "N_TILE": self.n_tile,
            "X_VECTOR": 1 << vector.bit_length() >> 1,
        }


def matmul_lanes_variant(tuning: Tuning, shape: LanesShape) -> LanesVariant | None:
    """Returns the variant of matmul_lanes for a product, or None where another kernel multiplies:
    on a GPU, whose lanes load at once; where the number of lanes of a subgroup is unknown; and for
    codes that are looked up in a table that a workgroup shares."""
    lanes = tuning.subgroup_size
    known = lanes == tuning.largest_subgroup and _LEAST_LANES <= lanes <= _MOST_LANES
    if not (tuning.software and known) or shape.dtype in LOOKED_UP:
        return None
    most = _INT8_M_TILE if shape.dtype in INTEGERS else _M_TILE
    return LanesVariant(lanes, min(most, shape.rows), _N_TILE)
