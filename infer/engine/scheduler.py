"""Which step comes next: many answers are generated at once, and the GPU has one queue.

A sequence waits for a slot and for pages; its prompt is prefilled chunk by chunk, as far as it is
not cached; then it has a row in each decode step until it ends. Decode steps and chunks take turns.
Out of pages, the sequence that came last gives its own back and waits again, with the tokens that
it has. Steps are submitted before the ids of those before them are read.

A step of prefill takes as long as its tiles, not as its rows: where the end of a prompt leaves
room, the next ones begin in the same step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal

from infer.engine.pages import PagePool
from infer.kernels.errors import RequestError

AGEING = 64  # later sequences that one of the next higher priority may overtake
HEADROOM = 256  # positions for an answer that must be there before it is begun
COPIED = 8  # tokens that are computed rather than copied a step later

State = Literal["waiting", "prefill", "running", "ended"]


class Sequence:
    """One answer that is generated.

    tokens: of the prompt, and those generated that were read. pages: of the cache, in order, and
    slot: of the step, both while it has them. computed: positions that are in the cache, or will be
    when what is submitted has run; settled: those that states have taken in, where layers have
    some: drafted tokens that were right only are by the next step. in_flight: tokens that are
    sampled by steps not yet read. reused: positions of the prompt that were cached when it was
    first begun. draft: tokens that may come next, for its next step to verify. drafted: how many a
    step in flight does; they count among computed and in_flight from when they are read
    (`Scheduler.accept`). followed: positions that a draft model has in its cache.
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
        """limit: tokens to generate at most. 0: none, and it is to be cancelled when the last chunk
        of the prompt has been read. key: what keys and values depend on beside the tokens.
        priority: higher ones are begun first. group: of those that can share a decode step. ahead:
        tokens in flight at most. shares: whether it takes from the cache what others have left
        there, and leaves what it has; else all of its prompt is computed. chunk: tokens of its
        prompt in a step, at most."""
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
        self._begun = False

    @property
    def left(self) -> int:
        """Tokens that may still be submitted."""
        return self.limit - (len(self.tokens) + self.in_flight - self.prompt_tokens)

    @property
    def behind(self) -> int:
        """Positions computed that its states have not taken in."""
        return self.computed - self.settled


@dataclass(frozen=True)
class Prefill:
    """`count` rows of one sequence from position `start`; first: since it got its slot.

    copy: a page to another, and restore: from a snapshot to the slot's state, come before the rows;
    save: the state to a snapshot, comes after them. last: a token is sampled from the last row.
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
    """One row of each of these, in order of their slots, at the last of the positions computed.
    drafts: where there are any, what each has drafted after it, a row for each token. behind: where
    any are, how many positions before it the states of each have yet to take in."""

    sequences: tuple[Sequence, ...]
    drafts: tuple[Ids[int], ...] = ()
    behind: tuple[int, ...] = ()


class Scheduler:
    """All sequences, from `add` to their end. For one thread.

    Each step that `next` returns must be submitted before it is called again, or else `reset`.
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
        """slots: sequences at once. context: tokens of one sequence. chunk: rows of a prefill step,
        and prompts: those that it is of, at most. ahead: tokens of a sequence in flight.
        snapshot_tail: where layers have a state, it is saved so many tokens before the end of a
        prompt, as a next one may end otherwise, and where it parts from one before it."""
        self.pool, self.context, self.chunk, self.ahead = pool, context, chunk, ahead
        self.in_step = False  # no row before all tokens of its group have been read
        self.snapshot_tail, self.prompts = snapshot_tail, prompts
        self.waiting: list[Sequence] = []  # by rank
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []  # by slot
        self.preemptions = 0
        self._slots = list(range(slots))
        self._added = 0
        # Steps so far, the last prefill among them, and the last decode step of each group.
        self._steps = self._prefilled = 0
        self._decoded: dict[Hashable, int] = {}
        self._short: Sequence | None = None  # who found no room since the last page was released

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running)

    @property
    def has_prompts(self) -> bool:
        """Whether there are tokens to be computed before some sequence can go on."""
        return bool(self.waiting or self.prefilling)

    @property
    def shared_rows(self) -> int:
        """Of the prompts that may share the next step, if nothing of them is cached; 0 if there is
        but one."""
        first = sorted([*self.prefilling, *self.waiting[: self.prompts]], key=_rank)[: self.prompts]
        sharing = [s for s in first if s.group == first[0].group and s.limit]
        return sum(len(s.tokens) - s.computed for s in sharing) if len(sharing) > 1 else 0

    def add(self, sequence: Sequence) -> None:
        """Raises RequestError for a prompt that leaves no room for an answer. The limit is cut to
        the room there is."""
        room = min(self.context, self.pool.pages * self.pool.page_size)
        if not sequence.prompt_tokens:
            raise RequestError("The prompt is empty: give at least one token.")
        if sequence.prompt_tokens + min(sequence.limit, 1) > room:
            raise RequestError(
                f"The prompt has {sequence.prompt_tokens} tokens, and the context holds {room}, "
                "the answer included. Shorten the prompt or raise the context (--context)."
            )
        sequence.limit = min(sequence.limit, room - sequence.prompt_tokens)
        sequence.rank = self._added - AGEING * sequence.priority, self._added
        self._added += 1
        self._wait(sequence)

    def next(self, most_rows: int) -> tuple[Prefill, ...] | Decode | None:
        """The step to submit now, chunks of `most_rows` together at most; None if there is nothing
        to do before more ids are read."""
        step: tuple[Prefill, ...] | Decode | None = None
        groups = self._ready()
        # Chunks come after one decode step of each group.
        if self.has_prompts and (
            not groups or min(map(self._last_decode, groups)) > self._prefilled
        ):
            step = self._prefill(most_rows)
        return step or self._decode(groups) or self._prefill(most_rows) or None

    def read(self, sequence: Sequence, token: int, ended: bool) -> int | None:
        """The oldest token of it that is in flight. ended: it is the last, and its row is dead, if
        it was submitted. Returns where the state that it ends with is to be saved, if anywhere."""
        sequence.in_flight -= 1
        if sequence.state == "ended":
            return None
        sequence.tokens.append(token)
        if ended or len(sequence.tokens) - sequence.prompt_tokens >= sequence.limit:
            place = self._snapshot(sequence)
            self._leave(sequence, min(sequence.computed, len(sequence.tokens) - 1))
            sequence.state = "ended"
            return place
        if sequence.state == "running":
            self._store(sequence, min(sequence.computed, len(sequence.tokens)))
        return None

    def accept(self, sequence: Sequence, count: int) -> None:
        """So many of the tokens drafted are right, and are to be `read` after the one that is in
        flight."""
        sequence.drafted = 0
        sequence.in_flight += count
        if sequence.state == "running":
            sequence.computed += count
            if not self.snapshot_tail:
                sequence.settled = sequence.computed

    def cancel(self, sequence: Sequence, *, at_once: bool = False) -> int | None:
        """End it now: tokens of it that are in flight mean nothing any more. But where layers have
        a state, which is saved at the end, it ends when these are read, unless it has to end at
        once. Returns where the state is to be saved, if it is now."""
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

    def reset(self) -> None:
        """What was on the GPU is lost, and what was in flight will not be read: all sequences begin
        again with the tokens that they have."""
        for sequence in [*self.running, *self.prefilling]:
            self._leave(sequence, 0)
            self._wait(sequence)
        for sequence in self.waiting:
            sequence.in_flight = sequence.drafted = 0
        self._short = None
        self.pool.clear()

    def _snapshot(self, sequence: Sequence) -> int | None:
        """Where the state goes that a sequence ends with: after all its tokens but the last, or
        those that were drafted last, too."""
        if not self.snapshot_tail or not sequence.shares or sequence.state != "running":
            return None
        known = sequence.tokens[:-1][: sequence.settled]
        return self.pool.store_snapshot(known, sequence.key, sequence.pages)

    # Prefill

    def _prefill(self, most_rows: int) -> tuple[Prefill, ...]:
        """Chunks of the first sequences that have not all their tokens in the cache; all but the
        last end their prompts."""
        chunks: list[Prefill] = []
        most = min(self.chunk, most_rows)
        while most > 0 and len(chunks) < self.prompts:
            chunk = self._chunk(most, chunks)
            if chunk is None:
                break
            chunks.append(chunk)
            most -= chunk.count
            if not chunk.last:
                break
        if chunks:
            self._steps += 1
            self._prefilled = self._steps
        return tuple(chunks)

    def _chunk(self, most: int, others: Ids[Prefill]) -> Prefill | None:
        """The next of a step, behind others."""
        sequence = min(self.prefilling, key=_rank, default=None)
        copy = restore = save = None
        first = False
        if self.waiting and (sequence is None or self.waiting[0].rank < sequence.rank):
            admitted = self._admit(self.waiting[0], others)
            if admitted is not None:
                sequence, copy, restore = admitted
                first = True
        if sequence is None or not _fits(sequence, others):
            return None
        start, length = sequence.computed, len(sequence.tokens)
        end = min(start + min(most, sequence.chunk), length)
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

    def _admit(
        self, sequence: Sequence, others: Ids[Prefill]
    ) -> tuple[Sequence, tuple[int, int] | None, int | None] | None:
        """Give it a slot and pages for its tokens, if there is room for some of its answer too:
        itself, the page to copy and the snapshot to restore. Not in the step of others that write
        a page of which it would copy more than some tokens."""
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
        del self.waiting[0]
        self.prefilling.append(sequence)
        sequence.state, sequence.slot = "prefill", heappop(self._slots)
        sequence.pages = [*match.pages, *fresh]
        sequence.computed = sequence.settled = sequence.stored = match.length
        if self.snapshot_tail and sequence.shares:
            sequence.saves = [length - self.snapshot_tail]
            # What two prompts have in common a third may have, too.
            if match.length + pool.page_size <= match.cached < sequence.saves[0]:
                sequence.saves.insert(0, match.cached)
        if not sequence._begun:
            sequence._begun, sequence.reused = True, match.length
        return sequence, copy, match.snapshot

    # Decode

    def _ready(self) -> dict[Hashable, list[Sequence]]:
        """By group, the sequences that can have a row now, by slot."""
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
        """A step of that group that is ready and whose last is longest ago."""
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
        """Of its draft what it may generate and has pages for, or free ones."""
        if not sequence.draft:
            return ()
        pool, draft = self.pool, sequence.draft[: sequence.left - 1]
        more = pool.pages_for(sequence.computed + 1 + len(draft)) - len(sequence.pages)
        sequence.pages += pool.allocate(max(0, min(more, pool.available))) or ()
        draft = draft[: len(sequence.pages) * pool.page_size - sequence.computed - 1]
        sequence.draft, sequence.drafted = (), len(draft)
        return draft

    def _grant(self, sequence: Sequence) -> bool:
        """Whether there is a page for its next position, which needs one."""
        pages = self.pool.allocate(1)
        sequence.pages += pages or []
        return pages is not None

    def _preempt(self, sequence: Sequence) -> None:
        """It waits again; what of it stays cached need not be computed again."""
        self.preemptions += 1
        self._leave(sequence, min(sequence.computed, len(sequence.tokens)))
        self._wait(sequence)

    # Both

    def _wait(self, sequence: Sequence) -> None:
        sequence.state = "waiting"
        insort(self.waiting, sequence, key=_rank)

    def _store(self, sequence: Sequence, known: int, partial: bool = False) -> None:
        """Let others find the first `known` positions; partial: the last page even if it has room,
        which otherwise is stored when it is full."""
        if not partial:
            known -= known % self.pool.page_size
        if known > sequence.stored and sequence.shares:
            self.pool.store(sequence.tokens, sequence.key, sequence.pages, known)
            sequence.stored = known

    def _leave(self, sequence: Sequence, known: int) -> None:
        """Take it out of everything. known: positions that are in the cache and whose tokens are
        known; these stay there for others."""
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
    """Whether its prompt may be computed in their step."""
    return all(
        sequence.group == chunk.sequence.group and sequence.limit and chunk.sequence.limit
        for chunk in others[:1]
    )


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


def slot_of(sequence: Sequence) -> int:
    """Of one that has a slot."""
    assert sequence.slot is not None
    return sequence.slot
