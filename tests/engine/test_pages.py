"""Pages: what is found is what was stored, none is given away that is used, and none is lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterable
from itertools import pairwise

import pytest

from infer.engine.pages import Match, PagePool, _Node

SIZE = 4


def check(pool: PagePool, used: Iterable[int]) -> dict[int, tuple[Hashable, list[int]]]:
    """That the pool agrees with itself, `used` being all references to pages. By cached page, its
    key and its tokens from the start of the sequence."""
    count, size = Counter(used), pool.page_size
    cached: dict[int, tuple[Hashable, list[int]]] = {}
    nodes = [(node, list[int]()) for node in pool._roots.values()]
    snapshots: dict[int, tuple[object, int]] = {}
    pinned = set()  # pages that are referenced, or from which a path leads to one that is
    for node, before in nodes:
        assert node.parent is None or node.parent.parent is None or len(node.parent.tokens) == size
        assert node.parent is not None or node.children, "a root of nothing"
        assert [c.tokens for c in node.children] == sorted({c.tokens for c in node.children})
        for a, b in pairwise(node.children):
            assert b.tokens[: len(a.tokens)] != a.tokens, "a page that another covers"
        assert all(c.parent is node and c.key == node.key for c in node.children)
        nodes += [(child, before + list(child.tokens)) for child in node.children]
        if node.parent is None:
            continue
        assert 0 < len(node.tokens) <= size
        assert node.page not in cached, "a page in two places"
        cached[node.page] = (node.key, before)
        assert all(pool._nodes[page] is node for page in (node.page, *node.twins))
        assert all(count[page] for page in node.twins)
        assert not node.twins or len(node.tokens) == size
        snapshots |= {own.place: (node, offset) for offset, own in node.snapshots.items()}
        assert node.start == len(before) - len(node.tokens)
        assert all(0 < offset <= len(node.tokens) for offset in node.snapshots)
        if count[node.page]:
            up = node
            while up.parent is not None:
                pinned.add(up.page)
                up = up.parent
    twins = {page for node in pool._nodes.values() for page in node.twins}
    assert set(pool._nodes) == set(cached) | twins
    assert not twins & set(cached)
    free = set(range(pool.pages)) - set(count) - set(cached)
    assert sorted([*pool._free, *range(pool.touched, pool.pages)]) == sorted(free), "free pages"
    assert pool.available == pool.pages - len(set(count) | pinned)
    assert pool.stats.in_use == len(set(count))
    assert pool.stats.cached == len(set(cached) - set(count))
    assert pool.stats.free == len(free)
    check_snapshots(pool, snapshots)
    return cached


def check_windows(pool: PagePool, used: Iterable[int]) -> dict[int, int]:
    """That each window page is free, referenced or cached, `used` being all references. By the page
    of a node that has one, the window page."""
    windows = pool.windows
    assert windows is not None
    count = Counter(used)
    assert dict(windows._count) == dict(count)
    nodes = [*pool._roots.values()]
    cached: dict[int, int] = {}
    for node in nodes:
        nodes += node.children
        if node.window is not None:
            assert node.parent is not None
            assert windows._holders[node.window] is node
            assert node.window not in cached.values(), "a window page in two places"
            cached[node.page] = node.window
    assert sorted(windows._holders) == sorted(cached.values())
    idle = [*windows._idle, *windows._passed]
    assert sorted(idle) == sorted(set(cached.values()) - set(count))
    free = set(range(windows.pages)) - set(count) - set(cached.values())
    assert sorted([*windows._free, *range(windows.touched, windows.pages)]) == sorted(free)
    return cached


def check_snapshots(pool: PagePool, snapshots: dict[int, tuple[object, int]]) -> None:
    """That each place has one state, and that the tree of states is that of their pages."""
    assert {own.place: (own.page, own.offset) for own in pool.snapshots} == snapshots
    places = range(pool.snapshots.places)
    assert sorted([*snapshots, *pool.snapshots._free]) == list(places)
    for own in pool.snapshots:
        path = [own.page]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        before = [o for o in pool.snapshots if o.page in path and o.position < own.position]
        assert own.before is max(before, key=lambda o: o.position, default=None)
        assert own.after == {o for o in pool.snapshots if o.before is own}
    assert pool.snapshots._first == {own for own in pool.snapshots if own.before is None}


def take(pool: PagePool, count: int) -> list[int]:
    pages = pool.allocate(count)
    assert pages is not None
    return pages


def stored(pool: PagePool, tokens: Iterable[int], key: Hashable = None) -> list[int]:
    """Pages with these tokens, stored and released."""
    tokens = list(tokens)
    pages = take(pool, pool.pages_for(len(tokens)))
    pool.store(tokens, key, pages)
    pool.release(pages)
    return pages


def looked_up(pool: PagePool, tokens: Iterable[int], key: Hashable = None) -> Match:
    """Looks tokens up, releases the pages again and returns the match."""
    tokens = list(tokens)
    match = pool.match(tokens, key, len(tokens))
    pool.release([*match.pages, *(match.partial or ())[:1]])
    return match


def test_all_pages_can_be_had_once() -> None:
    pool = PagePool(8, SIZE)
    pages = take(pool, 8)
    assert sorted(pages) == list(range(8))
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.release(pages[:3])
    assert pool.available == 3
    assert pool.allocate(4) is None
    assert sorted(take(pool, 3)) == sorted(pages[:3])
    check(pool, pages)


def test_a_page_is_free_when_nobody_references_it() -> None:
    pool = PagePool(2, SIZE)
    pages = take(pool, 1)
    pool.retain(pages)
    pool.release(pages)
    assert pool.available == 1
    pool.release(pages)
    assert pool.available == 2
    with pytest.raises(ValueError, match="not referenced"):
        pool.release(pages)
    with pytest.raises(ValueError, match="free"):
        pool.retain(pages)
    with pytest.raises(ValueError, match="not referenced"):
        pool.store([1], None, pages)
    check(pool, [])


@pytest.mark.parametrize("length", range(1, 13))
@pytest.mark.parametrize("shared", range(13))
def test_the_longest_beginning_is_found(length: int, shared: int) -> None:
    """Whole pages, and of the next one the positions that are the same."""
    pool = PagePool(8, SIZE)
    pages = stored(pool, range(length))
    found = min(length, shared)
    match = looked_up(pool, [*range(shared), 99, 99])
    assert match.length == found
    assert match.pages == tuple(pages[: found // SIZE])
    assert match.partial == ((pages[found // SIZE], found % SIZE) if found % SIZE else None)
    assert looked_up(pool, range(shared)).length == found
    assert pool.match(range(length), None, 3).length == min(length, 3)


def test_of_pages_that_begin_alike_the_one_with_most_is_found() -> None:
    pool = PagePool(8, SIZE)
    a, b, c = (stored(pool, t)[0] for t in ((1, 2, 3, 4), (1, 2, 5), (1, 7, 8, 9)))
    for tokens, page, common in (
        ((1, 2, 3, 9), a, 3),
        ((1, 2, 5, 9), b, 3),
        ((1, 7, 8, 5), c, 3),
        ((1, 7), c, 2),
        ((1, 2, 5), b, 3),
    ):
        assert looked_up(pool, tokens).partial == (page, common)
    assert looked_up(pool, (1, 2)).partial in [(a, 2), (b, 2)]
    assert looked_up(pool, (1, 2, 3, 4)).pages == (a,)
    assert looked_up(pool, (2, 2, 3, 4)) == Match()


def test_a_page_means_all_tokens_before_it_and_its_key() -> None:
    pool = PagePool(8, SIZE)
    stored(pool, [1, 1, 1, 1, 2, 2, 2, 2])
    assert looked_up(pool, [2, 2, 2, 2]).length == 0
    assert looked_up(pool, [3, 1, 1, 1, 2, 2, 2, 2]).length == 0
    assert looked_up(pool, [1, 1, 1, 1], key="adapter").length == 0
    stored(pool, [1, 1, 1, 1, 2], key="adapter")
    assert looked_up(pool, [1, 1, 1, 1, 2, 2, 2, 2], key="adapter").length == 5
    assert looked_up(pool, [1, 1, 1, 1, 2, 2, 2, 2]).length == 8


def test_a_page_that_grows_is_found_with_what_it_has() -> None:
    pool = PagePool(8, SIZE)
    pages = take(pool, 3)
    for length in range(1, 13):
        pool.store(list(range(length)), None, pages)
        assert looked_up(pool, range(12)).length == length
        check(pool, pages)
    pool.store(list(range(3)), None, pages)  # less than is known
    assert looked_up(pool, range(12)).length == 12
    pool.store(list(range(20)), None, pages, 12)
    check(pool, pages)


def test_what_is_stored_already_is_not_stored_again() -> None:
    """Not even as it grows; what comes after it hangs below the pages of the first."""
    pool = PagePool(8, SIZE)
    first, second = take(pool, 2), take(pool, 3)
    pool.store(list(range(8)), None, first)
    for length in range(1, 12):
        pool.store(list(range(length)), None, second)
        check(pool, first + second)
    match = pool.match(range(12), None, 12)
    assert match == Match(tuple(first), 11, (second[2], 3), None, 11)
    pool.release([*first, *first, second[2]])
    check(pool, second)
    assert pool.available == 3  # what is above a page that is referenced stays
    pool.release(second)
    check(pool, [])
    assert (pool.stats.cached, pool.available) == (3, 8)


def test_two_that_grow_alike_become_one() -> None:
    pool = PagePool(4, SIZE)
    a, b = take(pool, 1), take(pool, 1)
    pool.store([1, 2], None, a)
    pool.store([1, 2, 3], None, b)
    assert looked_up(pool, [1, 2, 3]).partial == (b[0], 3)
    pool.store([1, 2, 3, 4], None, a)
    pool.store([1, 2, 3, 4], None, b)
    assert set(check(pool, a + b)) == {a[0]}
    pool.release(b)
    assert pool.stats.free == 3
    pool.release(a)
    assert pool.stats.cached == 1


def test_a_page_that_another_covers_is_not_kept() -> None:
    pool = PagePool(4, SIZE)
    stored(pool, [1, 2])
    longer = stored(pool, [1, 2, 3])
    assert set(check(pool, [])) == set(longer)


def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning() -> None:
    pool = PagePool(6, SIZE)
    a, b = stored(pool, range(12)), stored(pool, range(50, 62))
    looked_up(pool, range(12))
    for page in reversed(b):
        assert take(pool, 1) == [page]
    match = pool.match(range(12), None, 12)
    assert match.pages == tuple(a)
    assert pool.allocate(1) is None
    pool.release(a)
    assert take(pool, 2) == [a[1], a[2]]
    assert looked_up(pool, range(12)).pages == (a[0],)
    check(pool, [*b, *a[1:]])


def test_what_was_matched_is_not_evicted() -> None:
    pool = PagePool(4, SIZE)
    pages = stored(pool, range(10))
    match = pool.match(range(10), None, 10)
    assert pool.allocate(2) is None
    pool.unmatch(match, 10)
    assert (pool.stats.hits, pool.stats.lookups) == (0, 0)
    assert len(take(pool, 4)) == 4
    assert looked_up(pool, range(10)).length == 0
    check(pool, range(4))
    assert len(pages) == 3


def test_hits_are_counted_in_tokens() -> None:
    pool = PagePool(4, SIZE)
    stored(pool, range(10))
    looked_up(pool, range(7))
    looked_up(pool, [5, 6])
    assert (pool.stats.hits, pool.stats.lookups) == (7, 9)


def test_nothing_is_left_after_reset() -> None:
    pool = PagePool(8, SIZE, snapshots=2)
    mine, other = take(pool, 2), take(pool, 1)
    pool.store(list(range(8)), None, mine)
    pool.store_snapshot(list(range(7)), None, mine)
    pool.store([0, 1, 2, 3], "other", other)
    pool.release(other)
    pool.reset()
    check(pool, [])
    assert looked_up(pool, range(8)).length == 0
    assert sorted(take(pool, 8)) == list(range(8))


def test_with_snapshots_only_lengths_that_have_one_are_found() -> None:
    pool = PagePool(8, SIZE, snapshots=3)
    pages, tokens = take(pool, 3), list(range(11))
    pool.store(tokens, None, pages)
    assert looked_up(pool, tokens) == Match(cached=11)
    for length in (4, 6, 11):
        assert pool.store_snapshot(tokens[:length], None, pages) is not None
        assert pool.store_snapshot(tokens[:length], None, pages) is None  # it is there
    for limit in range(12):
        match = pool.match(tokens, None, limit)
        expected = max([0, *(n for n in (4, 6, 11) if n <= limit)])
        assert match.length == expected
        assert match.pages == tuple(pages[: expected // SIZE])
        assert match.partial == (
            (pages[expected // SIZE], expected % SIZE) if expected % SIZE else None
        )
        assert (match.snapshot is None) == (expected == 0)
        pool.unmatch(match, limit)
    assert looked_up(pool, [0, 1, 2, 3, 4, 5, 99]).length == 6
    assert looked_up(pool, [0, 1, 2, 3, 4, 99, 99]).length == 4
    assert looked_up(pool, [0, 1, 2, 99]).length == 0
    check(pool, pages)


def saved(pool: PagePool, tokens: Iterable[int], lengths: Iterable[int]) -> list[int]:
    """Pages with these tokens, referenced, and snapshots of these lengths as far as they stay."""
    tokens = list(tokens)
    pool.snapshots.tick()
    pages = take(pool, pool.pages_for(len(tokens)))
    for length in lengths:
        pool.store_snapshot(tokens[:length], None, pages)
    pool.store(tokens, None, pages)
    return pages


def lengths(pool: PagePool, first: int) -> list[int]:
    """Returns where snapshots are of texts that begin with this token."""
    found = []
    for snapshot in pool.snapshots:
        page = snapshot.page
        while page.start:
            assert page.parent is not None
            page = page.parent
        assert isinstance(page, _Node)
        if page.tokens[0] == first:
            found.append(snapshot.position)
    return sorted(found)


def test_snapshots_of_one_text_are_thinned_evenly() -> None:
    pool = PagePool(600, 64, snapshots=12)
    saved(pool, range(30_000), range(1024, 30_000, 1024))
    found = lengths(pool, 0)
    assert len(found) == 12
    assert found[0] == 1024  # the beginning stays
    assert found[-1] > 29_000 - 2048
    assert max(b - a for a, b in pairwise(found)) <= 4096
    check(pool, pool._count.elements())


def test_a_small_prompt_takes_no_place_from_a_large_one() -> None:
    pool = PagePool(600, 64, snapshots=6)
    saved(pool, range(12_000), range(2000, 12_001, 2000))
    for i in range(1, 4):
        saved(pool, [-i] * 100, [92, 100])
        assert lengths(pool, -i) == []
    assert lengths(pool, 0) == list(range(2000, 12_001, 2000))


def test_what_nobody_goes_on_from_goes_in_the_end() -> None:
    pool = PagePool(4000, 64, snapshots=6)
    saved(pool, range(6000), range(1000, 6001, 1000))
    for i in range(1, 40):
        pool.snapshots.tick()
        match = pool.match(range(5000), None, 5000)  # somebody does
        assert match.length >= 4000
        pool.release(match.pages)
        saved(pool, [-i, *range(6000)], [1000, 2000, 6000])
    assert lengths(pool, 0)
    assert lengths(pool, -1) == []
    assert lengths(pool, -39)


def test_the_beginning_goes_after_what_goes_on_from_it() -> None:
    pool = PagePool(4000, 64, snapshots=3)
    saved(pool, range(3000), [1000, 2000, 3000])
    seen = []
    for i in range(1, 30):
        pool.release(saved(pool, [-i, *range(5000)], [5000]))
        seen.append(lengths(pool, 0))
    gone = [own for own, later in pairwise([[1000, 2000, 3000], *seen]) if own != later]
    assert gone[-1] == [1000]


def test_a_snapshot_goes_with_its_page_and_moves_to_one_that_covers_it() -> None:
    pool = PagePool(2, SIZE, snapshots=2)
    a, b = take(pool, 1), take(pool, 1)
    pool.store_snapshot([1, 2], None, a)
    pool.store([1, 2, 3, 4], None, b)
    pool.store([1, 2, 3, 4], None, a)
    assert looked_up(pool, [1, 2, 3]).partial == (b[0], 2)
    pool.release(a + b)
    check(pool, [])
    take(pool, 2)
    check(pool, [0, 1])
    assert len(pool.snapshots) == 0


def test_a_snapshot_of_a_page_that_another_covers_stays() -> None:
    pool = PagePool(2, SIZE, snapshots=2)
    a, b = take(pool, 1), take(pool, 1)
    pool.store_snapshot([1, 2], None, a)
    pool.store([1, 2, 3], None, b)
    assert set(check(pool, a + b)) == set(b)
    assert looked_up(pool, [1, 2, 3]).partial == (b[0], 2)


def test_none_without_room_for_snapshots() -> None:
    pool = PagePool(2, SIZE)
    assert pool.store_snapshot([1], None, take(pool, 1)) is None


Owner = tuple[Hashable, list[int], list[int]]  # key, tokens, pages


def references(owners: list[Owner]) -> list[int]:
    return [page for *_, pages in owners for page in pages]


@pytest.mark.parametrize("seed", range(20))
def test_at_random(seed: int) -> None:
    """Sequences come, grow, end and are found again, in too few pages."""
    rng = random.Random(seed)
    pool = PagePool(rng.randrange(4, 30), SIZE, snapshots=seed % 2 * rng.randrange(1, 9))
    owners: list[Owner] = []
    for _ in range(400):
        action = rng.random()
        if action < 0.3:
            key: Hashable = rng.choice([None, "adapter"])
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
            limit = rng.randrange(len(tokens) + 1)
            cached = check(pool, references(owners))
            ends = [  # of what can be found: anywhere in a page, or at a snapshot
                (*cached[node.page], len(cached[node.page][1]) - len(node.tokens) + offset)
                for node in set(pool._nodes.values())
                for offset in (
                    node.snapshots if pool.snapshots.places else range(1, len(node.tokens) + 1)
                )
            ]
            lengths = {n for k, t, n in ends if k == key and t[:n] == tokens[:n]}
            match = pool.match(tokens, key, limit)
            assert match.length == max((n for n in lengths if n <= limit), default=0)
            fresh = pool.allocate(pool.pages_for(len(tokens)) - len(match.pages))
            if fresh is None:
                pool.unmatch(match, limit)
                continue
            if match.partial is not None:
                pool.release(match.partial[:1])
            owners.append((key, tokens, [*match.pages, *fresh]))
        elif action < 0.6 and owners:
            _, tokens, pages = rng.choice(owners)
            tokens += [rng.randrange(2) for _ in range(rng.randrange(3))]
            fresh = pool.allocate(pool.pages_for(len(tokens)) - len(pages))
            if fresh is None:
                del tokens[len(pages) * SIZE :]
            pages += fresh or []
        elif action < 0.8 and owners:
            key, tokens, pages = rng.choice(owners)
            if pool.snapshots.places and rng.random() < 0.5:
                pool.store_snapshot(tokens[: rng.randrange(len(tokens) + 1)], key, pages)
            else:
                pool.store(tokens, key, pages, rng.randrange(len(tokens) + 1))
        elif action < 0.995 and owners:
            *_, pages = owners.pop(rng.randrange(len(owners)))
            pool.release(pages)
        elif action >= 0.995:
            pool.reset()
            owners.clear()
        held = {page: (k, t, i) for k, t, ps in owners for i, page in enumerate(ps)}
        for page, (key, tokens) in check(pool, references(owners)).items():
            if page in held:  # what is stored is what its owners have there
                owner_key, owned, i = held[page]
                assert (key, tokens) == (owner_key, owned[: i * SIZE + SIZE][: len(tokens)])
    for *_, pages in owners:
        pool.release(pages)
    check(pool, [])
    assert pool.available == pool.pages
