"""Whose turn it is: any number of threads wait for tokens, and one of them makes steps for all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infer.kernels.errors import RequestError
from infer.kernels.gpu.adapters import check_process


class Turns:
    """One thread at a time has the turn. An interrupt that ends a turn gives it back."""

    def __init__(self) -> None:
        # No interrupt comes between taking a lock and the block that gives it back, but inside of
        # the methods of a condition.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pid = os.getpid()  # of the process that has the device
        self._owner: int | None = None  # the thread that has the turn
        self._wanted = 0  # threads that want it before the next step

    def wait(self, ready: Callable[[], bool], step: Callable[[], None]) -> None:
        """Wait until `ready`, which is asked between steps. Makes the steps if no other thread
        does. Raises as `turn`."""
        me = threading.get_ident()
        while not ready():
            self._check()
            try:
                with self._lock:
                    if self._owner is not None or self._wanted:
                        self._changed.wait()
                        continue
                    self._owner = me
                step()
            finally:
                try:
                    self._give_back()
                except BaseException:  # an interrupt
                    self._give_back()
                    raise

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A block in which this thread has the turn. It gets it before the next step of any other
        thread. Raises RequestError if this thread would wait for itself, and DeviceError in a
        process that was forked."""
        self._check()
        me = threading.get_ident()
        try:
            with self._lock:
                self._wanted += 1
                try:
                    while self._owner is not None:
                        self._changed.wait()
                finally:
                    self._wanted -= 1
                    self._changed.notify_all()
                self._owner = me
            yield
        finally:
            try:
                self._give_back()
            except BaseException:  # an interrupt
                self._give_back()
                raise

    def wake(self) -> None:
        """Have waiting threads ask again whether they are `ready`. Safe in a signal handler."""
        if self._changed.acquire(blocking=False):  # it may be this thread that has it
            self._changed.notify_all()
            self._changed.release()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            check_process()
        if self._owner == threading.get_ident():
            raise RequestError("A step of this model is being made by this very thread.")

    def _give_back(self) -> None:
        if self._owner == threading.get_ident():
            with self._lock:
                self._changed.notify_all()
                self._owner = None
