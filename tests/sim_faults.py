"""A simulated device of a test's own, and interrupts of what it has queued."""

from collections.abc import Iterator
from contextlib import contextmanager

from lazykv.backends.sim import SimBackend
from lazykv.device import device, register_backend


@contextmanager
def fresh_sim() -> Iterator[SimBackend]:
    """A new one in place of the process's own, so that counts begin at 0."""
    before, made = device("sim:0").backend, SimBackend()
    register_backend("sim", made)
    try:
        yield made
    finally:
        register_backend("sim", before)


@contextmanager
def interrupted(sim: SimBackend, k: int) -> Iterator[None]:
    """Ctrl-C arrives when the `k`-th kernel from now is about to run."""
    left, real = k, sim._count

    def count(what: str) -> bool:
        nonlocal left
        left -= what == "kernel"
        if what == "kernel" and left == 0:
            raise KeyboardInterrupt
        return real(what)

    sim._count = count
    try:
        yield
    finally:
        del sim._count
