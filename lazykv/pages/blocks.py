"""Who holds which block: reference counts, the unused, the cached and the ones a step may touch.

A block is in exactly one state: held (its count is above 0), cached (count 0, indexed by its
tokens, free to be taken), waiting (count 0, but a running step may still read or write it) or
unused.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterable

from lazykv.errors import OutOfBlocks, PoolError, must
from lazykv.ids import FenceId
from lazykv.pages.prefix_index import Digest, Entry, PrefixIndex, sha256


class Blocks:
    """The blocks of one pool. Callers validate; nothing here is undone."""

    def __init__(self, num_blocks: int, digest: Digest = sha256) -> None:
        self.num_blocks = num_blocks
        # As long as the blocks that were ever taken: those after them are unused, and cost nothing.
        self.refs: list[int] = []
        self.index = PrefixIndex(digest)
        # A heap of what was taken and came back. Lowest number first, so that a sequence growing
        # alone gets neighbours.
        self._unused: list[int] = []
        # Oldest first. A chain is released deepest first, so its last block goes first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._fences: set[FenceId] = set()
        self._waiting: dict[int, FenceId] = {}

    @property
    def available(self) -> int:
        """Blocks that `take` can give."""
        return self.num_blocks - len(self.refs) + len(self._unused) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def held(self) -> int:
        """Blocks that are neither unused nor cached."""
        return self.num_blocks - self.available

    def refs_of(self, block: int) -> int:
        """Holders of any block of the pool."""
        return self.refs[block] if block < len(self.refs) else 0

    def need(self, who: str, n: int) -> None:
        """Refuse a call that takes more blocks than there are."""
        if n > self.available:
            raise OutOfBlocks(
                f"{who}: got {self.available} free blocks, need {n}; discard or evict sessions",
                need=n,
                have=self.available,
            )

    def take(self, n: int) -> tuple[list[int], list[Entry]]:
        """n blocks, held once, and the entries that had to leave the index for them."""
        taken: list[int] = []
        gone: list[Entry] = []
        while len(taken) < n:
            if self._unused:
                block = heapq.heappop(self._unused)
            elif len(self.refs) < self.num_blocks:
                block = len(self.refs)
                self.refs.append(0)
            else:
                gone += self._evict_cached()
                continue
            self.refs[block] = 1
            taken.append(block)
        return taken, gone

    def _evict_cached(self) -> list[Entry]:
        """Give up the oldest cached block, or a cached one that its chain leads to."""
        entry = self.index[next(iter(self._cached))]
        while True:
            deeper = next((c for c in entry.children.values() if c.block in self._cached), None)
            if deeper is None:
                break
            entry = deeper
        return self.forget(entry.block)

    def forget(self, block: int) -> list[Entry]:
        """Take a block and what follows it in its chain out of the index."""
        gone = self.index.drop(block)
        for entry in gone:
            if entry.block in self._cached:
                del self._cached[entry.block]
                heapq.heappush(self._unused, entry.block)
        return gone

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each."""
        for block in blocks:
            if not self.refs[block]:
                self._cached.pop(block, None)
                self._waiting.pop(block, None)
            self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each; at 0 a block is cached or unused, or waits for the fences."""
        for block in blocks:
            assert self.refs[block] > 0, "only held blocks are released"
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            if self._fences:
                self._waiting[block] = max(self._fences)
            else:
                self._settle(block)

    def _settle(self, block: int) -> None:
        if block in self.index:
            self._cached[block] = None
        else:
            heapq.heappush(self._unused, block)

    def open_fence(self) -> FenceId:
        """From now on released blocks wait: a step that may touch them is on its way."""
        fence = FenceId()
        self._fences.add(fence)
        return fence

    def close_fence(self, fence: FenceId) -> None:
        """The step is over; blocks that waited for it and for no earlier one are free."""
        if not isinstance(fence, FenceId) or fence not in self._fences:
            raise PoolError(f"close_fence: got {fence!r}, need an open fence of this pool")
        self._fences.discard(fence)
        oldest = min(self._fences, default=None)
        ready = [b for b, last in self._waiting.items() if oldest is None or last < oldest]
        for block in ready:
            del self._waiting[block]
            self._settle(block)

    def clear_index(self) -> int:
        """Forget every indexed block; returns how many there were."""
        n = len(self.index)
        for block in self._cached:
            heapq.heappush(self._unused, block)
        self._cached.clear()
        self.index.clear()
        return n

    def check(self) -> None:
        """Every block is in exactly one state."""
        states = [*self._unused, *self._cached, *self._waiting]
        states += [b for b, n in enumerate(self.refs) if n]
        must(len(self.refs) <= self.num_blocks, "no more blocks were taken than there are")
        must(sorted(states) == list(range(len(self.refs))), "each block has one state")
        must(all(b in self.index for b in self._cached), "cached blocks are indexed")
        must(not any(b in self.index for b in self._unused), "unused blocks are not")
        must(all(n >= 0 for n in self.refs), "no count is negative")
        first = min(self._fences, default=None)
        for last in self._waiting.values():
            must(first is not None and first <= last, "what waits has an open fence to wait for")
        self.index.check()
