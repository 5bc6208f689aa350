"""What a pool tells about itself: counters, and numbered events of its prefix index."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields

from lazykv.pages.prefix_index import Entry

EVENTS_KEPT = 4096
"""Events a pool remembers. They are numbered, so a reader sees when it has missed some."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Totals since the pool was made."""

    blocks_taken: int = 0
    blocks_copied: int = 0
    blocks_evicted: int = 0
    blocks_restored: int = 0
    lookups: int = 0
    tokens_asked: int = 0
    tokens_found: int = 0


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """A change of the prefix index: a block was ``stored`` or ``removed``, or all ``cleared``.

    `key` and `parent` name the chain of tokens that ends in the block (`parent` is None for a
    chain's first block); they mean the same in every process.
    """

    number: int
    kind: str
    block: int | None = None
    key: bytes | None = None
    parent: bytes | None = None


class Journal:
    """Counters and events of one pool."""

    def __init__(self) -> None:
        self._totals = {f.name: 0 for f in fields(PoolStats)}
        self._events: deque[PoolEvent] = deque(maxlen=EVENTS_KEPT)
        self._number = 0

    @property
    def stats(self) -> PoolStats:
        return PoolStats(**self._totals)

    def add(self, **counts: int) -> None:
        for name, n in counts.items():
            self._totals[name] += n

    def stored(self, entry: Entry) -> None:
        self._append("stored", entry)

    def removed(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._append("removed", entry)

    def cleared(self) -> None:
        self._append("cleared", None)

    def _append(self, kind: str, entry: Entry | None) -> None:
        self._number += 1
        if entry is None:
            self._events.append(PoolEvent(self._number, kind))
        else:
            parent = None if entry.parent is None else entry.parent.key
            self._events.append(PoolEvent(self._number, kind, entry.block, entry.key, parent))

    def events(self, after: int = 0) -> list[PoolEvent]:
        return [e for e in self._events if e.number > after]
