"""Work in threads, while the event loop serves others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T], stop: Callable[[], None] = lambda: None) -> T:
    """work(), in a thread. A task that is cancelled calls `stop`, and ends when the thread does: so
    the threads are no more than the tasks that may have one."""
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop()
        await asyncio.wait([running])
        running.exception()  # nobody else asks for it
        raise
