"""A paged pool with its bytes as plain values, and rows that say where they belong.

Row n of layer i, slot s holds the number ``32 * (2 * i + s) + n - 64`` in all its elements, which
every dtype of these tests holds exactly for n below 32 and two layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
from kv_state import raw_bytes

import lazykv as lk
from lazykv.compiler.plan import Plan


def make_pool(
    blocks: int = 6, size: int = 4, *, layers: int = 2, heads: int = 2, dim: int = 4,
    dtype: str = "f32", place: str = "cpu", **options: Any,
) -> lk.DeviceKvPool:  # fmt: skip
    geometry = lk.KvGeometry(layers, blocks, size, heads, dim, lk.dtype(dtype).itemsize)
    return lk.DeviceKvPool(geometry, dtype, place, **options)


def random_bytes(seed: int, n: int) -> bytes:
    return np.random.default_rng(seed).bytes(n)


def slots(pool: lk.DeviceKvPool) -> list[tuple[int, int]]:
    return [(layer, slot) for layer in range(pool.n_layers()) for slot in lk.KvSlot]


def storages(pool: lk.DeviceKvPool) -> list[lk.Storage]:
    return [pool.slot_storage(*at) for at in slots(pool)]


def number(at: tuple[int, int], n: int) -> int:
    layer, slot = at
    return 32 * (2 * layer + slot) + n - 64


def put(pool: lk.DeviceKvPool, session: lk.SessionHandle, start: int, rows: Sequence[int]) -> None:
    """What a step does for tokens ``start, start + 1, ...`` of a session whose blocks are there."""
    table, size = pool.session_block_table(session), pool.geometry.block_size
    for at in slots(pool):
        for i in range(start // size, -(-(start + len(rows)) // size)):
            block = pool.read_block(*at, table[i])
            for p, n in enumerate(rows, start):
                if p // size == i:
                    block[p % size] = number(at, n)
            pool.write_block(*at, table[i], block)


def feed(pool: lk.DeviceKvPool, session: lk.SessionHandle, rows: Sequence[int]) -> list[int]:
    """Append tokens with their rows; returns the blocks that were taken."""
    start = pool.filled_tokens(session)
    taken = pool.append(session, len(rows))
    put(pool, session, start, rows)
    return taken


def opened(pool: lk.DeviceKvPool, rows: Sequence[int]) -> lk.SessionHandle:
    session = pool.open()
    feed(pool, session, rows)
    return session


def read(pool: lk.DeviceKvPool, session: lk.SessionHandle) -> list[int | None]:
    """The numbers of a session's rows, None where a block is evicted; fails where the layers, the
    slots or the elements of a row disagree."""
    table, size = pool.session_block_table(session), pool.geometry.block_size
    found: list[int | None] = []
    whole = {at: pool.slot_storage(*at).to_numpy() for at in slots(pool)}
    for p in range(pool.filled_tokens(session)):
        block = table[p // size]
        if block is None:
            found.append(None)
            continue
        ((n,),) = {
            tuple({float(x) - number(at, 0) for x in np.ravel(array[block, p % size])})
            for at, array in whole.items()
        }
        found.append(int(n))
    return found


def tables(pool: lk.DeviceKvPool) -> dict[str, Any]:
    """Who holds which block, what can be found by tokens, and what is stored."""
    blocks = range(pool.capacity())
    return {
        "sessions": {
            int(s): (seq.filled, seq.in_step, [b if type(b) is int else id(b) for b in seq.table])
            for s, seq in pool._sequences.items()
        },
        "refs": [pool.block_refcount(b) for b in blocks],
        "free": (pool.free_blocks(), pool.cached_blocks(), pool.kv_bytes_resident()),
        "indexed": [b for b in blocks if b in pool._blocks.index],
        "fences": len(pool._blocks._fences),
    }


def state(pool: lk.DeviceKvPool) -> dict[str, Any]:
    """Everything a pool is, its bytes included."""
    return {
        "tables": tables(pool),
        "unused": sorted({*pool._blocks._unused, *range(len(pool._blocks.refs), pool.capacity())}),
        "stamps": [pool._stamps.get(b, 0) for b in range(pool.capacity())],
        "told": (pool.stats, pool.events()),
        "written": [
            (pool._rows_written[b], pool._slots_written[b]) for b in range(pool.capacity())
        ],
        "stored": (list(pool._evicted._doomed), _keys(pool)),
        "bytes": [(raw_bytes(s), s.version, s.torn) for s in storages(pool)],
    }


def _keys(pool: lk.DeviceKvPool) -> list[str]:
    return pool.store.keys() if hasattr(pool.store, "keys") else []


@contextmanager
def refused(
    pool: lk.DeviceKvPool, error: type[BaseException], *words: object
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """The block raises `error`, its message holds `words`, and the pool is as it was."""
    before = state(pool)
    with pytest.raises(error) as caught:
        yield caught
    for word in words:
        assert str(word) in str(caught.value)
    assert state(pool) == before
    pool.check()


@contextmanager
def failing(plan: Plan, call: int, error: BaseException) -> Iterator[None]:
    """One call of a plan raises, after its kernel has run (or was queued)."""
    kernel, args = plan._calls[call]

    def fail(*given: Any) -> None:
        kernel(*given)
        raise error

    plan._calls[call] = (fail, args)
    try:
        yield
    finally:
        plan._calls[call] = (kernel, args)


Failure = tuple[AbstractContextManager[None], type[BaseException]]


def failures(pool: lk.DeviceKvPool, plan: Plan) -> Iterator[Failure]:
    """Every way for a pass of a plan to fail midway, and the error it ends in: where kernels run
    at once each call in turn, and where they are queued each kernel of the queue."""
    backend = lk.device(pool.device_location()).backend
    queued = backend.capabilities.is_async
    for call in range(len(plan._calls)):
        if queued:
            yield _scripted(backend, call + 1), lk.KernelError
        else:
            yield failing(plan, call, ValueError("broken")), lk.KernelError
            yield failing(plan, call, MemoryError()), lk.OutOfMemory
            yield failing(plan, call, lk.RangeError("mine")), lk.RangeError
        if not plan.captured:
            yield failing(plan, call, KeyboardInterrupt()), KeyboardInterrupt


@contextmanager
def _scripted(backend: Any, at: int) -> Iterator[None]:
    backend.fail("kernel", at)
    yield
    assert not backend._failing, "fewer kernels ran"


def tear(storage: lk.Storage) -> None:
    """Lose a writer midway."""

    def lost() -> None:
        with storage.write():
            raise KeyError

    with pytest.raises(KeyError):
        lost()
    assert storage.torn
