"""How sequences share blocks: by range, by registered prefix, and by the tokens they hold."""

import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import SupportsIndex, TypeAlias

from lazykv.errors import (
    BadSpliceRange,
    DTypeError,
    OffsetNotBlockAligned,
    PoolError,
    PrefixNotFullyFilled,
    PrefixTargetNotEmpty,
    StaleHandle,
    UnknownPrefix,
    must,
)
from lazykv.ids import PrefixId, SessionHandle
from lazykv.pages.base import SequencePool
from lazykv.pages.geometry import KvGeometry
from lazykv.pages.prefix_index import Digest, Entry, sha256
from lazykv.pages.sequence import ALL_BLOCKS, EvictHandle, PrefixLease, Sequence
from lazykv.pages.shared import locked
from lazykv.spec import not_plain, whole

ModelKey: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Blocks that a registered prefix holds, the epoch of the model that wrote them, and how many
    of them are `in_place` (see `Sequence`)."""

    blocks: tuple[int, ...]
    epoch: int
    in_place: int


class SharingPool(SequencePool):
    """Splices, registered prefixes and the automatic prefix index."""

    def __init__(self, geometry: KvGeometry, *, digest: Digest = sha256) -> None:
        super().__init__(geometry, digest=digest)
        self._prefixes: dict[PrefixId, _Prefix] = {}
        self._pins: dict[int, int] = {}
        self._model: Callable[[], ModelKey] | None = None

    # Splices

    @locked
    def splice(
        self, src: SessionHandle, dst: SessionHandle, from_: SupportsIndex, to: SupportsIndex
    ) -> int:
        """Share blocks ``from_..to`` of src at the end of dst; returns the tokens they hold.

        dst's fill must be a whole number of blocks. The keys keep the positions they were rotated
        for; `alloc_shifted_prefix_slots` is the way to move them.
        """
        source, target = self._idle("splice", src), self._idle("splice", dst)
        first, last = whole("splice", "from_", from_), whole("splice", "to", to)
        if not 0 <= first <= last <= len(source.table):
            raise BadSpliceRange(
                f"splice: got blocks {first}..{last}, need a range within 0..{len(source.table)}"
            )
        self._check_aligned("splice", target)
        blocks = self._resident("splice", source, range(first, last))
        size = self.geometry.block_size
        tokens = min(last * size, source.filled) - first * size if blocks else 0
        if source.table[:first] == target.table:
            in_place = source.in_place_of(last)
        else:
            in_place = len(target.table) if blocks else ALL_BLOCKS
        return self._share(blocks, target, tokens, in_place)

    @locked
    def splice_prefix(self, src: SessionHandle, dst: SessionHandle, k: SupportsIndex) -> int:
        """Share the first k blocks of src, all full, with the empty dst; returns their tokens."""
        target = self._idle("splice_prefix", dst)
        source, blocks = self._full_blocks("splice_prefix", src, k)
        self._check_empty("splice_prefix", target)
        tokens = len(blocks) * self.geometry.block_size
        return self._share(blocks, target, tokens, source.in_place_of(len(blocks)))

    # Registered prefixes

    @locked
    def register_prefix(self, session: SessionHandle, k: SupportsIndex) -> PrefixId:
        """Hold the first k blocks of a session, all full, under a name of their own."""
        source, blocks = self._full_blocks("register_prefix", session, k)
        if not blocks:
            raise PrefixNotFullyFilled("register_prefix: got 0 blocks, need at least one")
        prefix = PrefixId()
        self._blocks.hold(blocks)
        epoch = min(self._stamps[b] for b in blocks)
        self._prefixes[prefix] = _Prefix(tuple(blocks), epoch, source.in_place_of(len(blocks)))
        return prefix

    @locked
    def release_prefix(self, prefix: PrefixId) -> None:
        """Let go of a prefix; sequences that share its blocks keep them."""
        found = self._find_prefix("release_prefix", prefix)
        del self._prefixes[prefix]
        self._blocks.release(reversed(found.blocks))

    @locked
    def splice_prefix_from(self, prefix: PrefixId, dst: SessionHandle) -> int:
        """Share a prefix with the empty dst; returns its tokens."""
        found = self._find_prefix("splice_prefix_from", prefix)
        target = self._idle("splice_prefix_from", dst)
        self._check_epoch("splice_prefix_from", "prefix", found.epoch)
        self._check_empty("splice_prefix_from", target)
        return self._share(list(found.blocks), target, self._tokens_of(found), found.in_place)

    @locked
    def alloc_shifted_prefix_slots(
        self, prefix: PrefixId, dst: SessionHandle
    ) -> tuple[int, list[tuple[int, int]]]:
        """Take blocks at the end of dst for a prefix whose keys are to be rotated to there.

        Returns dst's fill before, which is how many positions the keys move, and pairs of physical
        blocks (of the prefix, of dst). dst's fill must be a whole number of blocks. The bytes are
        the caller's to fill in; `DeviceKvPool.splice_prefix_shifted` does both.
        """
        return self._alloc_shifted("alloc_shifted_prefix_slots", prefix, dst)

    def _alloc_shifted(
        self, who: str, prefix: PrefixId, dst: SessionHandle
    ) -> tuple[int, list[tuple[int, int]]]:
        found, target = self._find_prefix(who, prefix), self._idle(who, dst)
        self._check_epoch(who, "prefix", found.epoch)
        self._check_aligned(who, target)
        self._blocks.need(who, len(found.blocks))
        taken, offset = self._take(len(found.blocks)), target.filled
        in_place = len(target.table) if offset else found.in_place
        target.in_place = min(target.in_place, in_place)
        target.table += taken
        target.filled += self._tokens_of(found)
        return offset, list(zip(found.blocks, taken, strict=True))

    # The automatic index

    @locked
    def use_model(self, model: ModelKey | Callable[[], ModelKey]) -> None:
        """Name the model that computes the bytes from now on; another one empties the index.

        A key is a tuple of plain values, the model's identity and its weights epoch among them, so
        bytes of old weights are never found. A function is asked for the present key whenever it
        matters, so that the pool notices new weights by itself. Blocks that were taken before are
        not published any more; prefixes and leases of them are stale.
        """
        self._see_key(model() if callable(model) else model)
        self._model = model if callable(model) else None

    @locked
    def follow_model(self, model: Callable[[], ModelKey]) -> None:
        """`use_model` of a function, but a pool that follows another one is refused with PoolError:
        two models in turns would find each other's rows between their calls."""
        if self._model is not None and self._model != model:
            raise PoolError(
                f"{self!r}: got a second model, need a pool for each; use_model hands a pool over"
            )
        self.use_model(model)

    @locked
    def note_model(self, key: ModelKey) -> None:
        """Say whose bytes the coming step computes. PoolError if the pool follows another model."""
        self._follow_model()
        if self._model is not None and repr(key) != repr(self._model_key):
            raise PoolError(
                f"step: got rows of model {key!r} in a pool of {self._model_key!r}, need a pool "
                "for each"
            )
        if self._model_key == () and not len(self._blocks.index):
            # What was written so far is taken to be of the first model that is named.
            self._see_key(key, same_epoch=True)
        else:
            self._see_key(key)

    def _follow_model(self) -> None:
        if self._model is not None:
            self._see_key(self._model())

    def _see_key(self, key: ModelKey, *, same_epoch: bool = False) -> None:
        if not isinstance(key, tuple):
            raise DTypeError(f"use_model: got {type(key).__name__}, need a tuple")
        if key is self._model_key:
            return
        # Keys are told apart by their repr, which of plain values is all there is to them.
        if found := not_plain(key):
            raise DTypeError(f"use_model: got {found} in the key, need plain values only")
        if repr(key) != repr(self._model_key) and not same_epoch:
            self._epoch += 1
            if self._blocks.clear_index():
                self._journal.cleared()
        self._model_key = key

    @locked
    def publish(
        self, session: SessionHandle, token_ids: Iterable[SupportsIndex], *, salt: bytes = b""
    ) -> int:
        """Index the full blocks of a session by the tokens they hold; returns how many that are.

        `token_ids` are the session's tokens from its start; those past its fill are ignored. What
        ends the chain: blocks whose bytes are not there yet, that are evicted, that another model
        wrote, that were spliced in from elsewhere, or that are indexed with other tokens before
        them or with another salt. Only a lookup with the same salt finds them.
        """
        seq, chain = self._idle("publish", session), self._chain("publish", token_ids)
        self._follow_model()
        seed = self._seed("publish", salt)
        blocks = self._publishable(seq, len(chain))
        self._check_same_tokens(blocks, chain)
        parent: Entry | None = None
        for n, block in enumerate(blocks):
            known = block in self._blocks.index
            entry = self._blocks.index.add(block, chain[n], parent, seed)
            if entry is None:
                return n
            if not known and entry.block == block:
                self._journal.stored(entry)
            parent = entry
        return len(blocks)

    @locked
    def lookup(self, token_ids: Iterable[SupportsIndex], *, salt: bytes = b"") -> PrefixLease:
        """The longest indexed beginning of these tokens, in whole blocks, pinned for the caller."""
        chain = self._chain("lookup", token_ids)
        self._follow_model()
        seed = self._seed("lookup", salt)
        blocks = tuple(e.block for e in self._blocks.index.find(chain, seed))
        size = self.geometry.block_size
        self._blocks.hold(blocks)
        for block in blocks:
            self._pins[block] = self._pins.get(block, 0) + 1
        found = len(blocks) * size
        self._journal.add(lookups=1, tokens_asked=len(chain) * size, tokens_found=found)
        return PrefixLease(self, blocks, found, self._epoch)

    @locked
    def splice_lease(self, lease: PrefixLease, dst: SessionHandle) -> int:
        """Share a lease's blocks with the empty dst; returns its tokens. The lease stays open."""
        target = self._idle("splice_lease", dst)
        self._check_lease("splice_lease", lease)
        self._check_epoch("splice_lease", "lease", lease.epoch)
        self._check_empty("splice_lease", target)
        return self._share(list(lease.blocks), target, lease.tokens, ALL_BLOCKS)

    @locked
    def release_lease(self, lease: PrefixLease) -> None:
        """Unpin a lease's blocks, once."""
        self._check_lease("release_lease", lease)
        lease.is_open = False
        self._blocks.release(reversed(lease.blocks))
        for block in lease.blocks:
            self._pins[block] -= 1
            if not self._pins[block]:
                del self._pins[block]

    # What the verbs share

    def _is_realized(self, block: int) -> bool:
        """Whether all bytes of a full block are in it; a pool of bytes knows."""
        return True

    def _publishable(self, seq: Sequence, most: int) -> list[int]:
        """The leading full blocks that may enter the index."""
        blocks: list[int] = []
        for slot in seq.table[: min(most, seq.filled // self.geometry.block_size, seq.in_place)]:
            if isinstance(slot, EvictHandle) or self._stamps[slot] != self._epoch:
                break
            if not self._is_realized(slot):
                break
            blocks.append(slot)
        return blocks

    def _check_same_tokens(self, blocks: list[int], chain: list[bytes]) -> None:
        for n, block in enumerate(blocks):
            if block in self._blocks.index and self._blocks.index[block].tokens != chain[n]:
                raise PoolError(
                    f"publish: got other tokens for block index {n} than it is published with, "
                    "need the tokens whose keys and values it holds"
                )

    def _chain(self, who: str, token_ids: Iterable[SupportsIndex]) -> list[bytes]:
        """Tokens as the bytes of each full block."""
        if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Iterable):
            raise DTypeError(f"{who}: got {type(token_ids).__name__}, need token ids")
        data, width = _packed(who, list(token_ids)), 8 * self.geometry.block_size
        return [data[at : at + width] for at in range(0, len(data) - width + 1, width)]

    def _seed(self, who: str, salt: bytes) -> bytes:
        """Everything a key depends on besides tokens: model, layout and the caller's salt."""
        if not isinstance(salt, bytes):
            raise DTypeError(f"{who}: got salt {type(salt).__name__}, need bytes")
        return repr((self._layout(), self._model_key, salt)).encode()

    def _layout(self) -> tuple[object, ...]:
        """What fixes how a block's bytes are laid out."""
        g = self.geometry
        return (g.n_layers, g.block_size, g.n_kv_heads, g.head_dim, g.elem_size)

    def _share(self, blocks: list[int], target: Sequence, tokens: int, in_place: int) -> int:
        self._blocks.hold(blocks)
        target.table += blocks
        target.filled += tokens
        target.in_place = min(target.in_place, in_place)
        return tokens

    def _full_blocks(
        self, who: str, session: SessionHandle, k: SupportsIndex
    ) -> tuple[Sequence, list[int]]:
        """A session and its first k blocks, all of them full and resident."""
        seq, n = self._idle(who, session), self._count(who, "k", k)
        if n * self.geometry.block_size > seq.filled:
            raise PrefixNotFullyFilled(
                f"{who}: got {n} blocks of a session of {seq.filled} tokens, need them full"
            )
        return seq, self._resident(who, seq, range(n))

    def _find_prefix(self, who: str, prefix: PrefixId) -> _Prefix:
        found = self._prefixes.get(prefix) if isinstance(prefix, PrefixId) else None
        if found is None:
            raise UnknownPrefix(f"{who}: got {prefix!r}, need a registered prefix of this pool")
        return found

    def _check_lease(self, who: str, lease: PrefixLease) -> None:
        if not isinstance(lease, PrefixLease) or lease.pool is not self or not lease.is_open:
            raise StaleHandle(f"{who}: got {lease!r}, need an open lease of this pool")

    def _tokens_of(self, prefix: _Prefix) -> int:
        return len(prefix.blocks) * self.geometry.block_size

    def _check_epoch(self, who: str, what: str, epoch: int) -> None:
        self._follow_model()
        if epoch != self._epoch:
            raise StaleHandle(
                f"{who}: got a {what} whose bytes are of another model or of other weights, need "
                "one of the present model"
            )

    def _check_empty(self, who: str, target: Sequence) -> None:
        if target.filled:
            raise PrefixTargetNotEmpty(
                f"{who}: got a session of {target.filled} tokens, need an empty one"
            )

    def _check_aligned(self, who: str, target: Sequence) -> None:
        if target.filled % self.geometry.block_size:
            raise OffsetNotBlockAligned(
                f"{who}: got a session of {target.filled} tokens, need a multiple of the block "
                f"size {self.geometry.block_size}"
            )

    @locked
    def check(self) -> None:
        super().check()
        for entry in self._blocks.index:
            must(self._is_realized(entry.block), "what is indexed has its bytes")

    def _holders(self) -> dict[int, int]:
        counts = super()._holders()
        for block in (b for p in self._prefixes.values() for b in p.blocks):
            counts[block] = counts.get(block, 0) + 1
        for block, n in self._pins.items():
            counts[block] = counts.get(block, 0) + n
        return counts


def _packed(who: str, tokens: list[SupportsIndex]) -> bytes:
    """Token ids as little-endian i64: whole, so that no two of them share a key."""
    if bool not in map(type, tokens):
        with suppress(struct.error, TypeError):
            return struct.pack(f"<{len(tokens)}q", *tokens)
    for t in tokens:
        if not -(2**63) <= whole(who, "token", t) < 2**63:
            raise DTypeError(f"{who}: got token {t}, need one that an i64 holds")
    raise AssertionError("what cannot be packed is no whole number or too large")
