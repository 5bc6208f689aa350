"""One sequence of a pool, and what its verbs hand out."""

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lazykv.ids import SessionHandle

if TYPE_CHECKING:
    from lazykv.pages.sharing import SharingPool

ALL_BLOCKS = 2**63
"""More blocks than any sequence has."""


class EvictHandle:
    """State of blocks that were detached from a sequence: `restore` brings it back, once.

    `indices` are the logical block indices it covers. It is good while each of these slots is still
    the one it detached; then it is `spent`.
    """

    __slots__ = ("indices", "payload", "session", "spent", "stamps")

    def __init__(
        self, session: SessionHandle, indices: tuple[int, ...], stamps: tuple[int, ...],
        payload: Any,
    ) -> None:  # fmt: skip
        self.session = session
        self.indices = indices
        # Which epoch of the model wrote each block, and where its bytes are (pools of bytes).
        self.stamps = stamps
        self.payload = payload
        self.spent = False

    def __copy__(self) -> Self:
        return self  # it restores once, however many names it has

    def __deepcopy__(self, memo: object) -> Self:
        return self

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
    whether a step is running on it.

    The first `in_place` blocks were computed for these very tokens. From there on stand tokens that
    were spliced in from elsewhere, and those that have read them; `ALL_BLOCKS` if there are none.
    """

    __slots__ = ("filled", "in_place", "in_step", "table")

    def __init__(self) -> None:
        self.table: list[int | EvictHandle] = []
        self.filled = 0
        self.in_place = ALL_BLOCKS
        self.in_step = False

    def in_place_of(self, k: int) -> int:
        """`in_place` of a sequence of the first k blocks."""
        return self.in_place if self.in_place < k else ALL_BLOCKS

    def covered_by(self, handle: EvictHandle) -> bool:
        """Whether every slot of a handle is still the one it detached."""
        return all(i < len(self.table) and self.table[i] is handle for i in handle.indices)

    def handles(self, first: int = 0) -> list[EvictHandle]:
        """The handles that cover slots from `first` on, each once."""
        slots = self.table[first:]
        return list(dict.fromkeys(slot for slot in slots if isinstance(slot, EvictHandle)))


class PrefixLease:
    """Indexed blocks that begin with the tokens asked for, pinned until `release`.

    `tokens` is how many tokens they hold (0 is a miss). `splice_into` gives them to an empty
    session, which then holds them by itself. As a context manager it releases at the end.
    """

    __slots__ = ("blocks", "epoch", "is_open", "pool", "tokens")

    def __init__(
        self, pool: "SharingPool", blocks: tuple[int, ...], tokens: int, epoch: int
    ) -> None:
        self.pool = pool
        self.is_open = True
        self.blocks = blocks
        self.tokens = tokens
        # Which model's bytes these are; another one's make the lease stale.
        self.epoch = epoch

    def __copy__(self) -> Self:
        return self  # it unpins once, however many names it has

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def splice_into(self, session: SessionHandle) -> int:
        """Share the blocks with an empty session; returns its tokens."""
        return self.pool.splice_lease(self, session)

    def release(self) -> None:
        """Unpin the blocks; StaleHandle if that was done already."""
        self.pool.release_lease(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self.is_open:
            self.release()

    def __repr__(self) -> str:
        return f"PrefixLease({self.tokens} tokens, {'open' if self.is_open else 'released'})"
