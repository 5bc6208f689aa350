"""One thread at a time: what a plan, a cache or a context holds while a verb works on it."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from lazykv.errors import SessionBusy
from lazykv.locks import new_hold, this_thread


class Owner:
    """Of what one thread at a time has to itself. Nobody waits: a second thread gets `SessionBusy`,
    and so does the same one unless it `nests`."""

    __slots__ = ("__weakref__", "_nests", "holds")

    def __init__(self, *, nests: bool = True) -> None:
        self._nests = nests
        # Threads by hold: the first has it, others are about to be refused or are nested.
        self.holds: dict[int, int] = {}
        _owners.add(self)

    @contextmanager
    def hold(
        self, who: object, got: str = "a call while another thread is in one",
        need: str = "one owner",
    ) -> Iterator[None]:  # fmt: skip
        hold, me = new_hold(), this_thread.number
        try:
            self.holds[hold] = me
            (first, thread), *_ = self.holds.items()
            if first != hold and not (self._nests and thread == me):
                raise SessionBusy(f"{who}: got {got}, need {need}")
            yield
        finally:
            self.holds.pop(hold, None)

    def after_fork(self) -> None:
        """In a forked child only the forking thread has what it had."""
        me = this_thread.number
        for hold, thread in list(self.holds.items()):
            if thread != me:
                del self.holds[hold]


_owners: WeakSet[Owner] = WeakSet()


def _after_fork() -> None:
    for owner in list(_owners):
        owner.after_fork()


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
