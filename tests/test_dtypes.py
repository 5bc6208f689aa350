import copy

import ml_dtypes
import numpy as np
import pytest

import lazykv as lk
from lazykv import dtypes
from lazykv.errors import DTypeError


@pytest.mark.parametrize("dt", dtypes.ALL, ids=str)
def test_every_spelling_gives_the_one_object(dt: lk.DType) -> None:
    assert lk.dtype(dt) is lk.dtype(dt.name) is lk.dtype(dt.numpy) is lk.dtype(dt.numpy.type) is dt
    assert copy.copy(dt) is copy.deepcopy(dt) is dt
    assert dt.itemsize == dt.numpy.itemsize == dt.raw.itemsize
    assert dt.raw.byteorder in "<|="


def test_sizes_and_kinds() -> None:
    sizes = {t.name: t.itemsize for t in dtypes.ALL}
    assert sizes == {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i8": 1, "u8": 1, "i32": 4, "u32": 4,
                     "i64": 8, "bool": 1, "f8_e4m3": 1, "f8_e5m2": 1}  # fmt: skip
    assert {t.name for t in dtypes.ALL if t.is_bits} == {"bf16", "f8_e4m3", "f8_e5m2"}
    assert {t.name for t in dtypes.ALL if t.storage_only} == {"f8_e4m3", "f8_e5m2"}
    narrow = {t.name for t in dtypes.ALL if t.is_float and t.compute != t.numpy}
    assert narrow == {"f16", "bf16", "f8_e4m3", "f8_e5m2"}


@pytest.mark.parametrize(
    "unknown", ["q4", "u16", np.uint16, np.complex64, "S3", None, object(), 3, "f4,(", np.int16]
)
def test_H1_an_unknown_dtype_is_refused_by_name(unknown: object) -> None:
    with pytest.raises(DTypeError, match="need one of f64, f32, f16, bf16") as e:
        lk.dtype(unknown)  # type: ignore[arg-type]
    assert repr(unknown) in str(e.value)
    assert isinstance(e.value, TypeError)


def test_H1_bf16_values_keep_their_bit_patterns() -> None:
    store = lk.Storage.from_array(np.array([1.0, -2.0], ml_dtypes.bfloat16))
    assert store.dtype is lk.bf16
    with store.read() as raw:
        assert raw.dtype == np.uint16
        assert raw.tolist() == [0x3F80, 0xC000]
    assert store.to_numpy().dtype == ml_dtypes.bfloat16


def test_H3_bit_patterns_are_not_values() -> None:
    bits = np.array([0x3F80], np.uint16)
    g = lk.Graph()
    p = g.placeholder((1,), lk.bf16)
    with pytest.raises(DTypeError, match="uint16"):
        lk.realize(p + 1, {p: bits})
    with pytest.raises(DTypeError, match="uint16"):
        g.const(bits)
    assert dtypes.to_logical(bits, lk.bf16).tolist() == [1.0]


def test_H4_bf16_rounds_to_nearest_even() -> None:
    cases = {3.14: 0x4049, 0.26914087: 0x3E8A, 1.01171875: 0x3F82, 3.4e38: 0x7F80}
    values = np.array(list(cases), np.float32)
    got = lk.realize(lk.Graph().const(values).cast("bf16"))
    assert got.view(np.uint16).tolist() == list(cases.values())
    nan = np.array([0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(lk.realize(lk.Graph().const(nan).cast("bf16")).astype(np.float32))


def test_big_endian_input_keeps_its_values() -> None:
    big = np.array([1.5, -2.0], ">f4")
    assert dtypes.to_raw(big).dtype == np.dtype("<f4")
    assert lk.Storage.from_array(big).to_numpy().tolist() == [1.5, -2.0]
    g = lk.Graph()
    p = g.placeholder((2,), "f32")
    assert lk.realize(p * 2, {p: big}).tolist() == [3.0, -4.0]


def test_raw_and_logical_are_views_of_one_memory() -> None:
    logical = np.zeros(3, ml_dtypes.float8_e4m3fn)
    raw = dtypes.to_raw(logical)
    assert np.shares_memory(raw, logical)
    assert dtypes.to_logical(raw, lk.f8_e4m3).dtype == logical.dtype
