"""CodeGen (Nijkamp et al. 2022): GPT-J with one projection to queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from infer.kernels.errors import UnsupportedError
from infer.models.blocks import layers
from infer.models.blocks.layers import DecoderConfig
from infer.models.gptj import GPTJ
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import Source, WeightSpec

_PARTS = 4  # of the projection, for the cores that it was trained on


class CodeGen(GPTJ):
    """Each part of the projection has a share of the queries, then of the values and the keys."""

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        heads = raw.size("n_head")
        if heads % _PARTS:
            raise UnsupportedError(
                f"{raw.place}: n_head = {heads} is not implemented (only multiples of {_PARTS})."
            )
        return super().read_config(raw)

    def weights(self) -> Iterator[WeightSpec]:
        hidden = self.config.hidden_size
        for spec in super().weights():
            if spec.name.endswith(".qkv_proj"):
                key = spec.sources[0].key.replace("q_proj", "qkv_proj")
                whole = Source(key, (3 * hidden, hidden))
                rows = (hidden // _PARTS,) * 3
                found = list(layers.regrouped(whole, _PARTS, rows))
                q, v, k = (found[i : i + _PARTS] for i in range(0, 3 * _PARTS, _PARTS))
                spec = replace(spec, sources=(*q, *k, *v))
            yield spec

    def ignorable(self, key: str) -> bool:
        """Older checkpoints hold the causal mask too."""
        return super().ignorable(key) or key.endswith(".attn.causal_mask")
