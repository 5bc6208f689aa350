"""Devices and stores that fail when told to."""

from toy_backends import Toy

import lazykv as lk
from lazykv.device import Kernel


class Faulty(Toy):
    """Kernels of one op fail as often as asked, after they have written."""

    kind = "faulty"

    def __init__(self, op: type) -> None:
        super().__init__()
        self.op = op
        self.failures = 0
        self.poison: int | None = None

    def kernel(self, op, ins, out):
        inner = super().kernel(op, ins, out)
        if type(op) is not self.op:
            return inner

        def check(*arrays) -> None:
            if self.failures > 0:
                self.failures -= 1
                raise RuntimeError("the device lost its mind")
            if self.poison is not None and any((a == self.poison).any() for a in arrays):
                raise RuntimeError("a token that no kernel can take")

        def emit(call):
            return [*inner.emit(call), (check, call.ins[1:])]

        return Kernel(emit, inner.scratch)


class BrittleStore(lk.MemoryBlockStore):
    """Refuses to keep, give back or delete blocks when told to, or gives back others ("whole")."""

    def __init__(self) -> None:
        super().__init__()
        self.refuse: set[str] = set()

    def put(self, key, data) -> None:
        if "put" in self.refuse:
            raise lk.BlockStoreError("put: got no room, need some")
        super().put(key, data)

    def delete(self, key) -> None:
        if "delete" in self.refuse:
            raise lk.BlockStoreError("delete: got no answer, need one")
        super().delete(key)

    def get(self, key) -> bytes:
        if "get" in self.refuse:
            raise lk.BlockStoreError("get: got nothing, need the block")
        data = super().get(key)
        return data[:-1] + bytes([data[-1] ^ 1]) if "whole" in self.refuse else data
