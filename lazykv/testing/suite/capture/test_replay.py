"""Recordings: nothing runs while they are made, and they replay plain passes bit for bit."""

import gc

import numpy as np

from lazykv.compiler.plan import Plan
from lazykv.graph import Graph
from lazykv.ops.write import WriteSliceDoff
from lazykv.runtime.realize import plan
from lazykv.sessions.captured import CapturedDecodeSession
from lazykv.storage import Storage
from lazykv.testing.compare import check_bits
from lazykv.testing.golden import Array
from lazykv.testing.held import Held, bytes_of
from lazykv.testing.paging import PagedHeld
from lazykv.testing.queued import Queued, adder, full
from lazykv.testing.target import Target

ROWS = 5


def rows() -> Array:
    return np.zeros((ROWS, 3), np.float32)


def row(value: float) -> Array:
    return np.full((1, 3), value, np.float32)


class Writer:
    """A plan that writes a bound row at a bound offset, and hands back twice the row."""

    def __init__(self, target: Target) -> None:
        target.need_capture()
        target.need("f32", "i64")
        g = Graph()
        dest, src = g.placeholder((ROWS, 3), "f32"), g.placeholder((1, 3), "f32")
        at = g.placeholder((), "i64")
        self.store = target.storage(rows())
        self.want = rows()
        self._inputs = {"row": src, "at": at}
        outs = [dest.write_slice_at(src, 0, at).slice(0, 1, 1), src * 2.0]
        self.plan: Plan = plan(outs, {dest: self.store}, target.location)

    def run(self, value: float, at: int) -> list[Array]:
        data = {self._inputs["row"]: row(value), self._inputs["at"]: np.array(at)}
        out: list[Array] = self.plan.run(data)
        self.want[at] = value
        return out

    def check(self, what: str) -> None:
        check_bits(what, self.store.to_numpy(), self.want)


def test_recording_runs_nothing(target: Target) -> None:
    w = Writer(target)
    w.run(1, 2)
    target.backend.copy_in(w.store.array, rows())
    w.want = rows()
    w.plan.capture()
    w.check("memory after a capture and before a replay")
    w.run(3, 0)
    w.check("memory after the first replay")


def test_a_replay_takes_the_data_of_its_own_pass(target: Target) -> None:
    w = Writer(target)
    w.run(1, 0)
    w.plan.capture()
    for n, at in enumerate((4, 0, 2, 2, 3, 1)):
        second, twice = w.run(10 + n, at)
        check_bits(f"replay {n}: what it computes", twice, row(2 * (10 + n)))
        check_bits(f"replay {n}: what it reads of the cache", second, w.want[1:2])
        w.check(f"replay {n} at offset {at}")
    assert w.plan.captured


def test_replays_that_nobody_waits_for_run_in_order(target: Target) -> None:
    target.need_capture()
    target.need("f32", "i64")
    dest, src, at = target.storage(rows()), target.storage(row(0)), target.storage(np.array(0))
    written = Queued(WriteSliceDoff(0), [dest, src, at], dest)
    written.give()
    recorded = target.backend.capture(target.location, written.steps)
    want = rows()
    for n, where in enumerate((3, 1, 4, 1, 0)):
        target.backend.copy_in(src.array, row(n))
        target.backend.copy_in(at.array, np.array(where))
        recorded.replay()
        want[where] = n
    check_bits("five replays at once", dest.to_numpy(), want)


def test_results_are_fresh(target: Target) -> None:
    w = Writer(target)
    w.run(0, 0)
    w.plan.capture()
    results = [w.run(n, 0)[1] for n in range(4)]
    for n, result in enumerate(results):
        check_bits(f"result of replay {n} after later ones", result, row(2 * n))


def test_a_plain_pass_goes_on_after_the_recording_is_dropped(target: Target) -> None:
    w = Writer(target)
    w.run(1, 1)
    w.plan.capture()
    w.run(2, 2)
    w.plan.drop_capture()
    w.run(3, 3)
    w.check("plain passes around a recording")


def test_what_is_bound_anew_is_what_is_written(target: Target) -> None:
    """Binding other memory ends the recording, which knows only the old."""
    w = Writer(target)
    w.run(1, 1)
    w.plan.capture()
    w.run(2, 2)
    old, before = w.store, w.want.copy()
    dest = next(t for t in w.plan.leaves if w.plan.storage_of(t) is old)
    w.store, w.want = target.storage(rows()), rows()
    w.plan.bind(dest, w.store)
    w.run(3, 3)
    w.check("the memory that is bound now")
    check_bits("the memory that was bound before", old.to_numpy(), before)
    w.plan.capture()
    w.run(4, 0)
    w.check("recorded again")
    check_bits("the memory that was bound before", old.to_numpy(), before)


def test_a_recording_keeps_what_it_uses(target: Target) -> None:
    w = Writer(target)
    w.run(1, 1)
    w.plan.capture()
    made, inputs, location = w.plan, w._inputs, target.location
    del w
    gc.collect()
    others = [Storage.allocate((1000,), "u8", location) for _ in range(6)]
    for other in others:
        target.backend.copy_in(other.array, np.full(1000, 255, np.uint8))
    out = made.run({inputs["row"]: row(7), inputs["at"]: np.array(1)})
    check_bits("the row that was written", out[0], row(7))
    check_bits("what was computed", out[1], row(14))


def test_every_location_records_and_replays_its_own_work(target: Target) -> None:
    target.need_capture()
    target.need("f32")
    backend, places = target.backend, (target.other_location(), target.location)
    ends = {place: [target.storage(full(n), place) for n in (1, 0)] for place in places}
    recorded = {}
    for place, (source, dest) in ends.items():
        work = adder(source, dest)
        work.give()
        backend.copy_in(source.array, full(3))
        recorded[place] = backend.capture(place, work.steps)
        check_bits(f"{place} after a capture and before a replay", dest.to_numpy(), full(2))
    for n in (5, 7):
        for k, (place, (source, dest)) in enumerate(ends.items()):
            backend.copy_in(source.array, full(n + 10 * k))
            recorded[place].replay()
            check_bits(f"{place} after a replay", dest.to_numpy(), full(n + 10 * k + 1))


def test_two_recordings_take_turns(target: Target) -> None:
    writers = [Writer(target), Writer(target)]
    for w in writers:
        w.run(1, 0)
        w.plan.capture()
    for n in range(4):
        for k, w in enumerate(writers):
            w.run(10 * k + n, (n + k) % ROWS)
    for k, w in enumerate(writers):
        w.check(f"memory of recording {k}")


def test_nodes_can_be_read_after_a_replay(target: Target) -> None:
    target.need_capture()
    target.need("f32")
    g = Graph()
    x = g.placeholder((1, 3), "f32")
    middle = x + 1.0
    made = plan([middle * 3.0, middle], {}, target.location)
    made.run({x: row(0)})
    made.capture()
    for n in range(3):
        made.run({x: row(n)})
        check_bits(f"a node after replay {n}", made.read(middle), row(n + 1))


# Sessions


def test_captured_steps_equal_plain_ones_bit_for_bit(target: Target) -> None:
    target.need_capture()
    target.need("f32", "i64")
    plain = Held(target.cache(16), target.location)
    held = Held(target.cache(16), target.location, kind=CapturedDecodeSession)
    others = [target.cache(16), target.cache(16)]
    for n in range(24):
        if n == 9:
            for h in (plain, held):
                h.rewind(4)
        if n == 16:
            before = bytes_of(held.cache), held.cache
            for h, other in zip((plain, held), others, strict=True):
                h.use(other)
        want, got = plain.token(), held.token()
        check_bits(f"step {n} beside a plain one", got, want)
    session = held.session
    assert isinstance(session, CapturedDecodeSession)
    assert session.reason is None, session.reason
    assert (session.captures, session.rebind_count) == (2, 1)
    assert session.replays >= 20
    held.check_rows()
    assert bytes_of(before[1]) == before[0], "a replay wrote into the cache it left"


def test_a_rebind_retires_the_recording(target: Target) -> None:
    target.need_capture()
    target.need("f32", "i64")
    h = Held(target.cache(8), target.location, kind=CapturedDecodeSession)
    for _ in range(3):
        h.token()
    assert h.session.plan.captured
    h.use(target.cache(8))
    assert not h.session.plan.captured
    for _ in range(3):
        h.token()
    assert h.session.plan.captured


def test_paged_steps_are_captured(target: Target) -> None:
    """Growing, forking and other sequences are data of the same recording."""
    target.need_capture()
    target.need("f32")
    h = PagedHeld(target.pool(blocks=10))
    a, b = h.open(), h.open()
    for _ in range(3):
        h.tokens(a)
    assert h.session.plan.captured
    for _ in range(5):
        h.tokens(a, b)
    c = h.fork(a)
    for _ in range(3):
        h.tokens(c, a, b)
    assert h.session.plan.captured
    h.check_rows(a, b, c)
