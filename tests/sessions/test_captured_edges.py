"""Captured sessions where something comes in between: another thread, an interrupt, memory that is
short, and the end of a session that somebody still holds."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from captured_steps import session_of, token
from sim_faults import fresh_sim, interrupted
from small_llama import small_llama

import lazykv as lk
from lazykv.backends.sim import SimBackend
from lazykv.models.model import HELD_PLANS, LlamaModel, captures
from lazykv.sessions.captured import CapturedDecodeSession
from lazykv.sessions.decode import DecodeSession
from lazykv.sessions.rebind import Dropped

PLACE = lk.DeviceLocation("sim:0")


@pytest.fixture
def sim() -> Iterator[SimBackend]:
    with fresh_sim() as made:
        yield made


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return small_llama()


def new_cache(model: LlamaModel, capacity: int = 16) -> lk.KvCache:
    return model.new_cache(capacity, device=PLACE)


def held_by(model: LlamaModel, cache: lk.KvCache) -> CapturedDecodeSession:
    return session_of(model, cache, CapturedDecodeSession)


def plain_steps(model: LlamaModel, tokens: int) -> list[np.ndarray]:
    """What the tokens 0, 1, ... give in a cache of their own, without a recording."""
    cache = new_cache(model)
    session = session_of(model, cache)
    return [token(model, session, cache, v) for v in range(tokens)]


def storages(cache: lk.KvCache) -> list[lk.Storage]:
    return [cache.slot_storage(i, half) for i in range(cache.n_layers()) for half in lk.KvSlot]


def kinds(session: Any) -> list[object]:
    """What has happened to a session."""
    return [event[0] for event in session.history]


def same(got: Any, want: Any) -> bool:
    return [a.tobytes() for a in got] == [a.tobytes() for a in want]


# While a step records


def test_nobody_rebinds_while_a_step_records(sim, model, monkeypatch):
    """Or the recording of the old cache would be replayed for the new one."""
    want, old, new = plain_steps(model, 3), new_cache(model), new_cache(model)
    session = held_by(model, old)
    got = [token(model, session, old, 0)]
    recorded, go, real = threading.Event(), threading.Event(), sim.capture

    def slow(place: lk.DeviceLocation, calls: Any) -> Any:
        made = real(place, calls)
        recorded.set()
        assert go.wait(30)
        return made

    monkeypatch.setattr(sim, "capture", slow)
    with ThreadPoolExecutor(1) as other:
        step = other.submit(token, model, session, old, 1)
        try:
            assert recorded.wait(30)
            with pytest.raises(lk.SessionBusy):
                session.rebind_kv(new)
            with pytest.raises(lk.SessionBusy):
                session.plan.capture()
        finally:
            go.set()
        got.append(step.result(30))
    assert session.captures == 1
    assert same(got, want[:2])
    before = [s.to_numpy() for s in storages(old)]
    assert session.rebind_kv(new) is None
    assert same([token(model, session, new, v) for v in range(3)], want)
    assert same([s.to_numpy() for s in storages(old)], before)


WRONG: dict[str, Any] = {
    "nothing": {},
    "no mapping": None,
    "two tokens": {"ids": np.zeros(2, np.int64)},
    "one input short": {"ids": np.zeros(1, np.int64), "position": np.array(1)},
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG)
def test_a_step_that_is_refused_records_nothing(sim, model, data):
    cache = new_cache(model)
    session = held_by(model, cache)
    token(model, session, cache, 0)
    with pytest.raises(lk.BindingError):
        session.step(data)
    with session.plan.alone("a test"), pytest.raises(lk.SessionBusy):
        token(model, session, cache, 1)
    assert (session.captures, session.captured, kinds(session)) == (0, False, ["built"])
    token(model, session, cache, 1)
    assert (session.captures, session.captured) == (1, True)


def test_a_session_that_is_retired_while_it_records_keeps_no_recording(sim, model, monkeypatch):
    want, cache = plain_steps(model, 4), new_cache(model)
    session, real = held_by(model, cache), sim.capture

    def capture(place: lk.DeviceLocation, calls: Any) -> Any:
        session.retire()
        return real(place, calls)

    monkeypatch.setattr(sim, "capture", capture)
    got = []
    for v in range(4):
        got.append(token(model, session, cache, v))
        assert not session.captured
    assert same(got, want)
    assert session.captures == 1


def test_every_recording_is_told_of_with_its_allocation(sim, model):
    caches = [new_cache(model) for _ in range(2)]
    session = held_by(model, caches[0])
    for v in range(3):
        token(model, session, caches[0], v)
    assert session.rebind_kv(caches[1]) is None
    for v in range(3):
        token(model, session, caches[1], v)
    first, second = (c.alloc_id() for c in caches)
    assert list(session.history) == [
        ("built", first), ("captured", first), ("rebound", first, second), ("captured", second)
    ]  # fmt: skip


# Interrupts


@pytest.mark.parametrize("kind", [DecodeSession, CapturedDecodeSession])
def test_an_interrupt_in_any_kernel_of_a_step(sim, model, kind):
    """What did not run counts no version, and the write that it stopped tears its storage."""
    want, cache = plain_steps(model, 5), new_cache(model)
    session = session_of(model, cache, kind)
    for v in range(3):
        token(model, session, cache, v)
    kernels = sim.counts["kernel"]
    token(model, session, cache, 3)
    after = [s.to_numpy() for s in storages(cache)]
    torn = []
    for k in range(1, sim.counts["kernel"] - kernels + 1):
        cache = new_cache(model)
        assert session.rebind_kv(cache) is None
        for v in range(3):
            token(model, session, cache, v)
        before = [(s.version, s.to_numpy()) for s in storages(cache)]
        with interrupted(sim, k), pytest.raises(KeyboardInterrupt):
            token(model, session, cache, 3)
        assert sim.stream(PLACE).idle
        assert len(cache) == 3
        for s, (version, old), new in zip(storages(cache), before, after, strict=True):
            written = s.version - version
            assert same([s.array._data], [new if written else old]), k
            assert written == 0 or (written == 1 and not s.torn), k
        hit = [n for n, s in enumerate(storages(cache)) if s.torn]
        torn += hit
        if hit:
            with pytest.raises(lk.StorageTornError):
                token(model, session, cache, 3)
            cache = new_cache(model)
            assert session.rebind_kv(cache) is None
        got = [token(model, session, cache, v) for v in range(len(cache), 5)]
        assert same(got, want[-len(got) :]), k
    assert sorted(torn) == [0, 1, 2, 3]
    assert bool(getattr(session, "replays", 0)) == (kind is CapturedDecodeSession)


# Memory that is short, and other reasons not to record


def test_memory_too_short_for_the_results_of_a_recording_is_no_failure(sim, model):
    want, old, new = plain_steps(model, 5), new_cache(model), new_cache(model)
    session = held_by(model, old)
    got = [token(model, session, old, 0)]
    sim.limit_bytes = sim.used_bytes(PLACE)
    got += [token(model, session, old, v) for v in (1, 2)]
    reason = session.reason
    assert "no memory for 128 bytes" in reason
    sim.limit_bytes = None
    got += [token(model, session, old, v) for v in (3, 4)]
    assert same(got, want)
    assert (session.captures, session.captured, session.reason) == (0, False, reason)
    assert kinds(session) == ["built", "not captured"]
    assert session.history[-1] == ("not captured", reason)
    assert session.rebind_kv(new) is None
    assert session.reason is None
    assert same([token(model, session, new, v) for v in range(5)], want)
    assert (session.captures, session.captured, session.reason) == (1, True, None)


def test_a_plan_that_cannot_be_recorded_is_tried_once(sim, model, monkeypatch):
    want, caches, tries = plain_steps(model, 4), [new_cache(model) for _ in range(2)], []

    def refuse(place: lk.DeviceLocation, calls: Any) -> Any:
        tries.append(place)
        raise lk.CaptureError("capture: got a test, need none")

    session = held_by(model, caches[0])
    monkeypatch.setattr(sim, "capture", refuse)
    for cache in caches:
        assert session.rebind_kv(cache) is None
        assert same([token(model, session, cache, v) for v in range(4)], want)
        assert session.reason == "capture: got a test, need none"
    assert tries == [PLACE]
    assert kinds(session) == ["built", "rebound", "not captured", "rebound"]


def test_an_error_of_another_kind_is_no_reason(sim, model, monkeypatch):
    want, cache = plain_steps(model, 3), new_cache(model)
    session = held_by(model, cache)
    got = [token(model, session, cache, 0)]

    def fail(place: lk.DeviceLocation, calls: Any) -> Any:
        raise lk.KernelError("capture: got a test, need none")

    with monkeypatch.context() as m:
        m.setattr(sim, "capture", fail)
        with pytest.raises(lk.KernelError, match="got a test"):
            token(model, session, cache, 1)
    assert (session.reason, session.captured) == (None, False)
    got += [token(model, session, cache, v) for v in (1, 2)]
    assert same(got, want)
    assert session.captures == 1


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_rebind_that_finds_the_session_busy_leaves_recording_and_warm_up(sim, model, tokens):
    cache, other = new_cache(model), new_cache(model)
    session = held_by(model, cache)
    for v in range(tokens):
        token(model, session, cache, v)
    recorded = tokens > 1
    with session.plan.alone("a test"), pytest.raises(lk.SessionBusy):
        session.rebind_kv(other)
    assert session.captured == recorded
    token(model, session, cache, tokens)  # warm already: the first one is not plain again
    assert (session.captures, session.replays) == (1, tokens)
    assert "rebound" not in kinds(session)


# Which steps are recorded


def test_only_single_tokens_over_rows_in_one_place_are_recorded():
    plain, sliding = small_llama(), small_llama(sliding_window=8)
    assert isinstance(sliding.new_cache(16), lk.SlidingKvCache)
    for m, where, seq, recorded in (
        (plain, "sim:0", 1, True),
        (plain, "sim:0", 2, False),
        (plain, "cpu", 1, False),
        (plain, ["sim:0", "sim:0"], 1, True),
        (plain, ["sim:0", "sim:1"], 1, False),
        (plain, ["sim:0", "cpu"], 1, False),
        (sliding, "sim:0", 1, False),
        (sliding, "cpu", 1, False),
    ):
        cache = m.new_cache(16, device=where)
        assert captures(cache, seq) is recorded
        session = m.session_for(cache, seq)
        assert isinstance(session, CapturedDecodeSession) is recorded
        want = m.new_cache(16)
        for n in (1, 2, 3):
            got = m.prefill([n] * seq, cache)
            np.testing.assert_allclose(got, m.prefill([n] * seq, want), rtol=1e-5, atol=1e-5)
        assert (getattr(session, "replays", 0) > 0) is recorded


# Sessions that are let go


def recorded(model: LlamaModel, cache: lk.KvCache, ctx: Any = None) -> Any:
    """The model's session of single tokens, once it has a recording."""
    for v in range(3):
        model.decode_step(v, cache, ctx)
    session = model.session_for(cache, 1, ctx)
    assert session.captured
    return session


@pytest.mark.parametrize("with_context", [False, True])
def test_new_weights_retire_the_session_of_the_old(sim, with_context):
    model = small_llama()
    cache, ctx = new_cache(model), lk.InferenceContext(PLACE) if with_context else None
    session = recorded(model, cache, ctx)
    model.weights_epoch += 1
    assert model.session_for(cache, 1, ctx) is not session
    assert not session.captured


def test_a_session_put_over_another_retires_it(sim, model):
    ctx, cache = lk.InferenceContext(PLACE), new_cache(model)
    session = recorded(model, cache, ctx)
    ctx.put_decode_session(session)  # the same one stays
    assert session.captured
    other = recorded(model, new_cache(model))
    ctx.put_decode_session(other)
    assert (session.captured, other.captured) == (False, True)
    ctx.clear_persistent()
    assert not other.captured
    assert not ctx.has_decode_session()


def test_a_session_that_gives_way_to_other_lengths_is_retired(sim, model):
    cache = new_cache(model, 2 * HELD_PLANS)
    session = recorded(model, cache)
    for n in range(HELD_PLANS):
        assert session.captured
        model.session_for(cache, n + 1, every=True)
    assert session not in cache.held.values()
    assert not session.captured


def other_layer(cache: lk.KvCache) -> None:
    made = [lk.Storage.from_array(s.to_numpy(), s.location) for s in storages(cache)[:2]]
    cache.set_layer(0, lk.KvLayer(*made))


ENDINGS: dict[str, Callable[[lk.KvCache], None]] = {
    "clear": lk.KvCache.clear,
    "set_layer": other_layer,
    "grow": lambda cache: cache.grow(32),
    "repeat": lambda cache: cache.repeat(2),
    "select": lambda cache: cache.select([0, 0]),
}


@pytest.mark.parametrize("end", ENDINGS.values(), ids=ENDINGS)
def test_sessions_end_with_the_allocation(sim, model, end):
    cache = new_cache(model)
    session = recorded(model, cache)
    end(cache)
    assert not cache.held
    assert not session.captured


def paged(model: LlamaModel) -> tuple[lk.models.PagedDecoder, lk.SessionHandle, list[np.ndarray]]:
    """A decoder with a recording, the sequence it has run, and the logits so far."""
    pool = model.new_pool(8, 4, device=PLACE)
    decoder = lk.models.PagedDecoder(model, pool)
    sequence = pool.open()
    return decoder, sequence, [decoder.decode([sequence], [v]) for v in range(3)]


def test_a_paged_plan_that_is_replaced_is_retired(sim):
    model = small_llama()
    decoder, _, _ = paged(model)
    session = decoder.session_for(1)
    assert session.plan.captured
    model.weights_epoch += 1
    assert decoder.session_for(1) is not session
    assert not session.plan.captured


def test_a_retired_session_runs_plainly(sim, model):
    cache, want = new_cache(model), plain_steps(model, 5)
    session = held_by(model, cache)
    got = [token(model, session, cache, v) for v in range(3)]
    session.retire()
    assert not session.captured
    for v in (3, 4):
        got.append(token(model, session, cache, v))
        assert not session.captured
    assert same(got, want)


def retired_by_itself(model, cache, session) -> None:
    session.retire()


def dropped(model, cache, session) -> None:
    ctx = lk.InferenceContext(PLACE)
    ctx.put_decode_session(session)
    assert ctx.refresh(new_cache(model, 32), model_key=model.model_key) == Dropped


def cleared(model, cache, session) -> None:
    ctx = lk.InferenceContext(PLACE)
    ctx.put_decode_session(session)
    ctx.clear_persistent()


def replaced(model, cache, session) -> None:
    ctx = lk.InferenceContext(PLACE)
    ctx.put_decode_session(session)
    ctx.put_decode_session(held_by(model, new_cache(model)))


@pytest.mark.parametrize("end", [retired_by_itself, dropped, cleared, replaced])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_retired_session_says_so_for_good(sim, model, end, tokens):
    """Also before it has recorded, after a re-bind, and when a context holds it again."""
    cache, other, want = new_cache(model), new_cache(model), plain_steps(model, 5)
    session = held_by(model, cache)
    got = [token(model, session, cache, v) for v in range(tokens)]
    assert session.reason is None
    end(model, cache, session)
    assert "got a session that was retired" in session.reason
    got += [token(model, session, cache, v) for v in range(tokens, 5)]
    assert session.rebind_kv(other) is None
    lk.InferenceContext(PLACE).put_decode_session(session)
    again = [token(model, session, other, v) for v in range(5)]
    assert same(got, want)
    assert same(again, want)
    assert (session.captured, session.captures) == (False, int(tokens > 1))
    assert "got a session that was retired" in session.reason


def test_taking_a_session_out_of_a_context_keeps_its_recording(sim, model):
    ctx, cache = lk.InferenceContext(PLACE), new_cache(model)
    session = recorded(model, cache, ctx)
    assert ctx.take_decode_session() is session
    token(model, session, cache, 3)
    assert (session.captured, session.reason) == (True, None)


def test_a_retired_session_that_was_short_of_memory_does_not_record_after_a_rebind(sim, model):
    cache, other = new_cache(model), new_cache(model)
    session = held_by(model, cache)
    token(model, session, cache, 0)
    sim.limit_bytes = sim.used_bytes(PLACE)
    token(model, session, cache, 1)
    assert "no memory" in session.reason
    sim.limit_bytes = None
    session.retire()
    assert session.rebind_kv(other) is None
    for v in range(3):
        token(model, session, other, v)
    assert (session.captures, session.captured) == (0, False)
    assert "was retired" in session.reason


def test_a_source_that_is_none_leaves_the_recording(sim, model):
    cache = new_cache(model)
    session = held_by(model, cache)
    for v in range(3):
        token(model, session, cache, v)
    for source in (None, model, "x"):
        with pytest.raises(lk.BindingError):
            session.rebind_kv(source)
    assert (session.captured, session.captures) == (True, 1)


def test_a_retired_paged_session_runs_plainly(sim, model):
    (decoder, sequence, got), (other, untouched, want) = paged(model), paged(model)
    session = decoder.session_for(1)
    assert session.plan.captured
    session.retire()
    for v in (3, 4):
        got.append(decoder.decode([sequence], [v]))
        want.append(other.decode([untouched], [v]))
        assert not session.plan.captured
    assert same(got, want)
