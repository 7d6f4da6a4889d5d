"""config.json: read strictly, in the spellings before and since transformers 5."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from infer.kernels.errors import ModelNotFoundError, UnsupportedError
from infer.models.loading.files import read_text

_MISSING = object()

# Keys of transformers' configs that change the computation, and the values that mean "not used".
# Keys that a model has read are skipped; all others must have a neutral value. What tensors of a
# checkpoint show, such as biases, need not be among them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (None, False),
    "alibi": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "attention_chunk_size": (None,),
    "attention_in_multiplier": (None, 1, 1.0),
    "attention_k_eq_v": (None, False),
    "attention_logit_cap": (None,),
    "attention_multiplier": (None,),
    "attention_out_multiplier": (None, 1, 1.0),
    "attention_value_scale": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "attn_temperature_tuning": (None, False),
    "auto_map": (None, {}),
    "clip_qkv": (None,),
    "compression_config": (None, {}),
    "conv_L_cache": (None,),
    "decoder": (None, {}),
    "dim_model_base": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "embedding_scale": (None, 1, 1.0),
    "enable_moe_block": (None, False),
    "final_logit_softcapping": (None,),
    "full_attention_interval": (None,),
    "full_attn_idxs": (None,),
    "generator": (None, {}),
    "global_attn_every_n_layers": (None,),
    "global_head_dim": (None,),
    "hidden_size_per_layer_input": (None, 0),
    "hybrid_override_pattern": (None,),
    "index_topk": (None, 0),
    "is_causal": (None, True),
    "is_encoder_decoder": (None, False),
    "key_multiplier": (None, 1, 1.0),
    "kv_lora_rank": (None,),
    "layer_rope_theta": (None,),
    "layer_types": (None, []),
    "layers_block_type": (None,),
    "linear_conv_kernel_dim": (None,),
    "llama_4_scaling": (None, {}),
    "lm_head_multiplier": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "logits_soft_cap": (None,),
    "mlp_multipliers": (None,),
    "moe_latent_size": (None,),
    "moe_num_experts": (None, 0),
    "moe_router_logit_softcapping": (None,),
    "mrope_section": (None,),
    "multi_query": (None, False),
    "mup_enabled": (None, False),
    "n_routed_experts": (None, 0),
    "no_rope_layer_interval": (None,),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_kv_shared_layers": (None, 0),
    "num_local_experts": (None, 0),
    "output_logit_soft_cap": (None,),
    "parallel_attn": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "per_layer_config": (None, {}),
    "post_norm": (None, False),
    "qk_layernorm": (None, False),
    "quantization": (None, {}),
    "quantization_config": (None, {}),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "rope_local_base_freq": (None,),
    "rotary_pct": (None, 1, 1.0),
    "routed_scaling_factor": (None, False, 1, 1.0),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "scale_attn_weights": (None, True),
    "scale_depth": (None,),
    "scale_emb": (None, 1, 1.0),
    "scale_embedding": (None, False),
    "scale_embeddings": (None, False),
    "sliding_window": (None, 0),
    "sliding_window_size": (None, 0),
    "swiglu_alpha": (None,),
    "swiglu_limit": (None,),
    "text_config": (None, {}),
    "use_bidirectional_attention": (None, False),
    "use_cla": (None, False),
    "use_mla": (None, False),
    "use_mrope": (None, False),
    "use_parallel_residual": (None, False),
    "use_post_norm": (None, False),
    "use_qk_norm": (None, False),
}


_OF_EXPERTS = {
    "moe_latent_size",
    "moe_num_experts",
    "moe_router_logit_softcapping",
    "n_routed_experts",
    "num_experts",
    "num_local_experts",
    "routed_scaling_factor",
}

# Counts of things that are listed one by one: more of them would be damage.
_MOST = dict.fromkeys(
    (
        *("num_hidden_layers", "n_layer", "num_layers", "block_count"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        *("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "expert_count"),
        *("num_attention_heads", "n_head", "num_heads", "attention.head_count"),
        *("num_key_value_heads", "num_kv_heads", "attention.head_count_kv"),
        *("mamba_n_heads", "mamba_num_heads", "mamba_n_groups", "n_groups"),
        *("linear_num_key_heads", "linear_num_value_heads"),
    ),
    10_000,
)
_INT = 2**31 - 1  # at most, either way
_BYTES = 16 << 20  # of a config.json at most: lists of quantised modules take a few of them
_DEPTH = 32  # of a config.json at most: nothing that compares or shows values recurses for long
_FLOAT = 3.4e38  # at most: kernels compute in f32
_FACTOR = (1e-6, 1e6)  # so that no product of several leaves f32
_PARTIAL = (1e-6, 1.0)
_THETA = (1.001, 1e30)  # by powers of one nothing would rotate slower than anything else

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 80
_SHOWN.maxlist = _SHOWN.maxdict = 12


def _is_shallow(value: Any) -> bool:
    """Whether lists and objects are nested no more than _DEPTH levels deep."""
    level = [value]
    for _ in range(_DEPTH + 1):
        nested = [inner for inner in level if isinstance(inner, dict | list)]
        level = [
            each
            for inner in nested
            for each in (inner.values() if isinstance(inner, dict) else inner)
        ]
        if not nested:
            return True
    return False


def shown(value: Any) -> str:
    """A value for a message, however long it is."""
    text = _SHOWN.repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def nearest(name: str, names: Collection[str]) -> str:
    """Returns the end of a message about an unknown name: the names that are like it, or "" where
    none is."""
    close = get_close_matches(name.lower(), names)
    return f" The nearest that are: {', '.join(close)}." if close else ""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: kind is one of _ROPE_KINDS; scaling holds its own keys as config.json names
    them, all of them checked. interleaved: neighbouring dimensions are rotated together; backwards:
    all are rotated the other way."""

    theta: float
    rotary_dim: int
    kind: str
    scaling: dict[str, Any]
    max_position_embeddings: int
    interleaved: bool = False
    backwards: bool = False


class RawConfig:
    """The keys of a config.json. What a model reads is noted; `done` refuses what it missed."""

    def __init__(self, values: dict[str, Any], place: str = "config.json") -> None:
        self.values, self.place = values, place
        self.read: set[str] = set()

    @classmethod
    def open(cls, folder: Path, name: str = "config.json") -> RawConfig:
        path = folder / name
        try:
            if path.stat().st_size > _BYTES:
                raise ValueError(f"no {name} is larger than {_BYTES:,} bytes")
            values = json.loads(read_text(path))
            if not _is_shallow(values):
                raise ValueError(f"it is nested more than {_DEPTH} levels deep")
        except FileNotFoundError:
            raise ModelNotFoundError(
                f"{folder} has no {name}. Give the folder of a model in Hugging Face form."
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise UnsupportedError(f"{path} cannot be read ({error}). Fetch it again.") from None
        if not isinstance(values, dict):
            raise UnsupportedError(f"{path} does not hold a JSON object. Fetch it again.")
        return cls(values, str(path))

    def get(self, key: str, default: Any = _MISSING, kind: type | None = None) -> Any:
        """The value of a key; null counts as absent. Raises UnsupportedError when it must be there,
        has another type, or is a number that nothing can be computed with."""
        self.read.add(key)
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise UnsupportedError(f"{self.place} lacks {key!r}.")
            return default
        return value if kind is None else self._of(kind, key, value)

    def _of(self, kind: type, key: str, value: Any) -> Any:
        if kind is float and type(value) is int:
            value = float(value) if abs(value) < _FLOAT else math.inf  # as of 1e999
        if type(value) is not kind:
            raise UnsupportedError(
                f"{self.place}: {key!r} must be of type {kind.__name__}, not {shown(value)}."
            )
        most = _INT if kind is int else _FLOAT
        if isinstance(value, int | float) and not abs(value) <= most:
            raise UnsupportedError(
                f"{self.place}: {key!r} must be a finite number of 32 bits, not {shown(value)}."
            )
        return value

    def items(self, key: str, default: Any = _MISSING, *, kind: type) -> Any:
        """The list under a key, each item of that type."""
        found = self.get(key, default, list)
        if found is None or found is default:
            return found
        return [self._of(kind, f"{key}[{i}]", item) for i, item in enumerate(found)]

    def size(self, key: str, default: Any = _MISSING, least: int = 1) -> int:
        """A count, positive unless `least` says otherwise."""
        value, most = self.get(key, default, int), _MOST.get(key, _INT)
        if value is not None and not least <= value <= most:
            raise UnsupportedError(
                f"{self.place}: {key!r} must be a count from {least} to {most}, not {value}."
            )
        return value  # type: ignore[no-any-return]

    def with_defaults(self, **defaults: Any) -> RawConfig:
        """Returns the config with values for keys that are absent; a key with null is not
        absent."""
        return self.with_values(**defaults | self.values)

    def with_values(self, /, **values: Any) -> RawConfig:
        """Returns the config with these values; keys that were read stay read."""
        made = RawConfig(self.values | values, self.place)
        made.read = self.read
        return made

    def factor(self, key: str, default: Any = 1.0, within: tuple[float, float] = _FACTOR) -> float:
        """A positive number, or one within these bounds."""
        value: float = self.get(key, default, float)
        if value is not None:
            self._check_within(within, key, value)
        return value

    def factors(self, key: str, count: int, default: Any = _MISSING) -> list[float]:
        """Reads a list of `count` positive numbers. Raises UnsupportedError."""
        values: list[float] = self.items(key, default, kind=float)
        if len(values) != count:
            raise UnsupportedError(
                f"{self.place}: {key!r} must be {count} positive numbers; it is {shown(values)}."
            )
        for i, value in enumerate(values):
            self._check_within(_FACTOR, f"{key}[{i}]", value)
        return values

    def _check_within(self, within: tuple[float, float], key: str, value: float) -> None:
        least, most = within
        if not least <= value <= most:
            positive = "positive, " if least > 0 else ""
            raise UnsupportedError(
                f"{self.place}: {key!r} must be {positive}from {least:g} to {most:g}, not {value}."
            )

    def section(self, key: str) -> RawConfig:
        """The object under a key, empty where there is none."""
        return RawConfig(self.get(key, {}, dict), f"{self.place}: {key}")

    def expect(self, key: str, *accepted: Any) -> None:
        """A key that may only have these values (the first is the default)."""
        value = self.get(key, accepted[0])
        if value not in accepted:
            raise UnsupportedError(
                f"{self.place}: {key} = {shown(value)} is not implemented "
                f"(only {', '.join(map(shown, accepted))})."
            )

    def without_experts(self) -> None:
        """No layer has experts: keys about these, which transformers writes all the same, change
        nothing."""
        self.read |= _OF_EXPERTS

    def done(self) -> None:
        """Refuse keys that change the computation and that the model did not read."""
        for key, neutral in _NEUTRAL.items():
            value = self.values.get(key)
            if key not in self.read and value not in neutral and not self._unused(key, value):
                text = json.dumps(value)
                text = text if len(text) < 80 else f"{text[:77]}..."
                raise UnsupportedError(
                    f"{self.place}: {key} = {text} changes the computation and is not "
                    f"implemented for {self.values.get('model_type')}."
                )

    def _unused(self, key: str, value: Any) -> bool:
        """Whether other values of the config say that this one is not used."""
        if key == "sliding_window":
            used = self.values.get("use_sliding_window")
            return used is False or (used is None and "use_sliding_window" in self.read)
        full = isinstance(value, list) and all(kind == "full_attention" for kind in value)
        return key == "layer_types" and full

    def rope(
        self,
        head_dim: int,
        default_theta: float = 10000.0,
        default_partial: float | None = None,
        interleaved: bool = False,
        *,
        theta_key: str = "rope_theta",
        partial_key: str = "partial_rotary_factor",
        scaling_key: str | None = "rope_scaling",
        layer_type: str = "",
    ) -> RopeConfig:
        """Rotary embedding: rope_parameters (transformers 5), perhaps those of a layer_type, or, by
        the names that the family has for them, theta, partial factor and scaling. Without a
        default_partial whole heads are rotated, and no config may say otherwise: transformers
        would not read it. All that tables are made of is checked here."""
        own, scaling = self.section("rope_parameters"), RawConfig({})
        if scaling_key:
            scaling = self.section(scaling_key)
        if own.values and scaling.values and own.values != scaling.values:
            raise UnsupportedError(
                f"{self.place}: rope_parameters and {scaling_key} exclude each other."
            )
        if layer_type and own.values:
            own._refuse_others({"full_attention", "sliding_attention"}, "")
            own = own.section(layer_type)
        elif not own.values:
            own = scaling
        if layer_type:  # transformers reads it beside the layer types, and not in one of them
            own = own.with_values(truncate=None)
        theta = own.factor("rope_theta", self.factor(theta_key, default_theta, _THETA), _THETA)
        kind = own.get("rope_type", None, str) or own.get("type", None, str) or "default"
        if kind == "su":  # as the first files call it
            kind = "longrope"
        if kind == "dynamic" and own.values.get("alpha"):  # not dynamic at all
            kind = "ntk_alpha"
        if kind not in _ROPE_KINDS:
            raise UnsupportedError(
                f"{own.place}: rope type {shown(kind)} is not implemented "
                f"(only {', '.join(_ROPE_KINDS)})."
            )
        needed, others = _ROPE_KINDS[kind]
        own._refuse_others(needed | others | _ROPE_OF_ALL, f" for type {kind!r}")
        partial = 1.0
        if default_partial is not None:
            partial = self.factor(partial_key, default_partial, _PARTIAL)
        if default_partial is not None or kind == "proportional":
            partial = own.factor("partial_rotary_factor", partial, _PARTIAL)
        elif own.values.get("partial_rotary_factor") not in (None, 1):
            own.expect("partial_rotary_factor", 1.0)
        values: dict[str, Any] = {}
        if kind == "proportional":  # all of a head is rotated, the rest of it by nothing
            values["partial_rotary_factor"], partial = partial, 1.0
        rotary_dim = int(head_dim * partial)
        least = 4 if kind in ("dynamic", "ntk_alpha") else 2  # these divide by two less
        if rotary_dim % 2 or not least <= rotary_dim <= head_dim:
            raise UnsupportedError(f"{self.place}: {rotary_dim} rotary dimensions of {head_dim}.")
        positions = self.size("max_position_embeddings", 2048, least=2)
        original = self.size(_ORIGINAL, None)
        if original is not None and _ORIGINAL in needed | others:
            own = own.with_values(**{_ORIGINAL: original})
        for key in sorted(needed | others):
            value = own._rope_value(key, rotary_dim // 2, must=key in needed)
            if value is not None:
                values[key] = value
        if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
            raise UnsupportedError(f"{own.place}: low_freq_factor must be below high_freq_factor.")
        if {"attention_factor", "attn_factor"} <= values.keys():
            raise UnsupportedError(
                f"{own.place}: attention_factor and attn_factor exclude each other."
            )
        return RopeConfig(theta, rotary_dim, kind, values, positions, interleaved)

    def _refuse_others(self, known: set[str], where: str) -> None:
        """Raises UnsupportedError for keys of a rope that are not known."""
        unknown = {key for key, value in self.values.items() if value is not None} - known
        if unknown:
            raise UnsupportedError(
                f"{self.place}: rope key {shown(', '.join(sorted(unknown)))} is not implemented"
                f"{where}."
            )

    def _rope_value(self, key: str, pairs: int, must: bool) -> Any:
        """A parameter of a rope, None where there is none and there need not be."""
        default = _MISSING if must else None
        if key == "truncate":
            return self.get(key, default, bool)
        if key == _ORIGINAL:
            return self.size(key, default, least=2)  # its logarithm is divided by
        if key in ("short_factor", "long_factor"):
            return self.factors(key, pairs)
        if key in _ROPE_MAYBE_ZERO and self.get(key, None, float) == 0:
            return 0.0
        return self.factor(key, default)


class _RopeKeys(NamedTuple):
    """The keys that a kind of rope needs, and those that it may have."""

    needed: set[str]
    others: set[str]


_ORIGINAL = "original_max_position_embeddings"
_ROPE_OF_ALL = {"rope_theta", "partial_rotary_factor", "rope_type", "type"}
_YARN = {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
_ROPE_KINDS = {
    "default": _RopeKeys(set(), {"factor", _ORIGINAL}),  # present in some files, unused
    "linear": _RopeKeys({"factor"}, {_ORIGINAL}),
    "dynamic": _RopeKeys({"factor"}, {_ORIGINAL}),
    "proportional": _RopeKeys(set(), {"factor"}),
    "llama3": _RopeKeys({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}, set()),
    "ntk_alpha": _RopeKeys({"alpha"}, _YARN),
    "longrope": _RopeKeys(
        {"short_factor", "long_factor"}, {"factor", _ORIGINAL, "attention_factor"}
    ),
    "yarn": _RopeKeys(set(), {*_YARN, _ORIGINAL, "attention_factor", "attn_factor", "truncate"}),
}
_ROPE_MAYBE_ZERO = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}  # which is "not used"
