"""Arrays of CuPy's in storages, on the stand-in: order with the lender's work, and letting go."""

import gc
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda_cpu import needs_compiler

import lazykv as lk
from lazykv.backends.cuda import CudaBackend
from lazykv.testing.lending import Lender

pytestmark = needs_compiler


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@pytest.fixture
def theirs(cuda: CudaBackend) -> Any:
    """A stream of the lender's."""
    return cuda.xp.cuda.Stream(non_blocking=True)


def test_what_the_lender_has_queued_runs_first(cuda: CudaBackend, theirs: Any) -> None:
    array = cuda.xp.asarray(floats(0, 0))
    with theirs:
        array[...] = 5.0
        store = lk.Storage.wrap(array)
    assert theirs.queue
    assert store.to_numpy().tolist() == [5, 5]
    assert store.array.data.ptr == array.data.ptr


def test_without_the_handshake_the_lender_would_be_overtaken(
    cuda: CudaBackend, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaBackend, "receiving", lambda *args: nullcontext(-1))
    array = cuda.xp.asarray(floats(0, 0))
    with theirs:
        array[...] = 5.0
        store = lk.Storage.wrap(array)
    assert store.to_numpy().tolist() == [0, 0]


def test_the_lender_waits_when_it_takes_the_storage_back(cuda: CudaBackend, theirs: Any) -> None:
    array = cuda.xp.asarray(floats(1, 2))
    store = lk.Storage.wrap(array)
    x = lk.Graph().placeholder((2,), "f32")
    lk.plan([], {x: store}, "cuda:0", effects=[x.at[:].set(x + 1.0)]).run()
    with theirs:
        back = cuda.xp.from_dlpack(store)
        assert cuda.xp.asnumpy(back).tolist() == [2, 3]
    assert back.data.ptr == array.data.ptr


def test_it_goes_to_the_device_that_it_is_on(cuda: CudaBackend) -> None:
    with cuda.xp.cuda.Device(1):
        theirs = cuda.xp.cuda.Stream(non_blocking=True)
        array = cuda.xp.asarray(floats(1, 2))
        with theirs:
            array[...] = 4.0
            store = lk.Storage.wrap(array)
    assert str(store.location) == "cuda:1"
    assert store.to_numpy().tolist() == [4, 4]
    with pytest.raises(lk.BindingError, match=r"\(2, 1\) for cuda:0, need that of .* \(2, 0\)"):
        lk.Storage.wrap(array, "cuda:0")


def test_the_device_is_current_for_the_lender(cuda: CudaBackend) -> None:
    """PyTorch refuses to lend memory of another device than its current one."""

    class Watching:
        def __init__(self, array: Any) -> None:
            self.array, self.seen = array, -1

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

        def __dlpack__(self, **options: Any) -> Any:
            self.seen = cuda.xp.cuda.Device().id
            return self.array.__dlpack__(**options)

    with cuda.xp.cuda.Device(1):
        lender = Watching(cuda.xp.asarray(floats(1)))
    lk.Storage.wrap(lender)
    assert lender.seen == 1


def test_bf16_of_cupy_is_bf16(cuda: CudaBackend) -> None:
    data = np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 3)
    store = lk.Storage.wrap(cuda.xp.asarray(data))
    assert (store.dtype, store.array.dtype) == (lk.bf16, np.uint16)
    np.testing.assert_array_equal(store.to_numpy(), data)


def test_queued_work_has_run_when_memory_is_let_go(cuda: CudaBackend) -> None:
    """The lender may hand it out again at once, to a stream that waits for nobody."""
    array = cuda.xp.asarray(floats(0, 0))
    store = lk.Storage.wrap(array)
    cuda.copy_in(store.array, floats(1, 2))
    assert array._host().tolist() == [0, 0]
    del store
    gc.collect()
    assert array._host().tolist() == [1, 2]


def test_a_fault_is_no_news_when_memory_is_let_go(
    cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = lk.Storage.wrap(cuda.xp.asarray(floats(0, 0)))
    stream = cuda.queue(store.location).stream

    def fault() -> None:
        raise cuda.xp.cuda.runtime.CUDARuntimeError("cudaErrorLaunchFailure")

    stream.queue.append(fault)
    del store
    gc.collect()  # what a finalizer raises would be an error in the settings of these tests
    assert not stream.queue


def test_an_empty_array_is_lent(cuda: CudaBackend) -> None:
    store = lk.Storage.wrap(cuda.xp.asarray(np.zeros((0, 3), np.float32)))
    assert (str(store.location), store.to_numpy().shape) == ("cuda:0", (0, 3))


def test_lent_memory_counts_for_nobody(cuda: CudaBackend) -> None:
    place = lk.DeviceLocation("cuda:0")
    array = cuda.xp.asarray(np.zeros(10**6, np.float32))
    before = cuda.used_bytes(place)
    assert lk.Storage.wrap(array).nbytes == 4 * 10**6
    assert cuda.used_bytes(place) == before


def test_a_product_takes_a_matrix_at_any_address(cuda: CudaBackend) -> None:
    """Kernels that read several elements at once have to look at where the matrix is."""
    n = 64
    line = np.random.default_rng(0).standard_normal(n * n + 1).astype(np.float16)
    owner = lk.Storage.from_array(line, "cuda:0")

    def shifted(tensor: Any) -> None:
        tensor.byte_offset += 2
        tensor.shape[0] = n * n

    x, flat = (g := lk.Graph()).placeholder((1, n), "f16"), g.placeholder((n * n,), "f16")
    row, product = line[:n].reshape(1, n), x @ flat.reshape(n, n)
    lent = lk.Storage.wrap(Lender(owner, shifted))
    got = lk.realize(product, {x: lk.Storage.from_array(row, "cuda:0"), flat: lent})
    want = row.astype(np.float64) @ line[1:].astype(np.float64).reshape(n, n)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-2)


def test_read_only_memory_goes_to_nobody_who_cannot_be_told(cuda: CudaBackend) -> None:
    owner = lk.Storage.from_array(floats(1, 2), "cuda:0")
    store = lk.Storage.wrap(Lender(owner, read_only=True))
    assert store.frozen
    with pytest.raises(lk.BindingError, match="read-only memory for a consumer without DLPack 1"):
        store.__dlpack__()
