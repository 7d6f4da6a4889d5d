"""The kernels of a mixture of experts: routing, and projections by the experts that were chosen.

A few rows: expert_matmul_vec, with workgroups for each row and slot, which choose the experts as
well. Many rows: route, expert_sort gives rows to experts, tile by tile, matmul or matmul_int8 goes
over the tiles, expert_sum adds up. The host never sees the routing: grids have room for every
outcome, and surplus workgroups leave early.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infer.kernels.compiler.arena import Operand, Scratch
from infer.kernels.compiler.fusion import Form
from infer.kernels.compiler.graph import Value, stride
from infer.kernels.compiler.tuning import TileVariant, VecShape
from infer.kernels.gpu.plan import Count
from infer.kernels.gpu.tensor import BLOCK, INTEGERS, GpuTensor, Shard

if TYPE_CHECKING:
    from infer.kernels.compiler.lowering import Lowering


def lower_route(low: Lowering, value: Value) -> None:
    """Emit the kernel of the route op `value`, and in prefill the one that sorts rows by expert."""
    params = _routing(value) | {"SUBGROUPS": low.device.subgroups}
    own: list[GpuTensor | None] = [value.attrs["correction"], value.attrs["expert_scales"]]
    added: list[Operand] = [vector.buffer for vector in own if vector is not None]
    low.emit(
        "route",
        (low.source(value.inputs[0])[0], value, *added),
        low.row_grid(value, 1),
        params | {"WG": low.tuning.workgroup(4 * params["EXPERTS"])} | _choice(low, value),
    )
    if low.kind.vec:
        return
    tile = _tile(low, value, "f32").rows
    tiles = _tiles(value, tile, low.kind.rows)
    low.tiles[value] = [Scratch(4 * tiles, routing=True), Scratch(4 * tiles * tile, routing=True)]
    low.emit(
        "expert_sort",
        (low.step, value, *low.tiles[value]),
        (value.attrs["experts"], 1, 1),
        params | {"WG": low.tuning.workgroup(1024), "TILE": tile, "TILES": tiles},
    )


def lower_gate_up(low: Lowering, value: Value) -> None:
    """Emit the kernels of the expert_gate_up op `value`."""
    inputs, of_norm = low.projected(value)
    if not low.kind.vec:
        _matmul(low, value, inputs, value, x_slots=value.inputs[1].attrs["slots"])
        return
    routing = value.inputs[1]
    choice = _choice(low, routing) if routing in low.absorbed else _CHOSEN_BEFORE
    params = {"COMBINE": False} | of_norm | choice
    outputs = value.attrs["outputs"]
    form = low.fusion.next_form(value) if low.fusion else None
    bindings = len(inputs) + len(_bias(value)) + 4 + params["CORRECTION"]
    fits = form is not None and form.bindings + bindings <= low.device.limits.storage_buffers
    if not (form and form.int8 and fits and outputs % BLOCK == 0 and low.tuning.subgroup_size):
        form = None
    _matmul_vec(low, value, inputs, [], value, form, params)


def lower_down(low: Lowering, value: Value, result: Value, residual: Value | None = None) -> None:
    """Emit the kernels of the expert_down op `value`; the result may have a residual added."""
    weight: GpuTensor = value.attrs["weight"]
    routing = value.inputs[1]
    inputs: list[Operand] = [value.inputs[0]]
    if weight.dtype in INTEGERS:
        inputs = _slots_int8(low, value.inputs[0], routing, weight.shape[1])
    added: list[Operand] = [] if residual is None else [low.source(residual)[0]]
    if low.kind.vec:
        summed = bool(added) or len(weight.shards) > 1
        bindings = len(weight.shards[0].buffers) + len(inputs) + len(_bias(value)) + 1 + summed
        form = low.next_form(result, low.device.limits.storage_buffers - bindings)
        if form and form.int8 and not low.tuning.subgroup_size:
            form = None
        params = {"COMBINE": True, "NORM": False, "SCALED": False, "EPS": 0.0} | _CHOSEN_BEFORE
        _matmul_vec(low, value, inputs, added, result, form, params)
        return
    parts = Scratch(4 * low.kind.rows * routing.attrs["slots"] * stride(result.width))
    _matmul(low, value, inputs, parts, x_slots=1)
    low.emit(
        "expert_sum",
        (routing, parts, result, *added),
        low.row_grid(result, -(-result.width // 64)),
        _routing(routing)
        | {"WIDTH": result.width, "STRIDE": stride(result.width), "RESIDUAL": bool(added)},
        moved=lambda rows, kv_len: 4 * rows * result.width * (routing.attrs["slots"] + 1),
    )


def _slots_int8(low: Lowering, x: Value, routing: Value, width: int) -> list[Operand]:
    """The int8 form of the experts' results x, made here unless x came with it."""
    if (x, None, True) in low.prepared:
        return low.prepared[x, None, True]
    slots = routing.attrs["slots"]
    operands = _slots_scratch(low, routing, width)
    low.emit(
        "quantize",
        (x, *operands),
        lambda rows, kv_len: (-(-width // (8 * BLOCK)), rows * slots, 1),
        {"K": width, "X_STRIDE": stride(width), "NORM": False, "ORDER": False}
        | {"SHARED": not low.kind.vec, "QUANTIZE": True},
    )
    return operands


def _slots_scratch(low: Lowering, routing: Value, width: int) -> list[Operand]:
    blocks = low.kind.rows * routing.attrs["slots"] * -(-width // BLOCK)
    return [Scratch(blocks * BLOCK), Scratch(blocks * 16)]


def _matmul_vec(
    low: Lowering,
    value: Value,
    inputs: list[Operand],
    added: list[Operand],
    result: Value,
    form: Form | None,
    params: dict[str, Any],
) -> None:
    weight: GpuTensor = value.attrs["weight"]
    routing, combine, gated = value.inputs[1], params["COMBINE"], value.attrs["gated"]
    slots, n, k = routing.attrs["slots"], value.attrs["outputs"], weight.shape[1]
    variant = low.tuning.matmul_vec(
        VecShape(
            k * slots if combine else k,
            n if combine else n * slots,
            1,
            weight.dtype,
            gated=gated,
            quantize=form is not None and form.int8,
        )
    )
    bias = _bias(value)
    keep = form is None or form.keep
    outputs: list[Operand] = [result] if keep else []
    if form is not None and combine:
        outputs += low.prepare(result, form, low.kind.rows)
    elif form is not None:
        outputs += low.prepared.setdefault((result, None, True), _slots_scratch(low, routing, n))
    next_norm = form.norm if form else None
    if next_norm is not None:
        outputs.append(next_norm.attrs["weight"].buffer)
    first: Operand = routing
    if params["ROUTE"]:
        first = low.source(routing.inputs[0])[0]
        outputs.append(routing)
        correction: GpuTensor | None = routing.attrs["correction"]
        outputs += [] if correction is None else [correction.buffer]
    x = -(-n // variant.per_workgroup)
    y = 1 if combine else slots
    for shard in weight.shards:
        weights, *rest = low.multiplied(shard, inputs)
        # A sum over several shards goes from one to the next as a residual.
        partial = combine and shard is not weight.shards[-1]
        written = [Scratch(4 * low.kind.rows * stride(n))] if partial else outputs
        low.emit(
            "expert_matmul_vec",
            [weights, first, *rest, *bias, *added, *written],
            lambda rows, kv_len: (x, y * rows, 1),
            params
            | _routing(routing)
            | _shard(shard, value)
            | weight.grouping.params
            | {
                "WEIGHT": weight.dtype,
                "K": k,
                "N": n,
                "Y_STRIDE": stride(n),
                "WG": variant.workgroup,
                "TEAM": variant.team,
                "OUTPUTS": variant.outputs,
                "UNROLL": variant.unroll,
                "TABLE_COPIES": variant.copies,
                "SUBGROUPS": low.device.subgroups,
                "GATED": gated,
                "BIAS": bool(bias),
                "RESIDUAL": bool(added),
                "ACTIVATION": value.attrs["function"],
                "KEEP": partial or keep,
                "QUANTIZE": form is not None and form.int8 and not partial,
                "NEXT_NORM": next_norm is not None and not partial,
            },
            moved=_chosen(routing, shard.nbytes),
            flops=_chosen(routing, 2 * shard.rows * k),
        )
        if partial:
            added = [*written]


def _matmul(
    low: Lowering, value: Value, inputs: list[Operand], result: Operand, x_slots: int
) -> None:
    weight: GpuTensor = value.attrs["weight"]
    routing, gated = value.inputs[1], value.attrs["gated"]
    n, k = value.attrs["outputs"], weight.shape[1]
    tile = _tile(low, routing, weight.dtype)
    x = -(-n * (1 + gated) // tile.columns)
    for shard in weight.shards:
        low.emit(
            "matmul_int8" if weight.dtype in INTEGERS else "matmul",
            [*low.multiplied(shard, inputs), result, *_bias(value), *low.tiles[routing]],
            lambda rows, kv_len: (x, _tiles(routing, tile.rows, rows), 1),
            tile.params
            | low.whole_rows(weight)
            | _shard(shard, value)
            | {"GROUPED": True, "X_SLOTS": x_slots, "GATED": gated}
            | {"BIAS": bool(_bias(value)), "RESIDUAL": False, "START": 0, "SCALE": 1.0}
            | {"SPLIT_ROWS": 0}
            | {"ACTIVATION": value.attrs["function"]}
            | weight.grouping.params
            | {"WEIGHT": weight.dtype, "K": k, "N": n, "Y_STRIDE": stride(n)},
            moved=shard.nbytes,
            flops=_chosen(routing, 2 * shard.rows * k),
        )


def _bias(value: Value) -> list[Operand]:
    """The buffer of all experts' biases, if there are any."""
    bias: GpuTensor | None = value.attrs["bias"]
    return [] if bias is None else [bias.buffer]


def _shard(shard: Shard, value: Value) -> dict[str, Any]:
    """Which experts a shard holds."""
    rows = value.attrs["outputs"] * (1 + value.attrs["gated"])
    return {"FIRST_EXPERT": shard.start // rows, "SHARD_EXPERTS": shard.rows // rows}


def _routing(routing: Value) -> dict[str, Any]:
    """The parameters of routing.wgsl."""
    attrs = routing.attrs
    shared = attrs["shared"]
    return {
        "EXPERTS": attrs["experts"] - shared,
        "SLOTS": attrs["slots"] - shared,
        "SHARED": shared,
        "ROUTING_STRIDE": stride(routing.width),
    }


def _choice(low: Lowering, routing: Value) -> dict[str, Any]:
    """The parameters of top_experts.wgsl."""
    _, logits_stride, offset = low.source(routing.inputs[0])
    attrs = routing.attrs
    return {
        "ROUTE": True,
        "NORMALIZE": attrs["normalize"],
        "SIGMOID": attrs["sigmoid"],
        "CORRECTION": attrs["correction"] is not None,
        "EXPERT_SCALES": attrs["expert_scales"] is not None,
        "ROUTE_SCALE": float(attrs["scale"]),
        "ROUTE_EPS": float(attrs["epsilon"]),
        "ROUTE_GROUPS": attrs["groups"][0],
        "CHOSEN_GROUPS": attrs["groups"][1],
        "SHARED_SCALE": float(attrs["shared_scale"]),
        "SHARED_GATED": attrs["gated"],
        "LOGITS_STRIDE": logits_stride,
        "LOGITS_OFFSET": offset,
    }


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


def _tile(low: Lowering, routing: Value, dtype: str) -> TileVariant:
    """The tile of prefill: its rows are the same for all of a layer's projections."""
    chosen, logits = _routing(routing), routing.inputs[0]
    while logits.inputs and logits.op != "linear":
        logits = logits.inputs[0]
    width = logits.inputs[0].width if logits.inputs else 0  # logits by hand: in tests
    rows = low.kind.rows * chosen["SLOTS"] // chosen["EXPERTS"]
    return low.tuning.expert_matmul(rows, width, dtype)


def _tiles(routing: Value, tile: int, rows: int) -> int:
    """The most tiles that the pairs of so many rows can need: an expert's last one may be short."""
    pairs, experts = rows * routing.attrs["slots"], routing.attrs["experts"]
    return int(min(pairs, (pairs + experts * (tile - 1)) // tile))


def _chosen(routing: Value, count: int) -> Count:
    """What all experts count, for those that the rows choose and share."""
    params, every = _routing(routing), routing.attrs["experts"]
    experts, slots, shared = (params[name] for name in ("EXPERTS", "SLOTS", "SHARED"))
    return lambda rows, kv_len: (min(rows * slots, experts) + shared) * count // every
