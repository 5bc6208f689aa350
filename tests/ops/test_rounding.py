"""Numbers become floats of a narrower format by one rounding, to nearest even, by every way in."""

import numpy as np
import pytest

import lazykv as lk
from lazykv.ops.rounding import nearest
from lazykv.testing.reference import FORMATS, cast_float

Array = np.ndarray


def middles(name: str, source: str) -> Array:
    """Numbers of a dtype at, and as little as it can tell beside, the middle of two floats."""
    fraction, dt = FORMATS[name][1], lk.dtype(source).numpy
    if source == "f64":
        exact = np.array([np.ldexp(2 * k + 1, e) for k in (8, 9, 255) for e in (-160, -4, 9, 90)])
        return np.concatenate([exact, *(np.nextafter(exact, to) for to in (0.0, np.inf))])
    halves = [(1 << (fraction + 1)) + 2 * k + 1 for k in (0, 1, (1 << fraction) - 1)]
    found = [s * ((n << e) + d) for n in halves for e in range(62) for d in (-1, 0, 1)
             for s in (1, -1)]  # fmt: skip
    info = np.iinfo(dt)
    return np.array([info.min, info.max] + [n for n in found if info.min <= n <= info.max], dt)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("source", ["f64", "i8", "u8", "i32", "u32", "i64"])
@np.errstate(over="ignore")
def test_a_number_is_rounded_once(source: str, name: str) -> None:
    values = middles(name, source)
    want = cast_float(values, name)
    for got in (nearest(values, lk.dtype(name)), lk.realize(lk.Graph().const(values).cast(name))):
        assert got.dtype == lk.dtype(name).numpy
        np.testing.assert_array_equal(got.astype(np.float64), want)


@pytest.mark.parametrize("name", ["bf16", "f8_e4m3", "f8_e5m2"])
def test_numbers_in_a_list_round_as_a_cast_does(name: str) -> None:
    tie = 1 + 2.0 ** -(FORMATS[name][1] + 1)  # between 1 and the next number; rounds to 1
    above, whole = tie + 2.0**-40, 2**26 + 2**18 + 1
    g = lk.Graph()
    given, cast = g.const([tie, above, whole], name), g.const([tie, above, float(whole)]).cast(name)
    for got in lk.realize([given, cast]):
        np.testing.assert_array_equal(got[:2].astype(float), [1, 2 * tie - 1])
    one, two = lk.realize([g.const([whole], name), g.const(np.array([whole])).cast(name)])
    assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_a_number_compared_is_rounded_once(name: str) -> None:
    unit = 2.0 ** -FORMATS[name][1]
    above = 1 + unit / 2 + 2.0**-40  # f32 alone would put it into the middle, and then at 1
    x = lk.Graph().const([1, 1 + unit], name)
    assert lk.realize(x.eq(above)).tolist() == [False, True]
