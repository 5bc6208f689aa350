"""Settings read from the environment, once, when lazykv is imported."""

import os

from lazykv.errors import RangeError


def _count(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise RangeError(f"{name}: got {text!r}, need a whole number of at least 1")
    return int(text)


PLAN_CACHE_SIZE = _count("LAZYKV_PLAN_CACHE", 256)
"""Compiled programs kept for reuse; the least recently used one goes first."""
