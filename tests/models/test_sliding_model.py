"""A model with a sliding window on rings, against a float64 forward pass under a window mask."""

import numpy as np
import pytest
from kv_state import refused, state
from llama_oracle import forward, model

import lazykv as lk
from lazykv.models.beam import beam_search
from lazykv.models.speculative import Proposal, speculate

WINDOW = 5


def ids(n: int, seed: int = 0, vocab: int = 37) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab, n)]


def ring(m, *, window=WINDOW, sinks=0, slack=3, dtype="f32", place="cpu", most=None):
    c = m.config
    return lk.SlidingKvCache.with_capacity(
        c.n_layers, c.n_kv_heads, c.head_dim, window, dtype, place, sink_tokens=sinks,
        rollback_slack=slack, max_seq_len=most,
    )  # fmt: skip


def close(got, want, tolerance=1e-4):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("place", ["cpu", "sim:0", ["sim:1", "sim:0"]], ids=str)
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("interleaved", [True, False])
def test_one_plan_decodes_across_many_wraps(interleaved, sinks, place):
    m = model(seed=1, rope_interleaved=interleaved, sliding_window=WINDOW)
    tokens, ctx = ids(43), lk.InferenceContext()
    want = forward(m.config, m.weights, tokens, sinks)
    cache, seen, built = ring(m, sinks=sinks, place=place), [], []
    for n, token in enumerate(tokens):
        logits = m.decode_step(token, cache, ctx)
        close(logits, want[n])
        assert logits.argmax() == want[n].argmax()
        session = ctx.take_decode_session()
        ctx.put_decode_session(session)
        seen.append((session.plan.id, session.node_count))
        built.append(lk.stats().plans_built)
    assert (cache.cached_len, cache.resident_rows) == (43, WINDOW + sinks)
    # 43 positions go round a ring of 8 slots five times: the plan is that of the first token.
    assert len(set(seen)) == len(set(built)) == 1


def test_Q7_twenty_steps_on_a_ring_of_eight_are_one_plan():
    m = model(seed=2, sliding_window=8)
    tokens, full = ids(20), m.full_cache(20)
    want = forward(m.config, m.weights, tokens)
    m.prefill(tokens, full)
    cache = ring(m, window=8, slack=0)
    m.decode_step(tokens[0], cache)
    built, misses = lk.stats().plans_built, []
    for n in range(1, 20):
        close(m.decode_step(tokens[n], cache), want[n])
        misses.append(lk.stats().plans_built - built)
        if n in (7, 8, 9):
            for got, rows in zip(cache.live(1), full.live(1), strict=True):
                close(got, rows[:, :, max(0, n - 7) : n + 1])
    assert misses == [0] * 19


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("slack", [0, 1, 3, 20])
def test_prompts_run_in_chunks_that_the_slack_allows(slack, sinks):
    m, tokens = model(seed=3, sliding_window=WINDOW), ids(40, seed=3)
    want = forward(m.config, m.weights, tokens, sinks)
    for n in (1, 4, 5, 6, 13, 30):
        cache = ring(m, sinks=sinks, slack=slack)
        close(m.prefill(tokens[:n], cache), want[n - 1])
        longest = max(seq for _, _, seq, _ in cache.held)
        assert longest <= slack + 1
        for at in range(n, n + 6):
            close(m.decode_step(tokens[at], cache), want[at])
        close(m.prefill(tokens[n + 6 : 40], cache), want[39])


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_16_bit_rings(dtype):
    m, tokens = model(seed=4, sliding_window=WINDOW), ids(30, seed=4)
    want = forward(m.config, m.weights, tokens)
    cache = ring(m, dtype=dtype)
    m.prefill(tokens[:9], cache)
    for n in range(9, 30):
        close(m.decode_step(tokens[n], cache), want[n], 3e-2)


def test_a_ring_gives_what_a_cache_of_all_rows_gives():
    m, tokens = model(seed=5, sliding_window=WINDOW), ids(30, seed=5)
    full, sliding = m.full_cache(30), ring(m)
    assert m.prefill(tokens[:9], full).argmax() == m.prefill(tokens[:9], sliding).argmax()
    for token in tokens[9:]:
        close(m.decode_step(token, sliding), m.decode_step(token, full), 1e-5)


def test_new_cache_is_a_ring_where_the_window_can_slide():
    m = model(seed=6, sliding_window=WINDOW)
    cache = m.new_cache(6)
    assert isinstance(cache, lk.SlidingKvCache)
    assert (cache.window, cache.sink_tokens, cache.rollback_slack) == (WINDOW, 0, WINDOW - 1)
    assert cache.max_seq_len == 6
    assert m.new_cache(10**9).ring_rows == 2 * WINDOW - 1
    assert isinstance(m.new_cache(WINDOW), lk.KvCache)
    assert isinstance(model(seed=6).new_cache(64), lk.KvCache)
    wide = model(seed=6, sliding_window=4096).new_cache(5000)
    assert (wide.rollback_slack, wide.ring_rows) == (255, 4096 + 255)
    tokens = ids(6, seed=6)
    want = forward(m.config, m.weights, tokens)[5]
    for length in (WINDOW + 1, 64):
        close(m.prefill(tokens, m.new_cache(length)), want)


def test_generation_ends_at_max_seq_len_and_rolls_over_the_window_before():
    m = model(seed=7, sliding_window=WINDOW)
    cache, out = m.new_cache(24), []
    logits = m.prefill(ids(7), cache)
    while True:
        out.append(int(logits.argmax()))
        if cache.cached_len == 24:
            break
        logits = m.decode_step(out[-1], cache)
    tokens = [*ids(7), *out]
    assert out == [int(x) for x in forward(m.config, m.weights, tokens)[6:-1].argmax(1)]
    with refused(cache, lk.RangeError, "need 25 <= capacity 24"):
        m.decode_step(1, cache)


# Sessions


def test_refresh_rebinds_between_requests_on_two_rings():
    m, ctx = model(seed=8, sliding_window=WINDOW), lk.InferenceContext()
    first, second = ring(m), ring(m)
    a, b = ids(23, seed=1), ids(19, seed=2)
    want = [forward(m.config, m.weights, x) for x in (a, b)]
    for n, token in enumerate(a):
        close(m.decode_step(token, first, ctx), want[0][n])
    session = ctx.take_decode_session()
    ctx.put_decode_session(session)
    disposition = ctx.refresh(second, model_key=m.model_key)
    assert disposition == lk.SessionDisposition.Rebound
    built = lk.stats().plans_built
    for n, token in enumerate(b):
        close(m.decode_step(token, second, ctx), want[1][n])
    assert (lk.stats().plans_built, session.rebind_count) == (built, 1)
    assert session.alloc_id == second.alloc_id()
    assert ctx.refresh(second, model_key=m.model_key) == lk.SessionDisposition.Kept
    # The first ring was left as it was and goes on where it stopped.
    assert session.rebind_kv(first) is None
    assert first.cached_len == 23
    close(m.decode_step(b[0], first, ctx), forward(m.config, m.weights, [*a, b[0]])[-1])


@pytest.mark.parametrize(
    ("change", "validity"),
    [
        ({}, lk.PlanValidity.AllocationChanged),
        ({"most": 99}, lk.PlanValidity.AllocationChanged),
        ({"sinks": 1}, lk.PlanValidity.Stale),
        ({"sinks": 1, "slack": 2}, lk.PlanValidity.Stale),
        ({"slack": 4}, lk.PlanValidity.Stale),
        ({"window": 4, "slack": 4}, lk.PlanValidity.Stale),
        ({"dtype": "f16"}, lk.PlanValidity.Stale),
    ],
)
def test_what_makes_a_plan_stale(change, validity):
    m = model(seed=9, sliding_window=WINDOW)
    session = m.session_for(ring(m))
    assert session.validity_for(ring(m, **change), model_key=m.model_key) is validity


def test_refusals_to_rebind_are_those_of_other_caches():
    m = model(seed=9, sliding_window=WINDOW)
    cache = ring(m)
    session = m.session_for(cache)
    other = session.rebind_kv(ring(m, slack=4))
    assert (type(other), other.layer, other.which) == (lk.StorageDiffers, 0, 0)
    assert type(session.rebind_kv(ring(m, place="sim:0"))) is lk.ResidencyDiffers
    cleared = ring(m)
    cleared.clear()
    assert type(session.rebind_kv(cleared)) is lk.ResidencyUnknown
    assert session.alloc_id == cache.alloc_id()


def test_a_rewind_within_the_slack_keeps_the_plan():
    m, tokens = model(seed=10, sliding_window=WINDOW), ids(40, seed=10)
    cache = ring(m, slack=3)
    m.prefill(tokens[:20], cache)
    m.decode_step(tokens[20], cache)
    built, held = lk.stats().plans_built, [*tokens[:21]]
    for back in (1, 3, 2, 3):
        for token in (7, 8, 9):
            m.decode_step(token, cache)
        cache.truncate_to(cache.cached_len - back)
        held = [*held, 7, 8, 9][: 3 - back + len(held)]
        close(m.decode_step(11, cache), forward(m.config, m.weights, [*held, 11])[-1])
        held.append(11)
    assert lk.stats().plans_built == built
    with refused(cache, lk.RangeError, "got a rewind"):
        cache.truncate_to(cache.cached_len - 8)


class Wrong:
    """Drafts the model's own tokens, with a mistake in every second proposal."""

    def __init__(self, truth: list[int], prompt: int) -> None:
        self.truth, self.prompt, self.calls = truth, prompt, 0

    def propose(self, seen: list[int], n: int) -> Proposal:
        at = len(seen) - self.prompt
        tokens = self.truth[at : at + n]
        self.calls += 1
        if self.calls % 2 and len(tokens) > 1:
            tokens = [*tokens[:1], (tokens[1] + 1) % 37, *tokens[2:]]
        return Proposal(tuple(tokens), (None,) * len(tokens))


def test_speculative_decoding_over_a_ring_gives_the_models_own_tokens():
    m, prompt = model(seed=11, sliding_window=WINDOW), ids(9, seed=11)
    cache, truth = ring(m, most=64), []
    logits = m.prefill(prompt, cache)
    for _ in range(30):
        truth.append(int(logits.argmax()))
        logits = m.decode_step(truth[-1], cache)
    own = forward(m.config, m.weights, [*prompt, *truth])[8:-1].argmax(1)
    assert truth == [int(t) for t in own]
    got = speculate(
        m, prompt, Wrong(truth, len(prompt)), max_new_tokens=30, draft_len=3,
        cache=ring(m, most=64),
    )  # fmt: skip
    assert list(got) == truth


def test_a_step_longer_than_the_slack_is_refused_when_planned():
    m = model(seed=12, sliding_window=WINDOW)
    cache = ring(m, slack=2)
    m.prefill(ids(9), cache)
    with refused(cache, lk.RangeError, "got 4 queries over rings of 7 rows", "longer ring"):
        m.score(ids(4), cache)
    assert m.score(ids(3), cache).shape == (3, 37)


# Failures and refusals


def test_a_step_that_fails_midway_takes_what_it_may_have_overwritten_out_of_view(monkeypatch):
    m, tokens = model(seed=13, sliding_window=WINDOW), ids(30, seed=13)
    cache = ring(m, slack=1)
    m.prefill(tokens[:20], cache)
    m.decode_step(tokens[20], cache)
    plan = m.session_for(cache).plan
    good = plan.execute

    def broken():
        good()
        raise lk.KernelError("late")

    monkeypatch.setattr(plan, "execute", broken)
    with pytest.raises(lk.KernelError, match="late"):
        m.decode_step(1, cache)
    monkeypatch.undo()
    assert (cache.cached_len, cache.resident_rows) == (21, WINDOW)
    with refused(cache, lk.RangeError, "from 21 to 20"):
        cache.truncate_to(20)
    close(m.decode_step(tokens[21], cache), forward(m.config, m.weights, tokens)[21])


def test_a_prompt_that_fails_beyond_the_slack_says_what_stays(monkeypatch):
    m, tokens = model(seed=14, sliding_window=WINDOW), ids(40, seed=14)
    cache = ring(m, slack=1)
    m.prefill(tokens[:20], cache)
    run, calls = m._run, []

    def failing(*args, **kwargs):
        calls.append(0)
        if len(calls) == 6:
            raise lk.KernelError("sixth")
        return run(*args, **kwargs)

    monkeypatch.setattr(m, "_run", failing)
    with pytest.raises(lk.KernelError, match="sixth") as caught:
        m.prefill(tokens[20:40], cache)
    assert "the first 10 tokens stay in the cache" in caught.value.__notes__[0]
    assert cache.cached_len == 30
    monkeypatch.undo()
    close(m.prefill(tokens[30:40], cache), forward(m.config, m.weights, tokens)[39])


def test_caches_that_do_not_fit_the_window_are_refused():
    m, plain = model(seed=15, sliding_window=WINDOW), model(seed=15)
    for owner, cache, need in ((m, ring(m, window=4), 5), (plain, ring(plain), None)):
        with refused(cache, lk.ShapeError, f"window {cache.window}, need {need}; use new_cache"):
            owner.decode_step(1, cache)
    cleared = ring(m)
    cleared.clear()
    before = state(cleared)
    with pytest.raises(lk.GraphError, match=r"got a cleared cache.*reset\(\)"):
        m.prefill([1, 2], cleared)
    assert state(cleared) == before


def test_the_window_is_part_of_the_models_structure():
    keys = {model(seed=16, sliding_window=w).model_key[3] for w in (None, 4, 5)}
    assert len(keys) == 3


def test_beams_keep_every_row():
    m, prompt = model(seed=17, sliding_window=WINDOW), ids(8, seed=17)
    best = beam_search(m, prompt, beams=1, max_new_tokens=9)[0]
    tokens = list(prompt)
    for _ in range(9):
        tokens.append(int(forward(m.config, m.weights, tokens)[-1].argmax()))
    assert list(best.ids) == tokens[8:]
