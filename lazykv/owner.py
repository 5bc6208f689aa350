"""One thread at a time: what a cache or a context holds while a verb reads, writes and moves on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from lazykv.errors import SessionBusy


class Owner:
    """A lock that is never waited for: a second thread gets `SessionBusy`, the same one nests."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
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
