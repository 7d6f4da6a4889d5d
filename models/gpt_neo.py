"""GPT-Neo (Black et al. 2021), TinyStories (Eldan & Li 2023): GPT-2 with a window in some layers,
and attention scores that are not scaled."""

from __future__ import annotations

from infer.kernels.errors import UnsupportedError
from infer.models.blocks.layers import DecoderConfig
from infer.models.gpt2 import GPT2, read_gpt2
from infer.models.loading.config import RawConfig, shown

# The config's names of keys -> GPT-2's.
_KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "num_heads": "n_head",
    "num_layers": "n_layer",
}

# Parts of the names of tensors, by Llama's.
_NAMES = {
    **GPT2.names,
    "self_attn.o_proj.": "attn.attention.out_proj.",
    "self_attn.": "attn.attention.",
}


class GPTNeo(GPT2):
    """GPT-2, but with matrices that are not transposed in the files, and with q, k and v as three
    matrices without biases."""

    transposed = False
    names = _NAMES
    masks = (".attention.bias", ".attention.masked_bias")

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        window = raw.size("window_size", 256)
        config = read_gpt2(
            raw.with_values(**{own: raw.get(key, None) for key, own in _KEYS.items()})
        )
        kinds = _read_kinds(raw, config.num_hidden_layers)
        return config.changed(
            windows=tuple(window if kind == "local" else 0 for kind in kinds),
            attention_multiplier=1.0,
            fused_qkv=False,
            qkv_bias=False,
        )


def _read_kinds(raw: RawConfig, n_layers: int) -> list[str]:
    """Returns the kind of each layer, from lists of kinds and how often each list is repeated."""
    types = raw.get("attention_types", [[["global", "local"], 12]], list)
    try:
        kinds = [kind for repeated, times in types for kind in repeated * min(times, n_layers + 1)]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != n_layers or any(kind not in ("global", "local") for kind in kinds):
        raise UnsupportedError(
            f"{raw.place}: attention_types must name global or local for each of {n_layers} "
            f"layers; it is {shown(types)}."
        )
    if (layers := raw.items("attention_layers", kinds, kind=str)) != kinds:
        raise UnsupportedError(
            f"{raw.place}: attention_layers = {shown(layers)} is not what attention_types says."
        )
    return kinds
