"""The suite catches every broken backend, and a test that must fail on it is named beside it."""

from collections.abc import Iterator
from contextlib import contextmanager

import broken_arithmetic
import broken_attention
import broken_captures
import broken_devices
import broken_edges
import broken_interop
import broken_lending
import broken_memory
import broken_queues
import broken_sizes
import broken_writes
import pytest
from broken_backends import BUGS, Bug, Cpu, Healthy, HealthySim, Sim
from broken_interop import HealthyLender, Lender

from lazykv.backends.cpu import CpuBackend
from lazykv.device import Backend, register_backend, registry, unregister_backend
from lazykv.testing.runner import Done, run_suite

MODULES = (
    broken_arithmetic, broken_attention, broken_captures, broken_devices, broken_edges,
    broken_interop, broken_lending, broken_memory, broken_queues, broken_sizes, broken_writes,
)  # fmt: skip


@contextmanager
def registered(kind: str, backend: Backend) -> Iterator[None]:
    before = registry.backends.get(kind)
    register_backend(kind, backend)
    try:
        yield
    finally:
        if before is None:
            unregister_backend(kind)
        else:
            register_backend(kind, before)


def run(
    backend: Backend, tests: list[str], keyword: str | None = None, kind: str = "broken"
) -> Done:
    with registered(kind, backend):
        return run_suite(kind, tests=tests, keyword=keyword)


def failed(done: Done) -> list[str]:
    return [name for name, outcome in done.run.report.outcomes().items() if outcome == "failed"]


@pytest.mark.parametrize("bug", BUGS, ids=[b.make.__name__ for b in BUGS])
def test_a_broken_backend_is_caught(bug: Bug) -> None:
    done = run(bug.make(), [bug.tests], bug.keyword, bug.kind)
    caught = failed(done)
    assert done.code == 1, done.text
    assert any(bug.caught_by in name for name in caught), caught
    # A failure is told in words, not by a traceback alone.
    assert all(r.reason for r in done.run.report.results.values() if r.outcome == "failed")


def test_there_are_many_and_no_two_of_one_name() -> None:
    names = [b.make.__name__ for b in BUGS]
    assert len(set(names)) == len(names) >= 50
    assert {b.make.__module__ for b in BUGS} == {m.__name__ for m in MODULES}


MADE_OF: dict[type[Backend], type[Backend]] = {
    Lender: HealthyLender, Cpu: Healthy, CpuBackend: CpuBackend, Sim: HealthySim,
}  # fmt: skip
"""What is broken, the narrower first, and the same without a bug."""


def healthy_form(bug: Bug) -> type[Backend]:
    return next(healthy for base, healthy in MADE_OF.items() if issubclass(bug.make, base))


@pytest.mark.parametrize("healthy", MADE_OF.values())
def test_what_they_are_made_of_passes(healthy: type[Backend]) -> None:
    """All that is run on the broken ones, on one without a bug."""
    bugs = [b for b in BUGS if healthy_form(b) is healthy]
    (kind,) = {b.kind for b in bugs}
    for tests in {b.tests for b in bugs}:
        words = {b.keyword for b in bugs if b.tests == tests}
        keyword = None if None in words else " or ".join(f"({word})" for word in words)
        done = run(healthy(), [tests], keyword, kind)
        assert (done.code, failed(done)) == (0, []), done.text


def test_what_lends_memory_is_asked_for_it() -> None:
    done = run(HealthyLender(), ["interop/test_exchange.py"], "device_memory")
    assert set(done.run.report.outcomes().values()) == {"passed"}
