"""The references, by other means; and comparisons, which have to be able to fail."""

import ml_dtypes
import numpy as np
import pytest

from lazykv.dtypes import dtype
from lazykv.testing import reference
from lazykv.testing.compare import check_bits, check_close, check_equal, tolerance

FORMATS = {
    "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
    "f8_e5m2": ml_dtypes.float8_e5m2, "f8_e4m3": ml_dtypes.float8_e4m3fn,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_equals_that_of_the_libraries(name):
    """From f32, which they round once; f64 they may not."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 20_000, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), rng.standard_normal(2000).astype(np.float32)])
    with np.errstate(all="ignore"):
        want = x.astype(FORMATS[name]).astype(np.float64)
        got = reference.cast_float(x.astype(np.float64), name)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(want[got == 0]))


def test_attention_equals_matrices():
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(s) for s in ((2, 4, 3, 8), (2, 2, 7, 8), (2, 2, 7, 8)))
    wide_k, wide_v = (np.repeat(a, 2, 1) for a in (k, v))
    scores = q @ np.swapaxes(wide_k, 2, 3) / np.sqrt(8)
    place = np.arange(4, 7)[:, None]
    scores = np.where(np.arange(7) <= place, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = weights / weights.sum(-1, keepdims=True) @ wide_v
    np.testing.assert_allclose(reference.attention(q, k, v), want, rtol=1e-12)


def test_attention_of_many_is_that_of_each():
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal(s) for s in ((2, 4, 3, 8), (2, 2, 7, 8), (2, 2, 7, 8)))
    seen = np.arange(7) <= np.arange(2, 5)[:, None]
    want = reference.attention(q, k, v, length=5)
    k[:, :, 5:], v[:, :, 5:] = np.nan, np.nan
    got = reference.attend_many(q, k, v, scale=8**-0.5, seen=seen)
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("name", FORMATS)
def test_whole_numbers_are_rounded_by_all_their_bits(name):
    """Beside the middle of two floats, by less than float64 can tell."""
    _, fraction, _ = reference.FORMATS[name]
    half = (1 << (fraction + 1)) + 1
    exponent = 4 if name.startswith("f8") or name == "f16" else 62 - fraction - 1
    unit = 2.0 ** (exponent + 1)
    low, middle, high = (half << exponent) - 1, half << exponent, (half << exponent) + 1
    got = reference.cast_float(np.array([low, middle, high, -high]), name)
    even = (half - 1) * unit / 2
    np.testing.assert_array_equal(got, [even, even, even + unit, -even - unit])


def test_a_ring_is_a_window():
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((1, 2, 20, 4))
    ring = np.full((1, 2, 7, 4), np.nan)
    for p in range(20):
        reference.write_slice_rotating(ring, rows[:, :, p : p + 1], 2, p, 7, 2)
    q = rng.standard_normal((1, 4, 1, 4))
    got = reference.ring_attention(q, ring, ring, length=20, window=4, sinks=2)
    seen = np.concatenate([rows[:, :, :2], rows[:, :, 16:]], 2)
    np.testing.assert_allclose(got, reference.attention(q, seen, seen), rtol=1e-12)


def test_pages_are_a_cache_in_another_order():
    rng = np.random.default_rng(3)
    pool = rng.standard_normal((5, 4, 2, 8))
    q = rng.standard_normal((1, 4, 2, 8))
    table, lens = np.array([[3, 0, 4]]), np.array([10])
    rows = np.moveaxis(pool[[3, 0, 4]].reshape(12, 2, 8)[:10], 0, 1)[None]
    got = reference.paged_attention(q, pool, pool, table, lens)
    np.testing.assert_allclose(got, reference.attention(q, rows, rows), rtol=1e-12)


# Comparisons


@pytest.mark.parametrize("name", ["f64", "f32", "f16", "bf16"])
def test_a_tolerance_is_half_a_unit_and_little_more(name):
    dt = dtype(name)
    one = np.ones(3).astype(dt.numpy)
    check_close("same", one, np.ones(3))
    following = one.copy()
    with np.errstate(all="ignore"):
        following[1] = np.nextafter(one[1], dt.numpy.type(2))
    apart = float(following[1]) - 1
    assert apart > 0
    check_close("rounded up", following, np.array([1, 1 + apart * 0.5, 1]))
    limit = tolerance(np.ones(3), dt)[0]
    with pytest.raises(AssertionError, match=r"1 of 3 elements are wrong, at \[1\]"):
        check_close("too far", one, np.array([1, 1 + 1.1 * limit + apart, 1]))


@pytest.mark.parametrize(
    ("got", "want"),
    [
        ([np.nan], [1.0]),
        ([1.0], [np.nan]),
        ([np.inf], [1.0]),
        ([np.inf], [-np.inf]),
        ([1.0], [np.inf]),
    ],
)
def test_nan_and_infinity_are_where_they_should_be(got, want):
    with pytest.raises(AssertionError, match="elements are wrong"):
        check_close("special", np.array(got, np.float32), np.array(want))
    check_close("special", np.array(want, np.float32), np.array(want))


def test_shapes_and_dtypes_are_compared():
    a = np.zeros((2, 3), np.float32)
    for check in (check_close, check_equal, check_bits):
        with pytest.raises(AssertionError, match=r"got shape \[2, 3\], need \[3, 2\]"):
            check("x", a, np.zeros((3, 2), np.float32))
    with pytest.raises(AssertionError, match="got dtype float32, need float64"):
        check_bits("x", a, a.astype(np.float64))
    with pytest.raises(AssertionError, match=r"at \[0, 1\]; the first: got bits 80000000"):
        check_bits("x", np.float32([[0, -0.0]]), np.float32([[0, 0]]))
