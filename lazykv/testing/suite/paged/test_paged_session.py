"""Paged sessions: tables and lengths are data, so one plan serves every sequence."""

import pytest

from lazykv.counters import stats
from lazykv.errors import OutOfBlocks
from lazykv.testing.compare import check_bits
from lazykv.testing.paging import PagedHeld
from lazykv.testing.target import Target


def paged(target: Target, dtype: str = "f32", blocks: int = 10, **options: int) -> PagedHeld:
    target.need("f32")
    return PagedHeld(target.pool(blocks=blocks, dtype=dtype), **options)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_ragged_sequences_equal_the_reference(target: Target, dtype: str) -> None:
    h = paged(target, dtype)
    a, b, c = (h.open() for _ in range(3))
    for _ in range(3):
        h.tokens(a)
    for _ in range(4):
        h.tokens(a, b)
    for _ in range(6):
        h.tokens(c, a, b)
    h.check_rows(a, b, c)
    h.pool.check()


def test_several_tokens_a_step(target: Target) -> None:
    h = paged(target, seq=3)
    a, b = h.open(), h.open()
    h.tokens(b)
    for _ in range(3):
        h.tokens(a, b)
    h.check_rows(a, b)


def test_growing_into_new_blocks_keeps_the_plan(target: Target) -> None:
    h = paged(target)
    a, b = h.open(), h.open()
    h.tokens(a)
    h.tokens(a, b)
    before, plan = stats(), h.session.plan.id
    for _ in range(10):
        h.tokens(a, b)
    after = stats()
    assert after.plans_built == before.plans_built
    assert h.session.plan.id == plan
    h.check_rows(a, b)


def test_forks_part_when_they_are_written(target: Target) -> None:
    h = paged(target)
    a = h.open()
    for _ in range(6):
        h.tokens(a)
    b, c = h.fork(a), h.fork(a)
    for _ in range(3):
        h.tokens(a, b, c)
    h.check_rows(a, b, c)
    h.pool.check()


def test_a_restored_sequence_goes_on(target: Target) -> None:
    h = paged(target)
    a, b = h.open(), h.open()
    for _ in range(6):
        h.tokens(a, b)
    handle = h.pool.evict(a).handle
    c = h.open()
    for _ in range(5):
        h.tokens(b, c)
    h.pool.restore(a, handle)
    for _ in range(3):
        h.tokens(a, b, c)
    h.check_rows(a, b, c)


def test_blocks_that_were_given_back_are_used_again(target: Target) -> None:
    h = paged(target, blocks=4)
    for _ in range(3):
        a, b = h.open(), h.open()
        for _ in range(7):
            h.tokens(a, b)
        h.check_rows(a, b)
        h.pool.discard(a)
        h.pool.discard(b)


def test_a_truncated_sequence_sees_no_dropped_row(target: Target) -> None:
    h = paged(target)
    a = h.open()
    for keep in (2, 5, 0):
        while len(h.rows[a]) < 9:
            h.tokens(a)
        h.pool.truncate(a, keep)
        del h.rows[a][keep:]
        h.tokens(a)
        h.check_rows(a)


def test_a_step_without_room_changes_nothing(target: Target) -> None:
    h = paged(target, blocks=3)
    a, b = h.open(), h.open()
    for _ in range(4):
        h.tokens(a, b)
    with pytest.raises(OutOfBlocks):
        h.tokens(a, b)
    assert h.pool.filled_tokens(a) == h.pool.filled_tokens(b) == 4
    h.check_rows(a, b)
    h.pool.discard(b)
    h.tokens(a)
    h.check_rows(a)


def test_results_are_fresh(target: Target) -> None:
    h = paged(target)
    a, b = h.open(), h.open()
    results = [h.tokens(a, b)]
    copies = [results[0].copy()]
    for _ in range(3):
        results.append(h.tokens(a, b))
        copies.append(results[-1].copy())
    for n, (result, copy) in enumerate(zip(results, copies, strict=True)):
        check_bits(f"result {n} after later steps", result, copy)
