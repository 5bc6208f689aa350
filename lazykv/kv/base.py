"""What every cache of rows shares: the identity of its allocation, its length, and rewinding.

The id names the allocation, never the conversation: moving the length keeps it, another storage
mints a new one. Rollback and truncation are one primitive: the length moves, no byte does.
"""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn, Self, SupportsIndex

from lazykv.device import DeviceLocation
from lazykv.errors import GraphError, RangeError
from lazykv.ids import KvAllocId, next_alloc_id
from lazykv.kv.rows import count
from lazykv.owner import Owner, exclusive
from lazykv.spec import whole


class RowCache:
    """Base of the caches: allocation id, proven locations, live length, savepoints, held plans."""

    def __init__(self, n_layers: int) -> None:
        self._cached_len = 0
        self._alloc_id = next_alloc_id()
        # Per layer: where its storage was measured to live when it was allocated, else None.
        self._locations: list[DeviceLocation | None] = [None] * n_layers
        # The one place that all layers were allocated in, else None.
        self._place: DeviceLocation | None = None
        self._savepoints: list[Savepoint] = []
        self._owner = Owner()
        # Plans that models hold for this cache, so that they live and die with it.
        self.held: dict[object, Any] = {}

    def owned(self, who: str) -> AbstractContextManager[None]:
        """One thread at a time reads the length, writes rows and moves the length.

        A second one gets `SessionBusy`; without this, rows of both could land at one position, and
        a rewind during a step would be undone by it.
        """
        return self._owner.hold(who)

    # Identity

    def alloc_id(self) -> KvAllocId:
        """Names the allocation: unique in the process, never reused, never 0."""
        return self._alloc_id

    def n_layers(self) -> int:
        return len(self._locations)

    def layer_location(self, layer: SupportsIndex) -> DeviceLocation | None:
        """Where one layer's storage was measured to live; None if that is not proven."""
        i = whole(f"{type(self).__name__}.layer_location", "layer", layer)
        return self._locations[i] if 0 <= i < len(self._locations) else None

    def device_location(self) -> DeviceLocation | None:
        """The location that all layers were given together; None is "not proven" or "one device
        per layer", even if they are equal: then `layer_location` tells. None is never "cpu"."""
        return self._place

    rebind_location = device_location

    def only_location(self) -> DeviceLocation | None:
        """Where every layer was measured to live, if that is one place, however it was given."""
        known = set(self._locations)
        return known.pop() if len(known) == 1 else None

    def _new_allocation(self) -> None:
        """Storage was replaced: plans made for the old one end here."""
        self._alloc_id = next_alloc_id()
        for session in self.held.values():
            session.retire()
        self.held.clear()

    # Length

    @property
    def capacity(self) -> int | None:
        """Most rows the length may count, or None if there is no fixed number."""
        raise NotImplementedError

    def drop_open_step(self) -> None:
        """Forget rows that are written but not counted; caches without such steps do nothing."""

    def check_no_open_step(self, who: str) -> None:
        """Refuse if rows are written but not counted: what moves the length or the rows under such
        a step would let it close with rows of different tokens."""

    @property
    def cached_len(self) -> int:
        """Live rows. May be assigned within capacity by callers who write through their own plans.

        In an open step only the present length is taken, which changes nothing.
        """
        return self._cached_len

    @cached_len.setter
    @exclusive
    def cached_len(self, n: SupportsIndex) -> None:
        who = f"{type(self).__name__}.cached_len"
        rows = count(who, "length", n)
        if self.capacity is not None and rows > self.capacity:
            raise RangeError(f"{who}: got {rows}, need 0 <= length <= capacity {self.capacity}")
        if rows == self._cached_len:
            return
        self.check_no_open_step(who)
        if rows < self._cached_len:
            self._rewind(rows)
        else:
            self.note_written(rows)
            self._cached_len = rows

    def __len__(self) -> int:
        return self._cached_len

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> NoReturn:
        # Also what copy.copy asks for: two caches of one storage and id would count separately.
        raise GraphError(
            f"{self!r}: got a copy or a pickle, need a new cache; append live rows to it"
        )

    @exclusive
    def truncate_to(self, n: SupportsIndex) -> None:
        """Lower the live length; any n from there on does nothing. Storage, id and plans stay.

        Refused in an open step, which `abort_step` drops.
        """
        who = f"{type(self).__name__}.truncate_to"
        rows = whole(who, "length", n)
        if rows < 0:
            raise RangeError(f"{who}: got length {rows}, need length >= 0")
        if rows < self._cached_len:
            self.check_no_open_step(who)
            self._rewind(rows)

    @exclusive
    def reset(self) -> None:
        """Rewind to length 0 and drop an open step, keeping buffers and id."""
        self._rewind(0)

    def note_written(self, length: int) -> None:
        """Rows up to `length` are, or may be, written; a ring notes which rows they replaced."""

    def check_rewind(self, rows: int) -> None:
        """Refuse a length whose rows are gone; a cache that keeps every row refuses none."""

    def _rewind(self, rows: int) -> None:
        self.check_rewind(rows)
        self.drop_open_step()
        self._cached_len = rows
        # A savepoint of a greater length would bring back rows that later writes may replace.
        self._savepoints = [s for s in self._savepoints if s.length <= rows]

    @exclusive
    def savepoint(self) -> "Savepoint":
        """Remember this length; `rollback` returns to it. Savepoints nest."""
        made = Savepoint(self)
        self._savepoints.append(made)
        return made


class Savepoint:
    """A length to return to, over all layers at once. A logical rewind: nothing was copied.

    It ends with `commit`, with `rollback` (to it or to an outer one), and with anything that drops
    its rows: truncating below it, `clear`, `set_layer`, or another number of sequences. As a
    context manager it commits, or rolls back if the block raises.
    """

    __slots__ = ("_cache", "length")

    def __init__(self, cache: RowCache) -> None:
        self._cache = cache
        self.length = len(cache)

    @property
    def is_open(self) -> bool:
        return any(s is self for s in self._cache._savepoints)

    def rollback(self) -> None:
        """Return to the remembered length and drop an open step; inner savepoints end too."""
        cache = self._cache
        with cache.owned("Savepoint.rollback"):
            self._check_open("rollback")
            cache.check_rewind(self.length)
            self._end()
            cache._rewind(self.length)

    def commit(self) -> None:
        """Keep what came since; inner savepoints end too."""
        with self._cache.owned("Savepoint.commit"):
            self._check_open("commit")
            self._end()

    def _end(self) -> None:
        points = self._cache._savepoints
        del points[[s is self for s in points].index(True) :]

    def _check_open(self, what: str) -> None:
        if not self.is_open:
            raise GraphError(
                f"Savepoint.{what}: got a savepoint that has ended, need an open one; committing, "
                "rolling back, truncating below it or replacing storage ends it"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self.is_open:
            if error is None:
                self.commit()
            else:
                self.rollback()

    def __repr__(self) -> str:
        return f"Savepoint(length {self.length}, {'open' if self.is_open else 'ended'})"
