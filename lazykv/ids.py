"""Identities: counters that never repeat in a process and never are 0."""

import itertools
from typing import NewType

NodeId = NewType("NodeId", int)
PlanId = NewType("PlanId", int)
StorageId = NewType("StorageId", int)
KvAllocId = NewType("KvAllocId", int)

_node_ids = itertools.count(1)
_plan_ids = itertools.count(1)
_storage_ids = itertools.count(1)
_alloc_ids = itertools.count(1)
_model_ids = itertools.count(1)


def next_node_id() -> NodeId:
    return NodeId(next(_node_ids))


def next_plan_id() -> PlanId:
    return PlanId(next(_plan_ids))


def next_storage_id() -> StorageId:
    return StorageId(next(_storage_ids))


def next_alloc_id() -> KvAllocId:
    return KvAllocId(next(_alloc_ids))


class ModelInstanceId(int):
    """Names one loaded model in this process; every construction mints a new one."""

    def __new__(cls) -> "ModelInstanceId":
        return super().__new__(cls, next(_model_ids))

    def __repr__(self) -> str:
        return f"ModelInstanceId({int(self)})"

    def __deepcopy__(self, memo: object) -> "ModelInstanceId":
        return self

    def __copy__(self) -> "ModelInstanceId":
        return self
