"""The pages of layers that attend to a window only: a pool of their own beside `PagePool`.

A sequence has such pages for its window and for the rows of its next step. Those before the window
are given up as it goes on. They stay cached, each at the node of the tree that has its tokens,
until others need the room. A prefix can be gone on from where the pages of the window before its
end are cached.

There are so many pages that they never run out: no more are referenced at once than
`pages_in_use` counts, so that nobody waits for one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from infer.engine.options import EngineOptions
from infer.kernels.state.kv_cache import PAGE
from infer.models.blocks.layers import DecoderConfig

_LEAST_KEPT = 4  # windows that there is room for besides those in use


def window_of(config: DecoderConfig) -> int:
    """The most positions that a layer with a window sees, if such layers have pages of their own;
    otherwise 0. Where layers have a state, all share one pool."""
    return 0 if any(config.states) else max(config.kv_windows, default=0)


def all_have_windows(config: DecoderConfig) -> bool:
    """Whether the pages of other layers hold nothing, because there are none."""
    return window_of(config) > 0 and all(config.kv_windows)


def useful_positions(config: DecoderConfig, options: EngineOptions) -> int:
    """Returns how many positions the cache has to name where all layers have a window: those of all
    answers, and of as many prompts as it keeps windows for. More are of no use."""
    return (options.max_batch + max(options.max_batch, _LEAST_KEPT)) * options.context


def pages_in_use(window: int, sequences: int, rows: int, page: int = PAGE) -> int:
    """Returns how many pages of layers with a window are referenced at once, at most. rows: of a
    prefill step. page: its positions."""
    # A window begins and ends within pages, and drafts, of which a page has room for all, may begin
    # one more. So may a chunk of a prompt. One page may be being copied.
    return sequences * (-(-window // page) + 3) + -(-rows // page) + 1


def window_pages(config: DecoderConfig, options: EngineOptions) -> int:
    """Returns how many pages the layers with a window have at most; 0 where all layers share one
    pool, because none has a window, or because its pages would be no fewer than all others.

    They are those in use, and some for windows of cached prefixes: as many as there are answers at
    once, or more where the context is long: a page for each 16 of the other layers, or of the
    context where all layers have a window."""
    window = window_of(config)
    if not window:
        return 0
    used = pages_in_use(window, options.max_batch, max(16, options.prefill_chunk))
    kept = max(options.max_batch, _LEAST_KEPT) * (-(-window // PAGE) + 1)
    others = -(-options.context // PAGE) if all_have_windows(config) else options.pages
    pages = used + max(kept, others // 16)
    return pages if pages < options.pages else 0


class Holder(Protocol):
    """What a page is cached at: `window` is the page, or None."""

    window: int | None


class WindowPages:
    """All pages of layers with a window. window: how many positions the widest of them sees.
    touched: how many of the first pages have been used: those behind them need no memory yet."""

    def __init__(self, pages: int, window: int) -> None:
        self.pages, self.window = pages, window
        # Called with a holder whose page goes to others, unless that was passed.
        self.tell: Callable[[Any], None] = lambda holder: None
        self.reset()

    def reset(self) -> None:
        """Nothing is referenced or cached. The holders are gone."""
        self._count = Counter[int]()  # references
        self._free: list[int] = []  # those that were used before, and
        self.touched = 0  # all from here on
        self._holders: dict[int, Holder] = {}  # of pages that are cached
        # Pages that are cached alone, the least recently used first; those that go before them.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._passed: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        """How many pages are referenced or cached."""
        return self.touched - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Returns so many pages, each referenced once, for which others are evicted: at first those
        that were passed."""
        taken = []
        for _ in range(count):
            if not self._free and self.touched < self.pages:
                self._free.append(self.touched)
                self.touched += 1
            if not self._free:
                idle = self._passed or self._idle
                assert idle, "more window pages are referenced than there can be"
                holder = self._holders[next(iter(idle))]
                if not self._passed:
                    self.tell(holder)
                self.forget(holder)
            page = self._free.pop()
            self._count[page] = 1
            taken.append(page)
        return taken

    def retain(self, pages: Iterable[int]) -> None:
        """Reference pages that are cached or referenced."""
        for page in pages:
            assert page in self._holders or self._count[page], f"window page {page} is free"
            self._idle.pop(page, None)
            self._passed.pop(page, None)
            self._count[page] += 1

    def release(self, pages: Iterable[int], *, passed: bool = False) -> None:
        """Gives up a reference to each page. Pages without any become free or, if they are cached,
        may be evicted. passed: before others, as no prompt or answer ended behind them."""
        for page in pages:
            assert self._count[page], f"window page {page} is not referenced"
            self._count[page] -= 1
            if self._count[page]:
                continue
            del self._count[page]
            if page in self._holders:
                (self._passed if passed else self._idle)[page] = None
            else:
                self._free.append(page)

    def cache(self, page: int, holder: Holder) -> None:
        """Keep a referenced page for others, at a holder that has none."""
        assert self._count[page]
        assert page not in self._holders
        self._holders[page], holder.window = holder, page

    def is_kept(self, page: int) -> bool:
        """Whether a page is cached alone, and was not passed."""
        return page in self._idle

    def forget(self, holder: Holder) -> None:
        """The holder has no page any more, which makes that free unless it is referenced."""
        page, holder.window = holder.window, None
        if page is None:
            return
        del self._holders[page]
        if not self._count[page]:
            self._idle.pop(page, None)
            self._passed.pop(page, None)
            self._free.append(page)
