"""Requests with what `lk.generate` gives each of them on its own, in a contiguous cache."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

import lazykv as lk
from lazykv.models.sampling import Sampler
from lazykv.serving import Engine, Request


@dataclass(frozen=True)
class Ask:
    """A prompt, the arguments of `generate`, and the pieces they give."""

    prompt: tuple[int, ...]
    options: dict[str, Any]
    pieces: tuple[lk.models.Piece, ...]

    @property
    def ids(self) -> list[int]:
        return [p.id for p in self.pieces]

    def submit(self, engine: Engine, **more: Any) -> Request:
        return engine.submit(self.prompt, **self.options, **more)

    def check(self, request: Request) -> None:
        """The request ended with exactly what it gets alone."""
        assert plain(request.pieces) == plain(self.pieces)
        assert request.finish_reason == self.pieces[-1].finish_reason
        assert request.state is lk.serving.RequestState.FINISHED
        assert (request.tokens, request.text) == (self.ids, "".join(self.pieces))
        assert request.prompt == self.prompt
        assert request.error is None


def plain(pieces) -> list[tuple[str, int, str | None]]:
    return [(str(p), p.id, p.finish_reason) for p in pieces]


_caches: dict[int, lk.KvCache] = {}


def empty_cache(model) -> lk.KvCache:
    """One for all solo runs of a model, so that they share its plans."""
    if model.instance_id not in _caches:
        _caches[model.instance_id] = model.new_cache(model.config.context_length)
    _caches[model.instance_id].reset()
    return _caches[model.instance_id]


def alone(model, prompt, **options) -> Ask:
    prompt = tuple(int(t) for t in prompt)
    pieces = lk.generate(model, prompt, **options, cache=empty_cache(model))
    return Ask(prompt, options, tuple(pieces))


def ask(model, prompt, **options) -> Ask:
    found = alone(model, prompt, **options)
    assert is_sure(model, found), "a near tie decides; take other numbers"
    return found


def random_asks(model, n: int, seed: int, longest: int = 30, budget: int = 16) -> list[Ask]:
    """Greedy and sampled ones, none of which hangs on a near tie."""
    rng, found = np.random.default_rng(seed), []
    while len(found) < n:
        prompt = rng.integers(3, 9, rng.integers(1, longest + 1))
        options: dict[str, Any] = {"max_new_tokens": int(rng.integers(1, budget + 1))}
        if rng.integers(2):
            options |= {"temperature": 3.0, "seed": int(rng.integers(1000))}
            options |= [{}, {"top_k": 5}, {"top_p": 0.9}][int(rng.integers(3))]
        candidate = alone(model, prompt, **options)
        if is_sure(model, candidate):
            found.append(candidate)
    return found


def is_sure(model, a: Ask) -> bool:
    """Whether every token is chosen again from logits off by much more than rounding."""
    rng = np.random.default_rng(0)
    options = {k: v for k, v in a.options.items() if k not in ("max_new_tokens", "stop")}
    sampler, cache = Sampler(**options), empty_cache(model)
    logits = model.prefill(a.prompt, cache)
    for token in a.ids:
        for _ in range(4):
            off = rng.standard_normal(logits.shape) * 3e-4 * logits.std()
            if deepcopy(sampler)(logits + off) != token:
                return False
        assert sampler(logits) == token
        logits = model.decode_step(token, cache)
    return True


def finish(engine: Engine, rounds: int = 2000) -> list[lk.serving.StepReport]:
    """Every round until all is done; the pool is whole after each."""
    reports = []
    while not engine.idle:
        reports.append(engine.step())
        engine.pool.check()
        assert len(reports) < rounds
    check_nothing_left(engine)
    return reports


def check_nothing_left(engine: Engine) -> None:
    pool = engine.pool
    assert pool.free_blocks() == pool.capacity()
    assert pool.kv_bytes_resident() == 0
    assert not pool._sequences
    assert not pool._pins
    if isinstance(pool.store, lk.MemoryBlockStore):
        assert pool.store.keys() == []
