"""The rows of one request in the pool: found, appended, evicted, restored, dropped."""

from collections.abc import Sequence

from lazykv.errors import StaleHandle
from lazykv.ids import SessionHandle
from lazykv.kv.pool import DeviceKvPool
from lazykv.pages.sequence import EvictHandle, PrefixLease


class Rows:
    """What a request has in a pool; nothing before `begin` and after `drop`.

    With `indexed`, rows come from and go to the pool's prefix index, under `salt`.
    """

    def __init__(self, pool: DeviceKvPool, salt: bytes, indexed: bool) -> None:
        self._pool = pool
        self._salt = salt
        self._indexed = indexed
        self._session: SessionHandle | None = None
        self._evicted: list[EvictHandle] = []
        self._lease: PrefixLease | None = None
        self._published = 0

    @property
    def there(self) -> bool:
        """Whether there are any to go on from; if not, every token is to be computed."""
        return self._session is not None

    @property
    def session(self) -> SessionHandle:
        assert self._session is not None, "a request that runs has begun"
        return self._session

    @property
    def filled(self) -> int:
        """Tokens with a row, evicted ones included."""
        return 0 if self._session is None else self._pool.filled_tokens(self._session)

    @property
    def held(self) -> int:
        """Blocks in the pool, shared ones included."""
        if self._session is None:
            return 0
        return sum(b is not None for b in self._pool.session_block_table(self._session))

    @property
    def missing(self) -> int:
        """Blocks that `restore` takes."""
        return sum(len(handle.indices) for handle in self._evicted)

    def needed(self, n: int) -> int:
        """Blocks to take before n more tokens have their rows."""
        if self._session is None:
            return self._pool.blocks_required(0, n)
        if self._evicted:
            return self.missing + self._pool.blocks_required(self.filled, n)
        return self._pool.append_required(self._session, n)

    def begin(self, tokens: Sequence[int]) -> int:
        """Open a session with the longest indexed beginning of `tokens`; returns its length.

        At least the last token is left to compute, for its logits. If its row is in a shared block
        that block stays pinned until `unpin`, so that the next append copies it instead of taking
        it out of the index.
        """
        self._session = self._pool.open()
        self._published = 0
        if not self._indexed:
            return 0
        self._lease = lease = self._pool.lookup(tokens, salt=self._salt)
        try:
            found = min(lease.splice_into(self.session), len(tokens) - 1)
        except StaleHandle:  # new weights since the lookup: a miss
            self.unpin()
            return 0
        self._pool.truncate(self.session, found)
        if found % self._pool.geometry.block_size == 0:
            self.unpin()
        return found

    def unpin(self) -> bool:
        """Let go of what `begin` pinned; whether there was anything."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
        return lease is not None

    def publish(self, tokens: Sequence[int]) -> None:
        """Index the full blocks of the session, which holds the first of `tokens`."""
        full = self.filled // self._pool.geometry.block_size
        if self._indexed and full > self._published:
            self._pool.publish(self.session, tokens[: self.filled], salt=self._salt)
            self._published = full

    def evict(self) -> int:
        """Store and free the blocks that nobody else holds; returns how many. May be called again
        when others have let go of theirs."""
        self.unpin()
        report = self._pool.evict(self.session)
        if report.freed:
            self._evicted.append(report.handle)
        return len(report.freed)

    def restore(self) -> None:
        """Bring back everything evicted. After a failure the rest is still evicted."""
        while self._evicted:
            self._pool.restore(self.session, self._evicted[-1])
            self._evicted.pop()

    def drop(self) -> None:
        """End the session: its blocks are free, its stored bytes gone."""
        self.unpin()
        if self._session is not None:
            self._pool.discard(self._session)
        self._session = None
        self._evicted.clear()
