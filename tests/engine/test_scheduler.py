"""The scheduler, held against a GPU that knows what every position of every page should be."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import pytest
from marks import others_full
from test_pages import check, check_windows

from infer.engine import scheduler, snapshots
from infer.engine.pages import PagePool, _Node
from infer.engine.scheduler import Decode, Prefill, Scheduler, Sequence
from infer.engine.windows import WindowPages, pages_in_use
from infer.kernels.errors import RequestError

SIZE = 4
STOP = 3
DEAD = -1  # sampled by a row that has stopped


def after(before: int, token: int) -> int:
    """Returns what stands for keys, values and states after one more token: a hash of all so
    far."""
    return hash((before, token)) & 0xFFFFFFFF


def begin(key: Hashable) -> int:
    """Returns what stands for the state before the first token, equal in every process."""
    return crc32(repr(key).encode())


def chain(key: Hashable, tokens: Ids[int]) -> list[int]:
    """After each of them."""
    values, value = [], begin(key)
    for token in tokens:
        value = after(value, token)
        values.append(value)
    return values


def most(rows: int) -> Callable[[int], int]:
    """Returns the rows that a step may have, wherever they start."""
    return lambda position: rows


def chosen(value: int) -> int:
    """The next token: few are different, so that answers have beginnings in common."""
    return STOP if value % 67 == 0 else value // 67 % 3


def answer(sequence: Sequence) -> list[int]:
    """The prompt and all tokens after it, of a model that computes everything anew."""
    tokens = sequence.tokens[: sequence.prompt_tokens]
    value = chain(sequence.key, tokens)[-1]
    while len(tokens) < sequence.prompt_tokens + sequence.limit:
        tokens.append(chosen(value))
        if tokens[-1] == STOP:
            break
        value = after(value, tokens[-1])
    return tokens


@dataclass
class Row:
    """The GPU's state of a slot: its values so far, and the token that comes next."""

    values: list[int]
    token: int
    alive: bool = True


@dataclass
class Gpu:
    """Runs what is submitted, in order; ids are read later. Positions of pages, states and
    snapshots hold the value after their token, and checks that what rows read is their own."""

    pool: PagePool
    slots: int
    rows: dict[int, Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lose()

    def lose(self) -> None:
        """Everything."""
        self.pages = [[0] * SIZE for _ in range(self.pool.pages)]
        self.states, self.snapshots = [0] * self.slots, [0] * self.pool.snapshots.places
        self.windows = [
            [0] * SIZE for _ in range(self.pool.windows.pages if self.pool.windows else 0)
        ]
        self.rows = {}

    def put(
        self,
        sequence: Sequence,
        values: Ids[int],
        position: int,
        settled: int,
        behind: int = 0,
        others: Ids[Prefill] = (),
    ) -> None:
        """Write values at positions from this one on, after reading those before. The state, which
        is so many positions behind, goes on to the first `settled`. others: that come later in the
        same step, and may read them."""
        cells = [cell for page in sequence.pages for cell in self.pages[page]]
        assert cells[:position] == list(values[:position]), "keys of another sequence"
        for i in range(position, len(values)):
            page = sequence.pages[i // SIZE]
            readers = sum(page in chunk.sequence.pages for chunk in others)
            assert self.pool._count[page] == 1 + readers, "a page that others read is written"
            self.pages[page][i % SIZE] = values[i]
        assert sequence.slot is not None
        if self.pool.snapshots.places:
            at = position - behind
            before = values[at - 1] if at else self.states[sequence.slot]
            assert self.states[sequence.slot] == before, "the state of another sequence"
        self.states[sequence.slot] = values[settled - 1]

    def put_windows(self, rows: Ids[tuple[Sequence, Ids[int], int]]) -> None:
        """Write what a layer with a window keeps of sequences, whose rows are from a position on,
        of all in the step before any of them reads its window."""
        if (pool := self.pool.windows) is None:
            return
        for n, (s, values, position) in enumerate(rows):
            later = [other.window_pages[other.first_window :] for other, *_ in rows[n + 1 :]]
            for i in range(position, len(values)):
                page = s.window_pages[i // SIZE]
                assert i // SIZE >= s.first_window
                readers = sum(page in pages for pages in later)
                assert pool._count[page] == 1 + readers, "a window page that others read"
                self.windows[page][i % SIZE] = values[i]
        for s, values, position in rows:
            assert len(s.window_pages) <= len(s.pages)
            for i in range(max(0, position - pool.window), len(values)):
                cell = self.windows[s.window_pages[i // SIZE]][i % SIZE]
                assert cell == values[i], "a window of another sequence"

    def prefill(self, step: Ids[Prefill]) -> list[tuple[Sequence, list[int]]]:
        """All that is copied comes before all rows; of these each layer writes the keys and values
        before any attends."""
        for chunk in step:
            assert chunk.sequence.slot is not None
            if chunk.copy is not None:
                source, target = chunk.copy
                self.pages[target] = list(self.pages[source])
                if self.pool.windows is not None:
                    assert chunk.sequence.window_copy is not None
                    source, target = chunk.sequence.window_copy
                    self.windows[target] = list(self.windows[source])
            if chunk.restore is not None:
                self.states[chunk.sequence.slot] = self.snapshots[chunk.restore]
        sampled: list[tuple[Sequence, list[int]]] = []
        all_values = [chain(c.sequence.key, c.sequence.tokens[: c.start + c.count]) for c in step]
        self.put_windows(
            [(c.sequence, values, c.start) for c, values in zip(step, all_values, strict=True)]
        )
        for i, (chunk, values) in enumerate(zip(step, all_values, strict=True)):
            s, end = chunk.sequence, chunk.start + chunk.count
            self.put(s, values, chunk.start, end, others=step[i + 1 :])
            assert s.slot is not None
            if chunk.save is not None:
                self.snapshots[chunk.save] = self.states[s.slot]
            assert chunk.last == (end == len(s.tokens))
            if chunk.last:
                self.rows[s.slot] = Row(values, chosen(values[-1]))
                sampled.append((s, [self.sampled(self.rows[s.slot])]))
        return sampled

    def decode(self, step: Decode) -> list[tuple[Sequence, list[int]]]:
        """And of drafts the tokens up to the first that is wrong."""
        sampled = []
        in_windows = []
        count = len(step.sequences)
        each = zip(
            step.sequences, step.drafts or [()] * count, step.behind or [0] * count, strict=True
        )
        for s, draft, behind in each:
            assert s.slot is not None
            row = self.rows[s.slot]
            if not row.alive:
                sampled.append((s, [DEAD]))
                continue
            before = len(row.values)
            assert s.computed == before + 1
            row.values.append(after(row.values[-1], row.token))
            right = 0
            for i, token in enumerate(draft):
                right += right == i and token == chosen(row.values[-1])
                row.values.append(after(row.values[-1], token))
            self.put(s, row.values, before, before + 1, behind)
            in_windows.append((s, list(row.values), before))
            tokens = []
            for i in range(right + 1):
                row.token = chosen(row.values[before + i])
                tokens.append(self.sampled(row))
            del row.values[before + 1 + right :]
            sampled.append((s, tokens))
        self.put_windows(in_windows)
        return sampled

    def sampled(self, row: Row) -> int:
        row.alive = row.token != STOP
        return row.token


class World:
    """An engine around a scheduler: submits ahead, reads later, and checks every step."""

    def __init__(
        self,
        pages: int,
        *,
        slots: int = 4,
        context: int = 64,
        chunk: int = 8,
        ahead: int = 2,
        snapshots: int = 0,
        prompts: int = 1,
        window: int = 0,
        kept: int = 0,
    ) -> None:
        """window: of layers that have pages of their own, of which there are `kept` more than can
        be in use."""
        used = pages_in_use(window, slots, chunk, SIZE)
        windows = WindowPages(used + kept, window) if window else None
        self.pool = PagePool(pages, SIZE, snapshots=snapshots, windows=windows)
        self.scheduler = Scheduler(
            self.pool,
            slots=slots,
            context=context,
            chunk=chunk,
            ahead=ahead,
            snapshot_tail=3 if snapshots else 0,
            prompts=prompts,
        )
        self.gpu = Gpu(self.pool, slots)
        self.pending: deque[list[tuple[Sequence, list[int]]]] = deque()
        self.sequences: list[Sequence] = []
        self.begun: list[Sequence] = []
        self.decoded = set[Hashable]()  # groups since the last chunk
        self.seen: Counter[str] = Counter()
        self.cut = set[Sequence]()  # ended before their answer was complete

    def add(self, sequence: Sequence) -> Sequence:
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def draft(self, rng: random.Random) -> None:
        """Some, the first tokens of which may be right, for the next step, or none."""
        scheduler = self.scheduler
        scheduler.in_step = rng.random() < 0.7
        for s in scheduler.running:
            s.draft = ()
            if scheduler.in_step and not s.in_flight and rng.random() < 0.7:
                right = answer(s)[len(s.tokens) :][: rng.randrange(6)]
                s.draft = [*right, *(rng.randrange(3) for _ in range(rng.randrange(3)))]

    def submit(self, most_rows: int = 100) -> bool:
        """The next step, if there is one and not too many are in flight."""
        if len(self.pending) >= self.scheduler.ahead:
            return False
        scheduler = self.scheduler
        ready = {s.group for s in scheduler.running if self.is_ready(s)}
        holders, prefilling = self.holders(), bool(scheduler.prefilling)
        preemptions = scheduler.preemptions
        step = scheduler.next(most(most_rows))
        self.save()
        if step is None:
            return False
        self.seen["preempted"] += scheduler.preemptions - preemptions
        self.last = str(step.sequences[0].group or "D") if isinstance(step, Decode) else "P"
        preempted = [s for s in holders if s.state == "waiting"]
        assert not preempted or min(s.rank for s in preempted) > max(s.rank for s in self.holders())
        in_turn = scheduler.preemptions == preemptions and most_rows > 0
        if not isinstance(step, Decode):
            assert not in_turn or ready <= self.decoded, "decode waits for more than one chunk"
            self.decoded.clear()
            self.check_step(step, most_rows)
            for chunk in step:
                assert not in_turn or chunk.first == (chunk.sequence not in holders)
                self.check_chunk(chunk)
            self.pending.append(self.gpu.prefill(step))
        else:
            group = step.sequences[0].group
            assert not (in_turn and prefilling and group in self.decoded), "prefill waits"
            self.decoded.add(group)
            self.check_decode(step)
            self.pending.append(self.gpu.decode(step))
        return True

    def holders(self) -> list[Sequence]:
        """Sequences that have a slot and pages."""
        return [*self.scheduler.prefilling, *self.scheduler.running]

    def is_ready(self, s: Sequence) -> bool:
        of_group = [other for other in self.scheduler.running if other.group == s.group]
        in_step = self.scheduler.in_step or any(o.behind for o in of_group)
        if any(o.in_flight and (o.drafted or in_step) for o in of_group):
            return False
        return s.left > 0 and s.in_flight < min(s.ahead, self.scheduler.ahead)

    def check_step(self, step: Ids[Prefill], most_rows: int) -> None:
        assert 1 <= len(step) <= self.scheduler.prompts
        sequences = [chunk.sequence for chunk in step]
        assert len(set(sequences)) == len(sequences)
        assert len({s.group for s in sequences}) == 1
        assert all(chunk.last for chunk in step[:-1])
        assert all(s.limit > 0 for s in sequences[1:])
        rows, most = sum(chunk.count for chunk in step), min(self.scheduler.chunk, most_rows)
        assert rows <= most
        end = step[-1].start + step[-1].count
        cut = step[-1].save is not None or end in sequences[-1].saves
        assert step[-1].last or cut or rows == most, "room is left"
        self.seen["packed"] += len(step) - 1

    def check_chunk(self, step: Prefill) -> None:
        s, scheduler = step.sequence, self.scheduler
        assert step.count > 0
        assert s.computed == step.start + step.count <= len(s.tokens)
        assert len(s.pages) == self.pool.pages_for(len(s.tokens))
        assert s.state == ("running" if step.last else "prefill")
        assert s.in_flight == step.last
        if not s.shares:
            assert step.start == 0 or not step.first
            assert step.save is step.restore is step.copy is None
        if s not in self.begun:
            self.seen["sequences"] += 1
            self.seen["reused"] += s.reused > 0
            assert s.reused == step.start < s.prompt_tokens
            before = [o for o in scheduler.waiting if o.rank < s.rank]
            long = [o for o in scheduler.prefilling if o is not s and o.rank < s.rank]
            assert not before or (long and s.rest <= self.scheduler.chunk), "out of order"
            assert all(s.priority <= o.priority for o in long), "out of order"
            self.seen["passed"] += bool(long)
            self.begun.append(s)
        self.seen["copy"] += step.copy is not None
        self.seen["restore"] += step.restore is not None
        self.seen["save"] += step.save is not None

    def check_decode(self, step: Decode) -> None:
        slots = [s.slot or 0 for s in step.sequences]
        assert slots == sorted(set(slots))
        groups = {s.group for s in step.sequences}
        assert len(groups) == 1
        for s in step.sequences:
            assert s.state == "running"
            assert s.computed == len(s.tokens) + s.in_flight - 1 <= len(s.pages) * SIZE
            assert s.in_flight <= self.scheduler.ahead
            assert len(s.tokens) + s.in_flight - s.prompt_tokens <= s.limit
            assert len(s.tokens) + s.in_flight <= self.scheduler.context
        self.seen["behind"] += sum(step.behind)
        if step.drafts or step.behind:  # the host writes the rows
            assert all(s.in_flight == 1 for s in step.sequences)
        for s, draft in zip(step.sequences, step.drafts, strict=bool(step.drafts)):
            self.seen["drafted"] += len(draft)
            assert s.drafted == len(draft)
            assert not draft or s.in_flight == 1
            assert s.computed + len(draft) <= len(s.pages) * SIZE
            assert len(s.tokens) + s.in_flight + len(draft) - s.prompt_tokens <= s.limit
        for s in self.scheduler.running:  # nobody of the group is left out
            if s.group in groups and s not in step.sequences:
                assert not self.is_ready(s)

    def read(self) -> None:
        """The ids of the oldest step."""
        for s, tokens in self.pending.popleft():
            if s.state == "ended":
                continue
            self.seen["accepted"] += len(tokens) - 1
            if s.drafted:
                self.scheduler.accept(s, len(tokens) - 1)
            for token in tokens:
                if s.state == "ended":
                    break
                assert token != DEAD
                if s.limit == 0:  # nothing is sampled
                    self.scheduler.cancel(s, at_once=True)
                    assert not self.scheduler.to_save
                    continue
                self.scheduler.read(s, token, token == STOP)
                self.save()

    def save(self) -> None:
        for slot, place in self.scheduler.to_save:
            self.gpu.snapshots[place] = self.gpu.states[slot]
            self.seen["saved end"] += 1
        self.scheduler.to_save.clear()

    def cancel(self, sequence: Sequence, at_once: bool = False) -> None:
        self.scheduler.cancel(sequence, at_once=at_once)
        self.save()
        self.cut.add(sequence)

    def reset(self) -> None:
        self.gpu.lose()
        self.pending.clear()
        plan = self.scheduler
        self.scheduler.reset([*plan.running, *plan.prefilling, *plan.waiting])

    def check(self) -> None:
        """Checks that the GPU has what the pool says, and that no page is lost."""
        scheduler = self.scheduler
        holders = self.holders()
        cached = check(self.pool, [page for s in holders for page in s.pages])
        for page, (key, tokens) in cached.items():
            values = chain(key, tokens)[(len(tokens) - 1) // SIZE * SIZE :]
            assert self.gpu.pages[page][: len(values)] == values, "a page is not what is stored"
        if self.pool.windows is not None:
            own = [page for s in holders for page in s.window_pages[s.first_window :]]
            for page, window in check_windows(self.pool, own).items():
                key, tokens = cached[page]
                values = chain(key, tokens)[(len(tokens) - 1) // SIZE * SIZE :]
                assert self.gpu.windows[window][: len(values)] == values
            self.seen["passed"] += len(self.pool.windows._passed)
        for snapshot in self.pool.snapshots:
            node = snapshot.page
            assert isinstance(node, _Node)
            tokens = cached[node.page][1][: snapshot.position]
            assert self.gpu.snapshots[snapshot.place] == chain(node.key, tokens)[-1]
        assert all(not s.pages and s.slot is None for s in self.sequences if s not in holders)
        slots = [s.slot for s in holders]
        assert sorted([*slots, *scheduler._slots], key=str) == list(range(self.gpu.slots))

    def finish(self) -> None:
        """Run to the end, and check the answers."""
        for _ in range(100_000):
            if not self.submit():
                if not self.pending:
                    break
                self.read()
        assert self.scheduler.idle, "nothing to do, but not done"
        self.check()
        assert self.pool.available == self.pool.pages
        for s in self.sequences:
            expected = answer(s)
            assert s.state == "ended"
            assert s.tokens == (expected[: len(s.tokens)] if s in self.cut else expected)


def prompt(rng: random.Random, texts: list[list[int]], most: int) -> list[int]:
    """Like something before it, up to somewhere."""
    begin = rng.choice(texts)
    if rng.random() < 0.5:
        begin = begin[: rng.randrange(len(begin) + 1)]
    return [*begin[: most - 1], *(rng.randrange(3) for _ in range(rng.randrange(1, 12)))][:most]


SEEN = Counter[str]()


def at_random(
    monkeypatch: pytest.MonkeyPatch,
    *,
    seed: int,
    snapshots: int = 0,
    drafts: bool,
    prompts: int,
    window: int = 0,
) -> World:
    """Arrivals, ends, cancels and resets, in too few pages: every answer is the one that its
    prompt alone would give."""
    rng = random.Random(seed)
    monkeypatch.setattr(scheduler, "COPIED", seed % 3)
    monkeypatch.setattr(scheduler, "HEADROOM", rng.choice([1, 1, 8, 256]))
    monkeypatch.setattr(scheduler, "AGEING", 3)
    world = World(
        rng.choice([8, 12, 16, 24, 40]),
        slots=rng.randrange(1, 8),
        context=rng.choice([32, 60]),
        chunk=rng.choice([3, 8, 64]),
        ahead=rng.randrange(1, 4),
        snapshots=snapshots,
        prompts=prompts,
        window=window,
        kept=rng.choice([0, 5, 40]) + (14 if drafts else 0),  # drafts may be two pages more
    )
    groups = rng.randrange(1, 4)
    texts = [[rng.randrange(3) for _ in range(20)] for _ in range(2)]
    for i in range(1000):
        action = rng.random()
        if action < 0.1 and len(world.scheduler.waiting) < 10:
            sequence = Sequence(
                prompt(rng, texts, 30),
                limit=rng.choice([0, 1, 10, 1000]),
                key=rng.choice([None, "adapter"]),
                priority=rng.choice([0, 0, -1]),
                group=rng.randrange(groups),
                ahead=rng.choice([1, 1000]),
                shares=rng.random() < 0.8,
            )
            world.add(sequence)
            texts = [*texts[-8:], answer(sequence)]
        elif action < 0.11 and world.sequences:
            world.cancel(rng.choice(world.sequences[-10:]), at_once=rng.random() < 0.5)
        elif action < 0.112:
            world.reset()
        elif action < 0.7 or not world.pending:
            if drafts:
                world.draft(rng)
            world.submit(rng.choice([0, 1, 5, 100, 100]))
        else:
            world.read()
        if i % 7 == 0:
            world.check()
    world.scheduler.in_step = False
    world.finish()
    return world


@pytest.mark.parametrize(
    ("snapshots", "drafts", "prompts"),
    [
        *((0, drafts, prompts) for drafts, prompts in ((False, 1), (False, 8), (True, 3))),
        *((snapshots, drafts, 1) for snapshots in (1, 5) for drafts in (False, True)),
    ],
)
@others_full("seed", range(10), range(5))
def test_at_random(
    seed: int, snapshots: int, drafts: bool, prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"seed": seed, "snapshots": snapshots, "drafts": drafts, "prompts": prompts}
    SEEN.update(at_random(monkeypatch, **own).seen)


@pytest.mark.parametrize("window", [1, 4, 9])
@pytest.mark.parametrize(("drafts", "prompts"), [(False, 1), (False, 8), (True, 3)])
@others_full("seed", range(10), range(3))
def test_windows_at_random(
    seed: int, window: int, drafts: bool, prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with a window have what they read, too, in as few pages as can be in use."""
    own = {"seed": seed, "window": window, "drafts": drafts, "prompts": prompts}
    assert at_random(monkeypatch, **own).seen["passed"]


def test_window_pages_of_a_chunk_are_given_up_in_the_next_step() -> None:
    windows = WindowPages(pages_in_use(9, 8, 64, SIZE), 9)
    pool = PagePool(1000, SIZE, windows=windows)
    plan = Scheduler(pool, slots=8, context=200, chunk=64)
    for i in range(8):
        plan.add(Sequence([i] * 62, limit=40))
    while plan.has_prompts:
        assert plan.next(most(64)) is not None
    assert len(windows._count) == 7 * 3 + 16


def evict_windows(world: World) -> None:
    """As many others do that need the room."""
    windows = world.pool.windows
    assert windows is not None
    windows.release(windows.allocate(windows.pages))


def test_what_lacks_its_window_is_computed_again_and_found_then() -> None:
    """The pages that others find first have the window of a sequence that came later."""
    world = World(100, window=9, kept=20)
    text = [1, 2, 0, 1, 2, 2, 1, 0, 0, 1, 2, 0, 1, 1, 1, 2, 2]
    for own, reused in (([], 0), ([1], 17), ([2], 0), ([0], 16), ([1, 1], 16), ([1, 1, 1], 19)):
        if own == [2]:
            evict_windows(world)
        sequence = world.add(Sequence([*text, *own], limit=1))
        world.finish()
        assert sequence.reused == reused


def test_a_long_prompt_leaves_the_windows_of_others() -> None:
    """But for those in the middle of prompts and answers, which go first."""
    world = World(400, slots=1, context=400, chunk=16, window=9, kept=12)
    talks = [[i, 1, 2] * 8 for i in range(2)]
    for talk in talks:
        sequence = world.add(Sequence(talk, limit=6))
        world.finish()
        talk[:] = sequence.tokens
    world.add(Sequence([2] * 300, limit=90))
    world.finish()
    for talk in talks:
        again = world.add(Sequence([*talk, 0], limit=1))
        world.finish()
        assert again.reused == len(talk) - 1


def test_where_prompts_part_a_window_stays() -> None:
    """Though none was there, so that the second had to compute it again."""
    world = World(400, slots=1, context=400, chunk=16, window=9, kept=12)
    begin = [1, 2, 0] * 20
    for i, reused in enumerate((0, 0, 60, 60)):
        sequence = world.add(Sequence([*begin, 10 + i, *[1, 0] * 60], limit=1))
        world.finish()
        assert sequence.reused == reused


def test_a_window_page_that_is_being_written_is_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even if the page beside it was written long ago."""
    monkeypatch.setattr(scheduler, "COPIED", 0)
    world = World(100, chunk=64, window=9, kept=20, prompts=8)
    text = [1, 2, 0, 1, 2, 2, 1, 0, 0, 1, 2, 0]
    world.add(Sequence(text, limit=1))
    world.finish()
    evict_windows(world)
    world.add(Sequence([*text, 1, 1, 1], limit=1))
    other = world.add(Sequence([*text[:-1], 2, 2], limit=1))
    world.finish()
    assert other.reused == 11


@pytest.mark.parametrize("kept", [0, 100])
def test_window_pages_do_not_run_out(kept: int) -> None:
    """Long prompts at once, of which no page is shared, and chunks larger than the window."""
    rng = random.Random(kept)
    world = World(1000, slots=8, context=200, chunk=64, prompts=8, window=9, kept=kept)
    for _ in range(40):
        tokens = [rng.randrange(3) for _ in range(rng.choice([10, 100, 100, 150]))]
        world.add(Sequence(tokens, limit=40))
    world.finish()
    assert world.seen["preempted"] == 0
    again = world.add(Sequence(world.sequences[-1].tokens, limit=5))  # it ended last
    world.finish()
    assert again.reused == again.prompt_tokens - 1


@pytest.mark.parametrize("seed", range(4))
def test_a_load_of_prompts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of which share steps, of few tokens and of many, alike and not, in enough pages and in
    too few."""
    rng = random.Random(seed)
    monkeypatch.setattr(scheduler, "HEADROOM", 8)
    monkeypatch.setattr(scheduler, "COPIED", 2)
    world = World((30, 100)[seed % 2], slots=9, chunk=16, prompts=(8, 3)[seed // 2])
    texts = [[rng.randrange(3) for _ in range(20)] for _ in range(2)]
    while len(world.sequences) < 600:
        if len(world.scheduler.waiting) < 3:
            for _ in range(rng.randrange(10)):
                group, limit = rng.randrange(20) // 19, rng.choice([0, 1, 4, 4, 12, 40])
                priority = rng.choice([0, 0, -1])
                own = prompt(rng, texts, 40)
                world.add(Sequence(own, limit=limit, group=group, priority=priority))
                texts = [*texts[-20:], answer(world.sequences[-1])]
        action = rng.random()
        if action < 0.003:
            world.cancel(rng.choice(world.sequences[-20:]))
        elif action < 0.004:
            world.reset()
        elif action < 0.6 or not world.pending:
            world.submit(rng.choice([8, 16]))
        else:
            world.read()
        if rng.random() < 0.05:
            world.check()
    world.finish()
    SEEN.update(world.seen)


def test_all_of_it_was_seen() -> None:
    """All kinds of events happened at random, if all runs were made."""
    print(SEEN)
    if SEEN["sequences"] > 4000:
        assert min(SEEN[what] for what in ("copy", "restore", "save", "preempted", "reused")) > 15
        assert SEEN["packed"] > 500
        assert SEEN["passed"] > 100
        assert 500 < SEEN["behind"] < SEEN["accepted"] < SEEN["drafted"]


def begun(world: World) -> list[int]:
    return [world.sequences.index(s) for s in world.begun]


def test_first_come_first_served() -> None:
    world = World(40, slots=2)
    for length in (5, 20, 1, 7):
        world.add(Sequence([1] * length, limit=4))
    world.finish()
    assert begun(world) == [0, 1, 2, 3]


def test_priority_overtakes_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "AGEING", 3)
    world = World(40, slots=1)
    for priority in (0, 0, -1, -1, -1, -1, -2):
        world.add(Sequence([1], limit=1, priority=priority))
    world.finish()
    assert begun(world) == [2, 0, 3, 6, 1, 4, 5]


def test_a_short_prompt_goes_before_the_rest_of_a_long_one() -> None:
    """But not of one with a lower priority, nor for ever."""
    world = World(60, chunk=4, slots=8)
    long = world.add(Sequence([1] * 30, limit=1))
    steps(world, 1)
    urgent = world.add(Sequence([2] * 9, limit=1, priority=-1))
    steps(world, 1)
    late = world.add(Sequence([0] * 3, limit=1))
    last = world.add(Sequence([0, 1, 2], limit=1, priority=1))
    ended = list[Sequence]()
    while world.submit() or world.pending:
        if world.pending:
            world.read()
        ended += [s for s in world.sequences if s.state == "ended" and s not in ended]
    assert [world.sequences[i] for i in begun(world)] == [long, urgent, late, last]
    assert ended == [urgent, late, long, last]


def test_rows_of_a_step_depend_on_where_each_prompt_starts() -> None:
    """Also on where one begins that is cached, on a prompt before it that finds no room, and on one
    that is short, though it has more rows than the long one's steps."""

    def rows(position: int) -> int:
        return 16 if position < 20 else 4

    def taken(plan: Scheduler, count: int) -> list[tuple[int, int, int]]:
        steps = [plan.next(rows) for _ in range(count)]
        found = [c for step in steps if isinstance(step, tuple) for c in step]
        return [(c.sequence.tokens[0], c.start, c.count) for c in found]

    plan = packing(Sequence([1] * 60, limit=1), most=1)
    assert taken(plan, 3) == [(1, 0, 16), (1, 16, 16), (1, 32, 4)]
    plan.add(Sequence([3] * 15, limit=1))
    assert taken(plan, 2) == [(3, 0, 15), (1, 36, 4)]
    while plan.has_prompts:
        plan.next(rows)
    plan.add(Sequence([1] * 40 + [2] * 9, limit=1))
    assert taken(plan, 2) == [(1, 40, 4), (1, 44, 4)]
    plan = packing([1] * 60, pages=20, most=1)
    assert taken(plan, 2) == [(1, 0, 16), (1, 16, 16)]
    plan.add(Sequence([2] * 60, limit=1, priority=-1))
    assert taken(plan, 2) == [(1, 32, 4), (1, 36, 4)]


def test_a_long_prompt_is_not_passed_for_ever() -> None:
    world = World(200, chunk=4, slots=8)
    long = world.add(Sequence([1] * 20, limit=1))
    steps(world, 1)
    order = []
    for i in range(24):
        world.add(Sequence([2, i % 3, 0], limit=1))
        before = long.computed
        assert world.submit()
        order.append(long.computed > before)
        while world.pending:
            world.read()
    assert order[:10] == [False] * 4 + [True] + [False] * 4 + [True]
    world.finish()


def test_who_shares_the_rest_of_a_long_prompt_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "COPIED", 0)
    world = World(60, chunk=4, slots=8)
    long = world.add(Sequence([1, 2] * 8, limit=1))
    steps(world, 1)
    same = world.add(Sequence([1, 2] * 3, limit=1))
    other = world.add(Sequence([2, 2], limit=1))
    world.finish()
    assert [world.sequences[i] for i in begun(world)] == [long, other, same]
    assert same.reused == 5


def test_what_cannot_fit_is_refused_with_both_numbers() -> None:
    world = World(40, context=32)
    with pytest.raises(RequestError, match="prompt has 32 tokens, and the context holds 32"):
        world.add(Sequence([1] * 32, limit=1))
    with pytest.raises(RequestError, match="prompt has 20 tokens, and the context holds 16"):
        World(4, context=32).add(Sequence([1] * 20, limit=1))
    with pytest.raises(RequestError, match="empty"):
        world.add(Sequence([], limit=1))
    assert world.scheduler.idle
    assert world.add(Sequence([1] * 31, limit=10)).limit == 1
    world.finish()


def test_a_sequence_may_fill_all_pages() -> None:
    """Even if its first page is a copy of one that is cached."""
    world = World(4, context=100)
    world.add(Sequence([1, 1, 2], limit=1))
    world.finish()
    sequence = world.add(Sequence([1, 1, 0, *[2] * 12], limit=100))
    world.finish()
    assert sequence.limit == 1
    long = next(s for i in range(100) for s in [Sequence([i], limit=15)] if len(answer(s)) == 16)
    world.add(long)
    world.finish()
    assert len(long.tokens) == 16


def test_it_is_begun_when_part_of_its_answer_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "HEADROOM", 8)
    for pages, states in ((8, ["running", "running"]), (7, ["running", "waiting"])):
        world = World(pages, chunk=16)
        world.add(Sequence([1] * 11, limit=1000))  # three pages, and one more if it goes on
        world.add(Sequence([2] * 8, limit=1000))  # two, and two for its answer
        steps(world, 3)
        assert [s.state for s in world.sequences] == states


def steps(world: World, count: int) -> str:
    """Returns the kinds of the next steps: P and D, or the group's name."""
    kinds = ""
    for _ in range(count):
        while not world.submit():
            world.read()
        kinds += world.last
    return kinds


def test_decode_steps_and_chunks_take_turns() -> None:
    world = World(40, chunk=4)
    world.add(Sequence([1] * 6, limit=1000))
    world.add(Sequence([2] * 10, limit=1000))
    assert steps(world, 10) == "PPDPDPDPDD"


def chunks(plan: Scheduler, most_rows: int = 100) -> list[tuple[int, int, int]]:
    """Returns, for the next step, which is of prefill, the first token of each sequence and the
    begin and end of its rows."""
    step = plan.next(most(most_rows))
    assert isinstance(step, tuple)
    return [(c.sequence.tokens[0], c.start, c.start + c.count) for c in step]


def packing(*prompts: Ids[int] | Sequence, pages: int = 40, most: int = 4) -> Scheduler:
    """Returns a scheduler of these prompts, with steps of 16 rows."""
    plan = Scheduler(PagePool(pages, SIZE), slots=9, context=64, chunk=16, prompts=most)
    for item in prompts:
        plan.add(item if isinstance(item, Sequence) else Sequence(item, limit=8))
    return plan


def test_prompts_fill_a_step() -> None:
    """In their order; the last of them may go on in the next."""
    plan = packing([1] * 5, [2] * 20, [3], [4] * 2, [5] * 3, [6] * 30)
    assert chunks(plan) == [(1, 0, 5), (2, 0, 11)]
    assert isinstance(plan.next(most(100)), Decode)
    assert chunks(plan, 12) == [(2, 11, 20), (3, 0, 1), (4, 0, 2)]
    assert isinstance(plan.next(most(100)), Decode)
    assert chunks(plan) == [(5, 0, 3), (6, 0, 13)]


def test_rows_that_may_share_a_step_are_counted() -> None:
    plan = packing([1] * 5, [2] * 20, [3], [4] * 2, [5] * 3)
    assert plan.shared_rows == 28  # of four
    assert chunks(plan) == [(1, 0, 5), (2, 0, 11)]
    assert plan.shared_rows == 9 + 1 + 2 + 3
    assert packing([1] * 5).shared_rows == packing().shared_rows == 0
    assert packing([1] * 5, [2] * 20, most=1).shared_rows == 0
    assert packing([1] * 5, Sequence([2], limit=1, group="other"), [3]).shared_rows == 6


def test_no_more_prompts_than_may_share_a_step() -> None:
    plan = packing(*([i] for i in range(6)))
    assert chunks(plan) == [(i, 0, 1) for i in range(4)]
    assert isinstance(plan.next(most(100)), Decode)
    assert chunks(plan) == [(4, 0, 1), (5, 0, 1)]
    assert chunks(packing([1], [2], most=1)) == [(1, 0, 1)]


@pytest.mark.parametrize("own", [{"group": "other"}, {"limit": 0}])
def test_other_kinds_of_prompts_have_steps_of_their_own(own: dict[str, Any]) -> None:
    plan = packing([1], Sequence([2], **{"limit": 8} | own), [3], [4])
    steps = [plan.next(most(100)) for _ in range(6)]
    prompts = [[c.sequence.tokens[0] for c in step] for step in steps if isinstance(step, tuple)]
    assert prompts == [[1], [2], [3, 4]]


def test_one_that_finds_no_pages_is_not_passed() -> None:
    plan = packing([1] * 5, [2] * 20, [3], pages=7)
    assert chunks(plan) == [(1, 0, 5)]


def test_equal_prompts_wait_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose last page they copy; whole pages they share in the same step, and a few tokens they
    compute themselves."""
    first = [1, 2, 0, 1, 2, 2, 1]
    plan = packing([*first, 0], [*first, 0, 1], [*first, 0, 2, 2])
    assert chunks(plan) == [(1, 0, 8), (1, 8, 9), (1, 8, 10)]
    plan = packing(first, first, first)
    assert chunks(plan) == [(1, 0, 7), (1, 4, 7), (1, 4, 7)]
    monkeypatch.setattr(scheduler, "COPIED", 1)
    plan = packing(first, first, first, first)
    assert chunks(plan) == [(1, 0, 7)]
    plan.next(most(100))
    assert chunks(plan) == [(1, 6, 7)] * 3


def test_a_beginning_is_copied_from_a_page_that_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though pages of the same step have as much of it."""
    monkeypatch.setattr(scheduler, "COPIED", 0)
    plan = packing([1, 2, 5], [1, 2, 6], [1, 2, 7], [1, 2, 4], [1, 3, 0])
    assert chunks(plan) == [(1, 0, 3)]
    plan.next(most(100))
    assert chunks(plan) == [(1, 2, 3)] * 3 + [(1, 1, 3)]


def test_groups_take_turns() -> None:
    world = World(40, slots=5, chunk=4)
    for name in "abac":
        world.add(Sequence([1] * 3, limit=1000, group=name))
    assert steps(world, 16) == "PaPbaPbaPcbacbac"


def test_a_chunk_has_no_more_rows_than_it_may() -> None:
    world = World(40)
    sequence = world.add(Sequence([1] * 9, limit=1))
    assert not world.submit(0)
    assert [world.submit(n) and sequence.computed for n in (2, 100)] == [2, 9]


def test_no_more_is_in_flight_than_may_be() -> None:
    pool = PagePool(40, SIZE)
    plan = Scheduler(pool, slots=4, context=64, chunk=64, ahead=3)
    several, one, few = (Sequence([1], limit=n, ahead=m) for n, m in ((10, 10), (10, 1), (2, 10)))
    for sequence in (several, one, few):
        plan.add(sequence)
    while plan.next(most(100)):
        pass
    assert [s.in_flight for s in (several, one, few)] == [3, 1, 2]
    plan.read(one, 1, False)
    assert plan.next(most(100)) == Decode((one,))
    plan.read(few, 1, False)
    assert plan.next(most(100)) is None


@pytest.fixture
def no_headroom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "HEADROOM", 1)


def read(plan: Scheduler, sequence: Sequence, token: int, ended: bool = False) -> None:
    plan.read(sequence, token, ended)


@pytest.mark.usefixtures("no_headroom")
def test_the_youngest_gives_its_pages_back_and_comes_back() -> None:
    """When all is read that it has in flight, and computes no more than is lost."""
    plan = Scheduler(PagePool(4, SIZE), slots=4, context=16, chunk=64)
    old, young = Sequence([1] * 7, limit=9), Sequence([2] * 3, limit=5)
    plan.add(old)
    plan.add(young)
    order = [plan.next(most(100)) for _ in range(5)]
    assert [(s.computed, s.in_flight, len(s.pages)) for s in (old, young)] == [(8, 2, 2), (4, 2, 1)]
    assert order[1::2] == [Decode((old,)), Decode((young,))]
    assert order[4] is None
    for sequence in (old, young, old):
        read(plan, sequence, 0)
    assert plan.next(most(100)) == Decode((old,))  # both need a page, and there is one
    assert (young.state, young.pages, young.slot, young.in_flight) == ("waiting", [], None, 1)
    assert plan.preemptions == 1
    read(plan, old, 0, True)
    assert plan.next(most(100)) is None
    read(plan, young, 1)
    assert young.tokens == [2, 2, 2, 0, 1]
    step = plan.next(most(100))
    assert isinstance(step, tuple)
    (chunk,) = step
    assert (chunk.sequence, chunk.start, chunk.count, chunk.last) == (young, 4, 1, True)
    assert young.reused == 0  # of the prompt, at first


@pytest.mark.usefixtures("no_headroom")
def test_the_lowest_priority_gives_its_pages_back_first() -> None:
    plan = Scheduler(PagePool(6, SIZE), slots=4, context=16, chunk=64)
    low, high = Sequence([1] * 7, limit=9), Sequence([2] * 7, limit=9, priority=-1)
    plan.add(low)
    plan.next(most(100))
    plan.add(high)
    for _ in range(20):
        while plan.next(most(100)) is not None:
            pass
        for sequence in (low, high):
            if sequence.in_flight:
                read(plan, sequence, 0)
    assert plan.preemptions > 0
    assert high.state == "ended"
    assert low._begun


@pytest.mark.usefixtures("no_headroom")
def test_a_prefill_is_given_up_for_one_that_was_first() -> None:
    world = World(6, chunk=1)
    world.add(Sequence([1, 0, 0], limit=21))
    second = world.add(Sequence([1, 2, 1] * 4, limit=2))
    seen = []
    while not world.scheduler.preemptions:
        seen.append(second.state)
        steps(world, 1)
    assert seen[-1] == "prefill"
    world.finish()


@pytest.mark.usefixtures("no_headroom")
@pytest.mark.parametrize("group", [None, "other"])
def test_there_is_a_step_after_the_last_row_was_given_up(group: str | None) -> None:
    """A chunk, or a decode step of another group, although nothing is in flight."""
    plan = Scheduler(PagePool(5, SIZE), slots=4, context=16, chunk=8 if group else 4, ahead=1)
    low, high = Sequence([1] * 4, limit=9), Sequence([2] * 7, limit=3, priority=-1, group=group)
    for sequence in (low, high):
        plan.add(sequence)
        plan.next(most(100))
    for sequence in (low, high):
        if sequence.in_flight:
            read(plan, sequence, 0)
    assert (low.state, high.state) == ("running", "running" if group else "prefill")
    assert plan.pool.allocate(2) is not None  # the last
    step = plan.next(most(100))
    assert low.state == "waiting"
    assert step == Decode((high,)) if group else isinstance(step, tuple)


def test_what_does_not_share_leaves_the_cache_alone() -> None:
    """It computes what is cached, in pages of its own, and evicts no more than it needs; without an
    answer it may fill all that there is."""
    world = World(8, context=32)
    world.add(Sequence([1] * 12, limit=1))
    world.finish()
    cached = world.pool.stats.cached
    for shares in (False, False, True):
        world.add(Sequence([1] * 12, limit=0, shares=shares))
        world.finish()
        assert world.begun[-1].reused == (11 if shares else 0)
        assert world.pool.stats.cached == cached
    world.add(Sequence([2] * 32, limit=0, shares=False))
    world.finish()
    assert (world.pool.stats.cached, world.pool.stats.free) == (0, 8)
    with pytest.raises(RequestError, match="has 33 tokens, and the context holds 32"):
        world.add(Sequence([2] * 33, limit=0, shares=False))


@pytest.mark.usefixtures("no_headroom")
def test_one_that_waits_is_begun_when_another_ends() -> None:
    plan = Scheduler(PagePool(7, SIZE), slots=4, context=24, chunk=64)
    first, second, third = (Sequence([i] * n, limit=9) for i, n in enumerate((8, 8, 4)))
    for sequence in (first, second, third):
        plan.add(sequence)
    while plan.next(most(100)) is not None:
        pass
    assert [s.state for s in (first, second, third)] == ["running", "running", "waiting"]
    read(plan, first, 5, True)
    step = plan.next(most(100))
    assert isinstance(step, tuple)
    assert [chunk.sequence for chunk in step] == [third]


def test_the_first_is_prefilled_first() -> None:
    """A prompt of a higher priority comes before others, even in the middle of their prefill."""
    world = World(40, chunk=2)
    low = world.add(Sequence([1] * 9, limit=1))
    steps(world, 1)
    high = world.add(Sequence([2] * 9, limit=1, priority=-1))
    steps(world, 5)
    assert (low.computed, high.computed) == (2, 9)
    world.finish()


def test_what_is_known_of_a_prompt_is_not_computed_again() -> None:
    world = World(40)
    first = world.add(Sequence([1, 2, 0, 1, 2, 2, 1], limit=1))
    world.finish()
    for tokens, reused in (
        (first.tokens, 7),
        (first.tokens[:7], 6),  # the last row is what the answer is sampled from
        (first.tokens[:6], 5),
        ([*first.tokens[:5], 0, 0], 5),
    ):
        sequence = world.add(Sequence(tokens, limit=1))
        world.finish()
        assert sequence.reused == reused
    other = world.add(Sequence(first.tokens, limit=1, key="adapter"))
    world.finish()
    assert other.reused == 0


def test_a_page_of_an_answer_is_stored_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    world, lengths = World(40), []
    sequence = world.add(Sequence([1, 1, 0, 0, 2], limit=50))
    store = world.pool.store

    def counted(tokens: Ids[int], key: Hashable, pages: Ids[int], length: int, *of: Any) -> None:
        lengths.append(length)
        store(tokens, key, pages, length, *of)

    monkeypatch.setattr(world.pool, "store", counted)
    world.finish()
    known = len(sequence.tokens) - 1
    assert known > 20
    assert lengths == [5, *range(8, known, 4), known]


def test_a_prompt_is_shared_while_it_is_used() -> None:
    world = World(40, slots=5)
    for _ in range(5):
        world.add(Sequence([1, 2, 0, 1, 2, 2, 1], limit=8))
    world.finish()
    assert [s.reused for s in world.sequences] == [0, 6, 6, 6, 6]


def test_a_row_that_was_dead_left_nothing() -> None:
    """A stop id that was submitted as the next row's token, and has neither keys nor values."""
    prompt = next([i, 1] for i in range(1000) if answer(Sequence([i, 1], limit=2))[2:] == [STOP])
    world = World(40)
    sequence = world.add(Sequence(prompt, limit=100))
    world.submit()
    world.submit()
    assert sequence.computed == 3
    world.finish()
    later = world.add(Sequence([*prompt, STOP, 1], limit=1))
    world.finish()
    assert later.reused == 2


def test_states_are_saved_before_the_end_and_at_it() -> None:
    world = World(40, snapshots=4, chunk=3)
    first = world.add(Sequence([1, 2, 0, 1, 2, 2, 1, 0, 1, 1], limit=3))
    world.finish()
    assert (world.seen["save"], world.seen["saved end"]) == (1, 1)
    for tokens, reused in (
        ([*first.tokens, 0, 0, 0, 0], 12),
        ([*first.tokens[:7], 2, 2, 2], 7),
        ([*first.tokens[:6], 2, 2, 2], 0),
    ):
        sequence = world.add(Sequence(tokens, limit=1))
        world.finish()
        assert sequence.reused == reused
    assert world.seen["restore"] == 2


def test_a_state_is_saved_where_prompts_part() -> None:
    world = World(40, snapshots=9, chunk=64)
    common = [1, 2, 0, 1, 2, 2, 1, 0, 1, 1]
    for i in range(3):
        sequence = world.add(Sequence([*common, i, *[i] * 9], limit=1))
        world.finish()
        assert sequence.reused == (0, 0, 10)[i]
    assert world.seen["save"] == 4
    world.add(Sequence([*common[:3], *[0] * 9], limit=1))  # no more than a page in common
    world.finish()
    assert world.seen["save"] == 5


def test_states_of_a_long_prompt_are_saved_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """At ends of chunks that are far enough apart, and in large chunks, too."""
    monkeypatch.setattr(snapshots, "GAP", 10)
    monkeypatch.setattr(scheduler, "LARGEST_GAP", 20)
    for chunk, expected in ((4, [12, 24, 36, 48, 52]), (64, [20, 40, 52])):
        world = World(40, snapshots=9, chunk=chunk)
        world.add(Sequence([1] * 55, limit=1))
        world.finish()
        saved = sorted(own.position for own in world.pool.snapshots)
        assert saved == [*expected, 55]


def test_a_state_is_saved_where_waiting_prompts_part() -> None:
    world = World(60, slots=3, snapshots=20, chunk=64)
    common = [1, 2, 0, 1, 2, 2, 1, 0, 1, 1]
    late = Sequence([*common, 2, 2, 2, 0, *[0] * 9], limit=1)
    for i in range(2):
        world.add(Sequence([*common, i, *[i] * 9], limit=1))
    world.submit(4)
    world.add(late)  # while the first is in its prefill
    world.finish()
    assert [s.reused for s in world.sequences] == [0, 10, 10]


def test_a_state_is_saved_at_marks_that_are_far_from_others() -> None:
    world = World(40, snapshots=9, chunk=64)
    world.add(Sequence([1, 2] * 15, limit=1, marks=[2, 6, 7, 20, 29]))
    world.finish()
    saved = sorted(own.position for own in world.pool.snapshots)
    assert saved == [6, 20, 27, 30]


def test_nothing_is_saved_of_a_short_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "LEAST_SAVED", 20)
    world = World(40, snapshots=9, chunk=64)
    world.add(Sequence([1, 2] * 9, limit=1, marks=[6]))
    world.finish()
    assert len(world.pool.snapshots) == 0


def test_what_was_cancelled_in_its_prefill_goes_on_from_there() -> None:
    world = World(40, snapshots=9, chunk=7)
    sequence = world.add(Sequence([1, 2] * 15, limit=1))
    world.submit()
    world.submit()
    assert (sequence.state, sequence.computed) == ("prefill", 14)
    world.cancel(sequence)
    again = world.add(Sequence([1, 2] * 15, limit=1))
    world.finish()
    assert again.reused == 14


@pytest.mark.usefixtures("no_headroom")
def test_what_gave_its_pages_back_goes_on_from_its_state() -> None:
    """No token that it had is computed again."""
    world = World(8, slots=2, context=32, chunk=16, snapshots=9)
    first = world.add(Sequence([1, 1, 0, 0, 2], limit=20))
    second = world.add(Sequence([2, 1, 0, 1, 2], limit=20))
    known = 0
    while world.submit() or world.pending:
        if world.scheduler.preemptions and not known:
            assert second.state == "waiting"
            known = len(second.tokens)
        if second.state == "running" and known:
            break
        if world.pending:
            world.read()
    assert known > 5
    assert world.seen["restore"] == 1
    assert first.tokens[:5] == [1, 1, 0, 0, 2]
    world.finish()


@pytest.mark.usefixtures("no_headroom")
def test_whole_pages_are_shared_where_there_is_no_room_for_a_copy() -> None:
    world = World(4)
    world.add(Sequence([1, 2, 0, 1, 2, 0, 1, 2, 0, 1], limit=1))
    world.finish()
    sequence = world.add(Sequence([1, 2, 0, 1, 2, 0, 1, 2, 0, 0, *[2] * 5], limit=1))
    world.finish()
    assert sequence.reused == 8


def sequences_of_all_states(world: World) -> list[Sequence]:
    """One that ended, one that runs, one in the middle of its prefill, and one that waits."""
    ended = world.add(Sequence([1], limit=1))
    world.finish()
    running = world.add(Sequence([1, 0, 0], limit=20))
    prefill = world.add(Sequence([2] * 10, limit=20))
    waiting = world.add(Sequence([1] * 10, limit=20))
    while prefill.state != "prefill":
        if not world.submit():
            world.read()
    sequences = [ended, running, prefill, waiting]
    assert [s.state for s in sequences] == ["ended", "running", "prefill", "waiting"]
    return sequences


@pytest.mark.parametrize("which", range(4))
def test_a_sequence_can_be_cancelled_in_any_state(which: int) -> None:
    world = World(40, chunk=3)
    sequence = sequences_of_all_states(world)[which]
    for _ in range(2):
        world.cancel(sequence)
        assert sequence.state == "ended"
        world.check()
    world.finish()


@pytest.mark.parametrize("read", [0, 1, 3])
def test_a_state_ends_with_what_is_in_flight(read: int) -> None:
    """Whoever goes on from the tokens that are known then goes on from the state."""
    world = World(40, chunk=16, snapshots=3)
    sequence = world.add(Sequence([1, 1, 0, 0, 2], limit=50))
    for _ in range(read + 2):
        world.submit()
        if len(world.pending) > 2 or len(sequence.tokens) < 5 + read:
            world.read()
    end = len(sequence.tokens) + sequence.in_flight
    assert sequence.in_flight > 0
    world.cancel(sequence)
    assert sequence.state == "running"
    world.finish()
    assert len(sequence.tokens) == end
    later = world.add(Sequence([*sequence.tokens, 1], limit=1))
    world.finish()
    assert later.reused == len(sequence.tokens) - 1


def test_what_ends_at_once_is_not_waited_for() -> None:
    world = World(40, chunk=16, snapshots=3)
    sequence = world.add(Sequence([1, 1, 0, 0, 2], limit=50))
    world.submit()
    world.cancel(sequence, at_once=True)
    assert sequence.state == "ended"
    world.finish()


def test_all_begin_again_after_a_reset() -> None:
    world = World(40, chunk=3)
    ended, running, prefill, waiting = sequences_of_all_states(world)
    world.reset()
    assert [s.state for s in (ended, running, prefill, waiting)] == ["ended", *["waiting"] * 3]
    assert [s.in_flight for s in (running, prefill, waiting)] == [0, 0, 0]
    assert world.scheduler.waiting == [running, prefill, waiting]
    world.check()
    world.finish()


def test_an_id_that_comes_after_the_end_changes_nothing() -> None:
    plan = Scheduler(PagePool(4, SIZE), slots=1, context=16, chunk=64)
    sequence = Sequence([1], limit=9)
    plan.add(sequence)
    for _ in range(2):
        plan.next(most(100))
    read(plan, sequence, 0, True)
    read(plan, sequence, 5)
    assert (sequence.tokens, sequence.in_flight) == ([1, 0], 0)
    assert plan.idle
