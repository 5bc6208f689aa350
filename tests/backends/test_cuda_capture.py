"""Captures on the CUDA backend: decode steps replayed as one graph, and what cannot be recorded."""

import gc
import threading

import numpy as np
import pytest
from captured_steps import check_paged, check_replays
from cuda_cpu import needs_compiler
from fake_cupy.machine import machine
from recordings import replayed_alone
from small_llama import small_llama

import lazykv as lk
from lazykv.backends.cuda import CudaBackend
from lazykv.device import Call
from lazykv.models.model import LlamaModel
from lazykv.ops.move import Copy
from lazykv.sessions.captured import CapturedDecodeSession

pytestmark = needs_compiler

PLACE = lk.DeviceLocation("cuda:0")
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return small_llama()


def decoded(model: LlamaModel, cache: lk.KvCache, n: int = 24) -> tuple[list[int], np.ndarray]:
    logits, ids, all_logits = model.prefill(PROMPT, cache), [], []
    for _ in range(n):
        ids.append(int(logits.argmax()))
        logits = model.decode_step(ids[-1], cache)
        all_logits.append(logits)
    return ids, np.stack(all_logits)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_model_decodes_captured_with_the_ids_of_the_host(
    cuda: CudaBackend, model: LlamaModel, dtype: str
) -> None:
    caches = [model.new_cache(64, dtype, d) for d in ("cpu", PLACE)]
    (ids, want), (got_ids, got) = (decoded(model, cache) for cache in caches)
    assert ids == got_ids
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    held = model.session_for(caches[1])
    assert isinstance(held, CapturedDecodeSession)
    assert (held.captures, held.replays, held.reason) == (1, 24, None)
    assert machine.graph_launches == 24 + 1  # and the one of the probe
    assert cuda.queue(PLACE).refused_allocations == 0


def test_a_replay_launches_one_graph_and_allocates_nothing(
    cuda: CudaBackend, model: LlamaModel
) -> None:
    cache = model.new_cache(64, device=PLACE)
    decoded(model, cache, 4)
    before = machine.launches, machine.mallocs, machine.graph_launches, machine.cublas_calls
    for _ in range(10):
        model.decode_step(1, cache)
    after = machine.launches, machine.mallocs, machine.graph_launches, machine.cublas_calls
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 0, 10, 0]


def test_replays_equal_plain_steps_bit_for_bit_through_rebinds_truncates_and_clears(
    cuda: CudaBackend, model: LlamaModel
) -> None:
    check_replays(model, PLACE, tokens=120, capacity=24)


def test_paged_steps_are_captured_and_equal_the_host(cuda: CudaBackend, model: LlamaModel) -> None:
    check_paged(model, PLACE, 1e-4)


def test_a_capture_keeps_what_it_uses(cuda: CudaBackend) -> None:
    g = lk.Graph()
    x = g.placeholder((4,), "f32")
    weights = lk.Storage.from_array(np.arange(4, dtype=np.float32), PLACE)
    plan = lk.plan(x * g.const(weights), {x: np.ones(4, np.float32)}, PLACE)
    plan.run()
    plan.capture()
    del weights, g
    gc.collect()
    others = [lk.Storage.from_array(np.full(4, 9, np.float32), PLACE) for _ in range(8)]
    np.testing.assert_array_equal(plan.run(), [0, 1, 2, 3])
    assert len(others) == 8


def test_a_capture_alone_keeps_the_arrays_of_its_calls(cuda: CudaBackend) -> None:
    ends = [lk.Storage.from_array(np.full(4, n, np.float32), PLACE) for n in range(2)]
    spec = ends[0].spec
    kernel = cuda.kernel(Copy(), (spec,), spec)
    assert kernel is not None
    call = Call(Copy(), (ends[0].array,), ends[1].array, (spec,), spec, (), [])
    capture, dest = cuda.capture(PLACE, list(kernel.emit(call))), ends[1]
    del ends, call
    gc.collect()
    others = [lk.Storage.from_array(np.full(4, 9, np.float32), PLACE) for _ in range(8)]
    capture.replay()
    assert dest.to_numpy().tolist() == [0] * 4
    assert len(others) == 8


# What cannot be recorded


def test_a_capture_refuses_what_the_host_waits_for(cuda: CudaBackend) -> None:
    buffer, host = cuda.allocate(64, PLACE), np.zeros(64, np.uint8)
    other = cuda.allocate(64, lk.DeviceLocation("cuda:1"))
    inner = cuda.capture(PLACE, [])
    for f, args in (
        (cuda.allocate, (8, PLACE)), (cuda.copy_in, (buffer, host)), (cuda.copy_out, (buffer,)),
        (cuda.feeder(buffer), (host,)), (cuda.synchronize, (PLACE,)), (cuda.capture, (PLACE, [])),
        (cuda.transfer, (other, lk.DeviceLocation("cuda:1"), buffer, PLACE)), (inner.replay, ()),
    ):  # fmt: skip
        with pytest.raises(lk.CaptureError, match="capture on cuda:0: got"):
            cuda.capture(PLACE, [(f, args)])
    cuda.copy_in(buffer, host)  # the refused captures are over
    assert cuda.copy_out(buffer).tolist() == [0] * 64


def test_allocations_in_a_capture_are_counted_and_refused(cuda: CudaBackend) -> None:
    queue = cuda.queue(PLACE)
    for f, args in ((queue.run, (cuda.xp.empty, (3,))), (cuda.allocate, (8, PLACE))):
        with pytest.raises(lk.CaptureError, match="an allocation of"):
            cuda.capture(PLACE, [(f, args)])
    assert queue.refused_allocations == 2


@pytest.mark.parametrize(
    ("rows", "reason"), [(8, None), (9, r"got a matmul of \(f32\[9,3\], f32\[3,5\]\) by cuBLAS")]
)
def test_products_of_many_rows_are_not_captured(
    cuda: CudaBackend, rows: int, reason: str | None
) -> None:
    g = lk.Graph()
    x = g.placeholder((rows, 3), "f32")
    w = g.const(lk.Storage.from_array(np.ones((3, 5), np.float32), PLACE))
    plan = lk.plan(x @ w, {x: np.ones((rows, 3), np.float32)}, PLACE)
    np.testing.assert_array_equal(plan.run(), np.full((rows, 5), 3))
    assert machine.cublas_calls == (0 if reason is None else 1) + 1  # and the one of the probe
    if reason is None:
        plan.capture()
    else:
        with pytest.raises(lk.CaptureError, match=reason):
            plan.capture()
    np.testing.assert_array_equal(plan.run(), np.full((rows, 5), 3))


def test_an_op_without_a_kernel_is_named(cuda: CudaBackend) -> None:
    g = lk.Graph()
    x = g.placeholder((2, 3), "f32")
    plan = lk.plan(x.mean(), {x: np.ones((2, 3), np.float32)}, PLACE)
    with pytest.raises(lk.CaptureError, match=r"got mean of \(f32\[2,3\]\), for which there is no"):
        plan.capture()
    np.testing.assert_array_equal(plan.run(), [1, 1])


def test_any_other_failure_is_a_capture_error(cuda: CudaBackend) -> None:
    def fails() -> None:
        raise ZeroDivisionError("nothing")

    with pytest.raises(lk.CaptureError, match="ZeroDivisionError: nothing"):
        cuda.capture(PLACE, [(fails, ())])
    with pytest.raises(KeyboardInterrupt):
        cuda.capture(PLACE, [(_interrupt, ())])
    assert not cuda.queue(PLACE).capturing


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_the_work_of_other_threads_is_not_recorded(cuda: CudaBackend) -> None:
    store = lk.Storage.from_array(np.zeros(2, np.float32), PLACE)
    one = np.ones(2, np.float32)

    def from_another_thread() -> None:
        t = threading.Thread(target=cuda.copy_in, args=(store.array, one))
        t.start()
        t.join()

    capture = cuda.capture(PLACE, [(from_another_thread, ())])
    assert store.to_numpy().tolist() == [1, 1]  # it has run
    cuda.copy_in(store.array, one * 2)
    capture.replay()
    assert store.to_numpy().tolist() == [2, 2]  # and is not part of the recording


def test_a_recording_keeps_what_it_uses(cuda: CudaBackend) -> None:
    got, want = replayed_alone("cuda:0")
    assert got == want
