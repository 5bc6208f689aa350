"""Locations, memory, views and copies: what everything else stands on."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from lazykv.compiler.ir import Output
from lazykv.device import API_VERSION, DeviceLocation, device
from lazykv.dlpack import HOST
from lazykv.dtypes import dtype as find_dtype
from lazykv.dtypes import to_raw, u8
from lazykv.errors import BackendUnavailable, LazyKvError
from lazykv.graph import Graph
from lazykv.layout import Layout
from lazykv.ops.op import Op
from lazykv.ops.sources import Alloc, Const, Placeholder
from lazykv.runtime.realize import plan
from lazykv.storage import Storage
from lazykv.testing.compare import check_bits
from lazykv.testing.golden import STORED, Array, patterns, random_of
from lazykv.testing.target import Target

ALIGNMENT = 64


def flat(n: int) -> Layout:
    return Layout.contiguous((n,))


def raw(target: Target, n: int) -> Any:
    """Fresh memory as bytes."""
    return target.backend.view(target.backend.allocate(n, target.location), u8, flat(n))


def test_declarations_make_sense(target: Target) -> None:
    backend = target.backend
    assert backend.api_version == API_VERSION
    places = backend.locations()
    assert isinstance(places, tuple), f"locations: got {type(places).__name__}, need a tuple"
    assert target.location in places
    for place in places:
        assert isinstance(place, DeviceLocation)
        assert device(place).backend is backend, f"{place} is served by another backend"
    unknown = backend.capabilities.dtypes - set(STORED)
    assert not unknown, f"capabilities: got dtypes {sorted(unknown)}, need names of lazykv's own"
    assert "f32" in backend.capabilities.dtypes, "every backend stores f32"
    declared = backend.capabilities.ops
    if declared is not None:
        unknown = declared - runnable_ops()
        assert not unknown, f"capabilities: got ops {sorted(unknown)}, need names of ops"
        missing = NEEDED - declared
        assert not missing, f"capabilities: got no {sorted(missing)}, need {sorted(NEEDED)}"


NEEDED = {"copy", "write_slice", "zero_fill"}
"""Without these there is no cache: new ones are zeroed, rows written, and bytes kept that a write
destroys."""


def runnable_ops() -> set[str]:
    """Names of all ops but those that hold data or hand it out, which no backend runs."""
    found, kinds = set(), list(Op.__subclasses__())
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind not in (Const, Placeholder, Alloc, Output):
            found.add(vars(kind).get("name", ""))
    return found - {""}


def test_memory_is_viewed_as_bytes_whatever_dtypes_are_declared(target: Target) -> None:
    """A plan's intermediates lie in bytes, so every plan asks for such a view."""
    memory = target.backend.allocate(64, target.location)
    try:
        found = target.backend.view(memory, u8, flat(64))
    except LazyKvError as e:
        pytest.fail(f"view: got {e}, need a view of bytes (u8), declared or not")
    assert tuple(found.shape) == (64,)


def test_a_device_that_is_not_there_is_refused(target: Target) -> None:
    with pytest.raises(BackendUnavailable, match="need one of"):
        device(f"{target.location.kind}:999")


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 4096, 100_003])
def test_memory_holds_what_is_put_in(target: Target, n: int) -> None:
    memory = raw(target, n)
    assert tuple(memory.shape) == (n,)
    data = np.frombuffer(random_of("bytes", str(n)).bytes(n), np.uint8)
    target.backend.copy_in(memory, data)
    check_bits(f"{n} bytes", target.backend.copy_out(memory), data)


def test_allocations_share_no_byte(target: Target) -> None:
    sizes = [1, 64, 64, 65, 200, 64, 4096, 4096, 3]
    memories = [raw(target, n) for n in sizes]
    for n, memory in enumerate(memories):
        target.backend.copy_in(memory, np.full(sizes[n], n, np.uint8))
    for n, memory in enumerate(memories):
        got, want = target.backend.copy_out(memory), np.full(sizes[n], n, np.uint8)
        check_bits(f"allocation {n} of {sizes}", got, want)


@pytest.mark.parametrize("n", [1, 10, 64, 1000, 70_000])
def test_memory_is_aligned(target: Target, n: int) -> None:
    buffers = [target.backend.allocate(n, target.location) for _ in range(3)]
    for buffer in buffers:
        address = address_of(buffer)
        if address is None:
            pytest.skip(f"arrays of {target.name} tell no address")
        off = address % ALIGNMENT
        assert not off, f"{n} bytes at {address:#x}: {off} past a multiple of {ALIGNMENT}"


def address_of(array: Any) -> int | None:
    """Where an array lies, by the array interfaces of NumPy and CUDA; None if it tells neither."""
    for name in ("__array_interface__", "__cuda_array_interface__"):
        interface = getattr(array, name, None)
        if isinstance(interface, dict):
            return int(interface["data"][0])
    return None


def test_memory_is_on_the_location_that_was_asked_for(target: Target) -> None:
    """As far as the backend (`used_bytes`) or its arrays (DLPack) say where memory is."""
    places = target.location, target.other_location()
    used = getattr(target.backend, "used_bytes", None)
    gc.collect()
    found = {}
    for place in places:
        before = {p: used(p) for p in places} if used else {}
        buffer = target.backend.allocate(NBYTES, place)
        after = {p: used(p) for p in places} if used else {}
        for p in before:
            took, need = after[p] - before[p], NBYTES if p == place else 0
            assert (took >= NBYTES) == (p == place), f"{place}: {p} took {took}, need {need}"
        found[place] = device_of(buffer)
        del buffer
    known = {d for d in found.values() if d is not None and d[0] != HOST}
    if not used and not known:
        pytest.skip(f"{target.name} tells of no memory where it is")
    assert len(known) in (0, len(places)), f"got memory of {places} on one device, {known}"


NBYTES = 1 << 16


def device_of(array: Any) -> tuple[int, int] | None:
    """The device of an array by DLPack, type and number; None if it does not tell."""
    try:
        kind, index = array.__dlpack_device__()
    except (AttributeError, LazyKvError):
        return None
    return int(kind), int(index)


# Views


LAYOUTS = {
    "whole": Layout(0, (4, 6), (6, 1)),
    "offset": Layout(7, (2, 3), (3, 1)),
    "rows_apart": Layout(1, (3, 4), (8, 1)),
    "columns": Layout(2, (6, 3), (1, 6)),
    "every_third": Layout(3, (7,), (3,)),
    "one_element": Layout(23, (), ()),
    "last": Layout(23, (1, 1), (24, 1)),
    "rank_3": Layout(1, (2, 2, 3), (12, 1, 3)),
    "nothing": Layout(24, (0, 3), (3, 1)),
    "repeated": Layout(5, (3, 4), (0, 2)),
}
WRITABLE = [name for name, layout in LAYOUTS.items() if not layout.repeats]


def elements(layout: Layout) -> Array:
    """The element numbers of a view, as the definition of a layout has them."""
    out = np.zeros(layout.shape, np.int64)
    for at in np.ndindex(layout.shape):
        steps = sum(i * s for i, s in zip(at, layout.strides, strict=True))
        out[at] = int(layout.offset) + steps  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_view_reads_where_its_layout_says(target: Target, layout: Layout, name: str) -> None:
    target.need(name)
    buffer, data = filled(target, name)
    view = target.backend.view(buffer, find_dtype(name), layout)
    assert tuple(view.shape) == layout.shape
    got = target.backend.copy_out(view)
    check_bits(f"view of {name}, {layout}", got, data[elements(layout)])
    assert got.flags.c_contiguous, "copy_out: got a strided array, need a contiguous one"


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("key", WRITABLE)
def test_a_copy_through_a_view_writes_the_buffer(target: Target, key: str, name: str) -> None:
    target.need(name)
    layout = LAYOUTS[key]
    buffer, data = filled(target, name)
    dt = find_dtype(name)
    new = to_raw(patterns(random_of("new", name), layout.shape, dt))
    target.backend.copy_in(target.backend.view(buffer, dt, layout), new)
    data[elements(layout)] = new
    got = target.backend.copy_out(target.backend.view(buffer, dt, flat(24)))
    check_bits(f"the buffer behind {name}, {layout}", got, data)


def filled(target: Target, name: str) -> tuple[Any, Array]:
    """A buffer of 24 elements, and what it holds."""
    dt = find_dtype(name)
    data = to_raw(patterns(random_of("buffer", name), (24,), dt))
    buffer = target.backend.allocate(24 * dt.itemsize, target.location)
    target.backend.copy_in(target.backend.view(buffer, dt, flat(24)), data)
    return buffer, data


def test_a_view_of_a_typed_array_is_of_its_memory(target: Target) -> None:
    """What a storage holds is an array of its own dtype and shape, and can be viewed again."""
    target.need("f32")
    data = np.arange(12, dtype=np.float32).reshape(3, 4)
    store = target.storage(data)
    column = Layout(1, (3,), (4,))
    with store.read() as array:
        got = target.backend.copy_out(target.backend.view(array, find_dtype("f32"), column))
    check_bits("a column of a storage", got, data[:, 1])


def test_a_view_keeps_its_memory(target: Target) -> None:
    """Only views are held; the buffer they were made from is let go, and others take memory."""
    backend, data = target.backend, np.arange(1000, dtype=np.uint8)
    views = []
    for n in range(4):
        views.append(raw(target, 1000))
        backend.copy_in(views[n], data + np.uint8(n))
    gc.collect()
    others = [raw(target, 1000) for _ in range(4)]
    for other in others:
        backend.copy_in(other, np.full(1000, 255, np.uint8))
    for n, view in enumerate(views):
        check_bits(f"view {n} of a buffer that was let go", backend.copy_out(view),
                   data + np.uint8(n))  # fmt: skip


# Copies


@pytest.mark.parametrize("order", ["C", "F", "strided", "reversed"])
def test_copy_in_takes_host_arrays_of_any_strides(target: Target, order: str) -> None:
    target.need("i32")
    data = np.arange(24, dtype=np.int32).reshape(4, 6)
    host = {
        "C": data, "F": np.asfortranarray(data), "strided": np.repeat(data, 2, 1)[:, ::2],
        "reversed": data[::-1, ::-1],
    }[order]  # fmt: skip
    store = Storage.allocate((4, 6), "i32", target.location)
    target.backend.copy_in(store.array, host)
    check_bits(f"copy_in of {order}", store.to_numpy(), np.array(host, order="C"))


def test_copy_in_takes_what_is_read_only(target: Target) -> None:
    data = np.arange(10, dtype=np.uint8)
    data.flags.writeable = False
    memory = raw(target, 10)
    target.backend.copy_in(memory, data)
    check_bits("copy_in of a read-only array", target.backend.copy_out(memory), data)


def test_a_feeder_is_copy_in(target: Target) -> None:
    memory = raw(target, 6)
    feed = target.backend.feeder(memory)
    for n in range(3):
        data = np.full(6, n, np.uint8)
        feed(data)
        data[:] = 99  # the feeder has taken it
        check_bits(f"feed {n}", target.backend.copy_out(memory), np.full(6, n, np.uint8))


def test_copies_to_the_host_are_fresh(target: Target) -> None:
    memory = raw(target, 8)
    target.backend.copy_in(memory, np.zeros(8, np.uint8))
    first = target.backend.copy_out(memory)
    target.backend.copy_in(memory, np.ones(8, np.uint8))
    second = target.backend.copy_out(memory)
    check_bits("an earlier copy_out", first, np.zeros(8, np.uint8))
    second[:] = 7
    check_bits("memory behind a copy", target.backend.copy_out(memory), np.ones(8, np.uint8))


def test_results_of_a_plan_are_fresh(target: Target) -> None:
    target.need("f32")
    g = Graph()
    x = g.placeholder((3,), "f32")
    made = plan([x * 2.0, x], {}, target.location)
    results = [made.run({x: np.full(3, n, np.float32)}) for n in range(3)]
    for n, (twice, same) in enumerate(results):
        check_bits(f"result {n} after later runs", twice, np.full(3, 2 * n, np.float32))
        check_bits(f"leaf {n} after later runs", same, np.full(3, n, np.float32))


def test_dropped_memory_is_let_go(target: Target) -> None:
    used = getattr(target.backend, "used_bytes", None)
    gc.collect()
    target.backend.synchronize(target.location)
    before = used(target.location) if used else 0
    buffers = [target.backend.allocate(1000, target.location) for _ in range(8)]
    try:
        alive = [weakref.ref(b) for b in buffers]
    except TypeError:
        alive = []
    del buffers
    gc.collect()
    target.backend.synchronize(target.location)
    kept = sum(ref() is not None for ref in alive)
    assert not kept, f"{kept} of 8 buffers that nobody holds are still alive"
    after = used(target.location) if used else 0
    assert after == before, f"used_bytes: got {after} after all was dropped, need {before}"
