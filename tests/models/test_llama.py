"""LlamaModel: prefill and decoding against a float64 forward pass, and everything it refuses."""

import numpy as np
import pytest
from kv_state import refused, state
from llama_oracle import config, forward, model

import lazykv as lk
from lazykv.models import model as model_module
from lazykv.models.config import FrequencyDivisors, LinearScaling, Llama3Scaling
from lazykv.models.llama import RopeTable
from lazykv.models.speculative import PromptLookup, speculate
from lazykv.runtime.plan_cache import plan_cache

LLAMA3 = Llama3Scaling(
    factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=64
)


def ids(n: int, seed: int = 0, vocab: int = 37) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab, n)]


def one_by_one(m, tokens, cache, ctx=None) -> np.ndarray:
    return np.array([m.decode_step(t, cache, ctx) for t in tokens])


def close(got, want, tolerance=1e-4):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


# Against float64


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_interleaved": False},
        {"tied_head": True},
        {"tied_head": True, "rope_interleaved": False},
        {"n_heads": 2, "n_kv_heads": 2},
        {"n_heads": 3, "n_kv_heads": 1},
        {"n_heads": 6, "n_kv_heads": 2, "rope_interleaved": False},
        {"n_heads": 8, "n_kv_heads": 2},
        {"n_heads": 1, "n_kv_heads": 1, "head_dim": 2, "n_layers": 1},
        {"head_dim": 6, "hidden_size": 10},
        {"rope_scaling": LinearScaling(4.0)},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": LLAMA3, "rope_interleaved": False, "tied_head": True},
        {"n_layers": 4, "intermediate_size": 7, "rms_eps": 0.1, "rope_theta": 1e4},
    ],
)
def test_every_shape_of_model_against_float64(changes):
    m, tokens = model(seed=3, **changes), ids(13, seed=5)
    want = forward(m.config, m.weights, tokens)
    close(one_by_one(m, tokens, m.new_cache(16)), want)
    for n in (1, 2, 7, 13):
        cache = m.new_cache(16)
        close(m.prefill(tokens[:n], cache), want[n - 1])
        assert len(cache) == n
        for token, expected in zip(tokens[n:], want[n:], strict=True):
            close(m.decode_step(token, cache), expected)


def test_divisors_of_a_file_are_the_scaling_they_stand_for():
    plain = model(rope_scaling=LLAMA3)
    kept = RopeTable(plain.config)._inv_freq
    base = RopeTable(config())._inv_freq
    divided = model(rope_scaling=FrequencyDivisors(tuple(float(x) for x in base / kept)))
    tokens = ids(9)
    a, b = plain.prefill(tokens, plain.new_cache(9)), divided.prefill(tokens, divided.new_cache(9))
    close(a, b, 1e-6)


def test_the_two_pairings_differ():
    """So that the tests above could not pass with one in place of the other."""
    a, b = model(rope_interleaved=True), model(rope_interleaved=False)
    tokens = ids(9)
    assert np.abs(a.prefill(tokens, a.new_cache(9)) - b.prefill(tokens, b.new_cache(9))).max() > 0.1


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 47, 51])
def test_prefill_lengths_around_chunk_bounds(n, monkeypatch):
    monkeypatch.setattr(model_module, "MAX_CHUNK", 16)
    m, tokens = model(), ids(51, seed=2)
    want = forward(m.config, m.weights, tokens)
    cache = m.new_cache(n)
    close(m.prefill(tokens[:n], cache), want[n - 1])
    # A prompt in two calls continues where the first one ended.
    for cut in {1, n // 3, n // 2, n - 1} - {0, n}:
        cache.reset()
        close(m.prefill(tokens[:cut], cache), want[cut - 1])
        close(m.prefill(tokens[cut:n], cache), want[n - 1])


@pytest.mark.parametrize("n", [255, 256, 257, 600])
def test_long_prompts_around_the_real_chunk(n):
    m = model(n_layers=1)
    tokens = ids(n, seed=4)
    cache = m.new_cache(n + 1)
    logits = m.prefill(tokens, cache)
    other = m.new_cache(n + 1)
    close(logits, one_by_one(m, tokens, other)[-1])
    for mine, theirs in zip(cache.live(0), other.live(0), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    if n == 257:
        close(logits, forward(m.config, m.weights, tokens)[-1])


@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", 6e-3), ("bf16", 4e-2)])
def test_narrow_caches_within_their_rounding(dtype, tolerance):
    m, tokens = model(seed=1), ids(20, seed=1)
    want = forward(m.config, m.weights, tokens)
    cache = m.new_cache(20, dtype=dtype)
    assert cache.dtype.name == dtype
    close(m.prefill(tokens[:11], cache), want[10], tolerance)
    close(one_by_one(m, tokens[11:], cache), want[11:], tolerance)
    assert np.abs(m.prefill(tokens, m.new_cache(20)) - want[-1]).max() < 1e-4 * np.abs(want).max()


def test_a_few_plans_serve_every_prompt():
    m = model()
    for n in range(1, 64):
        cache = m.new_cache(64)
        m.prefill(ids(n), cache)
        assert set(cache.held) <= {("llama", m.instance_id, 1 << b, False) for b in range(6)}
    before = lk.stats().plans_built
    for n in (3, 17, 63):
        m.prefill(ids(n), m.new_cache(64))
    assert lk.stats().plans_built == before


# The held plan of decode_step


def test_decode_plans_once_and_equals_planning_every_token():
    m = model()
    cache, anew = m.new_cache(40), m.new_cache(40)
    m.prefill(ids(7), cache)
    m.prefill(ids(7), anew)
    held = None
    for token in ids(33, seed=9):
        before = lk.stats()
        logits = m.decode_step(token, cache)
        after = lk.stats()
        session = m.session_for(cache)
        if held is not None:
            assert after.plans_built == before.plans_built
            assert after.plan_cache_hits == before.plan_cache_hits
            assert after.allocations == before.allocations
            assert (session.plan.id, session.node_count) == held
        held = (session.plan.id, session.node_count)
        anew.held.clear()
        plan_cache.clear()
        np.testing.assert_array_equal(logits, m.decode_step(token, anew))
    assert len(cache) == 40
    assert cache.layers[0].k_version == 33 + 3  # prefill of 7 tokens: 4 + 2 + 1


def test_decode_moves_length_and_versions_and_keeps_the_id():
    m = model()
    cache = m.new_cache(4)
    alloc = cache.alloc_id()
    for n in range(1, 5):
        m.decode_step(3, cache)
        assert len(cache) == n
        assert [(x.k_version, x.v_version) for x in cache.layers] == [(n, n)] * 2
    assert cache.alloc_id() == alloc


def test_logits_are_fresh():
    m = model()
    cache = m.new_cache(8)
    first = m.decode_step(1, cache)
    copy = first.copy()
    m.decode_step(2, cache)
    np.testing.assert_array_equal(first, copy)
    assert (first.shape, first.dtype, first.flags.writeable) == ((37,), np.float32, True)


def test_truncating_keeps_the_plan_and_forgets_the_rows():
    m = model()
    cache, fresh = m.new_cache(16), m.new_cache(16)
    m.prefill(ids(5), cache)
    for token in (4, 5, 6, 7):
        m.decode_step(token, cache)
    plan = m.session_for(cache).plan.id
    cache.truncate_to(6)
    out = m.decode_step(9, cache)
    assert m.session_for(cache).plan.id == plan
    m.prefill(ids(5), fresh)
    m.decode_step(4, fresh)
    np.testing.assert_array_equal(out, m.decode_step(9, fresh))


def test_bytes_written_into_the_cache_are_seen():
    m = model(n_layers=1)
    a, b = m.new_cache(8), m.new_cache(8)
    m.prefill(ids(4), a)
    m.prefill(ids(4, seed=8), b)
    m.decode_step(1, a)
    m.decode_step(1, b)
    assert not np.array_equal(m.decode_step(2, a), m.decode_step(2, b))
    for slot in lk.KvSlot:
        a.write_bytes(0, slot, 0, 6, b.live(0)[slot])
    np.testing.assert_array_equal(m.decode_step(3, a), m.decode_step(3, b))


def test_rows_of_a_dropped_conversation_do_not_matter():
    m = model()
    cache, clean = m.new_cache(32), m.new_cache(32)
    nan = np.full((1, 2, 32, 8), np.nan, np.float32)
    for layer in range(2):
        for slot in lk.KvSlot:
            cache.write_bytes(layer, slot, 0, 32, nan)
    tokens = ids(20)
    np.testing.assert_array_equal(m.prefill(tokens, cache), m.prefill(tokens, clean))
    for token in ids(12, seed=3):
        np.testing.assert_array_equal(m.decode_step(token, cache), m.decode_step(token, clean))


# Several caches and contexts


def test_two_caches_interleaved_on_one_model():
    m = model()
    prompts = [ids(6, seed=1), ids(9, seed=2)]
    want = [forward(m.config, m.weights, p) for p in prompts]
    caches = [m.new_cache(9), m.new_cache(9)]
    plans = set()
    for n in range(9):
        for cache, prompt, expected in zip(caches, prompts, want, strict=True):
            if n < len(prompt):
                close(m.decode_step(prompt[n], cache), expected[n])
                plans.add(m.session_for(cache).plan.id)
    assert len(plans) == 2


@pytest.mark.parametrize("ctx", [None, "one"])
def test_a_context_never_shows_one_cache_the_other(ctx):
    """SES-9: the context holds one session, welded to whichever cache stepped last."""
    m = model()
    ctx = lk.InferenceContext() if ctx else None
    prompts = [ids(7, seed=1), ids(7, seed=2)]
    want = [forward(m.config, m.weights, p) for p in prompts]
    caches = [m.new_cache(8), m.new_cache(8)]
    for n in range(7):
        for cache, prompt, expected in zip(caches, prompts, want, strict=True):
            close(m.decode_step(prompt[n], cache, ctx), expected[n])
            if ctx is not None:
                held = ctx.take_decode_session()
                assert held.alloc_id == cache.alloc_id()
                ctx.put_decode_session(held)
    assert [len(c) for c in caches] == [7, 7]


def test_a_context_keeps_its_plan_for_one_cache():
    m, ctx = model(), lk.InferenceContext()
    cache = m.new_cache(32)
    m.prefill(ids(5), cache, ctx)
    m.decode_step(1, cache, ctx)
    assert ctx.has_decode_session()
    plan = m.session_for(cache, ctx=ctx).plan.id
    before = lk.stats()
    for token in ids(20):
        m.decode_step(token, cache, ctx)
    after = lk.stats()
    assert (after.plans_built, after.plan_cache_hits) == (
        before.plans_built,
        before.plan_cache_hits,
    )
    assert m.session_for(cache, ctx=ctx).plan.id == plan


def test_a_context_shared_by_two_models():
    a, b = model(seed=1), model(seed=2)
    ctx, cache = lk.InferenceContext(), a.new_cache(8)
    tokens = ids(4)
    first = forward(a.config, a.weights, tokens)
    close(one_by_one(a, tokens, cache, ctx), first)
    cache.reset()
    close(one_by_one(b, tokens, cache, ctx), forward(b.config, b.weights, tokens))
    cache.reset()
    close(one_by_one(a, tokens, cache, ctx), first)


def test_a_new_weights_epoch_plans_anew():
    m = model()
    cache = m.new_cache(8)
    m.decode_step(1, cache)
    plan = m.session_for(cache).plan.id
    m.weights_epoch += 1
    m.decode_step(1, cache)
    assert m.session_for(cache).plan.id != plan


def test_the_model_key_names_the_model_and_not_what_is_bound():
    a, b = model(seed=1), model(seed=1)
    assert a.model_key == a.model_key != b.model_key
    other = model(seed=1, rope_theta=5000.0)
    assert a.model_key[3] == other.model_key[3]
    assert a.model_key[3] != model(seed=1, rope_interleaved=False).model_key[3]


def test_a_replaced_layer_is_planned_for_anew():
    m = model(n_layers=1)
    cache = m.new_cache(8)
    m.prefill(ids(4), cache)
    m.decode_step(1, cache)
    other = m.new_cache(8)
    m.prefill(ids(5, seed=6), other)
    cache.set_layer(0, lk.KvLayer(*(lk.Storage.from_array(s.to_numpy())
                                    for s in (other.layers[0].k, other.layers[0].v))))  # fmt: skip
    np.testing.assert_array_equal(m.decode_step(2, cache), m.decode_step(2, other))


# Capacity and refusals


def test_capacity_is_reached_exactly():
    m, tokens = model(), ids(8)
    cache = m.new_cache(8)
    m.prefill(tokens[:5], cache)
    for token in tokens[5:]:
        m.decode_step(token, cache)
    assert len(cache) == cache.max_seq_len == 8
    with refused(cache, lk.RangeError, "decode_step: got 1 tokens at length 8", "capacity 8"):
        m.decode_step(1, cache)
    with refused(cache, lk.RangeError, "prefill: got 2 tokens at length 8"):
        m.prefill([1, 2], cache)
    exact = m.new_cache(8)
    close(m.prefill(tokens, exact), forward(m.config, m.weights, tokens)[-1])
    assert len(exact) == 8


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ([], lk.ShapeError, "empty prompt"),
        (np.zeros(0, np.int64), lk.ShapeError, "empty prompt"),
        ([1, 37], lk.RangeError, "got token 37, need 0 <= token < 37"),
        ([1, -1], lk.RangeError, "got token -1"),
        ([1, 2**70], lk.RangeError, "got token"),
        ([1.0], lk.DTypeError, "got token 1.0"),
        ([None], lk.DTypeError, "need a whole number"),
        ([True], lk.DTypeError, "got token True"),
        ("text", lk.DTypeError, "got text, need token ids; use tokenizer.encode"),
        (b"text", lk.DTypeError, "got text"),
        (5, lk.DTypeError, "got int, need token ids"),
        (None, lk.DTypeError, "need token ids"),
        (np.array([[1, 2]]), lk.DTypeError, "need a whole number"),
        (np.array([1.0, 2.0]), lk.DTypeError, "need a whole number"),
        (list(range(9)), lk.RangeError, "got 9 tokens at length 2, need 11 <= capacity 10"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_is_written(prompt, error, words):
    m = model()
    cache = m.new_cache(10)
    m.prefill([1, 2], cache)
    with refused(cache, error, "prefill", words):
        m.prefill(prompt, cache)


@pytest.mark.parametrize("token", [37, -1, 1.5, None, "a", True, [1]])
def test_a_bad_token_is_refused(token):
    m = model()
    cache = m.new_cache(10)
    m.prefill([1, 2], cache)
    with refused(cache, lk.LazyKvError, "decode_step: got token"):
        m.decode_step(token, cache)


def test_ids_of_every_integer_kind():
    m = model()
    want = m.prefill([1, 2, 3], m.new_cache(3))
    for prompt in ((1, 2, 3), iter([1, 2, 3]), np.array([1, 2, 3], np.int32), range(1, 4),
                   [np.int64(1), np.uint8(2), 3]):  # fmt: skip
        np.testing.assert_array_equal(m.prefill(prompt, m.new_cache(3)), want)


@pytest.mark.parametrize(
    "changes", [{"n_layers": 3}, {"n_kv_heads": 4}, {"head_dim": 4}, {"n_layers": 1}]
)
def test_a_cache_of_another_geometry_is_refused(changes):
    m, other = model(), model(**changes)
    cache = other.new_cache(8)
    for call in (lambda: m.prefill([1, 2], cache), lambda: m.decode_step(1, cache)):
        with refused(cache, lk.ShapeError, "need 2 layers with 2 heads of 8; use new_cache"):
            call()


def test_a_cache_without_storage_is_refused():
    m = model()
    cache = m.new_cache(8)
    cache.clear()
    bare = lk.KvCache.with_dims(2, 2, 8)
    for empty, words in ((cache, ("a cleared cache", "reset()")), (bare, ("without storage",))):
        for call in (lambda c: m.decode_step(1, c), lambda c: m.prefill([1], c)):
            with refused(empty, lk.GraphError, *words):
                call(empty)


UNUSABLE = ["bool", "i8", "u8", "i32", "u32", "i64", "f8_e4m3", "f8_e5m2", "f64"]


@pytest.mark.parametrize("dtype", UNUSABLE)
def test_a_cache_that_attention_cannot_read_is_refused(dtype):
    m = model()
    cache = lk.KvCache.with_capacity(2, 2, 8, 8, dtype)
    for call in (lambda: m.decode_step(1, cache), lambda: m.prefill([1], cache)):
        with refused(cache, lk.DTypeError, f"got rows of {dtype}, need f32, f16 or bf16"):
            call()


@pytest.mark.parametrize("dtype", UNUSABLE)
@pytest.mark.parametrize("verb", ["new_cache", "full_cache", "new_pool"])
def test_no_rows_are_made_that_attention_cannot_read(verb, dtype):
    made = lk.stats().allocations
    with pytest.raises(lk.DTypeError, match=f"{verb}: got rows of {dtype}, need f32, f16 or bf16"):
        getattr(model(), verb)(8, dtype=dtype)
    assert lk.stats().allocations == made


@pytest.mark.parametrize("window", [None, 4])
def test_an_open_step_is_not_dropped(window):
    """Its rows would be at the same place as those of the prompt."""
    m = model(sliding_window=window)
    cache = m.new_cache(8)
    row = np.ones((1, 2, 1, 8), np.float32)
    cache.append(0, row, row)
    for call in (
        lambda: m.prefill([1, 2], cache), lambda: m.decode_step(1, cache),
        lambda: m.score([1, 2], cache), lambda: speculate(m, [1], PromptLookup(), cache=cache),
    ):  # fmt: skip
        with refused(cache, lk.GraphError, "got an open step of 1 rows", "abort_step()"):
            call()
    cache.append(1, row, row)
    assert len(cache) == 1
    m.decode_step(1, cache)
    assert len(cache) == 2


@pytest.mark.parametrize("failing", range(3))
def test_a_prefill_that_fails_midway_restores_the_length(monkeypatch, failing):
    m, tokens = model(), ids(7)
    cache, twin = m.new_cache(16), m.new_cache(16)
    for c in (cache, twin):
        m.prefill([5, 6], c)
    real, seen = lk.DecodeSession.step, []

    def step(self, data, env=None):
        seen.append(len(data["ids"]))
        if len(seen) == failing + 1:
            raise KeyboardInterrupt
        return real(self, data, env)

    with monkeypatch.context() as patch:
        patch.setattr(lk.DecodeSession, "step", step)
        with pytest.raises(KeyboardInterrupt):
            m.prefill(tokens, cache)
    assert seen == [4, 2, 1][: failing + 1]
    assert len(cache) == 2
    np.testing.assert_array_equal(m.prefill(tokens, cache), m.prefill(tokens, twin))


def test_a_bad_id_inside_the_plan_leaves_the_cache_as_it_was():
    m = model()
    cache, twin = m.new_cache(8), m.new_cache(8)
    for c in (cache, twin):
        m.prefill([5, 6], c)
        m.decode_step(7, c)
    session = m.session_for(cache)
    (pos,) = session.plan.symbols
    cos, sin = RopeTable(m.config).rows(3, 1)
    for bad in (37, -1, 2**40):
        feed = {"ids": np.array([bad]), "cos": cos, "sin": sin}
        with refused(cache, lk.RangeError, str(bad)):
            session.step(feed, {pos: 3})
    np.testing.assert_array_equal(m.decode_step(1, cache), m.decode_step(1, twin))


def test_a_model_without_vocabulary_or_template_says_so():
    m = model()
    with pytest.raises(lk.ModelFormatError, match="no vocabulary"):
        _ = m.tokenizer
    with pytest.raises(lk.ModelFormatError, match="no chat template"):
        m.chat_prompt([])
    assert "2 layers" in repr(m)


def test_weights_are_shared_and_never_written():
    m = model(tied_head=True)
    before = m.weights.head.to_numpy()
    assert m.weights.embedding is None
    a, b = m.new_cache(8), m.new_cache(8)
    m.prefill(ids(5), a)
    m.prefill(ids(5), b)
    np.testing.assert_array_equal(m.weights.head.to_numpy(), before)
    assert m.weights.head.frozen
    assert m.weights.nbytes == sum(
        s.nbytes
        for s in (m.weights.head, m.weights.norm,
                  *(getattr(w, n) for w in m.weights.layers for n in w.__slots__))
    )  # fmt: skip
    assert state(a)["slots"][0, "k"][3] == state(b)["slots"][0, "k"][3]


@pytest.mark.parametrize("place", ["cpu", "sim:0"])
def test_raising_the_epoch_takes_the_new_weights(place):
    m, other = model(), model(seed=7)
    cache = m.new_cache(16, device=place)
    m.prefill(ids(5), cache)
    m.weights, m.weights_epoch = other.weights, m.weights_epoch + 1
    cache.reset()
    want = other.prefill(ids(5), other.new_cache(16, device=place))
    assert m.prefill(ids(5), cache).tolist() == want.tolist()
