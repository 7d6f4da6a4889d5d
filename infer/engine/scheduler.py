"""The scheduler chooses the next step: many answers are generated at once, on the GPU's one queue.

A sequence waits for a slot and for pages. What is not cached of its prompt is prefilled chunk by
chunk; then it has a row in each decode step until it ends. Decode steps and chunks alternate. When
pages run out, the sequence that came last gives its own back and waits again, with the tokens that
it has. Steps are submitted before the ids of the previous ones are read.

Prompts are prefilled in the order in which they came, one after the other, and those of a higher
priority first. But a prompt that fits into a chunk goes before the rest of a longer one that has
begun, so that a short question does not wait for all of a long document.

The time of a prefill step depends on its tiles, not its rows: if the end of a prompt leaves room,
the next prompts begin in the same step.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal

from infer.engine.pages import PagePool
from infer.kernels.errors import RequestError

AGEING = 64  # how many earlier sequences one of the next higher priority overtakes
OVERTAKING = 4  # the most chunks of short prompts in a row that go before a long one's next
HEADROOM = 256  # positions that must be free for an answer before it begins
COPIED = 8  # as few shared tokens are computed again rather than copied a step later

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
    ) -> None:
        """limit: the most tokens to generate; with 0 it generates none, and is to be cancelled when
        the last chunk of its prompt has been read. key: what keys and values depend on besides the
        tokens. priority: lower ones begin first. group: sequences of a group can share decode
        steps. ahead: the most tokens in flight. shares: whether it takes what others left in the
        cache and leaves its own there; if not, all of its prompt is computed. chunk: the most
        tokens of its prompt in a step."""
        self.tokens, self.prompt_tokens = list(prompt), len(prompt)
        self.limit, self.key, self.priority = limit, key, priority
        self.group: Any = group
        self.ahead, self.shares, self.chunk = ahead, shares, chunk
        self.pages: list[int] = []
        self.slot: int | None = None
        self.computed = self.settled = self.in_flight = self.reused = 0
        self.stored = 0  # positions that others can find
        self.draft: Ids[int] = ()
        self.drafted = self.followed = 0
        self.saves: list[int] = []  # positions after which its state is saved while it is prefilled
        self.state: State = "waiting"
        self.rank = 0, 0  # the lowest goes first
        self.cached: int | None = None  # positions found in the cache while it waits, if looked for
        self._begun = False
        self.admitted = 0.0

    def forget(self) -> None:
        """It keeps its tokens, and has nothing on the GPU any more."""
        self.pages, self.slot, self.saves = [], None, []
        self.computed = self.settled = self.stored = self.in_flight = self.drafted = 0
        self.draft = ()

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
        before the end of a prompt, as the next prompt may end differently, and where a prompt parts
        from an earlier one."""
        self.pool, self.context, self.chunk, self.ahead = pool, context, chunk, ahead
        self.in_step = False  # a group's next step waits until all its tokens have been read
        self.snapshot_tail, self.prompts = snapshot_tail, prompts
        self.waiting: list[Sequence] = []  # by rank
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []  # by slot
        self.preemptions = 0
        self._most, self._slots = slots, list(range(slots))
        self._added = 0
        # Numbers of steps: the latest, the latest prefill, and the latest decode of each group.
        self._steps = self._prefilled = 0
        self._decoded: dict[Hashable, int] = {}
        self._short: Sequence | None = None  # found no room since the last page was released
        self._overtaken = 0  # chunks of short prompts since a long one last began a step

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running)

    @property
    def has_prompts(self) -> bool:
        """Whether some sequence has to be prefilled before it can go on."""
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
        self._added += 1
        self._wait(sequence)

    def next(self, most_rows: Callable[[int], int]) -> tuple[Prefill, ...] | Decode | None:
        """The step to submit now: a decode step, or chunks; None if nothing can be done before more
        ids are read. most_rows: the most rows of a step for the position at which a chunk in it
        starts, no more for a later one; at least 1."""
        step: tuple[Prefill, ...] | Decode | None = None
        groups = self._ready()
        # Chunks come after one decode step of each group.
        if self.has_prompts and (
            not groups or min(map(self._last_decode, groups)) > self._prefilled
        ):
            step = self._prefill(most_rows)
        return step or self._decode(groups) or self._prefill(most_rows) or None

    def read(self, sequence: Sequence, token: int, ended: bool) -> int | None:
        """Take in the oldest token of it that is in flight. ended: the token is the last one; a row
        after it that was submitted is dead. Returns where its final state is to be saved, if
        anywhere."""
        sequence.in_flight -= 1
        if sequence.state == "ended":
            return None
        sequence.tokens.append(token)
        if ended or len(sequence.tokens) >= sequence.end:
            place = self._snapshot(sequence)
            self._leave(sequence, min(sequence.computed, len(sequence.tokens) - 1))
            sequence.state = "ended"
            return place
        if sequence.state == "running":
            self._store(sequence, min(sequence.computed, len(sequence.tokens)))
        return None

    def accept(self, sequence: Sequence, count: int) -> None:
        """So many of its drafts were right; they are to be `read` after the token in flight."""
        sequence.drafted = 0
        sequence.in_flight += count
        if sequence.state == "running":
            sequence.computed += count
            if not self.snapshot_tail:
                sequence.settled = sequence.computed

    def cancel(self, sequence: Sequence, *, at_once: bool = False) -> int | None:
        """End it now; its tokens in flight mean nothing any more. But if layers have a state, which
        is saved at the end, it ends when these tokens are read, unless at_once. Returns where the
        state is to be saved, if it is now."""
        if sequence.state == "ended":
            return None
        place = None
        saves = self.snapshot_tail and sequence.shares
        if saves and sequence.state == "running" and not at_once:
            if sequence.in_flight:
                sequence.limit -= sequence.left
                return None
            place = self._snapshot(sequence)
        self._leave(sequence, min(sequence.computed, len(sequence.tokens)))
        sequence.state = "ended"
        return place

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Begin anew with these sequences alone, and the tokens that they have: what was on the GPU
        is lost, and what was in flight will not be read. Safe in the middle of any other call."""
        self.waiting, self.prefilling, self.running = [], [], []
        self._slots = list(range(self._most))
        self._short = None
        self.pool.reset()
        for sequence in sequences:
            sequence.forget()
            self._wait(sequence)

    def _snapshot(self, sequence: Sequence) -> int | None:
        """Where the final state of a sequence is saved. It includes all tokens but the last, or but
        the last and the drafts before it."""
        if not self.snapshot_tail or not sequence.shares or sequence.state != "running":
            return None
        known = sequence.tokens[:-1][: sequence.settled]
        return self.pool.store_snapshot(known, sequence.key, sequence.pages)

    # Prefill

    def _prefill(self, most_rows: Callable[[int], int]) -> tuple[Prefill, ...]:
        """Chunks of the first sequences whose tokens are not all cached. Each but the last chunk
        ends its prompt."""
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
        return tuple(chunks)

    def _chunk(self, most_rows: Callable[[int], int], others: Ids[Prefill]) -> Prefill | None:
        """The next chunk of a step, after the others in it."""
        sequence = min(self.prefilling, key=_rank, default=None)
        candidate = next(iter(self.waiting), None)
        short = copy = restore = save = None
        first = False
        if sequence is not None and (candidate is None or sequence.rank < candidate.rank):
            candidate = short = self._short_before(sequence)
            if short is not None and short.state == "prefill":
                sequence, candidate = short, None
        if candidate is not None:
            admitted = self._admit(candidate, others)
            if admitted is not None:
                sequence, copy, restore = admitted
                first = True
        if sequence is None or not _fits(sequence, others):
            return None
        start, length = sequence.computed, len(sequence.tokens)
        most = min(self.chunk, most_rows(start)) - sum(chunk.count for chunk in others)
        if most <= 0 and not first:
            return None
        if sequence is short:
            self._overtaken += 1
        elif not others:
            self._overtaken = 0
        # One that was admitted has a row at least: its copies belong to a chunk.
        end = min(start + min(max(most, 1), sequence.chunk), length)
        if until := next((position for position in sequence.saves if position > start), 0):
            end = min(end, until)
            if end == until:
                save = self.pool.store_snapshot(sequence.tokens[:end], sequence.key, sequence.pages)
        sequence.computed = sequence.settled = end
        last = end == length
        self._store(sequence, end, partial=last)
        if last:
            sequence.state, sequence.in_flight = "running", 1
            self.prefilling.remove(sequence)
            insort(self.running, sequence, key=slot_of)
        return Prefill(sequence, start, end - start, copy, restore, save, first, last)

    def _short_before(self, first: Sequence) -> Sequence | None:
        """A sequence whose prompt goes before the next chunk of the first one: its rest fits into a
        chunk and the first one's does not. None if too many did in a row."""
        if self._overtaken >= OVERTAKING or self._is_short(first):
            return None
        others = [*sorted(self.prefilling, key=_rank), *(self.waiting if self._slots else ())]
        able = (s for s in others if s.priority <= first.priority and self._is_short(s))
        return next(able, None)

    def _is_short(self, sequence: Sequence) -> bool:
        """Whether what is not cached of its prompt fits into a chunk."""
        length, most = len(sequence.tokens), min(self.chunk, sequence.chunk)
        if sequence.state != "waiting" or length <= most or not sequence.shares:
            return length - sequence.computed <= most
        if sequence.cached is None:  # looked for once, which takes a while in long prompts
            match = self.pool.match(sequence.tokens, sequence.key, length - 1)
            self.pool.unmatch(match, length - 1)
            sequence.cached = match.length
        return length - sequence.cached <= most

    def _admit(
        self, sequence: Sequence, others: Ids[Prefill]
    ) -> tuple[Sequence, tuple[int, int] | None, int | None] | None:
        """Give it a slot and pages for its tokens, if there is room for some of its answer, too.
        Returns it, the page to copy and the snapshot to restore. Not in the same step as others
        that write a page from which it would copy more than a few tokens."""
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
        if match.partial is not None and match.partial[0] in unwritten:
            most = match.length
            pool.unmatch(match, limit)
            match = pool.match(sequence.tokens, sequence.key, limit, unwritten)
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
        self.waiting.remove(sequence)
        self.prefilling.append(sequence)
        sequence.state, sequence.slot = "prefill", heappop(self._slots)
        sequence.pages = [*match.pages, *fresh]
        sequence.computed = sequence.settled = sequence.stored = match.length
        if self.snapshot_tail and sequence.shares:
            sequence.saves = [length - self.snapshot_tail]
            # A third prompt may begin with the part that two prompts have in common.
            if match.length + pool.page_size <= match.cached < sequence.saves[0]:
                sequence.saves.insert(0, match.cached)
        if not sequence._begun:
            sequence._begun, sequence.reused = True, match.length
            sequence.admitted = time.perf_counter()
        return sequence, copy, match.snapshot

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
                    self._preempt(max([*self.running, *self.prefilling], key=_rank))
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
        sequence.pages += pool.allocate(max(0, min(more, pool.available))) or ()
        draft = draft[: len(sequence.pages) * pool.page_size - sequence.computed - 1]
        sequence.draft, sequence.drafted = (), len(draft)
        return draft

    def _grant(self, sequence: Sequence) -> bool:
        """Get a page for its next position. Returns whether there was one."""
        pages = self.pool.allocate(1)
        sequence.pages += pages or []
        return pages is not None

    def _preempt(self, sequence: Sequence) -> None:
        """Make it wait again. What stays cached of it need not be computed again."""
        self.preemptions += 1
        self._leave(sequence, min(sequence.computed, len(sequence.tokens)))
        self._wait(sequence)

    # Both

    def _wait(self, sequence: Sequence) -> None:
        sequence.state, sequence.cached = "waiting", None
        insort(self.waiting, sequence, key=_rank)

    def _store(self, sequence: Sequence, known: int, partial: bool = False) -> None:
        """Let others find its first `known` positions. partial: the last page, too, even if it is
        not full."""
        if not partial:
            known -= known % self.pool.page_size
        if known > sequence.stored and sequence.shares:
            self.pool.store(sequence.tokens, sequence.key, sequence.pages, known)
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
        assert sequence.slot is not None
        heappush(self._slots, sequence.slot)
        sequence.pages, sequence.slot = [], None
        sequence.computed, sequence.settled, sequence.draft = 0, 0, ()
        self._short = None


def _fits(sequence: Sequence, others: Ids[Prefill]) -> bool:
    """Whether its prompt may share a step with theirs."""
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
