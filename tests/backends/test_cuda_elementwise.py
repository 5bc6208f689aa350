"""Elementwise ops on CUDA: every expression equals the host's op, and compiles for GPUs."""

from collections.abc import Callable

import numpy as np
import nvrtc
import pytest
from cuda_cpu import FLUSH, Memory, module, needs_compiler
from fake_cupy.machine import machine

import lazykv as lk
from lazykv.backends import cuda_kernels as ck
from lazykv.backends.cuda import CudaBackend
from lazykv.dtypes import to_raw
from lazykv.ops import elementwise as ew

pytestmark = needs_compiler

PLACE = "cuda:0"
FLOATS, INTEGERS = ("f32", "f16", "bf16"), ("i8", "u8", "i32", "u32", "i64")
ALL = (*FLOATS, "f64", *INTEGERS, "bool")

Build = Callable[[lk.Tensor, lk.Tensor], lk.Tensor]

BINARY: dict[str, Build] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "eq": lambda a, b: a.eq(b), "ne": lambda a, b: a.ne(b), "lt": lambda a, b: a.lt(b),
    "le": lambda a, b: a.le(b), "gt": lambda a, b: a.gt(b), "ge": lambda a, b: a.ge(b),
    "and": lambda a, b: a.graph.apply(ew.And(), a.lt(b), a.ne(b)),
    "where": lambda a, b: lk.where(a.lt(b), a, b),
    "add_scalar": lambda a, b: a + 3, "rsub_scalar": lambda a, b: 7 - a,
}  # fmt: skip
FLOAT: dict[str, Build] = {
    "div": lambda a, b: a / b, "rdiv_scalar": lambda a, b: 1.5 / a,
    "mul_scalar": lambda a, b: a * 0.3, "exp": lambda a, b: a.exp(), "sqrt": lambda a, b: b.sqrt(),
    "rsqrt": lambda a, b: b.rsqrt(), "tanh": lambda a, b: a.tanh(), "silu": lambda a, b: a.silu(),
    "gelu": lambda a, b: a.gelu(),
}  # fmt: skip
SIGNED: dict[str, Build] = {"neg": lambda a, b: -a}
WHOLE: dict[str, Build] = {"mod": lambda a, b: a.graph.apply(ew.ModScalar(5), a)}


def cases() -> list[tuple[str, str]]:
    made = [(name, dt) for dt in (*FLOATS, *INTEGERS) for name in BINARY]
    made += [(name, dt) for dt in FLOATS for name in (*FLOAT, *SIGNED)]
    made += [("neg", dt) for dt in ("i8", "i32", "i64")]
    return made + [("mod", dt) for dt in INTEGERS]


def operands(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of every size; of integers also the extremes, which wrap."""
    rng, numpy = np.random.default_rng(1), lk.dtype(dtype).numpy
    if dtype in INTEGERS:
        info = np.iinfo(numpy)
        some = [info.min, info.max, info.max - 1, 0, 1, 5]
        a = np.array([*some, *rng.integers(info.min, info.max, 30, numpy, endpoint=True)], numpy)
        return a.reshape(4, 9), rng.permutation(a).reshape(4, 9)
    a = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, *rng.standard_normal(30)], np.float32)
    return a.reshape(4, 9).astype(numpy), np.abs(rng.permutation(a)).reshape(4, 9).astype(numpy)


def realized(build: Build, a: np.ndarray, b: np.ndarray, place: str) -> np.ndarray:
    g = lk.Graph()
    x, y = (g.const(lk.Storage.from_array(v, place)) for v in (a, b))
    return lk.realize(build(x, y), device=place)


@pytest.mark.parametrize(("name", "dtype"), cases())
@np.errstate(all="ignore")
def test_an_op_equals_the_hosts(cuda: CudaBackend, name: str, dtype: str) -> None:
    build = {**BINARY, **FLOAT, **SIGNED, **WHOLE}[name]
    a, b = operands(dtype)
    for turned in (build, lambda x, y: build(x.transpose(0, 1), y.transpose(0, 1))):
        want, got = (realized(turned, a, b, place) for place in ("cpu", PLACE))
        assert got.dtype == want.dtype
        wide = [v.astype(np.float64) for v in (got, want)]
        limit = {"f32": 1e-6, "f16": 2.0**-10, "bf16": 2.0**-7}.get(dtype, 0)
        np.testing.assert_allclose(*wide, rtol=limit, atol=limit * 1e-3)
    assert machine.launches > 1
    assert cuda.queue(lk.DeviceLocation(PLACE)).refused_allocations == 0


@pytest.mark.parametrize("value", [1e300, -1e300, 1e39])
@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
def test_a_number_beyond_the_dtype_is_infinite_as_on_the_host(
    cuda: CudaBackend, dtype: str, value: float
) -> None:
    a = np.array([[2, -3, 0]], lk.dtype(dtype).numpy)
    for op in (lambda x, y: x * value, lambda x, y: value - x, lambda x, y: x.lt(value)):
        want, got = (realized(op, a, a, place) for place in ("cpu", PLACE))
        np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


@pytest.mark.parametrize("to", ALL)
@pytest.mark.parametrize("dtype", ALL)
@np.errstate(all="ignore")
def test_casts_equal_the_hosts_bit_for_bit(cuda: CudaBackend, dtype: str, to: str) -> None:
    rng, numpy = np.random.default_rng(2), lk.dtype(dtype).numpy
    small = rng.integers(0, 100, 40)  # what every dtype can hold
    a = small.astype(numpy).reshape(5, 8)
    if lk.dtype(dtype).is_float and lk.dtype(to).is_float:
        a = np.concatenate([small + 0.3, [np.inf, -np.inf, 1e-3, 7e4, 1e-7]]).astype(numpy)[None]
    want, got = (realized(lambda x, y: x.cast(to), a, a, place) for place in ("cpu", PLACE))
    assert got.dtype == want.dtype
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("to", ["f16", "bf16"])
def test_a_wide_float_is_rounded_once(cuda: CudaBackend, to: str) -> None:
    """Just beside the middle of two 16-bit floats: f32 alone would put it into the middle."""
    step = {"f16": 2.0**-10, "bf16": 2.0**-7}[to]
    middle = 1 + step * np.arange(20) + step / 2
    a = np.concatenate([middle * (1 + 2.0**-40), middle * (1 - 2.0**-40), -middle, middle])
    want = a.astype(lk.dtype(to).numpy) if to == "f16" else None
    (host, got) = (realized(lambda x, y: x.cast(to), a, a, place) for place in ("cpu", PLACE))
    assert got.tobytes() == host.tobytes()
    assert want is None or want.tobytes() == host.tobytes()


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("dtype", ["i32", "u32", "i64"])
def test_a_whole_number_is_rounded_once(cuda: CudaBackend, dtype: str, to: str) -> None:
    """At, just above and just below the middle of two floats of the format."""
    bits, info = {"f32": 24, "f16": 11, "bf16": 8}[to], np.iinfo(lk.dtype(dtype).numpy)
    middles = [(2 * k + 1) << e for k in (1 << (bits - 1), (1 << bits) - 2) for e in range(40)]
    found = [sign * (m + d) for m in middles for d in (-1, 0, 1) for sign in (1, -1)]
    a = np.array([n for n in found if info.min <= n <= info.max] + [info.min, info.max], info.dtype)
    host, got = (realized(lambda x, y: x.cast(to), a, a, place) for place in ("cpu", PLACE))
    assert got.tobytes() == host.tobytes()


@pytest.mark.parametrize("to", [*FLOATS, "f64", "bool"])
@pytest.mark.parametrize("dtype", [*FLOATS, "f64"])
@pytest.mark.parametrize("flags", [0, FLUSH])
def test_casts_keep_subnormals(memory: Memory, dtype: str, to: str, flags: int) -> None:
    """Also where arithmetic flushes them, as CuPy compiles. Only f64 has none of its own here."""
    bits = np.array([1, 2, 3, 0x1FFFFF, 0x400000, 0x7FFFFF, 0x800000], np.uint32)
    a = np.concatenate([[0.0], bits.view(np.float32), [2.0**-24, 2.0**-15]])
    if dtype == "f64":
        a = np.concatenate([a, a * (1 + 2.0**-30), a * (1 - 2.0**-30), a * 1.5, [2.0**-150]])
    x = memory.input(to_raw(np.concatenate([a, -a]).astype(lk.dtype(dtype).numpy)))
    want = lk.realize(lk.Graph().const(x.view(lk.dtype(dtype).numpy)).cast(to))
    out = memory.output(np.full(x.shape, 77, lk.dtype(to).raw))
    name, expression = ("u8", "!is_zero(x)") if to == "bool" else (to, "x")
    args = ck.struct(
        "map", shape=[len(x)] + 5 * [0], x=[1] + 5 * [0], y=6 * [0], z=6 * [0], size=len(x), rank=1
    )
    made = module("map", OUT=name, X=dtype, Y="u8", Z="u8", INPUTS=1, EXPR=expression)
    shape = ck.launch_of("map", size=len(x))
    made.launch("map", shape, out, x, None, None, 0, 0, args, flags=flags)
    assert out.tobytes() == to_raw(want).tobytes()


def test_axes_merge_and_more_than_six_run_the_body(cuda: CudaBackend) -> None:
    shape = (2,) * 8
    a = np.arange(256, dtype=np.float32).reshape(shape)
    for axes in (tuple(range(8)), tuple(range(7, -1, -1))):
        got = realized(lambda x, y, axes=axes: x.permute(axes) + y.permute(axes), a, a, PLACE)
        np.testing.assert_array_equal(got, 2 * a.transpose(axes))
    wide = 1 + 2.0**-11 * (1 + 2.0**-20) + np.zeros(shape)  # a bit above the middle of two f16
    for to in ("f16", "bf16", "f32"):
        for place in ("cpu", PLACE):
            got = realized(lambda x, y, to=to: x.permute(axes).cast(to), wide, wide, place)
            assert got.tobytes() == wide.astype(lk.dtype(to).numpy).tobytes()


@nvrtc.needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", "sm_100"])
@np.errstate(all="ignore")
def test_every_expression_compiles_for_gpus(cuda: CudaBackend, arch: str) -> None:
    for name, dtype in cases():
        build = {**BINARY, **FLOAT, **SIGNED, **WHOLE}[name]
        realized(build, *operands(dtype), PLACE)
    found = {options[-1]: (code, options) for code, options in machine.compiled if options}
    assert len(found) > 25
    for code, options in found.values():
        given = (f"-arch={arch}", *nvrtc.CUPY_OPTIONS, *options)
        status, log, _ = nvrtc.compile_code(code, "map.cu", given)
        assert (status, log) == (0, ""), options
