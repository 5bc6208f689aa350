"""ST-6: what is lent by DLPack, whatever it says of itself. Lenders are NumPy and PyTorch."""

import ctypes
import gc
import subprocess
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from toy_backends import Toy, registered

import lazykv as lk
from lazykv import dlpack
from lazykv.device import Backend
from lazykv.interchange import host_array
from lazykv.testing.lending import Lender


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


class Exporter:
    """Lends what a NumPy array is in, as a library that NumPy does not know."""

    def __init__(self, data: np.ndarray, device: Any = (1, 0), change: Any = None) -> None:
        self.data, self.device, self.change = data, device, change
        self.asked: list[dict[str, Any]] = []

    def __dlpack__(self, **options: Any) -> Any:
        self.asked.append(options)
        capsule = self.data.__dlpack__(**options)
        if self.change is not None:
            self.change(dlpack.contents(capsule))
        return capsule

    def __dlpack_device__(self) -> Any:
        return self.device


def tensor(**values: Any) -> Any:
    """Say something else of the tensor."""
    return lambda found: [setattr(found[1], k, v) for k, v in values.items()]


def header(**values: Any) -> Any:
    return lambda found: [setattr(found[0], k, v) for k, v in values.items()]


# What is taken


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3), (2, 1, 4)])
def test_every_shape_is_taken_where_it_is(shape: tuple[int, ...]) -> None:
    data = numbers(*shape)
    store = lk.Storage.wrap(Exporter(data))
    assert (store.shape, store.dtype) == (shape, lk.f32)
    assert np.shares_memory(store.array, data) == bool(data.size)
    np.testing.assert_array_equal(store.to_numpy(), data, strict=True)


@pytest.mark.parametrize("place", ["cpu", "sim:0"])
def test_nothing_may_be_anywhere(place: str) -> None:
    store = lk.Storage.from_array(numbers(0, 3), place)
    assert lk.Storage.wrap(Lender(store), place).to_numpy().shape == (0, 3)
    if place == "cpu":  # some libraries have no memory for nothing
        nowhere = Lender(store, lambda found: setattr(found, "data", None))
        assert lk.Storage.wrap(nowhere, place).to_numpy().shape == (0, 3)


def test_the_array_alone_keeps_the_memory() -> None:
    data = numbers(4)
    alive = weakref.ref(data)
    array = lk.Storage.wrap(Exporter(data)).array
    del data
    gc.collect()
    assert alive() is not None
    assert array.tolist() == [0, 1, 2, 3]
    del array
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("dt", [lk.bf16, lk.f8_e4m3, lk.f8_e5m2], ids=str)
@pytest.mark.parametrize("part", [np.s_[:], np.s_[::2, 1:], np.s_[:0], np.s_[1, 2]], ids=str)
def test_bits_that_numpy_takes_from_nobody_are_copied(dt: lk.DType, part: Any) -> None:
    """Of any strides: these are copies, and constants and inputs are arrays like any other."""
    data = numbers(3, 4).astype(dt.numpy)[part].astype(dt.numpy)
    data = np.asfortranarray(data)
    kind = {"bf16": 4, "f8_e4m3": 10, "f8_e5m2": 12}[dt.name]
    lent = Exporter(data.view(dt.raw), change=tensor(code=kind))
    g = lk.Graph()
    x = g.placeholder(data.shape, dt)
    for got in (
        lk.Storage.from_array(lent).to_numpy(),
        lk.realize(g.const(lent)),
        lk.realize(x, {x: lent}),
    ):
        np.testing.assert_array_equal(got, data, strict=True)


def test_a_refused_capsule_gives_its_memory_back() -> None:
    data = numbers(2, 3)
    alive = weakref.ref(data.base if data.base is not None else data)
    with pytest.raises(lk.ShapeError, match="C-contiguous"):
        lk.Storage.wrap(Exporter(data.T))
    del data
    gc.collect()
    assert alive() is None


def test_an_exporter_from_before_dlpack_1_is_taken() -> None:
    class Old:
        def __init__(self, data: np.ndarray) -> None:
            self.data = data

        def __dlpack__(self) -> Any:
            return self.data.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    data = numbers(3)
    with lk.Storage.wrap(Old(data)).write() as a:
        a[0] = 7
    assert data.tolist() == [7, 1, 2]


def test_the_host_has_no_stream_to_tell() -> None:
    exporter = Exporter(numbers(3))
    lk.Storage.wrap(exporter)
    assert exporter.asked == [{"max_version": (1, 1)}]


TORCH = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "i8",
    "uint8": "u8", "int32": "i32", "uint32": "u32", "int64": "i64", "bool": "bool",
    "float8_e4m3fn": "f8_e4m3", "float8_e5m2": "f8_e5m2",
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH)
def test_tensors_of_torch_go_both_ways_without_a_copy(name: str) -> None:
    torch = pytest.importorskip("torch")
    whole = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]).to(getattr(torch, name))
    lent = whole[1:]
    store = lk.Storage.wrap(lent)
    assert store.dtype.name == TORCH[name]
    assert store.array.ctypes.data == lent.data_ptr()
    np.testing.assert_array_equal(store.to_numpy().astype(np.float32), lent.float().numpy())
    back = torch.from_dlpack(store)
    assert (back.dtype, back.data_ptr()) == (lent.dtype, lent.data_ptr())
    back[0, 1] = 1.0
    assert float(store.to_numpy()[0, 1]) == 1.0
    assert whole.float().tolist() == [[0, 1], [1, 1], [1, 1]]


@pytest.mark.parametrize("name", TORCH)
def test_tensors_of_torch_are_copied_with_any_strides(name: str) -> None:
    torch = pytest.importorskip("torch")
    given = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]).to(getattr(torch, name)).t()
    store = lk.Storage.from_array(given)
    assert store.dtype.name == TORCH[name]
    np.testing.assert_array_equal(store.to_numpy().astype(np.float32), given.float().numpy())


@pytest.mark.parametrize("take", [lk.Storage.wrap, lk.Storage.from_array])
def test_what_torch_refuses_is_told(take: Any) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(lk.BindingError, match=r"requires? grad.*from Tensor, need memory"):
        take(torch.zeros(2, requires_grad=True))


# What is refused


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (tensor(code=5), lk.DTypeError, "type code 5, 32 bits and 1 lanes, need one of f64, f32"),
        (tensor(bits=16, code=1), lk.DTypeError, "type code 1, 16 bits"),
        (tensor(lanes=4), lk.DTypeError, "4 lanes"),
        (tensor(byte_offset=2), lk.ShapeError, r"f32\[2,3\] at address 0x\w+, need a multiple"),
        (header(flags=2), lk.BindingError, "got a copy from Exporter, need the memory itself"),
        (header(major=2), lk.BindingError, r"got version 2.0, need 1.x or older"),
        (
            tensor(device_type=2),
            lk.BindingError,
            r"device \(2, 0\) for cpu, need that of .*\(1, 0\)",
        ),
    ],
)
def test_what_cannot_be_used_in_place_is_refused(change: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        lk.Storage.wrap(Exporter(numbers(2, 3), change=change))


def first_extent(n: int) -> Any:
    return lambda found: found[1].shape.__setitem__(0, n)


@pytest.mark.parametrize("code", [2, 4], ids=["f16", "bf16"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (tensor(device_type=2, data=0x10000), "need memory that the host can read"),
        (tensor(device_type=12), "need memory that the host can read"),
        (first_extent(-3), r"got shape \(-3, 2\) of 2 axes"),
        (first_extent(2**62), "need memory that there can be"),
        (tensor(ndim=-1), "of -1 axes"),
        (tensor(ndim=1000), "of 1000 axes"),
    ],
)
def test_what_is_no_memory_of_the_host_is_not_copied(change: Any, text: str, code: int) -> None:
    """Whatever the exporter says of its device: the capsule says it too, and that one counts."""
    half = np.zeros((2, 2), np.float16)
    lent = Exporter(half, change=lambda found: (tensor(code=code)(found), change(found)))
    with pytest.raises(lk.BindingError, match=text):
        lk.Storage.from_array(lent)


def test_nothing_at_no_address_is_refused() -> None:
    lent = Exporter(np.zeros(2, np.float16), change=tensor(code=4, data=None))
    with pytest.raises(lk.BindingError, match="at address None"):
        lk.Storage.from_array(lent)


def test_copies_and_pinned_memory_may_be_copied() -> None:
    data = numbers(3).astype(np.float16)
    for device, change in (
        ((1, 0), header(flags=2)),
        ((3, 0), tensor(device_type=3)),
        ((1, 5), None),
    ):

        def say(found: Any, change: Any = change) -> None:
            tensor(code=4)(found)
            if change is not None:
                change(found)

        got = lk.Storage.from_array(Exporter(data, device, say)).to_numpy()
        assert got.view(np.uint16).tolist() == data.view(np.uint16).tolist()


def test_bits_that_were_lent_keep_their_memory_and_stay_read_only() -> None:
    data = numbers(4).astype(np.float16)
    data.flags.writeable = False
    alive = weakref.ref(data)
    array = host_array(Exporter(data, change=tensor(code=4)))
    del data
    gc.collect()
    assert alive() is not None
    assert not array.flags.writeable
    assert host_array(
        Exporter(numbers(4).astype(np.float16), change=tensor(code=4))
    ).flags.writeable
    del array
    gc.collect()
    assert alive() is None


def test_an_exporter_without_a_device_is_refused() -> None:
    class Deviceless:
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("nothing to lend")

    with pytest.raises(lk.BindingError, match="need memory that the host can read"):
        lk.Storage.from_array(Deviceless())


def test_a_used_capsule_is_refused() -> None:
    class Twice(Exporter):
        capsule: Any = None

        def __dlpack__(self, **options: Any) -> Any:
            self.capsule = self.capsule or super().__dlpack__(**options)
            return self.capsule

    twice = Twice(numbers(2))
    np.from_dlpack(twice)
    with pytest.raises(lk.BindingError, match="need a capsule that nobody has used"):
        lk.Storage.wrap(twice)


def test_an_exporter_that_fails_is_told() -> None:
    class Broken(Exporter):
        def __dlpack__(self, **options: Any) -> Any:
            raise KeyError("lost")

    class Nowhere(Exporter):
        def __dlpack_device__(self) -> Any:
            raise BufferError("no device")

    with pytest.raises(lk.BindingError, match="got KeyError: 'lost' from Broken"):
        lk.Storage.wrap(Broken(numbers(2)))
    with pytest.raises(lk.BindingError, match="got BufferError: no device from Nowhere"):
        lk.Storage.wrap(Nowhere(numbers(2)))


# Where it goes


def lying(kind: int, index: int = 0) -> Exporter:
    return Exporter(numbers(2), (kind, index), tensor(device_type=kind, device_id=index))


@pytest.mark.parametrize("kind", [4, 8, 12])
def test_memory_that_nobody_serves_is_refused(kind: int) -> None:
    with pytest.raises(lk.BindingError, match=r"need memory that the host can read; copy it first"):
        lk.Storage.wrap(lying(kind))


def test_without_cupy_a_cuda_tensor_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['cupy'] = None\n"
        "import numpy as np, lazykv as lk\n"
        "class Tensor:\n"
        "    def __dlpack_device__(self): return 2, 0\n"
        "    def __dlpack__(self, **options): return np.zeros(2).__dlpack__(**options)\n"
        "try: lk.Storage.wrap(Tensor())\n"
        "except lk.BackendUnavailable as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'lazykv[cuda13]'" in done.stdout


class Metal(Toy):
    """A backend of another device type, whose memory can be looked at."""

    kind = "metal"
    dlpack_device_type = 8


def test_other_types_go_to_the_device_that_is_named() -> None:
    data = numbers(2)
    exporter = Exporter(data, (8, 1), tensor(device_type=8, device_id=1))
    with registered(Metal()):
        store = lk.Storage.wrap(exporter, "metal:1")
        assert str(store.location) == "metal:1"
        assert np.shares_memory(store.array, data)
        with pytest.raises(lk.BindingError, match=r"\(8, 1\) for metal:0, need that of .*\(8, 0\)"):
            lk.Storage.wrap(exporter, "metal:0")
        with pytest.raises(lk.BindingError, match=r"in memory of the host for metal:0"):
            lk.Storage.wrap([1, 2], "metal:0")
        with pytest.raises(lk.BackendUnavailable, match="need one of: metal:0, metal:1"):
            lk.Storage.wrap(exporter, "metal:2")


def test_a_backend_that_declares_nothing_adopts_nothing() -> None:
    class Plain(Toy):
        dlpack_device_type = None
        adopt, address = Backend.adopt, Backend.address

    backend = Plain()
    with registered(backend):
        with pytest.raises(lk.BindingError, match=r"for toy:0, need a backend that adopts memory"):
            lk.Storage.wrap(Exporter(numbers(2)), "toy:0")
        for call in (lambda: backend.adopt(None, None), lambda: backend.address(None)):
            with pytest.raises(lk.BindingError, match="need one that declares a dlpack_device"):
                call()


def test_a_simulated_device_adopts_only_its_own() -> None:
    """Any device without a number of its own in DLPack has the same type."""
    with pytest.raises(lk.BindingError, match=r"adopt on sim:0: got Lent.*need memory of sim:0"):
        lk.Storage.wrap(lying(12), "sim:0")
    store = lk.Storage.from_array(numbers(2), "sim:0")
    longer = Lender(store, lambda found: found.shape.__setitem__(0, 1000))
    with pytest.raises(lk.BindingError, match="need memory of sim:0"):
        lk.Storage.wrap(longer, "sim:0")
    with pytest.raises(lk.BindingError, match="got a host access"):
        store.__dlpack__(dl_device=(1, 0))
    with pytest.raises(lk.BindingError, match=r"got a host access.*use to_numpy"):
        lk.Storage.from_array(store)


# Read-only


def test_read_only_is_passed_on() -> None:
    data = numbers(2)
    data.flags.writeable = False
    store = lk.Storage.wrap(Exporter(data))
    assert store.frozen
    assert not store.array.flags.writeable
    assert not np.from_dlpack(store).flags.writeable
    assert np.from_dlpack(store, copy=True).flags.writeable
    assert not np.asarray(store).flags.writeable
    again = lk.Storage.wrap(store)
    assert again.frozen
    assert np.shares_memory(again.array, data)


def test_raw_bits_are_lent_with_their_logical_dtype() -> None:
    data = numbers(2, 2).astype(ml_dtypes.bfloat16)
    store = lk.Storage.wrap(lk.Storage.wrap(data))
    assert store.dtype is lk.bf16
    assert np.shares_memory(store.array, data)
    np.testing.assert_array_equal(store.to_numpy(), data)


def test_the_structures_are_those_of_dlpack_h() -> None:
    """Sizes and places by the C declarations, for 64-bit pointers."""
    assert ctypes.sizeof(dlpack._Tensor) == 48
    assert (dlpack._Versioned.flags.offset, dlpack._Versioned.tensor.offset) == (24, 32)
    assert isinstance(Lender(lk.Storage.allocate((2,), "f32")).__dlpack_device__(), tuple)
