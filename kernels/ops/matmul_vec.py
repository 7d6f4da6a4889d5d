"""matmul_vec: projections of a few rows, and of those of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from infer.kernels.gpu.tensor import BLOCK, CODED, HALF, INTEGERS, LOOKED_UP
from infer.kernels.lowering.tuning import Tuning, power_of_two

_SMALL = 1 << 25  # values of a matrix
_FEW = 256  # rows of a matrix, as of a router: each may have a workgroup of its own
_FEW_GATED = 2048  # outputs: of half blocks there are more workgroups
_FEW_PLAIN = 8192  # the same of those that are no pairs


@dataclass(frozen=True)
class VecShape:
    """A product for matmul_vec: columns and outputs, rows of activations, the weights' dtype,
    whether outputs are pairs of rows (gated), and whether they are written as int8 (quantize)."""

    k: int
    n: int
    rows: int
    dtype: str
    gated: bool
    quantize: bool


@dataclass(frozen=True)
class VecVariant:
    """matmul_vec: invocations of a workgroup and of each of its teams, outputs of a team, loads in
    flight per row of weights, copies of the table of codes that are looked up, and whether there
    are workgroups for each row of activations, instead of each taking all of them."""

    workgroup: int
    team: int
    outputs: int
    unroll: int
    copies: int = 1
    row_each: bool = False

    @property
    def per_workgroup(self) -> int:
        """Outputs of a workgroup."""
        return self.workgroup // self.team * self.outputs

    @property
    def params(self) -> dict[str, int]:
        """The parameters that matmul_vec and expert_matmul_vec share."""
        return {
            "WG": self.workgroup,
            "TEAM": self.team,
            "OUTPUTS": self.outputs,
            "UNROLL": self.unroll,
            "TABLE_COPIES": self.copies,
        }


def matmul_vec_variant(tuning: Tuning, shape: VecShape) -> VecVariant:
    """Returns the variant of matmul_vec. Workgroups of 1,024 invocations have 16 copies of a table
    of codes: with more, each invocation would have to store more values to fill them."""
    variant = _vec_variant(tuning, shape)
    many = shape.dtype in LOOKED_UP and variant.workgroup == 1024
    return replace(variant, copies=16) if many else variant


def _vec_variant(tuning: Tuning, shape: VecShape) -> VecVariant:
    """A CPU wants many rows for each subgroup, a GPU few, and in a large matrix many
    invocations for a row, so that what is read at one time lies close together in memory."""
    lanes = tuning.subgroup_size
    most = power_of_two(tuning.limits.max_invocations + 1) // 2  # some GPUs have 384
    if shape.dtype in LOOKED_UP and tuning.limits.workgroup_storage < 32768:
        most = min(most, 512)  # 1,024 have 16 copies of a table
    int8 = shape.dtype in INTEGERS
    columns = BLOCK if int8 else 128 // CODED.get(shape.dtype, 16)  # of a chunk
    chunks = -(-shape.k // columns)
    if not lanes:
        workgroup = max(32, min(128, most, power_of_two(chunks)))
        return VecVariant(workgroup, workgroup, 2, 1, row_each=tuning.software)
    if tuning.software:
        # Weights come out of a CPU's cache for every row; one kernel for all, which compiles
        # in a fifth of the time, leaves registers to more outputs.
        return VecVariant(BLOCK // 4 * lanes, lanes, 4, 1, row_each=True)
    least = max(32, tuning.largest_subgroup)  # a team is whole subgroups
    if shape.quantize:
        return _int8_variant(tuning, shape, chunks, most, least)
    rows_of_weights = shape.n * (1 + shape.gated)
    if shape.dtype in CODED and not int8:
        # Arithmetic bounds them: what is read of x serves many rows of W.
        workgroup = max(least, min(512, most))
        team = min(workgroup, max(least, 32 if rows_of_weights > 8192 else 128))
        return VecVariant(workgroup, team, max(1, 4 // shape.rows), 1)
    small = shape.gated and rows_of_weights * shape.k <= _SMALL
    if int8 or small or rows_of_weights <= _FEW:
        team, outputs = max(1, tuning.filling // rows_of_weights), 1
    else:
        team, outputs = chunks // 2, 1 if shape.gated else 2
    workgroup = min(256, most)
    team = min(workgroup, max(least, 1 << team.bit_length() >> 1))
    if tuning.overflows(rows_of_weights // outputs * team):
        team = max(least, team // 2)
    while team > max(least, chunks):
        team //= 2
    return VecVariant(workgroup, team, outputs, 1)


def _int8_variant(
    tuning: Tuning, shape: VecShape, chunks: int, most: int, least: int
) -> VecVariant:
    """Returns the variant for outputs that are written as int8: a workgroup has a block of them, or
    half a block where there are few or a product takes many registers."""
    workgroup, outputs, block = 1024, 1 if shape.dtype in INTEGERS else 2, HALF
    if shape.gated and shape.dtype == "mxfp4":
        workgroup, outputs, block = 256, 4, BLOCK
    elif shape.gated and shape.dtype in ("q4", "q5"):
        workgroup = 512
    elif shape.gated and shape.n > _FEW_GATED:
        block = BLOCK
    elif not shape.gated and shape.n > _FEW_PLAIN:
        workgroup, outputs, block = 512, 2, BLOCK
    if tuning.overflows(shape.n // block * workgroup):
        workgroup, outputs = workgroup // 2, 2 * outputs
    workgroup = min(workgroup * least // 32, most)  # the sweeps had subgroups of 32
    team = max(least, workgroup * outputs // block)
    outputs = block * team // workgroup
    ahead = shape.gated and outputs == 1
    if shape.dtype in LOOKED_UP:
        ahead = ahead and chunks >= 2 * team
    else:
        ahead = ahead and shape.dtype == "q4" and chunks == 2 * team  # all of a row at once
    return VecVariant(workgroup, team, outputs, 2 if ahead else 1)
