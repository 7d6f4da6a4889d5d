"""The keys and values of the positions so far: two buffers per layer and a page table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from infer.kernels.device import Buffer, Device

PAGE = 256  # positions; a multiple of every attention tile


@dataclass(frozen=True, eq=False)
class LayerCache:
    """Keys and values of one layer, [slot][kv head][head_dim], and where positions lie in them.

    dtype is "f16" or "f32"; slots is a multiple of PAGE. paged: kernels ask the page table; else
    they take it for the identity.
    """

    keys: Buffer
    values: Buffer
    pages: Buffer
    dtype: str
    n_kv_heads: int
    head_dim: int
    slots: int
    pages_per_sequence: int
    paged: bool = False


def kv_cache_bytes(
    n_layers: int, n_kv_heads: int, head_dim: int, positions: int, dtype: str
) -> int:
    """Bytes of the cache of that many positions, rounded up to whole pages."""
    slots = -(-positions // PAGE) * PAGE
    return 2 * n_layers * n_kv_heads * head_dim * slots * (2 if dtype == "f16" else 4)


class KVCache:
    """A cache of `positions` positions for each of `sequences` sequences.

    The page table is the identity: sequence s has pages s * n to (s + 1) * n. What lies beyond the
    position of a row is never read, so forgetting positions takes nothing but starting before them.
    """

    def __init__(
        self,
        device: Device,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        positions: int,
        *,
        sequences: int = 1,
        dtype: str = "f16",
        paged: bool = False,
    ) -> None:
        pages = -(-positions // PAGE)
        slots = pages * PAGE * sequences
        nbytes = kv_cache_bytes(1, n_kv_heads, head_dim, slots, dtype) // 2
        table = device.upload(np.arange(pages * sequences, dtype=np.uint32), label="page table")
        self.layers = tuple(
            LayerCache(
                device.buffer(nbytes, label=f"keys of layer {layer}"),
                device.buffer(nbytes, label=f"values of layer {layer}"),
                table,
                dtype,
                n_kv_heads,
                head_dim,
                slots,
                pages,
                paged,
            )
            for layer in range(n_layers)
        )

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        own = [buffer for layer in self.layers for buffer in (layer.keys, layer.values)]
        return (*own, self.layers[0].pages)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)
