"""The base class of all models: weights, forward pass, and what an architecture may override."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from infer.kernels.lowering.graph import Value
from infer.kernels.ops import functional as ops
from infer.kernels.ops.linear import Linear
from infer.kernels.ops.rope import Rope
from infer.kernels.state.layer_state import Cache
from infer.models.blocks import layers
from infer.models.blocks.layers import DecoderConfig, Scope, Weights
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import WeightSpec


class Decoder:
    """A decoder-only transformer. A layer is norm, attention, norm, gated MLP, with residuals. An
    architecture reads its config, and overrides what differs."""

    # The norms of a layer: before attention, of its output, before the MLP, of its output.
    norms: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    caches_per_layer = 1  # how many layers of the config, each with its cache, make one
    folded_by_mlx = False  # whether MLX's files have factors of the config in their weights

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        """Raises UnsupportedError for what is not implemented."""
        raise NotImplementedError

    def weights(self) -> Iterator[WeightSpec]:
        """Every weight, and the tensors of the checkpoint that it is made of."""
        c = self.config
        yield layers.stacked(
            "embed_tokens", "model", {"embed_tokens.weight": (c.vocab_size, c.hidden_size)}
        )
        for i in range(c.num_hidden_layers):
            name, prefix = f"layers.{i}", f"model.layers.{i}"
            for norm in filter(None, self.norms):
                yield from layers.norm_weights(c, f"{name}.{norm}", f"{prefix}.{norm}")
            yield from self.mixer_weights(i, name, prefix)
            yield from self.mlp_weights(i, f"{name}.mlp", prefix)
        yield from layers.norm_weights(c, "norm", "model.norm")
        if not c.tie_word_embeddings:
            yield layers.stacked("lm_head", "lm_head", {"weight": (c.vocab_size, c.hidden_size)})
        if c.head_bias:
            yield layers.stacked("lm_head.bias", "lm_head", {"bias": (c.vocab_size,)})

    def mixer_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        """The weights of attention, or of what a layer has instead."""
        return layers.attention_weights(self.config, f"{name}.self_attn", f"{prefix}.self_attn")

    def mixer(self, x: Value, w: Weights, rope: Rope | None, cache: Any, window: int) -> Value:
        """Attention, or what a layer has instead."""
        return layers.attention(x, Scope(w, "self_attn"), self.config, rope, cache, window)

    def mlp_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        return layers.mlp_weights(self.config, name, f"{prefix}.mlp")

    def mlp(self, x: Value, w: Weights) -> Value:
        return layers.mlp(x, w, self.config)

    def active(self, name: str, rows: int) -> int:
        """Returns how many of the `rows` of a matrix one token is multiplied with. name: of the
        weight."""
        return rows

    @property
    def predictor(self) -> Decoder | None:
        """The layer that predicts further tokens, if its checkpoints may have one (mtp.py)."""
        return None

    def ignorable(self, key: str) -> bool:
        """Whether a tensor of a checkpoint that no weight is made of can be left out. key: its
        name."""
        return key.endswith("rotary_emb.inv_freq")

    def forward(
        self,
        w: Weights,
        ropes: Sequence[Rope | None],
        cache: Sequence[Cache],
    ) -> Value:
        """The logits [rows, vocab_size], of the rows of the step that get any. ropes, cache: one
        of each layer that the config counts."""
        h = self.embed(w)
        count = len(cache) // self.caches_per_layer
        h = self.layers(h, w, ropes, cache, range(count))
        return self.logits(h, w)

    def layers(
        self,
        h: Value,
        w: Weights,
        ropes: Sequence[Rope | None],
        cache: Sequence[Cache],
        part: range,
    ) -> Value:
        """The activations [rows, hidden_size] behind some of the layers. ropes, cache: of all."""
        inputs, count = self.layer_inputs(h, w), self.caches_per_layer
        for i in part:
            own, last = Scope(w, f"layers.{i}"), (i + 1) * count - 1
            of_layer = cache[last] if count == 1 else cache[i * count : last + 1]
            h = self.layer(h, own, ropes[last], of_layer, self.config.windows[last])
            h = self.behind(h, own, inputs[i] if inputs else None)
        return h

    def layer_inputs(self, h: Value, w: Weights) -> Sequence[Value]:
        """A further input of each layer, where an architecture has some. h: the embeddings."""
        return ()

    def behind(self, h: Value, w: Weights, given: Value | None) -> Value:
        """Returns the activations with what an architecture adds behind a layer. given: the further
        input of that layer, if there is one."""
        return h

    def embed(self, w: Weights) -> Value:
        """The activations [rows, hidden_size] of the step's tokens."""
        scale = self.config.embedding_multiplier
        return ops.embedding(w["embed_tokens"], scale, takes_given=True)

    def logits(self, h: Value, w: Weights) -> Value:
        """The logits, from the activations behind the last layer."""
        c = self.config
        h = layers.norm(ops.logits_rows(h), w, "norm", c)
        head = w["embed_tokens" if c.tie_word_embeddings else "lm_head"]
        logits = ops.linear(h, head, w.get("lm_head.bias"), 1 / c.logits_scaling)
        cap = c.final_logit_softcapping
        return ops.softcap(logits, cap) if cap else logits

    def layer(self, h: Value, w: Weights, rope: Rope | None, cache: Any, window: int) -> Value:
        """One layer, on the activations h [rows, hidden_size]."""
        c = self.config

        def norm(x: Value, name: str | None) -> Value:
            return x if name is None else layers.norm(x, w, name, c)

        before_mixer, of_mixer, before_mlp, of_mlp = self.norms
        x = norm(h, before_mixer)
        y = h + norm(self.mixer(x, w, rope, cache, window), of_mixer)
        if not c.parallel:
            x = norm(y, before_mlp)
        elif before_mlp:
            x = norm(h, before_mlp)
        return y + norm(self.mlp(x, Scope(w, "mlp")), of_mlp)


def before_head(logits: Value) -> Value:
    """Returns the normed hidden states, which the head, the last projection before logits,
    reads."""
    while not isinstance(logits, Linear):
        (logits,) = logits.inputs
    return logits.x
