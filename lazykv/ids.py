"""Identities: counters that never repeat in a process and never are 0."""

import itertools
from collections.abc import Iterator
from typing import ClassVar, NewType, Self

NodeId = NewType("NodeId", int)
PlanId = NewType("PlanId", int)
StorageId = NewType("StorageId", int)

_node_ids = itertools.count(1)
_plan_ids = itertools.count(1)
_storage_ids = itertools.count(1)


def next_node_id() -> NodeId:
    return NodeId(next(_node_ids))


def next_plan_id() -> PlanId:
    return PlanId(next(_plan_ids))


def next_storage_id() -> StorageId:
    return StorageId(next(_storage_ids))


class Minted(int):
    """Base of the ids that are types of their own: every construction mints a new one.

    A copy is the same id. A pickle is a plain number, since elsewhere it names nothing.
    """

    _ids: ClassVar[Iterator[int]]

    def __init_subclass__(cls) -> None:
        cls._ids = itertools.count(1)

    def __new__(cls) -> Self:
        return super().__new__(cls, next(cls._ids))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({int(self)})"

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __copy__(self) -> Self:
        return self

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


class KvAllocId(Minted):
    """Names one allocation of a cache or a pool.

    ``KvAllocId(number)`` mints nothing: it is how a cache of another library, which counts by
    itself, says which allocation it means.
    """

    def __new__(cls, number: int | None = None) -> Self:
        return super().__new__(cls) if number is None else int.__new__(cls, number)


def next_alloc_id() -> KvAllocId:
    return KvAllocId()


class ModelInstanceId(Minted):
    """Names one loaded model in this process."""


class SessionHandle(Minted):
    """Names one sequence of a paged pool; of no other pool, and never of a later sequence."""


class PrefixId(Minted):
    """Names one registered prefix of a paged pool."""


class FenceId(Minted):
    """Names one step that a paged pool waits for."""


class RequestId(Minted):
    """Names one request of a serving engine. Later requests have higher ones."""
