"""DeepSeek-V2 (DeepSeek-AI 2024): multi-head latent attention, and experts, some of which all
tokens share.

Of a position the cache holds a latent c, of which keys and values of all heads are made, and a
rotated key k that all heads share. Nobody makes the keys: the score of a head with the query
(q_nope, q_rope) is q_nope W_UK c + q_rope k, so that W_UK goes to the query, and [k, c] is the only
key there is. Its values are W_UV c, so that W_UV goes to the weighted sum of the latents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from infer.kernels.lowering.graph import Value
from infer.kernels.ops import functional as ops
from infer.kernels.ops.rope import Rope
from infer.kernels.state.kv_cache import KVShape
from infer.models.blocks import layers
from infer.models.blocks.layers import DecoderConfig, ExpertsConfig, Scope, Weights
from infer.models.blocks.moe import MixtureOfExperts, no_experts, read_chosen, read_groups
from infer.models.blocks.rope import score_factor
from infer.models.loading.config import RawConfig
from infer.models.loading.weights import Source, WeightSpec

_EPS = 1e-6  # of the norms of latents, whatever the config says of the others


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-AI 2024), with Hugging Face's field names: the ranks of
    what queries (None: of nothing) and keys and values are made of, and the parts of a head: of a
    query and key without and with rope, and of a value."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def key_dim(self) -> int:
        """Dimensions that are cached of a position: the key that all heads share, and the
        latent."""
        return self.qk_rope_head_dim + self.kv_lora_rank


@dataclass(frozen=True, kw_only=True)
class LatentDecoderConfig(DecoderConfig):
    latent: LatentConfig

    def kv_shape(self, layer: int) -> KVShape:
        return KVShape(1, self.latent.key_dim, latent=True)


class DeepseekV2(MixtureOfExperts):
    config: LatentDecoderConfig
    shared = "shared_experts"

    @classmethod
    def read_config(cls, raw: RawConfig) -> DecoderConfig:
        raw = raw.with_defaults(q_lora_rank=1536)
        raw.expect("hidden_act", "silu", "swish")
        first = raw.get("first_k_dense_replace", 0, int)
        having = tuple(layer >= first for layer in range(raw.size("num_hidden_layers")))
        if not any(having):
            return read_latent(raw, no_experts(raw, having))
        raw.expect("scoring_func", "softmax")
        raw.expect("topk_method", "greedy", "group_limited_greedy")
        raw.expect("norm_topk_prob", False)
        raw.expect("moe_layer_freq", 1)
        count, inner = raw.size("n_routed_experts"), raw.size("moe_intermediate_size")
        chosen = read_chosen(raw, "num_experts_per_tok", count, 0)
        limited = raw.get("topk_method", "greedy") == "group_limited_greedy"
        experts = ExpertsConfig(
            count,
            chosen,
            inner,
            normalize=False,
            shared_inner=raw.size("n_shared_experts", 2) * inner,
            layers=having,
            scale=raw.factor("routed_scaling_factor"),
            gated=False,
            groups=read_groups(raw, count, chosen) if limited else (1, 1),
        )
        return read_latent(raw, experts)

    def mixer_weights(self, layer: int, name: str, prefix: str) -> Iterator[WeightSpec]:
        """qkv_a_proj (queries or their latent, k, c), q_b_proj, norms of latents, w_uk, w_uv,
        o_proj. Of each head what is rotated comes first."""
        c, latent = self.config, self.config.latent
        name, prefix = f"{name}.self_attn", f"{prefix}.self_attn"
        heads, hidden = c.num_attention_heads, c.hidden_size
        rank, rotary = latent.kv_lora_rank, latent.qk_rope_head_dim
        query = heads * (latent.qk_nope_head_dim + rotary)
        kv = Source(f"{prefix}.kv_a_proj_with_mqa.weight", (rotary + rank, hidden))
        if latent.q_lora_rank is None:
            q = Source(f"{prefix}.q_proj.weight", (query, hidden))
            first = tuple(layers.last_first(q, heads, rotary))
        else:
            first = (Source(f"{prefix}.q_a_proj.weight", (latent.q_lora_rank, hidden)),)
            q = Source(f"{prefix}.q_b_proj.weight", (query, latent.q_lora_rank))
            yield layers.stacked(
                f"{name}.q_a_norm", prefix, {"q_a_layernorm.weight": (latent.q_lora_rank,)}
            )
            yield WeightSpec(f"{name}.q_b_proj", tuple(layers.last_first(q, heads, rotary)))
        yield WeightSpec(f"{name}.qkv_a_proj", (*first, *layers.last_first(kv, 1, rotary)))
        yield layers.stacked(f"{name}.kv_a_norm", prefix, {"kv_a_layernorm.weight": (rank,)})
        yield from self.up_weights(name, prefix)
        o = {"o_proj.weight": (hidden, heads * latent.v_head_dim)}
        yield layers.stacked(f"{name}.o_proj", prefix, o)

    def up_weights(self, name: str, prefix: str) -> Iterator[WeightSpec]:
        """w_uk, transposed, and w_uv, which lie head by head in kv_b_proj; MLX has them apart."""
        latent, heads = self.config.latent, self.config.num_attention_heads
        nope, value, rank = latent.qk_nope_head_dim, latent.v_head_dim, latent.kv_lora_rank
        key, rows = f"{prefix}.kv_b_proj.weight", heads * (nope + value)
        starts = range(0, rows, nope + value)
        keys = (range(i, i + nope) for i in starts)
        values = (range(i + nope, i + nope + value) for i in starts)
        whole = Source(key, (rows, rank))
        w_uk = tuple(whole.rows(part).transpose() for part in keys)
        w_uv = tuple(whole.rows(part) for part in values)
        queries = (Source(f"{prefix}.embed_q.weight", (heads * rank, nope)),)
        results = (Source(f"{prefix}.unembed_out.weight", (heads * value, rank)),)
        yield WeightSpec(f"{name}.w_uk", w_uk, queries, unit=rank, heads=True)
        yield WeightSpec(f"{name}.w_uv", w_uv, results, unit=value, heads=True)

    def mixer(self, x: Value, w: Weights, rope: Rope | None, cache: Any, window: int) -> Value:
        c, latent, w = self.config, self.config.latent, Scope(w, "self_attn")
        heads, rotary, rank = c.num_attention_heads, latent.qk_rope_head_dim, latent.kv_lora_rank
        assert rope is not None  # all layers have one
        assert c.attention.attention_multiplier is not None  # read_latent has read it
        both = ops.linear(x, w["qkv_a_proj"])
        q, k, v = ops.split(both, both.width - latent.key_dim, rotary, rank)
        if "q_b_proj" in w:
            q = ops.linear(ops.rmsnorm(q, w["q_a_norm"], _EPS), w["q_b_proj"])
        q = layers.position_scaled(q, c, cache)
        q = ops.rope(q, rope, rotary + latent.qk_nope_head_dim)
        q = ops.head_linear(q, w["w_uk"], heads, keep=True)
        k, v = ops.rope(k, rope, rotary), ops.rmsnorm(v, w["kv_a_norm"], _EPS)
        y = ops.attention(q, k, v, cache, scale=c.attention.attention_multiplier, window=window)
        y = ops.head_linear(y, w["w_uv"], heads)
        return ops.linear(y, w["o_proj"], scale=c.residual_multiplier)


def read_latent(
    raw: RawConfig,
    experts: ExpertsConfig | None,
    *,
    eps: float = 1e-6,
    interleaved: bool = True,
    **own: Any,
) -> LatentDecoderConfig:
    """The config of a model with multi-head latent attention, with fields of the model's own; eps:
    where it does not say. Raises UnsupportedError."""
    raw.get("auto_map", None, dict)  # the code of the repositories computes what this does
    raw.expect("attention_bias", False)
    raw.expect("num_key_value_heads", raw.size("num_attention_heads"))
    latent = LatentConfig(
        raw.size("q_lora_rank", None),
        raw.size("kv_lora_rank"),
        raw.size("qk_nope_head_dim"),
        raw.size("qk_rope_head_dim"),
        raw.size("v_head_dim"),
    )
    rope = raw.rope(latent.qk_rope_head_dim, interleaved=interleaved)
    scale = (latent.qk_nope_head_dim + latent.qk_rope_head_dim) ** -0.5
    return LatentDecoderConfig.read(
        raw.with_values(num_key_value_heads=1, head_dim=latent.key_dim),
        eps=eps,
        rope=rope,
        attention_multiplier=scale * score_factor(rope),
        experts=experts,
        latent=latent,
        **own,
    )
