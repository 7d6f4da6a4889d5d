"""Parts that the decoder-only architectures share: config, attention and MLP, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, Self

from infer.kernels.errors import UnsupportedError
from infer.kernels.gpu.tensor import GpuTensor
from infer.kernels.lowering.graph import Value
from infer.kernels.ops import functional as ops
from infer.kernels.ops.rope import Rope
from infer.kernels.state.kv_cache import PAGE, KVShape, LayerCache
from infer.kernels.state.layer_state import StateShape
from infer.models.loading.config import RawConfig, RopeConfig, shown
from infer.models.loading.weights import Source, WeightSpec


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts. count: all experts. per_token: those that work on a token. inner: the
    width of each. normalize: the weights of a token's experts add up to one. shared_inner: the
    width of an expert that all tokens share, or 0. layers: which layers have experts. scale: of the
    weights. sigmoid: scores are sigmoids, not a softmax; epsilon is added to their sum when they
    are normalised. correction: the checkpoint's name of a bias that counts for the choice alone.
    gated: the shared expert has a sigmoid gate. groups: how many groups there are, and from how
    many of them a token's experts are chosen. latent: the width that experts read and write, if it
    is not hidden_size."""

    count: int
    per_token: int
    inner: int
    normalize: bool
    shared_inner: int
    layers: tuple[bool, ...]
    scale: float = 1.0
    sigmoid: bool = False
    epsilon: float = 0.0
    correction: str | None = None
    gated: bool = True
    groups: tuple[int, int] = (1, 1)
    latent: int = 0


@dataclass(frozen=True)
class AttentionConfig:
    """The layers with attention. gated_attention: the output is multiplied by the sigmoid of a part
    of the query projection."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # on each head of q and k
    wide_qk_norm: bool = False  # on all of q and all of k
    own_qk_norms: bool = False  # on each head, with weights of its own
    norm_after_rope: bool = False
    norm_names: tuple[str, str] = ("q_norm", "k_norm")  # in the checkpoint
    fused_qkv: bool = False  # one tensor in the checkpoint
    gated_attention: bool = False
    attention_multiplier: float | None = None  # None: 1 / sqrt(head_dim)
    attn_logit_softcapping: float = 0.0
    clip_qkv: float = 0.0  # queries, keys and values are clipped to this distance from zero
    position_scaling: tuple[float, int] | None = None  # of queries: `Ops.position_scale`
    sinks: bool = False  # each head has one more logit beside its scores

    @property
    def normed(self) -> bool:
        """Whether queries and keys go through norms."""
        return self.qk_norm or self.wide_qk_norm or self.own_qk_norms


@dataclass(frozen=True)
class MLPConfig:
    """activation: a function of `Ops.activation`."""

    activation: str = "silu"
    gated: bool = True
    mlp_bias: bool = False
    fused_gate_up: bool = False  # one tensor in the checkpoint


@dataclass(frozen=True)
class NormConfig:
    """rms_norm_eps: the epsilon of all norms, of whatever kind."""

    rms_norm_eps: float = 1e-6
    layer_norm: bool = False  # instead of RMS norms
    norm_bias: bool = False
    norm_weight: bool = True


@dataclass(frozen=True)
class MambaConfig:
    conv_bias: bool = False
    mamba_proj_bias: bool = False  # of the projections around it
    time_step_limit: tuple[float, float] = (0.0, inf)


_PARTS = {"attention": AttentionConfig, "mlp": MLPConfig, "norm": NormConfig, "mamba": MambaConfig}


@dataclass(frozen=True)
class DecoderConfig:
    """config.json of a decoder-only transformer, with Hugging Face's field names. What only one
    family has is in a subclass.

    For each layer, windows says how many positions it sees (0: all), rope_layers whether queries
    and keys are rotated, and states what it keeps instead of keys and values: None if it keeps
    these, or perhaps NOTHING. The fields after them default to off, or 1.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeConfig
    windows: tuple[int, ...]
    rope_layers: tuple[bool, ...]
    states: tuple[StateShape | None, ...]
    local_rope: RopeConfig | None = None  # of the layers with a window, where they have their own
    attention: AttentionConfig = AttentionConfig()
    mlp: MLPConfig = MLPConfig()
    norm: NormConfig = NormConfig()
    experts: ExpertsConfig | None = None
    mamba: MambaConfig = MambaConfig()
    parallel: bool = False  # attention and MLP of a layer read the same
    embedding_multiplier: float = 1.0  # of the embeddings of tokens
    residual_multiplier: float = 1.0  # of what attention and the MLP, biases included, add
    logits_scaling: float = 1.0  # what they are divided by
    final_logit_softcapping: float = 0.0
    head_bias: bool = False  # of the logits

    def kv_shape(self, layer: int) -> KVShape:
        """The KV heads of a layer and their head_dim."""
        return KVShape(self.num_key_value_heads, self.head_dim)

    @property
    def kv_sources(self) -> list[int]:
        """For each layer the one whose keys and values it attends to: itself, or, where it shares
        them, another."""
        return [*range(self.num_hidden_layers)]

    @property
    def kv_shapes(self) -> list[KVShape]:
        """`kv_shape` of each layer that has keys and values of its own."""
        layers = zip(self.kv_sources, self.states, strict=True)
        own = [i for i, (source, state) in enumerate(layers) if source == i and state is None]
        return [self.kv_shape(layer) for layer in own]

    @property
    def kv_windows(self) -> list[int]:
        """For each of `kv_shapes`, the most positions that a layer sees which attends to it; 0:
        all."""
        seen: dict[int, list[int]] = {}
        for layer, (source, state) in enumerate(zip(self.kv_sources, self.states, strict=True)):
            if state is None:
                seen.setdefault(source, []).append(self.windows[layer])
        return [max(seen[source]) if all(seen[source]) else 0 for source in sorted(seen)]

    @classmethod
    def _of_parts(cls, own: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The fields of each part, taken from among `own`."""
        known = {field.name for field in fields(cls)}
        names = {
            part: {field.name for field in fields(config)} & own.keys() - known
            for part, config in _PARTS.items()
        }
        return {part: {name: own.pop(name) for name in found} for part, found in names.items()}

    def changed(self, **own: Any) -> Self:
        """Returns the config with other values of fields, its own or those of its parts."""
        of_parts = self._of_parts(own).items()
        parts = {part: replace(getattr(self, part), **values) for part, values in of_parts}
        return replace(self, **parts, **own)

    @classmethod
    def read(
        cls,
        raw: RawConfig,
        *,
        windows: Sequence[int] | None = None,
        rope_layers: Sequence[bool] | None = None,
        states: Sequence[StateShape | None] | None = None,
        tied: bool = False,
        attention_bias: bool | None = None,
        eps: float = 1e-6,
        theta: float = 10000.0,
        partial: float | None = None,
        interleaved: bool = False,
        rope: RopeConfig | None = None,
        eps_key: str = "rms_norm_eps",
        activation_key: str = "hidden_act",
        **own: Any,
    ) -> Self:
        """Reads the keys that the configs of all models have, and closes the config: keys that the
        model reads itself are read before.

        eps_key, activation_key: the family's names for these two. own: all other fields, those of
        the parts too. Also, whether rope is interleaved or what it is altogether, and the defaults
        of tie_word_embeddings, rms_norm_eps, rope_theta and partial_rotary_factor. attention_bias:
        the default of the key for biases of all projections around attention; None: the key is not
        read. Raises UnsupportedError.
        """
        if attention_bias is not None:
            bias = raw.get("attention_bias", attention_bias, bool)
            own["qkv_bias"] = own["output_bias"] = bias
        hidden, heads = raw.size("hidden_size"), raw.size("num_attention_heads")
        layers = raw.size("num_hidden_layers")
        kv_heads = raw.size("num_key_value_heads", heads)
        head_dim = raw.size("head_dim", hidden // heads)
        check_heads(raw, heads, kv_heads, head_dim)
        own["rms_norm_eps"] = raw.factor(eps_key, eps, (0.0, 1.0))
        own["activation"] = read_activation(raw, activation_key)
        of_parts = cls._of_parts(own).items()
        config = cls(
            model_type=raw.get("model_type"),
            vocab_size=raw.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=raw.size("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=raw.size("max_position_embeddings", 2048, least=2),
            tie_word_embeddings=raw.get("tie_word_embeddings", tied, bool),
            rope=rope or raw.rope(head_dim, theta, partial, interleaved),
            windows=tuple(windows) if windows is not None else (0,) * layers,
            rope_layers=tuple(rope_layers) if rope_layers is not None else (True,) * layers,
            states=tuple(states) if states is not None else (None,) * layers,
            **{part: _PARTS[part](**values) for part, values in of_parts},
            **own,
        )
        raw.done()
        return config


def check_heads(raw: RawConfig, heads: int, kv_heads: int, head_dim: int) -> None:
    """Raises UnsupportedError for heads that attention does not have."""
    if heads % kv_heads:
        raise UnsupportedError(
            f"{raw.place}: {heads} attention heads cannot share {kv_heads} key-value heads."
        )
    if head_dim % 8 or head_dim > 576:
        raise UnsupportedError(
            f"{raw.place}: head_dim = {head_dim} is not implemented "
            "(only multiples of 8 up to 576)."
        )


# The names that transformers has for the functions of `Ops.activation`.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def read_activation(raw: RawConfig, key: str) -> str:
    """The activation function of the MLP."""
    raw.expect(key, *_ACTIVATIONS)
    return _ACTIVATIONS[raw.get(key, "silu", str)]


def layer_windows(
    raw: RawConfig, window: int | None, slides: Callable[[int], bool] = lambda layer: True
) -> list[int]:
    """The window of each layer: from layer_types where given, else `window` where it slides."""
    layers = raw.size("num_hidden_layers")
    types = raw.items("layer_types", None, kind=str)
    if types is None:
        return [window or 0 if slides(layer) else 0 for layer in range(layers)]
    if len(types) != layers or set(types) - {"full_attention", "sliding_attention"}:
        raise UnsupportedError(
            f"{raw.place}: layer_types must name full_attention or sliding_attention for each of "
            f"{layers} layers; it is {shown(types)}."
        )
    if "sliding_attention" in types and not window:
        raise UnsupportedError(f"{raw.place}: layer_types has sliding layers without a window.")
    return [window or 0 if kind == "sliding_attention" else 0 for kind in types]


def same_windows(raw: RawConfig, window: int | None) -> list[int]:
    """One window for all layers, or none; layer_types must not say otherwise."""
    windows = layer_windows(raw, window)
    if set(windows) != {window or 0}:
        raise UnsupportedError(
            f"{raw.place}: layer_types = {shown(raw.get('layer_types'))} is not implemented for "
            f"{raw.get('model_type')} (only the sliding_window of {window} in all layers)."
        )
    return windows


def layers_with_state(raw: RawConfig, kind: str, has_state: Callable[[int], bool]) -> list[bool]:
    """For each layer whether it has a state, and is called `kind` in layer_types, where given."""
    layers = raw.size("num_hidden_layers")
    types = raw.items("layer_types", None, kind=str)
    if types is None:
        return [has_state(layer) for layer in range(layers)]
    if len(types) != layers or any(found not in ("full_attention", kind) for found in types):
        raise UnsupportedError(
            f"{raw.place}: layer_types must name full_attention or {kind} for each of {layers} "
            f"layers; it is {shown(types)}."
        )
    return [found == kind for found in types]


def conv_taps(raw: RawConfig, key: str, default: int) -> int:
    """The inputs that a short convolution sees."""
    taps = raw.size(key, default)
    if not 2 <= taps <= 16:
        raise UnsupportedError(f"{raw.place}: {key} = {taps} is not implemented (only 2 to 16).")
    return taps


Weights = Mapping[str, GpuTensor]


class Scope(Mapping[str, GpuTensor]):
    """The weights under a prefix, without it."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self.weights, self.prefix = weights, prefix + "."

    def __getitem__(self, name: str) -> GpuTensor:
        return self.weights[self.prefix + name]

    def __iter__(self) -> Iterator[str]:
        start = len(self.prefix)
        return (name[start:] for name in self.weights if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def renamed(specs: Iterable[WeightSpec], names: Mapping[str, str]) -> Iterator[WeightSpec]:
    """Yields the weights, made of tensors by other names. names: what replaces each part of Llama's
    names, from first to last."""
    for spec in specs:
        sources = []
        for source in spec.sources:
            key = source.key
            for ours, theirs in names.items():
                key = key.replace(ours, theirs)
            sources.append(replace(source, key=key))
        yield replace(spec, sources=tuple(sources))


def norm_weights(config: DecoderConfig, name: str, key: str) -> Iterator[WeightSpec]:
    """The weights of a norm over whole rows, and its bias where the config has one."""
    if not config.norm.norm_weight:
        yield WeightSpec(name, (), ones=config.hidden_size)
        return
    yield WeightSpec(name, (Source(f"{key}.weight", (config.hidden_size,)),))
    if config.norm.norm_bias:
        yield WeightSpec(f"{name}.bias", (Source(f"{key}.bias", (config.hidden_size,)),))


def norm(x: Value, w: Weights, name: str, config: DecoderConfig, groups: int = 1) -> Value:
    """The norm of that name over whole rows, or head by head; groups: of so many that have weights
    of their own."""
    if config.norm.layer_norm:
        return ops.layernorm(x, w[name], w.get(f"{name}.bias"), config.norm.rms_norm_eps, groups)
    return ops.rmsnorm(x, w[name], config.norm.rms_norm_eps, groups)


def qk_norms(q: Value, k: Value, w: Weights, config: DecoderConfig) -> tuple[Value, Value]:
    """The norms of queries and keys."""
    own = [x.width // config.head_dim if config.attention.own_qk_norms else 1 for x in (q, k)]
    return norm(q, w, "q_norm", config, own[0]), norm(k, w, "k_norm", config, own[1])


def stacked(name: str, prefix: str, parts: Mapping[str, tuple[int, ...]]) -> WeightSpec:
    """A weight of several of the checkpoint's tensors, one on top of the other."""
    sources = tuple(Source(f"{prefix}.{key}", shape) for key, shape in parts.items())
    return WeightSpec(name, sources)


def conv_weight(name: str, key: str, shape: StateShape) -> WeightSpec:
    """The taps of each channel of a short convolution, one channel after the other."""
    return WeightSpec(name, (Source(key, (shape.channels, 1, shape.taps)).values(),))


def attention_weights(config: DecoderConfig, name: str, prefix: str) -> Iterator[WeightSpec]:
    """qkv_proj, o_proj, and their biases, norms and sinks where the config has them."""
    hidden, d, own = config.hidden_size, config.head_dim, config.attention
    heads = {
        "q": config.num_attention_heads * d,
        "k": config.num_key_value_heads * d,
        "v": config.num_key_value_heads * d,
    }
    weights = {f"{part}_proj.weight": (rows, hidden) for part, rows in heads.items()}
    if own.fused_qkv:
        weights = {"qkv_proj.weight": (sum(heads.values()), hidden)}
    qkv = [stacked(f"{name}.qkv_proj", prefix, weights)]
    if own.qkv_bias:
        biases = {key.replace("weight", "bias"): shape[:1] for key, shape in weights.items()}
        qkv.append(stacked(f"{name}.qkv_proj.bias", prefix, biases))
    yield from (_gate_last(spec, d) for spec in qkv) if own.gated_attention else qkv
    yield stacked(f"{name}.o_proj", prefix, {"o_proj.weight": (hidden, heads["q"])})
    if own.output_bias:
        yield stacked(f"{name}.o_proj.bias", prefix, {"o_proj.bias": (hidden,)})
    if own.own_qk_norms:
        for part, norm in zip("qk", own.norm_names, strict=True):
            shapes = {f"{norm}.norms.{head}.weight": (d,) for head in range(heads[part] // d)}
            yield stacked(f"{name}.{part}_norm", prefix, shapes)
    elif own.qk_norm or own.wide_qk_norm:
        for part, norm in zip("qk", own.norm_names, strict=True):
            width, normed = heads[part] if own.wide_qk_norm else d, f"{name}.{part}_norm"
            if config.norm.norm_weight:
                yield stacked(normed, prefix, {f"{norm}.weight": (width,)})
                if config.norm.norm_bias:
                    yield stacked(f"{normed}.bias", prefix, {f"{norm}.bias": (width,)})
            else:
                yield WeightSpec(normed, (), ones=width)
    if own.sinks:
        yield stacked(f"{name}.sinks", prefix, {"sinks": (config.num_attention_heads,)})


def _gate_last(spec: WeightSpec, head_dim: int) -> WeightSpec:
    """q, k, v and gate, of a tensor that has the queries and the gate of one head after the other,
    and of those of k and v."""
    q, *kv = spec.sources
    both = replace(q, shape=(2 * q.shape[0], *q.shape[1:]))
    parts = list(regrouped(both, q.shape[0] // head_dim, (head_dim, head_dim)))
    half = len(parts) // 2
    return replace(spec, sources=(*parts[:half], *kv, *parts[half:]))


def regrouped(source: Source, groups: int, parts: Sequence[int]) -> Iterator[Source]:
    """A tensor in which the parts of one group of rows follow those of another, with each part of
    all groups in one piece; parts: their rows in a group."""
    size = sum(parts)
    for i, rows in enumerate(parts):
        for start in range(sum(parts[:i]), groups * size, size):
            yield source.rows(range(start, start + rows))


def last_first(source: Source, groups: int, last: int) -> Iterator[Source]:
    """A tensor in which the `last` rows of each of so many groups come before the others."""
    size = source.shape[0] // groups
    for start in range(0, source.shape[0], size):
        middle, end = start + size - last, start + size
        yield source.rows(range(middle, end))
        yield source.rows(range(start, middle))


def attention(
    x: Value,
    w: Weights,
    config: DecoderConfig,
    rope: Rope | None,
    cache: LayerCache,
    window: int,
) -> Value:
    """Grouped-query attention, with rotary positions where there is a rope."""
    own, d = config.attention, config.head_dim
    q_width, kv_width = config.num_attention_heads * d, config.num_key_value_heads * d
    qkv = ops.linear(x, w["qkv_proj"], w.get("qkv_proj.bias"))
    gate_width = [q_width] * own.gated_attention
    q, k, v, *gates = ops.split(qkv, q_width, kv_width, kv_width, *gate_width)
    if own.normed and not own.norm_after_rope:
        q, k = qk_norms(q, k, w, config)
    if own.clip_qkv:
        q, k, v = (ops.clip(part, own.clip_qkv) for part in (q, k, v))
    if rope is not None:
        q, k = ops.rope(q, rope, d), ops.rope(k, rope, d)
    if own.normed and own.norm_after_rope:
        q, k = qk_norms(q, k, w, config)
    q = position_scaled(q, config, cache)
    scale = d**-0.5 if own.attention_multiplier is None else own.attention_multiplier
    cap = own.attn_logit_softcapping
    sinks = w.get("sinks")
    y = ops.attention(q, k, v, cache, scale=scale, window=window, softcap=cap, sinks=sinks)
    for gate in gates:
        y = ops.sigmoid_gate(y, gate)
    return ops.linear(y, w["o_proj"], w.get("o_proj.bias"), config.residual_multiplier)


def position_scaled(q: Value, config: DecoderConfig, cache: LayerCache) -> Value:
    """Queries times what grows with their position, where the config says so."""
    scaling = config.attention.position_scaling
    if scaling and cache.pages_per_sequence * PAGE > scaling[1]:  # by 1 up to there
        q = ops.position_scale(q, *scaling)
    return q


def mlp_weights(config: DecoderConfig, name: str, prefix: str) -> Iterator[WeightSpec]:
    """gate_up_proj, or up_proj where it is not gated, down_proj, and their biases."""
    hidden, inner = config.hidden_size, config.intermediate_size
    first, parts = ("gate_up_proj", ("gate", "up")) if config.mlp.gated else ("up_proj", ("up",))
    shapes = {f"{part}_proj.weight": (inner, hidden) for part in parts}
    if config.mlp.fused_gate_up:
        shapes = {"gate_up_proj.weight": (2 * inner, hidden)}
    yield stacked(f"{name}.{first}", prefix, shapes)
    yield stacked(f"{name}.down_proj", prefix, {"down_proj.weight": (hidden, inner)})
    if config.mlp.mlp_bias:
        biases = {f"{part}_proj.bias": (inner,) for part in parts}
        yield stacked(f"{name}.{first}.bias", prefix, biases)
        yield stacked(f"{name}.down_proj.bias", prefix, {"down_proj.bias": (hidden,)})


def mlp(x: Value, w: Weights, config: DecoderConfig) -> Value:
    """A gated linear unit (Shazeer 2020): activation(gate) * up, projected back. Or, where it is
    not gated, activation(up)."""
    if config.mlp.gated:
        both = ops.linear(x, w["gate_up_proj"], w.get("gate_up_proj.bias"))
        gate, up = ops.split(both, both.width // 2, both.width // 2)
        y = ops.activation(gate, config.mlp.activation) * up
    else:
        up = ops.linear(x, w["up_proj"], w.get("up_proj.bias"))
        y = ops.activation(up, config.mlp.activation)
    return ops.linear(y, w["down_proj"], w.get("down_proj.bias"), config.residual_multiplier)
