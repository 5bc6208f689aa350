"""Writes that have no kernel for their operands: their portable bodies, on the device.

A kernel walks at most six axes, and reads the numbers of rows one behind the other.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda_cpu import needs_compiler

import lazykv as lk
from lazykv.backends import cuda_body, cuda_kernels
from lazykv.backends.cuda import CudaBackend

pytestmark = needs_compiler

PLACE = lk.DeviceLocation("cuda:0")
SWAPPED = (1, 0, 3, 2, 5, 4, 7, 6)
"""Of an array with eight axes no two can be walked as one, beside a contiguous array."""


@pytest.fixture
def bodies(cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops whose bodies run."""
    ran: list[str] = []
    run = cuda_body._run_body
    monkeypatch.setattr(cuda_body, "_run_body", lambda s: (ran.append(s.call.op.name), run(s)))
    return ran


def floats(*shape: int, seed: int = 0, dtype: str = "f32") -> Any:
    made = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return made.astype(lk.dtype(dtype).numpy)


def realized(build: Callable[..., lk.Tensor], *arrays: Any) -> Any:
    g = lk.Graph()
    return lk.realize(
        build(*(g.const(lk.Storage.from_array(a, PLACE)) for a in arrays)), device=PLACE
    )


def same(got: Any, want: Any) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.tobytes() == want.tobytes()


def test_a_kernel_walks_fewer_axes_than_the_tests_have() -> None:
    assert len(SWAPPED) > cuda_kernels.AXES


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_write_slice_of_many_axes(bodies: list[str], dtype: str) -> None:
    dest, source = floats(2, 3, 2, 3, 2, 3, 2, 3, dtype=dtype), floats(3, 2, 3, 2, 3, 2, 2, 2)
    source = source.astype(dest.dtype)
    ranges = [(0, n) for n in dest.shape[:-1]] + [(1, 3)]
    got = realized(lambda d, s: d.write_slice(s.permute(*SWAPPED), ranges), dest, source)
    want = dest.copy()
    want[..., 1:3] = source.transpose(SWAPPED)
    same(got, want)
    assert bodies == ["write_slice"]


def test_write_slice_at_a_symbol_of_many_axes(bodies: list[str]) -> None:
    dest, source = floats(2, 3, 2, 3, 2, 3, 2, 3), floats(3, 1, 3, 2, 3, 2, 3, 2)
    g, at = lk.Graph(), lk.Sym("at", 0, 1)
    d, s = (g.const(lk.Storage.from_array(a, PLACE)) for a in (dest, source))
    plan = lk.plan(d.at[at : at + 1].set(s.permute(*SWAPPED)), device=PLACE)
    for n in (1, 0):  # in place, one behind the other
        dest[n : n + 1] = source.transpose(SWAPPED)
        same(plan.run(env={at: n}), dest)
    assert bodies == ["write_slice"] * 2


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_write_slice_at_of_many_axes(bodies: list[str], dtype: str) -> None:
    dest, source = (
        floats(2, 3, 2, 3, 2, 3, 2, 3, dtype=dtype), floats(3, 1, 3, 2, 3, 2, 3, 2, dtype=dtype)
    )  # fmt: skip
    got = realized(
        lambda d, s, i: d.write_slice_at(s.permute(*SWAPPED), 0, i), dest, source, np.array(1)
    )
    want = dest.copy()
    want[1:2] = source.transpose(SWAPPED)
    same(got, want)
    assert bodies == ["write_slice_at"]


def test_write_slice_rotating_of_many_axes(bodies: list[str]) -> None:
    dest, source = floats(4, 3, 2, 3, 2, 3, 2, 3), floats(3, 3, 3, 2, 3, 2, 3, 2)
    got = realized(
        lambda d, s, i: d.write_slice_rotating(s.permute(*SWAPPED), 0, i, 4, 1),
        dest, source, np.array(5),
    )  # fmt: skip
    want = dest.copy()
    for row, slot in enumerate([2, 3, 1]):  # positions 5, 6, 7: slot 1 + (p - 1) % 3
        want[slot] = source.transpose(SWAPPED)[row]
    same(got, want)
    assert bodies == ["write_slice_rotating"]


def test_write_rows_of_many_axes(bodies: list[str]) -> None:
    dest, source = floats(3, 3, 2, 3, 2, 3, 2, 3), floats(3, 2, 3, 2, 3, 2, 3, 2)
    got = realized(
        lambda d, s, i: d.write_rows(s.permute(*SWAPPED), i), dest, source, np.array([2, 0])
    )
    want = dest.copy()
    want[[2, 0]] = source.transpose(SWAPPED)
    same(got, want)
    assert bodies == ["write_rows"]


@pytest.mark.parametrize("used", [None, 2])
def test_write_rows_whose_numbers_are_apart(bodies: list[str], used: int | None) -> None:
    dest, source, pairs = floats(5, 4), floats(3, 4, seed=1), np.array([[4, 9], [0, 9], [3, 9]])
    counts = [] if used is None else [np.array(used)]
    got = realized(
        lambda d, s, p, *n: d.write_rows(s, p.slice(1, 0, 1).squeeze(1), *n),
        dest, source, pairs, *counts,
    )  # fmt: skip
    want = dest.copy()
    want[pairs[:used, 0]] = source[:used]
    same(got, want)
    assert bodies == ["write_rows"]


@pytest.mark.parametrize("op", ["write_slice_at", "write_slice_rotating", "write_rows"])
def test_a_bad_number_is_refused_and_writes_nothing(bodies: list[str], op: str) -> None:
    dest, source = floats(2, 3, 2, 3, 2, 3, 2, 3), floats(3, 1, 3, 2, 3, 2, 3, 2)
    store, g = lk.Storage.from_array(dest, PLACE), lk.Graph()
    d, number = g.placeholder(dest.shape, "f32"), g.placeholder((), "i64")
    s = g.const(lk.Storage.from_array(source, PLACE)).permute(*SWAPPED)
    made = {
        "write_slice_at": lambda: d.write_slice_at(s, 0, number),
        "write_slice_rotating": lambda: d.write_slice_rotating(s, 0, number, 2),
        "write_rows": lambda: d.write_rows(s, number.reshape(1)),
    }[op]()
    plan = lk.plan(made.slice(0, 0, 1), {d: store}, PLACE)
    with pytest.raises(lk.RangeError, match=op):
        plan.run({number: np.array(-1)})
    same(store.to_numpy(), dest)
    plan.run({number: np.array(1)})
    dest[1] = source.transpose(SWAPPED)[0]
    same(store.to_numpy(), dest)
    assert bodies == [op] * 2
