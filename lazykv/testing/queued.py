"""Work that is given to a location and not waited for.

A plan waits before a pass returns. What becomes of queued work when memory is let go, when another
thread waits or when something fails shows only where nobody has waited yet. So tests give the steps
of single ops, as a plan does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lazykv.compiler.kernels import find_kernel, no_kernel
from lazykv.device import Call, DeviceLocation
from lazykv.errors import KernelError, LazyKvError, RangeError
from lazykv.ops.elementwise import AddScalar
from lazykv.ops.op import Op
from lazykv.ops.write import WriteSliceDoff
from lazykv.storage import Storage
from lazykv.testing.failing import Fail, skip_without_bodies
from lazykv.testing.golden import Array
from lazykv.testing.target import Target

N = 64
"""Elements of the storages here."""


def full(value: float) -> Array:
    return np.full(N, value, np.float32)


def empty(target: Target, place: DeviceLocation | None = None) -> Storage:
    target.need("f32")
    return Storage.allocate((N,), "f32", place or target.location)


class Queued:
    """One op on storages of one location, resolved once. For an op that destroys an input, `out` is
    that input.

    Raises `BackendUnavailable` if the backend has no kernel for the op itself.
    """

    def __init__(
        self, op: Op, ins: Sequence[Storage], out: Storage, scalars: Sequence[int] = ()
    ) -> None:
        place, specs = out.location, tuple(s.spec for s in ins)
        kernel = find_kernel(place, op, specs, out.spec)
        if kernel is None:
            raise no_kernel(place, op, specs)
        scratch = [
            Storage.allocate(s.shape, s.dtype, place) for s in kernel.scratch(op, specs, out.spec)
        ]
        self.op = op
        self.scalars = list(scalars)
        """Values of symbols for the next `give`."""
        self._kept = (*ins, out, *scratch)  # which queued work does not do
        self.steps = list(
            kernel.emit(
                Call(
                    op, tuple(s.array for s in ins), out.array, specs, out.spec,
                    tuple(s.array for s in scratch), self.scalars,
                )
            )
        )  # fmt: skip

    def give(self) -> None:
        for f, args in self.steps:
            f(*args)


def adder(source: Storage, dest: Storage) -> Queued:
    """Puts ``source + 1`` into dest."""
    return Queued(AddScalar(1.0), [source], dest)


# What fails

KINDS = ("kernel", "refusal")


def failing(target: Target, kind: str, place: DeviceLocation | None = None) -> Queued:
    """Work that fails when it runs: an op whose body raises, or a write at an offset in memory that
    is out of bounds. Skips the test where bodies of other people's ops do not run."""
    target.need("f32", "i64")
    dest, row = target.storage(full(0), place), target.storage(full(1), place)
    if kind == "kernel":
        with skip_without_bodies(target):
            return Queued(Fail(), [row], dest)
    offset = target.storage(np.array(N), place)
    return Queued(WriteSliceDoff(0), [dest, row, offset], dest)


class Told:
    """What the thread that gives failing work is told of it.

    A backend that runs work at once, or on the host, tells when it is given: by any exception, as
    kernels raise them. Later it is an error of lazykv's own, and names the op.
    """

    def __init__(self, target: Target, work: Queued) -> None:
        self._target = target
        self._work = work
        self.at_once: Exception | None = None
        self.later: list[LazyKvError] = []

    def give(self) -> None:
        try:
            self._work.give()
        except Exception as e:
            self.at_once = e

    def wait(self, place: DeviceLocation | None = None) -> None:
        self._listen(self._target.backend.synchronize, place or self._target.location)

    def copy_out(self, store: Storage) -> None:
        self._listen(self._target.backend.copy_out, store.array)

    def _listen(self, f: Callable[[Any], object], *args: Any) -> None:
        try:
            f(*args)
        except LazyKvError as e:
            self.later.append(e)

    def check(self) -> None:
        """It was told, once, and as the contract says."""
        count = len(self.later) + (self.at_once is not None)
        assert count == 1, f"{self._work.op.name}: told {count} times that it failed, need once"
        for e in self.later:
            kind = KernelError if isinstance(self._work.op, Fail) else RangeError
            assert isinstance(e, kind), f"got {type(e).__name__}: {e}, need a {kind.__name__}"
            assert e.op is self._work.op, f"got op {e.op!r} in {e!r}, need {self._work.op!r}"
            refused = e.refused
            assert refused is None or self._work.op in refused, f"refused: got {refused!r}"
