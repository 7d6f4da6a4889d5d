"""The pages of the KV cache and the tokens in them: sequences that begin alike share pages, which
are kept after their end, as long as nobody else needs the room.

A page is free, or referenced by sequences, or cached, or both of these. What is cached is a tree: a
page's node hangs below that of the page before it, so that a node means all tokens from the start.
Only whole pages have children; of any other page, and of one that differs in the middle, the first
positions that match are copied. What is stored about a page stays true while it is stored: its
owner only writes behind it, and nobody else writes at all.

Nothing here touches the GPU. A page may be given away while steps that read or write it are still
queued, because the queue runs in order: what is submitted later comes later.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from infer.engine.host_cache import Name
from infer.engine.prefixes import common_length, page_name, root_name
from infer.engine.snapshots import Snapshot, Snapshots
from infer.engine.windows import WindowPages


@dataclass(frozen=True)
class Match:
    """The beginning of a prompt that is cached, of `length` positions.

    pages: in order, all of whose positions match. partial: (page, positions), one more of which the
    first positions match, to be copied. snapshot: the place of the state after `length` positions.
    cached: positions that match, were there a snapshot after them. windows: of layers with a
    window, the pages beside the last of `pages`, and window_partial: beside `partial`.
    """

    pages: tuple[int, ...] = ()
    length: int = 0
    partial: tuple[int, int] | None = None
    snapshot: int | None = None
    cached: int = 0
    windows: tuple[int, ...] = ()
    window_partial: int | None = None


@dataclass(frozen=True)
class PoolStats:
    """Pages that are referenced, that are only cached, and that are free; tokens that were found,
    of those that were looked up. page_size: positions of a page. states: snapshots of states that
    are kept, of the `state_places` that there are. window: the most positions that a layer with a
    window sees, where such layers have pages of their own, which the others are without; 0: all
    layers share the pages. window_pages: of these layers. window_pages_used: that are referenced or
    cached."""

    in_use: int
    cached: int
    free: int
    hits: int
    lookups: int
    page_size: int = 1
    states: int = 0
    state_places: int = 0
    window: int = 0
    window_pages: int = 0
    window_pages_used: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that there is room for in all."""
        return (self.in_use + self.cached + self.free) * self.page_size

    @property
    def window_tokens(self) -> int:
        """Tokens that layers with a window have room for, if they have pages of their own."""
        return self.window_pages * self.page_size


class Cached(NamedTuple):
    """What a page or the place of a state, by its number, holds for others. used: when it was last
    referenced, of time.monotonic_ns()."""

    name: Name
    number: int
    used: int


class PathPage(NamedTuple):
    """A cached page of a prompt, all its tokens, and the page beside it of layers with a window."""

    page: int
    tokens: tuple[int, ...]
    window: int | None


@dataclass(eq=False, repr=False)
class _Node:
    """A cached page: `tokens` are in its first positions, after those of the nodes above.

    start: the position of the first of them. children: sorted by tokens; none are the beginning of
    another's. active: whether the page is referenced, plus the children that are active. twins:
    other pages with the same tokens, all referenced, which need no node. snapshots: of states, by
    how many of the page's tokens they include. window: the page with these tokens of layers with a
    window, if it is cached. used: when its page was last given up, of time.monotonic_ns(). told:
    whether it was among what is evicted, before it went.
    """

    key: Hashable
    page: int
    parent: _Node | None
    tokens: tuple[int, ...]
    start: int
    children: list[_Node] = field(default_factory=list)
    active: int = 0
    twins: set[int] = field(default_factory=set)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    window: int | None = None
    used: int = 0
    told: bool = False

    @cached_property
    def name(self) -> bytes:
        """Stands for all tokens up to the end of this page, which is full."""
        if self.parent is None:
            return root_name(self.key)
        path = [self]  # a long one is too deep for recursion
        while (parent := path[-1].parent) is not None and "name" not in vars(parent):
            path.append(parent)
        while len(path) > 1:
            path.pop().name  # noqa: B018
        return page_name(self.parent.name, self.tokens)

    def first_untold(self) -> _Node | None:
        """The first page before this one that was not told, nor any after it."""
        node, found = self.parent, None
        while node is not None and node.parent is not None and not node.told:
            node, found = node.parent, node
        return found

    def closest(
        self, tokens: tuple[int, ...], avoid: Container[int] = ()
    ) -> tuple[_Node | None, int]:
        """The child that has most of the first tokens, and how many. It is a neighbour of where
        they would stand among the children. avoid: pages of which it is none."""
        children, at = self.children, bisect_left(self.children, tokens, key=_tokens)
        if at < len(children) and children[at].tokens == tokens and children[at].page not in avoid:
            return children[at], len(tokens)  # mostly
        best: _Node | None = None
        length = 0
        for side in (range(at - 1, -1, -1), range(at, len(children))):
            child = next((children[i] for i in side if children[i].page not in avoid), None)
            if child is not None and (n := common_length(child.tokens, tokens)) > length:
                best, length = child, n
        return best, length

    def attach(self, child: _Node) -> None:
        self.children.insert(bisect_left(self.children, child.tokens, key=_tokens), child)

    def detach(self, child: _Node) -> None:
        at = bisect_left(self.children, child.tokens, key=_tokens)
        assert self.children[at] is child  # no two have the same tokens
        del self.children[at]


def _tokens(node: _Node) -> tuple[int, ...]:
    return node.tokens


def _windows(match: Match) -> list[int]:
    """All pages of layers with a window in a match."""
    partial = match.window_partial
    return [*match.windows, *([] if partial is None else [partial])]


class PagePool:
    """All pages of a cache, and the snapshots of states for models whose layers have one. touched:
    how many of the first pages have been used: those behind them need no memory yet."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        *,
        snapshots: int = 0,
        windows: WindowPages | None = None,
    ) -> None:
        """snapshots: places for them; 0 where no layer has a state, and any length can be gone on
        from. windows: the pages of layers with a window, where these have their own; then without
        snapshots."""
        assert not (snapshots and windows)
        self.pages, self.page_size = pages, page_size
        self.snapshots = Snapshots(snapshots)
        self._has_states = snapshots > 0
        self.windows = windows
        self._count = Counter[int]()  # references
        self._free: list[int] = []  # those that were used before, and
        self.touched = 0  # all from here on
        self._roots: dict[Hashable, _Node] = {}
        self._nodes: dict[int, _Node] = {}  # of pages that are cached, and of twins
        # Nodes that are not active, in the order in which they became so: children before parents.
        self._idle: OrderedDict[int, _Node] = OrderedDict()
        self._hits = self._lookups = 0
        self._now = 0  # when pages were last given up
        # Pages and places of states that are given to others from now on, if that is to be told.
        self.evicted: list[Cached] | None = None
        if windows is not None:
            windows.tell = self._tell_window
        self.unsaved = set[int]()  # places whose states have not been saved yet

    # Pages

    @property
    def available(self) -> int:
        """Pages that can be allocated: those that are free, and those that can be evicted."""
        return self.pages - self.touched + len(self._free) + len(self._idle)

    @property
    def stats(self) -> PoolStats:
        in_use = len(self._count)
        free = self.pages - self.touched + len(self._free)
        windows = self.windows
        of_windows = (0, 0, 0) if windows is None else (windows.window, windows.pages, windows.used)
        return PoolStats(
            in_use,
            self.pages - in_use - free,
            free,
            self._hits,
            self._lookups,
            self.page_size,
            len(self.snapshots),
            self.snapshots.places,
            *of_windows,
        )

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """So many pages, each referenced once, for which the least recently used are evicted. None
        if there are not so many."""
        if count > self.available:
            return None
        fresh = range(self.touched, min(self.pages, self.touched + count - len(self._free)))
        self._free += fresh[::-1]
        self.touched += len(fresh)
        while len(self._free) < count:
            node = next(iter(self._idle.values()))
            if self.evicted is not None:
                # Without those before it, it would be of no use when these are lost.
                first = node.first_untold()
                self.evicted += [self._cached(own) for own in (node, first) if own is not None]
                self.evicted += self._window_of(node)
            self._remove(node)
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._count[page] = 1
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Raises ValueError for a page that is free."""
        for page in pages:
            node = self._nodes.get(page)
            if not self._count[page]:
                if node is None:
                    raise ValueError(f"Page {page} is free.")
                self._activate(node)
            self._count[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Gives up a reference to each page. Pages without any become free or, if they are cached,
        may be evicted, the last of them first. Raises ValueError for a page that has none."""
        self._now = max(self._now, time.monotonic_ns())
        for page in pages:
            if not self._count[page]:
                raise ValueError(f"Page {page} is not referenced.")
            self._count[page] -= 1
            if self._count[page]:
                continue
            del self._count[page]
            node = self._nodes.get(page)
            if node is not None and node.page == page:
                self._deactivate(node)
                continue
            if node is not None:
                self._forget_twin(page, node)
            self._free.append(page)

    def reset(self) -> None:
        """Nothing is referenced or cached."""
        self._free, self.touched = [], 0
        self._count.clear()
        self._roots.clear()
        self._nodes.clear()
        self._idle.clear()
        self.snapshots.clear()
        self.unsaved.clear()
        if self.windows is not None:
            self.windows.reset()

    # The tokens in pages

    def match(
        self,
        tokens: Sequence[int],
        key: Hashable,
        limit: int,
        uncopied: Container[int] = (),
        uncopied_windows: Container[int] = (),
    ) -> Match:
        """The longest beginning of tokens[:limit] that is cached and, if layers have states, ends
        at a snapshot. key: what else the keys and values depend on. uncopied: pages that are not
        `partial`, and uncopied_windows: that are not `window_partial`. All its pages are
        retained."""
        limit = min(limit, len(tokens))
        found = self._match(tokens, key, limit, uncopied, uncopied_windows)
        self._lookups += limit
        self._hits += found.length
        if found.snapshot is not None:
            self.snapshots.use(found.snapshot)
        self.retain(found.pages)
        if found.partial is not None:
            self.retain(found.partial[:1])
        if self.windows is not None:
            self.windows.retain(_windows(found))
        return found

    def cached(self, tokens: Sequence[int], key: Hashable) -> int:
        """Returns how much of a prompt is cached now. Nothing is retained, and nothing counted."""
        return self._match(tokens, key, len(tokens) - 1, (), ()).length

    def path(self, tokens: Sequence[int], key: Hashable) -> tuple[list[int], int]:
        """Returns the whole pages of a prompt that are cached, each retained, and how many of all
        positions are, without regard to snapshots."""
        pages, length = self._path(tokens, key, len(tokens), ())[1:3]
        self.retain(pages)
        return pages, length

    def path_with_windows(self, tokens: Sequence[int], key: Hashable) -> list[PathPage]:
        """Returns the pages of a prompt that are cached, the last of which may match in part, each
        retained; those of layers with a window are not."""
        _, pages, _, closest = self._path(tokens, key, len(tokens), ())
        self.retain(pages)
        nodes = [self._nodes[page] for page in pages]
        if closest is not None:
            self.retain([closest.page])
            nodes.append(closest)
            pages = [*pages, closest.page]
        return [PathPage(page, n.tokens, n.window) for page, n in zip(pages, nodes, strict=True)]

    def window_beside(self, page: int) -> int | None:
        """The page of layers with a window beside a cached page, if there is one."""
        node = self._nodes.get(page)
        return None if node is None else node.window

    def cache_window(self, page: int, window: int) -> bool:
        """Keep a referenced page of layers with a window beside a cached page, which holds no more
        tokens. Returns whether there was none yet."""
        node = self._nodes.get(page)
        if self.windows is None or node is None or node.window is not None:
            return False
        self.windows.cache(window, node)
        return True

    def unmatch(self, match: Match, limit: int) -> None:
        """Release what a `match` up to `limit` has found, as if nobody had asked."""
        self._lookups -= limit
        self._hits -= match.length
        if match.partial is not None:
            self.release(match.partial[:1])
        self.release(match.pages)
        if self.windows is not None:
            self.windows.release(_windows(match))

    def _match(
        self,
        tokens: Sequence[int],
        key: Hashable,
        limit: int,
        uncopied: Container[int],
        uncopied_windows: Container[int],
    ) -> Match:
        path, pages, length, closest = self._path(tokens, key, limit, uncopied)
        if self._has_states:
            return self._match_snapshot(tokens, limit, path, pages, length)
        partial = (closest.page, length % self.page_size) if closest is not None else None
        found = Match(tuple(pages), length, partial, None, length)
        if self.windows is None:
            return found
        nodes = [self._nodes[page] for page in (*pages, *([] if partial is None else partial[:1]))]
        return self._within_windows(found, nodes, self.windows.window, uncopied_windows)

    def _path(
        self, tokens: Sequence[int], key: Hashable, limit: int, uncopied: Container[int]
    ) -> tuple[set[_Node], list[int], int, _Node | None]:
        """Returns the nodes of the whole pages that match, these pages, how many positions match,
        and the node with the last of them, if its page is not whole or does not match wholly."""
        node, pages, length = self._roots.get(key), list[int](), 0
        path = set[_Node]()
        closest, common = None, 0
        while node is not None:
            path.add(node)
            rest = tuple(tokens[length : min(length + self.page_size, limit)])
            closest, common = node.closest(rest)
            if closest is None or common < self.page_size:
                if closest is not None and closest.page in uncopied:
                    closest, common = node.closest(rest, uncopied)
                break
            pages.append(closest.page)
            length += self.page_size
            node = closest
        return path, pages, length + common, closest

    def _within_windows(
        self, found: Match, nodes: Sequence[_Node], window: int, uncopied: Container[int]
    ) -> Match:
        """Returns the longest part of a match before whose end a window is cached. nodes: those
        of its pages, that of `partial` included. Such a part ends with the match, or with a page
        before one that is not there."""
        size, end, first = self.page_size, len(nodes), 0
        while end:
            length = min(found.length, end * size)
            first = max(0, length - window) // size
            own = range(end - 1, first - 1, -1)
            lacking = next((i for i in own if nodes[i].window is None), None)
            if lacking is None and length < end * size and nodes[-1].window in uncopied:
                lacking = end - 1
            if lacking is None:
                break
            end = lacking
        whole = min(end, len(found.pages))
        windows = tuple(node.window for node in nodes[first:whole] if node.window is not None)
        length = min(found.length, end * size)
        if end > whole:
            return replace(found, windows=windows, window_partial=nodes[-1].window)
        return Match(found.pages[:whole], length, None, None, found.cached, windows)

    def _match_snapshot(
        self,
        tokens: Sequence[int],
        limit: int,
        path: Container[_Node | None],
        pages: list[int],
        cached: int,
    ) -> Match:
        """Returns the match that ends at the snapshot after most positions. path: the nodes that
        match, all below which is looked at."""
        best = Match(cached=cached)
        for snapshot in self.snapshots:
            node, offset, length = snapshot.page, snapshot.offset, snapshot.position
            assert isinstance(node, _Node)
            if node.parent not in path or not best.length < length <= limit:
                continue
            if tuple(tokens[node.start : length]) == node.tokens[:offset]:
                whole = offset == self.page_size
                kept = pages[: node.start // self.page_size + whole]
                partial = None if whole else (node.page, offset)
                best = Match(tuple(kept), length, partial, snapshot.place, cached)
        return best

    def store(
        self,
        tokens: Sequence[int],
        key: Hashable,
        pages: Sequence[int],
        length: int | None = None,
        windows: Sequence[int] = (),
        first_window: int = 0,
    ) -> None:
        """The first `length` positions (all) of these pages hold these tokens, or will, once what
        is submitted has run. The pages are referenced. Pages that were stored before cost nothing;
        what others hold already is not stored again. windows: the pages beside these of layers with
        a window, referenced from number first_window on."""
        length = len(tokens) if length is None else length
        self._store(tokens, key, pages, length, windows, first_window)

    def _store(
        self,
        tokens: Sequence[int],
        key: Hashable,
        pages: Sequence[int],
        length: int,
        windows: Sequence[int] = (),
        first_window: int = 0,
    ) -> _Node | None:
        """The node that has the last of these tokens."""
        size, count = self.page_size, self.pages_for(length)
        first = count  # page to store
        while first and pages[first - 1] not in self._nodes:
            first -= 1
        parent = self._nodes[pages[first - 1]] if first else None
        if parent is not None and len(parent.tokens) < size and parent.parent is not None:
            first, parent = first - 1, parent.parent  # it may have grown
        for page in pages[first:count]:
            if not self._count[page]:
                raise ValueError(f"Page {page} is not referenced.")
        if parent is None and first < count:
            parent = self._roots.setdefault(key, _Node(key, -1, None, (), -size))
        for i in range(first, count):
            assert parent is not None  # the one before
            held = tuple(tokens[i * size : min((i + 1) * size, length)])
            parent = self._put(parent, held, pages[i])
            if first_window <= i < len(windows):
                self._cache_window(parent, pages[i], windows[i])
        return parent

    def _cache_window(self, node: _Node, page: int, window: int) -> None:
        """A page of layers with a window holds the tokens of the node, or of a page that the node
        covers."""
        if self.windows is not None and node.window is None and self._nodes.get(page) is node:
            self.windows.cache(window, node)

    def _put(self, parent: _Node, tokens: tuple[int, ...], page: int) -> _Node:
        """The node of a page with these tokens below that parent."""
        node = self._nodes.get(page)
        if node is not None and len(node.tokens) >= len(tokens):
            return node
        if node is not None:  # the page holds more than when it was stored
            node.tokens = tokens
            return node
        closest, common = parent.closest(tokens)
        if closest is not None and common == len(tokens):
            if common == self.page_size:
                self._nodes[page] = closest
                closest.twins.add(page)
            return closest
        node = self._nodes[page] = _Node(
            parent.key, page, parent, tokens, parent.start + self.page_size
        )
        parent.attach(node)
        self._activate(node)
        if closest is not None and common == len(closest.tokens):
            # It holds no more than the beginning of this one.
            self.snapshots.move(closest, node)
            self._remove(closest)
        return node

    def _remove(self, node: _Node) -> None:
        """Forget a page that has no children, which makes it free unless it is referenced."""
        assert node.parent is not None
        assert not node.children
        for snapshot in list(node.snapshots.values()):
            self._tell(snapshot)
            self.snapshots.forget(snapshot)
        if self.windows is not None:
            self.windows.forget(node)
        for page in (node.page, *node.twins):
            del self._nodes[page]
        parent = node.parent
        parent.detach(node)
        if self._count[node.page]:
            self._deactivate(node)
        else:
            self._free.append(node.page)
        self._idle.pop(node.page, None)
        if parent.parent is None and not parent.children:
            del self._roots[parent.key]

    def idle(self) -> Iterator[Cached]:
        """Yields what nobody references, what was used last first, and the beginnings of texts
        before what comes behind them."""
        for node in reversed(self._idle.values()):
            yield self._cached(node)
            yield from self._window_of(node)
            for snapshot in node.snapshots.values():
                if snapshot.place not in self.unsaved:
                    yield self._saved(snapshot)

    def _cached(self, node: _Node) -> Cached:
        assert node.parent is not None  # a root has no page
        node.told = True
        return Cached(Name(node.parent.name, node.tokens), node.page, self._used(node))

    def _window_of(self, node: _Node) -> list[Cached]:
        """The page of layers with a window beside it, if others may go on from it."""
        window = node.window
        if self.windows is None or window is None or not self.windows.is_kept(window):
            return []
        assert node.parent is not None
        return [Cached(Name(node.parent.name, node.tokens, "window"), window, self._used(node))]

    def _tell_window(self, node: _Node) -> None:
        """The page of layers with a window beside it is about to be another's."""
        if self.evicted is not None:
            self.evicted += self._window_of(node)

    def _used(self, node: _Node) -> int:
        return node.used if node.page in self._idle else time.monotonic_ns()

    def _tell(self, snapshot: Snapshot) -> None:
        """The place of a state is about to be another's."""
        if self.evicted is not None and snapshot.place not in self.unsaved:
            self.evicted.append(self._saved(snapshot))

    def _saved(self, snapshot: Snapshot) -> Cached:
        node = snapshot.page
        assert isinstance(node, _Node)
        assert node.parent is not None
        name = Name(node.parent.name, node.tokens[: snapshot.offset], "state")
        return Cached(name, snapshot.place, self._used(node))

    def _forget_twin(self, page: int, node: _Node) -> None:
        node.twins.remove(page)
        del self._nodes[page]

    def _activate(self, node: _Node) -> None:
        """Its page is referenced now: neither it nor what is above it can be evicted."""
        while True:
            node.active += 1
            if node.active > 1 or node.parent is None:
                return
            self._idle.pop(node.page, None)
            node = node.parent

    def _deactivate(self, node: _Node) -> None:
        while True:
            node.active -= 1
            if node.active or node.parent is None:
                return
            self._idle[node.page] = node
            self._now += 1
            node.used = self._now
            node = node.parent

    # Snapshots

    def store_snapshot(
        self, tokens: Sequence[int], key: Hashable, pages: Sequence[int]
    ) -> int | None:
        """`store`, and the place in which to save the state after exactly these tokens. None if it
        is saved already, or if what else is saved is worth more."""
        node = self._store(tokens, key, pages, len(tokens))
        if node is None or not self._has_states:
            return None
        place = self.snapshots.save(node, (len(tokens) - 1) % self.page_size + 1, self._tell)
        if place is not None:
            self.unsaved.add(place)
        return place
