"""A pool whose bytes are entries of a dict, and all that a pool is, as plain values."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lazykv.errors import LazyKvError
from lazykv.ids import Minted, SessionHandle
from lazykv.pages.geometry import KvGeometry
from lazykv.pages.pool import KvBlockPool
from lazykv.pages.prefix_index import sha256
from lazykv.pages.sequence import EvictHandle

GONE = object()


def geometry(num_blocks: int, block_size: int) -> KvGeometry:
    """Two layers of one head of width 3, elements of 2 bytes."""
    return KvGeometry(2, num_blocks, block_size, 1, 3, 2)


class DictPool(KvBlockPool):
    """``rows[block, slot]`` is whatever a test says was written there.

    What nobody owns is deleted, so that reading it is an error. `unready` are blocks whose bytes
    are not there yet; `fail` is raised by the next hook that moves rows.
    """

    def __init__(
        self, num_blocks: int, block_size: int, digest: Callable[[bytes], bytes] = sha256
    ) -> None:
        super().__init__(geometry(num_blocks, block_size), digest=digest)
        self.rows: dict[tuple[int, int], Any] = {}
        self.unready: set[int] = set()
        self.fail: BaseException | None = None

    def write(self, session: SessionHandle, start: int, values: Iterable[Any]) -> None:
        """What a step does for tokens ``start, start + 1, ...``; their blocks must be there."""
        table, size = self.session_block_table(session), self.geometry.block_size
        for at, value in enumerate(values, start):
            block = table[at // size]
            assert block is not None
            self.rows[block, at % size] = value

    def read(self, session: SessionHandle) -> list[Any]:
        """The rows of all tokens, None where their block is evicted."""
        table, size = self.session_block_table(session), self.geometry.block_size
        places = [(table[at // size], at % size) for at in range(self.filled_tokens(session))]
        return [None if block is None else self.rows[block, slot] for block, slot in places]

    def feed(self, session: SessionHandle, values: Iterable[Any]) -> list[int]:
        """Append and write; returns the blocks that were taken."""
        values = list(values)
        start = self.filled_tokens(session)
        taken = self.append(session, len(values))
        self.write(session, start, values)
        return taken

    def rows_of(self, block: int) -> dict[int, Any]:
        return {slot: value for (b, slot), value in self.rows.items() if b == block}

    def _moves(self) -> None:
        if self.fail is not None:
            failure, self.fail = self.fail, None
            raise failure

    def _copy_block(self, source: int, dest: int) -> None:
        self._moves()
        self._place_bytes([self.rows_of(source)], [dest])

    def _on_taken(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._on_rewound(block, 0)

    def _on_rewound(self, block: int, rows: int) -> None:
        self.rows = {k: v for k, v in self.rows.items() if k[0] != block or k[1] < rows}

    def _store_bytes(self, session: SessionHandle, blocks: list[int]) -> Any:
        self._moves()
        return [self.rows_of(b) for b in blocks]

    def _fetch_bytes(self, payload: Any) -> Any:
        assert payload is not GONE, "a handle that can be restored has its bytes"
        self._moves()
        return payload

    def _place_bytes(self, data: Any, blocks: list[int]) -> None:
        self._moves()
        for rows, block in zip(data, blocks, strict=True):
            self.rows |= {(block, slot): value for slot, value in rows.items()}

    def _forget_payload(self, handle: EvictHandle) -> None:
        assert handle.payload is not GONE, "bytes are deleted once"
        handle.payload = GONE

    def _is_realized(self, block: int) -> bool:
        return block not in self.unready


def session(pool: DictPool, tokens: int, first: int = 0) -> SessionHandle:
    """A session of so many tokens; the row of token t is ``first + t``."""
    made = pool.open()
    pool.feed(made, range(first, first + tokens))
    return made


def refs(pool: DictPool) -> list[int]:
    return [pool.block_refcount(b) for b in range(pool.capacity())]


def published(
    pool: DictPool, tokens: list[int], *, salt: bytes = b"", keep: bool = False
) -> SessionHandle:
    """A session that computed and published these tokens, discarded unless it is to be kept."""
    s = pool.open()
    pool.feed(s, tokens)
    assert pool.publish(s, tokens, salt=salt) == len(tokens) // pool.geometry.block_size
    if not keep:
        pool.discard(s)
    return s


def found(pool: DictPool, tokens: list[int], *, salt: bytes = b"") -> int:
    """How many tokens a lookup finds, each in its row."""
    with pool.lookup(tokens, salt=salt) as lease:
        rows = [pool.rows_of(b) for b in lease.blocks]
        size = pool.geometry.block_size
        assert [row[slot] for row in rows for slot in range(size)] == list(tokens[: lease.tokens])
        return lease.tokens


def snapshot(pool: KvBlockPool, *others: Any) -> Any:
    """Everything reachable from a pool as nested tuples; equal before and after a refusal."""
    seen: list[Any] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Minted):
            return type(value).__name__, int(value)
        if value is None or isinstance(value, bool | int | float | str | bytes):
            return value
        if isinstance(value, list | tuple | deque):
            return tuple(map(plain, value))
        if isinstance(value, set | frozenset):
            return tuple(sorted(map(plain, value)))
        if isinstance(value, dict):
            return tuple((plain(k), plain(v)) for k, v in value.items())
        for n, known in enumerate(seen):
            if known is value:
                return "again", n
        seen.append(value)
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        return type(value).__name__, tuple((n, plain(getattr(value, n))) for n in names)

    return plain([pool, *others])


@contextmanager
def refused(
    pool: KvBlockPool, error: type[LazyKvError], *words: object, keep: tuple[Any, ...] = ()
) -> Iterator[pytest.ExceptionInfo[LazyKvError]]:
    """The block raises `error`, its message holds `words`, and the pool (with the handles and
    leases in `keep`) is as it was."""
    before = snapshot(pool, *keep)
    with pytest.raises(error) as caught:
        yield caught
    assert type(caught.value) is error
    for word in words:
        assert str(word) in str(caught.value)
    assert snapshot(pool, *keep) == before
    pool.check()
