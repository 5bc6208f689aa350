"""MlaModel: latent attention through LatentKvCache and DecodeSession, against expanded float64."""

from typing import Any

import numpy as np
import pytest
from latent_state import refused
from mla_oracle import config, forward, model
from toy_backends import Primitive, registered

import lazykv as lk
from lazykv.models import mla
from lazykv.models.mla import MlaModel, build_step


def ids(n: int, seed: int = 0, vocab: int = 37) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab, n)]


def one_by_one(m: MlaModel, tokens: list[int], cache: lk.LatentKvCache) -> np.ndarray:
    return np.array([m.decode_step(t, cache) for t in tokens])


def close(got: Any, want: Any, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_heads": 1, "n_layers": 1},
        {"n_heads": 8, "kv_lora_rank": 5},
        {"kv_lora_rank": 1, "qk_rope_head_dim": 2, "qk_nope_head_dim": 1, "v_head_dim": 1},
        {"qk_rope_head_dim": 12, "qk_nope_head_dim": 4, "v_head_dim": 9},
        {"n_layers": 3, "intermediate_size": 7, "rms_eps": 0.1, "rope_theta": 1e4},
    ],
    ids=str,
)
def test_every_shape_of_model_against_expanded_keys_and_values(changes: dict[str, Any]) -> None:
    m, tokens = model(seed=3, **changes), ids(11, seed=5)
    want = forward(m.config, m.weights, tokens)
    close(one_by_one(m, tokens, m.new_cache(12)), want)
    for n in (1, 2, 7, 11):
        cache = m.new_cache(12)
        close(m.prefill(tokens[:n], cache), want[n - 1])
        assert len(cache) == n
        if n < 11:
            close(one_by_one(m, tokens[n:], cache), want[n:])


@pytest.mark.parametrize("n", [1, 3, 8, 9, 16, 17, 31, 33, 47])
def test_prompts_in_chunks(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "MAX_CHUNK", 16)
    m, tokens = model(), ids(47, seed=2)
    want = forward(m.config, m.weights, tokens)
    cache = m.new_cache(n)
    close(m.prefill(tokens[:n], cache), want[n - 1])
    # A prompt in two calls continues where the first one ended.
    for cut in {1, n // 3, n // 2, n - 1} - {0, n}:
        cache.reset()
        close(m.prefill(tokens[:cut], cache), want[cut - 1])
        close(m.prefill(tokens[cut:n], cache), want[n - 1])


def test_the_cache_holds_what_the_paper_says() -> None:
    """Per token one normalized latent and one rotated key, whatever the number of heads."""
    m, tokens = model(seed=4, n_heads=8), ids(6)
    cache = m.new_cache(8)
    m.prefill(tokens, cache)
    assert cache.slot_trailing == ((10,), (4,))
    assert [v.shape for v in cache.live(0)] == [(6, 10), (6, 4)]
    first = m.weights.layers[0]
    gains = first.latent_norm.to_numpy()
    np.testing.assert_allclose(np.square(cache.live(0)[0] / gains).mean(1), 1, rtol=1e-3)
    # Rotation by position keeps a key's length, and position 0 is not rotated.
    x = m.weights.embedding.to_numpy()[tokens[0]].astype(np.float64)
    x = x / np.sqrt((x * x).mean() + m.config.rms_eps) * first.attn_norm.to_numpy()
    np.testing.assert_allclose(cache.live(0)[1][0], (x @ first.down.to_numpy())[-4:], rtol=1e-4)
    want = lk.LatentKvCache.footprint(2, 8, [(10,), (4,)], "f32")
    assert (
        want
        == 2 * 8 * 14 * 4
        == sum(cache.slot_storage(i, s).nbytes for i in (0, 1) for s in (0, 1))
    )


def test_nothing_is_planned_after_the_first_token() -> None:
    m, tokens = model(), ids(32)
    cache = m.new_cache(32)
    m.decode_step(tokens[0], cache)
    session, before = m.session_for(cache), lk.stats()
    plan, nodes = session.plan.id, session.node_count
    for token in tokens[1:]:
        m.decode_step(token, cache)
    after = lk.stats()
    assert (after.plans_built, after.plan_cache_hits, after.allocations) == (
        before.plans_built, before.plan_cache_hits, before.allocations,
    )  # fmt: skip
    assert m.session_for(cache) is session
    assert (session.plan.id, session.node_count, session.realize_count) == (plan, nodes, 32)
    assert [cache.slot_version(i, s) for i in (0, 1) for s in (0, 1)] == [32] * 4
    fused = [s.op.name for s in session.plan.steps if "attention" in s.op.name]
    assert fused == ["latent_attention"] * 2


def test_held_results_are_those_of_planning_every_token() -> None:
    m, tokens = model(), ids(9, seed=7)
    held, other = m.new_cache(9), m.new_cache(9)
    for token in tokens:
        want = m.decode_step(token, other)
        other.held.clear()
        np.testing.assert_array_equal(m.decode_step(token, held), want)
    assert [v.tobytes() for v in held.live(1)] == [v.tobytes() for v in other.live(1)]


def test_truncated_drafts_leave_no_trace_and_keep_the_plan_A3() -> None:
    m, tokens = model(), ids(12, seed=8)
    cache = m.new_cache(16)
    want = one_by_one(m, tokens, cache)
    cache.reset()
    m.prefill(tokens[:5], cache)
    m.decode_step(tokens[5], cache)
    session = m.session_for(cache)
    for draft in (3, 4, 5):
        m.decode_step(draft, cache)
    cache.truncate_to(6)
    close(one_by_one(m, tokens[6:], cache), want[6:], 1e-5)
    assert m.session_for(cache) is session


def test_C1_a_reset_cache_decodes_like_a_new_one() -> None:
    m = model()
    cache, fresh = m.new_cache(8), m.new_cache(8)
    one_by_one(m, ids(8, seed=1), cache)
    versions = [cache.slot_version(0, 0), cache.slot_storage(0, 0).version]
    cache.reset()
    a, b = one_by_one(m, ids(3, seed=2), cache), one_by_one(m, ids(3, seed=2), fresh)
    np.testing.assert_array_equal(a, b)
    assert len(cache) == 3
    assert [v.tobytes() for v in cache.live(0)] == [v.tobytes() for v in fresh.live(0)]
    assert [cache.slot_version(0, 0), cache.slot_storage(0, 0).version] > versions


def test_growing_keeps_rows_and_plans_again_once() -> None:
    m, tokens = model(), ids(10, seed=9)
    cache = m.new_cache(4)
    want = forward(m.config, m.weights, tokens)
    close(one_by_one(m, tokens[:4], cache), want[:4])
    old = m.session_for(cache)
    cache.grow(10)
    assert old.validity_for(cache, model_key=m.model_key) is lk.PlanValidity.Stale
    close(one_by_one(m, tokens[4:], cache), want[4:])
    assert m.session_for(cache).realize_count == 6


@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", 6e-3), ("bf16", 5e-2)])
def test_narrow_caches_within_their_rounding(dtype: str, tolerance: float) -> None:
    m, tokens = model(seed=1), ids(16, seed=1)
    want = forward(m.config, m.weights, tokens)
    cache = m.new_cache(16, dtype=dtype)
    close(m.prefill(tokens[:9], cache), want[8], tolerance)
    close(one_by_one(m, tokens[9:], cache), want[9:], tolerance)
    assert np.abs(one_by_one(m, tokens, m.new_cache(16)) - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("device", ["sim:0", ["sim:0", "sim:1"], ["cpu", "sim:1"]], ids=str)
def test_layers_elsewhere_give_the_same_logits(device: Any) -> None:
    m, tokens = model(), ids(9, seed=3)
    here = m.new_cache(9)
    there = lk.LatentKvCache.with_capacity(2, 9, m.config.slot_trailing, "f32", device)
    np.testing.assert_array_equal(m.prefill(tokens[:6], there), m.prefill(tokens[:6], here))
    for t in tokens[6:]:
        np.testing.assert_array_equal(m.decode_step(t, there), m.decode_step(t, here))
    plans = lk.stats().plans_built
    there.truncate_to(6)
    m.decode_step(tokens[6], there)
    assert lk.stats().plans_built == plans


def test_one_models_plan_is_never_run_for_another() -> None:
    a, b = model(seed=1), model(seed=2)
    cache = a.new_cache(8)
    a.decode_step(3, cache)
    session = a.session_for(cache)
    assert session.validity_for(cache, model_key=a.model_key) is lk.PlanValidity.Valid
    assert session.validity_for(cache, model_key=b.model_key) is lk.PlanValidity.Stale
    cache.reset()
    close(b.decode_step(3, cache), forward(b.config, b.weights, [3])[0])


def test_rope_frequencies_are_bound_and_not_baked() -> None:
    m = model()
    session = m.session_for(m.new_cache(4))
    assert {"ids", "cos", "sin"} <= set(session.manifest.bound)
    assert 100.0 not in m.model_key[-1]


# Refusals


def test_tokens_and_room_are_checked_before_anything_is_written() -> None:
    m = model()
    cache = m.new_cache(4)
    m.prefill([1, 2, 3], cache)
    with refused(cache, lk.ShapeError, "prefill", "empty prompt"):
        m.prefill([], cache)
    with refused(cache, lk.RangeError, "got token 37, need 0 <= token < 37"):
        m.prefill([1, 37], cache)
    with refused(cache, lk.RangeError, "got token -1"):
        m.decode_step(-1, cache)
    with refused(cache, lk.DTypeError, "got token 1.5"):
        m.decode_step(1.5, cache)
    with refused(cache, lk.RangeError, "got 2 tokens at length 3, need 5 <= capacity 4"):
        m.prefill([1, 2], cache)
    m.decode_step(1, cache)
    with refused(cache, lk.RangeError, "got 1 tokens at length 4, need 5 <= capacity 4"):
        m.decode_step(1, cache)


def test_caches_of_another_geometry_are_refused() -> None:
    m = model()
    for layers, trailing in ((1, [(10,), (4,)]), (2, [(4,), (10,)]), (2, [(14,)])):
        cache = lk.LatentKvCache.with_capacity(layers, 4, trailing, "f32")
        with refused(cache, lk.ShapeError, "need 2 layers with rows ((10,), (4,)); use new_cache"):
            m.decode_step(1, cache)
    cleared = m.new_cache(4)
    cleared.clear()
    with refused(cleared, lk.GraphError, "decode_step: got a cleared cache", "reset()"):
        m.decode_step(1, cleared)


def test_an_open_step_is_not_dropped() -> None:
    m = model()
    cache = m.new_cache(8)
    row = [np.ones((1, 10), np.float32), np.ones((1, 4), np.float32)]
    cache.append(0, *row)
    for call in (lambda: m.prefill([1, 2], cache), lambda: m.decode_step(1, cache)):
        with refused(cache, lk.GraphError, "got an open step of 1 rows", "abort_step()"):
            call()
    cache.append(1, *row)
    m.decode_step(1, cache)
    assert len(cache) == 2


@pytest.mark.parametrize("dtype", ["bool", "i8", "i64", "f8_e4m3", "f8_e5m2", "f64"])
def test_rows_that_attention_cannot_read_are_refused(dtype: str) -> None:
    m, made = model(), lk.stats().allocations
    with pytest.raises(lk.DTypeError, match=f"new_cache: got rows of {dtype}, need f32, f16 or"):
        m.new_cache(8, dtype)
    assert lk.stats().allocations == made
    cache = lk.LatentKvCache.with_capacity(2, 4, [(10,), (4,)], dtype)
    with refused(cache, lk.DTypeError, f"decode_step: got rows of {dtype}"):
        m.decode_step(1, cache)


def test_a_prompt_that_fails_midway_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model()
    cache = m.new_cache(16)
    m.prefill([1, 2], cache)
    real = MlaModel.session_for

    def fail_at_one(self: MlaModel, cache: lk.LatentKvCache, seq: int = 1) -> Any:
        if seq == 1:
            raise lk.OutOfMemory("no room for a plan")
        return real(self, cache, seq)

    monkeypatch.setattr(MlaModel, "session_for", fail_at_one)
    with pytest.raises(lk.OutOfMemory):
        m.prefill([1, 2, 3, 4, 5], cache)
    assert len(cache) == 2


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_layers", 0, "got n_layers 0, need a whole number >= 1"),
        ("kv_lora_rank", True, "got kv_lora_rank True"),
        ("n_heads", 2.0, "got n_heads 2.0"),
        ("qk_rope_head_dim", 3, "got qk_rope_head_dim 3, need an even number"),
        ("rms_eps", 0.0, "got rms_eps 0.0, need a finite float above 0"),
        ("rope_theta", float("nan"), "got rope_theta nan"),
    ],
)
def test_configurations_that_make_no_sense(field: str, value: Any, message: str) -> None:
    with pytest.raises(lk.ModelFormatError) as caught:
        config(**{field: value})
    assert message in str(caught.value)


def test_the_graph_lowers_to_primitives_with_the_same_logits() -> None:
    m = model()
    step = build_step(m.config, m.weights, seq=3, capacity=8, kv_dtype=lk.f32)
    (cos, sin), tokens = np.ones((2, 3, 2), np.float32) * [[[1]], [[0]]], np.array([1, 2, 3])
    zeros = {t: np.zeros(t.shape, np.float32) for pair in step.kv_nodes for t in pair}
    feed = {
        step.bound["ids"]: tokens,
        step.bound["cos"]: cos.astype(np.float32), step.bound["sin"]: sin.astype(np.float32),
    }  # fmt: skip
    want = lk.realize(step.logits, {**zeros, **feed}, {step.position: 0})
    with registered(Primitive()):
        got = lk.realize(step.logits, {**zeros, **feed}, {step.position: 0}, "primitive:0")
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
