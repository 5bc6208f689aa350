"""What cannot be recorded is refused, and what others do meanwhile is not recorded."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from lazykv.device import Step
from lazykv.errors import CaptureError
from lazykv.graph import Graph
from lazykv.runtime.realize import plan
from lazykv.storage import Storage
from lazykv.symbols import Sym
from lazykv.testing.compare import check_bits
from lazykv.testing.queued import adder, full
from lazykv.testing.target import Target

ROWS = np.zeros((5, 3), np.float32)

CALLS: dict[str, Callable[[Target, Storage], Step]] = {
    "allocate": lambda t, s: (t.backend.allocate, (64, t.location)),
    "copy_in": lambda t, s: (t.backend.copy_in, (s.array, full(9))),
    "feeder": lambda t, s: (t.backend.feeder(s.array), (full(9),)),
    "copy_out": lambda t, s: (t.backend.copy_out, (s.array,)),
    "synchronize": lambda t, s: (t.backend.synchronize, (t.location,)),
    "capture": lambda t, s: (t.backend.capture, (t.location, [])),
    "replay": lambda t, s: (t.backend.capture(t.location, []).replay, ()),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_what_the_host_has_a_part_in_is_refused(
    target: Target, call: Callable[[Target, Storage], Step]
) -> None:
    target.need_capture()
    backend, place = target.backend, target.location
    memory, source, dest = (target.storage(full(n)) for n in (5, 1, 0))
    work, refused = adder(source, dest), call(target, memory)
    for _ in range(2):
        with pytest.raises(CaptureError):
            backend.capture(place, [*work.steps, refused])
        check_bits("what was recorded before the refusal", dest.to_numpy(), full(0))
        check_bits("memory beside", memory.to_numpy(), full(5))
    f, args = refused
    f(*args)  # outside of a capture it is no matter
    work.give()
    check_bits("plain work afterwards", dest.to_numpy(), full(2))
    recorded = backend.capture(place, work.steps)
    backend.copy_in(source.array, full(6))
    recorded.replay()
    check_bits("a recording afterwards", dest.to_numpy(), full(7))


def test_other_threads_go_on_while_one_captures(target: Target) -> None:
    """All that the capturing thread is refused; none of it becomes part of the recording."""
    target.need_capture()
    backend, place = target.backend, target.location
    source, dest, theirs, result = (target.storage(full(n)) for n in (1, 0, 0, 0))
    mine, other, earlier = adder(source, dest), adder(theirs, result), adder(source, source)
    for work in (mine, other, earlier):
        work.give()
    before = backend.capture(place, earlier.steps)
    done = []

    def beside() -> None:
        backend.copy_in(theirs.array, full(3))
        other.give()
        backend.synchronize(place)
        check_bits("work of another thread", backend.copy_out(result.array), full(4))
        backend.feeder(theirs.array)(full(5))
        recorded = backend.capture(place, other.steps)
        check_bits("before a replay there", backend.copy_out(result.array), full(4))
        recorded.replay()
        check_bits("a replay of another thread", backend.copy_out(result.array), full(6))
        before.replay()
        check_bits("of an earlier recording", backend.copy_out(source.array), full(3))
        check_bits("a plan there", target.run(plus_one(target, full(7))), full(8))
        done.append(True)

    with ThreadPoolExecutor(1) as thread:
        meanwhile: Step = (lambda: thread.submit(beside).result(), ())
        recorded = backend.capture(place, [*mine.steps, meanwhile, *mine.steps])
    assert done == [True], f"capture: made a call {len(done)} times, need once"
    check_bits("what was recorded", dest.to_numpy(), full(2))
    for store in (theirs, result):
        backend.copy_in(store.array, full(-1))
    recorded.replay()
    check_bits("a replay of what was recorded", dest.to_numpy(), full(4))
    for store in (theirs, result):
        check_bits("what another thread did is not replayed", store.to_numpy(), full(-1))
    check_bits("the source", source.to_numpy(), full(3))


def plus_one(target: Target, data: Any) -> Any:
    g = Graph()
    return g.const(target.storage(data)) + 1.0


def test_symbols_are_refused(target: Target) -> None:
    """Their values are known to the host alone, and would be frozen into the recording."""
    target.need("f32")
    g, at = Graph(), Sym("at", 0, 4)
    x = g.placeholder((5, 3), "f32")
    data = np.arange(15, dtype=np.float32).reshape(5, 3)
    made = plan(x.slice(0, at, 1), {x: target.storage(data)}, target.location)
    for n in (4, 1):
        with pytest.raises(CaptureError):
            made.capture()
        check_bits(f"a plain pass at {n} afterwards", made.run(env={at: n}), data[n : n + 1])


def test_two_locations_are_refused(target: Target) -> None:
    target.need("f32")
    there: Any = target.other_location()
    g = Graph()
    x = g.placeholder((5, 3), "f32")
    made = plan(x.to(there) + 1.0, {x: target.storage(ROWS)}, target.location)
    with pytest.raises(CaptureError):
        made.capture()
    check_bits("a plain pass afterwards", made.run(), ROWS + 1)


def test_without_capture_it_is_refused(target: Target) -> None:
    if target.backend.capabilities.capture:
        pytest.skip(f"{target.name} declares capture")
    target.need("f32")
    g = Graph()
    x = g.placeholder((5, 3), "f32")
    made = plan(x + 1.0, {x: target.storage(ROWS)}, target.location)
    with pytest.raises(CaptureError):
        made.capture()
    with pytest.raises(CaptureError):
        target.backend.capture(target.location, [])
    check_bits("a plain pass afterwards", made.run(), ROWS + 1)
