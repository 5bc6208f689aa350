"""A paged pool in plain lists, to compare the real one with.

Nothing is kept that can be counted: holders and free blocks are worked out anew from the lists
whenever they are asked for.

A *cell* is a number that stands for the bytes of one token: they depend on the model that computed
them, on all that it read before, and on the token (`PoolModel.cell`).
"""

from collections import Counter
from typing import Any

Key = tuple[bytes, tuple[int, ...]]
"""What a block is indexed by: a salt, and all tokens from the start to the block's end."""


class Block:
    """One block in use, its number and which `use_model` it was taken after."""

    def __init__(self, number: int, epoch: int) -> None:
        self.number = number
        self.epoch = epoch


class Stored:
    """Evicted blocks of a session; stands in its table in their place."""

    def __init__(self, owner: "Session", indices: list[int], epochs: list[int]) -> None:
        self.owner = owner
        self.indices = indices
        self.epochs = epochs
        self.handle: Any = None
        self.gone = False


class Session:
    """`foreign`: the first block that came from another place of another sequence. `edited`: the
    first token that was rewritten. `start`: tokens before the running step."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.table: list[Block | Stored] = []
        self.cells: list[int] = []
        self.foreign: int | None = None
        self.edited: int | None = None
        self.start: int | None = None

    @property
    def evicted(self) -> bool:
        return any(isinstance(slot, Stored) for slot in self.table)


class Shared:
    """Blocks held by a registered prefix or a lease."""

    def __init__(self, real: Any, blocks: list[Block], cells: list[int], epoch: int) -> None:
        self.real = real
        self.blocks = blocks
        self.cells = cells
        self.epoch = epoch
        self.foreign: int | None = None
        self.edited: int | None = None


def first(*places: int | None) -> int | None:
    return min((p for p in places if p is not None), default=None)


class PoolModel:
    """Callers ask `required` and `available` first; nothing here refuses."""

    def __init__(self, capacity: int, size: int) -> None:
        self.capacity, self.size = capacity, size
        self.sessions: list[Session] = []
        self.prefixes: list[Shared] = []
        self.leases: list[Shared] = []
        self.fences: list[Any] = []
        self.cached: list[Block] = []  # nobody's, but indexed; oldest first
        self.waiting: list[tuple[Block, list[Any]]] = []  # nobody's; with the fences they wait for
        self.index: dict[Key, Block] = {}
        self.model, self.epoch = 0, 0
        self.counts: Counter[str] = Counter()
        self._cells: dict[Any, int] = {}
        self.token_of: list[int] = []

    # Bytes

    def cell(self, before: list[int], token: int, *moved: int) -> int:
        """The bytes of a token behind others; `moved` names what they were rotated from."""
        key = (self.model, tuple(before), token, moved)
        if key not in self._cells:
            self._cells[key] = len(self.token_of)
            self.token_of.append(token)
        return self._cells[key]

    def cells_of(self, tokens: list[int], before: list[int] | None = None) -> list[int]:
        """What a model computes for tokens behind others."""
        known = list(before or [])
        for token in tokens:
            known.append(self.cell(known, token))
        return known[len(before or []) :]

    def tokens(self, cells: list[int]) -> list[int]:
        return [self.token_of[c] for c in cells]

    # Counting

    def blocks_for(self, tokens: int) -> int:
        return (tokens + self.size - 1) // self.size

    def tables(self) -> list[list[Any]]:
        return [s.table for s in self.sessions] + [p.blocks for p in self.prefixes + self.leases]

    def holders(self, block: Block) -> int:
        return sum(table.count(block) for table in self.tables())

    def held(self) -> list[Block]:
        slots = [slot for table in self.tables() for slot in table]
        return list(dict.fromkeys(slot for slot in slots if isinstance(slot, Block)))

    def unused(self, taken: list[Block]) -> list[int]:
        busy = self.held() + self.cached + [b for b, _ in self.waiting] + taken
        return [n for n in range(self.capacity) if n not in {b.number for b in busy}]

    def available(self) -> int:
        return len(self.unused([])) + len(self.cached)

    def tail(self, s: Session) -> Block | Stored | None:
        return s.table[-1] if len(s.cells) % self.size else None

    def required(self, sessions: list[Session], n: int) -> int:
        """Blocks that n more tokens of each take, one session after the other."""
        need, left = 0, []
        for s in sessions if n else []:
            tail = self.tail(s)
            if isinstance(tail, Block) and self.holders(tail) - left.count(tail) > 1:
                need += 1
                left.append(tail)
            need += self.blocks_for(len(s.cells) + n) - len(s.table)
        return need

    # Blocks come and go

    def take(self, n: int) -> list[Block]:
        """The lowest unused numbers, and cached blocks when there are no others."""
        taken: list[Block] = []
        for _ in range(n):
            if not self.unused(taken):
                self.evict_cached()
            taken.append(Block(min(self.unused(taken)), self.epoch))
        self.counts["blocks_taken"] += n
        return taken

    def evict_cached(self) -> None:
        """The oldest goes, but what its chain leads to goes before it."""
        key = self.key_of(self.cached[0])
        while True:
            longer = [k for k, b in self.index.items() if k[1][: -self.size] == key[1]
                      and k[0] == key[0] and b in self.cached]  # fmt: skip
            if not longer:
                return self.forget(key)
            key = longer[0]

    def key_of(self, block: Block) -> Key:
        return next(k for k, b in self.index.items() if b is block)

    def forget(self, key: Key) -> None:
        """A chain leaves the index from a block on."""
        for k in list(self.index):
            if k[0] == key[0] and k[1][: len(key[1])] == key[1]:
                block = self.index.pop(k)
                if block in self.cached:
                    self.cached.remove(block)

    def rewrite(self, block: Block) -> None:
        """A block is about to hold other tokens."""
        if block in self.index.values():
            self.forget(self.key_of(block))

    def hold(self, blocks: list[Block]) -> list[Block]:
        self.cached = [b for b in self.cached if b not in blocks]
        self.waiting = [(b, f) for b, f in self.waiting if b not in blocks]
        return blocks

    def let_go(self, blocks: list[Any]) -> None:
        """Blocks have left a table; the first of them are let go of last."""
        for block in reversed(list(dict.fromkeys(b for b in blocks if isinstance(b, Block)))):
            if self.holders(block):
                continue
            if self.fences:
                self.waiting.append((block, list(self.fences)))
            else:
                self.settle(block)

    def settle(self, block: Block) -> None:
        if block in self.index.values():
            self.cached.append(block)

    def close_fence(self, fence: Any) -> None:
        self.fences.remove(fence)
        ready = [b for b, fences in self.waiting if not any(f in self.fences for f in fences)]
        self.waiting = [(b, fences) for b, fences in self.waiting if b not in ready]
        for block in ready:
            self.settle(block)

    # Sessions

    def grow(self, s: Session, tokens: list[int]) -> list[Block]:
        tail = self.tail(s) if tokens else None
        taken = self.take(self.required([s], len(tokens)))
        fresh = list(taken)
        if isinstance(tail, Block) and self.holders(tail) > 1:
            s.table[-1] = self.copied(tail, fresh.pop(0))
        elif isinstance(tail, Block):
            self.rewrite(tail)
        s.table += fresh
        s.cells += self.cells_of(tokens, s.cells)
        return taken

    def copied(self, source: Block, dest: Block) -> Block:
        self.counts["blocks_copied"] += 1
        dest.epoch = source.epoch
        return dest

    def truncate(self, s: Session, n: int) -> None:
        keep = self.blocks_for(n)
        dropped = s.table[keep:]
        del s.table[keep:], s.cells[n:]
        for slot in dropped:
            if isinstance(slot, Stored):
                slot.gone = True
        self.let_go(dropped)
        s.foreign = None if s.foreign is not None and s.foreign >= keep else s.foreign
        s.edited = None if s.edited is not None and s.edited >= n - 1 else s.edited

    def share(self, s: Session, blocks: list[Block], cells: list[int], foreign: int | None,
              edited: int | None) -> None:  # fmt: skip
        """Blocks go to the end of a session; the places are places of the session."""
        self.hold(blocks)
        s.table += blocks
        s.cells += cells
        s.foreign, s.edited = first(s.foreign, foreign), first(s.edited, edited)

    def prefix_marks(self, source: Session | Shared, k: int) -> tuple[int | None, int | None]:
        """`foreign` and `edited` of a sequence that begins with k blocks of another."""
        foreign, edited = source.foreign, source.edited
        return (
            None if foreign is None or foreign >= k else foreign,
            None if edited is None or edited >= k * self.size else edited,
        )

    def evict(self, s: Session, indices: list[int]) -> tuple[list[int], list[int], Stored]:
        freed = [i for i in indices if self.holders(s.table[i]) == 1]
        blocks = [s.table[i] for i in freed]
        stored = Stored(s, freed, [b.epoch for b in blocks])
        for i in freed:
            s.table[i] = stored
        self.let_go(blocks)
        self.counts["blocks_evicted"] += len(freed)
        return freed, [i for i in indices if i not in freed], stored

    def restore(self, stored: Stored) -> list[Block]:
        blocks = self.take(len(stored.indices))
        for i, block, epoch in zip(stored.indices, blocks, stored.epochs, strict=True):
            stored.owner.table[i] = block
            block.epoch = epoch
        stored.gone = True
        self.counts["blocks_restored"] += len(blocks)
        return blocks

    # The index

    def publish(self, s: Session, tokens: list[int], salt: bytes, unready: set[int]) -> int:
        for i in range(min(len(tokens), len(s.cells)) // self.size):
            slot = s.table[i]
            if i == s.foreign or isinstance(slot, Stored) or slot.number in unready:
                return i
            if slot.epoch != self.epoch:
                return i
            key = salt, tuple(tokens[: (i + 1) * self.size])
            if key not in self.index:
                if slot in self.index.values():
                    return i
                self.index[key] = slot
        return min(len(tokens), len(s.cells)) // self.size

    def lookup(self, tokens: list[int], salt: bytes) -> list[Block]:
        found: list[Block] = []
        for end in range(self.size, len(tokens) + 1, self.size):
            if (salt, tuple(tokens[:end])) not in self.index:
                break
            found.append(self.index[salt, tuple(tokens[:end])])
        self.counts["lookups"] += 1
        self.counts["tokens_asked"] += len(tokens) // self.size * self.size
        self.counts["tokens_found"] += len(found) * self.size
        return self.hold(found)

    def use_model(self, model: int) -> None:
        if model != self.model:
            self.model, self.epoch = model, self.epoch + 1
            self.index.clear()
            self.cached.clear()
