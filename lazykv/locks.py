"""The lock of a storage: many readers or one writer.

A *hold* is a number that is registered before anybody looks whether it may go on, and whose end
does nothing if there is nothing to end. Each of the two is one step of the interpreter. So whoever
is interrupted, wherever that is, has only to end the hold, and what one thread took another may
end: a generator that holds a lock can be closed or collected anywhere.
"""

import itertools
import threading
from collections.abc import Callable
from queue import SimpleQueue

from lazykv.errors import StorageLockError


class _Thread(threading.local):
    """Names the current thread by a number that no later thread gets, unlike `get_ident`."""

    def __init__(self) -> None:
        self.number = next(_threads)


_threads = itertools.count(1)
this_thread = _Thread()

new_hold: Callable[[], int] = itertools.count(1).__next__
"""A number for what is about to be taken; one may serve for several locks."""


class ReadWriteLock:
    """Many readers or one writer, in the order in which they came.

    A thread may nest reads, also inside its own write; a write inside its own read or write is
    refused, since it could only deadlock. A thread that holds several storages at once takes them
    in the order of their ids, as plans do.
    """

    __slots__ = ("bells", "holds", "nested")

    def __init__(self) -> None:
        # Threads by hold, in the order of the queue; that of a writer is negative.
        self.holds: dict[int, int] = {}
        # Reads beside another hold of their thread: they wait for nobody, and writers for them.
        self.nested: dict[int, int] = {}
        # What wakes those that wait. Queues, because a collector may end a hold at any point of a
        # thread, within the end of another too: a queue's `put` can be interrupted by its own.
        self.bells: dict[int, SimpleQueue[None]] = {}

    def acquire_read(self, hold: int) -> None:
        me = this_thread.number
        if self.holds and self.nest(hold, me):
            return
        self.holds[hold] = me
        if len(self.holds) > 1:
            self._wait(hold, self._may_read)

    def nest(self, hold: int, me: int) -> bool:
        """Read beside another hold of the same thread; False if it has none.

        Registers first, and then looks whether the other one is still there: no writer can have
        come between them.
        """
        self.nested[hold] = me
        if self._held_by(me) or list(self.nested.values()).count(me) > 1:
            return True
        self.release(hold)
        return False

    def acquire_write(self, hold: int, who: object = "storage") -> None:
        me = this_thread.number
        held = self._held_by(me) or ("read" if me in list(self.nested.values()) else None)
        if held is not None:
            raise StorageLockError(
                f"{who}: got a write inside this thread's own {held}, need the {held} to end first"
            )
        self.holds[hold] = -me
        self.wait_to_write(hold)

    def wait_to_write(self, hold: int) -> None:
        """Until a writer that is registered is alone."""
        if len(self.holds) > 1 or self.nested:
            self._wait(hold, self._may_write)

    def release(self, hold: int) -> None:
        self.holds.pop(hold, None)
        self.nested.pop(hold, None)
        if self.bells:
            for bell in list(self.bells.values()):
                bell.put(None)

    def _held_by(self, me: int) -> str | None:
        """What a thread does here, which has not to wait."""
        threads = list(self.holds.values())
        return "write" if -me in threads else "read" if me in threads else None

    def _may_read(self, hold: int) -> bool:
        before = itertools.takewhile(lambda h: h[0] != hold, list(self.holds.items()))
        return all(thread > 0 for _, thread in before)

    def _may_write(self, hold: int) -> bool:
        first, *_ = self.holds
        return not self.nested and first == hold

    def _wait(self, hold: int, ready: Callable[[int], bool]) -> None:
        bell = self.bells[hold] = SimpleQueue()
        try:
            while not ready(hold):
                bell.get()
        finally:
            self.bells.pop(hold, None)

    def after_fork(self) -> bool:
        """In a forked child only the forking thread lives on: end the holds of the others. True if
        one of them was writing."""
        me = this_thread.number
        first = next(iter(self.holds.values()), 0)
        for holds in (self.holds, self.nested):
            for hold, thread in list(holds.items()):
                if abs(thread) != me:
                    del holds[hold]
        self.bells.clear()
        return first < 0 and first != -me
