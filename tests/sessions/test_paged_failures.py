"""Paged steps that fail, and what the pool allows while one runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from paged_state import (
    failing,
    failures,
    feed,
    make_pool,
    opened,
    read,
    refused,
    storages,
    tables,
    tear,
)
from paged_steps import check, data, hold

import lazykv as lk


@pytest.fixture
def make(place) -> Callable[..., lk.DeviceKvPool]:
    return lambda *sizes, **options: make_pool(*sizes, place=place, **options)


# Steps that fail


def test_a_step_that_fails_anywhere_rewinds_every_session(make):
    pool = make(12, 2)
    session = hold(pool)
    a, b, c = opened(pool, [1, 2]), opened(pool, [5, 6, 7]), pool.open()
    for n in (9, 10):  # the second makes a recording, where the device can
        session.step([c], data(pool, [n]))
    pool.publish(a, [1, 2])
    rows = [[1, 2], [5, 6, 7], [9, 10]]
    before = tables(pool)
    ways = list(failures(pool, session.plan))
    assert len(ways) >= 8
    for failure, seen in ways:
        with failure, pytest.raises(seen):
            session.step([a, b, c], data(pool, [30], [30], [30]))
        assert tables(pool) == before
        assert not any(s.torn for s in storages(pool))
        assert [read(pool, s) for s in (a, b, c)] == rows
        pool.check()
    out = session.step([a, b, c], data(pool, [3], [8], [11]))
    check(pool, out, [1, 2, 3], [5, 6, 7, 8], [9, 10, 11])
    assert session.realize_count == 3


def test_a_failed_kernel_is_named_with_what_it_was_given():
    pool = make_pool(4, 2, layers=1)
    session = hold(pool, batch=2)
    a = opened(pool, [1])
    session.step([a], data(pool, [2]))
    calls = [i for i, step in enumerate(session.plan.steps) if step.op.name == "write_rows"]
    with (
        failing(session.plan, calls[0], ZeroDivisionError("oh")),
        pytest.raises(lk.KernelError, match=r"write_rows\[\d+\] of \(f32\[8,2,4\], f32\[2,2,4\]"),
    ):
        session.step([a], data(pool, [3]))


def test_a_failed_step_of_siblings_keeps_their_rows(make):
    """The shared tail may have become one's own; nobody's rows change."""
    pool = make(8, 4)
    session = hold(pool)
    warm = pool.open()
    for n in (0, 1):
        session.step([warm], data(pool, [n]))
    a = opened(pool, [1, 2])
    b = pool.fork(a)
    for failure, seen in failures(pool, session.plan):
        with failure, pytest.raises(seen):
            session.step([a, b], data(pool, [7], [8]))
        assert [read(pool, s) for s in (a, b)] == [[1, 2], [1, 2]]
        pool.check()
    check(pool, session.step([a, b], data(pool, [7], [8])), [1, 2, 7], [1, 2, 8])


def test_a_failed_steps_rows_are_not_published(make):
    pool = make(8, 2)
    session = hold(pool)
    a = opened(pool, [1])
    b = opened(pool, [5])
    session.step([b], data(pool, [6]))
    failure, seen = next(failures(pool, session.plan))
    with failure, pytest.raises(seen):
        session.step([a], data(pool, [2]))
    pool.append(a, 1)
    assert (pool.publish(a, [1, 2]), pool.publish(b, [5, 6])) == (0, 1)


def test_a_buffer_torn_by_somebody_else_is_not_forgiven(make):
    """Torn before a step, and by what a step calls for its data."""
    pool = make(8, 2)
    session = hold(pool)
    a = opened(pool, [1])
    torn = storages(pool)[3]

    def inputs(starts: np.ndarray) -> dict[str, Any]:
        tear(torn)
        return data(pool, [2])

    with pytest.raises(lk.StorageTornError):
        session.step([a], inputs)
    assert (pool.filled_tokens(a), [s.torn for s in storages(pool)]) == (1, [False] * 3 + [True])
    with refused(pool, lk.StorageTornError, "need it rewritten whole"):
        session.step([a], data(pool, [2]))
    backend = lk.device(torn.location).backend
    with torn.write() as memory:
        backend.copy_in(memory, backend.copy_out(memory))
    check(pool, session.step([a], data(pool, [2])), [1, 2])


def test_a_data_function_that_fails_rewinds(make):
    pool = make(8, 2)
    session = hold(pool)
    a = opened(pool, [1, 2])
    before = tables(pool)

    def inputs(starts: np.ndarray) -> dict[str, Any]:
        raise KeyError("no data")

    with pytest.raises(KeyError, match="no data"):
        session.step([a], inputs)
    assert tables(pool) == before
    check(pool, session.step([a], data(pool, [3])), [1, 2, 3])


# While a step runs


@contextmanager
def running(
    session: lk.PagedDecodeSession, sessions: list[lk.SessionHandle], feeds: dict[str, Any]
) -> Iterator[list[Any]]:
    """A step that another thread runs, held up in its first kernel; the list gets its result or
    its error at the end of the block."""
    inside, go_on, results = threading.Event(), threading.Event(), []
    plan = session.plan
    at_once = plan.program.locations == (lk.DeviceLocation("cpu"),)
    kernel, args = plan._calls[0]

    def wait(*given: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        # Where kernels are queued or replayed, the host holds the step up before all of them.
        return kernel(*given) if at_once else type(plan).execute(plan)

    def step() -> None:
        try:
            results.append(session.step(sessions, feeds))
        except BaseException as e:
            results.append(e)

    if at_once:
        plan._calls[0] = (wait, args)
    else:
        plan.execute = wait
    thread = threading.Thread(target=step)
    thread.start()
    try:
        assert inside.wait(30)
        plan._calls[0] = (kernel, args)
        plan.__dict__.pop("execute", None)
        yield results
    finally:
        go_on.set()
        thread.join(30)
        assert not thread.is_alive()


def test_every_change_of_a_session_in_a_step_is_refused(make):
    pool = make(16, 2)
    session, other_plan = hold(pool), hold(pool, batch=1)
    a, b, idle = opened(pool, [1, 2, 3]), opened(pool, [5, 6]), opened(pool, [9, 9, 9])
    session.step([a, b], data(pool, [4], [7]))
    sibling = pool.fork(a)
    handle = pool.evict(sibling).handle  # of nothing: all is shared
    prefix = pool.register_prefix(idle, 1)
    empty = pool.open()
    with running(session, [a, b, sibling], data(pool, [10], [11], [12])) as results:
        for verb in (
            lambda: pool.append(a, 1), lambda: pool.truncate(a, 1), lambda: pool.fork(a),
            lambda: pool.cow_break(a, 0), lambda: pool.ensure_writable_block(a, 0),
            lambda: pool.evict(a), lambda: pool.evict_blocks(a, [0]),
            lambda: pool.evict_range(a, 0, 1), lambda: pool.restore(sibling, handle),
            lambda: pool.splice(a, empty, 0, 1), lambda: pool.splice(idle, b, 0, 1),
            lambda: pool.splice_prefix(a, empty, 1), lambda: pool.register_prefix(a, 1),
            lambda: pool.splice_prefix_from(prefix, a), lambda: pool.publish(a, [1, 2]),
            lambda: pool.alloc_shifted_prefix_slots(prefix, b),
            lambda: pool.splice_prefix_shifted(prefix, b, [1.0, 1.0]),
            lambda: pool.mark_written(a), lambda: pool.begin_step([idle, a], 1),
            lambda: other_plan.step([a], data(pool, [1])),
        ):  # fmt: skip
            with refused(pool, lk.SessionBusy, "while a step runs on it"):
                verb()
        for call in (
            lambda: session.step([idle], data(pool, [1])),
            lambda: session.rebind_kv(pool),
        ):
            with refused(pool, lk.SessionBusy, "while a step runs, need it to end"):
                call()
        # What does not touch these sessions goes on.
        pool.append(idle, 2)
        assert pool.filled_tokens(a) == 5
        assert pool.materialize_block_table([a]).context_lens.tolist() == [5]
        assert pool.session_blocks(pool.fork(idle)) == 3
    check(pool, results[0], [1, 2, 3, 4, 10], [5, 6, 7, 11], [1, 2, 3, 4, 12])
    pool.append(a, 1)
    pool.check()


def test_blocks_of_a_session_that_ends_during_its_step_wait_for_it_p7(make):
    pool = make(6, 2)
    session = hold(pool)
    a, b = opened(pool, [1, 2, 3]), opened(pool, [5])
    session.step([a, b], data(pool, [4], [6]))
    other = pool.open()
    mine = pool.session_block_table(a)
    with running(session, [a, b], data(pool, [9], [10])) as results:
        free = pool.free_blocks()
        pool.discard(a)
        assert pool.free_blocks() == free == 1
        with refused(pool, lk.OutOfBlocks, "got 1 free blocks, need 2"):
            pool.append(other, 3)
        (taken,) = pool.append(other, 1)
        assert taken not in mine
        with refused(pool, lk.UnknownSession):
            pool.filled_tokens(a)
        pool.check()
    check(pool, results[0], [1, 2, 3, 4, 9], [5, 6, 10])
    assert pool.free_blocks() == 3
    assert read(pool, b) == [5, 6, 10]
    pool.check()
    feed(pool, other, [20, 21, 22, 23])


def test_a_session_that_ends_during_a_step_that_fails(make):
    pool = make(6, 2)
    session = hold(pool)
    a, b = opened(pool, [1, 2, 3]), opened(pool, [5])
    session.step([a, b], data(pool, [4], [6]))
    failure, seen = next(failures(pool, session.plan))
    with failure, running(session, [a, b], data(pool, [9], [10])) as results:
        pool.discard(a)
    assert isinstance(results[0], seen)
    assert (read(pool, b), pool.free_blocks()) == ([5, 6], 5)
    pool.check()
    check(pool, session.step([b], data(pool, [7])), [5, 6, 7])


def test_a_session_that_ends_while_its_data_is_made(make):
    pool = make(6, 2)
    session = hold(pool)
    a, b = opened(pool, [1, 2, 3]), opened(pool, [5])

    def inputs(starts: np.ndarray) -> dict[str, Any]:
        pool.discard(a)
        return data(pool, [4], [6])

    check(pool, session.step([a, b], inputs), [1, 2, 3, 4], [5, 6])
    assert (read(pool, b), pool.free_blocks()) == ([5, 6], 5)


def test_two_plans_in_two_threads_on_one_pool(make):
    pool = make(64, 2)
    plans = [hold(pool, batch=2, max_blocks=16) for _ in range(2)]
    sessions = [[pool.open(), pool.open()] for _ in plans]
    barrier, errors = threading.Barrier(2), []

    def work(n: int) -> None:
        try:
            rows: list[int] = []
            barrier.wait(30)
            for token in range(30):
                out = plans[n].step(sessions[n], data(pool, [token % 31], [token % 31]))
                rows.append(token % 31)
                check(pool, out, rows, rows)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert errors == []
    assert [[read(pool, s) for s in pair] for pair in sessions] == [[list(range(30))] * 2] * 2
    pool.check()


def test_an_interrupt_right_after_a_step_began_leaves_no_step_behind(make, monkeypatch):
    pool = make(8, 2)
    session = hold(pool)
    a, real = opened(pool, [1]), pool.begin_step

    def interrupted(*args, **kwargs):
        real(*args, **kwargs)
        raise KeyboardInterrupt  # the caller never sees the step

    monkeypatch.setattr(pool, "begin_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.step([a], data(pool, [2]))
    monkeypatch.undo()
    pool.check()
    assert (pool.filled_tokens(a), pool.free_blocks()) == (1, 7)
    session.step([a], data(pool, [2]))
