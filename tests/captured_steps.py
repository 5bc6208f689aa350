"""What tests of captured sessions do on every backend that captures."""

from typing import Any

import numpy as np
from small_llama import CONFIG

import lazykv as lk
from lazykv.models.model import LlamaModel
from lazykv.sessions.captured import CapturedDecodeSession


def session_of(model: LlamaModel, cache: lk.KvCache, kind: Any = lk.DecodeSession) -> Any:
    """A session of single tokens, whose position is bound data, where the cache lies."""
    step = model.step_graph(cache)
    return kind.build(
        lk.InferenceContext(cache.device_location()), step.logits, kv=cache,
        kv_nodes=step.kv_nodes, bound=step.bound, model_key=model.model_key,
    )  # fmt: skip


def token(
    model: LlamaModel, session: Any, cache: lk.KvCache, value: int, start: int | None = None
) -> np.ndarray:
    """Step on one token, at the cache's length or at `start`."""
    at = cache.cached_len if start is None else start
    cos, sin = model.rope.rows(at, 1)
    data = {"ids": np.array([value]), "cos": cos, "sin": sin, "position": np.array(at)}
    out = session.step(data)
    if start is None:
        cache.cached_len = at + 1
    return out


def check_replays(model: LlamaModel, place: Any, tokens: int, capacity: int) -> None:
    """A captured session against a plain one on caches of its own, bit for bit, through truncates,
    re-binds to another cache, and caches that were cleared and made anew."""
    rng, at, switches = np.random.default_rng(0), 0, 0

    def new() -> lk.KvCache:
        return model.new_cache(capacity, device=place)

    caches = [[new(), new()] for _ in range(2)]
    plain = session_of(model, caches[0][0])
    held = session_of(model, caches[1][0], CapturedDecodeSession)
    for n in range(tokens):
        if n % 31 == 30 or len(caches[0][at]) == capacity:
            switches, left, at = switches + 1, at, 1 - at
            for row, session in zip(caches, (plain, held), strict=True):
                row[at].reset()
                assert session.rebind_kv(row[at]) is None
                if switches % 2:
                    row[left].clear()
                    row[left] = new()
            assert not held.captured
        elif n % 13 == 12:
            for row in caches:
                row[at].truncate_to(len(row[at]) // 2)
        value = int(rng.integers(CONFIG.vocab_size))
        want = token(model, plain, caches[0][at], value)
        assert want.tobytes() == token(model, held, caches[1][at], value).tobytes(), n
    assert held.captures == held.rebind_count + 1 == switches + 1 > 3
    assert held.replays == tokens - held.captures * CapturedDecodeSession.warmup


def paged_logits(model: LlamaModel, place: Any) -> tuple[np.ndarray, lk.models.PagedDecoder]:
    """Two ragged sequences through growth, a truncate and a fork; and what ran them."""
    pool = model.new_pool(12, 4, device=place)
    decoder = lk.models.PagedDecoder(model, pool, max_batch=2)
    sessions = [pool.open() for _ in range(2)]
    for n, s in enumerate(sessions):
        decoder.prefill(s, [1 + n] * (3 + n))
    logits = [decoder.decode(sessions, [n, n + 1]) for n in range(8)]
    pool.truncate(sessions[0], 5)
    sessions[1] = pool.fork(sessions[0])
    logits += [decoder.decode(sessions, [n, n]) for n in range(4)]
    return np.stack(logits), decoder


def check_paged(model: LlamaModel, place: Any, tolerance: float) -> None:
    """Paged steps are captured, once, and give what the host gives."""
    want, _ = paged_logits(model, "cpu")
    got, decoder = paged_logits(model, place)
    held: Any = decoder.session_for(2)._held
    assert (held.captures, held.replays) == (1, 11)
    np.testing.assert_allclose(want, got, rtol=tolerance, atol=tolerance)
