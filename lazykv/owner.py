"""One thread at a time: what a cache or a context holds while a verb reads, writes and moves on."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from lazykv.errors import SessionBusy


class Owner:
    """A lock that is never waited for: a second thread gets `SessionBusy`, and so does the same one
    unless it `nests`.

    In a forked child nobody has it: the thread that did is gone.
    """

    __slots__ = ("__weakref__", "_nests", "lock")

    def __init__(self, *, nests: bool = True) -> None:
        self._nests = nests
        self.free()
        _owners.add(self)

    def free(self) -> None:
        self.lock: Any = threading.RLock() if self._nests else threading.Lock()

    @contextmanager
    def hold(
        self, who: object, got: str = "a call while another thread is in one",
        need: str = "one owner",
    ) -> Iterator[None]:  # fmt: skip
        lock = self.lock
        if not lock.acquire(blocking=False):
            raise SessionBusy(f"{who}: got {got}, need {need}")
        try:
            yield
        finally:
            lock.release()


_owners: WeakSet[Owner] = WeakSet()


def _after_fork() -> None:
    for owner in _owners:
        owner.free()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


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
