"""Host memory that processes share: entries are whole or not there, whoever is killed when."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from infer.engine import host_memory
from infer.engine.host_memory import CAN_SHARE, HostMemory, Kept, free_memory
from infer.kernels.errors import InferWarning, RequestError

needs_sharing = pytest.mark.skipif(not CAN_SHARE, reason="needs descriptors of other processes")


def data(value: int, nbytes: int) -> Any:
    return np.full(nbytes, value, np.uint8)


def read(memory: HostMemory, kept: Kept) -> Any:
    found = np.zeros(kept.nbytes, np.uint8)
    return found if memory.read(kept, found) else None


def blocks_in_use(memory: HostMemory) -> int:
    return int(np.count_nonzero(memory._owner))


def test_entries_of_all_sizes_come_back() -> None:
    memory = HostMemory(10_000, block=64)
    rng = np.random.default_rng(1)
    found: list[tuple[Kept, Any]] = []
    for i in range(300):
        own = rng.integers(0, 256, rng.integers(1, 900), dtype=np.uint8)
        kept = memory.put(b"%d" % i, own, i)
        assert kept is not None
        found.append((kept, own))
        there = [(kept, own) for kept, own in found if memory.has(kept)]
        assert there == found[-len(there) :]  # the least recently used has gone
        assert memory.there([kept for kept, _ in found]).sum() == len(there)
        assert all((read(memory, kept) == own).all() for kept, own in there)
        assert blocks_in_use(memory) == sum(-(-len(own) // 64) for _, own in there)
    assert all(read(memory, kept) is None for kept, _ in found[: -len(there)])
    assert {label.rstrip(b"\0") for label, _ in memory.entries(b"")} == {
        b"%d" % i for i in range(300 - len(there), 300)
    }


def test_what_is_used_stays() -> None:
    memory = HostMemory(300, block=100)
    a, b, c = (memory.put(bytes([i]), data(i, 100), i) for i in (1, 2, 3))
    assert a is not None
    memory.use([a], 9)
    memory.use([a], 5)  # it was used later
    assert memory.put(b"d", data(4, 200), 8) is not None
    assert [read(memory, each) is not None for each in (a, b, c) if each] == [True, False, False]
    assert memory.put(b"e", data(5, 300), 8) is None
    assert memory.put(b"f", data(5, 301), 10) is None


PROGRAM = """
import os, signal, sys
import numpy as np
from infer.engine import host_memory
from infer.engine.host_memory import HostMemory

descriptor = int(sys.argv[1])
source = host_memory.__file__

def work(memory):
    for i in range(1, 7):
        data = np.full(70 * i, i, np.uint8)
        memory.put(b"%d" % i, data, i)

for n in range(10_000):
    pid = os.fork()
    if not pid:
        memory = HostMemory(1000, block=50, descriptor=descriptor)
        lines = 0

        def trace(frame, event, argument):
            if frame.f_code.co_filename != source:
                return None
            global lines
            lines += event == "line"
            if lines > n:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        work(memory)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    memory = HostMemory(1000, block=50, descriptor=descriptor)
    blocks = 0
    for label, kept in memory.entries(b""):
        found = np.zeros(kept.nbytes, np.uint8)
        i = int(label.rstrip(b"\\0"))
        assert memory.read(kept, found) and kept.nbytes == 70 * i and (found == i).all()
        blocks += len(kept.blocks)
    assert np.count_nonzero(memory._owner) == blocks, n
    memory.put(b"0", np.zeros(0, np.uint8), 1 << 40)  # changes what it was cut off in
    if not os.WIFSIGNALED(status):
        print("lines", n)
        break
    for _, kept in memory.entries(b""):
        memory._number[kept.blocks[0]] = 0
    memory._owner[:] = 0
"""


@needs_sharing
def test_a_process_may_be_killed_at_any_line() -> None:
    """What is there then is whole, and no block is lost."""
    memory = HostMemory(1000, block=50)
    assert memory.descriptor is not None
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{memory.descriptor}"],
        pass_fds=[memory.descriptor],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.removeprefix("lines ")) > 200
    memory.close()


@needs_sharing
def test_processes_at_once() -> None:
    """Each finds what it reads to be what was kept, or gone."""
    memory = HostMemory(20_000, block=64)
    assert memory.descriptor is not None
    program = textwrap.dedent("""
        import sys
        import time
        import numpy as np
        from infer.engine.host_memory import HostMemory
        memory = HostMemory(20_000, block=64, descriptor=int(sys.argv[1]))
        rng = np.random.default_rng(int(sys.argv[2]))
        own = []
        for i in range(2000):
            data = rng.integers(0, 256, rng.integers(1, 1000), dtype=np.uint8)
            kept = memory.put(b"x", data, time.monotonic_ns())
            if kept is not None:
                own.append((kept, data))
            if not own:
                continue
            kept, data = own[max(0, len(own) - rng.integers(1, 30))]
            found = np.zeros(kept.nbytes, np.uint8)
            assert not memory.read(kept, found) or (found == data).all()
    """)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, f"{memory.descriptor}", f"{seed}"],
            pass_fds=[memory.descriptor],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for seed in range(3)
    ]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert blocks_in_use(memory) == sum(len(kept.blocks) for _, kept in memory.entries(b"x"))
    memory.close()


def test_another_finds_entries_by_the_beginning_of_their_labels() -> None:
    memory = HostMemory(1000, block=50)
    for i in range(1, 5):
        memory.put(b"%d of %d" % (i % 2, i), data(i, 60), i)
    other = HostMemory(1000, block=50, descriptor=memory.descriptor) if CAN_SHARE else memory
    found = {label.rstrip(b"\0"): read(other, kept)[0] for label, kept in other.entries(b"1")}
    assert found == {b"1 of 1": 1, b"1 of 3": 3}
    memory.close()


def test_it_stops_growing_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once, and what is there is used on."""
    memory = HostMemory(1000, block=100)
    assert memory.put(b"a", data(1, 300), 1) is not None

    def full(*_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        if CAN_SHARE:
            patch.setattr(host_memory, "_take", full)
        else:
            patch.setattr(host_memory, "free_memory", lambda: 0)
            patch.setattr(memory, "_room", 0)
        with pytest.warns(InferWarning, match="of 1,000 bytes it has 300, and stays"):
            kept = memory.put(b"b", data(2, 200), 2)
    assert kept is not None
    assert (read(memory, kept) == 2).all()
    assert memory.room == 300
    assert memory.put(b"c", data(3, 400), 3) is None
    assert [label[:1] for label, _ in memory.entries(b"")] == [b"b"]


def test_it_leaves_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = free_memory()
    assert found is None or found > 0
    memory = HostMemory(1 << 30)
    monkeypatch.setattr(host_memory, "free_memory", lambda: (512 << 20) + 10_000)
    with pytest.warns(InferWarning, match="There is no more host memory for the cache"):
        assert memory.put(b"a", data(1, 100_000), 1) is None
    assert memory.put(b"b", data(1, 1), 1) is None
    assert memory.room == 0


def test_nothing_is_kept_after_its_end() -> None:
    memory = HostMemory(1000, block=100)
    kept = memory.put(b"a", data(1, 300), 1)
    assert kept is not None
    memory.close()
    memory.close()
    assert memory.put(b"b", data(1, 1), 2) is None
    assert memory.entries(b"") == []
    assert read(memory, kept) is None
    memory.use([kept], 3)


@pytest.mark.parametrize("capacity", [0, -1, 1.5, "8GiB", True])
def test_a_wrong_size_is_refused(capacity: Any) -> None:
    with pytest.raises(RequestError, match="a positive number of bytes"):
        HostMemory(capacity)


def test_none_at_all() -> None:
    with pytest.warns(InferWarning, match="it has 0, and stays at that"):
        memory = HostMemory(1 << 60)
    assert memory.room == 0
    assert memory.put(b"a", data(1, 1), 1) is None
    assert memory.entries(b"") == []
