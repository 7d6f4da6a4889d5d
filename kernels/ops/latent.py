"""What is written into a latent cache (DeepSeek-AI 2024): a key that is rotated, and a latent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infer.kernels.compiler.arena import Operand
from infer.kernels.compiler.graph import Value
from infer.kernels.compiler.lowering import Lowering
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
        "SLOTS": cache.slots,
    }


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
        """What is bound behind the activation."""
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
    "SLOTS": 0,
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
            (low.step, self.key.rope.table, low.source(self.x)[0], *self.key.operands),
            low.row_grid(self, 1),
            {
                **self.key.params,
                "WG": low.tuning.workgroup(self.key.cache.head_dim),
                "SUBGROUPS": low.device.subgroups,
                "ROTARY_DIM": self.key.rope.rotary_dim,
                "INTERLEAVED": self.key.rope.interleaved,
            },
        )
