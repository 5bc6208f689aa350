"""Settings read from the environment."""

import os

from lazykv.errors import RangeError


def plan_cache_size() -> int:
    """Compiled programs kept for reuse (``LAZYKV_PLAN_CACHE``); the least recently used goes first.

    Read when the first program is made, so that a bad value fails there and not at import.
    """
    text = os.environ.get("LAZYKV_PLAN_CACHE", "256")
    if not text.isdecimal() or int(text) < 1:
        raise RangeError(f"LAZYKV_PLAN_CACHE: got {text!r}, need a whole number of at least 1")
    return int(text)


POISON = os.environ.get("LAZYKV_POISON", "0") not in ("", "0")
"""Debug: unfilled memory holds a pattern, and reading a cache row never written is an error."""
