"""Writes into the KV cache, by kernels of their own or as part of others: heads of keys, normed and
rotated, and of values; or a latent and a key that is rotated (DeepSeek-AI 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infer.kernels.gpu.device import Buffer
from infer.kernels.lowering.arena import Operand
from infer.kernels.lowering.graph import Value, source
from infer.kernels.lowering.lowering import Lowering
from infer.kernels.lowering.target import Target, stride
from infer.kernels.ops.prepared import Norm
from infer.kernels.ops.rope import Rope
from infer.kernels.state.kv_cache import PAGE, LayerCache


def kv_params(cache: LayerCache) -> dict[str, Any]:
    """The parameters of kv.wgsl."""
    return {
        "KV": cache.dtype,
        "HEAD_DIM": cache.head_dim,
        "KV_HEADS": cache.n_kv_heads,
        "PAGE": PAGE,
        "PAGES_PER_SEQUENCE": cache.pages_per_sequence,
        "PAGED": cache.paged,
    }


@dataclass(frozen=True, eq=False)
class Heads:
    """Norms and rotation of the heads of a projection of q, k and v: how queries and keys are
    rotated, if they are, and the norms of queries, keys and values, if any. rows_normed: norms are
    of whole rows of heads. own: there are keys and values; v_is_k: these are the keys as they are
    projected. rotate_first: norms are of what was rotated."""

    rope: Rope | None
    norms: tuple[Norm, ...]
    rows_normed: bool
    own: bool
    v_is_k: bool
    rotate_first: bool

    @property
    def params(self) -> dict[str, Any]:
        return {
            "ROTARY_DIM": self.rope.rotary_dim if self.rope else 0,
            "INTERLEAVED": self.rope.interleaved if self.rope else False,
            "NORM": bool(self.norms),
            "ROW_NORM": self.rows_normed,
            "ROTATE_FIRST": self.rotate_first,
            "OWN": self.own,
            "V_NORM": len(self.norms) == 3,
            "V_IS_K": self.v_is_k,
            "EPS": float(self.norms[0].eps) if self.norms else 0.0,
        }

    @property
    def weights(self) -> list[Buffer]:
        return [norm.weight.buffer for norm in self.norms]

    @property
    def operands(self) -> list[Operand]:
        """The table, if there is one, and the norms."""
        return [*([self.rope.table] if self.rope else []), *self.weights]

    def fit(self, target: Target) -> bool:
        """Whether there is something to rotate and there are enough bindings for it."""
        bindings = 5 + 2 * self.own + len(self.norms)
        return self.rope is not None and target.device.limits.storage_buffers >= bindings


@dataclass(eq=False, repr=False)
class KVWrite(Value):
    """k and v to the cache; nothing reads the result but through it."""

    k: Value
    v: Value
    cache: LayerCache

    def checked_width(self) -> int:
        return self.k.width

    def lower(self, low: Lowering) -> None:
        cache, latent = self.cache, self.cache.shape.latent
        keys, k_stride, k_offset = source(self.k)
        values, v_stride, v_offset = source(self.v)
        low.emit(
            "kv_write",
            (low.step, cache.pages, keys, values, cache.keys, *([] if latent else [cache.values])),
            low.row_grid(self, cache.n_kv_heads),
            {
                **kv_params(cache),
                "LATENT": latent,
                "K_DIM": self.k.width // cache.n_kv_heads,
                "K_STRIDE": k_stride,
                "K_OFFSET": k_offset,
                "V_STRIDE": v_stride,
                "V_OFFSET": v_offset,
            },
        )


@dataclass(eq=False, repr=False)
class RopeKVWrite(Value):
    """The queries of a projection x, normed and rotated; keys likewise and values go to the cache.
    columns: of the queries."""

    x: Value
    heads: Heads
    cache: LayerCache
    columns: int

    def checked_width(self) -> int:
        return self.columns

    def lower(self, low: Lowering) -> None:
        cache, heads = self.cache, self.heads
        assert heads.rope is not None
        x, x_stride, _ = source(self.x)
        n_heads, kv = self.width // cache.head_dim, (cache.keys, cache.values) if heads.own else ()
        workgroup = max(32, min(128, cache.head_dim // 2)) if cache.head_dim % 64 == 0 else 32
        if heads.rows_normed:
            workgroup = low.tuning.workgroup(self.width)
        low.emit(
            "rope_kv_write",
            [low.step, cache.pages, heads.rope.table, x, self, *kv, *heads.weights],
            low.row_grid(self, n_heads + len(kv) * cache.n_kv_heads),
            {
                **kv_params(cache),
                **heads.params,
                "WG": workgroup,
                "SUBGROUPS": low.device.subgroups,
                "N_HEADS": n_heads,
                "N_KV_HEADS": cache.n_kv_heads,
                "X_STRIDE": x_stride,
                "Y_STRIDE": stride(self.width),
            },
        )


@dataclass(frozen=True, eq=False)
class LatentKey:
    """The key of a latent cache that is rotated, and the latent behind it that is normed, as a
    kernel writes them (latent.wgsl). x_stride, offset: where they lie in their activation."""

    rope: Rope
    norm: Norm
    cache: LayerCache
    x_stride: int
    offset: int

    @property
    def operands(self) -> list[Operand]:
        """The operands that are bound behind the activation."""
        pages = [self.cache.pages] if self.cache.paged else []
        return [self.norm.weight.buffer, self.cache.keys, *pages]

    @property
    def params(self) -> dict[str, Any]:
        own = {"LATENT_STRIDE": self.x_stride, "LATENT_OFFSET": self.offset}
        return kv_params(self.cache) | {"EPS": float(self.norm.eps)} | own

    @property
    def storage(self) -> int:
        """Bytes of workgroup memory, but for a sum's."""
        return 8 * self.cache.head_dim


NO_KEY: dict[str, Any] = {
    "KV": "f32",
    "HEAD_DIM": 0,
    "KV_HEADS": 0,
    "PAGE": 0,
    "PAGES_PER_SEQUENCE": 0,
    "PAGED": False,
    "EPS": 0.0,
    "LATENT_STRIDE": 0,
    "LATENT_OFFSET": 0,
}


@dataclass(eq=False, repr=False)
class LatentWrite(Value):
    """The key and the latent in x to the cache, in a kernel of its own; nothing reads its result
    but through the cache."""

    x: Value
    key: LatentKey

    def checked_width(self) -> int:
        return self.x.width

    def lower(self, low: Lowering) -> None:
        low.emit(
            "latent_write",
            (low.step, self.key.rope.table, source(self.x)[0], *self.key.operands),
            low.row_grid(self, 1),
            {
                **self.key.params,
                "WG": low.tuning.workgroup(self.key.cache.head_dim),
                "SUBGROUPS": low.device.subgroups,
                "ROTARY_DIM": self.key.rope.rotary_dim,
                "INTERLEAVED": self.key.rope.interleaved,
            },
        )
