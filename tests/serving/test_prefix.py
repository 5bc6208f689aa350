"""What requests find of each other's rows, and that nothing stale is found."""

import numpy as np
import pytest
from solo import ask, check_nothing_left, finish, random_asks

import lazykv as lk
from lazykv.models.weights import random_weights
from lazykv.serving import Engine
from lazykv.serving.rows import Rows


def tokens(n: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 9, n)]


@pytest.mark.parametrize(("size", "copied"), [(4, 1), (8, 1), (1, 0)])
def test_a_full_hit_recomputes_one_token_and_copies_its_block(model, size, copied):
    """Copied, not taken out of the index: the next request finds as much."""
    a = ask(model, tokens(16, 0), max_new_tokens=5)
    engine = Engine(model, model.new_pool(64, size))
    first = a.submit(engine)
    finish(engine)
    assert (first.prefill_tokens, first.tokens_found) == (16, 0)
    for _ in range(3):
        before = engine.pool.stats
        request = a.submit(engine)
        finish(engine)
        a.check(request)
        assert (request.prefill_tokens, request.tokens_found) == (1, 15)
        assert engine.pool.stats.blocks_copied - before.blocks_copied == copied
    assert engine.decoder.tokens_run == (16 + 4) + 3 * (1 + 4)


def test_nothing_stays_pinned_once_the_copy_is_made(model):
    a = ask(model, tokens(16, 0), max_new_tokens=5)
    engine = Engine(model, model.new_pool(64, 4))
    a.submit(engine)
    finish(engine)
    request = a.submit(engine)
    engine.step()
    assert not request.ended
    assert engine.pool.stats.blocks_copied == 1
    assert not engine.pool._pins
    finish(engine)
    a.check(request)


def test_a_full_hit_that_gives_way_before_its_step(model):
    """It holds nothing of its own yet, so there is nothing to store, and nothing stays pinned."""
    pool = model.new_pool(16, 4)
    engine = Engine(model, pool)
    prompt = tokens(16, 0)
    engine.submit(prompt, 1)
    finish(engine)
    rows = Rows(pool, b"", True)
    assert rows.begin(prompt) == 15
    assert (rows.filled, rows.held, rows.missing, len(pool._pins)) == (15, 4, 0, 4)
    assert rows.evict() == 4
    assert (rows.filled, rows.held, rows.missing, len(pool._pins)) == (15, 0, 4, 0)
    assert rows.needed(1) == 4
    rows.restore()
    assert (rows.held, rows.missing, rows.needed(1), rows.needed(2)) == (4, 0, 0, 1)
    rows.drop()
    check_nothing_left(engine)


def test_a_full_hit_in_a_pool_without_room_for_a_copy(model):
    """The pool is as large as the prompt: the shared block is given up and written again."""
    a = ask(model, tokens(16, 1), max_new_tokens=1)
    engine = Engine(model, model.new_pool(4, 4))
    for found in (0, 15, 15):
        request = a.submit(engine)
        finish(engine)
        assert request.tokens_found == found
        assert (request.tokens, request.finish_reason) == (a.ids, "length")
    assert engine.pool.stats.blocks_copied == 0


def test_what_is_found_ends_with_the_last_full_block_in_common(model):
    shared, engine = tokens(10, 2), Engine(model, model.new_pool(64, 4))
    asks = [ask(model, [*shared, *tokens(7, n)], max_new_tokens=3) for n in range(20, 24)]
    requests = [a.submit(engine) for a in asks]
    finish(engine)
    for a, request in zip(asks, requests, strict=True):
        a.check(request)
    assert [r.tokens_found for r in requests] == [0, 8, 8, 8]
    assert [r.prefill_tokens for r in requests] == [17, 9, 9, 9]


def test_generated_tokens_are_found_by_the_next_turn(model):
    engine = Engine(model, model.new_pool(64, 4))
    first = engine.submit(tokens(9, 3), 8)
    finish(engine)
    text = [*first.prompt, *first.tokens]
    second = ask(model, [*text, 5, 5], max_new_tokens=3)
    request = second.submit(engine)
    finish(engine)
    second.check(request)
    # Of 17 tokens the last has no row, and 16 are four blocks.
    assert request.tokens_found == 16


def test_64_requests_compute_a_shared_prefix_once(model):
    """Even though many of them wait before the first has run."""
    size, system = 4, tokens(48, 4)
    asks = [ask(model, [*system, *tokens(5, 100 + n)], max_new_tokens=2) for n in range(64)]
    engine = Engine(model, model.new_pool(200, size), max_batch=8)
    requests = [a.submit(engine) for a in asks]
    finish(engine)
    for a, request in zip(asks, requests, strict=True):
        a.check(request)
    # Five tokens of its own each; where the first four agree with somebody's, only one is left.
    own = {n: r.prefill_tokens for n, r in enumerate(requests)}
    assert own[0] == 53
    assert set(own.values()) - {53} <= {5, 1}
    assert sum(own.values()) == sum(53 - r.tokens_found for r in requests)
    assert sum(own.values()) <= 48 + 64 * 5
    assert engine.decoder.tokens_run == sum(own.values()) + 64
    alone = Engine(model, model.new_pool(200, size), max_batch=8, prefix_cache=False)
    requests = [a.submit(alone) for a in asks]
    finish(alone)
    assert sum(r.prefill_tokens for r in requests) == 64 * 53


def test_shared_blocks_are_counted_once(model):
    system = tokens(48, 5)
    engine = Engine(model, model.new_pool(200, 4), max_batch=8)
    requests = [engine.submit([*system, 3 + n % 6, 3], 30) for n in range(6)]
    for _ in range(2):
        engine.step()
    assert {len(r.pieces) for r in requests} == {3}
    held = engine.pool.kv_bytes_resident() // engine.pool.geometry.block_bytes
    assert held == 48 // 4 + 6
    for r in requests:
        r.cancel()
    engine.run()
    check_nothing_left(engine)


def test_only_the_same_salt_finds(model):
    a = ask(model, tokens(17, 6), max_new_tokens=2)
    engine = Engine(model, model.new_pool(64, 4))
    found = []
    for salt in (b"", b"x", b"x", b"y", b""):
        request = a.submit(engine, salt=salt)
        finish(engine)
        a.check(request)
        found.append(request.tokens_found)
    assert found == [0, 0, 16, 0, 16]


def test_without_prefix_cache_nothing_is_found_or_published(model):
    a = ask(model, tokens(17, 6), max_new_tokens=2)
    engine = Engine(model, model.new_pool(64, 4), prefix_cache=False)
    for _ in range(2):
        request = a.submit(engine)
        finish(engine)
        assert (request.tokens_found, request.prefill_tokens) == (0, 17)
    assert engine.pool.cached_blocks() == 0
    assert engine.pool.stats.lookups == 0


def reweighted(model) -> lk.models.LlamaModel:
    """A model of its own that can be given other weights."""
    return lk.models.LlamaModel(
        model.config, random_weights(model.config, 1, 0.4), tokenizer=model.tokenizer
    )


def test_rows_of_old_weights_are_never_attended_to(model):
    """Neither found in the index nor kept by those that run or were preempted meanwhile: all go on
    as if the tokens they have so far had been their prompt."""
    changing = reweighted(model)
    engine = Engine(changing, changing.new_pool(14, 4), max_batch=3)
    prompts = [tokens(16, n) for n in (7, 8, 9, 10)]
    requests = [engine.submit(p, 12) for p in prompts]
    while not requests[2].pieces or not any(r.preemptions for r in requests):
        engine.step()
    assert not any(r.ended for r in requests)
    assert {r.state.value for r in requests} == {"waiting", "running", "preempted"}
    so_far = [r.tokens for r in requests]
    changing.weights = random_weights(changing.config, 2, 0.4)
    changing.weights_epoch += 1
    finish(engine)
    for request, prompt, old in zip(requests, prompts, so_far, strict=True):
        want = ask(changing, [*prompt, *old], max_new_tokens=12 - len(old))
        assert request.tokens == [*old, *want.ids]
        assert request.recomputations == (1 if old else 0)
    # And what is indexed now is of the new weights.
    again = ask(changing, prompts[0], max_new_tokens=4)
    request = again.submit(engine)
    finish(engine)
    again.check(request)


def test_random_requests_over_a_pool_that_keeps_little(model):
    """Many short prompts of six words share blocks by chance, and the index gives some up."""
    asks = random_asks(model, 30, seed=5, longest=12, budget=8)
    engine = Engine(model, model.new_pool(12, 2), max_batch=4)
    requests = [asks[n % 30].submit(engine) for n in range(90)]
    finish(engine)
    for n, request in enumerate(requests):
        asks[n % 30].check(request)
    assert sum(r.tokens_found for r in requests) > 0
