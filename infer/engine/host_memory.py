"""Host memory in which the processes of engines keep what others may go on from.

It is one anonymous file in memory, mapped by all of them. Whoever made it hands its descriptor to
the processes that it starts, so that entries outlive each of these; the system frees it when the
last process that has it ends, in whatever way.

An entry lies in blocks of one size. There is a table of these in the same memory, which is changed
under a lock that the system gives back when its holder is killed. An entry is there from the moment
when its number is written, the last of all: what was cut off before is freed by whoever comes next.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infer.boundaries import reason, shown
from infer.calls import warn
from infer.kernels.errors import RequestError

if sys.platform != "win32":
    import fcntl

Bytes = NDArray[np.uint8]

CAN_SHARE = sys.platform != "win32"
"""Whether a descriptor can be handed to other processes."""

_PAGE = 4096  # bytes
_MOST_BLOCKS = 1 << 16  # the more, the longer it takes to look through the table
_LABEL = 320  # bytes that say what an entry is
_SPARE = 512 << 20  # bytes of the machine that stay free
_LOOK_EVERY = 64 << 20  # bytes of growth between two looks at what is free
# Numbers at the beginning: of the latest entry; whether the table is being changed; 1 more than the
# blocks there may be, if they are fewer than planned; how many of the first have memory; whether it
# was said that there are fewer.
_LATEST, _CHANGING, _LIMIT, _TOUCHED, _TOLD, _NUMBERS = range(6)


@dataclass(frozen=True, eq=False)
class Kept:
    """An entry of so many bytes. number: no other has had it or will have it."""

    blocks: NDArray[np.intp]
    number: int
    nbytes: int


class HostMemory:
    """At most `capacity` bytes of entries. Those that were used longest ago go first, whoever keeps
    them. Any thread may use it. descriptor: of the file, for other processes; None: there is none.
    """

    descriptor: int | None = None
    _is_own = False

    def __init__(
        self, capacity: int, *, block: int | None = None, descriptor: int | None = None
    ) -> None:
        """block: bytes that entries are made of. descriptor: of memory of that capacity that
        another process has made, which stays open. Raises RequestError for a capacity that is no
        number of bytes. Where there is no memory to be had, it has room for nothing."""
        if type(capacity) is not int or capacity < 1:
            raise RequestError(f"Host memory is a positive number of bytes, not {shown(capacity)}.")
        if block is None:
            block = max(1, -(-capacity // (_MOST_BLOCKS * _PAGE))) * _PAGE
        self.capacity, self._block = capacity, max(1, min(block, capacity))
        self._count = capacity // self._block
        self.descriptor, self._is_own = descriptor, descriptor is None
        self.is_ending = False  # nobody will look for what is kept from now on
        self._threads = threading.Lock()
        self._room = 0  # bytes that it may grow by before the next look at what is free
        try:
            self._map(CAN_SHARE)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            self.close()
            self._stop_growing(0, reason(error))

    def _map(self, shared: bool) -> None:
        """Lay out the table and the blocks. shared: in a file, else in this process's memory."""
        n = self._count
        sizes = 8 * _NUMBERS, 4 * n, 8 * n, 8 * n, 8 * n, _LABEL * n, self._block * n
        starts = [0]
        for size in sizes:
            starts.append(-(-(starts[-1] + size) // _PAGE) * _PAGE)
        nbytes = starts.pop()
        if shared and self.descriptor is None:
            self.descriptor = _anonymous_file(nbytes)
        self._memory = mmap.mmap(self.descriptor if self.descriptor is not None else -1, nbytes)
        self._start = starts[-1]

        def array(dtype: Any, at: int, count: int) -> NDArray[Any]:
            return np.frombuffer(self._memory, dtype, count, starts[at])

        self._numbers = array(np.uint64, 0, _NUMBERS)
        # Of each block, 1 more than the first block of its entry; 0: it is free.
        self._owner = array(np.uint32, 1, n)
        # Of the entry that begins with a block: its number or 0, its bytes, when it was used.
        self._number, self._nbytes, self._used = (array(np.uint64, at, n) for at in (2, 3, 4))
        self._label = array(np.uint8, 5, n * _LABEL).reshape(n, _LABEL)
        self._data = array(np.uint8, 6, n * self._block)

    def close(self) -> None:
        """Give the memory up, in this process. There is room for nothing from now on."""
        with self._threads:
            self._release()
            self._count = 0
            self._map(False)

    def _release(self) -> None:
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None and self._is_own:
            os.close(descriptor)

    def __del__(self) -> None:
        self._release()

    @property
    def room(self) -> int:
        """Bytes that there is room for."""
        limit = int(self._numbers[_LIMIT])
        return self.capacity if not limit else (limit - 1) * self._block

    # Entries

    def put(self, label: bytes, data: Bytes, used: int) -> Kept | None:
        """Keep data, for which others go that were used before `used`. None: there is no room."""
        need = max(1, -(-len(data) // self._block))
        with self._locked():
            blocks = self._allocate(need, used)
            if blocks is None:
                return None
            first, number = int(blocks[0]), int(self._numbers[_LATEST]) + 1
            self._numbers[_CHANGING] = 1
            self._owner[blocks] = first + 1
            for to, begin in self._pieces(blocks, len(data)):
                to[:] = data[begin : begin + len(to)]
            self._label[first] = np.frombuffer(label.ljust(_LABEL, b"\0"), np.uint8)
            self._nbytes[first], self._used[first] = len(data), used
            self._numbers[_LATEST] = number
            self._number[first] = number  # now it is there
            self._numbers[_CHANGING] = 0
            return Kept(blocks, number, len(data))

    def read(self, kept: Kept, to: Bytes) -> bool:
        """Copy an entry. Returns whether it is still there."""
        with self._locked():
            if self.has(kept):
                for own, begin in self._pieces(kept.blocks, kept.nbytes):
                    to[begin : begin + len(own)] = own
                return True
        return False

    def has(self, kept: Kept) -> bool:
        return self._count > 0 and bool(self._number[kept.blocks[0]] == kept.number)

    def there(self, entries: Sequence[Kept]) -> NDArray[np.bool_]:
        """Returns which of these entries are still there."""
        if not self._count:
            return np.zeros(len(entries), np.bool_)
        firsts = np.fromiter((kept.blocks[0] for kept in entries), np.intp, len(entries))
        numbers = np.fromiter((kept.number for kept in entries), np.uint64, len(entries))
        found: NDArray[np.bool_] = self._number[firsts] == numbers
        return found

    def use(self, entries: Sequence[Kept], used: int) -> None:
        """They were used at that time, of time.monotonic_ns(), if not later; the first last."""
        if not entries:
            return
        with self._locked():
            firsts = np.array([kept.blocks[0] for kept in entries], np.intp)[self.there(entries)]
            times = np.uint64(used) + np.arange(len(firsts), dtype=np.uint64)[::-1]
            self._used[firsts] = np.maximum(self._used[firsts], times)

    def entries(self, start: bytes) -> list[tuple[bytes, Kept]]:
        """Returns all entries whose labels begin so, with their labels."""
        found = []
        with self._locked():
            order = np.argsort(self._owner, kind="stable")
            owners = self._owner[order]
            for first in np.flatnonzero(self._number).tolist():
                label = self._label[first].tobytes()
                if label.startswith(start):
                    own = slice(*np.searchsorted(owners, [first + 1, first + 2]))
                    of = int(self._number[first]), int(self._nbytes[first])
                    found.append((label, Kept(order[own], *of)))
        return found

    def _pieces(self, blocks: NDArray[np.intp], nbytes: int) -> Iterator[tuple[Bytes, int]]:
        """Yields where an entry lies, and the byte of it with which that begins."""
        begin, ends = 0, np.flatnonzero(np.diff(blocks) != 1) + 1
        for start, end in pairwise([0, *ends.tolist(), len(blocks)]):
            at = int(blocks[start]) * self._block
            count = min(nbytes - begin, (end - start) * self._block)
            yield self._data[at : at + count], begin
            begin += count

    # The table

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads:
            self._lock(True)
            try:
                if self._numbers[_CHANGING]:  # who had it was killed or interrupted
                    self._repair()
                yield
            finally:
                self._lock(False)

    def _lock(self, takes: bool) -> None:
        if sys.platform != "win32" and self.descriptor is not None:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX if takes else fcntl.LOCK_UN, 1)

    def _repair(self) -> None:
        """Free the blocks of what is no entry, or not yet."""
        taken = np.flatnonzero(self._owner)
        self._owner[taken[self._number[self._owner[taken] - 1] == 0]] = 0
        self._numbers[_CHANGING] = 0

    def _allocate(self, need: int, used: int) -> NDArray[np.intp] | None:
        """Returns so many free blocks in order, or None."""
        while True:
            limit = int(self._numbers[_LIMIT])
            limit = self._count if not limit else limit - 1
            if need > limit:
                return None
            free = np.flatnonzero(self._owner[:limit] == 0)[:need]
            if len(free) < need:
                if not self._drop_least(limit, used):
                    return None
            elif self._has_memory(int(free[-1]) + 1):
                return free

    def _drop_least(self, limit: int, used: int) -> bool:
        """Drop what was used longest ago, if that was before `used`. Returns whether it was."""
        numbers = self._number[:limit]
        at = int(np.where(numbers > 0, self._used[:limit], np.uint64((1 << 64) - 1)).argmin())
        if not numbers[at] or self._used[at] >= used:
            return False
        self._numbers[_CHANGING] = 1
        self._number[at] = 0
        self._owner[self._owner == at + 1] = 0
        self._numbers[_CHANGING] = 0
        return True

    def _has_memory(self, blocks: int) -> bool:
        """Have memory for the first blocks. Returns False if there is none: there are fewer blocks
        from now on."""
        touched = int(self._numbers[_TOUCHED])
        if blocks <= touched:
            return True
        nbytes = (blocks - touched) * self._block
        if nbytes > self._room:
            free = free_memory()
            if free is not None and free - nbytes < _SPARE:
                self._stop_growing(touched, f"this machine has {free:,} bytes left")
                return False
            self._room = max(nbytes, _LOOK_EVERY)
        self._room -= nbytes
        try:
            if self.descriptor is not None:
                _take(self.descriptor, self._start + touched * self._block, nbytes)
        except OSError as error:
            self._stop_growing(touched, reason(error))
            return False
        self._numbers[_TOUCHED] = blocks
        return True

    def _stop_growing(self, blocks: int, why: str) -> None:
        self._numbers[_LIMIT] = blocks + 1
        if not self._numbers[_TOLD]:
            self._numbers[_TOLD] = 1
            warn(
                f"There is no more host memory for the cache ({why}): of {self.capacity:,} bytes "
                f"it has {blocks * self._block:,}, and stays at that."
            )


def _anonymous_file(nbytes: int) -> int:
    """Returns the descriptor of a file without a name, which is in memory where the system has
    that. Raises OSError."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("infer host cache", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _take(descriptor: int, start: int, nbytes: int) -> None:
    """Have memory for bytes of a file. Raises OSError if there is none, where the first write to
    mapped memory would end the process."""
    if sys.platform == "linux":
        os.posix_fallocate(descriptor, start, nbytes)
    elif sys.platform != "win32":
        while nbytes > 0:
            written = os.pwrite(descriptor, bytes(min(nbytes, 1 << 20)), start)
            start, nbytes = start + written, nbytes - written


def free_memory() -> int | None:
    """Bytes of memory that this machine, or the container that this runs in, has left. None: nobody
    knows."""
    found = []
    with suppress(OSError, ValueError, KeyError):
        found.append(1024 * _fields("/proc/meminfo")["MemAvailable:"])
    with suppress(OSError, ValueError, KeyError):  # "max" is no number
        group = "/sys/fs/cgroup/memory"
        most, now = (int(Path(f"{group}.{name}").read_text()) for name in ("max", "current"))
        found.append(most - now + _fields(f"{group}.stat")["inactive_file"])
    return min(found, default=None)


def _fields(path: str) -> dict[str, int]:
    """The first number of each line, by the word before it."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines}
