"""Another library, as a backend sees it: somebody who lends memory of its device by DLPack."""

from collections.abc import Callable
from typing import Any

import pytest

from lazykv import dlpack
from lazykv.storage import Storage
from lazykv.testing.target import Target


class Lender:
    """Lends the memory of a storage, once, and keeps nothing of it itself.

    `change` is given the capsule's tensor and may say something else of the memory than the storage
    does: another shape, other strides, a later start.
    """

    def __init__(
        self, store: Storage, change: Callable[[Any], object] = lambda tensor: None,
        read_only: bool = False,
    ) -> None:  # fmt: skip
        self._device = store.__dlpack_device__()
        self._capsule: object = store.__dlpack__(max_version=(1, 0))
        dlpack.label(self._capsule, read_only=read_only)
        change(dlpack.contents(self._capsule)[1])

    def __dlpack__(self, **options: object) -> object:
        capsule, self._capsule = self._capsule, None
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def rows_of(start: int, stop: int) -> Callable[[Any], None]:
    """Some rows of a matrix, found by the offset in bytes."""

    def change(tensor: Any) -> None:
        tensor.byte_offset += start * tensor.shape[1] * tensor.bits // 8
        tensor.shape[0] = stop - start

    return change


def transposed(tensor: Any) -> None:
    """The columns of a matrix as rows."""
    if not tensor.strides:
        pytest.skip("the capsule has no strides to change")
    for line in (tensor.shape, tensor.strides):
        line[0], line[1] = line[1], line[0]


def need_lending(target: Target) -> None:
    """Skip the test if the backend takes no memory of others."""
    if target.backend.dlpack_device_type is None:
        pytest.skip(f"{target.name} declares no dlpack_device_type")
