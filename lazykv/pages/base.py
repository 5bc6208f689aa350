"""The verbs of a pool's sequences: open, grow, shorten, fork, end.

Every verb validates first and then changes integers only. Where blocks are copied, stored or
brought back, it calls a hook that a pool of bytes fills in, before the integers change.
"""

from collections.abc import Iterable
from typing import SupportsIndex

from lazykv.errors import (
    BadBlockIndex,
    DTypeError,
    PoolError,
    RangeError,
    SessionBusy,
    SessionNotResident,
    UnknownSession,
    must,
)
from lazykv.ids import FenceId, SessionHandle
from lazykv.pages.blocks import Blocks
from lazykv.pages.geometry import KvGeometry
from lazykv.pages.journal import Journal, PoolEvent, PoolStats
from lazykv.pages.prefix_index import Digest, sha256
from lazykv.pages.sequence import EvictHandle, Sequence
from lazykv.pages.shared import Shared, locked
from lazykv.spec import whole


class SequencePool(Shared):
    """Blocks and the tables of the sequences that hold them."""

    def __init__(self, geometry: KvGeometry, *, digest: Digest = sha256) -> None:
        if not isinstance(geometry, KvGeometry):
            raise PoolError(f"pool: got {type(geometry).__name__}, need a KvGeometry")
        super().__init__()
        self.geometry = geometry
        self._blocks = Blocks(geometry.num_blocks, digest)
        self._sequences: dict[SessionHandle, Sequence] = {}
        self._journal = Journal()
        # Which model the bytes are of; a block carries the epoch it was last taken in.
        self._model_key: tuple[object, ...] = ()
        self._epoch = 0
        self._stamps: dict[int, int] = {}

    # Hooks of a pool of bytes

    def _copy_block(self, source: int, dest: int) -> None:
        """Copy a block's bytes in every layer."""

    def _on_taken(self, blocks: Iterable[int]) -> None:
        """Blocks were taken; what they held before is nobody's."""

    def _on_rewound(self, block: int, rows: int) -> None:
        """Rows of a block from `rows` on are nobody's, and are about to be written."""

    def _forget_payload(self, handle: EvictHandle) -> None:
        """A handle was spent: its stored bytes are of no more use. Called once for a handle."""

    def _follow_model(self) -> None:
        """Notice that the model whose bytes these are has changed."""

    # Sequences

    @locked
    def open(self) -> SessionHandle:
        """A new, empty sequence."""
        session = SessionHandle()
        self._sequences[session] = Sequence()
        return session

    @locked
    def append(self, session: SessionHandle, n: SupportsIndex) -> list[int]:
        """Make room for n more tokens; returns the blocks that were taken.

        A shared partial tail is copied first. Raises `OutOfBlocks`, or `SessionNotResident` if the
        partial tail is evicted, with everything as it was.
        """
        seq, tokens = self._fitting("append", session, n)
        return self._grow(seq, tokens)

    @locked
    def check_append(self, who: str, session: SessionHandle, n: SupportsIndex) -> None:
        """Raise what ``append(session, n)`` would raise now."""
        self._fitting(who, session, n)

    @locked
    def append_required(self, session: SessionHandle, n: SupportsIndex) -> int:
        """Blocks that ``append(session, n)`` takes, the copy of a shared tail included."""
        seq = self._find("append_required", session)
        return self._required("append_required", seq, self._count("append_required", "n", n))

    @locked
    def truncate(self, session: SessionHandle, n: SupportsIndex) -> None:
        """Lower a sequence to n tokens and give back the blocks past them; a larger n does nothing.

        Handles that cover a dropped slot become stale.
        """
        seq = self._idle("truncate", session)
        tokens = self._count("truncate", "n", n)
        if tokens < seq.filled:
            self._drop_slots(seq, self.geometry.blocks_for(tokens))
            seq.filled = tokens

    @locked
    def discard(self, session: SessionHandle) -> None:
        """End a sequence. Its blocks are free unless others hold them; its handle is dead."""
        seq = self._find("discard", session)
        self._drop_slots(seq, 0)
        del self._sequences[session]

    @locked
    def fork(self, session: SessionHandle) -> SessionHandle:
        """A sequence that shares every block of this one. Takes none: a shared partial tail is
        copied by whoever appends first."""
        seq = self._idle("fork", session)
        blocks = self._resident("fork", seq, range(len(seq.table)))
        self._blocks.hold(blocks)
        child = SessionHandle()
        copy = self._sequences[child] = Sequence()
        copy.table += blocks
        copy.filled, copy.in_place = seq.filled, seq.in_place
        return child

    @locked
    def cow_break(self, session: SessionHandle, i: SupportsIndex) -> int:
        """Make logical block i the sequence's own, to be written; returns the block it is now."""
        return self._cow_break("cow_break", session, i)

    def _cow_break(self, who: str, session: SessionHandle, i: SupportsIndex) -> int:
        seq = self._idle(who, session)
        index = self._index(who, seq, i)
        (block,) = self._resident(who, seq, [index])
        if self._blocks.refs[block] > 1:
            self._blocks.need(who, 1)
            taken = self._take(1)
            self._copy_to(block, taken[0], taken)
            seq.table[index] = block = taken[0]
        elif block in self._blocks.index:
            self._unindex(block)
        return block

    # Steps

    @locked
    def open_fence(self) -> FenceId:
        """Blocks released from now on are not handed out until `close_fence`: a queued step may
        still touch them."""
        return self._blocks.open_fence()

    @locked
    def close_fence(self, fence: FenceId) -> None:
        self._blocks.close_fence(fence)

    # Counting

    def blocks_required(self, filled: SupportsIndex, n: SupportsIndex) -> int:
        """New blocks for n tokens after `filled` ones."""
        start = self._count("blocks_required", "filled", filled)
        end = start + self._count("blocks_required", "n", n)
        return self.geometry.blocks_for(end) - self.geometry.blocks_for(start)

    def blocks_required_batch(self, pairs: Iterable[tuple[SupportsIndex, SupportsIndex]]) -> int:
        """Of several sequences together, each ``(filled, n)``."""
        given = list(pairs) if isinstance(pairs, Iterable) else [pairs]
        for pair in given:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise DTypeError(f"blocks_required_batch: got {pair!r}, need pairs (filled, n)")
        return sum(self.blocks_required(filled, n) for filled, n in given)

    @locked
    def free_blocks(self) -> int:
        """Unused blocks, and cached ones that nobody holds."""
        return self._blocks.available

    @locked
    def cached_blocks(self) -> int:
        """Blocks that nobody holds and that the prefix index can still give out."""
        return self._blocks.cached

    def capacity(self) -> int:
        """All blocks of the pool."""
        return self.geometry.num_blocks

    @locked
    def session_blocks(self, session: SessionHandle) -> int:
        """Length of the sequence's block table, evicted slots included."""
        return len(self._find("session_blocks", session).table)

    @locked
    def filled_tokens(self, session: SessionHandle) -> int:
        return self._find("filled_tokens", session).filled

    @locked
    def session_block_table(self, session: SessionHandle) -> list[int | None]:
        """Physical blocks in order, None where one is evicted."""
        table = self._find("session_block_table", session).table
        return [None if isinstance(slot, EvictHandle) else slot for slot in table]

    @locked
    def resident_block(self, session: SessionHandle, i: SupportsIndex) -> int | None:
        """The physical block at logical index i, or None if it is evicted."""
        seq = self._find("resident_block", session)
        slot = seq.table[self._index("resident_block", seq, i)]
        return None if isinstance(slot, EvictHandle) else slot

    @locked
    def block_refcount(self, block: SupportsIndex) -> int:
        """Holders of a block: table entries, registered prefixes and open leases."""
        return self._blocks.refs_of(self.geometry.check_block("block_refcount", block))

    @locked
    def kv_bytes_resident(self) -> int:
        """Bytes of the blocks that somebody holds, each counted once."""
        return self._blocks.held * self.geometry.block_bytes

    @property
    @locked
    def stats(self) -> PoolStats:
        return self._journal.stats

    @locked
    def events(self, after: SupportsIndex = 0) -> list[PoolEvent]:
        """Events of the prefix index with a number above `after`, oldest first."""
        return self._journal.events(self._count("events", "after", after))

    # What the verbs share

    def _find(self, who: str, session: SessionHandle) -> Sequence:
        seq = self._sequences.get(session) if isinstance(session, SessionHandle) else None
        if seq is None:
            raise UnknownSession(f"{who}: got {session!r}, need an open session of this pool")
        return seq

    def _idle(self, who: str, session: SessionHandle) -> Sequence:
        """A sequence that no step is running on: its tokens and blocks may change."""
        seq = self._find(who, session)
        if seq.in_step:
            raise SessionBusy(f"{who}: got {session!r} while a step runs on it, need it to end")
        return seq

    def _count(self, who: str, name: str, value: SupportsIndex) -> int:
        n = whole(who, name, value)
        if n < 0:
            raise RangeError(f"{who}: got {name} {n}, need {name} >= 0")
        return n

    def _index(self, who: str, seq: Sequence, i: SupportsIndex) -> int:
        n = whole(who, "block index", i)
        if not 0 <= n < len(seq.table):
            raise BadBlockIndex(f"{who}: got block index {n}, need 0 <= index < {len(seq.table)}")
        return n

    def _resident(self, who: str, seq: Sequence, indices: Iterable[int]) -> list[int]:
        """The physical blocks at logical indices; SessionNotResident if one is evicted."""
        blocks: list[int] = []
        for i in indices:
            slot = seq.table[i]
            if isinstance(slot, EvictHandle):
                raise SessionNotResident(f"{who}: got block index {i} evicted, need it restored")
            blocks.append(slot)
        return blocks

    def _partial_tail(self, who: str, seq: Sequence) -> int | None:
        """The block that the next token goes into, or None if it needs a new one."""
        if seq.filled % self.geometry.block_size == 0:
            return None
        return self._resident(who, seq, [len(seq.table) - 1])[0]

    def _fitting(self, who: str, session: SessionHandle, n: SupportsIndex) -> tuple[Sequence, int]:
        """A session and the tokens that it has room for."""
        seq, tokens = self._idle(who, session), self._count(who, "n", n)
        self._blocks.need(who, self._required(who, seq, tokens))
        return seq, tokens

    def _required(self, who: str, seq: Sequence, tokens: int) -> int:
        """Blocks that the next tokens take; SessionNotResident if they go into an evicted one."""
        tail = self._partial_tail(who, seq) if tokens else None
        copies = tail is not None and self._blocks.refs[tail] > 1
        return self.geometry.blocks_for(seq.filled + tokens) - len(seq.table) + copies

    def _grow(self, seq: Sequence, tokens: int) -> list[int]:
        """Room for tokens that are known to fit; the blocks it took."""
        tail = self._partial_tail("append", seq) if tokens else None
        taken = self._take(self._required("append", seq, tokens))
        fresh = list(taken)
        if tail is not None:
            if self._blocks.refs[tail] > 1:
                shared, tail = tail, fresh.pop(0)
                self._copy_to(shared, tail, taken)
                seq.table[-1] = tail
            elif tail in self._blocks.index:
                # Its tokens are about to be replaced, and nobody else holds it.
                self._unindex(tail)
            self._on_rewound(tail, seq.filled % self.geometry.block_size)
        seq.table += fresh
        seq.filled += tokens
        return taken

    def _take(self, n: int) -> list[int]:
        if not n:
            return []
        self._follow_model()
        taken, gone = self._blocks.take(n)
        self._journal.removed(gone)
        self._journal.add(blocks_taken=n)
        for block in taken:
            self._stamps[block] = self._epoch
        self._on_taken(taken)
        return taken

    def _copy_to(self, source: int, dest: int, taken: list[int]) -> None:
        """Copy a shared block and let go of it; if that fails, `taken` goes back."""
        try:
            self._copy_block(source, dest)
        except BaseException:
            self._blocks.release(reversed(taken))
            raise
        self._stamps[dest] = self._stamps[source]
        self._blocks.release([source])
        self._journal.add(blocks_copied=1)

    def _unindex(self, block: int) -> None:
        self._journal.removed(self._blocks.forget(block))

    def _drop_slots(self, seq: Sequence, keep: int) -> None:
        """Give back the slots from `keep` on, deepest first."""
        for handle in seq.handles(keep):
            if not handle.spent:
                self._spend(handle)
        dropped = seq.table[keep:]
        del seq.table[keep:]
        seq.in_place = seq.in_place_of(keep)
        self._blocks.release(b for b in reversed(dropped) if not isinstance(b, EvictHandle))

    def _spend(self, handle: EvictHandle) -> None:
        handle.spent = True
        self._forget_payload(handle)

    def _holders(self) -> dict[int, int]:
        """Holders of every block, counted anew."""
        counts: dict[int, int] = {}
        for seq in self._sequences.values():
            for slot in seq.table:
                if not isinstance(slot, EvictHandle):
                    counts[slot] = counts.get(slot, 0) + 1
        return counts

    @locked
    def check(self) -> None:
        """Walk every invariant; PoolError names the first that does not hold."""
        self._blocks.check()
        for session, seq in self._sequences.items():
            must(len(seq.table) == self.geometry.blocks_for(seq.filled), "a slot per block")
            for handle in seq.handles():
                must(handle.session == session, "a handle covers slots of its own session")
                there = [i for i, slot in enumerate(seq.table) if slot is handle]
                must(handle.spent or there == sorted(handle.indices), "a good one covers all")
        holders = self._holders()
        for block, count in enumerate(self._blocks.refs):
            must(count == holders.get(block, 0), "a count is the number of holders")
