"""Mixture of experts (Shazeer et al. 2017; Mixtral: Jiang et al. 2024): instead of one MLP a layer
has many, and a router that chooses some of them for each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from infer.kernels.errors import UnsupportedError
from infer.kernels.lowering.graph import Value
from infer.kernels.ops import functional as ops
from infer.kernels.ops.experts import Route
from infer.models.blocks import layers
from infer.models.blocks.decoder import Decoder
from infer.models.blocks.layers import DecoderConfig, ExpertsConfig, Scope, Weights
from infer.models.loading.config import RawConfig, shown
from infer.models.loading.weights import Source, WeightSpec


class MixtureOfExperts(Decoder):
    """Models some of whose layers have experts, as the config says, and perhaps one more expert
    that all tokens share."""

    # How a checkpoint calls the block, and the projections of an expert. If transformers 5 was told
    # to write what it has in memory, the experts of a layer are two tensors of a fused_block.
    block = fused_block = "mlp"
    fused_transposed = False  # whether each of their matrices may have columns for rows
    gate, up, down = "gate_proj", "up_proj", "down_proj"
    shared = "shared_expert"

    @property
    def experts(self) -> ExpertsConfig:
        assert self.config.experts is not None  # read_config has read it
        return self.config.experts

    @property
    def width(self) -> int:
        """The width that experts read and write."""
        return self.experts.latent or self.config.hidden_size

    @property
    def first_experts(self) -> str:
        """The first matrix of each expert."""
        return "gate_up_proj" if self.config.mlp.gated else "up_proj"

    def mlp_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        """router, experts.gate_up_proj, or up_proj where they are not gated, experts.down_proj, one
        expert below the other, and those of shared_expert, whose gate is the router's last row."""
        c, experts = self.config, self.config.experts
        if experts is None or not experts.layers[layer]:
            yield from super().mlp_weights(layer, name, prefix)
            return
        prefix, fused = f"{prefix}.{self.block}", f"{prefix}.{self.fused_block}"
        router = {"gate.weight": (experts.count, c.hidden_size)}
        if experts.shared_inner and experts.gated:
            router["shared_expert_gate.weight"] = (1, c.hidden_size)
        own, other = (layers.stacked("", place, router).sources for place in (prefix, fused))
        yield WeightSpec(f"{name}.router", own, other)
        if experts.correction:
            correction, in_memory = (
                self.correction_weight(f"{name}.correction", f"{place}.{experts.correction}")
                for place in (prefix, fused)
            )
            yield replace(correction, others=in_memory.sources)
        yield from self.expert_weights(name, prefix, fused)
        if experts.shared_inner:
            shared = replace(c, intermediate_size=experts.shared_inner)
            yield from layers.mlp_weights(
                shared, f"{name}.shared_expert", f"{prefix}.{self.shared}"
            )

    def expert_weights(self, name: str, prefix: str, fused: str) -> Iterator[WeightSpec]:
        """experts.gate_up_proj or up_proj, and experts.down_proj, of a tensor for each matrix of an
        expert, or, under `fused`, of two for all experts."""
        experts, width = self.experts, self.width
        parts = (self.gate, self.up) if self.config.mlp.gated else (self.up,)
        into, back = (experts.inner, width), (width, experts.inner)
        gate_up, down = (
            tuple(
                Source(f"{prefix}.experts.{expert}.{part}.weight", shape)
                for expert in range(experts.count)
                for part in parts
            )
            for parts, shape in ((parts, into), ((self.down,), back))
        )
        both = (experts.count, len(parts) * experts.inner, width)
        for part, sources, shape in (
            (self.first_experts, gate_up, both),
            ("down_proj", down, (experts.count, *back)),
        ):
            key, rows = f"{fused}.experts.{part}", shape[1]
            others: tuple[Source, ...] = (Source(key, shape),)
            if self.fused_transposed:
                stack = Source(key, shape, transposed=True)
                starts = range(0, experts.count * rows, rows)
                others = tuple(stack.rows(range(start, start + rows)) for start in starts)
            yield WeightSpec(f"{name}.experts.{part}", sources, others, unit=rows)

    def correction_weight(self, name: str, key: str) -> WeightSpec:
        return WeightSpec(name, (Source(key, (self.experts.count,)),))

    def active(self, name: str, rows: int) -> int:
        """Without the experts that are not chosen."""
        if ".experts." not in name:
            return rows
        idle = self.experts.count - self.experts.per_token
        if name.endswith(".down_proj"):
            return rows - idle * self.width
        return rows - idle * (1 + self.config.mlp.gated) * self.experts.inner

    def mlp(self, x: Value, w: Weights) -> Value:
        """The outputs of the chosen experts, each times its weight, summed up; the shared expert's,
        too, which may be the last of their stacks (LoadPlan.joined)."""
        if "router" not in w:
            return super().mlp(x, w)
        experts, c = self.experts, self.config
        both = ops.linear(x, w["router"])
        logits, *gates = ops.split(both, experts.count, *[1] * (both.width - experts.count))
        stacked = w["experts.down_proj"].shape[0] // self.width - experts.count
        routing = ops.route(
            both if stacked else logits,
            experts.per_token,
            normalize=experts.normalize,
            sigmoid=experts.sigmoid,
            correction=w.get("correction"),
            scale=experts.scale,
            epsilon=experts.epsilon,
            groups=experts.groups,
            shared=stacked,
            shared_scale=c.residual_multiplier,
            gated=bool(stacked and gates),
        )
        y = self.chosen(x, routing, w)
        if experts.shared_inner and not stacked:
            shared = layers.mlp(x, Scope(w, "shared_expert"), c)
            y = (ops.sigmoid_gate(shared, *gates) if gates else shared) + y
        return y

    def chosen(self, x: Value, routing: Route, w: Weights) -> Value:
        """The part of that sum from the chosen experts."""
        c, into = self.config, w[f"experts.{self.first_experts}"]
        y = ops.expert_gate_up(x, into, routing, function=c.mlp.activation, gated=c.mlp.gated)
        return ops.expert_down(y, w["experts.down_proj"], routing)


def predicts_further(config: DecoderConfig, key: str) -> bool:
    """Whether a tensor belongs to a layer behind the others that predicts further tokens."""
    return key.startswith(f"model.layers.{config.num_hidden_layers}.")


def no_experts(raw: RawConfig, having: tuple[bool, ...]) -> ExpertsConfig:
    """Returns the config of a mixture in which no layer has experts: its keys about experts need
    not make sense."""
    raw.without_experts()
    return ExpertsConfig(0, 0, 0, normalize=False, shared_inner=0, layers=having)


def read_experts(
    raw: RawConfig,
    count: str,
    inner: str,
    *,
    per_token: int,
    normalize: bool,
    shared_inner: int = 0,
    sparse: bool = False,
    scale: float = 1.0,
) -> ExpertsConfig:
    """The keys that all of them have. count and inner: what the config calls these; transformers 5
    says num_local_experts where older files have num_experts. per_token: where it says nothing.
    sparse: it may say that some layers have no experts. scale: of the weights. Raises
    UnsupportedError."""
    raw.expect("hidden_act", "silu", "swish")
    n_layers = raw.size("num_hidden_layers")
    other = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}[count]
    having = [True] * n_layers
    if sparse:
        step, dense = raw.size("decoder_sparse_step", 1), raw.items("mlp_only_layers", [], kind=int)
        found = raw.get(count, raw.get(other, None, int), int) != 0
        having = [found and i not in dense and (i + 1) % step == 0 for i in range(n_layers)]
        if not any(having):
            return no_experts(raw, tuple(having))
    n_experts = raw.size(count, None) or raw.size(other)
    chosen = read_chosen(raw, "num_experts_per_tok", n_experts, per_token)
    return ExpertsConfig(
        n_experts, chosen, raw.size(inner), normalize, shared_inner, tuple(having), scale
    )


def read_chosen(raw: RawConfig, key: str, n_experts: int, default: int) -> int:
    """The number of experts that work on a token. Raises UnsupportedError."""
    chosen = raw.size(key, default)
    if chosen > n_experts:
        raise UnsupportedError(f"{raw.place}: {chosen} experts cannot be chosen of {n_experts}.")
    return chosen


def read_sigmoid_experts(
    raw: RawConfig,
    *,
    dense: int,
    normalize: bool,
    routed: str = "n_routed_experts",
    shared: str = "n_shared_experts",
    typed: bool = False,
) -> ExpertsConfig:
    """The keys of models that choose as DeepSeek-V3 does: by sigmoids and a correction, besides
    experts that all tokens share. dense: how many of the first layers have none of them, and
    normalize, where the config does not say. routed and shared: what the config calls their counts.
    typed: mlp_layer_types may say which layers have experts. Raises UnsupportedError."""
    raw.expect("hidden_act", "silu", "swish")
    first = raw.get("first_k_dense_replace", dense, int)
    having = read_sparse(raw if typed else raw.with_values(mlp_layer_types=None), first)
    if not any(having):
        return no_experts(raw, having)
    count, inner = raw.size(routed), raw.size("moe_intermediate_size")
    chosen = read_chosen(raw, "num_experts_per_tok", count, 8)
    return ExpertsConfig(
        count,
        chosen,
        inner,
        raw.get("norm_topk_prob", normalize, bool),
        raw.size(shared, 1) * inner,
        having,
        scale=raw.factor("routed_scaling_factor"),
        sigmoid=True,
        correction="gate.e_score_correction_bias",
        gated=False,
        groups=read_groups(raw, count, chosen, least=2),
    )


def read_sparse(raw: RawConfig, dense: int) -> tuple[bool, ...]:
    """For each layer whether it has experts: by mlp_layer_types where given, else all but the first
    so many. Raises UnsupportedError."""
    n_layers = raw.size("num_hidden_layers")
    types = raw.items("mlp_layer_types", None, kind=str)
    if types is None:
        return tuple(layer >= dense for layer in range(n_layers))
    if len(types) != n_layers or any(kind not in ("dense", "sparse") for kind in types):
        raise UnsupportedError(
            f"{raw.place}: mlp_layer_types must name dense or sparse for each of {n_layers} "
            f"layers; it is {shown(types)}."
        )
    return tuple(kind == "sparse" for kind in types)


def read_groups(raw: RawConfig, n_experts: int, chosen: int, least: int = 1) -> tuple[int, int]:
    """How many groups of experts there are, each of at least so many, and of how many of them
    experts are chosen. Raises UnsupportedError."""
    count, of = raw.size("n_group", 1), raw.size("topk_group", 1)
    if count == 1:
        return 1, 1
    size = n_experts // count
    if n_experts % count or size < least or of > count or of * size < chosen:
        raise UnsupportedError(
            f"{raw.place}: n_group = {count} groups of {n_experts} experts, of which topk_group = "
            f"{of} have the {chosen} that work on a token, is not implemented."
        )
    return count, of
