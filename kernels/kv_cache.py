"""The keys and values of the positions so far: two buffers per layer and a page table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.kernels.device import Buffer, Device

KV_DTYPES = ("f16", "f32", "q8")
PAGE = 256  # positions; a multiple of every attention tile


@dataclass(frozen=True, eq=False)
class LayerCache:
    """Keys and values of one layer, [slot][kv head][head_dim], and where positions lie in them.

    dtype is one of KV_DTYPES; slots is a multiple of PAGE. paged: kernels ask the page table; else
    they take it for the identity. q8: all int8, then all scales, f32, of blocks of `kv_block`
    dimensions.
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


def kv_block(head_dim: int) -> int:
    """Dimensions that share a scale in q8: 32 where that divides a head, else 16 or 8."""
    return math.gcd(head_dim, 32)


def kv_cache_bytes(n_kv_heads: int, head_dim: int, positions: int, dtype: str) -> int:
    """Bytes of a layer's cache of that many positions, rounded up to whole pages."""
    slots = -(-positions // PAGE) * PAGE
    scales = head_dim // kv_block(head_dim)
    head = {"f16": 2 * head_dim, "f32": 4 * head_dim, "q8": head_dim + 4 * scales}[dtype]
    return 2 * n_kv_heads * slots * head


def to_kv(values: NDArray[Any], dtype: str) -> NDArray[np.uint8]:
    """The bytes of a cache's keys or values [slots, n_kv_heads, head_dim], of any float type."""
    if dtype != "q8":
        stored = values.astype(np.float16 if dtype == "f16" else np.float32)
        return np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
    blocks = values.astype(np.float32).reshape(-1, kv_block(values.shape[-1]))
    most = abs(blocks).max(axis=1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    ints = np.rint(np.where(most > 0, blocks, 0) * inverse).astype(np.int8)
    scales = most / np.float32(127)
    return np.concatenate([ints.reshape(-1).view(np.uint8), scales.reshape(-1).view(np.uint8)])


def from_kv(raw: NDArray[np.uint8], n_kv_heads: int, head_dim: int, dtype: str) -> NDArray[Any]:
    """Keys or values [slots, n_kv_heads, head_dim], float16 or float32, of a cache's bytes."""
    if dtype != "q8":
        stored = raw.view(np.float16 if dtype == "f16" else np.float32)
        return stored.reshape(-1, n_kv_heads, head_dim)
    block = kv_block(head_dim)
    count = len(raw) * block // (block + 4)
    ints, scales = raw[:count].view(np.int8), raw[count:].view(np.float32)
    values = ints.reshape(-1, block).astype(np.float32) * scales[:, None]
    return values.reshape(-1, n_kv_heads, head_dim)


def kept(values: NDArray[Any], head_dim: int, dtype: str) -> NDArray[Any]:
    """Keys or values [positions, n_kv_heads * head_dim] as a cache gives them back."""
    heads = values.reshape(len(values), values.shape[1] // head_dim, head_dim)
    return from_kv(to_kv(heads, dtype), heads.shape[1], head_dim, dtype).reshape(values.shape)


class KVCache:
    """A cache of `positions` positions for each of `sequences` sequences; shapes: KV heads and
    head_dim of each layer.

    The page table is the identity: sequence s has pages s * n to (s + 1) * n. What lies beyond the
    position of a row is never read, so forgetting positions takes nothing but starting before them.
    """

    def __init__(
        self,
        device: Device,
        shapes: Sequence[tuple[int, int]],
        positions: int,
        *,
        sequences: int = 1,
        dtype: str = "f16",
        paged: bool = False,
    ) -> None:
        pages = -(-positions // PAGE)
        slots = pages * PAGE * sequences
        self.pages = device.upload(np.arange(pages * sequences, dtype=np.uint32), "page table")
        layers = []
        for layer, (n_kv_heads, head_dim) in enumerate(shapes):
            nbytes = kv_cache_bytes(n_kv_heads, head_dim, slots, dtype) // 2
            keys, values = (
                device.buffer(nbytes, label=f"{kind} of layer {layer}")
                for kind in ("keys", "values")
            )
            layers.append(
                LayerCache(
                    keys, values, self.pages, dtype, n_kv_heads, head_dim, slots, pages, paged
                )
            )
        self.layers = tuple(layers)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        own = [buffer for layer in self.layers for buffer in (layer.keys, layer.values)]
        return (*own, self.pages)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)
