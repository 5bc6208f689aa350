"""The bounded cache of compiled programs, by structure."""

import threading
from collections import OrderedDict
from typing import Any

from lazykv import counters
from lazykv.compiler.program import Program, compile_trace
from lazykv.compiler.trace import Trace
from lazykv.config import PLAN_CACHE_SIZE


class PlanCache:
    """Programs by structural key, the least recently used one dropped first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._programs: OrderedDict[tuple[Any, ...], Program] = OrderedDict()
        self._lock = threading.Lock()

    def program(self, traced: Trace) -> Program:
        """The program for a traced graph, compiled only if its structure is new."""
        with self._lock:
            found = self._programs.get(traced.key)
            if found is not None:
                self._programs.move_to_end(traced.key)
        if found is not None:
            counters.add(plan_cache_hits=1)
            return found
        built = compile_trace(traced)
        counters.add(plans_built=1)
        with self._lock:
            self._programs[traced.key] = built
            while len(self._programs) > self.size:
                self._programs.popitem(last=False)
        return built

    def clear(self) -> None:
        with self._lock:
            self._programs.clear()

    def __len__(self) -> int:
        return len(self._programs)


plan_cache = PlanCache(PLAN_CACHE_SIZE)
