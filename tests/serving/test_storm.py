"""A storm: hundreds of requests over a pool of a quarter of what a batch needs, with cancellations,
and with allocations, kernels and stores that fail at random."""

import os
from contextlib import contextmanager

import numpy as np
import pytest
from faults import BrittleStore, Faulty
from solo import check_nothing_left, random_asks
from toy_backends import registered

import lazykv as lk
from lazykv.ops.paged_attention import PagedAttention
from lazykv.serving import (
    Decision,
    Engine,
    RequestState,
    View,
    first_come_first_served,
)

REQUESTS = int(os.environ.get("LAZYKV_STORM_REQUESTS", "500"))
SEED = int(os.environ.get("LAZYKV_STORM_SEED", "0"))
BATCH, BLOCKS, SIZE, CHUNK = 8, 12, 4, 16
BUCKETS = {(n, 1) for n in (1, 2, 4, 8)} | {(1, n) for n in (2, 4, 8, 16)}


class Weather:
    """What goes wrong, and how often."""

    def __init__(self, rng, backend, store, pool) -> None:
        self.rng, self.backend, self.store = rng, backend, store
        self.refused = 0
        self._honest = pool._take
        pool._take = self._take

    def change(self) -> None:
        """Before every round."""
        self.store.refuse = {
            fault for fault in ("put", "get", "whole", "delete") if self.rng.random() < 0.15
        }
        self.backend.failures = int(self.rng.random() < 0.03)

    def _take(self, n):
        if n and self.rng.random() < 0.02:
            self.refused += 1
            raise lk.OutOfMemory("take: got no memory, need some")
        return self._honest(n)


class Moody:
    """A policy that decides by chance whom to admit, whom to preempt, and who gives way."""

    def __init__(self, rng) -> None:
        self.rng = rng

    def __call__(self, view: View) -> Decision:
        running = [r.id for r in view.running]
        if view.blocks_short:
            return Decision(preempt=(running[self.rng.integers(len(running))],))
        line = [r.id for r in (*view.waiting[:BATCH], *view.preempted)]
        self.rng.shuffle(line)
        preempt = tuple(id for id in running if line and self.rng.random() < 0.02)
        room = BATCH - len(running) + len(preempt)
        return Decision(admit=tuple(line[:room]), preempt=preempt)


@contextmanager
def stormy_engine(model, policy):
    backend, store = Faulty(PagedAttention), BrittleStore()
    with registered(backend):
        pool = model.new_pool(BLOCKS, SIZE, device="faulty:0", store=store)
        engine = Engine(model, pool, max_batch=BATCH, max_chunk=CHUNK, policy=policy)
        yield engine, backend, store


def storm(engine, asks, weather, rng):
    """Requests as they come and go: every ask with its request."""
    sent, rounds = [], 0
    while len(sent) < REQUESTS or not engine.idle:
        weather.change()
        for _ in range(int(rng.integers(0, 4))):
            if len(sent) < REQUESTS:
                a = asks[int(rng.integers(len(asks)))]
                sent.append((a, a.submit(engine)))
        for _, request in sent[-40:]:
            if rng.random() < 0.002:
                request.cancel()
        engine.step()
        engine.pool.check()
        rounds += 1
        assert rounds < 40 * REQUESTS
    return sent


@pytest.mark.parametrize("fair", [True, False])
def test_everyone_who_finishes_has_the_right_tokens(model, fair):
    print(f"LAZYKV_STORM_SEED={SEED} LAZYKV_STORM_REQUESTS={REQUESTS}")
    rng = np.random.default_rng(SEED)
    asks = random_asks(model, 60, seed=SEED)
    needs = [-(-(len(a.prompt) + len(a.ids) - 1) // SIZE) for a in asks]
    assert max(needs) <= BLOCKS
    assert np.mean(needs) * BATCH >= 4 * BLOCKS * 0.9
    policy = first_come_first_served if fair else Moody(rng)
    with stormy_engine(model, policy) as (engine, backend, store):
        weather = Weather(rng, backend, store, engine.pool)
        before = lk.stats().plans_built
        sent = storm(engine, asks, weather, rng)
        built = lk.stats().plans_built - before
        check_requests(sent)
        assert weather.refused > REQUESTS / 50
        # What a store would not delete at once is deleted with the next that is.
        store.refuse = set()
        engine.pool._evicted.forget(())
        check_nothing_left(engine)
    # A plan for each bucket, and three that copy, read and write blocks.
    assert {(plan.batch, plan.seq) for plan in engine.decoder.plans} <= BUCKETS
    assert built <= len(BUCKETS) + 3


def check_requests(sent) -> None:
    for a, request in sent:
        assert request.ended
        if request.state is RequestState.FINISHED:
            a.check(request)
        else:
            assert request.tokens == a.ids[: len(request.pieces)]
    states = [r.state for _, r in sent]
    assert states.count(RequestState.FINISHED) > 0.8 * REQUESTS
    assert states.count(RequestState.CANCELLED) > 0
    # Every kind of trouble was met.
    counts = {
        name: sum(getattr(r, name) for _, r in sent)
        for name in ("preemptions", "recomputations", "tokens_found")
    }
    assert min(counts.values()) > REQUESTS / 50, counts
