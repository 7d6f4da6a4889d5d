"""Threads that wait: one of them makes steps for all, and none is left waiting."""

from __future__ import annotations

import threading

import pytest

from infer.engine.turns import Turns
from infer.kernels.errors import RequestError


def run(*bodies: object) -> None:
    threads = [threading.Thread(target=body, daemon=True) for body in bodies]  # type: ignore
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_one_thread_makes_steps_for_all() -> None:
    """Each waits for another number of steps; two are never made at once."""
    turns, alone, made = Turns(), threading.Lock(), 0

    def step() -> None:
        nonlocal made
        assert alone.acquire(blocking=False)
        made += 1
        alone.release()

    def waits(count: int) -> None:
        turns.wait(lambda: made >= count, step)

    run(*[lambda count=count: waits(count) for count in (1, 50, 200, 200, 1000)])
    assert made == 1000


def test_a_turn_comes_before_the_next_step() -> None:
    """However many steps another thread has still to make."""
    turns, in_step, ended = Turns(), threading.Event(), False
    order: list[str] = []

    def step() -> None:
        order.append("step")
        in_step.set()
        while not turns._wanted and "turn" not in order:
            pass

    def steps() -> None:
        turns.wait(lambda: ended, step)

    def turn() -> None:
        nonlocal ended
        in_step.wait(60)
        with turns.turn():
            order.append("turn")
            ended = True

    run(steps, turn)
    assert order == ["step", "turn"]


def test_who_waits_is_woken() -> None:
    """By what makes it ready without a step, while another thread has the turn."""
    turns, ready, has_turn = Turns(), False, threading.Event()
    over = threading.Event()

    def waits() -> None:
        has_turn.wait(60)
        turns.wait(lambda: ready, pytest.fail)
        over.set()

    def turn() -> None:
        nonlocal ready
        with turns.turn():
            has_turn.set()
            ready = True
            while not over.wait(0.01):  # else it would never end
                turns.wake()

    run(waits, turn)
    assert over.is_set()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_ends_the_turn(error: type[BaseException]) -> None:
    turns = Turns()

    def step() -> None:
        raise error

    with pytest.raises(error):
        turns.wait(lambda: False, step)
    with pytest.raises(error), turns.turn():
        raise error
    made: list[int] = []
    run(lambda: turns.wait(lambda: bool(made), lambda: made.append(1)))
    assert made == [1]


def test_nobody_waits_for_itself() -> None:
    """A step, or what is called in it, that asks for steps."""
    turns = Turns()

    def step() -> None:
        turns.wait(lambda: False, step)

    with pytest.raises(RequestError, match="by this very thread"):
        turns.wait(lambda: False, step)
    with turns.turn(), pytest.raises(RequestError, match="by this very thread"), turns.turn():
        pass
    with turns.turn():  # it was given back
        pass
