"""config.json: read strictly, in the spellings before and since transformers 5."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.kernels.errors import ModelNotFoundError, UnsupportedError
from infer.models.files import read_text

_MISSING = object()

# Keys of transformers' configs that change the computation, and the values that mean "not used".
# A model that implements one reads it and so is not asked about it here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (None, False),
    "alibi": (None, False),
    "attention_k_eq_v": (None, False),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "conv_L_cache": (None,),
    "full_attn_idxs": (None,),
    "dim_model_base": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "enable_moe_block": (None, False),
    "final_logit_softcapping": (None,),
    "global_head_dim": (None,),
    "hidden_size_per_layer_input": (None, 0),
    "hybrid_override_pattern": (None,),
    "is_encoder_decoder": (None, False),
    "kv_lora_rank": (None,),
    "layer_rope_theta": (None,),
    "layers_block_type": (None,),
    "linear_conv_kernel_dim": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "moe_latent_size": (None,),
    "moe_num_experts": (None, 0),
    "mrope_section": (None,),
    "mup_enabled": (None, False),
    "multi_query": (None, False),
    "n_routed_experts": (None, 0),
    "no_rope_layer_interval": (None,),
    "no_rope_layers": (None, []),
    "num_experts": (None, 0),
    "num_kv_shared_layers": (None, 0),
    "num_local_experts": (None, 0),
    "per_layer_config": (None, {}),
    "parallel_attn": (None, False),
    "quantization": (None, {}),
    "quantization_config": (None, {}),
    "compression_config": (None, {}),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "scale_attn_weights": (None, True),
    "scale_depth": (None,),
    "scale_emb": (None, 1, 1.0),
    "scale_embeddings": (None, False),
    "swiglu_alpha": (None,),
    "swiglu_limit": (None,),
    "use_mrope": (None, False),
    "use_bidirectional_attention": (None, False),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "auto_map": (None, {}),
}


# Counts of things that are listed one by one: more of them would be damage.
_MOST = dict.fromkeys(
    (
        *("num_hidden_layers", "n_layer", "block_count"),
        *("num_experts", "num_local_experts", "n_routed_experts", "expert_count"),
    ),
    10_000,
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: kind is one of _ROPE_KEYS; scaling holds its own keys as config.json names
    them. interleaved: neighbouring dimensions turn together; backwards: all turn the other way."""

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
            values = json.loads(read_text(path))
        except FileNotFoundError:
            raise ModelNotFoundError(
                f"{folder} has no {name}. Give the folder of a model in Hugging Face form."
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise UnsupportedError(f"{path} cannot be read: {error}") from None
        if not isinstance(values, dict):
            raise UnsupportedError(f"{path} does not hold a JSON object.")
        return cls(values, str(path))

    def get(self, key: str, default: Any = _MISSING, kind: type | None = None) -> Any:
        """The value of a key; null counts as absent. Raises UnsupportedError when it must be there
        or has another type."""
        self.read.add(key)
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise UnsupportedError(f"{self.place} lacks {key!r}.")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < 2**1000 else math.inf  # as of 1e999
        if kind is not None and (type(value) is not kind):
            raise UnsupportedError(
                f"{self.place}: {key!r} must be of type {kind.__name__}, not {value!r}."
            )
        return value

    def size(self, key: str, default: Any = _MISSING) -> int:
        """A positive count."""
        value, most = self.get(key, default, int), _MOST.get(key, 2**31 - 1)
        if value is not None and not 0 < value <= most:
            raise UnsupportedError(
                f"{self.place}: {key!r} must be a count from 1 to {most}, not {value}."
            )
        return value  # type: ignore[no-any-return]

    def with_defaults(self, **defaults: Any) -> RawConfig:
        """The same with values for keys that are absent; null is not."""
        return self.with_values(**defaults | self.values)

    def with_values(self, /, **values: Any) -> RawConfig:
        """The same with these values; what was read of it stays read."""
        made = RawConfig(self.values | values, self.place)
        made.read = self.read
        return made

    def factor(self, key: str, default: float = 1.0) -> float:
        """A positive number."""
        value: float = self.get(key, default, float)
        if not 0 < value < math.inf:
            raise UnsupportedError(f"{self.place}: {key!r} must be positive, not {value}.")
        return value

    def section(self, key: str) -> RawConfig:
        """The object under a key, empty where there is none."""
        return RawConfig(self.get(key, {}, dict), f"{self.place}: {key}")

    def expect(self, key: str, *accepted: Any) -> None:
        """A key that may only have these values (the first is the default)."""
        value = self.get(key, accepted[0])
        if value not in accepted:
            raise UnsupportedError(
                f"{self.place}: {key} = {value!r} is not implemented "
                f"(only {', '.join(map(repr, accepted))})."
            )

    def done(self) -> None:
        """Refuse keys that change the computation and that the model did not read."""
        for key, neutral in _NEUTRAL.items():
            value = self.values.get(key)
            if key not in self.read and value not in neutral:
                shown = json.dumps(value)
                shown = shown if len(shown) < 80 else shown[:77] + "..."
                raise UnsupportedError(
                    f"{self.place}: {key} = {shown} changes the computation and is not "
                    f"implemented for {self.values.get('model_type')}."
                )

    def rope(
        self,
        head_dim: int,
        default_theta: float = 10000.0,
        default_partial: float = 1.0,
        interleaved: bool = False,
        *,
        theta_key: str = "rope_theta",
        partial_key: str = "partial_rotary_factor",
        scaling_key: str | None = "rope_scaling",
        layer_type: str = "",
    ) -> RopeConfig:
        """Rotary embedding: rope_parameters (transformers 5), perhaps those of a layer_type, or, by
        the names that the family has for them, theta, partial factor and scaling."""
        parameters = self.get("rope_parameters", None, dict)
        if parameters is not None and layer_type:
            parameters = parameters.get(layer_type) or {}
        scaling = self.get(scaling_key, None, dict) if scaling_key else None
        theta = self.get(theta_key, default_theta, float)
        partial = self.get(partial_key, default_partial, float)
        values = dict(parameters if parameters is not None else scaling or {})
        theta = float(values.pop("rope_theta", theta))
        partial = float(values.pop("partial_rotary_factor", partial))
        kind = values.pop("rope_type", None) or values.get("type") or "default"
        values.pop("type", None)
        if kind == "su":  # as the first files call it
            kind = "longrope"
        if kind == "dynamic" and values.get("alpha"):  # not dynamic at all
            kind = "ntk_alpha"
        known = _ROPE_KEYS.get(kind)
        if known is None:
            raise UnsupportedError(
                f"{self.place}: rope type {kind!r} is not implemented "
                f"(only {', '.join(_ROPE_KEYS)})."
            )
        unknown = {key for key, value in values.items() if value is not None} - known
        if unknown:
            raise UnsupportedError(
                f"{self.place}: rope key {', '.join(sorted(unknown))} is not implemented "
                f"for type {kind!r}."
            )
        if kind == "proportional":  # all of a head turns, the rest of it by nothing
            values["partial_rotary_factor"], partial = partial, 1.0
        rotary_dim = int(head_dim * partial)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise UnsupportedError(f"{self.place}: {rotary_dim} rotary dimensions of {head_dim}.")
        positions = self.size("max_position_embeddings", 2048)
        original = self.size("original_max_position_embeddings", None)
        if original is not None and "original_max_position_embeddings" in known:
            values["original_max_position_embeddings"] = original
        return RopeConfig(theta, rotary_dim, kind, values, positions, interleaved)


_ROPE_KEYS: dict[str, set[str]] = {
    "default": {"factor", "original_max_position_embeddings"},  # present in some files, unused
    "linear": {"factor", "original_max_position_embeddings"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "proportional": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "ntk_alpha": {"alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"},
    "longrope": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    },
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "attn_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
