"""Whose turn it is to run a round, among threads that drive and threads that want their pieces."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lazykv.errors import SessionBusy


class Turns:
    """One round at a time. A thread that is in one may not start another within it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._thread: int | None = None
        self._rounds = 0

    @contextmanager
    def take(self, who: str) -> Iterator[None]:
        """Hold the turn, once the round of another thread is over."""
        with self._changed:
            self._check(who)
            self._changed.wait_for(lambda: self._thread is None)
            self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._end()

    @contextmanager
    def take_unless(self, who: str, done: Callable[[], bool]) -> Iterator[bool]:
        """Hold the turn and yield True, unless `done` says that there is no need. If another thread
        is in a round, only wait for its end: however soon it starts the next one, this thread goes
        on."""
        with self._changed:
            self._check(who)
            free = self._thread is None and not done()
            if free:
                self._thread = threading.get_ident()
            elif not done():
                seen = self._rounds
                self._changed.wait_for(lambda: self._rounds != seen)
        try:
            yield free
        finally:
            if free:
                self._end()

    def _check(self, who: str) -> None:
        if self._thread == threading.get_ident():
            raise SessionBusy(f"{who}: got a call from within a round, need it to end")

    def _end(self) -> None:
        with self._changed:
            self._thread = None
            self._rounds += 1
            self._changed.notify_all()
