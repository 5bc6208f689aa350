"""Memory that is not there: `OutOfMemory` that names the bytes, and nothing kept.

Where a backend has a method ``used_bytes(location)``, what it says has to come back to what it was.
"""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lazykv.device import DeviceLocation
from lazykv.errors import OutOfMemory
from lazykv.kv.cache import KvCache
from lazykv.storage import Storage
from lazykv.testing.compare import check_bits
from lazykv.testing.held import Held
from lazykv.testing.paging import PagedHeld
from lazykv.testing.target import Target

IMPOSSIBLE = 2**62


class Ration:
    """Counts allocations, lets the `fail_at`-th fail as a full device does, and knows what is still
    alive."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self._target = target
        self._allocate = target.backend.allocate
        self._alive: list[weakref.ref[Any]] = []
        self.count, self.fail_at = 0, 0
        self._before = self._used()
        monkeypatch.setattr(target.backend, "allocate", self.allocate)

    def allocate(self, nbytes: int, location: DeviceLocation) -> Any:
        self.count += 1
        if self.count == self.fail_at:
            raise OutOfMemory(f"allocate on {location}: got no memory for {nbytes} bytes")
        made = self._allocate(nbytes, location)
        with contextlib.suppress(TypeError):  # of arrays that cannot be watched
            self._alive.append(weakref.ref(made))
        return made

    def _used(self) -> int:
        used: Callable[[DeviceLocation], int] | None
        used = getattr(self._target.backend, "used_bytes", None)
        self._target.backend.synchronize(self._target.location)
        return 0 if used is None else used(self._target.location)

    def check_nothing_kept(self, what: str) -> None:
        gc.collect()
        kept = sum(ref() is not None for ref in self._alive)
        assert not kept, f"{what}: {kept} allocations are still alive"
        used = self._used()
        assert used == self._before, f"{what}: got {used} used bytes, need {self._before}"


def small_allocation_works(target: Target) -> None:
    data = np.arange(100, dtype=np.uint8)
    check_bits("memory after a failure", target.storage(data).to_numpy(), data)


def test_too_much_memory_is_out_of_memory(target: Target) -> None:
    for _ in range(3):
        with pytest.raises(OutOfMemory, match=str(IMPOSSIBLE)):
            target.backend.allocate(IMPOSSIBLE, target.location)
        small_allocation_works(target)
    with pytest.raises(MemoryError):  # what a Python caller would catch
        Storage.allocate((IMPOSSIBLE // 4,), "f32", target.location)
    small_allocation_works(target)


def test_a_refused_allocation_takes_nothing(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    ration = Ration(target, monkeypatch)
    for _ in range(3):
        with pytest.raises(OutOfMemory):
            target.backend.allocate(IMPOSSIBLE, target.location)
    ration.check_nothing_kept("after three refusals")


def test_no_half_of_a_cache_is_left(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    target.need("f32")
    gc.collect()
    ration = Ration(target, monkeypatch)
    with pytest.raises(OutOfMemory):
        KvCache.with_capacity(2, 2, 4, IMPOSSIBLE // 64, "f32", target.location)
    for k in range(1, 5):  # two layers have four buffers
        ration.count, ration.fail_at = 0, k
        with pytest.raises(OutOfMemory):
            target.cache(8)
        ration.check_nothing_kept(f"a cache whose allocation {k} failed")
    ration.fail_at = 0
    target.cache(8)


def script(target: Target) -> list[Any]:
    """A cache and a pool, sessions on both, steps, growing, evicting and restoring."""
    h = Held(target.cache(4), target.location, name="script")
    out: list[Any] = [h.token() for _ in range(3)]
    h.cache.grow(8)
    grown = Held(h.cache, target.location, name="grown")
    grown.rows = list(h.rows)
    out += [grown.token() for _ in range(3)]
    p = PagedHeld(target.pool(blocks=6), batch=2)
    a, b = p.open(), p.open()
    out += [p.tokens(a, b) for _ in range(5)]
    p.pool.restore(a, p.pool.evict(a).handle)
    out.append(p.tokens(a, b))
    return out


def test_a_failure_at_every_allocation_is_survived(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The k-th allocation of a script fails, for every k: typed, nothing kept, and the next run of
    the script is right (its steps are held against the reference). Only where memory for the
    results of a recording is missing do steps go on, plainly and right."""
    target.need("f32", "i64", "u32")
    script(target)
    gc.collect()
    ration = Ration(target, monkeypatch)
    script(target)
    total = ration.count
    ration.check_nothing_kept("the script")
    for k in range(1, total + 1):
        ration.count, ration.fail_at = 0, k
        try:
            script(target)
        except OutOfMemory:
            pass
        else:
            assert target.backend.capabilities.capture, f"allocation {k}: got no OutOfMemory"
        ration.check_nothing_kept(f"allocation {k} of {total} failed")
    ration.fail_at = 0
    script(target)
