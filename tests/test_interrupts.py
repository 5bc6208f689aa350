"""Ctrl-C anywhere in a pass, a step or a block: nothing stays locked or busy.

An interrupt is raised at every point where CPython looks for signals: when a function begins or is
resumed, after a call, and where a loop begins anew.
"""

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
from small_llama import small_llama

import lazykv as lk

ROOT = str(Path(lk.__file__).parent)
_OPS: dict[CodeType, dict[int, str]] = {}


def op_at(code: CodeType, offset: int) -> str:
    if code not in _OPS:
        _OPS[code] = {i.offset: i.opname for i in dis.get_instructions(code)}
    return _OPS[code].get(offset, "")


class Interrupt:
    """Raises KeyboardInterrupt at the n-th point; counts them all if n is 0."""

    def __init__(self, n: int) -> None:
        self.left, self.seen = n, 0
        self.last: dict[FrameType, str] = {}

    def point(self) -> None:
        self.seen += 1
        if self.seen == self.left:
            raise KeyboardInterrupt

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            self.last[frame] = ""
            self.point()
        elif event == "opcode":
            before, self.last[frame] = self.last[frame], op_at(frame.f_code, frame.f_lasti)
            if before.startswith("CALL") or before == "JUMP_BACKWARD":
                self.point()
        elif event == "return":
            self.last.pop(frame, None)
        return self.trace


def interrupted(call: Callable[[], object], n: int) -> int:
    """Run a call that is interrupted at point n; how many points were met."""
    interrupt = Interrupt(n)
    before = sys.gettrace()
    sys.settrace(interrupt.trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return interrupt.seen


def check_everywhere(call: Callable[[], object], after: Callable[[], None]) -> None:
    points = interrupted(call, 0)
    assert points > 20
    for n in range(1, points + 1):
        assert interrupted(call, n) >= n
        after()


def free(*stores: lk.Storage) -> None:
    for store in stores:
        assert not store.lock.holds
        assert not store.lock.nested
        assert not store.lock.bells


@pytest.mark.parametrize("place", ["cpu", "sim:0"])
def test_a_pass_of_a_plan(place: str) -> None:
    g = lk.Graph()
    written, read = (lk.Storage.from_array(np.zeros(4, np.float32), place) for _ in range(2))
    dest, source, row = (g.placeholder((4,), "f32") for _ in range(3))
    plan = lk.plan(
        [source + row], {dest: written, source: read}, place, effects=[dest.at[:].set(row)]
    )
    ones = np.ones(4, np.float32)

    def after() -> None:
        free(written, read)
        assert not plan.running.holds
        if written.torn:
            with written.write() as a:
                lk.device(place).backend.copy_in(a, np.zeros(4, np.float32))
        assert plan.run({row: ones})[0].tolist() == [1] * 4
        assert written.to_numpy().tolist() == [1] * 4

    after()
    check_everywhere(lambda: plan.run({row: ones}), after)


def test_a_step_of_a_session() -> None:
    model = small_llama()
    ctx = lk.InferenceContext()
    cache = model.new_cache(8)
    model.prefill([1, 2], cache, ctx)
    want = model.decode_step(3, cache, ctx)
    stores = [cache.slot_storage(layer, slot) for layer in range(2) for slot in (0, 1)]

    def after() -> None:
        free(*stores)
        if any(s.torn for s in stores):
            for s in stores:
                with s.write() as a:
                    a[...] = 0
        cache.reset()
        model.prefill([1, 2], cache, ctx)
        np.testing.assert_array_equal(model.decode_step(3, cache, ctx), want)
        cache.truncate_to(2)

    after()
    session = ctx.take_decode_session()
    assert session is not None
    data, env = {}, {}

    step = type(session).step

    def note(self: Any, given: Any, values: Any = None) -> Any:
        data.update(given)
        env.update(values or {})
        return step(self, given, values)

    ctx.put_decode_session(session)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(type(session), "step", note)
        model.decode_step(3, cache, ctx)
    points = interrupted(lambda: session.step(data, env), 0)
    assert points > 20
    for n in range(1, points + 1):
        interrupted(lambda: session.step(data, env), n)
        assert not session.plan.running.holds
        after()
