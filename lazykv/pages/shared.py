"""What threads, copies and forks find of a pool: its verbs run whole, and there is one of it."""

import os
import threading
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

from lazykv.errors import PoolError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="Shared")


class Shared:
    """Base of an object whose verbs are `locked`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._lost = False
        _all.add(self)

    def __reduce__(self) -> NoReturn:
        # Also what copy.copy asks for: two pools of the same blocks would count holders apart.
        raise PoolError(f"{self!r}: got a copy or a pickle, need a new pool; sequences can fork()")


def locked(verb: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """A verb that other threads see whole. They wait for it, also while it moves blocks to a store
    or back."""

    @wraps(verb)
    def guarded(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            if self._lost:
                raise PoolError(
                    f"{verb.__name__}: got a pool that another thread was changing at the fork, "
                    "need a new one"
                )
            return verb(self, *args, **kwargs)

    return guarded


_all: weakref.WeakSet[Shared] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child only the forking thread lives on: free what the others held. A pool that
    one of them was in the middle of changing is of no use there."""
    for pool in _all:
        pool._lost = not pool._lock.acquire(blocking=False)
        pool._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
