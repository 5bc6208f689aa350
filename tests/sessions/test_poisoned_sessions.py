"""Held plans under debug poison: the same results, and no unwritten row is attended to."""

import os
import subprocess
import sys

import numpy as np
import pytest
from kv_state import append_rows, refused, rows
from steps import attention_step, data, run

import lazykv as lk
from lazykv import config


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setattr(config, "POISON", True)


@pytest.fixture(params=["cpu", "sim:0"])
def cache(request) -> lk.KvCache:
    return lk.KvCache.with_capacity(2, 2, 4, 8, "f32", request.param)


def test_rows_that_a_plan_writes_are_known(cache):
    step = attention_step(cache)
    session = step.session(cache)
    for token in range(8):
        run(session, step, cache, data(step, token))
    assert cache.live(1)[0][0, 0, :, 0].tolist() == list(range(8))


def test_a_step_that_reads_an_unwritten_row_is_refused_before_it_runs(cache):
    step = attention_step(cache)
    session = step.session(cache)
    run(session, step, cache, data(step, 1))
    cache.cached_len = 4
    with refused(cache, lk.RangeError, "attention", "row 1 of KvCache layer 0, K"):
        session.step(data(step, 2), {step.pos: 4})
    for slot in (0, 1):
        cache.write_bytes(0, slot, 1, 3, rows([5, 5, 5]))
    with refused(cache, lk.RangeError, "attention", "row 1 of KvCache layer 1, K"):
        session.step(data(step, 2), {step.pos: 4})
    for slot in (0, 1):
        cache.write_bytes(1, slot, 1, 3, rows([5, 5, 5]))
    out = session.step(data(step, 4), {step.pos: 4})
    assert np.unique(out).tolist() == [2 * (1 + 3 * 5 + 4) / 5]


def test_what_a_refused_step_would_have_written_is_not_known(cache):
    step = attention_step(cache)
    session = step.session(cache)
    with refused(cache, lk.RangeError, "row 0 of KvCache layer 0, K"):
        session.step(data(step, 2), {step.pos: 3})
    append_rows(cache, [1, 2, 3])
    cache.cached_len = 4
    with refused(cache, lk.RangeError, "row 3 of KvCache layer 0, K"):
        cache.live(0)


def test_a_rebound_plan_watches_its_new_cache(cache):
    other = lk.KvCache.with_capacity(2, 2, 4, 8, "f32", cache.device_location())
    step = attention_step(cache)
    session = step.session(cache)
    for token in range(3):
        run(session, step, cache, data(step, token))
    assert session.rebind_kv(other) is None
    with refused(other, lk.RangeError, "row 0 of KvCache layer 0, K"):
        session.step(data(step, 1), {step.pos: 3})
    run(session, step, other, data(step, 1))
    assert session.rebind_kv(cache) is None
    run(session, step, cache, data(step, 3))
    assert cache.live(0)[0][0, 0, :, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("window", "first"), [(None, 0), (2, 2), (9, 0)])
def test_a_window_needs_only_its_own_rows(cache, window, first):
    g, pos = lk.Graph(), lk.Sym("pos", 0, 7)
    q, new = (g.placeholder((1, 2, 1, 4), "f32", name) for name in ("q", "new"))
    k, v = (g.placeholder((1, 2, 8, 4), "f32", name) for name in "kv")
    k_all, v_all = (dest.at[:, :, pos : pos + 1].set(new) for dest in (k, v))
    target = lk.attention(q, k_all, v_all, length=pos + 1, window=window)
    plan = lk.plan(target, {k: cache.slot_storage(1, 0), v: cache.slot_storage(1, 1)})
    one = np.ones((1, 2, 1, 4), np.float32)
    feed = {q: one, new: one}
    for start in range(3, 0, -1):
        for slot in (0, 1):
            cache.write_bytes(1, slot, start, 1, one)
    if first == 0:
        with refused(cache, lk.RangeError, "row 0 of KvCache layer 1, K"):
            plan.run(feed, {pos: 3})
        for slot in (0, 1):
            cache.write_bytes(1, slot, 0, 1, one)
    assert (plan.run(feed, {pos: 3}) == 1).all()


@pytest.mark.parametrize("place", ["cpu", "sim:0"])
def test_rows_of_a_latent_cache_are_watched_too(place):
    cache = lk.LatentKvCache.with_capacity(2, 8, [(4,), (2,)], "f32", place)
    g, pos = lk.Graph(), lk.Sym("pos", 0, 7)
    widths = (4, 2)
    queries = [g.placeholder((1, 3, 1, n), "f32") for n in widths]
    slots = [g.placeholder((8, n), "f32") for n in widths]
    written = [s.at[pos : pos + 1].set(g.const(np.ones((1, s.shape[1]), "f4"))) for s in slots]
    target = lk.latent_attention(*queries, *written, scale=1.0, length=pos + 1)
    plan = lk.plan(target, {s: cache.slot_storage(1, n) for n, s in enumerate(slots)})
    feed = {q: np.zeros(q.shape, np.float32) for q in queries}
    with pytest.raises(lk.RangeError, match="row 0 of LatentKvCache layer 1, slot 0"):
        plan.run(feed, {pos: 1})
    for at in range(2):
        assert (plan.run(feed, {pos: at}) == 1).all()
    cache.cached_len = 2
    assert (cache.live(1)[0] == 1).all()


DECODE = """
import hashlib, sys
import numpy as np
import lazykv as lk
from lazykv.models.config import LlamaConfig
from lazykv.models.model import LlamaModel
from lazykv.models.weights import random_weights

config = LlamaConfig(
    architecture="llama", vocab_size=48, hidden_size=16, intermediate_size=24, n_layers=2,
    n_heads=4, n_kv_heads=2, head_dim=4, rms_eps=1e-5, rope_theta=100.0, rope_scaling=None,
    rope_interleaved=True, context_length=64, tied_head=True,
)
model = LlamaModel(config, random_weights(config, 3, 0.4))
digest = hashlib.sha256()
for place in ("cpu", "sim:0", ["sim:0", "sim:1"]):
    for dtype in ("f32", "bf16", "f16"):
        cache = model.new_cache(32, dtype, place)
        logits = model.prefill(range(1, 12), cache)
        for _ in range(8):
            digest.update(logits.tobytes())
            logits = model.decode_step(int(logits.argmax()), cache)
        cache.truncate_to(14)
        digest.update(model.score([1, 2, 3], cache).tobytes())
        cache.repeat(3)
        cache.reorder([2, 0, 1])
        cache.grow(40)
        digest.update(model.decode_step([4, 5, 6], cache).tobytes())
        digest.update(cache.live(1)[0].tobytes())
assert (lk.Storage.allocate((1,), "u8").to_numpy()[0] == 255) or sys.argv[1] == "0"
print(digest.hexdigest())
"""


def test_a_model_decodes_the_same_to_the_bit():
    results = []
    for on in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", DECODE, on], env={**os.environ, "LAZYKV_POISON": on},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        results.append(done.stdout)
    assert results[0] == results[1] != ""
