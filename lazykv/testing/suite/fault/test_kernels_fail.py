"""Kernels that fail: what was written is whole, what was not is as it was, and work goes on."""

import gc
from typing import Any

import numpy as np
import pytest

from lazykv.errors import KernelError
from lazykv.graph import Graph
from lazykv.testing.compare import check_bits
from lazykv.testing.failing import (
    PURPOSE,
    disarmed,
    fail,
    plan_to_fail,
    run_and_wait,
    skip_without_bodies,
)
from lazykv.testing.golden import Array
from lazykv.testing.held import Held, bytes_of
from lazykv.testing.target import Target


def zeros(value: float = 0) -> Array:
    return np.full((4,), value, np.float32)


def test_writes_before_a_failure_are_whole_and_later_ones_have_not_happened(
    target: Target,
) -> None:
    target.need("f32")
    g = Graph()
    first, last = (g.placeholder((4,), "f32", n) for n in ("first", "last"))
    source = g.const(target.storage(zeros(5)))
    stores = {t: target.storage(zeros()) for t in (first, last)}
    written = first.at[:].set(source)
    made = plan_to_fail(target, [], stores, effects=[last.at[:].set(fail(written))])
    for _ in range(2):
        with pytest.raises(KernelError, match=PURPOSE):
            run_and_wait(made)
    assert not stores[first].torn, "a write that was complete is called torn"
    check_bits("the write before the failure", stores[first].to_numpy(), zeros(5))
    if not stores[last].torn:
        check_bits("the write after it", stores[last].to_numpy(), zeros())
    with stores[last].write() as memory:
        target.backend.copy_in(memory, zeros(1))
    with disarmed():
        run_and_wait(made)
    check_bits("the same plan when nothing fails", stores[last].to_numpy(), zeros(5))


def test_another_session_notices_nothing(target: Target) -> None:
    target.need("f32", "i64")
    good = Held(target.cache(8), target.location, name="good")
    bad = failing_session(target)
    for _ in range(3):
        good.token()
        with pytest.raises(KernelError, match=PURPOSE):
            bad.run(bad.data())
    good.check_rows()


def test_a_session_goes_on_after_a_failed_step(target: Target) -> None:
    target.need("f32", "i64")
    h = failing_session(target)
    for _ in range(3):
        with disarmed():
            h.token()
            h.token()
        before = [(k.copy(), v.copy()) for k, v in h.rows]
        with pytest.raises(KernelError, match=PURPOSE):
            h.run(h.data())
        assert len(h.rows) == len(before)
        h.check_rows()
    with disarmed():
        h.token()
    h.check_rows()
    assert h.session.realize_count == 7


def test_failed_steps_keep_no_memory(target: Target) -> None:
    target.need("f32", "i64")
    used = getattr(target.backend, "used_bytes", None)
    if used is None:
        pytest.skip(f"{target.name} does not tell its used_bytes")
    h = failing_session(target)
    taken = []
    for _ in range(6):
        with pytest.raises(KernelError, match=PURPOSE):
            h.run(h.data())
        gc.collect()
        target.backend.synchronize(target.location)
        taken.append(used(target.location))
    assert taken[1:] == taken[1:2] * 5, f"used bytes after each failed step: {taken}"
    assert len(bytes_of(h.cache)) == 4


def failing_session(target: Target) -> Held:
    """A session whose last op fails, after all its writes; skips where bodies do not run."""
    options: dict[str, Any] = {"last": fail, "name": "failing"}
    with skip_without_bodies(target):
        return Held(target.cache(8), target.location, **options)
