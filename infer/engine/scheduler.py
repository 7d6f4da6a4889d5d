"""The scheduler chooses the next step: many answers are generated at once, on the GPU's one queue.

A sequence waits for a slot and for pages. What is not cached of its prompt is prefilled chunk by
chunk; then it has a row in each decode step until it ends. Decode steps and chunks alternate. When
pages run out, the sequence that came last gives its own back and waits again, with the tokens that
it has. Steps are submitted before the ids of the previous ones are read.

The time of a prefill step depends on its tiles, not its rows: if the end of a prompt leaves room,
the next prompts begin in the same step. A prompt whose rest fits into a chunk goes before the rest
of one that does not.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal

from infer.engine.pages import Match, PagePool
from infer.engine.prefixes import common_length
from infer.engine.snapshots import gap
from infer.kernels.errors import RequestError

AGEING = 64  # how many earlier sequences one of the next lower priority overtakes
PASSING = 4  # steps in a row in which short prompts go before the rest of a long one
HEADROOM = 256  # positions that must be free for an answer before it begins
COPIED = 8  # as few shared tokens are computed again rather than copied a step later
LEAST_SAVED = 256  # positions of which the state is saved
LARGEST_GAP = (
    2048  # positions between two states that are saved of a prompt, where chunks are larger
)

State = Literal["waiting", "prefill", "running", "ended"]


class Sequence:
    """One answer that is generated.

    tokens: the prompt, and the generated tokens that were read. pages: its pages of the cache, in
    order. slot: its place in steps; None while it waits. computed: positions that are cached, or
    will be once what is submitted has run. settled: those of them that the states of layers
    include; drafts that were right are included by the next step only. in_flight: tokens sampled by
    steps that were not read yet. reused: positions of the prompt that were cached when it first
    began. draft: tokens that may come next, for its next step to verify. drafted: how many of them
    a step in flight verifies; they count as computed and in_flight once that is read
    (`Scheduler.accept`). followed: positions that a draft model has cached. admitted: when it first
    began, of time.perf_counter().

    Where layers with a window have pages of their own: window_pages are beside `pages`, as many or,
    while it is prefilled, fewer; those before first_window are not its own any more, or never were.
    window_copy: of one such page to another, that comes with the copy of its first step. parted:
    how many first positions it had in common with others when it was last admitted.
    """

    def __init__(
        self,
        prompt: Ids[int],
        *,
        limit: int,
        key: Hashable = None,
        priority: int = 0,
        group: Hashable = None,
        ahead: int = 1 << 30,
        shares: bool = True,
        chunk: int = 1 << 30,
        marks: Ids[int] = (),
    ) -> None:
        """limit: the most tokens to generate; with 0 it generates none, and is to be cancelled when
        the last chunk of its prompt has been read. key: what keys and values depend on besides the
        tokens. priority: lower ones begin first. group: sequences of a group can share decode
        steps. ahead: the most tokens in flight. shares: whether it takes what others left in the
        cache and leaves its own there; if not, all of its prompt is computed. chunk: the most
        tokens of its prompt in a step. marks: lengths of its prompt after which other prompts are
        likely to go on differently."""
        self.tokens, self.prompt_tokens = list(prompt), len(prompt)
        self.limit, self.key, self.priority = limit, key, priority
        self.group: Any = group
        self.ahead, self.shares, self.chunk, self.marks = ahead, shares, chunk, marks
        self.pages: list[int] = []
        self.window_pages: list[int] = []
        self.first_window = self.parted = 0
        self.window_copy: tuple[int, int] | None = None
        self.slot: int | None = None
        self.computed = self.settled = self.in_flight = self.reused = 0
        self.stored = 0  # positions that others can find
        self.draft: Ids[int] = ()
        self.drafted = self.followed = 0
        # Positions after which its state is saved while it is prefilled, in order, and the last
        # position where it was saved.
        self.saves: list[int] = []
        self.saved = 0
        self.cached = 0  # how many tokens of it others had in the cache when it came
        self.state: State = "waiting"
        self.rank = 0, 0  # the lowest goes first
        self._begun = False
        self.admitted = 0.0

    def forget(self) -> None:
        """Keep the tokens of the sequence, and forget everything that the GPU had of it."""
        self.pages, self.slot, self.saves = [], None, []
        self.window_pages, self.first_window = [], 0
        self.computed = self.settled = self.stored = self.in_flight = self.drafted = 0
        self.draft = ()

    @property
    def rest(self) -> int:
        """Rows of its prompt that are to be computed still, as far as that is known."""
        return len(self.tokens) - max(self.computed, self.cached)

    @property
    def end(self) -> int:
        """The most tokens it can have."""
        return self.prompt_tokens + self.limit

    @property
    def left(self) -> int:
        """Tokens that may still be submitted."""
        return self.end - len(self.tokens) - self.in_flight

    @property
    def behind(self) -> int:
        """Computed positions that its states do not include."""
        return self.computed - self.settled


@dataclass(frozen=True)
class Prefill:
    """`count` rows of one sequence from position `start`. first: the first since it got its slot.

    Before the rows: copy, of one page to another, and restore, of a snapshot to the slot's state.
    After them: save, of the state to a snapshot. last: a token is sampled from the last row.
    """

    sequence: Sequence
    start: int
    count: int
    copy: tuple[int, int] | None
    restore: int | None
    save: int | None
    first: bool
    last: bool


@dataclass(frozen=True)
class Decode:
    """One row of each sequence, in order of their slots, at the last of its computed positions.
    drafts: if any has drafts, those of each, a further row for each token. behind: if any is
    behind, how many earlier positions the states of each do not include yet."""

    sequences: tuple[Sequence, ...]
    drafts: tuple[Ids[int], ...] = ()
    behind: tuple[int, ...] = ()


class Events:
    """Methods that an engine calls at each step. They do nothing: override them to watch it."""

    def submits(self, work: Ids[Prefill] | Decode) -> None:
        """Called before a step is submitted."""

    def filled(self) -> None:
        """Called when everything that can be submitted is, before the oldest step in flight is
        read."""


class Scheduler:
    """All sequences, from `add` to their end. For one thread.

    Each step that `next` returns must be submitted before the next call, or else `reset` called.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        slots: int,
        context: int,
        chunk: int,
        ahead: int = 2,
        snapshot_tail: int = 0,
        prompts: int = 1,
    ) -> None:
        """slots: the most sequences at once. context: the most tokens of a sequence. chunk: the
        most rows of a prefill step, and prompts: the most sequences in it. ahead: the most tokens
        of a sequence in flight. snapshot_tail: if layers have a state, it is saved so many tokens
        before the end of a prompt, as the next prompt may end differently; where a prompt parts
        from others; at a prompt's marks; and between these, so that there is never much to compute
        again (`snapshots.gap`)."""
        self.pool, self.context, self.chunk, self.ahead = pool, context, chunk, ahead
        self.in_step = False  # a group's next step waits until all its tokens have been read
        self.snapshot_tail, self.prompts = snapshot_tail, prompts
        self.waiting: list[Sequence] = []  # by rank
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []  # by slot
        self.preemptions = 0
        # (slot, place) of states that are to be saved before the next step is submitted.
        self.to_save: list[tuple[int, int]] = []
        self._most, self._slots = slots, list(range(slots))
        self._added = 0
        # Numbers of steps: the latest, the latest prefill, and the latest decode of each group.
        self._steps = self._prefilled = 0
        self._decoded: dict[Hashable, int] = {}
        self._passed = 0  # steps since the last of a prompt that shorter ones go before
        self._short: Sequence | None = None  # found no room since the last page was released
        self._chunked: list[Sequence] = []  # that have window pages for rows of the latest prefill

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running)

    @property
    def has_prompts(self) -> bool:
        """Whether any sequence waits for its prompt to be computed."""
        return bool(self.waiting or self.prefilling)

    @property
    def shared_rows(self) -> int:
        """Rows of the prompts that may share the next step, if none of them is cached; 0 if there
        is only one."""
        first = sorted([*self.prefilling, *self.waiting[: self.prompts]], key=_rank)[: self.prompts]
        sharing = [s for s in first if s.group == first[0].group and s.limit]
        return sum(len(s.tokens) - s.computed for s in sharing) if len(sharing) > 1 else 0

    def add(self, sequence: Sequence) -> None:
        """Cuts the limit to the room there is. Raises RequestError if the prompt leaves none."""
        room = min(self.context, self.pool.pages * self.pool.page_size)
        if not sequence.prompt_tokens:
            raise RequestError("The prompt is empty: give at least one token.")
        if sequence.prompt_tokens + min(sequence.limit, 1) > room:
            raise RequestError(
                f"The prompt has {sequence.prompt_tokens} tokens, and the context holds {room}, "
                "the answer included. Shorten the prompt or take a larger `context`."
            )
        sequence.limit = min(sequence.limit, room - sequence.prompt_tokens)
        sequence.rank = self._added + AGEING * sequence.priority, self._added
        self.pool.snapshots.tick()
        if sequence.shares:
            sequence.cached = self.pool.cached(sequence.tokens, sequence.key)
        self._added += 1
        for other in self.prefilling if self.snapshot_tail else ():
            if other.shares and sequence.shares and other.key == sequence.key:
                self._save_at(other, [common_length(other.tokens, sequence.tokens)])
        self._wait(sequence)

    def next(self, most_rows: Callable[[int], int]) -> tuple[Prefill, ...] | Decode | None:
        """The step to submit now: a decode step, or chunks; None if nothing can be done before more
        ids are read. most_rows: the most rows of a step for the position at which a chunk in it
        starts, no more for a later one."""
        step: tuple[Prefill, ...] | Decode | None = None
        groups = self._ready()
        # Chunks come after one decode step of each group.
        if self.has_prompts and (
            not groups or min(map(self._last_decode, groups)) > self._prefilled
        ):
            step = self._prefill(most_rows)
        return step or self._decode(groups) or self._prefill(most_rows) or None

    def read(self, sequence: Sequence, token: int, ended: bool) -> None:
        """Take in the oldest token of it that is in flight. ended: the token is the last one; a row
        after it that was submitted is dead."""
        sequence.in_flight -= 1
        if sequence.state == "ended":
            return
        sequence.tokens.append(token)
        if ended or len(sequence.tokens) >= sequence.end:
            self._snapshot(sequence)
            self._leave(sequence, min(sequence.computed, len(sequence.tokens) - 1))
            sequence.state = "ended"
        elif sequence.state == "running":
            self._store(sequence, min(sequence.computed, len(sequence.tokens)))

    def accept(self, sequence: Sequence, count: int) -> None:
        """Note how many of a sequence's drafts were right. Their tokens are to be `read` after the
        token in flight."""
        sequence.drafted = 0
        sequence.in_flight += count
        if sequence.state == "running":
            sequence.computed += count
            if not self.snapshot_tail:
                sequence.settled = sequence.computed

    def cancel(self, sequence: Sequence, *, at_once: bool = False) -> None:
        """End it now; its tokens in flight mean nothing any more. But if layers have a state, which
        is saved at the end, it ends when these tokens are read, unless at_once."""
        if sequence.state == "ended":
            return
        if not at_once:
            saves = self.snapshot_tail and sequence.shares and sequence.state == "running"
            if saves and sequence.in_flight:
                sequence.limit -= sequence.left
                return
            self._snapshot(sequence)
        self._leave(sequence, min(sequence.computed, len(sequence.tokens)))
        sequence.state = "ended"

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Begin anew with these sequences alone, and the tokens that they have: what was on the GPU
        is lost, and what was in flight will not be read. Safe in the middle of any other call."""
        self.waiting, self.prefilling, self.running = [], [], []
        self._slots = list(range(self._most))
        self._short, self._chunked = None, []
        self.to_save.clear()
        self.pool.reset()
        for sequence in sequences:
            sequence.forget()
            self._wait(sequence)

    def _snapshot(self, sequence: Sequence) -> None:
        """Save the state of a sequence that leaves its slot, all of whose tokens have been read but
        those behind its end. While it runs, it includes all but the last, or but the last and the
        drafts before it."""
        if not self.snapshot_tail or not sequence.shares or sequence.state == "waiting":
            return
        known = sequence.tokens[: len(sequence.tokens) - (sequence.state == "running")]
        known = known[: sequence.settled]
        if len(known) >= LEAST_SAVED:
            place = self.pool.store_snapshot(known, sequence.key, sequence.pages)
            if place is not None:
                self.to_save.append((slot_of(sequence), place))

    def _save_at(self, sequence: Sequence, lengths: Iterable[int]) -> None:
        """Save the state of a prompt after so many positions, too, if that saves others enough."""
        saves = sequence.saves
        for length in lengths:
            at = bisect_left(saves, length)
            before = max([sequence.computed, *saves[max(0, at - 1) : at]])
            is_far = length >= LEAST_SAVED and length - before >= self.pool.page_size
            if is_far and at < len(saves):  # before the tail
                saves.insert(at, length)

    # Prefill

    def _prefill(self, most_rows: Callable[[int], int]) -> tuple[Prefill, ...]:
        """Chunks of the first sequences whose tokens are not all cached. Each but the last chunk
        ends its prompt."""
        for sequence in self._chunked:
            self._slide(sequence, sequence.computed, sequence.computed)
        chunks: list[Prefill] = []
        left = min(self.chunk, most_rows(0))
        while left > 0 and len(chunks) < self.prompts:
            chunk = self._chunk(most_rows, chunks)
            if chunk is None:
                break
            chunks.append(chunk)
            left -= chunk.count
            if not chunk.last:
                break
        if chunks:
            self._steps += 1
            self._prefilled = self._steps
        self._chunked = [chunk.sequence for chunk in chunks]
        return tuple(chunks)

    def _chunk(self, most_rows: Callable[[int], int], others: Ids[Prefill]) -> Prefill | None:
        """The next chunk of a step, after the others in it."""
        for sequence in self._next_prompts(others):
            copy = restore = save = None
            first = sequence.state == "waiting"
            if first:
                admitted = self._admit(sequence, others)
                if admitted is None:
                    continue
                copy, restore = admitted
            if _fits(sequence, others):
                break
        else:
            return None
        start, length = sequence.computed, len(sequence.tokens)
        most = min(self.chunk, most_rows(start)) - sum(chunk.count for chunk in others)
        if most <= 0 and not first:
            return None
        # One that was admitted has a row at least: its copies belong to a chunk.
        end = min(start + min(max(most, 1), sequence.chunk), length)
        if until := next((position for position in sequence.saves if position > start), 0):
            end = min(end, until, sequence.saved + max(LARGEST_GAP, gap(end)))
            if end == until or end - sequence.saved >= gap(end):
                save = self.pool.store_snapshot(sequence.tokens[:end], sequence.key, sequence.pages)
                sequence.saved = end
        self._slide(sequence, start, end)
        sequence.computed = sequence.settled = end
        last = end == length
        self._store(sequence, end, partial=last)
        if last:
            sequence.state, sequence.in_flight = "running", 1
            self.prefilling.remove(sequence)
            insort(self.running, sequence, key=slot_of)
        return Prefill(sequence, start, end - start, copy, restore, save, first, last)

    def _next_prompts(self, others: Ids[Prefill]) -> list[Sequence]:
        """The prompts of which one has the next rows, the first choice first."""
        first = min(self.prefilling, key=_rank, default=None)
        if first is None or (self.waiting and self.waiting[0].rank < first.rank):
            return [*self.waiting[:1], *([] if first is None else [first])]
        if self._is_short(first):
            return [first]
        if not others:
            self._passed += 1
            if self._passed > PASSING:
                self._passed = 0
                return [first]
        short = [
            s
            for s in sorted([*self.prefilling, *self.waiting], key=_rank)
            if s.priority <= first.priority and self._is_short(s) and not self._is_behind(s)
        ]
        if not short and not others:
            self._passed = 0
        return [*short[:1], first]

    def _is_short(self, sequence: Sequence) -> bool:
        """Whether the rest of a prompt fits into one chunk of the size that it has without answers
        beside it."""
        return sequence.rest <= min(self.chunk, sequence.chunk)

    def _is_behind(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for positions that another prompt, which begins alike, is about
        to compute."""
        return (
            sequence.state == "waiting"
            and sequence.shares
            and any(
                other.shares
                and other.key == sequence.key
                and common_length(other.tokens, sequence.tokens) > other.computed + COPIED
                for other in self.prefilling
            )
        )

    def _admit(
        self, sequence: Sequence, others: Ids[Prefill]
    ) -> tuple[tuple[int, int] | None, int | None] | None:
        """Give it a slot and pages for its tokens, if there is room for some of its answer, too.
        Returns the page to copy and the snapshot to restore. Not in the same step as others that
        write a page from which it would copy more than a few tokens."""
        alone = not self.running and not self.prefilling
        if sequence.in_flight or not self._slots or (sequence is self._short and not alone):
            return None
        if not _fits(sequence, others):
            return None
        pool, length = self.pool, len(sequence.tokens)
        need = pool.pages_for(length + min(sequence.left, 1 if alone else HEADROOM))
        need += len(self.running) + len(self.prefilling)  # these grow, too
        # The last token's row is what is sampled from.
        limit = length - 1 if sequence.shares else 0
        match = pool.match(sequence.tokens, sequence.key, limit)
        unwritten = {
            page
            for chunk in others
            for page in chunk.sequence.pages[chunk.start // pool.page_size :]
        }
        windows = {
            page
            for chunk in others
            for page in chunk.sequence.window_pages[chunk.start // pool.page_size :]
        }
        if match.partial is not None and (
            match.partial[0] in unwritten or match.window_partial in windows
        ):
            most = match.length
            pool.unmatch(match, limit)
            match = pool.match(sequence.tokens, sequence.key, limit, unwritten, windows)
            if most - match.length > COPIED:
                pool.unmatch(match, limit)
                return None
        while need - len(match.pages) > pool.available:
            pool.unmatch(match, limit)
            if match.partial is None:
                self._short = sequence
                return None
            # Alone it has room, if it does without the page that would be copied.
            limit = len(match.pages) * pool.page_size
            match = pool.match(sequence.tokens, sequence.key, limit)
        fresh = pool.allocate(pool.pages_for(length) - len(match.pages))
        assert fresh is not None
        copy = None
        if match.partial is not None:
            copy = (match.partial[0], fresh[0])
            pool.release(match.partial[:1])
        self._give_windows(sequence, match)
        self.waiting.remove(sequence)
        self.prefilling.append(sequence)
        sequence.state, sequence.slot = "prefill", heappop(self._slots)
        sequence.pages = [*match.pages, *fresh]
        sequence.computed = sequence.settled = sequence.stored = match.length
        if self.snapshot_tail and sequence.shares:
            sequence.saved = match.length
            tail = length - self.snapshot_tail
            sequence.saves = [tail] if tail >= LEAST_SAVED else []
            # A third prompt may begin with the part that two prompts have in common.
            alike = [s for s in self.waiting if s.shares and s.key == sequence.key]
            shared = [common_length(s.tokens, sequence.tokens) for s in alike[: self._most]]
            self._save_at(sequence, [match.cached, *sequence.marks, *shared])
        if not sequence._begun:
            sequence._begun, sequence.reused = True, match.length
            sequence.admitted = time.perf_counter()
        return copy, match.snapshot

    # Decode

    def _ready(self) -> dict[Hashable, list[Sequence]]:
        """The sequences that can have a row now: by group, in order of their slots."""
        groups: dict[Hashable, list[Sequence]] = {}
        busy = set[Hashable]()
        behind = {sequence.group for sequence in self.running if sequence.behind}
        for sequence in self.running:
            in_flight = sequence.in_flight
            if in_flight and (self.in_step or sequence.drafted or sequence.group in behind):
                busy.add(sequence.group)
            if in_flight < self.ahead and in_flight < sequence.ahead and sequence.left > 0:
                groups.setdefault(sequence.group, []).append(sequence)
        for group in busy:
            groups.pop(group, None)
        return groups

    def _last_decode(self, group: Hashable) -> int:
        return self._decoded.get(group, 0)

    def _decode(self, groups: dict[Hashable, list[Sequence]]) -> Decode | None:
        """A step of the ready group that has waited longest."""
        while groups:
            group = min(groups, key=self._last_decode)
            size = self.pool.page_size
            full = [s for s in groups[group] if s.computed >= len(s.pages) * size]
            for sequence in sorted(full, key=_rank):
                while sequence.state == "running" and not self._grant(sequence):
                    last = max([*self.running, *self.prefilling], key=_rank)
                    if self.snapshot_tail and last.in_flight and last.shares:
                        return None  # its state is saved once its tokens have been read
                    self._preempt(last)
            rows = tuple(groups[group])
            if full:
                rows = tuple(s for s in rows if s.state == "running")
            if not rows:  # they had to give their pages back
                groups = self._ready()
                continue
            drafts: tuple[Ids[int], ...] = ()
            if self.in_step:
                drafts = tuple(self._drafted(sequence) for sequence in rows)
            behind = tuple(sequence.behind for sequence in rows)
            for sequence in rows:
                sequence.computed += 1
                sequence.settled = sequence.computed
                sequence.in_flight += 1
            self._steps += 1
            self._decoded[group] = self._steps
            if len(self._decoded) > len(self.running):
                self._decoded = {s.group: self._last_decode(s.group) for s in self.running}
            return Decode(rows, drafts if any(drafts) else (), behind if any(behind) else ())
        return None

    def _drafted(self, sequence: Sequence) -> Ids[int]:
        """Returns as much of a sequence's draft as its limit allows and there are pages for."""
        if not sequence.draft:
            return ()
        pool, draft = self.pool, sequence.draft[: sequence.left - 1]
        more = pool.pages_for(sequence.computed + 1 + len(draft)) - len(sequence.pages)
        if fresh := pool.allocate(max(0, min(more, pool.available))):
            sequence.pages += fresh
            self._slide(sequence, sequence.computed, len(sequence.pages) * pool.page_size)
        draft = draft[: len(sequence.pages) * pool.page_size - sequence.computed - 1]
        sequence.draft, sequence.drafted = (), len(draft)
        return draft

    def _grant(self, sequence: Sequence) -> bool:
        """Get a page for its next position. Returns whether there was one."""
        pages = self.pool.allocate(1)
        sequence.pages += pages or []
        if pages is not None:
            self._slide(sequence, sequence.computed, sequence.computed + 1)
        return pages is not None

    def _preempt(self, sequence: Sequence) -> None:
        """Make it wait again. What stays cached of it need not be computed again."""
        self.preemptions += 1
        self._snapshot(sequence)
        self._leave(sequence, min(sequence.computed, len(sequence.tokens)))
        self._wait(sequence)

    # Pages of layers with a window

    def _give_windows(self, sequence: Sequence, match: Match) -> None:
        """Give a sequence the pages with a window of its match, and a page to copy another to."""
        sequence.window_pages, sequence.window_copy = [], None
        sequence.first_window = len(match.pages) - len(match.windows)
        sequence.parted = match.cached
        if (windows := self.pool.windows) is None:
            return
        sequence.window_pages = [0] * sequence.first_window + [*match.windows]
        if match.window_partial is not None:
            sequence.window_pages += windows.allocate(1)
            sequence.window_copy = match.window_partial, sequence.window_pages[-1]
            windows.release([match.window_partial])

    def _slide(self, sequence: Sequence, start: int, end: int) -> None:
        """Have such pages for rows from `start` to `end`, and give up those before the window of
        the first of them. To be called before anything reads or writes these rows' pages."""
        if (windows := self.pool.windows) is None or sequence.slot is None:
            return
        # The row before may be computed again.
        self._take_windows(sequence, max(0, start - windows.window) // self.pool.page_size)
        more = self.pool.pages_for(end) - len(sequence.window_pages)
        sequence.window_pages += windows.allocate(max(0, more))

    def _take_windows(self, sequence: Sequence, end: int) -> None:
        """Take the pages before number `end` from it. What others may go on from stays longest: the
        windows before where it parted from them, before its answer and at its end."""
        if (windows := self.pool.windows) is None or end <= sequence.first_window:
            return
        size, window = self.pool.page_size, windows.window
        places = sequence.parted, sequence.prompt_tokens, sequence.computed
        for i in range(end - 1, sequence.first_window - 1, -1):
            is_kept = any(place - window < i * size + size and i * size < place for place in places)
            windows.release(sequence.window_pages[i : i + 1], passed=not is_kept)
        sequence.first_window = end

    # Both

    def _wait(self, sequence: Sequence) -> None:
        sequence.state = "waiting"
        insort(self.waiting, sequence, key=_rank)

    def _store(self, sequence: Sequence, known: int, partial: bool = False) -> None:
        """Let others find its first `known` positions. partial: the last page, too, even if it is
        not full."""
        if not partial:
            known -= known % self.pool.page_size
        if known > sequence.stored and sequence.shares:
            own = sequence.window_pages, sequence.first_window
            self.pool.store(sequence.tokens, sequence.key, sequence.pages, known, *own)
            sequence.stored = known

    def _leave(self, sequence: Sequence, known: int) -> None:
        """Take it out of everything. known: cached positions whose tokens are known; they stay
        cached for others."""
        if sequence.state == "waiting":
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            return
        (self.running if sequence.state == "running" else self.prefilling).remove(sequence)
        self._store(sequence, known, partial=True)
        self.pool.release(sequence.pages)
        self._take_windows(sequence, len(sequence.window_pages))
        assert sequence.slot is not None
        heappush(self._slots, sequence.slot)
        sequence.pages, sequence.slot = [], None
        sequence.window_pages, sequence.first_window = [], 0
        sequence.computed, sequence.settled, sequence.draft = 0, 0, ()
        self._short = None


def _fits(sequence: Sequence, others: Ids[Prefill]) -> bool:
    """Whether the prompt of a sequence may share a step with the prompts of others."""
    return all(
        sequence.group == chunk.sequence.group and sequence.limit and chunk.sequence.limit
        for chunk in others[:1]
    )


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


def slot_of(sequence: Sequence) -> int:
    """The slot of a sequence that has one."""
    assert sequence.slot is not None
    return sequence.slot
