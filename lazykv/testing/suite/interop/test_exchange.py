"""Memory shared with other libraries: out of storages, and into them."""

import array
import gc
import sys
from typing import Any

import numpy as np
import pytest

from lazykv.device import CPU
from lazykv.dtypes import dtype as find_dtype
from lazykv.dtypes import to_raw
from lazykv.errors import BindingError
from lazykv.graph import Graph
from lazykv.runtime.realize import realize
from lazykv.storage import Storage
from lazykv.testing.compare import check_bits
from lazykv.testing.golden import STORED, Array, patterns, random_of
from lazykv.testing.target import Target

DLPACK = ("f64", "f32", "f16", "i8", "u8", "i32", "u32", "i64", "bool")
"""Dtypes that DLPack has in every version."""


def some(name: str) -> Array:
    return patterns(random_of("exchange", name), (3, 4), find_dtype(name))


def need_host_memory(target: Target) -> None:
    if not target.backend.capabilities.host_memory:
        pytest.skip(f"{target.name} declares no host_memory")


class OnlyDlpack:
    """An exporter that speaks DLPack and nothing else."""

    def __init__(self, data: Array) -> None:
        self._data = data

    def __dlpack__(self, **options: Any) -> Any:
        return self._data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self._data.__dlpack_device__()
        return int(kind), int(index)


# Out


@pytest.mark.parametrize("name", DLPACK)
def test_a_storage_is_exported_by_dlpack(target: Target, name: str) -> None:
    need_host_memory(target)
    target.need(name)
    store: Any = target.storage(some(name))
    assert store.__dlpack_device__()[0] == 1, "host memory is DLPack's device type 1"
    out = np.from_dlpack(store)
    check_bits(f"{name} by DLPack", out, some(name))
    with store.write() as memory:
        target.backend.copy_in(memory, np.zeros((3, 4), memory.dtype))
    target.backend.synchronize(target.location)
    check_bits(f"{name} by DLPack is the same memory", out, np.zeros((3, 4), out.dtype))


@pytest.mark.parametrize("name", STORED)
def test_a_storage_is_an_array(target: Target, name: str) -> None:
    need_host_memory(target)
    target.need(name)
    store = target.storage(some(name))
    out = np.asarray(store)
    assert out.dtype == store.dtype.numpy
    check_bits(f"{name} as an array", to_raw(out), to_raw(some(name)))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.12 brought __buffer__ (PEP 688)")
@pytest.mark.parametrize("name", STORED)
def test_a_storage_is_a_buffer(target: Target, name: str) -> None:
    need_host_memory(target)
    target.need(name)
    store: Any = target.storage(some(name))
    assert memoryview(store).tobytes() == some(name).tobytes()


def test_an_export_outlives_its_storage(target: Target) -> None:
    need_host_memory(target)
    target.need("f32")
    store: Any = target.storage(some("f32"))
    out = np.from_dlpack(store)
    del store
    gc.collect()
    others = [target.storage(np.zeros((3, 4), np.float32)) for _ in range(4)]
    check_bits("an export of a storage that was let go", out, some("f32"))
    assert len(others) == 4


@pytest.mark.parametrize("name", DLPACK)
def test_device_memory_is_exported_to_its_own_library(target: Target, name: str) -> None:
    """A backend whose memory is no host memory, but whose arrays speak DLPack."""
    if target.backend.capabilities.host_memory:
        pytest.skip(f"{target.name} has host_memory")
    target.need(name)
    store, xp = target.storage(some(name)), getattr(target.backend, "xp", None)
    from_dlpack = getattr(xp, "from_dlpack", None)
    try:
        store.__dlpack_device__()
    except (BindingError, AttributeError) as e:
        pytest.skip(f"{target.name} exports nothing: {e}")
    if from_dlpack is None or xp is np:
        pytest.skip(f"the xp of {target.name} has no from_dlpack of its own")
    target.backend.synchronize(target.location)
    got = target.backend.copy_out(from_dlpack(store))
    check_bits(f"{name} by DLPack, on the device", got, to_raw(some(name)))


# In


@pytest.mark.parametrize("name", DLPACK)
def test_dlpack_is_imported(target: Target, name: str) -> None:
    target.need(name)
    source = some(name)
    store = Storage.from_array(OnlyDlpack(source), target.location)
    source[...] = 0  # it was a copy
    check_bits(f"{name} from DLPack", store.to_numpy(), some(name))


def test_buffers_are_imported(target: Target) -> None:
    target.need("u8", "i64")
    numbers = array.array("q", [3, -1, 2**40])
    for data, want in (
        (bytes(range(7)), np.arange(7, dtype=np.uint8)),
        (bytearray(range(7)), np.arange(7, dtype=np.uint8)),
        (memoryview(bytes(range(14)))[::2], np.arange(0, 14, 2, dtype=np.uint8)),
        (numbers, np.array([3, -1, 2**40])),
    ):
        got = Storage.from_array(data, target.location).to_numpy()
        check_bits(f"a {type(data).__name__}", got, want)


def test_wrapped_memory_is_an_operand(target: Target) -> None:
    """Host memory that is lent, without a copy of ours, goes where the work is."""
    target.need("f32")
    lent = np.arange(12, dtype=np.float32).reshape(3, 4)
    g = Graph()
    x = g.const(Storage.wrap(OnlyDlpack(lent)))
    y = g.placeholder((3, 4), "f32")
    for n in range(2):
        got = realize(x + y, {y: target.storage(np.ones((3, 4), np.float32))},
                      device=target.location)  # fmt: skip
        check_bits(f"pass {n}", got, np.arange(1, 13, dtype=np.float32).reshape(3, 4) + 5 * n)
        lent += 5
    check_bits("the lender's own", lent, np.arange(10, 22, dtype=np.float32).reshape(3, 4))


def test_read_only_imports_are_never_written(target: Target) -> None:
    target.need("f32")
    lent = np.zeros((3, 4), np.float32)
    lent.flags.writeable = False
    g = Graph()
    x = g.placeholder((3, 4), "f32")
    row = g.const(np.ones((1, 4), np.float32))
    out = x.at[1:2].set(row)
    with pytest.raises(BindingError):
        realize(out, {x: Storage.wrap(lent)})
    store = Storage.from_array(lent, target.location)
    realize(out, {x: store}, device=target.location)
    want = np.zeros((3, 4), np.float32)
    check_bits("the lender's own", lent, want)
    want[1] = 1
    check_bits("the copy", store.to_numpy(), want)


def test_a_plan_writes_wrapped_memory_in_place(target: Target) -> None:
    if target.location != CPU:
        pytest.skip("memory of the host is wrapped on cpu")
    lent = np.zeros((3, 4), np.float32)
    store = Storage.wrap(OnlyDlpack(lent))
    g = Graph()
    x = g.placeholder((3, 4), "f32")
    realize(x.at[1:2].set(g.const(np.ones((1, 4), np.float32))), {x: store})
    want = np.zeros((3, 4), np.float32)
    want[1] = 1
    check_bits("the lender's own", lent, want)
    del lent
    gc.collect()
    check_bits("after the lender let go", store.to_numpy(), want)
