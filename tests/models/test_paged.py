"""PagedDecoder: a small model over a pool, against contiguous caches and a float64 forward pass."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_oracle import forward, model
from paged_state import failing, refused, storages, tables

import lazykv as lk
from lazykv.models import PagedDecoder
from lazykv.models.config import inv_freq


def ids(n: int, seed: int = 0, vocab: int = 37) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab, n)]


def close(got: Any, want: Any, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


def decoder(
    m: Any,
    *,
    blocks: int = 32,
    size: int = 4,
    dtype: str = "f32",
    place: str = "cpu",
    **options: Any,
) -> PagedDecoder:
    return PagedDecoder(m, m.new_pool(blocks, size, dtype, place), **options)


def contiguous(m: Any, tokens: list[int], dtype: str = "f32") -> np.ndarray:
    """Logits after the last token, from a cache of its own."""
    return m.prefill(tokens, m.full_cache(len(tokens), dtype))


# The same logits as anywhere else


@pytest.mark.parametrize("place", ["cpu", "sim:0"])
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_prompts_and_tokens_give_the_models_logits(interleaved, size, place):
    m, tokens = model(seed=1, rope_interleaved=interleaved), ids(29)
    want = forward(m.config, m.weights, tokens)
    paged = decoder(m, size=size, place=place)
    session = paged.pool.open()
    close(paged.prefill(session, tokens[:13]), want[12])
    for n in range(13, 20):
        close(paged.decode([session], [tokens[n]]), want[n : n + 1])
    close(paged.prefill(session, tokens[20:]), want[-1])
    assert (paged.pool.filled_tokens(session), paged.tokens_run) == (29, 29)


@pytest.mark.parametrize("size", [1, 2, 16])
def test_greedy_ids_on_a_simulated_device_are_those_of_the_cpu(size):
    m = model(seed=2)
    cache = m.new_cache(64)
    logits, want = m.prefill(ids(7), cache), []
    for _ in range(40):
        want.append(int(logits.argmax()))
        logits = m.decode_step(want[-1], cache)
    for place in ("cpu", "sim:0"):
        paged = decoder(m, blocks=64, size=size, place=place)
        session, got = paged.pool.open(), []
        logits = paged.prefill(session, ids(7))
        for _ in range(40):
            got.append(int(logits.argmax()))
            (logits,) = paged.decode([session], [got[-1]])
        assert got == want, place


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_a_ragged_batch_is_each_sequence_alone(n):
    m = model(seed=3)
    paged = decoder(m, blocks=64)
    prompts = [ids(3 * i + 1, seed=i) for i in range(n)]
    sessions = [paged.pool.open() for _ in prompts]
    for session, prompt in zip(sessions, prompts, strict=True):
        close(paged.prefill(session, prompt), contiguous(m, prompt), 1e-5)
    for step in range(6):
        new = ids(n, seed=step)
        rows = paged.decode(sessions, new)
        assert rows.shape == (n, 37)
        for prompt, token, row in zip(prompts, new, rows, strict=True):
            prompt.append(token)
            close(row, contiguous(m, prompt), 1e-5)


@pytest.mark.parametrize(("dtype", "near"), [("bf16", 4e-2), ("f16", 6e-3)])
def test_pools_of_16_bits_round_as_caches_of_16_bits_do(dtype, near):
    m, tokens = model(seed=4), ids(24)
    want, cache = forward(m.config, m.weights, tokens), m.new_cache(24, dtype)
    paged = decoder(m, dtype=dtype)
    session = paged.pool.open()
    close(paged.prefill(session, tokens[:16]), m.prefill(tokens[:16], cache), near / 8)
    for n in range(16, 24):
        (got,) = paged.decode([session], [tokens[n]])
        close(got, want[n], near)
        close(got, m.decode_step(tokens[n], cache), near / 8)
    assert np.abs(got - want[-1]).max() > 1e-4 * np.abs(want[-1]).max()


@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_sliding_window(size):
    m, tokens = model(seed=5, sliding_window=5), ids(40, seed=5)
    want = forward(m.config, m.weights, tokens)
    paged = decoder(m, blocks=40, size=size)
    session = paged.pool.open()
    close(paged.prefill(session, tokens[:17]), want[16])
    for n in range(17, 40):
        close(paged.decode([session], [tokens[n]])[0], want[n])


def test_long_prompts_run_in_chunks_of_powers_of_two():
    m, tokens = model(seed=6, n_layers=1), ids(300, seed=6)
    paged = decoder(m, blocks=24, size=16)
    session = paged.pool.open()
    close(paged.prefill(session, tokens), contiguous(m, tokens), 1e-4)
    assert sorted(s.seq for s in paged.plans) == [4, 8, 32, 256]
    assert all(s.batch == 1 for s in paged.plans)


# One plan per size


def test_plans_are_made_once_per_power_of_two():
    m = model(seed=7)
    paged = decoder(m, blocks=128)
    sessions = [paged.pool.open() for _ in range(8)]
    for n in (1, 2, 3, 4, 5, 8):
        paged.decode(sessions[:n], [1] * n)
    assert sorted((s.batch, s.seq) for s in paged.plans) == [(1, 1), (2, 1), (4, 1), (8, 1)]
    known, before = {s.plan.id for s in paged.plans}, lk.stats()
    for step in range(12):  # across block boundaries
        for n in (8, 3, 6, 1, 2):
            paged.decode(sessions[:n], [step] * n)
    after = lk.stats()
    assert {s.plan.id for s in paged.plans} == known
    assert (after.plans_built, after.allocations) == (before.plans_built, before.allocations)
    assert paged.session_for(3) is paged.session_for(4)


# Verbs between steps


def test_rejected_drafts_are_rewound():
    m, tokens = model(seed=8), ids(12)
    want = forward(m.config, m.weights, [*tokens[:8], 9, 9, 9])
    paged = decoder(m)
    session = paged.pool.open()
    paged.prefill(session, tokens[:8])
    close(paged.prefill(session, [9, 9, 9]), want[-1])
    plans = {s.plan.id for s in paged.plans}
    paged.pool.truncate(session, 9)  # one draft was right
    right = [*tokens[:8], 9, *tokens[8:]]
    want = forward(m.config, m.weights, right)
    for n in range(9, 13):
        close(paged.decode([session], [right[n]])[0], want[n])
    assert plans == {s.plan.id for s in paged.plans}
    paged.pool.truncate(session, 4)
    close(paged.prefill(session, right[4:]), want[-1])
    paged.pool.truncate(session, 0)
    close(paged.prefill(session, right), want[-1])


@pytest.mark.parametrize("length", [6, 8])
def test_best_of_n_goes_on_from_one_prompt(length):
    """Only a shared partial tail is copied, and only by those who write first."""
    m, prompt = model(seed=9), ids(length)
    paged = decoder(m, blocks=12)
    parent = paged.pool.open()
    paged.prefill(parent, prompt)
    branches = [paged.pool.fork(parent) for _ in range(4)]
    assert paged.pool.free_blocks() == 10
    chosen = [[n, 5 + n, 9] for n in range(4)]
    for step in range(3):
        rows = paged.decode(branches, [c[step] for c in chosen])
        for row, branch in zip(rows, chosen, strict=True):
            close(row, contiguous(m, [*prompt, *branch[: step + 1]]), 1e-5)
    assert paged.pool.stats.blocks_copied == (4 if length == 6 else 0)
    for branch in branches[1:]:
        paged.pool.discard(branch)
    for session, tail in ((parent, []), (branches[0], chosen[0])):
        close(paged.decode([session], [3])[0], contiguous(m, [*prompt, *tail, 3]), 1e-5)


def test_evicted_and_restored_sequences_go_on_as_others_do():
    m, tokens = model(seed=10), ids(12)
    paged = decoder(m, blocks=8)
    a, b = paged.pool.open(), paged.pool.open()
    for session in (a, b):
        paged.prefill(session, tokens[:10])
    handle = paged.pool.evict(a).handle
    squatter = paged.pool.open()
    paged.prefill(squatter, ids(8, seed=1))
    with refused(paged.pool, lk.SessionNotResident):
        paged.decode([b, a], [1, 1])
    with refused(paged.pool, lk.SessionNotResident):
        paged.prefill(a, [1])
    blocks = paged.pool.restore(a, handle)
    assert blocks != [0, 1, 2]
    for token in tokens[10:]:
        rows = paged.decode([a, b], [token, token])
        close(rows[0], rows[1], 1e-6)
    close(rows[0], contiguous(m, tokens), 1e-5)


def test_a_published_prompt_is_not_computed_again():
    m, prompt = model(seed=11), ids(18)
    paged = decoder(m)
    first = paged.pool.open()
    want = paged.prefill(first, prompt)
    assert paged.pool.publish(first, prompt) == 4
    paged.pool.discard(first)
    second, before = paged.pool.open(), paged.tokens_run
    with paged.pool.lookup(prompt) as lease:
        assert lease.splice_into(second) == 16
        close(paged.prefill(second, prompt[16:]), want, 1e-5)
    assert paged.tokens_run - before == 2
    whole = paged.pool.open()
    with paged.pool.lookup(prompt[:16]) as lease:
        lease.splice_into(whole)
        paged.pool.truncate(whole, 15)
        close(paged.prefill(whole, prompt[15:16]), contiguous(m, prompt[:16]), 1e-5)
    close(paged.decode([second], [7])[0], contiguous(m, [*prompt, 7]), 1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_moved_prefix_of_one_layer_is_what_the_model_computes_there(interleaved):
    """Keys and values of a first layer depend on a token and its position only, so here moving is
    exact; in a deeper model it is an approximation."""
    m = model(seed=12, n_layers=1, rope_interleaved=interleaved)
    text, before, after = ids(8), ids(12, seed=1), ids(3, seed=2)
    paged = decoder(m)
    source, target = paged.pool.open(), paged.pool.open()
    paged.prefill(source, text)
    prefix = paged.pool.register_prefix(source, 2)
    paged.prefill(target, before)
    pairing = m.config.rope_interleaved
    assert paged.pool.splice_prefix_shifted(prefix, target, inv_freq(m.config), pairing) == 8
    close(paged.prefill(target, after), contiguous(m, [*before, *text, *after]), 1e-5)
    paged.pool.truncate(target, 12)
    paged.pool.splice_prefix_shifted(prefix, target, inv_freq(m.config), not pairing)
    wrong = paged.prefill(target, after)
    assert np.abs(wrong - contiguous(m, [*before, *text, *after])).max() > 1e-3


# New weights


def test_new_weights_are_planned_anew_and_find_nothing_of_the_old():
    m, other = model(seed=13), model(seed=14)
    prompt = ids(9)
    paged = decoder(m)
    session = paged.pool.open()
    paged.prefill(session, prompt)
    paged.pool.publish(session, prompt)
    prefix = paged.pool.register_prefix(session, 2)
    plans = {s.plan.id for s in paged.plans}
    m.weights = other.weights
    m.weights_epoch += 1
    with paged.pool.lookup(prompt) as lease:
        assert lease.tokens == 0  # the pool notices by itself
    fresh = paged.pool.open()
    close(paged.prefill(fresh, prompt), forward(m.config, other.weights, prompt)[-1])
    assert not plans & {s.plan.id for s in paged.plans}
    with paged.pool.lookup(prompt) as lease:
        assert lease.tokens == 0
    assert [e.kind for e in paged.pool.events()] == ["stored", "stored", "cleared"]
    empty = paged.pool.open()
    with refused(paged.pool, lk.StaleHandle):
        paged.pool.splice_prefix_from(prefix, empty)
    assert paged.pool.publish(session, prompt) == 0
    assert paged.pool.publish(fresh, prompt) == 2
    with paged.pool.lookup(prompt) as lease:
        assert lease.splice_into(empty) == 8
    close(paged.prefill(empty, [prompt[8]]), contiguous(m, prompt), 1e-5)


def test_a_block_begun_with_old_weights_is_not_published_under_the_new():
    m = model(seed=15)
    paged = decoder(m)
    session = paged.pool.open()
    paged.prefill(session, ids(2))
    m.weights_epoch += 1
    paged.prefill(session, ids(6, seed=1))
    assert paged.pool.publish(session, ids(2) + ids(6, seed=1)) == 0


def test_a_pool_serves_one_model():
    """Two in turns would find each other's rows between their calls."""
    one, two = model(seed=16), model(seed=17)
    first, prompt = decoder(one), ids(8)
    pool = first.pool
    for make in (PagedDecoder, lk.serving.Engine):
        with refused(pool, lk.PoolError, "a pool for each"):
            make(two, pool)
    PagedDecoder(one, pool)  # the same model, again
    session = pool.open()
    first.prefill(session, prompt)
    assert pool.publish(session, prompt) == 2
    pool.use_model(two.present_key)  # handed over
    with refused(pool, lk.PoolError, "a pool for each"):
        first.decode([session], [3])
    second, again = PagedDecoder(two, pool), pool.open()
    with pool.lookup(prompt) as lease:
        assert lease.tokens == 0
    close(second.prefill(again, prompt), contiguous(two, prompt), 1e-5)
    assert (pool.publish(session, prompt), pool.publish(again, prompt)) == (0, 2)


def test_a_step_of_another_model_is_refused():
    one, two = model(seed=16), model(seed=17)
    pool = one.new_pool(16, 4)
    foreign = PagedDecoder(two, two.new_pool(16, 4)).session_for(1)
    assert foreign.rebind_kv(pool) is None
    session = pool.open()
    with refused(pool, lk.PoolError, "need a pool for each"):
        foreign.step([session], lambda starts: {})
    assert pool.filled_tokens(session) == 0


# Refusals and failures


def test_what_does_not_fit_the_model_is_refused():
    m = model(seed=18)
    for changes in ({"n_layers": 1}, {"n_kv_heads": 1}, {"head_dim": 4}):
        pool = model(**changes).new_pool(4)
        with pytest.raises(
            lk.ShapeError, match=r"PagedDecoder: got a pool of .* use model.new_pool"
        ):
            PagedDecoder(m, pool)
    for options, words in (({"max_batch": 0}, "max_batch 0"), ({"max_context": 0}, "max_context 0"),
                           ({"max_batch": -1}, "max_batch -1")):  # fmt: skip
        with pytest.raises(lk.RangeError, match=words):
            decoder(m, **options)
    for arguments in ((0,), (4, 0), (-1,)):
        with pytest.raises(lk.RangeError, match="new_pool: got"):
            m.new_pool(*arguments)


def test_a_pool_has_the_models_geometry():
    m = model()
    pool = m.new_pool(5)
    assert pool.pool_shape == (5, 16, 2, 8)
    assert (pool.dtype, str(pool.device_location()), pool.n_layers()) == (lk.f32, "cpu", 2)
    store = lk.MemoryBlockStore()
    pool = m.new_pool(5, 2, "bf16", "sim:0", store=store)
    assert (pool.dtype, str(pool.device_location())) == (lk.bf16, "sim:0")
    session = pool.open()
    pool.append(session, 1)
    pool.evict(session)
    assert len(store.keys()) == 1


def test_bad_prompts_are_refused_before_anything_runs():
    m = model(seed=19)
    paged = decoder(m, blocks=4, max_context=10)
    session, other = paged.pool.open(), paged.pool.open()
    paged.prefill(session, ids(6))
    paged.prefill(other, ids(3))
    plans = len(paged.plans)
    gone = paged.pool.open()
    paged.pool.discard(gone)
    for s, prompt, error, words in (
        (session, [], lk.ShapeError, "got an empty prompt"),
        (session, [1, 37], lk.RangeError, "got token 37"),
        (session, [-1], lk.RangeError, "got token -1"),
        (session, [1.5], lk.DTypeError, "1.5"),
        (session, "text", lk.DTypeError, "got text"),
        (session, ids(5), lk.RangeError, "got 5 tokens at length 6, need 11 <= max_context 10"),
        (gone, [1], lk.UnknownSession, "need an open session"),
        (None, [1], lk.UnknownSession, "got None"),
        (other, ids(6), lk.OutOfBlocks, "prefill: got 1 free blocks, need 2"),
    ):
        with refused(paged.pool, error, words):
            paged.prefill(s, prompt)
    for some, tokens, error, words in (
        ([session], [], lk.ShapeError, "got 0 tokens for 1 sessions"),
        ([], [], lk.ShapeError, "need one each for 1..8"),
        ([session], [1, 2], lk.ShapeError, "got 2 tokens for 1 sessions"),
        ([session, other], [1, 99], lk.RangeError, "got token 99"),
        ([session, session], [1, 1], lk.PoolError, "need different ones"),
        ([session, gone], [1, 1], lk.UnknownSession, "need an open session"),
        ([session] * 9, [1] * 9, lk.ShapeError, "got 9 tokens for 9 sessions"),
    ):
        with refused(paged.pool, error, words):
            paged.decode(some, tokens)
    assert (paged.tokens_run, len(paged.plans)) == (9, plans + 1)
    close(paged.prefill(session, ids(4)), contiguous(m, ids(6) + ids(4)), 1e-5)
    with refused(paged.pool, lk.RangeError, "decode: got 1 tokens at length 10"):
        paged.decode([other, session], [1, 1])


def test_a_prompt_that_fails_midway_is_rewound():
    m, tokens = model(seed=20), ids(11)
    paged = decoder(m)
    session = paged.pool.open()
    paged.prefill(session, tokens[:4])
    paged.prefill(paged.pool.fork(session), tokens[4:])  # chunks of 4, 2 and 1
    before = tables(paged.pool)
    for seq in (4, 2, 1):
        plan = paged.session_for(1, seq).plan
        for call in (0, len(plan._calls) // 2, len(plan._calls) - 1):
            with failing(plan, call, ValueError("broken")), pytest.raises(lk.KernelError):
                paged.prefill(session, tokens[4:])
            assert tables(paged.pool) == before
            assert not any(s.torn for s in storages(paged.pool))
            paged.pool.check()
    close(paged.prefill(session, tokens[4:]), contiguous(m, tokens), 1e-5)


def test_a_batch_that_fails_is_rewound():
    m = model(seed=21)
    paged = decoder(m)
    prompts = [ids(n, seed=n) for n in (3, 4, 9)]
    sessions = [paged.pool.open() for _ in prompts]
    for session, prompt in zip(sessions, prompts, strict=True):
        paged.prefill(session, prompt)
    paged.decode(sessions, [0, 0, 0])
    for session, prompt in zip(sessions, prompts, strict=True):
        paged.pool.truncate(session, len(prompt))
    before, plan = tables(paged.pool), paged.session_for(3).plan
    for call in range(0, len(plan._calls), 7):
        with failing(plan, call, ValueError("broken")), pytest.raises(lk.KernelError):
            paged.decode(sessions, [1, 2, 3])
        assert tables(paged.pool) == before
    rows = paged.decode(sessions, [1, 2, 3])
    for prompt, token, row in zip(prompts, (1, 2, 3), rows, strict=True):
        close(row, contiguous(m, [*prompt, token]), 1e-5)


# Any order of things


MODEL = model(seed=22, n_layers=2, vocab_size=11)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "prefill", "decode", "decode", "fork", "truncate", "discard",
                         "evict", "publish", "find"]),
        st.integers(0, 20), st.lists(st.integers(0, 10), min_size=1, max_size=7),
    ),
    min_size=4, max_size=14,
)  # fmt: skip


@settings(max_examples=40)
@given(ACTIONS, st.sampled_from([1, 3, 4]))
def test_logits_never_depend_on_what_else_happens(actions, size):
    """Whatever is forked, shortened, evicted, found or decoded together: every logit is that of
    the session's own tokens in a cache of their own."""
    paged = decoder(MODEL, blocks=60 // size, size=size)
    pool = paged.pool
    live: dict[Any, list[int]] = {pool.open(): []}

    def check(row: np.ndarray, tokens: list[int]) -> None:
        close(row, contiguous(MODEL, tokens), 1e-5)

    for verb, which, tokens in actions:
        s = list(live)[which % len(live)]
        try:
            if verb == "prefill":
                row = paged.prefill(s, tokens)
                live[s] += tokens
                check(row, live[s])
            elif verb == "decode":
                some = list(live)[: len(tokens)]
                rows = paged.decode(some, tokens[: len(some)])
                for session, token, row in zip(some, tokens, rows, strict=False):
                    live[session].append(token)
                    check(row, live[session])
            elif verb == "fork" and len(live) < 6:
                live[pool.fork(s)] = list(live[s])
            elif verb == "truncate":
                pool.truncate(s, which)
                del live[s][which:]
            elif verb == "discard" and len(live) > 1:
                pool.discard(s)
                del live[s]
            elif verb == "evict":
                pool.restore(s, pool.evict(s).handle)
            elif verb == "publish":
                full = len(live[s]) // size
                assert pool.publish(s, live[s]) == full
            elif verb == "find" and len(live) < 6:
                found = pool.open()
                with pool.lookup(live[s]) as lease:
                    lease.splice_into(found)
                live[found] = live[s][: lease.tokens]
            elif verb == "open" and len(live) < 6:
                live[pool.open()] = []
        except lk.OutOfBlocks:
            assert {session: pool.filled_tokens(session) for session in live} == {
                session: len(known) for session, known in live.items()
            }
        pool.check()
