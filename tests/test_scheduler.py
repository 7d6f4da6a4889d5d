"""The scheduler, held against a GPU that knows what every position of every page should be."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Hashable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

import pytest
from test_pages import check

from infer.pages import PagePool
from infer.scheduler import Decode, Prefill, Scheduler, Sequence

SIZE = 4
STOP = 3
DEAD = -1  # sampled by a row that has stopped


def after(before: int, token: int) -> int:
    """What keys, values and states are after one more token: all tokens so far are in it."""
    return hash((before, token)) & 0xFFFFFFFF


def chain(key: Hashable, tokens: Ids[int]) -> list[int]:
    """After each of them."""
    values, value = [], hash(key)
    for token in tokens:
        value = after(value, token)
        values.append(value)
    return values


def chosen(value: int) -> int:
    """The next token: few are different, so that answers have beginnings in common."""
    return STOP if value % 31 == 0 else value // 31 % 3


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
    """What the GPU knows of a slot: its values so far, and the token that comes next."""

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
        self.states, self.snapshots = [0] * self.slots, [0] * self.pool.snapshots
        self.rows = {}

    def put(self, sequence: Sequence, values: Ids[int], position: int) -> None:
        """Write values at positions from this one on, after reading those before."""
        cells = [cell for page in sequence.pages for cell in self.pages[page]]
        assert cells[:position] == list(values[:position]), "keys of another sequence"
        for i in range(position, len(values)):
            page = sequence.pages[i // SIZE]
            assert self.pool._count[page] == 1, "a page that others read is written"
            self.pages[page][i % SIZE] = values[i]
        assert sequence.slot is not None
        if self.pool.snapshots:
            before = values[position - 1] if position else self.states[sequence.slot]
            assert self.states[sequence.slot] == before, "the state of another sequence"
        self.states[sequence.slot] = values[-1]

    def prefill(self, step: Prefill) -> list[tuple[Sequence, int]]:
        s, end = step.sequence, step.start + step.count
        assert s.slot is not None
        if step.copy is not None:
            source, target = step.copy
            self.pages[target] = list(self.pages[source])
        if step.restore is not None:
            self.states[s.slot] = self.snapshots[step.restore]
        values = chain(s.key, s.tokens[:end])
        self.put(s, values, step.start)
        if step.save is not None:
            self.snapshots[step.save] = self.states[s.slot]
        assert step.last == (end == len(s.tokens))
        if not step.last:
            return []
        self.rows[s.slot] = Row(values, chosen(values[-1]))
        return [(s, self.sampled(self.rows[s.slot]))]

    def decode(self, step: Decode) -> list[tuple[Sequence, int]]:
        sampled = []
        for s in step.sequences:
            assert s.slot is not None
            row = self.rows[s.slot]
            if row.alive:
                assert s.computed == len(row.values) + 1
                row.values.append(after(row.values[-1], row.token))
                self.put(s, row.values, s.computed - 1)
                row.token = chosen(row.values[-1])
                sampled.append((s, self.sampled(row)))
            else:
                sampled.append((s, DEAD))
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
    ) -> None:
        self.pool = PagePool(pages, SIZE, snapshots=snapshots)
        self.scheduler = Scheduler(
            self.pool,
            slots=slots,
            context=context,
            chunk=chunk,
            ahead=ahead,
            snapshot_tail=3 if snapshots else 0,
        )
        self.gpu = Gpu(self.pool, slots)
        self.pending: deque[list[tuple[Sequence, int]]] = deque()
        self.sequences: list[Sequence] = []
        self.begun: list[Sequence] = []
        self.decoded = set[Hashable]()  # groups since the last chunk
        self.seen: Counter[str] = Counter()
        self.cut = set[Sequence]()  # ended before their answer was complete

    def add(self, sequence: Sequence) -> Sequence:
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def submit(self, most_rows: int = 100) -> bool:
        """The next step, if there is one and not too many are in flight."""
        if len(self.pending) >= self.scheduler.ahead:
            return False
        scheduler = self.scheduler
        ready = {s.group for s in scheduler.running if self.is_ready(s)}
        holders, prefilling = self.holders(), bool(scheduler.prefilling)
        preemptions = scheduler.preemptions
        step = scheduler.next(most_rows)
        if step is None:
            return False
        in_turn = scheduler.preemptions == preemptions and most_rows > 0
        if isinstance(step, Prefill):
            assert not in_turn or ready <= self.decoded, "decode waits for more than one chunk"
            self.decoded.clear()
            assert not in_turn or step.first == (step.sequence not in holders)
            self.check_prefill(step, most_rows)
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
        return s.left > 0 and s.in_flight < min(s.ahead, self.scheduler.ahead)

    def check_prefill(self, step: Prefill, most_rows: int) -> None:
        s, scheduler = step.sequence, self.scheduler
        assert 0 < step.count <= min(scheduler.chunk, most_rows)
        assert s.computed == step.start + step.count <= len(s.tokens)
        assert len(s.pages) == self.pool.pages_for(len(s.tokens))
        assert s.state == ("running" if step.last else "prefill")
        assert s.in_flight == step.last
        if s not in self.begun:
            assert s.reused == step.start < s.prompt_tokens
            assert all(s.rank < other.rank for other in scheduler.waiting), "out of order"
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
        for s in self.scheduler.running:  # nobody of the group is left out
            if s.group in groups and s not in step.sequences:
                assert not self.is_ready(s)

    def read(self) -> None:
        """The ids of the oldest step."""
        for s, token in self.pending.popleft():
            if s.state == "ended":
                continue
            assert token != DEAD
            slot = s.slot
            place = self.scheduler.read(s, token, token == STOP)
            self.save(slot, place)

    def save(self, slot: int | None, place: int | None) -> None:
        if place is not None:
            assert slot is not None
            self.gpu.snapshots[place] = self.gpu.states[slot]
            self.seen["save at an end"] += 1

    def cancel(self, sequence: Sequence) -> None:
        if sequence.slot is not None and sequence.slot in self.gpu.rows:
            self.gpu.rows[sequence.slot].alive = False
        self.scheduler.cancel(sequence)
        self.cut.add(sequence)

    def reset(self) -> None:
        self.gpu.lose()
        self.pending.clear()
        self.scheduler.reset()

    def check(self) -> None:
        """What is stored is what the GPU has, and no page is lost."""
        scheduler = self.scheduler
        holders = self.holders()
        cached = check(self.pool, [page for s in holders for page in s.pages])
        for page, (key, tokens) in cached.items():
            values = chain(key, tokens)[(len(tokens) - 1) // SIZE * SIZE :]
            assert self.gpu.pages[page][: len(values)] == values, "a page is not what is stored"
        for slot, (node, offset) in self.pool._saved.items():
            tokens = cached[node.page][1]
            end = (len(tokens) - 1) // SIZE * SIZE + offset
            assert self.gpu.snapshots[slot] == chain(node.key, tokens[:end])[-1]
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
    begin = begin[: rng.randrange(len(begin) + 1)]
    return [*begin, *(rng.randrange(3) for _ in range(rng.randrange(1, 12)))][:most]


@pytest.mark.parametrize("snapshots", [0, 1, 5])
@pytest.mark.parametrize("seed", range(12))
def test_at_random(seed: int, snapshots: int) -> None:
    """Arrivals, ends, cancels and resets, in too few pages: every answer is the one that its
    prompt alone would give."""
    rng = random.Random(seed)
    world = World(
        rng.choice([8, 12, 16, 40]),
        slots=rng.randrange(1, 6),
        context=rng.choice([32, 50]),
        chunk=rng.choice([3, 8, 64]),
        ahead=rng.randrange(1, 4),
        snapshots=snapshots,
    )
    groups = rng.randrange(1, 4)
    texts = [[rng.randrange(3) for _ in range(20)] for _ in range(2)]
    for i in range(1500):
        action = rng.random()
        if action < 0.1 and len(world.scheduler.waiting) < 10:
            world.add(
                Sequence(
                    prompt(rng, texts, 30),
                    limit=rng.choice([1, 2, 10, 1000]),
                    key=rng.choice([None, "adapter"]),
                    priority=rng.choice([0, 0, 1]),
                    group=rng.randrange(groups),
                    ahead=rng.choice([1, 1000]),
                )
            )
        elif action < 0.11 and world.sequences:
            world.cancel(rng.choice(world.sequences[-10:]))
        elif action < 0.112:
            world.reset()
        elif action < 0.7 or not world.pending:
            world.submit(rng.choice([0, 1, 5, 100, 100]))
        else:
            world.read()
        if i % 5 == 0:
            world.check()
        texts += [s.tokens for s in world.sequences[-10:] if s.state == "ended"][:1]
        del texts[:-20]
    world.finish()
    print(world.seen, world.scheduler.preemptions, len(world.sequences))
