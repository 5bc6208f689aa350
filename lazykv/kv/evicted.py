"""The stored blocks of one pool: keys of its own in a store that others may use too."""

import uuid
from collections.abc import Iterable, Mapping, Sequence

from lazykv.kv.block_store import BlockStore
from lazykv.kv.envelope import BytesLike, open_sealed, seal


def store_all(store: BlockStore, items: Mapping[str, BytesLike]) -> None:
    """Put every item, or none: after a failure those already put are deleted.

    The failure is raised as it came; what goes wrong while deleting is added to it as notes.
    """
    stored: list[str] = []
    try:
        for key, data in items.items():
            store.put(key, data)
            stored.append(key)
    except BaseException as error:
        for key in stored:
            try:
                store.delete(key)
            except Exception as failure:
                error.add_note(f"store_all: block {key!r} stays in the store: {failure}")
        raise


class EvictedBlocks:
    """What a pool has put into its store and not yet deleted.

    Keys are unique everywhere, since pools of other processes may use the same store. What the
    store cannot delete when told to is tried again later.
    """

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._name = f"pool-{uuid.uuid4().hex}"
        self._count = 0
        self._held: dict[str, None] = {}
        self._doomed: list[str] = []

    def put(self, payloads: Iterable[BytesLike]) -> tuple[str, ...]:
        """Store blocks, all or none; returns their keys."""
        self._delete_doomed()
        sealed = {}
        for payload in payloads:
            key = f"{self._name}-{self._count}"
            self._count += 1
            sealed[key] = seal(payload, key)
        try:
            store_all(self._store, sealed)
        except BaseException:
            self._doomed += sealed  # those that could not be deleted again at once
            raise
        self._held |= dict.fromkeys(sealed)
        return tuple(sealed)

    def get(self, key: str) -> memoryview:
        """The bytes of a block, once they are known to be whole."""
        return open_sealed(self._store.get(key), key)

    def forget(self, keys: Sequence[str]) -> None:
        """Delete blocks of no more use; forgetting one twice is fine."""
        self._doomed += [key for key in keys if key in self._held]
        for key in keys:
            self._held.pop(key, None)
        self._delete_doomed()

    def close(self) -> None:
        """Delete everything."""
        self.forget(list(self._held))

    def _delete_doomed(self) -> None:
        waiting, self._doomed = self._doomed, []
        for key in waiting:
            try:
                self._store.delete(key)
            except Exception:
                self._doomed.append(key)
