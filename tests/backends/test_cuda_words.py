"""The words by which kernels refuse: which thread looks at them, and who gets them next."""

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cuda_cpu import needs_compiler

import lazykv as lk
from lazykv.backends import cuda_queue, cuda_refusals
from lazykv.backends.cuda import CudaBackend
from lazykv.backends.cuda_refusals import Slab, Word, parts
from lazykv.ops.elementwise import AddScalar
from lazykv.ops.move import Take
from lazykv.testing.queued import Queued

pytestmark = needs_compiler

PLACE = lk.DeviceLocation("cuda:0")
ROWS = np.arange(8, dtype=np.float32).reshape(4, 2)


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """Another thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


class Taken:
    """The kernel of a `take` of one row, which nobody waits for."""

    def __init__(self, cuda: CudaBackend) -> None:
        self._cuda = cuda
        self.ids = lk.Storage.from_array(np.array([0]), PLACE)
        self.out = lk.Storage.from_array(ROWS[:1], PLACE)
        self._table = lk.Storage.from_array(ROWS, PLACE)
        self.work = self.emitted()

    def emitted(self) -> Queued:
        return Queued(Take(), [self._table, self.ids], self.out)

    def choose(self, row: int) -> None:
        self._cuda.copy_in(self.ids.array, np.array([row]))

    def give(self, row: int) -> None:
        self.choose(row)
        self.work.give()

    @property
    def word(self) -> Word:
        return word_of(self.work)


def word_of(work: Queued) -> Word:
    (word,) = work.steps[0][1]
    assert isinstance(word, Word)
    return word


def wait(cuda: CudaBackend) -> list[object]:
    """The ops that refused, of what this thread gave."""
    try:
        cuda.synchronize(PLACE)
    except lk.RangeError as e:
        refused = list(e.refused or ())
        return refused if e.op is refused[0] else [e.op]
    return []


# Threads


@pytest.mark.parametrize("good_first", [False, True])
def test_a_refusal_is_found_by_the_thread_that_gave_the_kernel(
    cuda: CudaBackend, other: ThreadPoolExecutor, good_first: bool
) -> None:
    mine, theirs = Taken(cuda), Taken(cuda)
    if good_first:
        mine.give(2)
    other.submit(theirs.give, 9).result()
    if not good_first:
        mine.give(2)
    assert wait(cuda) == []
    np.testing.assert_array_equal(mine.out.to_numpy(), ROWS[[2]])
    assert other.submit(wait, cuda).result() == [theirs.work.op]
    assert other.submit(wait, cuda).result() == []


def test_two_threads_that_both_refused_find_their_own(
    cuda: CudaBackend, other: ThreadPoolExecutor
) -> None:
    mine, theirs = Taken(cuda), Taken(cuda)
    other.submit(theirs.give, 9).result()
    mine.give(-1)
    assert wait(cuda) == [mine.work.op]
    assert other.submit(wait, cuda).result() == [theirs.work.op]
    for taken, f in ((mine, lambda g: g()), (theirs, lambda g: other.submit(g).result())):
        f(lambda taken=taken: taken.give(3))
        assert f(lambda: wait(cuda)) == []
        np.testing.assert_array_equal(taken.out.to_numpy(), ROWS[[3]])


def test_plans_of_two_threads_do_not_get_each_others_refusals(
    cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has queued its kernels, then a pass of the other runs from start to end."""
    plans = []
    for _ in range(2):
        g = lk.Graph()
        ids = g.placeholder((1,), "i64")
        rows = g.const(lk.Storage.from_array(ROWS, PLACE)).take(ids) * 2.0
        plans.append(
            (lk.plan(rows, {ids: lk.Storage.from_array(np.array([0]), PLACE)}, PLACE), ids)
        )
    queued, go_on = threading.Event(), threading.Event()
    copy_out = cuda.copy_out

    def copy_out_later(source: object) -> np.ndarray:
        if threading.current_thread() is not threading.main_thread():
            queued.set()
            assert go_on.wait(60)
        return copy_out(source)

    monkeypatch.setattr(cuda, "copy_out", copy_out_later)

    def run(n: int, row: int) -> object:
        plan, ids = plans[n]
        try:
            return plan.run({ids: np.array([row])}).tolist()
        except lk.RangeError as e:
            return e.op is plan.steps[0].op

    good = (ROWS[[1]] * 2).tolist()
    for mine, theirs in ((1, 9), (9, 1), (9, 9)):
        queued.clear()
        go_on.clear()
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(run, 1, theirs)
            assert queued.wait(60)
            assert run(0, mine) == (good if mine == 1 else True)
            go_on.set()
            assert later.result() == (good if theirs == 1 else True)


def test_refusals_of_a_thread_that_ended_are_nobodys(cuda: CudaBackend) -> None:
    mine, theirs = Taken(cuda), Taken(cuda)
    with ThreadPoolExecutor(1) as ended:
        ended.submit(theirs.give, 9).result()
    mine.give(1)
    assert wait(cuda) == []
    with ThreadPoolExecutor(1) as later:
        later.submit(mine.give, 2).result()
        assert later.submit(wait, cuda).result() == []


# Words


def test_a_word_is_used_again_and_comes_cleared(cuda: CudaBackend) -> None:
    """Its last owner has refused, and nobody has been told: not even the kernel has run."""
    dead = Taken(cuda)
    slab, index = dead.word.slab, dead.word.index
    with ThreadPoolExecutor(1) as ended:
        ended.submit(dead.give, 9).result()
    del dead
    gc.collect()
    born = Taken(cuda)
    assert (born.word.slab, born.word.index) == (slab, index)
    born.give(1)
    assert wait(cuda) == []
    assert not slab.host[index]
    born.give(-1)
    assert wait(cuda) == [born.work.op]


def test_a_word_is_kept_until_its_thread_has_looked(cuda: CudaBackend) -> None:
    gone, other = Taken(cuda), Taken(cuda)
    op, index = gone.work.op, gone.word.index
    gone.give(9)
    del gone
    gc.collect()
    assert word_of(other.emitted()).index != index
    assert wait(cuda) == [op]
    assert word_of(other.emitted()).index == index


def test_ops_that_cannot_refuse_take_no_word(cuda: CudaBackend) -> None:
    taken, free = Taken(cuda), cuda.queue(PLACE).refusals._free
    before = len(free)
    kept = [Queued(AddScalar(1.0), [taken.out], taken.out), taken.emitted()]
    assert before - len(free) == 1
    del kept
    assert before == len(free)


def test_there_are_more_words_than_one_slab_holds(
    cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cuda_queue, cuda_refusals):
        monkeypatch.setattr(module, "WORDS", 3)
    many = [Taken(cuda) for _ in range(8)]
    assert len({t.word.slab for t in many}) == 3
    assert len({(t.word.slab, t.word.index) for t in many}) == 8
    for bad in ({0, 7}, {1, 4, 5}, set(), {2}):
        for n, taken in enumerate(many):
            taken.give(9 if n in bad else n % 4)
        assert wait(cuda) == [many[n].work.op for n in sorted(bad)]
        for n, taken in enumerate(many):
            if n not in bad:
                np.testing.assert_array_equal(taken.out.to_numpy(), ROWS[[n % 4]])


def test_only_the_stretch_that_holds_the_words_is_copied() -> None:
    slabs = [Slab(np.arange(10), np.arange(10)) for _ in range(2)]
    words = [Word(Take(), slabs[n], at) for n, at in ((0, 7), (1, 0), (0, 3), (0, 4))]
    found = [(device.tolist(), host.tolist()) for device, host in parts(words)]
    assert found == [([3, 4, 5, 6, 7],) * 2, ([0],) * 2]
    assert parts([]) == []


# Captures


def test_a_refusal_in_a_replay_is_told_to_the_thread_that_replays(
    cuda: CudaBackend, other: ThreadPoolExecutor
) -> None:
    taken = Taken(cuda)
    taken.choose(9)
    recorded = cuda.capture(PLACE, taken.work.steps)
    other.submit(recorded.replay).result()
    assert wait(cuda) == []  # recording is not giving
    assert other.submit(wait, cuda).result() == [taken.work.op]
    for row, refused in ((1, []), (-1, [taken.work.op]), (2, [])):
        taken.choose(row)
        recorded.replay()
        assert wait(cuda) == refused
    np.testing.assert_array_equal(taken.out.to_numpy(), ROWS[[2]])


def test_what_was_given_before_a_capture_is_still_looked_at(cuda: CudaBackend) -> None:
    before, recorded = Taken(cuda), Taken(cuda)
    before.give(9)
    cuda.capture(PLACE, recorded.work.steps)
    with pytest.raises(lk.CaptureError):
        cuda.capture(PLACE, [*recorded.work.steps, (cuda.synchronize, (PLACE,))])
    assert wait(cuda) == [before.work.op]


def test_a_captured_plan_names_its_step(cuda: CudaBackend) -> None:
    g = lk.Graph()
    dest, ids = g.placeholder((4, 2), "f32"), g.placeholder((1,), "i64")
    held, rows = lk.Storage.from_array(ROWS, PLACE), lk.Storage.from_array(np.array([0]), PLACE)
    written = dest.at[0:1].set(g.const(lk.Storage.from_array(ROWS, PLACE)).take(ids))
    plan = lk.plan(written, {dest: held, ids: rows}, PLACE)
    plan.run()
    plan.capture()
    cuda.copy_in(rows.array, np.array([9]))
    with pytest.raises(lk.RangeError, match=r"^take: got .* on cuda:0") as caught:
        plan.run()
    assert "take[" in caught.value.__notes__[0]
    assert held.torn
    with held.write() as array:
        cuda.copy_in(array, ROWS)
    cuda.copy_in(rows.array, np.array([2]))
    np.testing.assert_array_equal(plan.run(), [ROWS[2], *ROWS[1:]])
    assert plan.captured
