"""Giving way: blocks stored and brought back byte for byte, or computed again where that fails."""

from dataclasses import replace

import numpy as np
import pytest
from faults import BrittleStore
from solo import ask, finish, random_asks

import lazykv as lk
from lazykv.serving import Decision, Engine, RequestState, first_come_first_served


def tokens(n: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 9, n)]


class Orders:
    """First come, first served, but for what a test orders for the next round."""

    def __init__(self) -> None:
        self.preempt: list = []
        self.hold: set = set()

    def __call__(self, view) -> Decision:
        decision = first_come_first_served(view)
        if view.blocks_short:
            return decision
        preempt, self.preempt = self.preempt, []
        admit = [id for id in decision.admit if id not in self.hold]
        return replace(decision, preempt=tuple(r.id for r in preempt), admit=tuple(admit))


def rows_of(engine, request) -> list[np.ndarray]:
    """Every live row of a running request, in order."""
    pool = engine.pool
    session = engine._queues.running[request.id].rows.session
    table, n = pool.session_block_table(session), pool.filled_tokens(session)
    return [
        np.concatenate([pool.read_block(layer, slot, b) for b in table])[:n]
        for layer in range(pool.n_layers())
        for slot in lk.KvSlot
    ]


def two_running(model, store=None):
    """An engine, its orders, and two requests of which the second is sampled."""
    orders = Orders()
    a = ask(model, tokens(11, 1), max_new_tokens=14)
    b = ask(model, tokens(9, 2), max_new_tokens=12, temperature=3.0, seed=4)
    engine = Engine(model, model.new_pool(40, 4, store=store), policy=orders)
    requests = a.submit(engine), b.submit(engine)
    engine.submit(tokens(2, 3), 40)  # somebody has to run
    for _ in range(3):
        engine.step()
    assert [len(r.pieces) for r in requests] == [4, 4]
    return engine, orders, (a, b), requests


def test_blocks_come_back_byte_for_byte_elsewhere(model):
    engine, orders, asks, (first, second) = two_running(model)
    before, held = rows_of(engine, second), engine.pool.kv_bytes_resident()
    orders.preempt, orders.hold = [second], {second.id}
    report = engine.step()
    assert (report.preempted, second.state) == ([second], RequestState.PREEMPTED)
    assert engine.pool.kv_bytes_resident() < held
    assert len(engine.pool.store.keys()) == 3
    others = engine.submit(tokens(14, 3), 20)  # takes the blocks that are free now
    engine.step()
    assert (len(first.pieces), len(second.pieces)) == (6, 4)
    orders.hold = set()
    taken = engine.pool.stats.blocks_restored
    report = engine.step()
    assert report.admitted == [second]
    assert engine.pool.stats.blocks_restored - taken == 3
    for was, now in zip(before, rows_of(engine, second), strict=True):
        np.testing.assert_array_equal(now[: len(was)], was)
        assert len(now) == len(was) + 1
    others.cancel()
    finish(engine)
    for a, request in zip(asks, (first, second), strict=True):
        a.check(request)
    assert (second.preemptions, second.recomputations) == (1, 0)
    assert [r.prefill_tokens for r in (first, second)] == [11, 9]


def test_preempted_within_its_prompt(model):
    orders = Orders()
    a = ask(model, tokens(30, 3), max_new_tokens=4)
    engine = Engine(model, model.new_pool(40, 4), max_chunk=8, policy=orders)
    other = engine.submit(tokens(3, 1), 30)
    request = a.submit(engine)
    engine.step()
    assert (request.prefill_tokens, request.pieces) == (5, [])
    orders.preempt, orders.hold = [request], {request.id}
    engine.step()
    assert request.state is RequestState.PREEMPTED
    orders.hold = set()
    finish(engine)
    a.check(request)
    assert (request.prefill_tokens, request.recomputations) == (30, 0)
    assert other.finish_reason == "length"


def test_the_youngest_gives_way_when_blocks_run_short(model):
    asks = [ask(model, tokens(8, n), max_new_tokens=16) for n in range(4)]
    engine = Engine(model, model.new_pool(14, 4), max_batch=4)
    requests = [a.submit(engine) for a in asks]
    gone = [r for report in finish(engine) for r in report.preempted]
    for a, request in zip(asks, requests, strict=True):
        a.check(request)
    assert requests[0].preemptions == 0
    assert gone
    assert gone[0] is requests[3]
    assert sum(r.recomputations for r in requests) == 0
    assert [r.prefill_tokens for r in requests] == [8] * 4


@pytest.mark.parametrize("refuse", ["put", "get", "whole"])
def test_a_store_that_fails_costs_a_recomputation_and_nothing_else(model, refuse):
    """The tokens so far stay, and the second request goes on with the draws that come next."""
    store = BrittleStore()
    engine, orders, asks, requests = two_running(model, store)
    store.refuse = {refuse}
    before = [r.tokens for r in requests]
    orders.preempt = list(requests)
    errors = []
    for _ in range(3):  # one that cannot be restored goes on a round later
        errors += engine.step().errors
    assert [type(e) for e in errors] == [lk.BlockStoreError] * 2
    assert [r.tokens[:4] for r in requests] == before
    finish(engine)
    for a, request in zip(asks, requests, strict=True):
        a.check(request)
        assert (request.preemptions, request.recomputations) == (1, 1)
    # Full blocks that the prompts and replies had are found again; the rest is run anew.
    assert [r.tokens_found for r in requests] == ([12, 12] if refuse == "put" else [8, 8])


def test_without_an_index_everything_is_computed_again(model):
    orders, store = Orders(), BrittleStore()
    a = ask(model, tokens(9, 2), max_new_tokens=12, temperature=3.0, seed=4)
    pool = model.new_pool(40, 4, store=store)
    engine = Engine(model, pool, policy=orders, prefix_cache=False)
    request = a.submit(engine)
    other = engine.submit(tokens(3, 1), 30)
    for _ in range(4):
        engine.step()
    store.refuse = {"put"}
    orders.preempt = [request]
    made = len(request.pieces)
    finish(engine)
    a.check(request)
    assert request.prefill_tokens == 9 + (9 + made)
    assert other.finish_reason == "length"


def test_blocks_shared_at_first_are_evicted_later(model):
    """Preempted while it shares four blocks; when the other ends they are its own, and leave the
    pool as soon as somebody needs the room. Both parts come back."""
    orders = Orders()
    shared = tokens(16, 7)
    a = ask(model, [*shared, 3, 4, 5], max_new_tokens=8)
    b = ask(model, [*shared, 5, 5, 5], max_new_tokens=8)
    big = ask(model, tokens(30, 8), max_new_tokens=7)
    engine = Engine(model, model.new_pool(10, 4), policy=orders)
    first, second = a.submit(engine), b.submit(engine)
    engine.step()
    assert second.tokens_found == 16
    orders.preempt, orders.hold = [second], {second.id}
    engine.step()
    job = engine._queues.preempted[second.id]
    assert (job.rows.missing, job.rows.held) == (1, 4)
    third = big.submit(engine)
    orders.hold = {second.id}
    while not third.ended:
        engine.step()
    assert (job.rows.missing, job.rows.held) == (5, 0)
    orders.hold = set()
    finish(engine)
    for x, request in zip((a, b, big), (first, second, third), strict=True):
        x.check(request)
    assert second.recomputations == 0


def test_what_the_preempted_hold_goes_before_anybody_gives_way(model):
    """As above, but with two that run: the room is found without preempting either of them."""
    orders = Orders()
    shared = tokens(16, 7)
    asks = [ask(model, [*shared, n, 4, 5], max_new_tokens=3 + 9 * (n == 4)) for n in (3, 4)]
    asks += [ask(model, tokens(7, n), max_new_tokens=12) for n in (8, 9)]
    engine = Engine(model, model.new_pool(13, 4), policy=orders)
    first, second, *others = (a.submit(engine) for a in asks)
    orders.hold = {r.id for r in others}
    engine.step()
    orders.preempt, orders.hold = [second], {second.id}
    while not all(r.ended for r in others):
        engine.step()
        if first.ended and second.id in engine._queues.preempted:
            held = engine._queues.preempted[second.id].rows.held
    assert held == 0
    assert [r.preemptions for r in (first, *others)] == [0, 0, 0]
    orders.hold = set()
    finish(engine)
    for a, request in zip(asks, (first, second, *others), strict=True):
        a.check(request)
    assert second.recomputations == 0


def test_one_that_goes_on_alone_gets_the_blocks_that_the_preempted_share(model):
    """Six blocks are to come back and five are free: of two others, which share five, one is
    forgotten."""
    orders = Orders()
    shared = tokens(20, 7)
    long = ask(model, tokens(23, 1), max_new_tokens=6)
    asks = [long, *(ask(model, [*shared, n], max_new_tokens=6) for n in (3, 4))]
    engine = Engine(model, model.new_pool(10, 4), policy=orders)
    requests = [a.submit(engine) for a in asks]
    orders.hold = {r.id for r in requests[1:]}
    engine.step()
    orders.preempt, orders.hold = requests[:1], {requests[0].id}
    engine.step()
    job = engine._queues.preempted[requests[0].id]
    assert job.rows.missing == 6
    orders.preempt, orders.hold = requests[1:], {r.id for r in requests[1:]}
    report = engine.step()
    assert report.preempted == requests[1:]
    assert report.admitted == requests[:1]
    assert engine.pool.free_blocks() >= 3
    orders.hold = set()
    finish(engine)
    for a, request in zip(asks, requests, strict=True):
        a.check(request)
    assert [r.recomputations for r in requests] in ([0, 0, 1], [0, 1, 0])


def test_blocks_that_only_the_preempted_share_are_given_up_last(model):
    """Two preempted requests hold the same blocks, so neither can store them: one is forgotten."""
    orders = Orders()
    shared = tokens(16, 7)
    asks = [ask(model, [*shared, n, 4, 5], max_new_tokens=8) for n in (3, 4)]
    big = ask(model, tokens(33, 8), max_new_tokens=7)
    engine = Engine(model, model.new_pool(10, 4), policy=orders)
    requests = [a.submit(engine) for a in asks]
    engine.step()
    third = big.submit(engine)
    orders.preempt, orders.hold = requests, {r.id for r in requests}
    while not third.ended:
        engine.step()
    orders.hold = set()
    finish(engine)
    for a, request in zip([*asks, big], [*requests, third], strict=True):
        a.check(request)
    assert sorted(r.recomputations for r in requests) == [0, 1]


def test_alone_in_a_pool_that_others_hold(model):
    """Blocks that are not the engine's are not its to free: what does not fit ends there."""
    pool = model.new_pool(10, 4)
    outside = pool.open()
    pool.append(outside, 4 * 6)
    engine = Engine(model, pool)
    a = ask(model, tokens(9, 1), max_new_tokens=20)
    request, long = a.submit(engine), engine.submit(tokens(20, 2), 3)
    engine.run()
    assert (request.state, request.finish_reason) == (RequestState.FINISHED, "capacity")
    # 16 rows, and the token chosen after the last.
    assert request.tokens == a.ids[:8]
    assert (long.finish_reason, long.tokens) == ("capacity", [])
    assert [type(r.error) for r in (request, long)] == [lk.OutOfBlocks] * 2
    assert "6 held by others" in str(long.error)
    assert pool.free_blocks() == 4
    pool.discard(outside)
    later = a.submit(engine)
    finish(engine)
    a.check(later)


def test_a_preempted_request_whose_blocks_others_took(model):
    orders, pool = Orders(), model.new_pool(10, 4)
    engine = Engine(model, pool, policy=orders)
    request = engine.submit(tokens(17, 1), 20)
    other = engine.submit(tokens(3, 1), 20)
    engine.step()
    orders.preempt, orders.hold = [request], {request.id}
    engine.step()
    other.cancel()
    outside = pool.open()
    pool.append(outside, 4 * 8)
    orders.hold = set()
    engine.run()
    assert (request.finish_reason, len(request.tokens)) == ("capacity", 2)
    assert (pool.free_blocks(), pool.store.keys()) == (2, [])


def test_blocks_may_go_to_a_folder(model, tmp_path):
    store = lk.FolderBlockStore(tmp_path)
    asks = random_asks(model, 6, seed=2)
    engine = Engine(model, model.new_pool(14, 4, store=store), max_batch=4)
    requests = [a.submit(engine) for a in asks]
    finish(engine)
    for a, request in zip(asks, requests, strict=True):
        a.check(request)
    assert sum(r.preemptions for r in requests) > 0
    assert store.keys() == []
    store.close()
