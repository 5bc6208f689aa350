"""Ctrl-C, or a kernel that fails, while the verb of a cache waits for what it has queued."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
from sim_faults import fresh_sim, interrupted

import lazykv as lk
from lazykv.backends.sim import SimBackend

PLACE = lk.DeviceLocation("sim:0")


@pytest.fixture
def sim():
    with fresh_sim() as made:
        yield made


def filled(sim: SimBackend) -> tuple[lk.KvCache, list[lk.Storage]]:
    """Two sequences of four rows in two layers, every number of its own; and the storages."""
    cache = lk.KvCache.with_capacity(2, 1, 2, 4, "f32", PLACE, batch=2)
    storages = [cache.slot_storage(layer, half) for layer in range(2) for half in lk.KvSlot]
    for n, storage in enumerate(storages):
        with storage.write() as array:
            sim.copy_in(array, np.arange(16, dtype=np.float32).reshape(2, 1, 4, 2) + 100 * n)
    sim.synchronize(PLACE)
    cache.cached_len = 4
    return cache, storages


def failing(sim: SimBackend, k: int) -> AbstractContextManager[None]:
    sim.fail("kernel", k)
    return nullcontext()


@pytest.mark.parametrize(
    ("stop", "error"), [(interrupted, KeyboardInterrupt), (failing, lk.KernelError)]
)
def test_a_reorder_that_is_stopped_tears_all_or_none(
    sim: SimBackend,
    stop: Callable[[SimBackend, int], AbstractContextManager[None]],
    error: type[BaseException],
) -> None:
    cache, storages = filled(sim)
    before = sim.counts["kernel"]
    cache.reorder([1, 0])
    kernels = sim.counts["kernel"] - before
    assert kernels >= 2 * len(storages)
    ends = set()
    for k in range(1, kernels + 1):
        cache, storages = filled(sim)
        old = [s.to_numpy() for s in storages]
        counted = [s.version for s in storages]
        with stop(sim, k), pytest.raises(error):
            cache.reorder([1, 0])
        assert sim.stream(PLACE).idle
        torn = {s.torn for s in storages}
        assert len(torn) == 1, k
        ends |= torn
        for storage, bytes_before, version in zip(storages, old, counted, strict=True):
            now = storage.array._data
            moved = np.array_equal(now, bytes_before[::-1])
            assert moved or np.array_equal(now, bytes_before), k
            assert storage.version - version == moved, k
            assert storage.torn or not moved, k
        if torn == {False}:
            cache.reorder([1, 0])
            for storage, bytes_before in zip(storages, old, strict=True):
                np.testing.assert_array_equal(storage.to_numpy(), bytes_before[::-1])
        else:
            with pytest.raises(lk.StorageTornError):
                cache.reorder([1, 0])
        again, fresh = filled(sim)
        again.reorder([1, 0])
        for storage, bytes_before in zip(fresh, old, strict=True):
            np.testing.assert_array_equal(storage.to_numpy(), bytes_before[::-1])
    assert ends == {False, True}
