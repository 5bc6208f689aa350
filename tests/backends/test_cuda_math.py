"""The kernels of norms, rotary embedding and matrix products against float64."""

import ctypes
from typing import Any

import numpy as np
import pytest
from cuda_cpu import BACKWARDS, FLUSH, Memory, module, needs_compiler
from cuda_floats import Array, bits_of, check_close, junk, wide

import lazykv as lk
from lazykv.backends import cuda_kernels as ck
from lazykv.dtypes import to_raw
from lazykv.ops.rope import Rope

pytestmark = needs_compiler

DTYPES = ("f32", "f16", "bf16")

# `control` is put into the control word of the CPU's floats: 0x8040 makes zeros of subnormals.
CONVERSIONS = """
extern "C" void widen_all(const ELEMENT* x, float* out, long long n, unsigned control) {
    unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | control);
    for (long long i = 0; i < n; i++) out[i] = widen(x[i]);
    __builtin_ia32_ldmxcsr(before);
}
extern "C" void narrow_all(const float* x, ELEMENT* out, long long n, unsigned control) {
    unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | control);
    for (long long i = 0; i < n; i++) out[i] = narrow<ELEMENT>(x[i]);
    __builtin_ia32_ldmxcsr(before);
}
"""


def rows_module(dtype: str) -> Any:
    return module(
        "rms_norm", "softmax", "rope", extra=CONVERSIONS, ELEMENT=dtype
    )  # fmt: skip


def each_way(dtype: str) -> list[Any]:
    return [pytest.param(dtype, flags, id=f"{dtype}-{flags}") for flags in (0, BACKWARDS)]


EVERY_WAY = [p for t in DTYPES for p in each_way(t)]


def convert(function: str, dtype: str, x: Array, out: Array, flush: bool) -> None:
    pointer, call = ctypes.c_void_p, rows_module(dtype).library[function]
    ends = (pointer(x.ctypes.data), pointer(out.ctypes.data))
    call(*ends, ctypes.c_longlong(len(x)), ctypes.c_uint(0x8040 if flush else 0))


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@np.errstate(invalid="ignore")  # some NaN signal
def test_every_16_bit_float_widens_exactly(dtype: str, flush: bool) -> None:
    x = np.arange(1 << 16, dtype=np.uint16)
    out = np.zeros(len(x), np.float32)
    convert("widen_all", dtype, x, out, flush)
    wanted = wide(x.view(lk.dtype(dtype).raw), dtype).astype(np.float32)
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(np.signbit(out), x >= 0x8000)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@np.errstate(invalid="ignore", over="ignore")
def test_floats_narrow_to_nearest_even(dtype: str, flush: bool) -> None:
    """All values, all midpoints between neighbours, the floats beside those, and random bits."""
    exact = wide(np.arange(1 << 16, dtype=np.uint16).view(lk.dtype(dtype).raw), dtype)
    middle = ((exact[:-1] + exact[1:]) / 2).astype(np.float32)
    above, below = (np.nextafter(middle, np.float32(to)) for to in (np.inf, -np.inf))
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    x = np.concatenate([exact.astype(np.float32), middle, above, below, bits])
    out = np.zeros(len(x), np.uint16)
    convert("narrow_all", dtype, x, out, flush)
    wanted = to_raw(x.astype(lk.dtype(dtype).numpy)).view(np.uint16)
    nan = np.isnan(x)
    np.testing.assert_array_equal(out[~nan], wanted[~nan])
    assert np.isnan(wide(out.view(lk.dtype(dtype).raw), dtype)[nan]).all()


@pytest.mark.parametrize(("dtype", "flags"), EVERY_WAY)
@pytest.mark.parametrize("width", [1, 5, 31, 32, 255, 256, 257, 700])
def test_rms_norm(memory: Memory, dtype: str, flags: int, width: int) -> None:
    rng = np.random.default_rng(2)
    base = memory.input(bits_of(rng.normal(size=(3, width + 2)), dtype))
    weight = memory.input(bits_of(rng.normal(size=width), dtype))
    out, x = memory.output(junk((3, width), dtype)), base[:, :width]
    rows_module(dtype).launch(
        "rms_norm", ck.launch_of("rms_norm", rows=3), out, x, weight, 3, width, width + 2, 1e-5,
        flags=flags,
    )  # fmt: skip
    x64, w64 = wide(x, dtype), wide(weight, dtype)
    wanted = x64 / np.sqrt(np.mean(x64**2, 1, keepdims=True) + 1e-5) * w64
    check_close(out, wanted, np.abs(wanted), dtype)


@pytest.mark.parametrize(("dtype", "flags"), EVERY_WAY)
@pytest.mark.parametrize("width", [1, 5, 32, 255, 256, 257, 700])
def test_softmax(memory: Memory, dtype: str, flags: int, width: int) -> None:
    rng = np.random.default_rng(3)
    values = 30 * rng.normal(size=(6, width + 1))
    values[1] = -np.inf
    values[2, : width // 2] = -np.inf
    values[3, width // 2] = np.nan
    values[4, width // 2] = np.inf
    x = memory.input(bits_of(values, dtype))[:, :width]
    out = memory.output(junk((6, width), dtype))
    rows_module(dtype).launch(
        "softmax", ck.launch_of("softmax", rows=6), out, x, 6, width, width + 1, flags=flags
    )
    good = [0, 1, 2, 5]
    x64 = wide(x, dtype)[good]
    top = x64.max(1, keepdims=True)
    e = np.exp(x64 - np.where(np.isneginf(top), 0, top))
    total = e.sum(1, keepdims=True)
    wanted = e / np.where(total == 0, 1, total)
    # An exponent's relative error is the rounding of x - max, which is up to 100 here.
    check_close(out[good], wanted, 1e-3 + 20 * wanted, dtype)
    assert not wide(out, dtype)[1].any()
    assert np.isnan(wide(out, dtype)[3:5]).all()


def test_only_subnormal_f32_numbers_are_flushed(memory: Memory) -> None:
    """As CuPy compiles. All f16 numbers are normal as f32. Rows of one, with an eps of 1, are x."""
    launch = ck.launch_of("rms_norm", rows=1)
    for dtype, least, kept in (("f32", 1e-40, False), ("f16", 2.0**-24, True)):
        x, one = (memory.input(bits_of(np.array([a]), dtype)) for a in (least, 1.0))
        for flags in (0, FLUSH):
            out = memory.output(junk((1,), dtype))
            rows_module(dtype).launch("rms_norm", launch, out, x, one, 1, 1, 1, 1.0, flags=flags)
            assert wide(out, dtype)[0] == (0 if flags and not kept else wide(x, dtype)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("batch", "per_batch"), [(1, False), (3, False), (3, True), (0, True)])
def test_rope(
    memory: Memory, dtype: str, interleaved: bool, batch: int, per_batch: bool
) -> None:  # fmt: skip
    rng, heads, queries, half = np.random.default_rng(5), 3, 5, 7
    base = memory.input(bits_of(rng.normal(size=(batch, queries, heads + 1, 2 * half + 1)), dtype))
    x = base[:, :, :heads, : 2 * half].swapaxes(1, 2)
    angle = rng.uniform(0, 6, (*([batch] if per_batch else []), queries, half))
    cos, sin = (memory.input(bits_of(f(angle), dtype)) for f in (np.cos, np.sin))
    out = memory.output(junk(x.shape, dtype))
    args = ck.struct(
        "rope", batch=batch, heads=heads, queries=queries, half=half, interleaved=interleaved,
        x_step=[s // x.itemsize for s in x.strides[:3]],
        table_step=[queries * half if per_batch else 0, half],
    )  # fmt: skip
    launch = ck.launch_of("rope", size=batch * heads * queries * half)
    rows_module(dtype).launch("rope", launch, out, x, cos, sin, args)
    x64, c64, s64 = (wide(a, dtype) for a in (x, cos, sin))
    wanted = Rope(interleaved).body(np, x64, c64, s64)
    check_close(out, wanted, np.abs(x64).max(initial=0), dtype)


GEMV = [("f32", "f32"), ("f32", "f16"), ("f32", "bf16"), ("f16", "f16"), ("bf16", "bf16")]
# m, k, n, columns left out of a wider matrix, splits (0: as chosen)
PRODUCTS = [
    (1, 64, 128, 0, 0), (3, 100, 96, 0, 0), (4, 1, 8, 0, 0), (2, 129, 256, 0, 1),
    (4, 300, 264, 8, 3), (1, 257, 40, 8, 0), (3, 0, 16, 0, 0), (2, 40, 0, 16, 0), (4, 5, 16, 0, 4),
]  # fmt: skip


@pytest.mark.parametrize(("given", "weights"), GEMV)
@pytest.mark.parametrize(("m", "k", "n", "rest", "splits"), PRODUCTS)
@pytest.mark.parametrize("flags", [0, BACKWARDS])
def test_gemv(
    memory: Memory, given: str, weights: str, m: int, k: int, n: int, rest: int, splits: int,
    flags: int,
) -> None:  # fmt: skip
    lines, vec = 4, 8 if weights != "f32" else 4
    run_gemv(memory, given, weights, (m, k, n), rest, splits, (lines, vec), flags)


@pytest.mark.parametrize(("lines", "m"), [(1, 1), (2, 2), (8, 5), (8, 8)])
def test_gemv_of_any_alignment_and_number_of_rows(memory: Memory, lines: int, m: int) -> None:
    assert ck.gemv_lines(m) == lines
    run_gemv(memory, "f32", "f32", (m, 70, 37), 1, 0, (lines, 1), 0)


def run_gemv(
    memory: Memory, given: str, weights: str, sizes: tuple[int, int, int], rest: int, splits: int,
    shape: tuple[int, int], flags: int,
) -> None:  # fmt: skip
    rng, (m, k, n), (lines, vec) = np.random.default_rng(6), sizes, shape
    x = memory.input(bits_of(rng.normal(size=(m, k + 3)), given))[:, :k]
    w = memory.input(bits_of(rng.normal(size=(k, n + rest)), weights))[:, :n]
    step = w.strides[0] // w.itemsize
    assert ck.gemv_vec(w.itemsize, n, (step,), (w.ctypes.data,)) >= vec
    splits = splits or ck.gemv_splits(k, n, vec)
    part = memory.output(np.full(ck.gemv_scratch(m, n, splits), np.nan, np.float32))
    out = memory.output(junk((m, n), given))
    kernels = module(
        "gemv", "gemv_reduce", INPUT=given, WEIGHT=weights, LINES=lines, VEC=vec
    )  # fmt: skip
    args = ck.struct("gemv", m=m, k=k, n=n, x_step=k + 3, w_step=step, splits=splits)
    launch = ck.launch_of("gemv", n=n, vec=vec, splits=splits)
    kernels.launch("gemv", launch, out, x, w, part, args, flags=flags)
    if splits > 1:
        launch = ck.launch_of("gemv_reduce", size=m * n)
        kernels.launch("gemv_reduce", launch, out, part, m * n, splits, flags=flags)
    x64, w64 = wide(x, given), wide(w, weights)
    check_close(out, x64 @ w64, np.abs(x64) @ np.abs(w64), given)
