"""The suite catches every broken backend, and a test that must fail on it is named beside it."""

from collections.abc import Iterator
from contextlib import contextmanager

import broken_arithmetic
import broken_attention
import broken_memory
import broken_queues
import broken_writes
import pytest
from broken_backends import BUGS, Bug, Healthy, HealthySim

from lazykv.backends.cpu import CpuBackend
from lazykv.device import Backend, register_backend, unregister_backend
from lazykv.testing.runner import Done, run_suite

MODULES = (broken_arithmetic, broken_attention, broken_memory, broken_queues, broken_writes)


@contextmanager
def registered(backend: Backend) -> Iterator[None]:
    register_backend("broken", backend)
    try:
        yield
    finally:
        unregister_backend("broken")


def run(backend: Backend, tests: list[str], keyword: str | None = None) -> Done:
    with registered(backend):
        return run_suite("broken", tests=tests, keyword=keyword)


def failed(done: Done) -> list[str]:
    return [name for name, outcome in done.run.report.outcomes().items() if outcome == "failed"]


@pytest.mark.parametrize("bug", BUGS, ids=[b.make.__name__ for b in BUGS])
def test_a_broken_backend_is_caught(bug: Bug) -> None:
    done = run(bug.make(), [bug.tests], bug.keyword)
    caught = failed(done)
    assert done.code == 1, done.text
    assert any(bug.caught_by in name for name in caught), caught
    # A failure is told in words, not by a traceback alone.
    assert all(r.reason for r in done.run.report.results.values() if r.outcome == "failed")


def test_there_are_many_and_no_two_of_one_name() -> None:
    names = [b.make.__name__ for b in BUGS]
    assert len(set(names)) == len(names) >= 50
    assert {b.make.__module__ for b in BUGS} == {m.__name__ for m in MODULES}


@pytest.mark.parametrize("healthy", [Healthy, HealthySim])
def test_what_they_are_made_of_passes(healthy: type[Backend]) -> None:
    """All that is run on the broken ones, on one without a bug."""
    bugs = [b for b in BUGS if issubclass(b.make, CpuBackend) == (healthy is Healthy)]
    for tests in {b.tests for b in bugs}:
        words = {b.keyword for b in bugs if b.tests == tests}
        keyword = None if None in words else " or ".join(f"({word})" for word in words)
        done = run(healthy(), [tests], keyword)
        assert (done.code, failed(done)) == (0, []), done.text
