"""The bounded cache of compiled programs, by structure."""

import os
import threading
from collections import OrderedDict
from typing import Any

from lazykv import counters
from lazykv.compiler.program import Program, compile_trace
from lazykv.compiler.trace import Trace
from lazykv.config import plan_cache_size


class PlanCache:
    """Programs by structural key, the least recently used one dropped first.

    `size` None takes the setting, when the first program is asked for.
    """

    def __init__(self, size: int | None = None) -> None:
        self._size = size
        self._programs: OrderedDict[tuple[Any, ...], Program] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Most programs kept."""
        if self._size is None:
            self._size = plan_cache_size()
        return self._size

    def program(self, traced: Trace) -> Program:
        """The program for a traced graph, compiled only if its structure is new."""
        with self._lock:
            found = self._programs.get(traced.key)
            if found is not None:
                self._programs.move_to_end(traced.key)
        if found is not None:
            counters.add(plan_cache_hits=1)
            return found
        size = self.size
        built = compile_trace(traced)
        counters.add(plans_built=1)
        with self._lock:
            self._programs[traced.key] = built
            while len(self._programs) > size:
                self._programs.popitem(last=False)
        return built

    def after_fork(self) -> None:
        """In a forked child: a thread that held the lock is gone, maybe in the middle of a move."""
        self._programs = OrderedDict()
        self._lock = threading.Lock()

    def clear(self) -> None:
        with self._lock:
            self._programs.clear()

    def __len__(self) -> int:
        return len(self._programs)


plan_cache = PlanCache()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=plan_cache.after_fork)
