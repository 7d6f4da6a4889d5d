"""Rules that rewrite a graph so that operations share a kernel, each with its condition.

RULES and KERNEL_RULES list them in the order in which they are tried, each on all operations from
first to last. A rule folds the operations that it matches into one, which takes the place of the
last of them. Between the two, every operation chooses its kernel and the variant of that, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from infer.kernels.lowering.graph import Add, Graph, Mul, Slice, Value, source
from infer.kernels.lowering.target import Target
from infer.kernels.ops.attention import Attention, AttentionVariant
from infer.kernels.ops.elementwise import Activation, Scale, SigmoidGate
from infer.kernels.ops.embedding import LogitsRows
from infer.kernels.ops.experts import ExpertDown, ExpertGateUp, Route
from infer.kernels.ops.head_linear import HeadLinear
from infer.kernels.ops.kv_write import Heads, LatentKey, LatentWrite, RopeKVWrite
from infer.kernels.ops.linear import Changes, Linear, Projection
from infer.kernels.ops.lora import LoraDown, LoraUp
from infer.kernels.ops.norm import RMSNorm
from infer.kernels.ops.prepared import HALVES, Form, Maker, Norm, Prepared
from infer.kernels.ops.rope import Rope, Rotate

Op = TypeVar("Op", bound=Value)
Rule = Callable[[Graph, Target], None]


def each(graph: Graph, kind: type[Op]) -> Iterator[Op]:
    """The operations of a kind, while rules change others."""
    for value in list(graph.values):
        if isinstance(value, kind) and value in graph:
            yield value


# Rewrites that are always done, whether kernels are shared or not


def add_changes(graph: Graph, changes: Changes) -> None:
    """linear -> b a x + linear, if a low-rank change b a lies beside its weight."""
    for linear in each(graph, Linear):
        change = changes.get(linear.weight)
        if change is None:
            continue
        # In this order, because the later projection takes in the sum.
        low: Value
        high: Value
        if change.by_row:
            low = LoraDown(linear.x, change.a, change.rank)
            high = LoraUp(low, change.b, linear.width, linear.scale)
        else:
            low = Linear(linear.x, change.a)
            high = Linear(low, change.b, scale=linear.scale)
        own = Linear(linear.x, linear.weight, linear.bias, linear.scale)
        for value in (own, low, high):
            graph.insert(value, before=linear)
        graph.replace(linear, Add(high, own))


def take_all_rows(graph: Graph, target: Target) -> None:
    """logits_rows(x) -> x, if all rows get logits."""
    if target.kind.logits is None or target.kind.rows == 1:
        for rows in each(graph, LogitsRows):
            graph.redirect(rows, rows.x)


def size_tiles(graph: Graph, target: Target) -> None:
    """The tiles of experts depend on the width of their input."""
    for gate_up in each(graph, ExpertGateUp):
        graph.update(gate_up.routing, hidden=gate_up.x.width)


def quantize_inputs(graph: Graph, target: Target) -> None:
    """x -> x in the form that projections read, int8 for most integer weights and f16 for products
    of matrices, unless what makes x writes that."""
    made: dict[tuple[Value, Norm | None, str], Prepared] = {}
    for projection in each(graph, Projection):
        scales = projection.x_scales
        if not scales or projection.prepared is not None:
            continue
        key = projection.x, projection.norm, scales
        order = projection.weight.order
        prepared = made.get(key) if order is None else None
        if prepared is None:
            prepared = _prepared(projection, target, scales)
            graph.insert(prepared, before=projection)
        if order is None:
            made[key] = prepared
        graph.update(projection, prepared=prepared)


def _prepared(
    reader: Projection, target: Target, scales: str, *, keep: bool = True, made: bool = False
) -> Prepared:
    """The input x in the form that a projection reads."""
    return Prepared(
        reader.x,
        reader.norm,
        scales,
        target.rows(reader),
        order=reader.weight.order,
        parts=reader.x_parts,
        part=reader.weight.shape[1],
        keep=keep,
        made=made,
    )


# Norms, sums and activations


def norm_into_projections(graph: Graph, target: Target) -> None:
    """rmsnorm -> projections: into all of them, if nothing else reads it (decode of one row, or
    where no kernel is for a few)."""
    for norm in each(graph, RMSNorm):
        users = graph.users(norm)
        only = users and all(
            isinstance(user, Projection) and user.x is norm and user.takes_norm(target)
            for user in users
        )
        if not (norm.of_whole_rows and only):
            continue
        own = Norm(norm.weight, norm.eps, norm.of_logits)
        for user in list(users):
            graph.update(user, x=norm.x, norm=own)


def choice_into_experts(graph: Graph, target: Target) -> None:
    """route -> experts: into their first projection (decode). Eight bindings have room for a
    correction or biases."""
    for route in each(graph, Route):
        first = next((u for u in graph.users(route) if isinstance(u, ExpertGateUp)), None)
        others = [user for user in graph.users(route) if user is not first]
        if first is None or not all(isinstance(user, ExpertDown) for user in others):
            continue
        plain = route.expert_scales is None and route.groups == (1, 1)
        if target.kind.vec and plain and (route.correction is None or first.bias is None):
            graph.update(route, made=True)
            graph.update(first, chooses=True)


def activation_into_linear(graph: Graph, target: Target) -> None:
    """activation(linear) -> the projection."""
    for act in each(graph, Activation):
        if isinstance(act.x, Linear) and graph.is_read_by(act.x, act):
            graph.replace(act, act.x, activation=act.function)


def gate_into_projection(graph: Graph, target: Target) -> None:
    """activation(gate) * up, the halves of one activation -> the projection that makes them, if one
    kernel has every row of the weight; else one kernel for both."""
    for product in each(graph, Mul):
        act, up = product.a, product.b
        if not (isinstance(act, Activation) and isinstance(up, Slice)):
            continue
        gate = act.x
        if not isinstance(gate, Slice) or gate.x is not up.x:
            continue
        both = gate.x
        halves = (gate.offset, up.offset) == (0, product.width)
        alone = graph.is_read_by(gate, act) and graph.is_read_by(act, product)
        if not (halves and alone and graph.is_read_by(up, product) and len(graph.users(both)) == 2):
            continue
        whole = isinstance(both, Linear) and both.scale == 1.0 and len(both.weight.shards) == 1
        if whole:
            fused = {"gated": True, "activation": act.function, "width": product.width}
            graph.replace(product, both, **fused)
        else:
            graph.replace(product, act, gated=True)


def factors_into_linear(graph: Graph, target: Target) -> None:
    """activation(linear) * factors -> the projection (decode)."""
    for product in each(graph, Mul):
        linear = product.a
        activated = isinstance(linear, Linear) and linear.activation != "none" and not linear.gated
        if target.kind.vec and activated and graph.is_read_by(linear, product):
            graph.replace(product, linear, factors=product.b)


def residual_into_maker(graph: Graph, target: Target) -> None:
    """linear + residual, or rmsnorm + residual -> the projection, or the norm. And
    (linear [* sigmoid(gate)] + linear) + residual: each adds what came before it."""
    for add in each(graph, Add):
        for maker, other in ((add.b, add.a), (add.a, add.b)):  # the later one first
            alone = graph.is_read_by(maker, add) and not isinstance(other, Slice)
            if alone and _takes_residual(maker):
                graph.replace(add, maker, residual=other)
                break
        else:
            _residual_into_sum(graph, target, add)


def _takes_residual(value: Value) -> bool:
    if isinstance(value, Linear):
        return value.is_plain
    if isinstance(value, RMSNorm):
        return value.of_whole_rows and value.residual is None
    return isinstance(value, ExpertDown | LoraUp) and value.residual is None


def _residual_into_sum(graph: Graph, target: Target, add: Add) -> None:
    for both, other in ((add.b, add.a), (add.a, add.b)):
        if not isinstance(both, Linear | ExpertDown | RMSNorm) or both.residual is None:
            continue
        if not graph.is_read_by(both, add) or isinstance(other, Slice):
            continue
        linear: Value = both.residual
        reader: Value = both
        gate: Value | None = None
        if isinstance(linear, SigmoidGate) and linear.gate.width == 1 and target.kind.vec:
            reader, gate, linear = linear, linear.gate, linear.x
        if not isinstance(linear, Linear | LoraUp) or not _takes_residual(linear):
            continue
        alone = graph.is_read_by(linear, reader) and graph.is_read_by(both.residual, both)
        gated = {} if gate is None else {"gate": gate}
        if alone and not (gated and (isinstance(linear, LoraUp) or linear.bias is not None)):
            graph.update(linear, residual=other, **gated)
            graph.replace(add, both, residual=linear)
            graph.move(linear, before=both)
            return


def scale_into_norm(graph: Graph, target: Target) -> None:
    """(rmsnorm + residual) * factor -> the norm."""
    for scale in each(graph, Scale):
        norm = scale.x
        summed = isinstance(norm, RMSNorm) and norm.residual is not None
        if summed and graph.is_read_by(norm, scale):
            graph.replace(scale, norm, factor=scale.factor)


# Attention


def heads_into_attention(graph: Graph, target: Target) -> None:
    """Norms and rotation of q and k, and the cache write -> attention, of one row; of more rows,
    each of which may attend to the key of another, rope_kv_write."""
    for attention in each(graph, Attention):
        found = _heads(graph, target, attention)
        if found is None:
            continue
        projection, heads = found
        if attention.has_room(heads, target):
            graph.update(attention, q=projection, k=None, v=None, heads=heads)
        elif heads.fit(target):
            query = RopeKVWrite(projection, heads, attention.cache, attention.width)
            graph.insert(query, before=attention)
            graph.update(attention, q=query, k=None, v=None)


def _heads(graph: Graph, target: Target, attention: Attention) -> tuple[Value, Heads] | None:
    """The projection that attention takes apart: of q, k and v, of q and k, which is v too, or of q
    alone; heads perhaps normed, or, in steps of a few rows, all of q and all of k; those of q and k
    rotated. And what becomes of its heads."""
    sources = [x for x in (attention.q, attention.k, attention.v) if x is not None]
    chains = [_chain(x) for x in sources]
    parts, norms, ropes = (list(items) for items in zip(*chains, strict=True))
    steps = [step for x in sources for step in _steps(x)]
    if not all(isinstance(part, Slice) and part.x is parts[0].x for part in parts):
        return None
    q_width, offsets = parts[0].width, [part.offset for part in parts]
    if offsets not in ([0], [0, q_width, q_width], [0, q_width, q_width + parts[-1].width]):
        return None
    normed = [norm is not None for norm in norms]
    if normed[1:] not in ([], [normed[0], False], [normed[0], normed[0]]):
        return None
    if any(rope is not own for rope, own in zip(ropes[1:], (ropes[0], None), strict=False)):
        return None
    found = [norm for norm in norms if norm is not None]
    if len({norm.eps for norm in found}) > 1 or any(norm.gate is not None for norm in found):
        return None
    rotate_first = {isinstance(x, RMSNorm) and isinstance(x.x, Rotate) for x in sources[:2]}
    if len(rotate_first) > 1 or (len(parts) == 1 and not steps):
        return None  # with q alone that is as it should be nothing is left to do
    head_dim = attention.cache.head_dim
    whole = norms[0] is not None and norms[0].weight.shape[0] > head_dim
    if whole and (not target.kind.vec or any(norms[2:]) or rotate_first == {True}):
        return None
    for step in steps:
        if isinstance(step, Rotate):
            fits = step.head_dim == head_dim
        else:
            width = step.width if whole else head_dim
            fits = step.weight.shape[0] == width and step.groups == 1
        if not fits or len(graph.users(step)) != 1:
            return None
    heads = Heads(
        ropes[0],
        tuple(Norm(norm.weight, norm.eps) for norm in found),
        rows_normed=whole,
        own=len(parts) == 3,
        v_is_k=len(parts) == 3 and parts[1] is parts[2],
        rotate_first=rotate_first == {True},
    )
    return parts[0].x, heads


def _steps(x: Value) -> list[Rotate | RMSNorm]:
    """The norms and rotations between attention and the slices of its projection."""
    found: list[Rotate | RMSNorm] = []
    while isinstance(x, Rotate | RMSNorm):
        found.append(x)
        x = x.x
    return found


def _chain(x: Value) -> tuple[Value, RMSNorm | None, Rope | None]:
    """Returns the heads before their norm and rotation, in whatever order these come, and both of
    them, None where there is none."""
    rope = norm = None
    while (isinstance(x, Rotate) and not rope) or (isinstance(x, RMSNorm) and not norm):
        if isinstance(x, Rotate):
            rope = x.rope
        elif isinstance(x, RMSNorm):
            norm = x
        x = x.x
    return x, norm, rope


def latent_into_writer(graph: Graph, target: Target) -> None:
    """Rotation of a key, norm of a latent and their write -> latent_write; of one row, the
    projection of the queries."""
    for attention in each(graph, Attention):
        found = _latent(graph, attention)
        if found is None:
            continue
        latent, key = found
        query = attention.q
        if isinstance(query, HeadLinear) and graph.is_read_by(query, attention):
            graph.move(query, before=attention)
            if query.has_room(key, target):
                graph.update(query, key=key, latent=latent)
                graph.update(attention, k=None, v=None)
                continue
        writer = LatentWrite(latent, key)
        graph.insert(writer, before=attention)
        graph.update(attention, k=None, v=None, written=writer)


def _latent(graph: Graph, attention: Attention) -> tuple[Value, LatentKey] | None:
    """The key of a latent cache that is rotated, and the latent behind it, which is normed, as
    columns side by side: the first of them."""
    rotated, normed, cache = attention.k, attention.v, attention.cache
    if not cache.shape.latent or not isinstance(rotated, Rotate):
        return None
    if not isinstance(normed, RMSNorm) or normed.gate is not None or normed.groups > 1:
        return None
    if any(not graph.is_read_by(part, attention) for part in (rotated, normed)):
        return None
    k, v = rotated.x, normed.x
    if not (isinstance(k, Slice) and isinstance(v, Slice) and k.x is v.x):
        return None
    whole = rotated.rope.rotary_dim == rotated.head_dim == k.width
    if k.offset + k.width != v.offset or not whole or normed.weight.shape != (v.width,):
        return None
    _, x_stride, offset = source(k)
    norm = Norm(normed.weight, normed.eps)
    return k, LatentKey(rotated.rope, norm, cache, x_stride, offset)


def gates_into_attention(graph: Graph, target: Target) -> None:
    """attention * sigmoid(gates) -> attention (decode)."""
    for gated in each(graph, SigmoidGate):
        attention, gates = gated.x, gated.gate
        if not isinstance(attention, Attention):
            continue
        split = isinstance(attention.variant, AttentionVariant)
        aligned = gates.width == gated.width and source(gates)[2] % 4 == 0
        if split and aligned and graph.is_read_by(attention, gated):
            graph.replace(gated, attention, gates=gates)


def rope_into_head_linear(graph: Graph, target: Target) -> None:
    """rope -> head_linear: it rotates what it keeps."""
    for linear in each(graph, HeadLinear):
        rotated = linear.x
        if not isinstance(rotated, Rotate) or not graph.is_read_by(rotated, linear):
            continue
        own = rotated.head_dim * linear.heads == rotated.width
        if rotated.rope.rotary_dim == linear.kept and own:
            graph.update(linear, x=rotated.x, rope=rotated.rope)


# Kernels that write the inputs of projections


def prepare_in_makers(graph: Graph, target: Target) -> None:
    """x -> times the weights of the norm behind it, int8(x) (in decode both), or f16(x): the kernel
    that makes x writes that too, if projections want to read it so."""
    for maker in each(graph, Maker):
        form = _wanted(graph, maker)
        if form is None or not (target.kind.few or form.scales == HALVES):
            continue
        if not maker.writes(form, target):
            continue
        users = [user for user in graph.users(maker) if isinstance(user, Projection)]
        readers = [
            user
            for user in users
            if user.x is maker and user.norm is form.norm and user.x_scales == form.scales
            if user.weight.order is None
        ]
        prepared = _prepared(readers[0], target, form.scales, keep=form.keep, made=True)
        graph.insert(prepared, before=maker)
        for reader in readers:
            graph.update(reader, prepared=prepared)
        maker.write(prepared, target)


def _wanted(graph: Graph, x: Value) -> Form | None:
    """The one form, if there is one, in which projections want to read x. Where some read int8 and
    others not, as a router does, those read x itself."""
    projections: dict[Norm | None, list[Projection]] = {}
    others = False
    for user in dict.fromkeys(graph.users(x)):
        uses = [name for name, source in user.links() if source is x]
        others = others or uses != ["x"]
        if isinstance(user, Projection) and "x" in uses:
            projections.setdefault(user.norm, []).append(user)
        elif isinstance(user, LogitsRows) and any(
            isinstance(reader, Projection) and (reader.norm is not None or reader.int8)
            for reader in graph.users(user)
        ):
            return None  # they are copied first
        else:
            others = True
    forms: list[Form] = []
    for norm, readers in projections.items():
        in_order = all(reader.weight.order is None for reader in readers)
        if norm is not None and not in_order:
            others = True
            continue
        scales = {"" if r.weight.order is not None else r.x_scales for r in readers}
        forms += [Form(norm, own) for own in scales if own]
        if norm is not None and scales == {""}:
            forms.append(Form(norm, ""))
        others = others or len(scales) > 1 or (norm is None and scales == {""})
    return replace(forms[0], alone=not others) if len(forms) == 1 else None


# The order matters. Projections and norms apply what they have taken in in the order in which the
# rules are listed: norm, activation or gate, factors, residual, scale. No rule asks whether a later
# one has run: after residual_into_maker, activation_into_linear would take activation(linear + x)
# for activation(linear) + x, and norm_into_projections would lose the residual of a norm.
RULES: tuple[Rule, ...] = (
    norm_into_projections,
    choice_into_experts,
    gate_into_projection,
    activation_into_linear,
    factors_into_linear,
    residual_into_maker,
    scale_into_norm,
    rope_into_head_linear,
)

# What the kernels that operations have chosen by now can do besides. No choice depends on these
# rules, but for the variant of a kernel that writes int8. prepare_in_makers is the last, because
# then it is known how many buffers a kernel binds, and what makes the input of a projection.
KERNEL_RULES: tuple[Rule, ...] = (
    heads_into_attention,
    latent_into_writer,
    gates_into_attention,
    prepare_in_makers,
)


def rewrite(graph: Graph, target: Target, changes: Changes) -> None:
    """Rewrites a graph, and has each operation choose its variant: adds low-rank changes beside
    weights, does what every target needs, and applies the rules if operations are to be fused."""
    add_changes(graph, changes)
    take_all_rows(graph, target)
    size_tiles(graph, target)
    for rule in RULES if target.fuse else ():
        rule(graph, target)
    for value in graph.values:
        value.choose(target)
    for rule in KERNEL_RULES if target.fuse else ():
        rule(graph, target)
    quantize_inputs(graph, target)
