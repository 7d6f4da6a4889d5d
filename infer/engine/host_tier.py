"""Moves pages of the KV cache and states of layers between the GPU and host memory.

What the pool gives to others is copied to host memory first: the copies are submitted before the
step that writes there, and read once a later step is done. A prompt that goes on from what is here
has its pages brought back before it begins: they are cached on the GPU then as they were before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infer.boundaries import reason
from infer.calls import warn
from infer.engine.cache_file import CachedPrompt
from infer.engine.host_cache import Found, HostCache, Name
from infer.engine.host_memory import Bytes, HostMemory
from infer.engine.pages import Cached, PagePool
from infer.engine.prefixes import root_name
from infer.engine.steps import Steps
from infer.engine.submissions import Submissions
from infer.kernels.errors import OutOfMemoryError
from infer.kernels.gpu.device import Buffer
from infer.kernels.gpu.record import EMPTY, Copy, Piece

_BATCH = 32 << 20  # bytes that are moved at once
_WAITING = 8  # batches on their way to the host, at most
_LEAST_ROWS = 64  # fewer are computed


@dataclass(frozen=True)
class _Outgoing:
    """A batch on its way to the host. step: how many steps were submitted before."""

    items: list[Cached]
    staging: Buffer
    nbytes: int
    submission: Any
    step: int


@dataclass(eq=False)
class Restore:
    """What is brought back for a prompt. pages: its whole pages so far, retained. names: of the
    pages to come. state: after `length` positions. partial: a retained page behind `pages`, of
    which the first positions match. windows: the pages of layers with a window to come, each with
    the number of the page that it is beside; None: the GPU had it. held: those that are there,
    retained."""

    tokens: Sequence[int]
    key: Hashable
    length: int
    pages: list[int]
    names: deque[Name]
    state: Name | None = None
    partial: int | None = None
    windows: deque[tuple[int, Name | None]] = field(default_factory=deque)
    held: list[int] = field(default_factory=list)

    def page(self, number: int) -> int:
        """The page of this number, which is there."""
        if number < len(self.pages):
            return self.pages[number]
        assert self.partial is not None
        return self.partial

    def end(self, page_size: int) -> None:
        """Nothing more comes."""
        self.names.clear()
        self.windows.clear()
        self.state, self.length = None, len(self.pages) * page_size


class HostTier:
    """Moves what the pool of one engine evicts to a cache in host memory, and back; and prompts to
    files and back. outgoing: what is on its way to the host."""

    def __init__(
        self,
        steps: Steps,
        pool: PagePool,
        submissions: Submissions,
        cache: HostCache,
        seconds_of: Callable[[int, int], float],
        taken: Callable[[Sequence[int]], bool],
    ) -> None:
        """seconds_of: how long so many rows of a prompt take to be computed, from a position on; 0
        where nobody knows. taken: called with pages that are about to be written; returns whether
        they have memory."""
        self._steps, self._pool, self.cache = steps, pool, cache
        self._submissions = submissions
        self._device, self._seconds_of, self._taken = steps.device, seconds_of, taken
        self.outgoing = deque[_Outgoing]()
        self._bytes_in = 0
        self._seconds_in = 0.0  # that these took to come back
        self._is_full = False  # nothing more goes to the host
        self.forget()

    def forget(self) -> None:
        """Assume nothing about what the GPU has, nor about what is on its way from there."""
        self._pool.evicted = [] if self.cache.capacity and not self._is_full else None
        for batch in self.outgoing:
            self._device.destroy([batch.staging])
        self.outgoing.clear()

    def share(self, memory: HostMemory, about: Hashable) -> None:
        """Keep everything in this memory from now on, and find what others have left there. about:
        all that keys, values and states depend on besides the key and the tokens of a prompt."""
        saved, windows = self._steps.caches.saved, self._steps.caches.windows
        sizes = [sum(piece.nbytes for piece in self._steps.caches.kv.pieces(0))]
        sizes.append(0 if windows is None else sum(piece.nbytes for piece in windows.pieces(0)))
        sizes.append(0 if saved is None else saved.nbytes)
        self.cache.share(memory, root_name((about, sizes)))
        self.forget()

    def _stop(self, error: Exception) -> None:
        """Nothing more goes to the host, as there is no memory for copies."""
        if not self._is_full:
            self._is_full, self._pool.evicted = True, None
            warn(
                f"There is no memory for copies of the cache ({reason(error)}): nothing more of it "
                "goes to host memory."
            )

    # To the host

    def take_out(self) -> None:
        """Submit the copies of what the pool has given to others since the last call."""
        evicted = self._pool.evicted
        if not evicted:
            return
        self._pool.evicted = []
        for batch, nbytes in self._batches(evicted):
            self._send_out(batch, nbytes)

    def keep(self, seconds: float) -> None:
        """Copy what no answer needs to host memory, what was used last first, until it is full, and
        for so long at most."""
        end, room = time.monotonic() + seconds, self.cache.memory.room
        self.take_out()
        for batch, nbytes in self._batches(self._pool.idle()):
            room -= nbytes
            if room < 0 or time.monotonic() >= end:
                break
            self._send_out(batch, nbytes)
        while self.outgoing:
            self._collect(self.outgoing.popleft())

    def _batches(self, items: Iterable[Cached]) -> Iterator[tuple[list[Cached], int]]:
        """Yields what is not in host memory yet, and the bytes of each batch."""
        batch, nbytes = list[Cached](), 0
        for item in items:
            if item.name in self.cache:
                self.cache.use([item.name], item.used)
                continue
            batch.append(item)
            nbytes += self._size(item.name)
            if nbytes >= _BATCH:
                yield batch, nbytes
                batch, nbytes = [], 0
        if batch:
            yield batch, nbytes

    def _send_out(self, batch: list[Cached], nbytes: int) -> None:
        if len(self.outgoing) >= _WAITING:
            self._collect(self.outgoing.popleft())
        try:
            staging = self._device.acquire(nbytes, "read")
        except OutOfMemoryError as error:
            self._stop(error)
            return
        at, copies = 0, list[Copy]()
        for name, number, _ in batch:
            for piece in self._pieces(name, number):
                copies.append(Copy((piece.buffer, piece.offset), (staging, at), piece.nbytes))
                at += piece.nbytes
        try:
            submission = self._submissions.queue.submit(EMPTY, 0, 0, copies)
        except BaseException:  # an interrupt
            self._device.release(staging)
            raise
        self.outgoing.append(_Outgoing(batch, staging, nbytes, submission, self._submissions.count))

    def collect(self) -> None:
        """Take in what has come: all that was submitted before a step that is done."""
        done = self._submissions.count - len(self._submissions.in_flight)
        while self.outgoing and self.outgoing[0].step < done:
            self._collect(self.outgoing.popleft())

    def _collect(self, batch: _Outgoing) -> None:
        try:
            words = self._submissions.queue.read(batch.staging, batch.nbytes, batch.submission)
        except MemoryError as error:
            self._device.release(batch.staging)
            self._stop(error)
            return
        data, at = words.view(np.uint8), 0
        for name, _, used in batch.items:
            size = self._size(name)
            self.cache.put(name, data[at : at + size], used)
            at += size
        self._device.release(batch.staging)

    # Back

    def plan(self, tokens: Sequence[int], key: Hashable) -> Restore | None:
        """What is to be brought back for a prompt; None if nothing is, or if it would be computed
        as fast. Its last token is computed in any case."""
        if self.cache.is_empty and not self.outgoing:
            return None
        while self.outgoing:
            self._collect(self.outgoing.popleft())
        has_states = self._steps.caches.saved is not None
        own, size = tokens[: len(tokens) - 1], self._pool.page_size
        if self._pool.windows is not None:
            return self._plan_windows(own, key, self._pool.cached(tokens, key))
        pages, cached = self._pool.path(own, key)
        if has_states:  # a state goes with pages that are retained
            cached = len(pages) * size
        found = self.cache.find(own, key, cached, size, has_states)
        known = self._pool.cached(tokens, key)
        if self._pays(found, known):
            names = deque(found.pages)
            self.cache.use(_names(found))
            whole = pages if names else pages[: self._pool.pages_for(found.length)]
            self._pool.release(pages[len(whole) :])
            return Restore(own, key, found.length, whole, names, found.state)
        self._pool.release(pages)
        return None

    def _plan_windows(self, own: Sequence[int], key: Hashable, known: int) -> Restore | None:
        """The plan where layers with a window have pages of their own. known: positions that the
        prompt can go on from without it."""
        pool = self._pool
        assert pool.windows is not None
        path, size = pool.path_with_windows(own, key), pool.page_size
        cached = [(page.tokens, page.window is not None) for page in path]
        found = self.cache.find_with_windows(own, key, cached, size, pool.windows.window)
        pays = self._pays(found, known)
        count = pool.pages_for(found.length) - len(found.pages) if pays else 0
        pool.release([page.page for page in path[count:]])
        if not pays:
            return None
        self.cache.use(_names(found))
        pages = [page.page for page in path[:count]]
        partial = None
        if count and not found.pages and found.length < count * size:
            partial = pages.pop()
        numbered = enumerate(found.windows, found.first_window)
        windows = deque(sorted(numbered, key=lambda each: each[1] is not None))
        names = deque(found.pages)
        return Restore(own, key, found.length, pages, names, None, partial, windows)

    def _pays(self, found: Found, known: int) -> bool:
        rows = found.length - known
        if rows < _LEAST_ROWS:
            return False
        nbytes = sum(map(self._size, _names(found)))
        pace = self._seconds_in / self._bytes_in if self._bytes_in else 0.0
        seconds = self._seconds_of(rows, known)
        return not seconds or nbytes * pace < seconds

    def bring(self, restore: Restore) -> bool:
        """Bring a batch back. Returns whether all is there; then its pages are cached, and no
        longer retained."""
        begun, nbytes = time.perf_counter(), 0
        pool, size = self._pool, self._pool.page_size
        batch, pages = list[tuple[Name, int, Bytes]](), restore.pages
        self._hold_windows(restore)
        while restore.names and nbytes < _BATCH:
            name = restore.names[0]
            data = self._data(name)
            page = None if data is None else pool.allocate(1)
            if page is not None and not self._taken(page):
                pool.release(page)
                page = None
            if data is None or page is None:  # it went meanwhile, or there is no room
                restore.end(size)
                break
            restore.names.popleft()
            pages += page
            batch.append((name, page[0], data))
            nbytes += data.nbytes
        held = min(restore.length, len(pages) * size)
        pool.store(restore.tokens, restore.key, pages, held)
        if not restore.names:
            batch += self._bring_windows(restore, nbytes)
        is_done = not (restore.names or restore.windows)
        if is_done and restore.state is not None:
            batch += self._with_state(restore)
        self.take_out()
        self._send_in(batch)
        self.cache.restored += sum(len(name.tokens) for name, *_ in batch if name.kind == "page")
        self._bytes_in += sum(data.nbytes for *_, data in batch)
        self._seconds_in += time.perf_counter() - begun
        if is_done:
            self.drop(restore)
        return is_done

    def _hold_windows(self, restore: Restore) -> None:
        """Retain the pages of layers with a window that the GPU has; not before it is the turn of
        this prompt, as there are no more of them than for one besides those that answers use."""
        while restore.windows and restore.windows[0][1] is None:
            at, _ = restore.windows.popleft()
            window = self._pool.window_beside(restore.page(at))
            if window is None:  # it went meanwhile
                restore.end(self._pool.page_size)
                return
            assert self._pool.windows is not None
            self._pool.windows.retain([window])
            restore.held.append(window)

    def _bring_windows(self, restore: Restore, nbytes: int) -> list[tuple[Name, int, Bytes]]:
        """The next pages of layers with a window, beside the pages that are there. nbytes: of what
        comes with them."""
        pool, batch = self._pool, list[tuple[Name, int, Bytes]]()
        while restore.windows and nbytes < _BATCH:
            at, name = restore.windows.popleft()
            assert pool.windows is not None
            assert name is not None
            data = self._data(name)
            if data is None:
                restore.windows.clear()
                break
            restore.held += pool.windows.allocate(1)
            if not self._taken([]):
                restore.windows.clear()
                break
            if pool.cache_window(restore.page(at), restore.held[-1]):
                batch.append((name, restore.held[-1], data))
                nbytes += data.nbytes
        return batch

    def _with_state(self, restore: Restore) -> list[tuple[Name, int, Bytes]]:
        """The state and its place, if it is still here and finds one."""
        name, saved = restore.state, self._steps.caches.saved
        assert name is not None
        assert saved is not None
        data = self._data(name)
        if data is None:
            return []
        own = restore.tokens[: restore.length]
        place = self._pool.store_snapshot(own, restore.key, restore.pages)
        if place is None:
            return []
        return [(name, place, data)] if self._has_place(place) else []

    def _data(self, name: Name) -> Bytes | None:
        """What is kept under a name; None if it is gone."""
        try:
            data = np.empty(self._size(name), np.uint8)
        except MemoryError as error:
            self._stop(error)
            return None
        return data if self.cache.read(name, data) else None

    def _send_in(self, batch: Sequence[tuple[Name, int, Bytes]]) -> None:
        if not batch:
            return
        at, copies = 0, list[Copy]()
        try:
            staging = self._device.acquire(sum(data.nbytes for *_, data in batch))
        except OutOfMemoryError:  # piece by piece it takes less
            for name, number, data in batch:
                self._write(self._pieces(name, number), data)
            return
        for name, number, data in batch:
            if len(data):  # layers with a window may be all there are
                self._device.write(staging, data, at)
            for piece in self._pieces(name, number):
                copies.append(Copy((staging, at), (piece.buffer, piece.offset), piece.nbytes))
                at += piece.nbytes
        try:
            self._submissions.queue.submit(EMPTY, 0, 0, copies)
        finally:
            self._device.release(staging)

    def drop(self, restore: Restore) -> None:
        """Nobody waits for it any more."""
        self._pool.release(restore.pages)
        if restore.partial is not None:
            self._pool.release([restore.partial])
        if self._pool.windows is not None:
            self._pool.windows.release(restore.held)

    # Prompts as files have them

    def copy_out(self, tokens: Sequence[int], key: Hashable) -> CachedPrompt:
        """Returns what is cached of a prompt; where layers have states, up to the last one before
        its last token, which another prompt may not have."""
        pool, limit = self._pool, len(tokens) - (self._steps.caches.saved is not None)
        match = pool.match(tokens, key, limit)
        try:
            partial = [] if match.partial is None else [match.partial[0]]
            windows = [*match.windows]
            windows += [] if match.window_partial is None else [match.window_partial]
            cache, of_windows, saved = (
                self._steps.caches.kv,
                self._steps.caches.windows,
                self._steps.caches.saved,
            )
            state = np.zeros(0, np.uint8)
            if match.snapshot is not None:
                assert saved is not None
                state = self._read(saved.pieces(match.snapshot))
            kept = list[Bytes]()
            if windows:
                assert of_windows is not None
                kept = [self._read(of_windows.pieces(page)) for page in windows]
            pages = [self._read(cache.pieces(page)) for page in (*match.pages, *partial)]
        finally:
            pool.unmatch(match, limit)
        return CachedPrompt(
            np.array(tokens[: match.length], np.uint32), _rows(pages), _rows(kept), state
        )

    def takes(self, prompt: CachedPrompt) -> bool:
        """Whether a prompt has the sizes that prompts have here."""
        caches, count = self._steps.caches, self._pool.pages_for(len(prompt.tokens))
        pages = count, sum(piece.nbytes for piece in caches.kv.pieces(0))
        windows = 0 if caches.windows is None else sum(p.nbytes for p in caches.windows.pieces(0))
        state = 0 if caches.saved is None else caches.saved.nbytes
        return (
            count > 0
            and prompt.pages.shape == pages
            and len(prompt.windows) <= count
            and prompt.windows.shape[1:] in ((windows,), (0,))
            and bool(windows) == bool(len(prompt.windows))
            and prompt.state.shape == (state,)
        )

    def copy_in(self, prompt: CachedPrompt, key: Hashable) -> bool:
        """Let prompts go on from this one. Returns whether there is room."""
        pool, tokens = self._pool, prompt.tokens.tolist()
        pages, windows = pool.allocate(len(prompt.pages)), list[int]()
        if pages is None:
            return False
        if pool.windows is not None:
            windows = pool.windows.allocate(len(prompt.windows))
        try:
            if not self._taken(pages):
                return False
            self.take_out()
            for page, data in zip(pages, prompt.pages, strict=True):
                self._write(self._steps.caches.kv.pieces(page), data)
            for page, data in zip(windows, prompt.windows, strict=True):
                assert self._steps.caches.windows is not None
                self._write(self._steps.caches.windows.pieces(page), data)
            first = len(pages) - len(windows)
            pool.store(tokens, key, pages, None, [0] * first + windows, first)
            if len(prompt.state):
                place = pool.store_snapshot(tokens, key, pages)
                saved = self._steps.caches.saved
                assert saved is not None
                if place is not None and self._has_place(place):
                    self._write(saved.pieces(place), prompt.state)
        finally:
            pool.release(pages)
            if pool.windows is not None:
                pool.windows.release(windows)
        return True

    def _has_place(self, place: int) -> bool:
        """Whether there is memory for this place; if not, there are no more places from now on."""
        saved = self._steps.caches.saved
        assert saved is not None
        try:
            saved.reserve(place + 1)
        except OutOfMemoryError:
            self._pool.snapshots.shrink(saved.places)
            return False
        return True

    def _read(self, pieces: Sequence[Piece]) -> Bytes:
        """The bytes of pieces, after all submitted work."""
        nbytes, at, copies = sum(piece.nbytes for piece in pieces), 0, list[Copy]()
        staging = self._device.acquire(nbytes, "read")
        for piece in pieces:
            copies.append(Copy((piece.buffer, piece.offset), (staging, at), piece.nbytes))
            at += piece.nbytes
        try:
            submission = self._submissions.queue.submit(EMPTY, 0, 0, copies)
            return self._submissions.queue.read(staging, nbytes, submission).view(np.uint8)
        finally:
            self._device.release(staging)

    def _write(self, pieces: Sequence[Piece], data: Bytes) -> None:
        at = 0
        for piece in pieces:
            self._device.write(piece.buffer, data[at : at + piece.nbytes], piece.offset)
            at += piece.nbytes

    # Both

    def _pieces(self, name: Name, number: int) -> Sequence[Piece]:
        """Where a page, or the place of a state, lies on the GPU."""
        if name.kind == "page":
            return self._steps.caches.kv.pieces(number)
        if name.kind == "window":
            assert self._steps.caches.windows is not None
            return self._steps.caches.windows.pieces(number)
        assert self._steps.caches.saved is not None
        return self._steps.caches.saved.pieces(number)

    def _size(self, name: Name) -> int:
        return sum(piece.nbytes for piece in self._pieces(name, 0))


def _names(found: Found) -> list[Name]:
    """All that is to be brought back."""
    each = (*found.pages, *found.windows, found.state)
    return [name for name in each if name is not None]


def _rows(each: Sequence[Bytes]) -> Bytes:
    """One row for each."""
    return np.stack(each) if each else np.zeros((0, 0), np.uint8)
