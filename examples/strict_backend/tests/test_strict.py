"""The strict backend: what it declares holds, and what it does not hold is refused by name."""

import gc

import array_api_strict as strict
import numpy as np
import pytest
from lazykv_strict import StrictBackend
from lazykv_strict.kernels import kernel_for
from lazykv_strict.memory import ALIGNMENT, DEVICES, Block, StrictArray

import lazykv as lk
from lazykv.layout import Layout
from lazykv.ops.move import Copy
from lazykv.testing.runner import run_suite

FIRST, SECOND = DEVICES


def some(*shape: int) -> StrictArray:
    block = Block(4 * int(np.prod(shape)), FIRST)
    made = StrictArray(block.bytes, block).view(lk.f32, Layout.contiguous(shape))
    made.write(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    return made


def test_it_is_found_by_name():
    backend = lk.device("strict:0").backend
    assert isinstance(backend, StrictBackend)
    assert lk.device("strict:1").backend is backend


@pytest.mark.parametrize("place", ["strict:0", "strict:1"])
def test_what_it_declares_holds(place):
    done = run_suite("strict", device=place)
    assert done.code == 0, done.text
    counts = done.run.report.counts()
    assert all(c["passed"] for c in counts.values())
    assert counts["core"]["passed"] > 4000


@pytest.mark.parametrize("nbytes", [1, 63, 4096])
def test_memory_is_aligned(nbytes):
    for _ in range(4):
        assert Block(nbytes, FIRST).bytes.ctypes.data % ALIGNMENT == 0


def test_memory_is_free_when_the_last_view_goes():
    backend = StrictBackend()
    view = backend.view(backend.allocate(400, FIRST), lk.f32, Layout(10, (5,), (2,)))
    gc.collect()
    assert (backend.used_bytes(FIRST), backend.used_bytes(SECOND)) == (400, 0)
    del view
    gc.collect()
    assert backend.used_bytes(FIRST) == 0


def test_results_of_another_device_or_shape_are_not_stored():
    dest = some(3)
    for array in (
        strict.ones(3, dtype=strict.float32),
        strict.ones(3, dtype=strict.float32, device=DEVICES[SECOND]),
        strict.ones(1, dtype=strict.float32, device=DEVICES[FIRST]),
    ):
        with pytest.raises(lk.KernelError, match=r"store: got .*, need \(3,\) on .*device1"):
            dest.store(array)
    assert dest.read().tolist() == [0, 1, 2]


def test_a_write_stores_its_slab_alone(monkeypatch):
    stored, store = [], StrictArray.store

    def watched(self, array):
        stored.append(self.shape)
        store(self, array)

    monkeypatch.setattr(StrictArray, "store", watched)
    g, at = lk.Graph(), lk.Sym("at", 0, 3)
    dest, row = g.placeholder((4, 2), "f32"), g.placeholder((1, 2), "f32")
    cache = lk.Storage.from_array(np.zeros((4, 2), np.float32), "strict:0")
    plan = lk.plan(dest.at[at : at + 1].set(row), {dest: cache}, "strict:0")
    plan.run({row: np.ones((1, 2), np.float32)}, {at: 2})
    assert stored == [(1, 2)]
    assert cache.to_numpy()[:, 0].tolist() == [0, 0, 1, 0]


def test_dtypes_it_does_not_store_are_refused_by_name():
    with pytest.raises(lk.DTypeError, match=r"view on strict:0: got bf16, need one of bool, f32"):
        lk.Storage.allocate((2,), "bf16", "strict:0")
    x = lk.Graph().const(np.float16([1, 2])).to("strict:0")
    with pytest.raises(lk.BackendUnavailable, match=r"copy: got f16\[2\] on strict:0"):
        lk.realize(x)
    spec = x.spec
    assert kernel_for(Copy(None), (spec,), spec) is None
