"""A mixture of experts: routing, and projections by the experts that were chosen.

A few rows: expert_matmul_vec, with workgroups for each row and slot, which choose the experts as
well. Many rows: route, expert_sort gives rows to experts, tile by tile, matmul or matmul_int8 goes
over the tiles, expert_sum adds up. The host never sees the routing: grids have room for every
outcome, and surplus workgroups leave early.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from infer.kernels.gpu.plan import Count
from infer.kernels.gpu.tensor import BLOCK, INTEGERS, PLANES, GpuTensor, Shard
from infer.kernels.lowering.arena import Operand, Scratch
from infer.kernels.lowering.graph import Value, source
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import Target, stride
from infer.kernels.lowering.tuning import NARROW_SOFTWARE, Tuning
from infer.kernels.ops.linear import Projection, Tile, multiplied, tile_operands, tile_params
from infer.kernels.ops.matmul_matrix import MatrixVariant, expert_matrix_variant
from infer.kernels.ops.matmul_rows import MOST_ROWS
from infer.kernels.ops.matmul_tiles import Int8TileVariant, TileVariant
from infer.kernels.ops.matmul_vec import VecShape, VecVariant, matmul_vec_variant
from infer.kernels.ops.prepared import HALVES, Form


@dataclass(eq=False, repr=False)
class Route(Value):
    """The experts of each row: those with the `slots` largest logits, and their softmax over all
    experts; normalize: over those chosen. Rows are ids, best first, then weights, times scale.

    sigmoid: scores are sigmoids and not a softmax; epsilon: is added to what they are divided by.
    correction [experts]: is added to the scores for the choice, and not for the weights
    (DeepSeek-AI 2024). expert_scales [experts]: the weights are multiplied by them. groups: that
    many of equal size, and how many of them the choice is limited to: those whose best expert, or
    with a correction whose best two together, have the largest score. shared: so many experts
    behind those come last in all rows, with the weight shared_scale; gated: times the sigmoid of
    one more logit, the last.

    Rules add: hidden: the width of what the experts read, which decides their tiles. made: the
    kernel of their first projection does all this. Chosen: by_row: each row goes to its experts on
    its own (expert_matmul_vec), because there are too few rows to fill tiles: an expert has four or
    fewer; tile: of other steps, for experts in f32; all of a layer's projections have its rows.
    """

    logits: Value
    slots: int
    normalize: bool = field(kw_only=True)
    sigmoid: bool = field(default=False, kw_only=True)
    correction: GpuTensor | None = field(default=None, kw_only=True)
    expert_scales: GpuTensor | None = field(default=None, kw_only=True)
    scale: float = field(default=1.0, kw_only=True)
    epsilon: float = field(default=0.0, kw_only=True)
    groups: tuple[int, int] = field(default=(1, 1), kw_only=True)
    shared: int = field(default=0, kw_only=True)
    shared_scale: float = field(default=1.0, kw_only=True)
    gated: bool = field(default=False, kw_only=True)
    made: bool = field(default=False, kw_only=True)
    hidden: int = field(default=0, kw_only=True)
    by_row: bool = field(init=False)
    tile: TileVariant | None = field(init=False)
    tile_operands: list[Operand] = field(default_factory=list, init=False)

    is_routing = True

    def checked_width(self) -> int:
        (count, chosen), experts = self.groups, self.experts
        if not 0 < chosen <= count or experts % count:
            raise ValueError(f"{experts} experts cannot be chosen of {self.groups} groups")
        if not 0 < self.slots <= experts // count * chosen:
            raise ValueError(f"{self.slots} experts cannot be chosen of {experts}")
        if self.epsilon and not (self.sigmoid and self.normalize):
            raise ValueError("only sigmoids are divided by their sum and an epsilon")
        if self.gated and not self.shared:
            raise ValueError("there is no shared expert for the gate")
        return 2 * self.all_slots

    @property
    def experts(self) -> int:
        """How many experts are chosen from, without the shared ones."""
        return self.logits.width - self.gated

    @property
    def all_experts(self) -> int:
        return self.experts + self.shared

    @property
    def all_slots(self) -> int:
        """Experts of a row."""
        return self.slots + self.shared

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of routing.wgsl."""
        return {
            "EXPERTS": self.experts,
            "SLOTS": self.slots,
            "SHARED": self.shared,
            "ROUTING_STRIDE": stride(self.width),
        }

    def choice(self, low: Lowering) -> dict[str, Any]:
        """The parameters of top_experts.wgsl."""
        _, logits_stride, offset = source(self.logits)
        return {
            "ROUTE": True,
            "NORMALIZE": self.normalize,
            "SIGMOID": self.sigmoid,
            "CORRECTION": self.correction is not None,
            "EXPERT_SCALES": self.expert_scales is not None,
            "ROUTE_SCALE": float(self.scale),
            "ROUTE_EPS": float(self.epsilon),
            "ROUTE_GROUPS": self.groups[0],
            "CHOSEN_GROUPS": self.groups[1],
            "SHARED_SCALE": float(self.shared_scale),
            "SHARED_GATED": self.gated,
            "LOGITS_STRIDE": logits_stride,
            "LOGITS_OFFSET": offset,
        }

    def choose(self, target: Target) -> None:
        rows = target.kind.rows
        few = rows <= MOST_ROWS and rows * self.all_slots <= 4 * self.all_experts
        self.by_row = target.kind.vec or (few and not target.tuning.software)
        self.tile = None if self.by_row else self.tile_for(target, "f32")

    def lower(self, low: Lowering) -> None:
        if self.made:
            return
        params = self.params | {"SUBGROUPS": low.device.subgroups}
        added = [v.buffer for v in (self.correction, self.expert_scales) if v is not None]
        low.emit(
            "route",
            (source(self.logits)[0], self, *added),
            low.row_grid(self, 1),
            params | {"WG": low.tuning.workgroup(4 * self.experts)} | self.choice(low),
        )
        if self.tile is None:
            return
        tile = self.tile.rows
        tiles = self.tiles(tile, low.kind.rows)
        self.tile_operands = [
            Scratch(4 * tiles, is_routing=True),
            Scratch(4 * tiles * tile, is_routing=True),
        ]
        low.emit(
            "expert_sort",
            (low.step, self, *self.tile_operands),
            (self.all_experts, 1, 1),
            params | {"WG": low.tuning.workgroup(1024), "TILE": tile, "TILES": tiles},
        )

    def tile_for(self, target: Target, dtype: str) -> TileVariant:
        """The tile of prefill for experts of that dtype."""
        rows = target.kind.rows * self.slots // self.experts
        return target.tuning.choose(expert_matmul_variant, rows, self.hidden, dtype)

    def tiles(self, tile: int, rows: int) -> int:
        """The most tiles that the pairs of so many rows can need: an expert's last one may be
        short."""
        pairs = rows * self.all_slots
        return min(pairs, (pairs + self.all_experts * (tile - 1)) // tile)

    def count(self, whole: int) -> Count:
        """Returns the part of a count that falls to the experts that the rows choose or share.
        whole: the count of all experts."""
        experts, slots, shared, every = self.experts, self.slots, self.shared, self.all_experts
        return lambda rows, kv_len: (min(rows * slots, experts) + shared) * whole // every


_CHOSEN_BEFORE = {
    "ROUTE": False,
    "NORMALIZE": False,
    "SIGMOID": False,
    "CORRECTION": False,
    "EXPERT_SCALES": False,
    "ROUTE_SCALE": 1.0,
    "ROUTE_EPS": 0.0,
    "ROUTE_GROUPS": 1,
    "CHOSEN_GROUPS": 1,
    "SHARED_SCALE": 1.0,
    "SHARED_GATED": False,
    "LOGITS_STRIDE": 0,
    "LOGITS_OFFSET": 0,
}


@dataclass(eq=False, repr=False)
class _Experts(Projection):
    """A projection by the experts of each row."""

    weight: GpuTensor
    routing: Route
    bias: GpuTensor | None = None
    variant: VecVariant | Tile = field(init=False)

    sums: ClassVar[bool] = False  # whether it adds up the results of a row's experts

    @property
    def outputs(self) -> int:
        """Outputs of an expert. Raises ValueError for a weight that does not fit the experts."""
        rows, rest = divmod(self.weight.shape[0], self.parts * self.routing.all_experts)
        if rest or any(shard.start % (self.parts * rows) for shard in self.weight.shards):
            raise ValueError(f"a weight of {self.weight.shape} does not fit the experts")
        return rows

    @property
    def parts(self) -> int:
        """Matrices of an expert."""
        return 1

    def choose(self, target: Target) -> None:
        if self.routing.by_row:
            self.variant = self._vec_variant(target)
        else:
            tile = self.routing.tile_for(target, self.weight.dtype)
            self.variant = self._matrix_variant(target) or tile
        if isinstance(self.variant, MatrixVariant):
            self.x_scales = HALVES
        else:
            self.x_scales = ("halves" if self.routing.by_row else "blocks") if self.int8 else ""

    def _vec_variant(self, target: Target) -> VecVariant:
        slots, n, k = self.routing.all_slots, self.outputs, self.weight.shape[1]
        shape = VecShape(
            k * slots if self.sums else k,
            n if self.sums else n * slots,
            1,
            self.weight.dtype,
            gated=self.parts == 2,
            quantize=self.output_params["QUANTIZE"],
        )
        return target.tuning.choose(matmul_vec_variant, shape)

    def _matrix_variant(self, target: Target) -> MatrixVariant | None:
        """Returns the sizes of the kernel by matrices; None where it does not multiply the
        experts."""
        tile, weight = self.routing.tile, self.weight
        if tile is None or target.kind.rows <= MOST_ROWS:
            return None
        inputs, tiles = 2, 2  # an activation and its scales; which rows a tile has
        bound = len(weight.shards[0].buffers) + inputs + len(self.biases) + 1 + tiles
        if weight.row_scales and bound + 1 > target.device.limits.storage_buffers:
            return None
        return target.tuning.choose(expert_matrix_variant, tile.rows, self.parts > 1)

    @property
    def biases(self) -> list[Operand]:
        """The buffer of all experts' biases, if there are any."""
        return [] if self.bias is None else [self.bias.buffer]

    def lower_vec(
        self,
        low: Lowering,
        variant: VecVariant,
        inputs: list[Operand],
        params: dict[str, Any],
        function: str,
    ) -> None:
        """expert_matmul_vec for each shard."""
        weight, routing, n, k = self.weight, self.routing, self.outputs, self.weight.shape[1]
        outputs = self.outputs_bound
        first: Operand = routing
        if params["ROUTE"]:
            first = source(routing.logits)[0]
            outputs += [routing]
            outputs += [] if routing.correction is None else [routing.correction.buffer]
        added = [] if self.residual is None else [source(self.residual)[0]]
        x, y = -(-n // variant.per_workgroup), 1 if self.sums else routing.all_slots
        for shard in weight.shards:
            weights, *rest = multiplied(shard, inputs)
            # A sum over several shards goes from one to the next as a residual.
            partial = self.sums and shard is not weight.shards[-1]
            alone = {"KEEP": True, "QUANTIZE": False, "NEXT_NORM": False}
            written = [Scratch(4 * low.kind.rows * stride(n))] if partial else outputs
            low.emit(
                "expert_matmul_vec",
                [weights, first, *rest, *self.biases, *added, *written],
                lambda rows, kv_len: (x, y * rows, 1),
                params
                | routing.params
                | self._of_shard(shard)
                | weight.grouping.params
                | variant.params
                | (alone if partial else self.output_params)
                | {
                    "COMBINE": self.sums,
                    "WEIGHT": weight.dtype,
                    "K": k,
                    "N": n,
                    "Y_STRIDE": stride(n),
                    "SUBGROUPS": low.device.subgroups,
                    "GATED": self.parts == 2,
                    "BIAS": self.bias is not None,
                    "RESIDUAL": bool(added),
                    "ACTIVATION": function,
                },
                moved=routing.count(shard.nbytes),
                flops=routing.count(2 * shard.rows * k),
                variant=variant,
            )
            if partial:
                added = [*written]

    def lower_tiles(
        self,
        low: Lowering,
        tile: Tile,
        inputs: list[Operand],
        result: Operand,
        function: str,
        x_slots: int,
    ) -> None:
        """matmul, matmul_int8 or matmul_matrix over the tiles of rows by expert, for each shard."""
        weight, routing, n, k = self.weight, self.routing, self.outputs, self.weight.shape[1]
        x = -(-n * self.parts // tile.columns)
        for shard in weight.shards:
            low.emit(
                tile.kernel,
                [
                    *tile_operands(weight, shard, tile, inputs),
                    result,
                    *self.biases,
                    *routing.tile_operands,
                ],
                lambda rows, kv_len: (x, routing.tiles(tile.rows, rows), 1),
                tile_params(low, weight, tile)
                | self._of_shard(shard)
                | {"GROUPED": True, "X_SLOTS": x_slots}
                | {"GATED": self.parts == 2, "ACTIVATION": function}
                | {"BIAS": self.bias is not None, "N": n, "Y_STRIDE": stride(n)},
                moved=shard.nbytes,
                flops=routing.count(2 * shard.rows * k),
                variant=tile,
            )

    def _of_shard(self, shard: Shard) -> dict[str, Any]:
        """Returns the parameters that say which experts a shard holds."""
        rows = self.outputs * self.parts
        return {"FIRST_EXPERT": shard.start // rows, "SHARD_EXPERTS": shard.rows // rows}


@dataclass(eq=False, repr=False)
class ExpertGateUp(_Experts):
    """function(x gate^T) * (x up^T), or clamped_swiglu of both (activate.wgsl), by each of a row's
    experts, one result after the other, each in stride(inner) values. weight [experts * 2 * inner,
    width]: gate, then up, of each expert; bias [experts * 2 * inner] likewise. Not gated:
    function(x up^T), and there are no gates in them.

    Rules add: chooses: it also computes the routing.
    """

    function: str = "silu"
    gated: bool = True
    chooses: bool = field(default=False, kw_only=True)

    def checked_width(self) -> int:
        if self.weight.shape[1] != self.x.width:
            raise ValueError(f"rows of {self.x.width} do not fit a weight of {self.weight.shape}")
        return self.routing.all_slots * stride(self.outputs)

    @property
    def parts(self) -> int:
        return 1 + self.gated

    def writes(self, form: Form, target: Target) -> bool:
        corrected = self.chooses and self.routing.correction is not None
        bound = self.bound - len(self.weight.shards[0].buffers) + len(self.biases) + 4 + corrected
        fits = form.bindings + bound <= target.device.limits.storage_buffers
        whole = form.int8 and self.outputs % BLOCK == 0 and target.tuning.subgroup_size
        return bool(self.routing.by_row and fits and whole)

    def lower(self, low: Lowering) -> None:
        variant, (inputs, of_norm) = self.variant, self.read(low)
        if isinstance(variant, VecVariant):
            choice = self.routing.choice(low) if self.chooses else _CHOSEN_BEFORE
            self.lower_vec(low, variant, inputs, of_norm | choice, self.function)
        else:
            slots = self.routing.all_slots
            self.lower_tiles(low, variant, inputs, self, self.function, slots)


@dataclass(eq=False, repr=False)
class ExpertDown(_Experts):
    """The down projections of a row's experts, each times its weight in the routing, added up in
    the order of the ids. x: the experts' activations; weight [experts * width, inner], bias
    [experts * width]."""

    sums = True

    @property
    def x_parts(self) -> int:
        return self.routing.all_slots

    def checked_width(self) -> int:
        if self.routing.all_slots * stride(self.weight.shape[1]) != self.x.width:
            raise ValueError(f"rows of {self.x.width} do not fit a weight of {self.weight.shape}")
        return self.outputs

    def writes(self, form: Form, target: Target) -> bool:
        summed = self.residual is not None or len(self.weight.shards) > 1
        bound = self.bound + len(self.biases) + 1 + summed
        int8 = not form.int8 or target.tuning.subgroup_size
        return bool(target.kind.vec and int8) and form.fits(self, target, bound)

    def lower(self, low: Lowering) -> None:
        variant, (inputs, of_norm) = self.variant, self.read(low)
        if isinstance(variant, VecVariant):
            self.lower_vec(low, variant, inputs, of_norm | _CHOSEN_BEFORE, "none")
            return
        routing = self.routing
        parts = Scratch(4 * low.kind.rows * routing.all_slots * stride(self.width))
        self.lower_tiles(low, variant, inputs, parts, "none", 1)
        added = [] if self.residual is None else [source(self.residual)[0]]
        low.emit(
            "expert_sum",
            (routing, parts, self, *added),
            low.row_grid(self, -(-self.width // 64)),
            routing.params
            | {"WIDTH": self.width, "STRIDE": stride(self.width), "RESIDUAL": bool(added)},
            moved=lambda rows, kv_len: 4 * rows * self.width * (routing.all_slots + 1),
        )


def expert_matmul_variant(tuning: Tuning, rows: int, width: int, dtype: str) -> TileVariant:
    """For experts that have so many rows each, of that width: 32x128, or 64x128 where most of
    it is used; on a CPU 16x32 if they are narrow."""
    tile = TileVariant(8 if rows > 32 else 4, 8, True, 8, 16)
    if tuning.software and width <= NARROW_SOFTWARE:
        tile = TileVariant(2, 4, True, 8, 8)
    if dtype in INTEGERS:
        tile = Int8TileVariant(**asdict(tile), planes=PLANES.get(dtype, 1))
    fits = tile.storage <= tuning.limits.workgroup_storage
    return tile if fits else replace(tile, double=False)
