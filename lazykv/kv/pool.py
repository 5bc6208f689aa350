"""DeviceKvPool: a paged pool with its bytes, keys and values of every layer in blocks."""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lazykv import config
from lazykv.backend_call import BackendCall
from lazykv.device import DeviceLike, DeviceLocation, HostArray, device
from lazykv.dtypes import DType, DTypeLike, dtype, to_logical, u32
from lazykv.errors import DTypeError, OutOfMemory, RangeError, ShapeError
from lazykv.ids import KvAllocId, PrefixId, SessionHandle, next_alloc_id
from lazykv.kv.block_moves import BlockMoves, frequencies
from lazykv.kv.block_store import BlockStore, MemoryBlockStore
from lazykv.kv.evicted import EvictedBlocks
from lazykv.kv.layer import KvSlot
from lazykv.kv.rows import as_rows, as_slot, check_layers, write_rows
from lazykv.kv.slots import zeroed
from lazykv.layout import Layout
from lazykv.pages.geometry import KvGeometry
from lazykv.pages.pool import KvBlockPool
from lazykv.pages.prefix_index import Digest, sha256
from lazykv.pages.sequence import EvictHandle
from lazykv.pages.sequence import Sequence as TokenSequence
from lazykv.pages.shared import locked
from lazykv.pages.steps import PoolStep, as_sessions
from lazykv.spec import Shape, Spec, check_size, whole
from lazykv.storage import Storage, as_host_bytes

NO_BLOCK = 2**32 - 1
"""What a block table holds past a sequence's blocks: no block has this number."""

BlockKind = KvSlot


class PageTable(NamedTuple):
    """What paged attention binds: block numbers u32 ``[B, max_blocks]``, padded with `NO_BLOCK`,
    and live tokens u32 ``[B]``."""

    block_table: NDArray[np.uint32]
    context_lens: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class _Stored:
    """Evicted blocks: where their bytes are, and how much of each had been written."""

    keys: tuple[str, ...]
    written: tuple[tuple[int, int], ...]


class DeviceKvPool(KvBlockPool):
    """A `KvBlockPool` with bytes: its verbs move both, so neither can forget the other.

    Per layer, K and V are one zeroed buffer ``[num_blocks, block_size, n_kv_heads, head_dim]`` each
    (position-major), allocated once; `alloc_id` never changes. Evicted blocks go to `store`, host
    memory unless told otherwise.
    """

    def __init__(
        self, geometry: KvGeometry, dtype: DTypeLike, device: DeviceLike = "cpu", *,
        store: BlockStore | None = None, digest: Digest = sha256,
    ) -> None:  # fmt: skip
        self.dtype, where = _dtype(dtype), _device(device).location
        _check_geometry(geometry, self.dtype)
        if store is not None and (isinstance(store, type) or not isinstance(store, BlockStore)):
            raise DTypeError(f"DeviceKvPool: got store {store!r:.80}, need put, get and delete")
        super().__init__(geometry, digest=digest)
        made = zeroed([geometry.shape] * 2, self.dtype, [where] * geometry.n_layers)
        self._location = where
        self._storages = tuple(s for pair in made for s in pair or ())
        self._moves = BlockMoves(self._storages)
        self._alloc_id = next_alloc_id()
        self.store: BlockStore = MemoryBlockStore() if store is None else store
        self._evicted = EvictedBlocks(self.store)
        weakref.finalize(self, self._evicted.close)
        # Of each block: rows that steps have written, and slots (a bit each) written as a whole.
        self._rows_written: defaultdict[int, int] = defaultdict(int)
        self._slots_written: defaultdict[int, int] = defaultdict(int)
        self._all_slots = (1 << len(self._storages)) - 1

    # What a held plan is welded to

    def alloc_id(self) -> KvAllocId:
        return self._alloc_id

    def n_layers(self) -> int:
        return self.geometry.n_layers

    def device_location(self) -> DeviceLocation:
        return self._location

    rebind_location = device_location

    def rebind_slot(self, layer: int, which: int) -> Storage | None:
        return self.slot_storage(layer, which)

    def plan_facts(self) -> dict[str, object]:
        """What a held plan bakes about the pool."""
        g = self.geometry
        return {
            "layers": g.n_layers,
            "blocks": g.num_blocks,
            "block_size": g.block_size,
            "heads": g.n_kv_heads,
            "head_dim": g.head_dim,
            "dtype": str(self.dtype),
        }

    def slot_storage(self, layer: SupportsIndex, slot: SupportsIndex) -> Storage | None:
        """K or V of a layer: what plans bind. None if no layer or slot has that number."""
        i, which = whole("slot_storage", "layer", layer), whole("slot_storage", "slot", slot)
        if not 0 <= i < self.geometry.n_layers or which not in (KvSlot.K, KvSlot.V):
            return None
        return self._storages[2 * i + which]

    @property
    def pool_shape(self) -> Shape:
        """Of every slot: ``[num_blocks, block_size, n_kv_heads, head_dim]``."""
        return self.geometry.shape

    @property
    def pool_shape_flat(self) -> Shape:
        """The same with a row per token: token t of a block is row ``block * block_size + t``."""
        return self.geometry.flat_shape

    def block_write_ranges(self, block: SupportsIndex) -> list[tuple[int, int]]:
        """The ranges of a `write_slice` that replaces one block of a slot."""
        b = self.geometry.check_block("block_write_ranges", block)
        return [(b, b + 1), *((0, extent) for extent in self.geometry.shape[1:])]

    @locked
    def materialize_block_table(
        self, sessions: Iterable[SessionHandle], max_blocks: SupportsIndex | None = None
    ) -> PageTable:
        """Fresh tables of some sessions, padded to `max_blocks` (None: to the longest).

        Raises `SessionNotResident` if a block is evicted, RangeError if a table is longer.
        """
        who = "materialize_block_table"
        seqs = [self._find(who, s) for s in as_sessions(who, sessions)]
        rows = [self._resident(who, seq, range(len(seq.table))) for seq in seqs]
        longest = max(map(len, rows), default=0)
        width = longest if max_blocks is None else self._count(who, "max_blocks", max_blocks)
        if longest > width:
            raise RangeError(f"{who}: got a table of {longest} blocks, need at most {width}")
        table = _empty_table(who, len(rows), width)
        for n, row in enumerate(rows):
            table[n, : len(row)] = row
        return PageTable(table, np.array([seq.filled for seq in seqs], np.uint32))

    # Bytes of single blocks

    @locked
    def write_block_bytes(
        self, layer: SupportsIndex, slot: SupportsIndex, block: SupportsIndex, data: object
    ) -> None:
        """Replace one block of a slot by raw little-endian bytes of ``[block_size, n_kv_heads,
        head_dim]``, row-major.

        Whoever shares the block sees them: `ensure_writable_block` makes a block a session's own. A
        block in the prefix index leaves it.
        """
        who = "write_block_bytes"
        n, b, storage = self._slot_of(who, layer, slot, block)
        raw, want = as_host_bytes(who, data), Spec(self.geometry.shape[1:], self.dtype)
        if raw.nbytes != want.nbytes:
            raise ShapeError(f"{who}: got {raw.nbytes} bytes, need {want.nbytes} for {want}")
        self._write_block(n, b, storage, raw.view(self.dtype.numpy).reshape(want.shape))

    @locked
    def write_block(
        self, layer: SupportsIndex, slot: SupportsIndex, block: SupportsIndex, array: object
    ) -> None:
        """Replace one block of a slot by an array ``[block_size, n_kv_heads, head_dim]`` of the
        pool's dtype; see `write_block_bytes`."""
        n, b, storage = self._slot_of("write_block", layer, slot, block)
        size, *rest = self.geometry.shape[1:]
        rows = as_rows("write_block", "block", array, self.dtype, (), tuple(rest))
        if len(rows) != size:
            raise ShapeError(f"write_block: got {len(rows)} rows, need {size}")
        self._write_block(n, b, storage, rows)

    def _write_block(self, n: int, block: int, storage: Storage, rows: HostArray) -> None:
        storage.check_readable()
        if block in self._blocks.index:
            self._unindex(block)
        self._slots_written[block] &= ~(1 << n)
        write_rows([(storage, rows[None])], block, axis=0)
        self._slots_written[block] |= 1 << n

    @locked
    def read_block(
        self, layer: SupportsIndex, slot: SupportsIndex, block: SupportsIndex
    ) -> HostArray:
        """A fresh copy of one block of a slot: ``[block_size, n_kv_heads, head_dim]``."""
        return self._read_block("read_block", layer, slot, block)

    def _read_block(
        self, who: str, layer: SupportsIndex, slot: SupportsIndex, block: SupportsIndex
    ) -> HostArray:
        _, b, storage = self._slot_of(who, layer, slot, block)
        layout = Layout.contiguous(storage.shape).slice(0, b, 1)
        backend = _device(self._location).backend
        with storage.read() as array, BackendCall(storage.location, "copy_out"):
            rows = backend.copy_out(backend.view(array, self.dtype, layout))
        block_rows: HostArray = to_logical(rows, self.dtype)[0]
        return block_rows

    @locked
    def read_block_bytes(
        self, layer: SupportsIndex, slot: SupportsIndex, block: SupportsIndex
    ) -> bytes:
        """Raw little-endian bytes of one block of a slot; see `write_block_bytes`."""
        return self._read_block("read_block_bytes", layer, slot, block).tobytes()

    @locked
    def ensure_writable_block(self, session: SessionHandle, i: SupportsIndex) -> int:
        """Logical block i as a block of this session alone, copied in every layer if it is shared;
        returns its number."""
        return self._cow_break("ensure_writable_block", session, i)

    def _slot_of(
        self, who: str, layer: SupportsIndex, slot: SupportsIndex, block: SupportsIndex
    ) -> tuple[int, int, Storage]:
        """The storage's position, the block's number and the storage."""
        i, which = whole(who, "layer", layer), as_slot(who, slot)
        if not 0 <= i < self.geometry.n_layers:
            raise RangeError(f"{who}: got layer {i}, need 0 <= layer < {self.geometry.n_layers}")
        n = 2 * i + which
        return n, self.geometry.check_block(who, block), self._storages[n]

    # Moved prefixes

    @locked
    def splice_prefix_shifted(
        self, prefix: PrefixId, dst: SessionHandle, inv_freq: ArrayLike, interleaved: bool = False
    ) -> int:
        """Copy a prefix to the end of dst, its keys rotated on by dst's fill; returns its tokens.

        `inv_freq` ``[head_dim/2]`` are the model's own angles per position, and `interleaved` its
        pairing (see `Rope`): rotations add up, so a key of position p becomes one of p + fill. The
        values are copied. What the blocks have *seen* stays: their tokens attended to the prefix
        alone.
        """
        who = "splice_prefix_shifted"
        freq = frequencies(who, inv_freq, self.dtype, self.geometry.head_dim)
        offset, pairs = self._alloc_shifted(who, prefix, dst)
        try:
            for source, dest in pairs:
                self._moves.shift(source, dest, freq * offset, bool(interleaved))
                self._note_copied(source, dest)
        except BaseException:
            self.truncate(dst, offset)
            raise
        return len(pairs) * self.geometry.block_size

    # What KvBlockPool asks of a pool of bytes

    @locked
    def mark_written(self, session: SessionHandle) -> None:
        """Say that the rows of all tokens of a session are in its blocks: for those who write them
        through graphs of their own. `PagedDecodeSession` does it by itself."""
        self._on_written(self._idle("mark_written", session), 0)

    def _on_written(self, seq: TokenSequence, start: int) -> None:
        size = self.geometry.block_size
        for i in range(start // size, len(seq.table)):
            block = seq.table[i]
            if not isinstance(block, EvictHandle):
                # Others that share the block may have filled more of it.
                rows = min(size, seq.filled - i * size)
                self._rows_written[block] = max(rows, self._rows_written[block])

    def _take(self, n: int) -> list[int]:
        # What is taken is written, so a buffer that a lost writer tore is refused before.
        self._check_whole()
        return super()._take(n)

    def _on_taken(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._rows_written[block] = self._slots_written[block] = 0

    def _on_rewound(self, block: int, rows: int) -> None:
        if self._slots_written[block] == self._all_slots:
            self._rows_written[block] = self.geometry.block_size
        self._rows_written[block] = min(rows, self._rows_written[block])
        self._slots_written[block] = 0

    def _is_realized(self, block: int) -> bool:
        return (
            self._rows_written[block] == self.geometry.block_size
            or self._slots_written[block] == self._all_slots
        )

    def _note_copied(self, source: int, dest: int) -> None:
        self._rows_written[dest] = self._rows_written[source]
        self._slots_written[dest] = self._slots_written[source]

    def _copy_block(self, source: int, dest: int) -> None:
        self._moves.copy(source, dest)
        self._note_copied(source, dest)

    def _store_bytes(self, session: SessionHandle, blocks: list[int]) -> _Stored:
        keys = self._evicted.put(self._moves.read(b).view(np.uint8).data for b in blocks)
        written = tuple((self._rows_written[b], self._slots_written[b]) for b in blocks)
        return _Stored(keys, written)

    def _fetch_bytes(self, payload: _Stored) -> Any:
        shape = (len(self._storages), *self.geometry.shape[1:])
        arrays = []
        for key in payload.keys:
            raw = np.frombuffer(self._evicted.get(key), np.uint8)
            want = Spec(shape, self.dtype)
            if raw.nbytes != want.nbytes:
                raise ShapeError(f"restore: got {raw.nbytes} bytes, need {want.nbytes} for {want}")
            arrays.append(raw.view(self.dtype.numpy).reshape(shape))
        return arrays, payload.written

    def _place_bytes(self, data: Any, blocks: list[int]) -> None:
        for block, array, written in zip(blocks, *data, strict=True):
            self._moves.write(block, array)
            self._rows_written[block], self._slots_written[block] = written

    def _forget_payload(self, handle: EvictHandle) -> None:
        self._evicted.forget(handle.payload.keys)

    def _check_whole(self) -> None:
        for storage in self._storages:
            if storage.torn:
                storage.check_readable()

    def _check_written(self, session: SessionHandle, seq: TokenSequence, blocks: list[int]) -> None:
        """Debug poison: a step reads every row before its own, so all of them must be written."""
        size = self.geometry.block_size
        for i, block in enumerate(blocks):
            live, written = min(size, seq.filled - i * size), self._rows_written[block]
            if written < live and not self._is_realized(block):
                raise RangeError(
                    f"begin_step: got a read of row {i * size + written} of {session!r}, need one "
                    "that was written; use mark_written for rows that came by other ways"
                )

    @locked
    def begin_step(
        self, sessions: Iterable[SessionHandle], n: SupportsIndex, *, owner: object = None
    ) -> PoolStep:
        """Append n tokens to each of several different sessions, all of whose blocks are resident,
        since a step reads them; all of them or none."""
        given = as_sessions("begin_step", sessions)
        for session, seq in [(s, self._find("begin_step", s)) for s in given]:
            blocks = self._resident("begin_step", seq, range(len(seq.table)))
            if config.POISON:
                self._check_written(session, seq, blocks)
        return super().begin_step(given, n, owner=owner)

    def _layout(self) -> tuple[object, ...]:
        return (*super()._layout(), str(self.dtype))


_dtype = dtype
_device = device


def _empty_table(who: str, rows: int, width: int) -> NDArray[np.uint32]:
    want = check_size(who, Spec((rows, width), u32))
    try:
        return np.full(want.shape, NO_BLOCK, np.uint32)
    except MemoryError as e:
        raise OutOfMemory(f"{who}: got no memory for {want.nbytes} bytes") from e


def _check_geometry(geometry: object, dt: DType) -> None:
    """Before anything is made for every block. What is no geometry is refused by the base."""
    if not isinstance(geometry, KvGeometry):
        return
    if dt.itemsize != geometry.elem_size:
        raise DTypeError(
            f"DeviceKvPool: got {dt} for elem_size {geometry.elem_size}, need elements of "
            f"{dt.itemsize} bytes"
        )
    if geometry.num_blocks >= NO_BLOCK:
        raise RangeError(f"DeviceKvPool: got {geometry.num_blocks} blocks, need < {NO_BLOCK}")
    check_layers("DeviceKvPool", geometry.n_layers)
