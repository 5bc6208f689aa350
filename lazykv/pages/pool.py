"""KvBlockPool: which block of a paged pool holds which tokens of which sequence."""

from collections.abc import Iterable
from typing import Any, SupportsIndex

from lazykv.errors import BadBlockIndex, DTypeError, PoolError, StaleHandle
from lazykv.ids import SessionHandle
from lazykv.pages.sequence import EvictHandle, EvictReport, Sequence
from lazykv.pages.shared import locked
from lazykv.pages.steps import SteppedPool
from lazykv.spec import whole


class KvBlockPool(SteppedPool):
    """Metadata of a paged pool: integers only. `DeviceKvPool` is one with bytes.

    A *session* is one sequence. Its blocks are the same in every layer. Every refusal leaves the
    pool as it was. It is a `PoolError`; or RangeError or DTypeError, for numbers that no pool has;
    or `SessionBusy`, for a session that a step is running on.
    """

    # Hooks of a pool of bytes

    def _store_bytes(self, session: SessionHandle, blocks: list[int]) -> Any:
        """Keep the bytes of blocks that are about to be detached; returns what finds them again."""
        return None

    def _fetch_bytes(self, payload: Any) -> Any:
        """The kept bytes, once they are known to be whole."""
        return None

    def _place_bytes(self, data: Any, blocks: list[int]) -> None:
        """Put fetched bytes into blocks."""

    # Verbs

    @locked
    def evict(self, session: SessionHandle) -> EvictReport:
        """Detach every resident block that this session alone holds."""
        seq = self._idle("evict", session)
        there = [i for i, slot in enumerate(seq.table) if not isinstance(slot, EvictHandle)]
        return self._evict("evict", session, seq, there)

    @locked
    def evict_blocks(self, session: SessionHandle, indices: Iterable[SupportsIndex]) -> EvictReport:
        """Detach the blocks at these logical indices, each given once."""
        seq = self._idle("evict_blocks", session)
        if not isinstance(indices, Iterable):
            raise DTypeError(f"evict_blocks: got {indices!r}, need a list of block indices")
        wanted = [self._index("evict_blocks", seq, i) for i in indices]
        if len(set(wanted)) != len(wanted):
            raise BadBlockIndex(f"evict_blocks: got {wanted}, need each index once")
        return self._evict("evict_blocks", session, seq, wanted)

    @locked
    def evict_range(
        self, session: SessionHandle, from_: SupportsIndex, to: SupportsIndex
    ) -> EvictReport:
        """Detach logical blocks ``from_..to``."""
        seq = self._idle("evict_range", session)
        first, last = whole("evict_range", "from_", from_), whole("evict_range", "to", to)
        if not 0 <= first <= last <= len(seq.table):
            raise BadBlockIndex(
                f"evict_range: got blocks {first}..{last}, need a range within 0..{len(seq.table)}"
            )
        return self._evict("evict_range", session, seq, list(range(first, last)))

    def _evict(
        self, who: str, session: SessionHandle, seq: Sequence, indices: list[int]
    ) -> EvictReport:
        blocks = self._resident(who, seq, indices)
        alone: list[int] = []
        shared: list[int] = []
        for i, block in zip(indices, blocks, strict=True):
            (alone if self._blocks.refs[block] == 1 else shared).append(i)
        leaving = self._resident(who, seq, alone)
        payload = self._store_bytes(session, leaving)
        stamps = tuple(self._stamps[b] for b in leaving)
        handle = EvictHandle(session, tuple(alone), stamps, payload)
        for i in alone:
            seq.table[i] = handle
        self._blocks.release(reversed(leaving))
        self._journal.add(blocks_evicted=len(leaving))
        return EvictReport(alone, shared, handle)

    @locked
    def restore(self, session: SessionHandle, handle: EvictHandle) -> list[int]:
        """Bring back what an eviction detached; returns the blocks it is in now.

        Raises `StaleHandle` if the handle was used or a slot it covers is not the one it detached,
        and `OutOfBlocks`, after which the handle can be used again.
        """
        if not isinstance(handle, EvictHandle):
            raise PoolError(f"restore: got {type(handle).__name__}, need an EvictHandle")
        owner = self._sequences.get(handle.session)
        if handle.spent or owner is None or not owner.covered_by(handle):
            raise StaleHandle(f"restore: got {handle!r}, need one whose slots are as it left them")
        seq = self._idle("restore", session)
        if seq is not owner:
            raise StaleHandle(f"restore: got {session!r}, need {handle.session!r}")
        self._blocks.need("restore", len(handle.indices))
        data = self._fetch_bytes(handle.payload)
        blocks = self._take(len(handle.indices))
        try:
            self._place_bytes(data, blocks)
        except BaseException:
            self._blocks.release(reversed(blocks))
            raise
        for i, block, stamp in zip(handle.indices, blocks, handle.stamps, strict=True):
            seq.table[i] = block
            self._stamps[block] = stamp
        self._spend(handle)
        self._journal.add(blocks_restored=len(blocks))
        return blocks

    def __repr__(self) -> str:
        g = self.geometry
        return (
            f"{type(self).__name__}({g.num_blocks} blocks of {g.block_size} tokens, "
            f"{self.free_blocks()} free, {len(self._sequences)} sessions)"
        )
