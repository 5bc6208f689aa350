"""Work that fails in a replay says so like any other; nothing is written where it must not be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from lazykv.errors import CaptureError, KernelError, LazyKvError, RangeError
from lazykv.graph import Graph
from lazykv.ops.move import Take
from lazykv.ops.write import WriteSliceDoff, WriteSliceRotating
from lazykv.ops.write_rows import WriteRows
from lazykv.storage import Storage
from lazykv.testing.compare import check_bits
from lazykv.testing.failing import PURPOSE, disarmed, fail, plan_to_fail
from lazykv.testing.golden import Array
from lazykv.testing.queued import Queued
from lazykv.testing.target import Target

ROWS = 5


def numbered(rows: int, first: float = 0) -> Array:
    return (first + np.arange(rows * 3, dtype=np.float32)).reshape(rows, 3)


def test_a_kernel_that_fails_in_a_replay_is_named(target: Target) -> None:
    target.need_capture()
    target.need("f32")
    g = Graph()
    x, y = g.placeholder((ROWS, 3), "f32"), g.placeholder((ROWS, 3), "f32")
    source, store = target.storage(numbered(ROWS)), target.storage(numbered(ROWS))
    written = y.at[:].set(fail(x + 1.0))
    made = plan_to_fail(target, [x * 2.0], {x: source, y: store}, effects=[written])
    with disarmed():
        made.run()
        try:
            made.capture()
        except CaptureError as e:
            pytest.skip(f"{target.name} records no op by its body: {e}")
    for n in range(2):
        before = store.to_numpy()
        target.backend.copy_in(source.array, numbered(ROWS, n))
        with pytest.raises(KernelError, match=r"^fail\[.*f32\[5,3\]") as caught:
            made.run()
        assert PURPOSE in str(caught.value), "the message says what the kernel said"
        target.backend.synchronize(target.location)  # it was told
        check_bits("what it would have written, which is not torn", store.to_numpy(), before)
        with disarmed():
            made.run()
        check_bits("what a later replay writes", store.to_numpy(), numbered(ROWS, n) + 1)
    assert made.captured


@dataclass(frozen=True)
class Numbered:
    """Work that reads a number from memory: how to make it, of a storage of rows, one of a row and
    one of the number, and a number that fits."""

    make: Callable[[Storage, Storage, Storage], Queued]
    shape: tuple[int, ...] = ()
    bad: tuple[int, ...] = (ROWS, -1, 2**40, -(2**40))
    good: int = 2


WORK = {
    "write_slice_at": Numbered(lambda d, r, n: Queued(WriteSliceDoff(0), [d, r, n], d)),
    "write_slice_rotating": Numbered(
        lambda d, r, n: Queued(WriteSliceRotating(0, ROWS), [d, r, n], d), bad=(-1, -(2**40))
    ),
    "write_rows": Numbered(lambda d, r, n: Queued(WriteRows(False), [d, r, n], d), shape=(1,)),
    "take": Numbered(lambda d, r, n: Queued(Take(), [d, n], r), shape=(1,)),
}


@pytest.mark.parametrize("name", WORK)
def test_a_number_out_of_bounds_in_a_replay_writes_nothing_elsewhere(
    target: Target, name: str
) -> None:
    """It is refused by name, as in a plain pass; or, where a recording cannot check, it harms no
    bytes but those of the op's own result."""
    target.need_capture()
    target.need("f32", "i64")
    case, backend = WORK[name], target.backend

    def number(n: int) -> Array:
        return np.full(case.shape, n, np.int64)

    neighbours = [target.storage(numbered(ROWS, 1000 * n)) for n in range(3)]
    dest, row = target.storage(numbered(ROWS)), target.storage(numbered(1, 50))
    at = target.storage(number(case.good))
    neighbours += [target.storage(numbered(ROWS, 1000 * n)) for n in range(3, 6)]
    work = case.make(dest, row, at)
    work.give()
    out, source = (row, dest) if name == "take" else (dest, row)
    kept, want = source.to_numpy(), out.to_numpy()
    recorded = backend.capture(target.location, work.steps)
    for bad in case.bad:
        backend.copy_in(at.array, number(bad))
        error = replay(target, recorded)
        what = f"{name} of {bad} in a replay"
        if error is not None:
            assert isinstance(error, RangeError), f"{what}: got {error!r}, need a RangeError"
            assert error.op is work.op, f"{what}: got op {error.op!r}, need {work.op!r}"
            if out is dest:
                check_bits(f"{what}: the destination", dest.to_numpy(), want)
        check_bits(f"{what}: its operand", source.to_numpy(), kept)
        for n, other in enumerate(neighbours):
            check_bits(f"{what}: memory of others", other.to_numpy(), numbered(ROWS, 1000 * n))
        backend.copy_in(at.array, number(case.good))
        backend.copy_in(out.array, want)
        assert replay(target, recorded) is None, f"{what}: the next replay was refused"
        check_bits(f"{what}: the next replay", out.to_numpy(), want)


def replay(target: Target, recorded: Any) -> LazyKvError | None:
    try:
        recorded.replay()
        target.backend.synchronize(target.location)
    except LazyKvError as e:
        return e
    return None
