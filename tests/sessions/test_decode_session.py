"""DecodeSession: one plan for every token, the same results, and nothing else done per token."""

import gc
import sys
import threading
import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from kv_state import raw_bytes, refused, rows, state
from steps import Step, attention_step, data, run

import lazykv as lk
from lazykv.runtime.plan_cache import plan_cache


@pytest.fixture
def make(new_cache):
    def cache_and_session(capacity=16, *, layers=2, heads=2, dim=4, dtype="f32"):
        cache = new_cache(layers, heads, dim, capacity, dtype)
        step = attention_step(cache)
        return cache, step, step.session(cache, model_key=("test",))

    return cache_and_session


# Planned once


def test_nothing_is_planned_from_the_second_token_on(make):
    cache, step, session = make()
    run(session, step, cache, data(step, 0))
    plan, nodes, before = session.plan.id, session.node_count, lk.stats()
    for token in range(1, 16):
        run(session, step, cache, data(step, token))
    after = lk.stats()
    assert (after.plans_built, after.plan_cache_hits) == (
        before.plans_built,
        before.plan_cache_hits,
    )
    assert after.allocations == before.allocations
    kernels = sum(s.kernel is not None for s in session.plan.steps)
    assert after.kernels_run == before.kernels_run + 15 * kernels
    assert (session.plan.id, session.node_count) == (plan, nodes)
    assert session.realize_count == session.plan.runs == 16
    assert session.node_count == len(session.plan.program.nodes) > 0


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_results_are_those_of_planning_every_token(make, new_cache, dtype):
    cache, step, session = make(dtype=dtype)
    other = new_cache(2, 2, 4, 16, dtype)
    for token in range(16):
        feed = data(step, token, seed=token)
        held = run(session, step, cache, feed)
        plan_cache.clear()
        anew = attention_step(other)
        np.testing.assert_array_equal(held, run(anew.session(other), anew, other, feed))
    assert state(cache)["slots"].keys() == state(other)["slots"].keys()
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        assert mine.v.to_numpy().tobytes() == theirs.v.to_numpy().tobytes()


def test_a_thousand_offsets_are_one_plan_f1_q1_q2(make):
    cache, step, session = make(1000, layers=1, heads=1, dim=2)
    run(session, step, cache, data(step, 0))
    before, plans = lk.stats(), len(plan_cache)
    for token in range(1, 1000):
        run(session, step, cache, data(step, token))
    after = lk.stats()
    assert after.plans_built == before.plans_built
    assert after.plan_cache_hits == before.plan_cache_hits
    assert after.allocations == before.allocations
    assert len(plan_cache) == plans
    # Every row stands where its own offset put it.
    np.testing.assert_array_equal(cache.live(0)[0][0, 0, :, 0], np.arange(1000))


def test_capacity_is_used_up_without_a_new_plan_or_buffer_q5(make):
    cache, step, session = make(128)
    run(session, step, cache, data(step, 0))
    before = lk.stats()
    for count in (15, 64, 48):
        for token in range(count):
            run(session, step, cache, data(step, token))
    after = lk.stats()
    assert (after.allocations, after.plans_built) == (before.allocations, before.plans_built)
    assert len(cache) == 128
    with refused(cache, lk.RangeError, "got 128"):
        run(session, step, cache, data(step, 0))


def test_no_step_allocates_memory_of_buffer_size(make):
    cache, step, session = make(8192, heads=4, dim=32)  # 4 MiB per slot
    feed = data(step, 1)
    for _ in range(3):
        run(session, step, cache, feed)
    cache.cached_len = 4000
    tracemalloc.start()
    try:
        run(session, step, cache, feed)
        tracemalloc.reset_peak()
        base = tracemalloc.get_traced_memory()[0]
        for _ in range(5):
            run(session, step, cache, feed)
        peak = tracemalloc.get_traced_memory()[1] - base
    finally:
        tracemalloc.stop()
    assert peak < 64 << 10
    assert cache.layers[0].k.nbytes == 4 << 20


# What happens before the first kernel


def calls_before_the_first_kernel(step_once: Callable[[], object], session: lk.DecodeSession):
    """Python-level calls from `step_once` until the plan's first resolved call, and their files."""
    seen: list[tuple[str, str]] = []

    def profile(frame, event, argument):
        if event == "call":
            seen.append((frame.f_code.co_filename, frame.f_code.co_name))

    def first(*args):
        sys.setprofile(None)
        return kernel(*args)

    calls = session.plan._calls
    kernel, args = calls[0]
    calls[0] = (first, args)
    try:
        sys.setprofile(profile)
        step_once()
    finally:
        sys.setprofile(None)
        calls[0] = (kernel, args)
    assert seen.pop()[1] == "first", "the first kernel of the plan ran last"
    return seen


def test_a_step_reaches_its_first_kernel_in_a_dozen_calls_and_four_files(make):
    cache, step, session = make()
    run(session, step, cache, data(step, 0))
    feed, env = data(step, 1), {step.pos: 1}
    seen = calls_before_the_first_kernel(lambda: session.step(feed, env), session)
    seen = seen[1:]  # the lambda
    assert seen[0][1] == "step"
    assert len(seen) <= 12, seen
    assert len({file for file, _ in seen}) <= 4, seen


def test_the_count_of_calls_sees_work_that_is_added(make, monkeypatch):
    cache, step, session = make()
    run(session, step, cache, data(step, 0))
    feed, env = data(step, 1), {step.pos: 1}
    plain = calls_before_the_first_kernel(lambda: session.step(feed, env), session)

    real = lk.Plan.set_symbols

    def slow(self, given):
        for _ in range(10):
            cache.n_layers()
        real(self, given)

    monkeypatch.setattr(lk.Plan, "set_symbols", slow)
    more = calls_before_the_first_kernel(lambda: session.step(feed, env), session)
    assert len(more) == len(plain) + 11


# Results and rows


def test_results_are_fresh_e6(make):
    cache, step, session = make()
    first = run(session, step, cache, data(step, 1))
    second = run(session, step, cache, data(step, 2))
    assert np.unique(first).tolist() == [2.0]  # two layers, each the mean of 1
    assert np.unique(second).tolist() == [3.0]
    assert not np.shares_memory(first, second)
    first.fill(-1)
    third = run(session, step, cache, data(step, 3))
    assert np.unique(second).tolist() == [3.0]
    assert np.unique(third).tolist() == [4.0]


def test_the_length_is_no_part_of_the_plan_f4(make):
    cache, step, session = make(layers=1)
    for token in range(4):
        out = run(session, step, cache, data(step, token))
    assert np.unique(out).tolist() == [1.5]
    for token in range(4, 8):
        out = run(session, step, cache, data(step, token))
    assert np.unique(out).tolist() == [3.5]


def test_capacity_takes_no_part_in_the_result_d4(make):
    results = []
    for capacity in (5, 6, 20, 40, 4096):
        cache, step, session = make(capacity)
        for token in range(5):
            out = run(session, step, cache, data(step, token, seed=token))
        results.append(out)
    for out in results[1:]:
        np.testing.assert_array_equal(out, results[0])


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("capacity", [256, 2048])
def test_rows_past_the_live_length_are_never_read_q4(make, new_cache, capacity, dtype):
    clean, step, session = make(capacity, dtype=dtype)
    poisoned = new_cache(2, 2, 4, capacity, dtype)
    for i in range(2):
        for slot in (0, 1):
            nan = rows([np.nan] * capacity, dtype=clean.dtype.numpy)
            poisoned.write_bytes(i, slot, 0, capacity, nan)
    other = step.session(poisoned)
    for token in range(64):
        feed = data(step, token, seed=token)
        want, got = run(session, step, clean, feed), run(other, step, poisoned, feed)
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got, want)


def test_write_offsets_follow_the_length_a4(make):
    cache, _, _ = make()
    for i in range(2):
        for slot in (0, 1):
            cache.write_bytes(i, slot, 0, 16, rows([np.nan] * 16))
    prompt = attention_step(cache, seq=9)
    run(prompt.session(cache), prompt, cache, data(prompt, 5))
    offsets = []
    step = attention_step(cache)
    session = step.session(cache)
    for token in range(4):
        offsets.append(len(cache))
        run(session, step, cache, data(step, token))
        assert all(np.isfinite(view).all() for view in cache.live(1))
    assert offsets == [9, 10, 11, 12]
    assert np.isnan(cache.layers[0].k.to_numpy()[0, 0, 13:]).all()


def test_a_rejected_draft_leaves_no_trace_a3(make):
    cache, step, session = make()
    plan = session.plan.id
    for token in (0, 1, 2, 3, 4, 50, 51, 52, 53):
        run(session, step, cache, data(step, token))
    cache.truncate_to(6)
    assert session.is_valid_for(cache, model_key=("test",))
    out = run(session, step, cache, data(step, 99))
    assert [float(x) for x in cache.live(1)[0][0, 0, :, 0]] == [0, 1, 2, 3, 4, 50, 99]
    assert session.plan.id == plan
    replay, again, fresh = make()
    for token in (0, 1, 2, 3, 4, 50, 99):
        want = run(fresh, again, replay, data(again, token))
    np.testing.assert_array_equal(out, want)


def test_a_bonus_token_is_not_yet_cached_a5(make):
    cache, step, session = make()
    for token in (0, 1, 2, 3):
        run(session, step, cache, data(step, token))
    drafts = attention_step(cache, seq=3)
    run(drafts.session(cache), drafts, cache, data(drafts, 4))
    assert len(cache) == 7
    run(session, step, cache, data(step, 77))
    assert float(cache.live(0)[0][0, 0, 7, 0]) == 77


def test_a_full_prefix_hit_runs_its_last_token_again_c3(make):
    cache, step, session = make()
    for token in range(1, 7):
        first = run(session, step, cache, data(step, token, seed=token))
    cache.truncate_to(5)
    again = run(session, step, cache, data(step, 6, seed=6))
    assert len(cache) == 6
    np.testing.assert_array_equal(first, again)


def test_a_prompt_in_two_parts_is_written_once_c2(make):
    cache, _, _ = make()
    offsets = []
    for seq, value in ((5, 1), (3, 2)):
        offsets.append(len(cache))
        part = attention_step(cache, seq=seq)
        run(part.session(cache), part, cache, data(part, value))
    assert (offsets, len(cache)) == ([0, 5], 8)
    assert [x.k.version for x in cache.layers] == [3, 3]  # the zero fill, and one write per part
    cache.truncate_to(4)
    assert [float(x) for x in cache.live(0)[0][0, 0, :, 0]] == [1, 1, 1, 1]


def test_a_reset_cache_decodes_like_a_new_one_c1(make):
    cache, step, session = make()
    for token in range(6):
        run(session, step, cache, data(step, token, seed=token))
    version = cache.layers[0].k.version
    cache.reset()
    new, new_step, fresh = make()
    for token in (20, 21, 22):
        out = run(session, step, cache, data(step, token, seed=token))
        want = run(fresh, new_step, new, data(new_step, token, seed=token))
        np.testing.assert_array_equal(out, want)
    assert len(cache) == 3
    assert cache.layers[0].k.version != version
    for mine, theirs in zip(cache.live(1), new.live(1), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_two_requests_start_from_one_stored_prefix_c5(make):
    prefix, step, session = make()
    for token in (1, 2, 3):
        run(session, step, prefix, data(step, token))
    before = state(prefix)
    requests = []
    for n in (1, 2):
        cache, own_step, own = make()
        for i in range(2):
            for slot, view in enumerate(prefix.live(i)):
                cache.write_bytes(i, slot, 0, 3, view)
        cache.cached_len = 3
        for token in range(4):
            out = run(own, own_step, cache, data(own_step, 10 * n + token))
        rows_now = [1, 2, 3, *range(10 * n, 10 * n + 4)]
        np.testing.assert_allclose(out, 2 * np.mean(rows_now), rtol=1e-6)
        requests.append((cache, rows_now))
    assert state(prefix) == before
    for cache, rows_now in requests:
        assert cache.live(1)[1][0, 0, :, 0].tolist() == rows_now


def test_bytes_written_into_the_cache_are_seen_by_the_next_step(make):
    cache, step, session = make(layers=1)
    for token in (1, 2, 3):
        run(session, step, cache, data(step, token))
    plan = session.plan.id
    cache.write_bytes(0, lk.KvSlot.V, 0, 2, rows([10, 20]))
    out = run(session, step, cache, data(step, 7))
    assert np.unique(out).tolist() == [(10 + 20 + 3 + 7) / 4]
    assert session.plan.id == plan
    assert session.is_valid_for(cache, model_key=("test",))


def test_heads_share_keys_in_groups_i3(new_cache):
    cache = new_cache(1, 2, 4, 8, "f32")
    step = attention_step(cache, queries=4)
    feed = data(step, 0)
    feed["v"][:, 0], feed["v"][:, 1] = 10, 20
    out = run(step.session(cache), step, cache, feed)
    assert out[0, :, 0, 0].tolist() == [10, 10, 20, 20]


def test_head_counts_that_do_not_divide_are_refused_i4(new_cache):
    cache = new_cache(1, 4, 4, 8, "f32")
    with pytest.raises(lk.ShapeError, match=r"6.*4"):
        attention_step(cache, queries=6)


def test_scores_are_summed_in_f32_h5(new_cache):
    cache = new_cache(1, 1, 64, 4, "f16")
    step = attention_step(cache)
    session = step.session(cache)
    feed = {name: np.full(t.shape, 299, t.dtype.numpy) for name, t in step.bound.items()}
    feed["v"].fill(2)
    run(session, step, cache, feed)
    feed = {name: np.full(t.shape, 300, t.dtype.numpy) for name, t in step.bound.items()}
    feed["v"].fill(1)
    out = run(session, step, cache, feed)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, 1.0, atol=1e-3)


def test_nothing_is_widened_to_f64_h10(make):
    _, step, session = make()
    session.step(data(step, 1), {step.pos: np.int64(0)})
    assert {r.spec.dtype for r in session.plan.program.registers} == {lk.f32}


# Refused and failed steps


def bad_feeds(step: Step) -> list[tuple[dict, dict, type[lk.LazyKvError], str]]:
    good, at = data(step, 1), {step.pos: 2}
    other = lk.Sym("pos")
    return [
        ({}, at, lk.BindingError, "bound 'q': got nothing"),
        ({**good, "k": None}, at, lk.BindingError, "bound 'k': got nothing"),
        ({**good, "k": good["k"].astype(np.float64)}, at, lk.BindingError, "never cast"),
        ({**good, "v": good["v"].astype(np.float16)}, at, lk.BindingError, "v"),
        ({**good, "q": good["q"][0]}, at, lk.BindingError, "need f32[1,2,1,4]"),
        ({**good, "q": good["q"].transpose(0, 2, 1, 3)}, at, lk.BindingError, "f32[1,1,2,4]"),
        ({**good, "v": [1.0, 2.0]}, at, lk.BindingError, "v"),
        (good, None, lk.SymbolError, "symbol 'pos': got no value"),
        (good, {}, lk.SymbolError, "got no value"),
        (good, {other: 2}, lk.SymbolError, "got no value"),
        (good, {step.pos: 16}, lk.SymbolRangeError, "got 16, need 0..15"),
        (good, {step.pos: -1}, lk.SymbolRangeError, "got -1"),
        (good, {step.pos: 2.0}, lk.SymbolError, "2.0"),
        (good, {step.pos: True}, lk.SymbolError, "True"),
        (good, {step.pos: other}, lk.SymbolError, "pos"),
    ]


@pytest.mark.parametrize("case", range(15))
def test_a_bad_step_changes_nothing_and_the_session_goes_on(make, case):
    cache, step, session = make()
    twin, _, other = make()
    for token in (1, 2):
        run(session, step, cache, data(step, token))
    feed, env, error, words = bad_feeds(step)[case]
    with refused(cache, error, words):
        session.step(feed, env)
    assert session.realize_count == 2
    out = run(session, step, cache, data(step, 3, seed=3))
    other = step.session(twin)
    for token in (1, 2):
        run(other, step, twin, data(step, token))
    np.testing.assert_array_equal(out, run(other, step, twin, data(step, 3, seed=3)))


def test_names_and_symbols_the_plan_does_not_need_are_ignored(make):
    cache, step, session = make()
    feed = {**data(step, 1), "mask": object()}
    out = session.step(feed, {step.pos: 0, lk.Sym("other"): 5})
    np.testing.assert_array_equal(out, np.full_like(out, 2))
    g = lk.Graph()
    unused = g.placeholder((3,), "f32", "unused")
    step.bound["unused"] = unused
    run(step.session(cache), step, cache, data(step, 1))


def test_feeds_are_copied_whatever_their_memory_order(make):
    cache, step, session = make()
    plain = data(step, 0, seed=1)
    want = session.step(plain, {step.pos: 0})
    odd = {n: np.asfortranarray(a).astype(">f4") for n, a in plain.items()}
    np.testing.assert_array_equal(session.step(odd, {step.pos: 0}), want)
    read_only = {n: a.copy() for n, a in plain.items()}
    for a in read_only.values():
        a.flags.writeable = False
    np.testing.assert_array_equal(session.step(read_only, lk.SymEnv({step.pos: 0})), want)
    assert len(cache) == 0


def test_a_kernel_that_fails_is_named_and_the_session_recovers(make):
    """Every call of the plan in turn: SCH-10's bytes per op, then the same results as a twin."""
    calls = len(make()[2].plan._calls)
    for n in range(calls):
        cache, step, session = make()
        run(session, step, cache, data(step, 1, seed=1))
        kernel = session.plan._calls[n]

        def fail(*args):
            raise ValueError("broken")

        session.plan._calls[n] = (fail, kernel[1])
        lengths = (len(cache), cache.alloc_id())
        with pytest.raises(lk.KernelError, match="got ValueError: broken in step"):
            session.step(data(step, 2, seed=2), {step.pos: 1})
        assert (len(cache), cache.alloc_id()) == lengths
        session.plan._calls[n] = kernel
        torn = [s for s in slots(cache) if s.torn]
        for store in torn:  # the writer failed midway: whole again only when rewritten
            with pytest.raises(lk.StorageTornError):
                session.step(data(step, 2, seed=2), {step.pos: 1})
            backend = lk.device(store.location).backend
            with store.write() as a:
                backend.copy_in(a, backend.copy_out(a))
        twin, _, other = make()
        other = step.session(twin)
        for seed in (1, 2):
            want = run(other, step, twin, data(step, seed, seed=seed))
        np.testing.assert_array_equal(run(session, step, cache, data(step, 2, seed=2)), want)
        assert [raw_bytes(s) for s in slots(cache)] == [raw_bytes(s) for s in slots(twin)]


def slots(cache: lk.KvCache) -> list[lk.Storage]:
    return [cache.slot_storage(i, s) for i in range(cache.n_layers()) for s in lk.KvSlot]


def test_two_threads_never_interleave_p1(new_cache):
    """Each thread writes its own row and reads it back in the same step."""
    cache = new_cache(1, 1, 4, 2, "f32")
    g, pos = lk.Graph(), lk.Sym("pos", 0, 1)
    x = g.placeholder((1, 1, 1, 4), "f32", "x")
    k, v = (g.placeholder((1, 1, 2, 4), "f32") for _ in range(2))
    wrote = k.at[:, :, pos : pos + 1].set(x)
    target = wrote.slice(2, pos, 1) + 0
    session = lk.DecodeSession.build(
        lk.InferenceContext(), target, kv=cache, kv_nodes=[(k, v)], bound={"x": x}
    )
    barrier = threading.Barrier(2)
    done: list[list[float]] = [[], []]
    other: list[BaseException] = []

    def work(me: int) -> None:
        barrier.wait()
        try:
            while len(done[me]) < 200:
                value = float(1000 * me + len(done[me]))
                row = np.full((1, 1, 1, 4), value, np.float32)
                try:
                    out = session.step({"x": row}, {pos: me})
                except lk.SessionBusy:
                    continue
                assert (out == value).all()
                done[me].append(value)
        except BaseException as e:
            other.append(e)

    threads = [threading.Thread(target=work, args=(me,)) for me in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads)
    assert not other
    assert [len(d) for d in done] == [200, 200]
    assert session.realize_count == 400


def test_a_step_inside_a_step_is_busy_p1(make, monkeypatch):
    cache, step, session = make()
    caught = []

    def again(*args):
        with pytest.raises(lk.SessionBusy, match="need one owner") as e:
            session.step(data(step, 1), {step.pos: 0})
        caught.append(e.value)
        return kernel(*args)

    kernel, args = session.plan._calls[0]
    session.plan._calls[0] = (again, args)
    run(session, step, cache, data(step, 1))
    assert len(caught) == 1
    assert session.realize_count == 1


@pytest.mark.parametrize("place", ["sim:0"], indirect=True)
def test_a_dropped_session_gives_its_memory_back_at_once(make, place):
    """By reference counts alone: a device's memory may be gone before the collector runs."""
    used = partial(lk.device(place).backend.used_bytes, lk.DeviceLocation(place))
    gc.collect()
    gc.disable()
    try:
        before = used()
        cache, step, session = make()
        cache.held["step"] = session
        run(session, step, cache, data(step, 1))
        assert used() > before
        del cache, session
        assert used() == before
    finally:
        gc.enable()
