"""Streaming, cancelling and submitting, from one thread and from many."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from solo import ask, check_nothing_left, finish, plain, random_asks

import lazykv as lk
from lazykv.serving import Engine, RequestState


def tokens(n: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 9, n)]


def test_a_stream_drives_the_engine_piece_by_piece(model):
    engine = Engine(model, model.new_pool(40, 4))
    a, b = ask(model, tokens(9, 1), max_new_tokens=8), ask(model, tokens(5, 2), max_new_tokens=3)
    first, second = a.submit(engine), b.submit(engine)
    pieces = []
    for piece in first.stream():
        pieces.append(piece)
        assert len(first.pieces) <= len(pieces) + 1
    assert plain(pieces) == plain(a.pieces)
    # The other one ran along; its stream has it all without another round.
    assert second.ended
    assert plain(second.stream()) == plain(b.pieces)
    assert plain(first.stream()) == plain(a.pieces)
    check_nothing_left(engine)


def test_streams_in_turn(model):
    asks = random_asks(model, 6, seed=3)
    engine = Engine(model, model.new_pool(20, 4), max_batch=3)
    requests = [a.submit(engine) for a in asks]
    streams = [r.stream() for r in requests]
    got = [[] for _ in asks]
    while any(not r.ended for r in requests):
        for pieces, stream in zip(got, streams, strict=True):
            pieces += [p for p in [next(stream, None)] if p is not None]
    for a, pieces, stream in zip(asks, got, streams, strict=True):
        assert plain([*pieces, *stream]) == plain(a.pieces)


def test_many_threads_stream_and_nobody_else_drives(model):
    asks = random_asks(model, 12, seed=4)
    engine = Engine(model, model.new_pool(16, 4), max_batch=4)

    def serve(a):
        request = a.submit(engine)
        return request, list(request.stream())

    with ThreadPoolExecutor(12) as threads:
        for a, (request, pieces) in zip(asks, threads.map(serve, asks), strict=True):
            a.check(request)
            assert plain(pieces) == plain(a.pieces)
    check_nothing_left(engine)


def test_one_thread_runs_others_stream_submit_and_cancel(model):
    asks = random_asks(model, 24, seed=5)
    engine = Engine(model, model.new_pool(16, 4), max_batch=4)
    done = threading.Event()

    def drive():
        while not (done.is_set() and engine.idle):
            engine.run()

    def serve(n):
        request = asks[n].submit(engine)
        if n % 4 == 3:
            next(request.stream())
            request.cancel()
        return request, list(request.stream())

    with ThreadPoolExecutor(9) as threads:
        driver = threads.submit(drive)
        served = list(threads.map(serve, range(24)))
        done.set()
        driver.result()
    for n, (request, pieces) in enumerate(served):
        assert plain(pieces) == plain(request.pieces)
        if request.state is RequestState.CANCELLED:
            assert n % 4 == 3
            assert request.tokens == asks[n].ids[: len(pieces)]
        else:
            asks[n].check(request)
    check_nothing_left(engine)


def test_a_second_driver_is_refused(model):
    """While a policy holds the round, another thread gets `SessionBusy` from step and run."""
    inside, leave = threading.Event(), threading.Event()

    def policy(view):
        inside.set()
        assert leave.wait(30)
        return lk.serving.first_come_first_served(view)

    engine = Engine(model, model.new_pool(20, 4), policy=policy)
    a = ask(model, tokens(5, 1), max_new_tokens=3)
    request = a.submit(engine)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(engine.run)
        assert inside.wait(30)
        for verb in (engine.step, engine.run):
            with pytest.raises(lk.SessionBusy, match="while another thread is in one"):
                verb()
        late = a.submit(engine)  # not refused
        leave.set()
        running.result()
    finish(engine)
    a.check(request)
    a.check(late)


def test_a_stream_takes_what_another_threads_round_gave(model):
    """It waits for the round that runs and runs none of its own."""
    inside, leave, rounds = threading.Event(), threading.Event(), []

    def policy(view):
        rounds.append(threading.current_thread())
        inside.set()
        assert leave.wait(30)
        return lk.serving.first_come_first_served(view)

    engine = Engine(model, model.new_pool(20, 4), policy=policy)
    request = engine.submit(tokens(5, 1), 9)
    with ThreadPoolExecutor(2) as threads:
        stepping = threads.submit(engine.step)
        assert inside.wait(30)
        waiting = threads.submit(next, request.stream())
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.2)
        leave.set()
        assert waiting.result() is request.pieces[0]
        stepping.result()
    assert len(rounds) == 1


def test_a_stream_gets_its_pieces_while_another_thread_runs_on_and_on(model):
    """The policy lets no round begin before the stream has given what the last one made."""
    given = threading.Semaphore(0)

    def policy(view):
        for running in view.running:
            for _ in range(running.new_tokens - seen[0]):
                assert given.acquire(timeout=30)
            seen[0] = running.new_tokens
        return lk.serving.first_come_first_served(view)

    seen = [0]
    a = ask(model, tokens(5, 1), max_new_tokens=40)
    engine = Engine(model, model.new_pool(20, 4), policy=policy)
    request = a.submit(engine)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(engine.run)
        for _ in request.stream():
            given.release()
        running.result()
    a.check(request)


def test_a_copied_request_is_the_same(model):
    engine = Engine(model, model.new_pool(20, 4))
    request = engine.submit(tokens(5, 1), 3)
    assert copy.copy(request) is copy.deepcopy([request])[0] is request


def test_cancelled_before_anything_ran(model):
    engine = Engine(model, model.new_pool(20, 4))
    request, other = engine.submit(tokens(5, 1), 5), engine.submit(tokens(6, 2), 5)
    request.cancel()
    assert request.state is RequestState.WAITING
    report = engine.step()
    assert report.ended == [request]
    assert report.admitted == [other]
    assert (request.state, request.finish_reason) == (RequestState.CANCELLED, "cancelled")
    assert (request.tokens, request.prefill_tokens, list(request.stream())) == ([], 0, [])
    finish(engine)
    assert other.finish_reason == "length"


def test_cancelled_within_the_prompt(model):
    engine = Engine(model, model.new_pool(20, 4), max_chunk=4)
    request = engine.submit(tokens(30, 1), 5)
    engine.step()
    assert request.prefill_tokens == 4
    assert engine.pool.free_blocks() == 19
    request.cancel()
    assert engine.step().idle
    assert (request.state, request.tokens) == (RequestState.CANCELLED, [])
    check_nothing_left(engine)
    # What it computed can still be found.
    again = engine.submit(tokens(30, 1), 1)
    finish(engine)
    assert again.tokens_found == 4


def test_cancelled_while_decoding(model):
    a = ask(model, tokens(9, 1), max_new_tokens=12)
    b = ask(model, tokens(7, 2), max_new_tokens=12, temperature=3.0, seed=1)
    engine = Engine(model, model.new_pool(40, 4))
    request, other = a.submit(engine), b.submit(engine)
    stream = request.stream()
    pieces = [next(stream) for _ in range(3)]
    made = len(request.pieces)
    request.cancel()
    pieces += stream
    assert (request.tokens, len(pieces)) == (a.ids[:made], made)
    assert [p.finish_reason for p in pieces] == [None] * made
    assert (request.finish_reason, request.error) == ("cancelled", None)
    finish(engine)
    b.check(other)


def test_cancelled_while_preempted(model):
    engine = Engine(model, model.new_pool(6, 4), max_batch=2)
    first, second = (engine.submit(tokens(8, n), 12) for n in (1, 2))
    while second.state is not RequestState.PREEMPTED:
        engine.step()
    assert engine.pool.store.keys()
    second.cancel()
    engine.step()
    assert second.state is RequestState.CANCELLED
    assert engine.pool.store.keys() == []
    finish(engine)
    assert first.finish_reason == "length"


def test_cancelling_what_has_ended_does_nothing(model):
    a = ask(model, tokens(9, 1), max_new_tokens=2)
    engine = Engine(model, model.new_pool(40, 4))
    request = a.submit(engine)
    engine.run()
    request.cancel()
    engine.run()
    a.check(request)
    assert "finished, 9 + 2 tokens" in repr(request)
