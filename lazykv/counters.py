"""Process totals, for tests and `lk.stats()`: counters instead of timers."""

import os
import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals since the process started.

    `plans_built` counts graphs compiled, `plan_cache_hits` graphs whose structure was already
    compiled, `kernels_run` plan steps executed but those that hand out a result, `bytes_moved`
    bytes written by moves (writes, copies, fills and results), `allocations` buffers obtained from
    backends.
    """

    plans_built: int = 0
    plan_cache_hits: int = 0
    kernels_run: int = 0
    bytes_moved: int = 0
    allocations: int = 0


_lock = threading.Lock()
_totals = Stats()


def _after_fork() -> None:
    # A thread that held the lock does not exist in the child.
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def add(
    *, plans_built: int = 0, plan_cache_hits: int = 0, kernels_run: int = 0,
    bytes_moved: int = 0, allocations: int = 0,
) -> None:  # fmt: skip
    global _totals
    with _lock:
        t = _totals
        _totals = replace(
            t,
            plans_built=t.plans_built + plans_built,
            plan_cache_hits=t.plan_cache_hits + plan_cache_hits,
            kernels_run=t.kernels_run + kernels_run,
            bytes_moved=t.bytes_moved + bytes_moved,
            allocations=t.allocations + allocations,
        )


def stats() -> Stats:
    """An immutable snapshot of the process totals."""
    return _totals
