"""The CUDA backend on the stand-in for CuPy: memory, copies, order, refusals, exchange."""

import gc
import subprocess
import sys
import threading
from contextlib import nullcontext

import numpy as np
import pytest
from cuda_cpu import needs_compiler
from transfers import overwritten_source

import lazykv as lk
from lazykv.backends.cuda import CudaBackend
from lazykv.backends.cuda_pinned import SLOT_BYTES, SLOTS
from lazykv.layout import Layout

pytestmark = needs_compiler

PLACES = [lk.DeviceLocation(f"cuda:{n}") for n in range(2)]


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def pending(cuda: CudaBackend, n: int = 0) -> int:
    """Work of a device that has not run."""
    return len(cuda.queue(PLACES[n]).stream.queue)


def test_neither_lazykv_nor_the_module_imports_cupy() -> None:
    code = "import lazykv, lazykv.backends.cuda, sys; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_locations_are_those_of_the_driver(cuda: CudaBackend) -> None:
    assert cuda.locations() == tuple(PLACES)
    with pytest.raises(lk.BackendUnavailable, match="need one of: cuda:0, cuda:1"):
        lk.device("cuda:2")


# Memory


def test_memory_is_aligned_and_lives_on_its_device(cuda: CudaBackend) -> None:
    for place in PLACES:
        for n in (1, 64, 513, 70000):
            buffer = cuda.allocate(n, place)
            assert (buffer.shape, buffer.dtype, buffer.data.ptr % 512) == ((n,), np.uint8, 0)
            assert buffer.device.id == place.index
    assert cuda.allocate(0, PLACES[0]).shape == (0,)


def test_out_of_memory_is_typed_and_survived(cuda: CudaBackend) -> None:
    used = cuda.used_bytes(PLACES[0])
    with pytest.raises(lk.OutOfMemory, match=r"allocate on cuda:0: got no memory for 1000000000 "):
        cuda.allocate(10**9, PLACES[0])
    with pytest.raises(lk.OutOfMemory):
        lk.KvCache.with_capacity(8, 8, 64, 4096, "f32", "cuda:0")
    gc.collect()
    assert cuda.used_bytes(PLACES[0]) == used
    assert lk.Storage.from_array(floats(1, 2), "cuda:0").to_numpy().tolist() == [1, 2]


def test_a_limit_bounds_each_device(cuda: CudaBackend) -> None:
    small = CudaBackend(limit_bytes=8192)
    kept = [small.allocate(4096, place) for place in PLACES]
    with pytest.raises(lk.OutOfMemory):
        small.allocate(4096, PLACES[1])
    kept.clear()
    assert small.allocate(4096, PLACES[1]).shape == (4096,)


def test_a_body_that_runs_out_of_memory_says_so(cuda: CudaBackend) -> None:
    x = lk.Storage.allocate((1 << 20,), "f64", "cuda:0")
    g = lk.Graph()
    node = g.const(x).exp()
    with pytest.raises(lk.OutOfMemory, match="exp"):
        lk.plan([node.exp(), node], device="cuda:0").run()


def test_freed_memory_is_used_again_in_the_order_of_the_stream(cuda: CudaBackend) -> None:
    first = lk.Storage.from_array(floats(1, 2), "cuda:0")
    second = lk.Storage.allocate((2,), "f32", "cuda:0")
    cuda.transfer(second.array, PLACES[0], first.array, PLACES[0])
    address = first.array.data.ptr
    del first
    third = lk.Storage.allocate((2,), "f32", "cuda:0")
    cuda.copy_in(third.array, floats(7, 8))
    assert third.array.data.ptr == address
    assert pending(cuda)
    assert second.to_numpy().tolist() == [1, 2]
    assert third.to_numpy().tolist() == [7, 8]


# Copies


def test_nothing_runs_before_somebody_waits(cuda: CudaBackend) -> None:
    store = lk.Storage.allocate((2,), "f32", "cuda:0")
    cuda.copy_in(store.array, floats(1, 2))
    assert pending(cuda)
    assert store.to_numpy().tolist() == [1, 2]
    assert not pending(cuda)


def test_the_host_array_may_change_as_soon_as_a_copy_returns(cuda: CudaBackend) -> None:
    stores = [lk.Storage.allocate((3,), "f32", "cuda:0") for _ in range(3 * SLOTS)]
    host = np.zeros(3, np.float32)
    for n, store in enumerate(stores):  # more than the ring has slots
        host[:] = n
        cuda.copy_in(store.array, host)
    host[:] = -1
    assert [s.to_numpy().tolist() for s in stores] == [[n] * 3 for n in range(len(stores))]


def test_a_slot_that_is_not_waited_for_would_be_overwritten(
    cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fake_cupy.streams.Event.synchronize", lambda self: None)
    stores = [lk.Storage.allocate((1,), "f32", "cuda:0") for _ in range(SLOTS + 1)]
    for n, store in enumerate(stores):
        cuda.copy_in(store.array, floats(n))
    assert stores[0].to_numpy().tolist() == [SLOTS]


def test_large_arrays_go_in_pieces(cuda: CudaBackend) -> None:
    big = np.arange(SLOT_BYTES * 5 // 2, dtype=np.uint8).reshape(5, -1)
    store = lk.Storage.from_array(big[:, ::-1], "cuda:0")
    np.testing.assert_array_equal(store.to_numpy(), big[:, ::-1])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.int64])
def test_views_are_copied_element_by_element(cuda: CudaBackend, dtype: type) -> None:
    whole = np.arange(60).astype(dtype)
    store = lk.Storage.from_array(whole.astype(np.uint8), "cuda:0")
    buffer = cuda.allocate(whole.nbytes, PLACES[0])
    names = {np.uint8: "u8", np.uint16: "f16", np.float32: "f32", np.int64: "i64"}
    dt = lk.dtype(names[dtype])
    flat = cuda.view(buffer, dt, Layout(0, (60,), (1,)))
    raw = whole.view(dt.raw)
    cuda.copy_in(flat, raw)
    part = cuda.view(buffer, dt, Layout(2, (4, 3), (3, 12)))
    want = np.lib.stride_tricks.as_strided(raw[2:], (4, 3), (3 * dt.itemsize, 12 * dt.itemsize))
    np.testing.assert_array_equal(cuda.copy_out(part), want)
    new = np.arange(100, 112).astype(raw.dtype).reshape(3, 4).T
    cuda.copy_in(part, new)
    raw = raw.copy()
    np.lib.stride_tricks.as_strided(raw[2:], want.shape, want.strides)[...] = new
    np.testing.assert_array_equal(cuda.copy_out(flat), raw)
    assert store.nbytes == 60


def test_a_copy_of_another_shape_or_dtype_is_refused(cuda: CudaBackend) -> None:
    store = lk.Storage.allocate((2,), "f32", "cuda:0")
    for wrong in (floats(1), np.zeros(2), np.zeros((2, 1), np.float32)):
        with pytest.raises(lk.ShapeError, match="copy to cuda:0"):
            cuda.copy_in(store.array, wrong)


# Order


def transfer_result(*values: float) -> list[float]:
    """Values computed on one device, copied to the other, and used there."""
    g = lk.Graph()
    x = g.placeholder((2,), "f32")
    made = (x + 1.0).to("cuda:1") * 2.0
    plan = lk.plan(made, {x: lk.Storage.from_array(floats(*values), "cuda:0")}, "cuda:1")
    return plan.run().tolist()


def test_a_transfer_waits_for_the_work_before_it(
    cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert transfer_result(1, 2) == [4, 6]
    monkeypatch.setattr("lazykv.backends.cuda_queue.Queue.wait_for", lambda self, other: None)
    assert transfer_result(3, 4) != [8, 10]


def test_the_source_is_not_overwritten_before_it_was_copied(
    cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert overwritten_source(cuda, "cuda") == [1]
    monkeypatch.setattr("lazykv.backends.cuda_queue.Queue.wait_for", lambda self, other: None)
    assert overwritten_source(cuda, "cuda") == [7]


def test_views_are_transferred_both_ways(cuda: CudaBackend) -> None:
    source = lk.Storage.from_array(np.arange(12, dtype=np.float32).reshape(3, 4), "cuda:0")
    dest = lk.Storage.from_array(np.zeros((4, 3), np.float32), "cuda:1")
    turned = cuda.view(source.array, lk.f32, Layout(0, (4, 3), (1, 4)))
    last = cuda.view(dest.array, lk.f32, Layout(2, (4, 1), (3, 1)))
    first = cuda.view(turned, lk.f32, Layout(0, (4, 1), (1, 1)))
    cuda.transfer(last, PLACES[1], first, PLACES[0])
    want = np.zeros((4, 3), np.float32)
    want[:, 2] = np.arange(4)
    np.testing.assert_array_equal(dest.to_numpy(), want)
    cuda.transfer(dest.array, PLACES[1], turned, PLACES[0])
    np.testing.assert_array_equal(dest.to_numpy(), source.to_numpy().T)


def test_values_of_symbols_go_with_the_launch(cuda: CudaBackend) -> None:
    cache = lk.KvCache.with_capacity(1, 1, 2, 8, "f32", "cuda:0")
    g, pos = lk.Graph(), lk.Sym("pos", 0, 7)
    k, v = (g.placeholder((1, 1, 8, 2), lk.f32) for _ in range(2))
    row = g.placeholder((1, 1, 1, 2), lk.f32)
    k_all, v_all = (c.at[:, :, pos : pos + 1].set(row) for c in (k, v))
    stores = {t: cache.slot_storage(0, n) for n, t in enumerate((k, v))}
    plan = lk.plan(lk.attention(row, k_all, v_all, length=pos + 1), stores, "cuda:0")
    for n in range(4):
        plan.run({row: np.full((1, 1, 1, 2), n + 1, np.float32)}, {pos: n})
    cache.cached_len = 4
    assert cache.live(0)[0][0, 0, :, 0].tolist() == [1, 2, 3, 4]


def test_work_of_a_caller_on_an_array_is_in_order(cuda: CudaBackend) -> None:
    store = lk.Storage.from_array(floats(0, 0), "cuda:0")
    g = lk.Graph()
    plan = lk.plan(g.const(store) + 1.0, device="cuda:0")
    with store.write() as array:
        array[...] = cuda.xp.asarray(floats(3, 4))
        assert pending(cuda)  # on the backend's own stream
    assert plan.run().tolist() == [4, 5]


def test_threads_share_a_device(cuda: CudaBackend) -> None:
    wrong: list[object] = []

    def work(seed: int) -> None:
        g = lk.Graph()
        x = g.placeholder((5,), "f32")
        plan = lk.plan(x * 2.0 + 1.0, {x: np.zeros(5, np.float32)}, "cuda:0")
        for n in range(30):
            data = np.full(5, seed * 100 + n, np.float32)
            got = plan.run({x: data})
            if not np.array_equal(got, data * 2 + 1):
                wrong.append((seed, n, got))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# Exchange


def test_an_export_waits_for_the_work_before_it(cuda: CudaBackend) -> None:
    store = lk.Storage.allocate((2,), "f32", "cuda:0")
    cuda.copy_in(store.array, floats(1, 2))
    assert pending(cuda)
    shared = cuda.xp.from_dlpack(store)  # for CuPy's current stream, which is not the backend's
    assert cuda.xp.asnumpy(shared).tolist() == [1, 2]
    assert shared.data.ptr == store.array.data.ptr


def test_without_the_wait_the_export_would_be_read_too_early(
    cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazykv.backends.cuda.CudaBackend.current", lambda *args: nullcontext())
    store = lk.Storage.allocate((2,), "f32", "cuda:0")
    cuda.copy_in(store.array, floats(1, 2))
    assert cuda.xp.asnumpy(cuda.xp.from_dlpack(store)).tolist() != [1, 2]


@pytest.mark.parametrize("name", ["bf16", "f16", "i64", "bool"])
def test_exports_have_the_logical_dtype(cuda: CudaBackend, name: str) -> None:
    data = np.arange(6).reshape(2, 3).astype(lk.dtype(name).numpy)
    store = lk.Storage.from_array(data, "cuda:1")
    assert store.__dlpack_device__() == (2, 1)
    with cuda.current(PLACES[1]):
        shared = cuda.xp.from_dlpack(store)
        assert shared.dtype == data.dtype
        np.testing.assert_array_equal(cuda.xp.asnumpy(shared), data)


def test_an_export_keeps_the_memory(cuda: CudaBackend) -> None:
    shared = cuda.xp.from_dlpack(lk.Storage.from_array(floats(1, 2), "cuda:0"))
    gc.collect()
    others = [lk.Storage.from_array(floats(7, 7), "cuda:0") for _ in range(4)]
    assert cuda.xp.asnumpy(shared).tolist() == [1, 2]
    assert len(others) == 4


def test_device_memory_is_no_host_array(cuda: CudaBackend) -> None:
    store = lk.Storage.from_array(floats(1, 2), "cuda:0")
    x = lk.Graph().placeholder((2,), "f32")
    plan = lk.plan(x + 1.0, {x: floats(0, 0)})
    for use in (lk.Storage.from_array, lambda a: plan.run({x: a})):
        with pytest.raises(lk.BindingError, match=r"to\('cpu'\), get\(\) or to_numpy\(\)"):
            use(cuda.xp.asarray(floats(3, 4)))
    for use in (lk.Storage.from_array, np.asarray):
        with pytest.raises(lk.BindingError, match=r"got a host access.*use to_numpy\(\)"):
            use(store)
