"""What kernels refuse: a word of device memory for every step that reads numbers from there.

A kernel that finds a number out of range sets its step's word and writes nothing. Only the thread
that gave the step looks at the word, when it next waits, so that no thread sees or clears what
another one's work refused.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import finalize

from lazykv.device import Array, HostArray
from lazykv.ops.op import Op

WORDS = 4096
"""Words that are allocated together: more than the steps of a large model that can refuse."""


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """Words, i32 ``[WORDS]``, on the device, and page-locked memory to look at them."""

    device: Array
    host: HostArray


class Word:
    """The word of one emitted step; another step may get it once nothing holds it any more."""

    __slots__ = ("__weakref__", "array", "index", "op", "slab")

    def __init__(self, op: Op, slab: Slab, index: int) -> None:
        self.op = op
        self.slab = slab
        self.index = index
        self.array = slab.device[index : index + 1]

    @property
    def is_set(self) -> bool:
        """Whether the step had refused when its slab was last copied."""
        return bool(self.slab.host[self.index])


class Refusals:
    """The words of one device, and for which of them each thread has given work."""

    def __init__(self, allocate: Callable[[], Slab], clear: Callable[[Array], None]) -> None:
        self._allocate = allocate
        self._clear = clear
        self._free: list[tuple[Slab, int]] = []
        self._lock = threading.Lock()
        self._thread = threading.local()

    def take(self, op: Op) -> Word:
        """A word for a step that is being emitted; cleared in stream order, because work of its
        last owner may still set it."""
        with self._lock:
            if not self._free:
                slab = self._allocate()
                self._free += [(slab, n) for n in reversed(range(WORDS))]
            slab, index = self._free.pop()
        word = Word(op, slab, index)
        finalize(word, self._free.append, (slab, index)).atexit = False
        self._clear(word.array)
        return word

    def note(self, *words: Word) -> None:
        """This thread is giving the steps of these words to the device."""
        self._given.update(dict.fromkeys(words))

    def given(self) -> tuple[Word, ...]:
        """Whose steps this thread gave since it last waited to the end, in order."""
        return tuple(self._given)

    def waited(self) -> None:
        """This thread has waited for all that it gave."""
        self._given.clear()

    @contextmanager
    def recording(self, into: list[Word]) -> Iterator[None]:
        """What is noted inside has not been given: it goes into a list."""
        outer, self._thread.given = self._given, {}
        try:
            yield
        finally:
            into += self._thread.given
            self._thread.given = outer

    @property
    def _given(self) -> dict[Word, None]:
        if not hasattr(self._thread, "given"):
            self._thread.given = {}
        given: dict[Word, None] = self._thread.given
        return given

    def clear(self, words: Sequence[Word]) -> None:
        for w in words:
            self._clear(w.array)


def parts(words: Sequence[Word]) -> list[tuple[Array, HostArray]]:
    """The stretches of slabs that hold these words, on the device and on the host."""
    found = []
    for slab in {w.slab: None for w in words}:
        at = [w.index for w in words if w.slab is slab]
        stretch = slice(min(at), max(at) + 1)
        found.append((slab.device[stretch], slab.host[stretch]))
    return found
