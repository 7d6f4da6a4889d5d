"""The keys and values of the positions so far: two buffers for each layer, in pages that any
sequence may have, and a page table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infer.kernels.gpu.device import Buffer, Device
from infer.kernels.gpu.record import Copy, Piece

KV_DTYPES = ("f16", "f32", "q8")
PAGE = 64  # positions; a multiple of every attention tile


class KVShape(NamedTuple):
    """The KV heads of a layer, and their dimensions. latent: values are the keys themselves, so
    that one buffer holds both."""

    n_kv_heads: int
    head_dim: int
    latent: bool = False


@dataclass(frozen=True, eq=False)
class LayerCache:
    """Keys and values of one layer, [slot][kv head][head_dim], and the map from positions to slots.

    dtype is one of KV_DTYPES. paged: kernels look positions up in the page table; else they take it
    for the identity. q8: all int8, then all scales, f32, of blocks of `kv_block` dimensions. In a
    latent cache keys and values are the same buffer. Before `first`, a position is attended to by
    its own row alone.
    """

    keys: Buffer
    values: Buffer
    pages: Buffer
    dtype: str
    n_kv_heads: int
    head_dim: int
    pages_per_sequence: int
    paged: bool = False
    first: int = 0

    @property
    def shape(self) -> KVShape:
        return KVShape(self.n_kv_heads, self.head_dim, self.values is self.keys)

    @property
    def slots(self) -> int:
        """Positions that there is memory for, a multiple of PAGE."""
        return self.keys.nbytes // sum(self.slot_bytes)

    @property
    def slot_bytes(self) -> list[int]:
        """Bytes of a position in each part of a buffer: values, and in q8 scales behind them."""
        return _slot_bytes(self.n_kv_heads, self.head_dim, self.dtype)


def kv_block(head_dim: int) -> int:
    """How many dimensions share a scale in q8: 32 if that divides a head, else 16 or 8."""
    return math.gcd(head_dim, 32)


def _slot_bytes(n_kv_heads: int, head_dim: int, dtype: str) -> list[int]:
    if dtype != "q8":
        return [n_kv_heads * head_dim * (2 if dtype == "f16" else 4)]
    return [n_kv_heads * head_dim, 4 * n_kv_heads * (head_dim // kv_block(head_dim))]


def kv_cache_bytes(shape: KVShape, positions: int, dtype: str) -> int:
    """Bytes of a layer's cache of that many positions, rounded up to whole pages."""
    return (1 if shape.latent else 2) * keys_bytes(shape, positions, dtype)


def keys_bytes(shape: KVShape, positions: int, dtype: str) -> int:
    """Bytes of the keys of a layer's cache of that many positions, rounded up to whole pages."""
    slots = -(-positions // PAGE) * PAGE
    return slots * sum(_slot_bytes(shape.n_kv_heads, shape.head_dim, dtype))


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
    """A cache of at most `positions` positions for each of `sequences` sequences. shapes: the
    `KVShape` of each layer.

    n_pages: for all sequences together; `assign` gives some of them to one. Without it there are
    enough for all, and the page table is the identity: sequence s has pages s * n to (s + 1) * n.
    What lies beyond the position of a row is never read, so positions are forgotten by simply
    starting before them.
    """

    def __init__(
        self,
        device: Device,
        shapes: Sequence[tuple[int, int] | KVShape],
        positions: int,
        *,
        sequences: int = 1,
        dtype: str = "f16",
        paged: bool = False,
        n_pages: int | None = None,
        pages: Buffer | None = None,
    ) -> None:
        """pages: the page table of another cache for as many positions, sequences and pages. What
        is assigned there is then assigned here, too."""
        self.device, self.pages_per_sequence = device, -(-positions // PAGE)
        entries = self.pages_per_sequence * sequences
        self.n_pages, paged = n_pages or entries, paged or n_pages is not None
        slots = self.n_pages * PAGE
        self.pages = pages or device.made(
            4 * entries, lambda: np.arange(entries, dtype=np.uint32) % self.n_pages, "pages"
        )
        layers = []
        for layer, (n_kv_heads, head_dim, latent) in enumerate(KVShape(*s) for s in shapes):
            nbytes = keys_bytes(KVShape(n_kv_heads, head_dim), slots, dtype)
            keys = device.buffer(nbytes, label=f"keys of layer {layer}")
            values = keys if latent else device.buffer(nbytes, label=f"values of layer {layer}")
            layers.append(
                LayerCache(
                    keys,
                    values,
                    self.pages,
                    dtype,
                    n_kv_heads,
                    head_dim,
                    self.pages_per_sequence,
                    paged,
                )
            )
        self.layers = tuple(layers)
        page = max((keys_bytes(KVShape(*shape), PAGE, dtype) for shape in shapes), default=0)
        self._page = device.buffer(page if n_pages else 0, label="page")  # being copied

    def assign(self, sequence: int, first: int, pages: Sequence[int]) -> None:
        """Give a sequence these pages, from its page `first` on."""
        at = sequence * self.pages_per_sequence + first
        self.device.write(self.pages, np.array(pages, np.uint32), 4 * at)

    def grow(self, n_pages: int) -> None:
        """To so many pages, which hold what they held. Everything that binds the cache has to be
        bound anew. Raises OutOfMemoryError: some layers may have grown then."""
        slots = n_pages * PAGE
        for layer in self.layers:
            sizes = layer.slot_bytes
            for buffer in dict.fromkeys((layer.keys, layer.values)):
                before = buffer.nbytes // sum(sizes)
                if before < slots:
                    starts = [0, *accumulate(sizes)]
                    kept = [
                        (start * before, start * slots, size * before)
                        for start, size in zip(starts, sizes, strict=False)
                    ]
                    self.device.grow(buffer, slots * sum(sizes), kept)
        self.n_pages = n_pages

    def copies(self, page: int, to: int, positions: int) -> list[Copy]:
        """The copies after which the first positions of one page are those of another, too. They go
        through a buffer, as none may be copied into itself."""
        found = []
        for own, new in zip(self.pieces(page), self.pieces(to), strict=True):
            nbytes = own.nbytes // PAGE * positions
            found.append(Copy((own.buffer, own.offset), (self._page, 0), nbytes))
            found.append(Copy((self._page, 0), (new.buffer, new.offset), nbytes))
        return found

    def pieces(self, page: int) -> list[Piece]:
        """Returns where all of a page lies."""
        found = []
        for layer in self.layers:
            for buffer in dict.fromkeys((layer.keys, layer.values)):
                start = 0
                for size in layer.slot_bytes:
                    found.append(Piece(buffer, start + page * PAGE * size, PAGE * size))
                    start += layer.slots * size
        return found

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        both = [(layer.keys, layer.values) for layer in self.layers]
        own = [buffer for keys, values in both for buffer in dict.fromkeys((keys, values))]
        return (*own, self.pages)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)
