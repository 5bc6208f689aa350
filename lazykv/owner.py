"""One thread at a time: what a cache or a context holds while a verb reads, writes and moves on."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from lazykv.errors import SessionBusy


class Locked(Protocol):
    """An object with a lock of its own, which `free` replaces by one that nobody holds."""

    def free(self) -> None: ...


_locked: WeakSet[Locked] = WeakSet()


def free_after_fork(locked: Locked) -> None:
    """Remember an object whose lock another thread may hold when the process forks: in the child
    that thread is gone."""
    _locked.add(locked)


def _after_fork() -> None:
    for each in _locked:
        each.free()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Owner:
    """A lock that is never waited for: a second thread gets `SessionBusy`, the same one nests."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self.free()
        free_after_fork(self)

    def free(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def hold(self, who: str) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise SessionBusy(f"{who}: got a call while another thread is in one, need one owner")
        try:
            yield
        finally:
            self._lock.release()


class Owned(Protocol):
    """An object whose verbs belong to one thread at a time."""

    def owned(self, who: str) -> AbstractContextManager[None]: ...


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Owned)


def exclusive(verb: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that runs as a whole or gives `SessionBusy`."""

    @wraps(verb)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.owned(f"{type(self).__name__}.{verb.__name__}"):
            return verb(self, *args, **kwargs)

    return guarded
