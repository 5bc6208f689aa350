"""One sequence of a pool, and what its verbs hand out."""

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lazykv.errors import StaleHandle
from lazykv.ids import SessionHandle

if TYPE_CHECKING:
    from lazykv.pages.pool import KvBlockPool


class EvictHandle:
    """State of blocks that were detached from a sequence: `restore` brings it back, once.

    `indices` are the logical block indices it covers. It is good while each of these slots is still
    the one it detached.
    """

    __slots__ = ("indices", "payload", "session", "stamps", "used")

    def __init__(
        self, session: SessionHandle, indices: tuple[int, ...], stamps: tuple[int, ...],
        payload: Any,
    ) -> None:  # fmt: skip
        self.session = session
        self.indices = indices
        # Which epoch of the model wrote each block, and where its bytes are (pools of bytes).
        self.stamps = stamps
        self.payload = payload
        self.used = False

    def __repr__(self) -> str:
        return f"EvictHandle({self.session!r}, blocks {list(self.indices)})"


@dataclass(frozen=True, slots=True)
class EvictReport:
    """What an eviction did, in logical block indices of the sequence: the blocks it freed, those it
    left because others hold them too, and the handle that restores the freed ones."""

    freed: list[int]
    still_shared: list[int]
    handle: EvictHandle


class Sequence:
    """Blocks of one sequence in order (a handle where one is evicted), its tokens so far, and
    whether a step is running on it."""

    __slots__ = ("filled", "in_step", "table")

    def __init__(self, table: list[int | EvictHandle] | None = None, filled: int = 0) -> None:
        self.table = [] if table is None else table
        self.filled = filled
        self.in_step = False

    def handles(self, first: int = 0) -> list[EvictHandle]:
        """The handles that cover slots from `first` on, each once."""
        found: list[EvictHandle] = []
        for slot in self.table[first:]:
            if isinstance(slot, EvictHandle) and not any(slot is h for h in found):
                found.append(slot)
        return found


class PrefixLease:
    """Indexed blocks that begin with the tokens asked for, pinned until `release`.

    `tokens` is how many tokens they hold (0 is a miss). `splice_into` gives them to an empty
    session, which then holds them by itself. As a context manager it releases at the end.
    """

    __slots__ = ("_open", "_pool", "blocks", "tokens")

    def __init__(self, pool: "KvBlockPool", blocks: tuple[int, ...], tokens: int) -> None:
        self._pool = pool
        self._open = True
        self.blocks = blocks
        self.tokens = tokens

    @property
    def is_open(self) -> bool:
        return self._open

    def splice_into(self, session: SessionHandle) -> int:
        """Share the blocks with an empty session; returns its tokens."""
        self.check_open("splice_into")
        return self._pool.splice_lease(self, session)

    def release(self) -> None:
        """Unpin the blocks; StaleHandle if that was done already."""
        self.check_open("release")
        self._open = False
        self._pool.unpin(self.blocks)

    def check_open(self, verb: str) -> None:
        if not self._open:
            raise StaleHandle(f"PrefixLease.{verb}: got a released lease, need an open one")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._open:
            self.release()

    def __repr__(self) -> str:
        return f"PrefixLease({self.tokens} tokens, {'open' if self._open else 'released'})"
