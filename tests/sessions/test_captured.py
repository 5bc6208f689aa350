"""Captured sessions on the simulated device: replays equal plain steps, and never outlive their
memory."""

import gc
import weakref

import numpy as np
import pytest
from captured_steps import check_paged, check_replays, session_of, token
from small_llama import CONFIG, small_llama

import lazykv as lk
from lazykv.backends.sim import SimBackend
from lazykv.device import device
from lazykv.models.model import HELD_PLANS, LlamaModel
from lazykv.sessions.captured import CapturedDecodeSession

PLACE = "sim:0"


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return small_llama()


def test_replays_equal_plain_steps_bit_for_bit_through_rebinds_truncates_and_clears(model):
    check_replays(model, PLACE, tokens=500, capacity=64)


def test_a_replay_pushes_what_was_recorded_and_plans_nothing(model):
    cache = model.new_cache(16, device=PLACE)
    session = session_of(model, cache, CapturedDecodeSession)
    for _ in range(2):
        token(model, session, cache, 1)
    before, plan = lk.stats(), session.plan
    for _ in range(5):
        token(model, session, cache, 1)
    after = lk.stats()
    assert (session.plan, session.captures) == (plan, 1)
    assert after.plans_built == before.plans_built
    assert after.allocations == before.allocations


def test_the_model_captures_by_itself_where_the_backend_can(model):
    prompt, caches = [3, 1, 4, 1, 5], [model.new_cache(64, device=d) for d in ("cpu", PLACE)]
    ids = []
    for cache in caches:
        logits, out = model.prefill(prompt, cache), []
        for _ in range(24):
            out.append(int(logits.argmax()))
            logits = model.decode_step(out[-1], cache)
        ids.append(out)
    assert ids[0] == ids[1]
    held = model.session_for(caches[1])
    assert isinstance(held, CapturedDecodeSession)
    assert (held.captures, held.replays) == (1, 24)  # the prompt ended in a single token
    assert not isinstance(model.session_for(caches[0]), CapturedDecodeSession)


def test_a_plan_with_symbols_says_why_it_is_not_captured_g6():
    cache = lk.KvCache.with_capacity(1, 1, 2, 8, "f32", PLACE)
    g, pos = lk.Graph(), lk.Sym("pos", 0, 7)
    k, v = (g.placeholder((1, 1, 8, 2), lk.f32, name) for name in "kv")
    row = g.placeholder((1, 1, 1, 2), lk.f32, "row")
    k_all, v_all = (c.at[:, :, pos : pos + 1].set(row) for c in (k, v))
    out = lk.attention(row, k_all, v_all, length=pos + 1)
    session = CapturedDecodeSession.build(
        lk.InferenceContext(PLACE), out, kv=cache, kv_nodes=[(k, v)], bound={"row": row}
    )
    for n in range(4):
        got = session.step({"row": np.full((1, 1, 1, 2), n, np.float32)}, {pos: n})
        assert got.shape == (1, 1, 1, 2)
    assert (session.captures, session.captured) == (0, False)
    assert "symbols pos" in session.reason


def test_a_host_backend_says_that_it_does_not_capture(model):
    cache = model.new_cache(8)
    step = model.step_graph(cache)
    plan = lk.plan(step.graph.const(np.ones(2, np.float32)) + 1.0)
    with pytest.raises(lk.CaptureError, match="cpu"):
        plan.capture()


def test_a_context_retires_the_capture_of_a_session_it_drops(model):
    ctx, cache = lk.InferenceContext(PLACE), model.new_cache(16, device=PLACE)
    for _ in range(3):
        model.decode_step(1, cache, ctx)
    session = ctx.take_decode_session()
    assert session.captured
    ctx.put_decode_session(session)
    other = model.new_cache(32, device=PLACE)
    assert ctx.refresh(other, model_key=model.model_key) == lk.SessionDisposition.Dropped
    assert not session.captured
    token(model, session, cache, 1)  # still a session of its own cache, run plainly
    assert not session.captured


def test_a_refused_rebind_retires_the_recording_and_the_old_cache_goes_on(model):
    cache = model.new_cache(16, device=PLACE)
    session = session_of(model, cache, CapturedDecodeSession)
    for _ in range(3):
        token(model, session, cache, 2)
    assert session.captured
    assert session.rebind_kv(model.new_cache(16, device="sim:1")) is not None
    assert not session.captured
    for _ in range(3):
        token(model, session, cache, 2)
    assert (session.captured, session.captures) == (True, 2)


def test_a_capture_keeps_everything_it_uses_alive(model):
    cache = model.new_cache(16, device=PLACE)
    reference = session_of(model, cache)
    want = [token(model, reference, cache, 3) for _ in range(4)]
    cache.reset()
    session = session_of(model, cache, CapturedDecodeSession)
    got = [token(model, session, cache, 3) for _ in range(2)]
    buffers = [weakref.ref(cache.slot_storage(0, s).array.block) for s in (0, 1)]
    cache.clear()  # the cache lets go; the recording must not
    gc.collect()
    assert all(ref() is not None for ref in buffers)
    got += [token(model, session, cache, 3, start=n) for n in (2, 3)]
    assert session.replays > 0
    assert [a.tobytes() for a in want] == [a.tobytes() for a in got]


def test_a_recording_does_not_keep_memory_and_reads_a_pattern_once_it_is_freed():
    """So that whoever keeps a stale capture is seen: on a GPU it would read what came after."""
    backend, place = device(PLACE).backend, lk.DeviceLocation(PLACE)
    source = lk.Storage.from_array(np.ones(4, np.float32), PLACE)
    out = lk.Storage.allocate((4,), lk.f32, PLACE)
    call = backend.transfer, (out.array, place, source.array, place)
    recorded = backend.capture(place, [call])
    recorded.replay()
    assert out.to_numpy().tolist() == [1] * 4
    del source, call
    gc.collect()
    recorded.replay()
    assert np.isnan(out.to_numpy()).all()


def test_nodes_can_be_read_after_a_replay():
    g = lk.Graph()
    x = g.placeholder((4,), lk.f32, "x")
    half = x * 0.5
    plan = lk.plan([half + 1.0, half.exp()], {x: np.arange(4, dtype=np.float32)}, PLACE)
    plan.run()
    plan.capture()
    for n in range(3):
        plan.run({x: np.full(4, n, np.float32)})
        assert plan.captured
        np.testing.assert_array_equal(plan.read(half), np.full(4, n / 2, np.float32))


def test_a_node_whose_memory_was_used_again_is_refused_by_name():
    g = lk.Graph()
    x = g.placeholder((64,), lk.f32, "x")
    early = x * 2.0
    chain = early
    for _ in range(4):
        chain = chain.exp()
    plan = lk.plan(chain, {x: np.zeros(64, np.float32)}, PLACE)
    plan.run()
    with pytest.raises(lk.GraphError, match="make it a target"):
        plan.read(early)
    with pytest.raises(lk.GraphError, match="need a node that it was made from"):
        plan.read(lk.Graph().const(np.ones(2, np.float32)))


def test_paged_steps_are_captured_and_equal_the_host(model):
    check_paged(model, PLACE, 1e-5)


def test_a_capture_refuses_what_cannot_be_replayed():
    backend = SimBackend()
    place = lk.DeviceLocation(PLACE)
    buffer = backend.allocate(64, place)
    host = np.zeros(64, np.uint8)
    for f, args in (
        (backend.allocate, (8, place)),
        (backend.copy_in, (buffer, host)),
        (backend.copy_out, (buffer,)),
        (backend.synchronize, (place,)),
    ):
        with pytest.raises(lk.CaptureError):
            backend.capture(place, [(f, args)])
    backend.copy_in(buffer, host)  # the refused captures are over
    assert backend.copy_out(buffer).tolist() == [0] * 64


def test_a_position_in_memory_is_read_at_every_replay_f3():
    g = lk.Graph()
    rows = lk.Storage.from_array(np.arange(10, dtype=np.float32).reshape(10, 1), PLACE)
    table, at = g.const(rows), g.placeholder((), "i64")
    plan = lk.plan(table.take(at), {at: np.array(5)}, PLACE)
    assert plan.run() == [5]
    plan.capture()
    assert [float(plan.run({at: np.array(p)})[0]) for p in (6, 7, 3)] == [6, 7, 3]
    assert plan.captured


def test_another_source_is_read_and_not_the_captured_one_g2():
    g = lk.Graph()
    x = g.placeholder((2,), "f32")
    a, b = (lk.Storage.from_array(np.full(2, n, np.float32), PLACE) for n in (1, 2))
    plan = lk.plan(x.to(PLACE) + 0.0, {x: a}, PLACE)
    plan.run()
    plan.capture()
    assert plan.run().tolist() == [1, 1]
    assert plan.run({x: b}).tolist() == [2, 2]
    assert not plan.captured


@pytest.mark.parametrize("place", ["cpu", PLACE])
def test_row_numbers_past_the_count_are_no_rows_g4(place):
    """A pool of 4 blocks of 2; slots 3, -1, -1 of which one is real."""
    g = lk.Graph()
    pool, rows = g.placeholder((8, 1), "f32"), g.placeholder((3,), "i64")
    new, count = g.const(np.full((3, 1), 9, np.float32)), g.placeholder((), "i64")
    store = lk.Storage.from_array(np.arange(8, dtype=np.float32)[:, None], place)
    plan = lk.plan(pool.write_rows(new, rows, count), {pool: store}, place)
    slots = np.array([3, -1, -1])
    want = [0, 1, 2, 9, 4, 5, 6, 7]
    assert plan.run({rows: slots, count: np.array(1)})[:, 0].tolist() == want
    with pytest.raises(lk.RangeError, match=r"rows\[1\] = -1"):
        plan.run({rows: slots, count: np.array(3)})
    assert store.to_numpy()[:, 0].tolist() == want


def test_two_caches_of_different_heads_have_a_capture_each_g7(model):
    other = small_llama(1, n_kv_heads=4)
    pairs = [(m, m.new_cache(16, device=PLACE), m.new_cache(16)) for m in (model, other)]
    for n in range(6):
        for m, captured, plain in pairs:
            got, want = m.decode_step(n, captured), m.decode_step(n, plain)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    held = [m.session_for(captured) for m, captured, _ in pairs]
    assert [s.replays for s in held] == [5, 5]
    assert held[0].plan.id != held[1].plan.id


def test_plans_of_many_lengths_are_bounded_q3(model):
    """What a cache holds does not grow with the lengths that were asked for."""
    cache, most = model.new_cache(64, device=PLACE), 0
    for n in range(40):
        cache.reset()
        got = model.score([1] * (1 + n), cache)
        most = max(most, len(cache.held))
        assert got.shape == (1 + n, CONFIG.vocab_size)
    assert most == HELD_PLANS
    cache.reset()
    np.testing.assert_allclose(
        model.score([1, 2], cache), model.score([1, 2], model.new_cache(64)), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("capacity", [16, 4096])
def test_a_replay_moves_one_row_a_layer_and_no_more_q6(model, capacity):
    cache = model.new_cache(capacity, device=PLACE)
    for _ in range(3):
        model.decode_step(1, cache)
    before = lk.stats().bytes_moved
    model.decode_step(1, cache)
    rows = CONFIG.n_layers * 2 * CONFIG.n_kv_heads * CONFIG.head_dim
    embedding, logits = CONFIG.hidden_size, CONFIG.vocab_size
    position = 2 * 8  # moved on in place, and kept for the layers after that
    assert lk.stats().bytes_moved - before == 4 * (rows + embedding + logits) + position
