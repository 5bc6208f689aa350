"""What callers give as data: arrays of NumPy and of others, and what is refused of them."""

from collections.abc import Callable

import numpy as np
import pytest

import lazykv as lk
from lazykv.errors import BindingError, DTypeError, ShapeError
from lazykv.storage import as_host_bytes


def test_bytes_like_input_is_flattened() -> None:
    strided = np.arange(6, dtype=np.int16).reshape(2, 3).T
    assert as_host_bytes("t", b"ab").tolist() == [97, 98]
    assert as_host_bytes("t", memoryview(bytearray(6))[::2]).tolist() == [0, 0, 0]
    assert as_host_bytes("t", strided).tobytes() == np.ascontiguousarray(strided).tobytes()


class Failing:
    """An array of another library that fails when it is asked for its data."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __array__(self, dtype: object = None, copy: object = None) -> object:
        raise self.error("no data")


class FailingExporter(Failing):
    def __dlpack__(self, **options: object) -> object:
        raise self.error("no data")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


TAKERS: dict[str, Callable[[object], object]] = {
    "const": lambda a: lk.Graph().const(a),
    "from_array": lk.Storage.from_array,
    "wrap": lk.Storage.wrap,
    "binding": lambda a: lk.realize(P + 1, {P: a}),
    "bytes": lambda a: as_host_bytes("t", a),
}
P = lk.Graph().placeholder((2,), "f32")


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
@pytest.mark.parametrize("source", [Failing, FailingExporter])
@pytest.mark.parametrize("error", [ValueError, AttributeError, TypeError, RuntimeError, OSError])
def test_what_an_exporter_raises_is_typed(
    take: Callable[[object], object], source: type[Failing], error: type[Exception]
) -> None:
    with pytest.raises(lk.LazyKvError, match=r"no data|need bytes or an array"):
        take(source(error))


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_a_masked_array_is_refused_since_its_mask_would_be_lost(
    take: Callable[[object], object],
) -> None:
    data = np.ma.masked_array(np.ones(2, np.float32), [True, False])
    with pytest.raises(BindingError, match=r"got MaskedArray.*use filled"):
        take(data)
    take(data.filled(0))


@pytest.mark.parametrize("value", [[1, 2], (1.0,), 3, 2.5, np.float32(1), True, range(3)], ids=repr)
def test_what_has_no_memory_of_its_own_is_not_wrapped_but_copied(value: object) -> None:
    with pytest.raises(BindingError, match=r"wrap: got \w+, need memory.*from_array"):
        lk.Storage.wrap(value)
    assert lk.Storage.from_array(value).to_numpy().tolist() == np.asarray(value).tolist()


class OwnArray:
    """An array by NumPy's oldest protocol: its own memory, or a fresh array every time."""

    def __init__(self, fresh: bool) -> None:
        self.data, self.fresh = np.arange(3.0), fresh

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        if self.fresh and copy is False:
            raise ValueError("a copy is needed")
        return self.data.copy() if self.fresh else self.data


def test_wrap_takes_what_gives_its_own_memory_and_nothing_else() -> None:
    own = OwnArray(fresh=False)
    for given, memory in ((own, own.data), (b := bytearray(8), np.frombuffer(b, np.uint8))):
        assert np.shares_memory(lk.Storage.wrap(given).array, memory)
    with pytest.raises(BindingError, match="got OwnArray"):
        lk.Storage.wrap(OwnArray(fresh=True))


def test_other_kinds_of_numpy_arrays_are_taken_as_arrays() -> None:
    data = np.array([[1, 2], [3, 4]], np.float32).view(np.matrix)
    store = lk.Storage.wrap(data)
    x = lk.Graph().placeholder((2, 2), "f32")
    assert lk.realize(x[1], {x: store}).tolist() == [3, 4]
    assert np.shares_memory(store.array, data)


def test_numbers_that_torch_negates_late_are_refused() -> None:
    torch = pytest.importorskip("torch")
    late = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    for take in (lk.Storage.from_array, lk.Storage.wrap):
        with pytest.raises(BindingError, match=r"negative bit.*resolve_neg"):
            take(late)
    assert lk.Storage.from_array(late.resolve_neg()).to_numpy().tolist() == [-2, -4]


def test_ragged_and_textual_data_is_refused() -> None:
    with pytest.raises(ShapeError, match="rectangular"):
        lk.Storage.from_array([[1, 2], [3]])
    with pytest.raises(DTypeError):
        lk.Storage.from_array("abc")
