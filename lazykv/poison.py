"""Debug poison: memory that nobody filled is recognizable, and caches know which rows were written.

Switched on by ``LAZYKV_POISON=1``; no result changes.
"""

import numpy as np
from numpy.typing import NDArray

from lazykv.device import Array, Backend
from lazykv.errors import RangeError

PATTERN = 0xFF
"""Every byte of unfilled memory: NaN in all float dtypes, -1 or the largest value in integers."""


def fill(backend: Backend, buffer: Array, nbytes: int) -> None:
    """Fill a 1-D u8 buffer of `nbytes` with the pattern."""
    backend.copy_in(buffer, np.full(nbytes, PATTERN, np.uint8))


class RowLog:
    """Which rows of a cache's buffer were ever written."""

    __slots__ = ("axis", "name", "written")

    def __init__(self, name: str, axis: int, rows: int) -> None:
        self.name = name
        self.axis = axis
        self.written: NDArray[np.bool_] = np.zeros(rows, np.bool_)

    def note(self, start: int, end: int) -> None:
        self.written[start:end] = True

    def resized(self, rows: int) -> "RowLog":
        """The log of a buffer of `rows` rows that holds a copy of this one's."""
        made = RowLog(self.name, self.axis, rows)
        made.written[: len(self.written)] = self.written
        return made

    def check(
        self, who: str, rows: slice | NDArray[np.int64], now: NDArray[np.bool_] | None = None
    ) -> None:
        """Refuse a read of rows unless each was written before, or is in `now`."""
        known = self.written if now is None else self.written | now
        missing = np.arange(len(known))[rows][~known[rows]]
        if missing.size:
            raise RangeError(
                f"{who}: got a read of row {missing[0]} of {self.name}, need a row that was written"
            )
