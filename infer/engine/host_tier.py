"""Moves pages of the KV cache and states of layers between the GPU and host memory.

What the pool gives to others is copied to host memory first: the copies are submitted before the
step that writes there, and read once a later step is done. A prompt that goes on from what is here
has its pages brought back before it begins: they are cached on the GPU then as they were before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infer.engine.host_cache import Bytes, Found, HostCache, Name
from infer.engine.pages import PagePool
from infer.engine.steps import Steps
from infer.kernels.errors import OutOfMemoryError
from infer.kernels.gpu.device import Buffer
from infer.kernels.gpu.record import EMPTY, Copy, Piece, StepQueue

_BATCH = 32 << 20  # bytes that are moved at once
_WAITING = 8  # batches on their way to the host, at most
_LEAST_ROWS = 64  # fewer are computed


@dataclass(frozen=True)
class _Outgoing:
    """A batch on its way to the host. step: how many steps were submitted before."""

    names: list[tuple[Name, int]]
    staging: Buffer
    nbytes: int
    submission: Any
    step: int


@dataclass(eq=False)
class Restore:
    """What is brought back for a prompt. pages: its whole pages so far, retained. names: of the
    pages to come. state: after `length` positions."""

    tokens: Sequence[int]
    key: Hashable
    length: int
    pages: list[int]
    names: deque[Name]
    state: Name | None


class HostTier:
    """One engine's."""

    def __init__(
        self,
        steps: Steps,
        pool: PagePool,
        queue: StepQueue,
        cache: HostCache,
        seconds_of: Callable[[int, int], float],
        taken: Callable[[Sequence[int]], bool],
    ) -> None:
        """seconds_of: how long so many rows of a prompt take to be computed, from a position on; 0
        where nobody knows. taken: called with pages that are about to be written; returns whether
        they have memory."""
        self._steps, self._pool, self._queue, self.cache = steps, pool, queue, cache
        self._device, self._seconds_of, self._taken = steps.device, seconds_of, taken
        self._outgoing = deque[_Outgoing]()
        self._bytes_in = 0
        self._seconds_in = 0.0  # that these took to come back
        pool.evicted = []

    def forget(self) -> None:
        """Assume nothing about what the GPU has, nor about what is on its way from there."""
        self._pool.evicted = []
        for batch in self._outgoing:
            self._device.destroy([batch.staging])
        self._outgoing.clear()

    # To the host

    def take_out(self, step: int) -> None:
        """Submit the copies of what the pool has given to others since the last call. step: how
        many steps have been submitted."""
        evicted, self._pool.evicted = self._pool.evicted or [], []
        batch, nbytes = list[tuple[Name, int]](), 0
        for name, at in evicted:
            batch.append((name, at))
            nbytes += self._size(name)
            if nbytes >= _BATCH:
                self._send_out(batch, nbytes, step)
                batch, nbytes = [], 0
        if batch:
            self._send_out(batch, nbytes, step)

    def _send_out(self, batch: list[tuple[Name, int]], nbytes: int, step: int) -> None:
        if len(self._outgoing) >= _WAITING:
            self._collect(self._outgoing.popleft())
        staging, at, copies = self._device.acquire(nbytes, "read"), 0, list[Copy]()
        for name, number in batch:
            for piece in self._pieces(name, number):
                copies.append(Copy((piece.buffer, piece.offset), (staging, at), piece.nbytes))
                at += piece.nbytes
        try:
            submission = self._queue.submit(EMPTY, 0, 0, copies)
        except BaseException:  # an interrupt
            self._device.release(staging)
            raise
        self._outgoing.append(_Outgoing(batch, staging, nbytes, submission, step))

    def collect(self, step: int) -> None:
        """Take in what has come. step: how many steps are done."""
        while self._outgoing and self._outgoing[0].step < step:
            self._collect(self._outgoing.popleft())

    def _collect(self, batch: _Outgoing) -> None:
        words = self._queue.read(batch.staging, batch.nbytes, batch.submission)
        data, at = words.view(np.uint8), 0
        for name, _ in batch.names:
            size = self._size(name)
            self.cache.put(name, data[at : at + size].copy())
            at += size
        self._device.release(batch.staging)

    # Back

    def plan(self, tokens: Sequence[int], key: Hashable) -> Restore | None:
        """What is to be brought back for a prompt; None if nothing is, or if it would be computed
        as fast. Its last token is computed in any case."""
        while self._outgoing:
            self._collect(self._outgoing.popleft())
        has_states = self._steps.saved is not None
        own, size = tokens[: len(tokens) - 1], self._pool.page_size
        pages, cached = self._pool.path(own, key)
        found = self.cache.find(own, key, cached, size, has_states)
        known = self._pool.cached(tokens, key)
        if self._pays(found, known):
            names = deque(found.pages)
            whole = pages[: found.length // size] if not names else pages
            self._pool.release(pages[len(whole) :])
            return Restore(own, key, found.length, whole, names, found.state)
        self._pool.release(pages)
        return None

    def _pays(self, found: Found, known: int) -> bool:
        rows = found.length - known
        if rows < _LEAST_ROWS:
            return False
        names = [*found.pages, *([] if found.state is None else [found.state])]
        nbytes = sum(map(self._size, names))
        pace = self._seconds_in / self._bytes_in if self._bytes_in else 0.0
        seconds = self._seconds_of(rows, known)
        return not seconds or nbytes * pace < seconds

    def bring(self, restore: Restore, step: int) -> bool:
        """Bring a batch back. Returns whether all is there; then its pages are cached, and no
        longer retained. step: how many steps have been submitted."""
        begun, nbytes = time.perf_counter(), 0
        pool, size = self._pool, self._pool.page_size
        batch, pages = list[tuple[Name, int, Bytes]](), restore.pages
        while restore.names and nbytes < _BATCH:
            name = restore.names[0]
            data = self.cache.get(name)
            page = None if data is None else pool.allocate(1)
            if page is not None and not self._taken(page):
                pool.release(page)
                page = None
            if data is None or page is None:  # it went meanwhile, or there is no room
                restore.names.clear()
                restore.state = None
                restore.length = len(pages) * size
                break
            restore.names.popleft()
            pages += page
            batch.append((name, page[0], data))
            nbytes += data.nbytes
        held = min(restore.length, len(pages) * size)
        pool.store(restore.tokens, restore.key, pages, held)
        is_done = not restore.names
        if is_done and restore.state is not None:
            batch += self._with_state(restore)
        self.take_out(step)
        self._send_in(batch)
        self.cache.restored += sum(len(name.tokens) for name, *_ in batch if not name.is_state)
        self._bytes_in += sum(data.nbytes for *_, data in batch)
        self._seconds_in += time.perf_counter() - begun
        if is_done:
            pool.release(pages)
        return is_done

    def _with_state(self, restore: Restore) -> list[tuple[Name, int, Bytes]]:
        """The state and its place, if it is still here and finds one."""
        name, saved = restore.state, self._steps.saved
        assert name is not None
        assert saved is not None
        data = self.cache.get(name)
        if data is None:
            return []
        own = restore.tokens[: restore.length]
        place = self._pool.store_snapshot(own, restore.key, restore.pages)
        if place is None:
            return []
        try:
            saved.reserve(place + 1)
        except OutOfMemoryError:
            self._pool.snapshots.shrink(saved.places)
            return []
        return [(name, place, data)]

    def _send_in(self, batch: Sequence[tuple[Name, int, Bytes]]) -> None:
        if not batch:
            return
        nbytes = sum(data.nbytes for *_, data in batch)
        staging, at, copies = self._device.acquire(nbytes), 0, list[Copy]()
        self._device.write(staging, np.concatenate([data for *_, data in batch]))
        for name, number, _ in batch:
            for piece in self._pieces(name, number):
                copies.append(Copy((staging, at), (piece.buffer, piece.offset), piece.nbytes))
                at += piece.nbytes
        try:
            self._queue.submit(EMPTY, 0, 0, copies)
        finally:
            self._device.release(staging)

    def drop(self, restore: Restore) -> None:
        """Nobody waits for it any more."""
        self._pool.release(restore.pages)

    # Both

    def _pieces(self, name: Name, number: int) -> Sequence[Piece]:
        """Where a page, or the place of a state, lies on the GPU."""
        if not name.is_state:
            return self._steps.cache.pieces(number)
        assert self._steps.saved is not None
        return self._steps.saved.pieces(number)

    def _size(self, name: Name) -> int:
        return sum(piece.nbytes for piece in self._pieces(name, 0))
