"""Steps that fail: rewound, tried again, and in the end the matter of their own requests alone."""

import numpy as np
import pytest
from faults import Faulty
from solo import ask, check_nothing_left, finish, random_asks
from toy_backends import registered

import lazykv as lk
from lazykv.backends.sim import SimBackend
from lazykv.device import register_backend, registry
from lazykv.ops.move import Take
from lazykv.ops.paged_attention import PagedAttention
from lazykv.serving import Engine, RequestState


def tokens(n: int, seed: int, words: int = 9) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, words, n)]


@pytest.fixture
def faulty(request):
    backend = Faulty(getattr(request, "param", PagedAttention))
    with registered(backend):
        yield backend


def test_a_failed_step_is_tried_again(model, faulty):
    """In the prompt and while decoding, twice each; a third time in a row would end them."""
    asks = [ask(model, tokens(9, n), max_new_tokens=8) for n in range(3)]
    asks += [ask(model, tokens(7, n), max_new_tokens=8, temperature=3.0, seed=n) for n in (5, 6)]
    engine = Engine(model, model.new_pool(60, 4, device="faulty:0"), max_batch=8)
    requests = [a.submit(engine) for a in asks]
    faulty.failures, errors = 2, []
    for _ in range(2):
        errors += engine.step().errors
        assert engine.pool.kv_bytes_resident() == 0
    assert [type(e) for e in errors] == [lk.KernelError] * 2
    while sum(len(r.pieces) > 1 for r in requests) < 5:
        assert engine.step().errors == []
    made = [r.tokens for r in requests]
    faulty.failures = 1
    (error,) = engine.step().errors
    assert "the device lost its mind" in str(error)
    assert [r.tokens for r in requests] == made
    faulty.failures = 5  # each of them alone
    assert len(engine.step().errors) == 5
    assert [r.tokens for r in requests] == made
    finish(engine)
    for a, request in zip(asks, requests, strict=True):
        a.check(request)


def test_after_three_failures_in_a_row_a_request_ends(model, faulty):
    asks = [ask(model, tokens(9, n), max_new_tokens=8) for n in range(3)]
    engine = Engine(model, model.new_pool(60, 4, device="faulty:0"), max_batch=2)
    requests = [a.submit(engine) for a in asks]
    engine.step()
    faulty.failures = 1 + 2 + 2
    reports = [engine.step() for _ in range(3)]
    assert [len(r.errors) for r in reports] == [1, 2, 2]
    assert reports[2].ended == requests[:2]
    for a, request in zip(asks, requests[:2], strict=False):
        assert (request.state, request.finish_reason) == (RequestState.FAILED, "error")
        assert isinstance(request.error, lk.KernelError)
        assert request.tokens == a.ids[:2]
        stream = request.stream()
        assert [next(stream).id, next(stream).id] == a.ids[:2]
        with pytest.raises(lk.KernelError, match="lost its mind"):
            next(stream)
    finish(engine)
    asks[2].check(requests[2])


def test_a_prompt_that_fails_three_times_lets_the_next_begin(model, faulty):
    a = ask(model, tokens(9, 1), max_new_tokens=4)
    engine = Engine(model, model.new_pool(60, 4, device="faulty:0"))
    first, second = engine.submit(tokens(9, 2), 4), a.submit(engine)
    faulty.failures = 3
    reports = finish(engine)
    assert [len(r.errors) for r in reports[:3]] == [1, 1, 1]
    assert first.state is RequestState.FAILED
    a.check(second)


@pytest.mark.parametrize("faulty", [Take], indirect=True)
def test_one_that_always_fails_takes_no_others_with_it(model, faulty):
    """Token 8 poisons every step it is in: a prompt with it never starts, and a request that
    generates it ends there. Those in the same batch go on."""
    faulty.poison = 8
    asks = random_asks(model, 30, seed=2, longest=4, budget=10)
    clean = [a for a in asks if 8 not in a.prompt and 8 not in a.ids[:-1]]
    struck = [a for a in asks if 8 not in a.prompt and 8 in a.ids[:-1]]
    hopeless = [a for a in asks if 8 in a.prompt]
    assert [len(kind) for kind in (clean, struck, hopeless)] == [10, 10, 10]
    engine = Engine(model, model.new_pool(60, 4, device="faulty:0"), max_batch=6)
    requests = [a.submit(engine) for a in asks]
    finish(engine)
    for a, request in zip(asks, requests, strict=True):
        if a in clean:
            a.check(request)
            continue
        assert (request.state, request.finish_reason) == (RequestState.FAILED, "error")
        assert isinstance(request.error, lk.KernelError)
        assert request.tokens == (a.ids[: a.ids.index(8) + 1] if a in struck else [])


def test_logits_that_no_token_can_be_chosen_from(model, monkeypatch):
    """The request they belong to ends at once: they would be the same the next time."""
    asks = [ask(model, tokens(9, n), max_new_tokens=6) for n in range(3)]
    engine = Engine(model, model.new_pool(60, 4))
    requests = [a.submit(engine) for a in asks]
    engine.step()
    honest = engine.decoder.decode

    def spoiled(sessions, ids):
        logits = honest(sessions, ids)
        logits[1] = np.nan
        return logits

    monkeypatch.setattr(engine.decoder, "decode", spoiled)
    report = engine.step()
    monkeypatch.undo()
    assert report.ended == [requests[1]]
    assert isinstance(requests[1].error, lk.RangeError)
    assert report.errors == [requests[1].error]
    finish(engine)
    for n in (0, 2):
        asks[n].check(requests[n])


@pytest.fixture
def sim():
    """A simulated device whose limit the test may move."""
    before, generations = lk.device("sim:0").backend, dict(registry.generations)
    backend = SimBackend()
    register_backend("sim", backend)
    yield backend
    register_backend("sim", before)
    registry.generations = generations


def test_out_of_memory_while_planning(model, sim):
    """The first steps make plans; a device that is full for two rounds only delays them."""
    a = ask(model, tokens(9, 1), max_new_tokens=5)
    pool = model.new_pool(20, 4, device="sim:0")
    engine = Engine(model, pool)
    request = a.submit(engine)
    model.weights_for(pool)
    sim.limit_bytes = sim.used_bytes(pool.device_location()) + 100
    for _ in range(2):
        (error,) = engine.step().errors
        assert isinstance(error, lk.OutOfMemory)
    sim.limit_bytes = None
    finish(engine)
    a.check(request)


def test_a_pool_that_cannot_take_blocks(model, monkeypatch):
    a = ask(model, tokens(9, 1), max_new_tokens=5)
    engine = Engine(model, model.new_pool(20, 4))
    request = a.submit(engine)
    honest, left = engine.pool._take, [2]

    def take(n):
        if n and left[0]:
            left[0] -= 1
            raise lk.OutOfMemory("take: got none, need some")
        return honest(n)

    monkeypatch.setattr(engine.pool, "_take", take)
    assert [type(e) for r in (engine.step(), engine.step()) for e in r.errors] == [
        lk.OutOfMemory
    ] * 2
    finish(engine)
    a.check(request)


def test_blocks_taken_by_others_in_the_last_moment_are_no_failure(model, monkeypatch):
    """Any number of times: the step is tried again until there is room."""
    a = ask(model, tokens(9, 1), max_new_tokens=5)
    engine = Engine(model, model.new_pool(20, 4))
    request = a.submit(engine)
    honest, left = engine.decoder.prefill, [7]

    def prefill(session, ids):
        if left[0]:
            left[0] -= 1
            raise lk.OutOfBlocks("begin_step: got 2 free blocks, need 3", need=3, have=2)
        return honest(session, ids)

    monkeypatch.setattr(engine.decoder, "prefill", prefill)
    assert sum(len(engine.step().errors) for _ in range(7)) == 7
    finish(engine)
    a.check(request)


@pytest.mark.parametrize("error", [lk.SessionBusy("a caller's fault"), KeyboardInterrupt()])
@pytest.mark.parametrize("verb", ["prefill", "decode"])
def test_what_is_not_the_steps_fault_is_raised(model, monkeypatch, error, verb):
    """And the engine goes on from there when it is called again."""
    asks = [ask(model, tokens(9, n), max_new_tokens=5) for n in range(2)]
    engine = Engine(model, model.new_pool(20, 4))
    requests = [a.submit(engine) for a in asks]

    def fails(*args):
        raise error

    for _ in range(4):
        monkeypatch.setattr(engine.decoder, verb, fails)
        with pytest.raises(type(error)):
            engine.run()
        monkeypatch.undo()
    finish(engine)
    for a, request in zip(asks, requests, strict=True):
        a.check(request)
    check_nothing_left(engine)
