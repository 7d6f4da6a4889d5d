"""Which states of layers are saved, and which of them goes when another needs its place.

The state of a layer cannot forget positions (`infer.kernels.state.layer_state`): a prompt goes on
from a cached beginning only where the state after exactly these tokens was saved. The snapshots of
sequences that begin alike form a tree, as their pages do. A snapshot saves the rows between the one
before it and itself from being computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

GAP = 1024  # positions between two snapshots of a prompt, at least
LATER_GAPS = 24  # of a snapshot's position, the part that the gap is where that is more
_BEARABLE_ROWS = 2048  # that nobody minds computing again,
_BEARABLE_PART = 20  # nor this part of all positions
_TIP = 4.0  # how much likelier a conversation goes on from its end than from its middle


def gap(position: int) -> int:
    """Returns how many positions before this one the last snapshot may be."""
    return max(GAP, position // LATER_GAPS)


class Page(Protocol):
    """A cached page of tokens. start: the position of its first token. parent: the page before.
    snapshots: by how many of its tokens they include."""

    @property
    def start(self) -> int: ...
    @property
    def parent(self) -> Page | None: ...
    @property
    def snapshots(self) -> dict[int, Snapshot]: ...


@dataclass(eq=False, repr=False)
class Snapshot:
    """The state after the first `offset` tokens of a page and all before, saved in a place.

    before: the next snapshot towards the beginning. after: the snapshots whose `before` this is.
    used: the time of `Snapshots` when it was last saved or gone on from.
    """

    place: int
    page: Page
    offset: int
    used: int
    before: Snapshot | None = None
    after: set[Snapshot] = field(default_factory=set)

    @property
    def position(self) -> int:
        return self.page.start + self.offset

    def worth(self, now: int) -> float:
        """Returns how much is lost if it goes: rows to compute again, as a part of those that
        nobody minds, by how likely somebody goes on from here. The beginning of what was saved
        further on is never worth less than that."""
        rows = self.position - (0 if self.before is None else self.before.position)
        bearable = max(_BEARABLE_ROWS, self.position // _BEARABLE_PART)
        likely = (1.0 if self.after else _TIP) / (1 + now - self.used)
        return rows / bearable * likely


class Snapshots:
    """Snapshots in a number of places."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.clear()

    def clear(self) -> None:
        """Nothing is saved."""
        self._all: dict[int, Snapshot] = {}  # by place
        self._first = set[Snapshot]()  # with none before them
        self._free = list(range(self.places))[::-1]
        self._now = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._all.values())

    def tick(self) -> None:
        """Another prompt comes: what was used before is a little older."""
        self._now += 1

    def use(self, place: int) -> None:
        """Somebody goes on from what is saved there, and so from all that is before it."""
        at: Snapshot | None = self._all[place]
        while at is not None:
            at.used = self._now
            at = at.before

    def save(
        self, page: Page, offset: int, tell: Callable[[Snapshot], None] | None = None
    ) -> int | None:
        """Returns the place in which to save the state after the first `offset` tokens of a page;
        None if it is saved already, or if all that is saved is worth more. tell: called with what
        goes for it."""
        if (saved := page.snapshots.get(offset)) is not None:
            self.use(saved.place)
            return None
        if not self.places:
            return None
        new = Snapshot(-1, page, offset, self._now)
        self._link(new)
        if not self._free:
            least = min(self._may_go(), key=lambda snapshot: snapshot.worth(self._now))
            if least is new:
                self._unlink(new)
                return None
            if tell is not None:
                tell(least)
            self.forget(least)
        new.place = self._free.pop()
        self._all[new.place] = page.snapshots[offset] = new
        return new.place

    def _may_go(self) -> Iterator[Snapshot]:
        """All, the new one too, but the beginnings of conversations that are saved further on."""
        for snapshot in self._first:
            below = [snapshot]
            for own in below:
                below += own.after
                if own.before is not None or not own.after:
                    yield own

    def forget(self, snapshot: Snapshot) -> None:
        """Its place is free."""
        del snapshot.page.snapshots[snapshot.offset]
        del self._all[snapshot.place]
        self._free.append(snapshot.place)
        self._unlink(snapshot)

    def move(self, page: Page, to: Page) -> None:
        """Another page stands for a page now, with more tokens."""
        for offset, snapshot in page.snapshots.items():
            snapshot.page = to
            to.snapshots[offset] = snapshot
        page.snapshots.clear()

    def shrink(self, places: int) -> None:
        """There are only so many places, the first of those before."""
        for snapshot in [own for own in self if own.place >= places]:
            self.forget(snapshot)
        self._free = [place for place in self._free if place < places]
        self.places = places

    def _link(self, new: Snapshot) -> None:
        """Find what is before and after a new one."""
        page: Page | None = new.page
        most = new.offset
        while page is not None and new.before is None:
            offsets = [offset for offset in page.snapshots if offset < most]
            if offsets:
                new.before = page.snapshots[max(offsets)]
            page, most = page.parent, 1 << 30
        others = self._first if new.before is None else new.before.after
        for other in [other for other in others if _is_below(other, new)]:
            others.remove(other)
            other.before = new
            new.after.add(other)
        others.add(new)

    def _unlink(self, snapshot: Snapshot) -> None:
        others = self._first if snapshot.before is None else snapshot.before.after
        others.remove(snapshot)
        for other in snapshot.after:
            other.before = snapshot.before
        others |= snapshot.after


def _is_below(snapshot: Snapshot, other: Snapshot) -> bool:
    """Whether the text of one snapshot continues that of the other."""
    page = snapshot.page
    if page is other.page:
        return snapshot.offset > other.offset
    while page.start > other.page.start:
        assert page.parent is not None
        page = page.parent
    return page is other.page
