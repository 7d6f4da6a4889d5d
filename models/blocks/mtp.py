"""Multi-token prediction (DeepSeek-AI 2024): a layer behind a model that predicts the token after
the next one.

For the token at a position it takes two inputs: the model's hidden state of the position before,
after the last norm, and the token's embedding. Each goes through a norm of its own; side by side
they go through a projection. Then come a layer like the model's, a norm, and the model's head,
which predicts the token that follows. To predict further, the output of that norm stands in for
the hidden state that the model has not computed yet (as in vLLM and SGLang; DeepSeek's own code has
no such step).

Keys and values lie at the position of the token. The first token of a sequence has no hidden state
before it, and nothing attends to it. Published code has all of them a position earlier. That is the
same, as rotations only tell how far apart two positions are.

Checkpoints may hold copies of the embeddings and the head; the model's own are used. If there are
several such layers, each going on from the one before, only the first is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from infer.kernels.lowering.graph import Value, reachable
from infer.kernels.ops import functional as ops
from infer.kernels.ops.attention import Attention
from infer.kernels.ops.embedding import LogitsRows
from infer.kernels.ops.hidden import KeepHidden
from infer.kernels.ops.kv_write import KVWrite
from infer.kernels.ops.rope import Rope
from infer.kernels.state.hidden_states import HiddenStates
from infer.kernels.state.layer_state import Cache
from infer.models.blocks import layers
from infer.models.blocks.decoder import Decoder, before_head
from infer.models.blocks.layers import Scope, Weights
from infer.models.loading.weights import Source, WeightSpec


@dataclass(frozen=True)
class Names:
    """The names of the parts in a checkpoint; all but the layer's own end in .weight."""

    layer: str
    projection: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    reads_hidden_first: bool = False


def nextn(layer: int) -> Names:
    """DeepSeek-V3's names: the layer has the number after the model's last."""
    own = f"model.layers.{layer}"
    return Names(own, f"{own}.eh_proj", f"{own}.enorm", f"{own}.hnorm", f"{own}.shared_head.norm")


QWEN = Names(
    "mtp.layers.0",
    "mtp.fc",
    "mtp.pre_fc_norm_embedding",
    "mtp.pre_fc_norm_hidden",
    "mtp.norm",
)


class Predictor(Decoder):
    """A model of that one layer. Beside its own weights it uses some of the model that it belongs
    to; `of` says which hidden states it reads."""

    shared = "embed_tokens", "lm_head", "lm_head.bias"

    def __init__(self, model: Decoder, names: Names, added: float = 0.0) -> None:
        """added: to the weights of norms over whole rows or heads, as of a WeightSpec."""
        c = model.config
        experts = c.experts if c.experts and any(c.experts.layers) else None
        config = replace(
            c,
            num_hidden_layers=1,
            windows=(0,),
            rope_layers=(True,),
            states=(None,),
            experts=experts and replace(experts, layers=(True,)),
        )
        super().__init__(config)
        self.names, self.added = names, added
        self._model = type(model)(config)
        self._hidden: HiddenStates | None = None

    def weights(self) -> Iterator[WeightSpec]:
        """The layer's own weights: its norms, the halves e_proj and h_proj of the projection, and
        the weights of the layer itself."""
        for spec in self._weights():
            yield replace(spec, added=self.added) if spec.name.endswith("norm") else spec

    def _weights(self) -> Iterator[WeightSpec]:
        c, names, layer = self.config, self.names, "layers.0"
        yield from layers.norm_weights(c, "enorm", names.embedding_norm)
        yield from layers.norm_weights(c, "hnorm", names.hidden_norm)
        both = Source(f"{names.projection}.weight", (c.hidden_size, 2 * c.hidden_size))
        halves = range(c.hidden_size), range(c.hidden_size, 2 * c.hidden_size)
        order = ("h_proj", "e_proj") if names.reads_hidden_first else ("e_proj", "h_proj")
        for name, half in zip(order, halves, strict=True):
            yield WeightSpec(name, (both.columns(half),))
        for norm in filter(None, self._model.norms):
            yield from layers.norm_weights(c, f"{layer}.{norm}", f"{names.layer}.{norm}")
        yield from self._model.mixer_weights(0, layer, names.layer)
        yield from self._model.mlp_weights(0, f"{layer}.mlp", names.layer)
        yield from layers.norm_weights(c, "norm", names.norm)

    def active(self, name: str, rows: int) -> int:
        return self._model.active(name, rows)

    def of(self, hidden: HiddenStates) -> Self:
        """Returns a copy of the layer that reads these hidden states."""
        own = type(self).__new__(type(self))
        own.__dict__ |= self.__dict__ | {"_hidden": hidden}
        return own

    def forward(self, w: Weights, ropes: Sequence[Rope | None], cache: Sequence[Cache]) -> Value:
        assert self._hidden is not None
        h = self._layer(ops.hidden_before(None, self._hidden), w, ropes[0], cache[0])
        return self.logits(h, w)

    def also(self, logits: Value) -> Iterator[Value]:
        """Yields the values that its own steps compute besides logits: they keep what stands in for
        the next hidden states."""
        assert self._hidden is not None
        yield KeepHidden(before_head(logits), self._hidden)

    def beside(
        self, logits: Value, of: Weights, w: Weights, rope: Rope | None, cache: Cache
    ) -> Iterator[Value]:
        """Yields the values that the model's steps compute besides logits, so that the layer knows
        all positions: its keys and values; and they keep the last hidden states. logits: the
        model's. of: the model's weights."""
        assert self._hidden is not None
        (rows,) = (value for value in reachable([logits]) if isinstance(value, LogitsRows))
        x = layers.norm(rows.x, of, "norm", self.config)
        h = self._layer(ops.hidden_before(x, self._hidden), w, rope, cache)
        attentions = (value for value in reachable([h]) if isinstance(value, Attention))
        attention = next(value for value in attentions if value.cache is cache)
        assert attention.k is not None
        assert attention.v is not None
        yield KVWrite(attention.k, attention.v, attention.cache)
        yield KeepHidden(x, self._hidden)

    def _layer(self, hidden: Value, w: Weights, rope: Rope | None, cache: Cache) -> Value:
        e = layers.norm(self.embed(w), w, "enorm", self.config)
        h = layers.norm(hidden, w, "hnorm", self.config)
        h = ops.linear(e, w["e_proj"]) + ops.linear(h, w["h_proj"])
        return self._model.layer(h, Scope(w, "layers.0"), rope, cache, 0)


def find_predictor(model: Decoder, tensors: Iterable[str]) -> Predictor | None:
    """The layer, if a checkpoint with these tensors has it."""
    found = model.predictor
    if not isinstance(found, Predictor):
        return None
    return found if any(key.startswith(f"{found.names.projection}.") for key in tensors) else None
