"""The lock of a storage: many readers or one writer."""

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
"""A number for what is about to be read; one may serve for several locks."""


class ReadWriteLock:
    """Many readers or one writer; a waiting writer goes before later readers.

    `gate` is held by a writer for its whole block and by a reader only while it registers, so an
    uncontended writer pays for one C-level lock. A thread may nest reads, also inside its own
    write; a write inside its own read or write is refused, since it could only deadlock. A thread
    that holds several storages at once takes them in the order of their ids, as plans do.

    What one thread took another may release: a generator that holds a lock can be closed or
    collected anywhere. So `readers` are threads by hold, and whoever has the hold ends the read.
    """

    __slots__ = ("drained", "gate", "owner", "readers")

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.owner = 0
        self.readers: dict[int, int] = {}
        # Only while a writer waits. A queue, because a collector may end one read at any point of a
        # thread, within the end of another too: a queue's `put` can be interrupted by its own.
        self.drained: SimpleQueue[None] | None = None

    def acquire_read(self, hold: int) -> None:
        me = this_thread.number
        # A nested read must not wait at the gate: a writer there may be waiting for this thread.
        if (self.readers or self.owner == me) and self.nest(hold, me):
            return
        with self.gate:
            self.readers[hold] = me

    def nest(self, hold: int, me: int) -> bool:
        """Read beside another lock of the same thread; False if it has none.

        Registers first, and then looks whether the other one is still held: no writer can have come
        between them.
        """
        self.readers[hold] = me
        if self.owner == me or list(self.readers.values()).count(me) > 1:
            return True
        self.release_read(hold)
        return False

    def release_read(self, hold: int) -> None:
        self.readers.pop(hold, None)  # a forked child has forgotten those of lost threads
        drained = self.drained
        if drained is not None and not self.readers:
            drained.put(None)

    def acquire_write(self, who: str = "storage") -> int:
        """Returns what `release_write` takes."""
        me = this_thread.number
        if self.owner == me or me in list(self.readers.values()):
            held = "write" if self.owner == me else "read"
            raise StorageLockError(
                f"{who}: got a write inside this thread's own {held}, need the {held} to end first"
            )
        self.gate.acquire()
        self.owner = me
        if self.readers:
            self.wait_for_readers()
        return me

    def wait_for_readers(self) -> None:
        """Block until no reader is left; the caller owns the gate and loses it if interrupted."""
        drained = self.drained = SimpleQueue()
        try:
            while self.readers:
                drained.get()
        except BaseException:
            self.drained = None
            self.release_write(self.owner)
            raise
        self.drained = None

    def release_write(self, owner: int) -> None:
        if self.owner == owner:  # a forked child has freed what a lost thread was writing
            self.owner = 0
            self.gate.release()

    def after_fork(self) -> bool:
        """In a forked child only the forking thread lives on: free what the others held. True if
        one of them was writing."""
        me = this_thread.number
        abandoned = self.owner not in (0, me)
        self.gate = threading.Lock()
        self.drained = None
        self.readers = {hold: reader for hold, reader in self.readers.items() if reader == me}
        if self.owner == me:
            self.gate.acquire()
        else:
            self.owner = 0
        return abandoned
