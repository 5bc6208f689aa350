"""The backend when CUDA fails: faults, behind which nothing on a device works, and captures that
end without a graph."""

import gc
import sys
from typing import Any

import numpy as np
import pytest
from cuda_cpu import needs_compiler
from fake_cupy.machine import CUDARuntimeError, machine
from small_llama import small_llama

import lazykv as lk
from lazykv.backends.cuda import CudaBackend
from lazykv.sessions.captured import CapturedDecodeSession

pytestmark = needs_compiler

PLACE, OTHER = lk.DeviceLocation("cuda:0"), lk.DeviceLocation("cuda:1")
ONES = np.ones(4, np.float32)


def fault() -> None:
    raise CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")


def faulted(cuda: CudaBackend) -> None:
    cuda.queue(PLACE).stream.push(fault)
    with pytest.raises(lk.KernelError, match="illegal memory access"):
        cuda.synchronize(PLACE)


def test_behind_a_fault_everything_names_it(cuda: CudaBackend) -> None:
    g = lk.Graph()
    x = g.placeholder((4,), "f32")
    plan = lk.plan(x + 1.0, {x: ONES}, PLACE)
    store, capture = lk.Storage.from_array(ONES, PLACE), cuda.capture(PLACE, [])
    away = lk.Storage.from_array(ONES, OTHER)
    faulted(cuda)
    for use in (
        lambda: cuda.capture(PLACE, []), lambda: cuda.synchronize(PLACE), store.to_numpy,
        lambda: cuda.copy_in(store.array, ONES),
        lambda: lk.Storage.from_array(ONES, PLACE), lambda: cuda.allocate(1 << 20, PLACE),
        plan.run, capture.replay,
        lambda: cuda.transfer(away.array, OTHER, store.array, PLACE),
        lambda: cuda.transfer(store.array, PLACE, away.array, OTHER),
    ):  # fmt: skip
        with pytest.raises(lk.KernelError, match=r"cuda:0: got cudaErrorIllegalAddress.* process"):
            use()
        assert not cuda.queue(PLACE).capturing
    assert away.to_numpy().tolist() == [1] * 4  # another device goes on


def test_behind_a_fault_memory_is_let_go_in_silence(
    cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    model = small_llama()
    cache = model.new_cache(16, device=PLACE)
    logits = model.prefill([3, 1, 4], cache)
    model.decode_step(int(logits.argmax()), cache)
    before = cuda.used_bytes(PLACE)
    faulted(cuda)
    with pytest.raises(lk.KernelError):
        model.decode_step(1, cache)
    del model, cache, logits
    gc.collect()
    assert cuda.used_bytes(PLACE) < before
    assert not told


def test_a_fault_in_a_session_is_told_by_every_later_step(cuda: CudaBackend) -> None:
    model = small_llama()
    cache = model.new_cache(16, device=PLACE)
    model.prefill([3, 1, 4], cache)
    model.decode_step(1, cache)
    cuda.queue(PLACE).stream.push(fault)
    for _ in range(2):
        with pytest.raises((lk.KernelError, lk.StorageTornError)):
            model.decode_step(1, cache)


# Captures


def spoil(cuda: CudaBackend) -> None:
    cuda.queue(PLACE).stream.spoil()


def test_a_capture_without_a_graph_is_refused_and_over(cuda: CudaBackend) -> None:
    for calls in ([(spoil, (cuda,))], [(spoil, (cuda,)), (fault, ())]):
        with pytest.raises(lk.CaptureError, match=r"^capture on cuda:0: got .*cudaError"):
            cuda.capture(PLACE, calls)
        assert not cuda.queue(PLACE).capturing
    store = lk.Storage.from_array(ONES, PLACE)
    cuda.capture(PLACE, [(cuda.queue(PLACE).clear, (store.array,))]).replay()
    assert store.to_numpy().tolist() == [0] * 4


def test_a_session_whose_capture_fails_goes_on_with_plain_steps(
    cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_llama()
    caches = [model.new_cache(16, device=place) for place in ("cpu", PLACE)]
    stream = type(cuda.queue(PLACE).stream)
    begin = stream.begin_capture
    monkeypatch.setattr(stream, "begin_capture", lambda self: (begin(self), self.spoil()))
    for cache in caches:
        model.prefill([3, 1, 4], cache)
    for n in range(4):
        want, got = (model.decode_step(n, cache) for cache in caches)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    held = model.session_for(caches[1])
    assert isinstance(held, CapturedDecodeSession)
    assert (held.captures, held.replays) == (0, 0)
    assert "StreamCaptureInvalidated" in str(held.reason)
    assert machine.graph_launches == 1  # that of the probe


class OutOfDeviceMemory(CUDARuntimeError):
    """What CUDA says when it has no memory, which is no fault of a kernel."""

    status = 2


@pytest.mark.parametrize("what", ["Stream", "alloc_pinned_memory"])
def test_memory_that_cuda_itself_needs_is_out_of_memory_not_a_fault(
    cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def none(*args: Any, **options: Any) -> None:
        raise OutOfDeviceMemory("cudaErrorMemoryAllocation: out of memory")

    with monkeypatch.context() as m:
        m.setattr(cuda.xp.cuda, what, none)
        with pytest.raises(lk.OutOfMemory, match="cuda:1: got cudaErrorMemoryAllocation"):
            lk.Storage.from_array(ONES, OTHER)  # its queue is made now
    assert lk.Storage.from_array(ONES, OTHER).to_numpy().tolist() == [1] * 4


def test_a_capture_for_which_there_is_no_memory_leaves_steps_plain(
    cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(**options: Any) -> None:
        raise OutOfDeviceMemory("cudaErrorMemoryAllocation: out of memory")

    model = small_llama()
    cache, host = model.new_cache(16, device=PLACE), model.new_cache(16)
    model.decode_step(1, cache)
    monkeypatch.setattr(cuda.xp.cuda, "Stream", none)
    model.decode_step(2, cache)
    held = model.session_for(cache)
    assert isinstance(held, CapturedDecodeSession)
    assert "out of memory" in str(held.reason)
    for token in (1, 2, 3):
        want = model.decode_step(token, host)
    np.testing.assert_allclose(model.decode_step(3, cache), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_no_memory_is_refused(limit: int) -> None:
    with pytest.raises(lk.RangeError, match=f"limit_bytes {limit}, need at least 1"):
        CudaBackend(limit_bytes=limit)
