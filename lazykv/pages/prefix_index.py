"""The index of finished blocks by the tokens they hold, for reuse by later sequences.

A block's key is a SHA-256 over its parent's key and its own tokens, and the key of a chain's first
block covers everything else that the bytes depend on. A key only finds a candidate: its tokens and
its parent are compared before it counts as a hit.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence

from lazykv.errors import must

Digest = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class Entry:
    """One indexed block: its tokens (little-endian i64 bytes), and its place in a chain."""

    __slots__ = ("block", "children", "key", "parent", "seed", "tokens")

    def __init__(
        self, block: int, tokens: bytes, key: bytes, parent: "Entry | None", seed: bytes
    ) -> None:
        self.block = block
        self.tokens = tokens
        self.key = key
        self.parent = parent
        self.seed = seed
        self.children: dict[bytes, Entry] = {}

    def holds(self, tokens: bytes, parent: "Entry | None", seed: bytes) -> bool:
        """Whether this is the block of these tokens behind this parent, whatever the key says."""
        return self.tokens == tokens and self.parent is parent and self.seed == seed


class PrefixIndex:
    """Chains of full blocks. A `seed` names all that keys depend on besides the tokens."""

    def __init__(self, digest: Digest = sha256) -> None:
        self._digest = digest
        self._by_key: dict[bytes, Entry] = {}
        self._by_block: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def __getitem__(self, block: int) -> Entry:
        return self._by_block[block]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_key.values())

    def find(self, chain: Sequence[bytes], seed: bytes) -> list[Entry]:
        """Entries of the longest indexed beginning of a chain of blocks' tokens."""
        found: list[Entry] = []
        parent: Entry | None = None
        for tokens in chain:
            entry = self._by_key.get(self._key(tokens, parent, seed))
            if entry is None or not entry.holds(tokens, parent, seed):
                break
            found.append(entry)
            parent = entry
        return found

    def add(self, block: int, tokens: bytes, parent: Entry | None, seed: bytes) -> Entry | None:
        """Index a block behind its parent; None if another chain has its key or its block.

        Where these tokens are indexed already, the older entry is returned and kept.
        """
        key = self._key(tokens, parent, seed)
        entry = self._by_key.get(key)
        if entry is not None:
            return entry if entry.holds(tokens, parent, seed) else None
        if block in self._by_block:
            return None
        entry = Entry(block, tokens, key, parent, seed)
        self._by_key[key] = self._by_block[block] = entry
        if parent is not None:
            parent.children[key] = entry
        return entry

    def drop(self, block: int) -> list[Entry]:
        """Take a block out, and with it what only its chain leads to; deepest entries first."""
        gone: list[Entry] = []
        todo = [self._by_block[block]]
        while todo:
            entry = todo.pop()
            gone.append(entry)
            todo += entry.children.values()
        gone.reverse()
        top = gone[-1]
        if top.parent is not None:
            del top.parent.children[top.key]
        for entry in gone:
            del self._by_key[entry.key], self._by_block[entry.block]
        return gone

    def clear(self) -> None:
        self._by_key.clear()
        self._by_block.clear()

    def _key(self, tokens: bytes, parent: Entry | None, seed: bytes) -> bytes:
        return self._digest((seed if parent is None else parent.key) + tokens)

    def check(self) -> None:
        """Every entry is found by its key and its block, and its links go both ways."""
        must(len(self._by_key) == len(self._by_block), "an entry for each block, and only one")
        for key, entry in self._by_key.items():
            must(entry.key == key, "an entry lies under its own key")
            must(self._by_block.get(entry.block) is entry, "one entry for a block")
            if entry.parent is not None:
                must(entry.parent.children.get(key) is entry, "a parent knows its children")
                must(self._by_key.get(entry.parent.key) is entry.parent, "no orphans")
            for child in entry.children.values():
                must(child.parent is entry, "a child knows its parent")
