"""Backends that keep to the rules in an unusual way pass; one that cannot is told why."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from broken_backends import Cpu

from lazykv.backends.cpu import CpuBackend
from lazykv.device import Backend, Capabilities, Kernel, register_backend, unregister_backend
from lazykv.errors import DTypeError
from lazykv.testing.runner import Done, run_suite


@contextmanager
def registered(backend: Backend) -> Iterator[None]:
    register_backend("broken", backend)
    try:
        yield
    finally:
        unregister_backend("broken")


def run(backend: Backend, **options: object) -> Done:
    with registered(backend):
        return run_suite("broken", **options)


class Few(Cpu):
    """Stores two dtypes, and views its memory as bytes besides."""

    names = frozenset({"f32", "u8"})
    capabilities = Capabilities(dtypes=frozenset({"f32"}), host_memory=True)

    def view(self, buffer, dtype, layout):
        if dtype.name not in self.names:
            raise DTypeError(f"view on broken: got {dtype}, need one of {sorted(self.names)}")
        return super().view(buffer, dtype, layout)

    def kernel(self, op, ins, out):
        dtypes = {s.dtype.name for s in (*ins, out)}
        return super().kernel(op, ins, out) if dtypes <= {"f32"} else None


class NoBytes(Few):
    names = frozenset({"f32"})


class Tracing(Cpu):
    """Runs the body of an op that it does not know once before, on zeros, to see what it does."""

    def kernel(self, op, ins, out):
        inner = CpuBackend.kernel(self, op, ins, out)
        if inner is None or op.name != "fail":
            return inner

        def emit(call):
            op.body(np, *(np.zeros(s.shape, s.dtype.compute) for s in call.in_specs))
            return inner.emit(call)

        return Kernel(emit, inner.scratch)


def test_a_backend_of_one_dtype_passes():
    done = run(Few(), levels=["session", "fault"])
    assert done.code == 0, done.text
    outcomes = done.run.report.outcomes()
    assert outcomes["session/test_held_plans.py::test_sequences_of_a_batch_are_reordered"] == (
        "skipped"
    )


def test_memory_without_bytes_is_told_so():
    done = run(NoBytes(), tests=["core/test_memory.py"], keyword="bytes_whatever")
    (result,) = done.run.report.results.values()
    assert result.outcome == "failed"
    assert "got u8, need one of ['f32'], need a view of bytes (u8), declared or not" in (
        str(result.reason)
    )
    done = run(Few(), tests=["core/test_memory.py"], keyword="bytes_whatever")
    assert done.code == 0


@pytest.mark.parametrize("level", ["async", "fault"])
def test_bodies_may_be_run_when_calls_are_emitted(level):
    done = run(Tracing(), levels=[level], keyword="fail")
    assert done.code == 0, done.text
    assert "passed" in done.run.report.outcomes().values()
