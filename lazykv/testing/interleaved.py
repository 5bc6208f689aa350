"""Threads that do the same at the same time, and take turns as often as Python lets them."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

THREADS = 3
TIMEOUT = 60.0
"""Seconds; a thread that waits so long for the others has lost them."""
PACKAGE = str(Path(__file__).parents[1]) + os.sep
BACKENDS = PACKAGE + "backends" + os.sep


def _let_others_run(frame: FrameType, event: str, arg: object) -> Any:
    """A trace function: other threads may run before every line of Python that is not of lazykv
    itself; what its backends do is of interest too."""
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(PACKAGE) and not name.startswith(BACKENDS):
        return None
    time.sleep(0)
    return _let_others_run


@contextmanager
def switching_often() -> Iterator[None]:
    """Threads of Python take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Together:
    """Where threads wait for each other, awake: they all go on at the same moment."""

    def __init__(self, rounds: int) -> None:
        self._arrived = [0] * rounds
        self._lock = threading.Lock()

    def wait(self, n: int) -> None:
        with self._lock:
            self._arrived[n] += 1
        end = time.monotonic() + TIMEOUT
        while self._arrived[n] < THREADS:
            assert time.monotonic() < end, f"round {n}: a thread is missing"
            time.sleep(0)


def in_step(work: Callable[[int, int], str | None], rounds: int) -> None:
    """Call ``work(thread, round)`` from several threads, which begin each round together; it says
    what was wrong."""
    together = Together(rounds)
    wrong: list[str] = []

    def go(thread: int, n: int) -> None:
        together.wait(n)
        before = sys.gettrace()
        sys.settrace(_let_others_run)
        try:
            said = work(thread, n)
        except Exception as e:
            said = f"got {type(e).__name__}: {e}"
        finally:
            sys.settrace(before)
        if said is not None:
            wrong.append(f"thread {thread}, round {n}: {said}")

    def all_rounds(thread: int) -> None:
        for n in range(rounds):
            go(thread, n)

    with switching_often(), ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(all_rounds, n) for n in range(THREADS)]:
            done.result()
    assert not wrong, f"{len(wrong)} of {THREADS * rounds} passes: {'; '.join(wrong[:3])}"
