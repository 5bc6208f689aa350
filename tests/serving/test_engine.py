"""Requests that run together get what each gets alone; what ends them; what a round does."""

import numpy as np
import pytest
from solo import Ask, ask, check_nothing_left, finish, plain, random_asks

import lazykv as lk
from lazykv.serving import Engine, RequestState

PROMPT = [1, 3, 6, 4]
OTHER = lk.DeviceKvPool(lk.KvGeometry(1, 4, 4, 1, 8, 4), "f32")


@pytest.fixture(scope="module")
def asks(model) -> list[Ask]:
    return random_asks(model, 24, seed=1)


@pytest.mark.parametrize(
    ("batch", "blocks", "size", "chunk", "widest"),
    [
        (1, 30, 4, 256, 1), (4, 24, 4, 256, 4), (5, 60, 1, 7, 5), (8, 16, 16, 1, 3),
        (16, 300, 2, 256, 16),
    ],
)  # fmt: skip
def test_every_request_equals_its_solo_run(model, asks, batch, blocks, size, chunk, widest):
    engine = Engine(model, model.new_pool(blocks, size), max_batch=batch, max_chunk=chunk)
    requests = [a.submit(engine) for a in asks]
    assert [r.state for r in requests] == [RequestState.WAITING] * len(asks)
    reports = finish(engine)
    for a, request in zip(asks, requests, strict=True):
        a.check(request)
    assert all(r.prefill_tokens <= chunk + r.decoded and r.decoded <= batch for r in reports)
    assert {r.id for report in reports for r in report.ended} == {r.id for r in requests}
    assert max(report.decoded for report in reports) == widest


def test_a_pool_on_another_device(model, asks):
    engine = Engine(model, model.new_pool(40, 4, device="sim:1"), max_batch=3)
    requests = [a.submit(engine) for a in asks[:6]]
    finish(engine)
    for a, request in zip(asks, requests, strict=False):
        a.check(request)


def test_text_prompts_end_tokens_and_stop_strings(ending, model):
    engine = Engine(ending, ending.new_pool(40, 4))
    ends = ask(ending, PROMPT, temperature=3.0, seed=0, max_new_tokens=60)
    assert ends.pieces[-1].finish_reason == "stop"
    request = ends.submit(engine)
    text = engine.submit("ab c", 5)
    finish(engine)
    ends.check(request)
    assert text.prompt == tuple(ending.tokenizer.with_bos(ending.tokenizer.encode("ab c")))
    assert plain(text.pieces) == plain(lk.generate(ending, "ab c", 5))

    whole = "".join(lk.generate(model, PROMPT, 30, 3.0, seed=0))
    engine = Engine(model, model.new_pool(80, 4))
    stops = [whole[3:5], whole[10:14], [whole[-1:]], "never to be seen"]
    cases = [ask(model, PROMPT, temperature=3.0, seed=0, max_new_tokens=30, stop=s) for s in stops]
    requests = [a.submit(engine) for a in cases]
    finish(engine)
    for a, request in zip(cases, requests, strict=True):
        a.check(request)
    assert [r.finish_reason for r in requests] == ["stop"] * 3 + ["length"]
    assert requests[0].text == whole[: whole.index(whole[3:5])]


@pytest.mark.parametrize(
    ("pool", "options"), [((2, 3), {}), ((8, 4), {"max_context": 6}), ((6, 1), {"max_context": 99})]
)
def test_capacity_is_used_up_exactly(model, pool, options):
    """Six rows for a prompt of four: two more tokens are stored, a third one is still chosen."""
    engine = Engine(model, model.new_pool(*pool), **options)
    assert engine.max_context == 6
    request = engine.submit(PROMPT, 30, 3.0, seed=0)
    full = engine.submit([*PROMPT, 5, 5], 9)
    finish(engine)
    assert (len(request.pieces), request.finish_reason) == (3, "capacity")
    assert request.pieces[-1].finish_reason == "capacity"
    assert request.tokens == [p.id for p in lk.generate(model, PROMPT, 3, 3.0, seed=0)]
    assert (len(full.pieces), full.finish_reason) == (1, "capacity")


def test_the_models_context_is_the_most_by_default(model):
    assert model.config.context_length == 128
    engine = Engine(model, model.new_pool(64, 4))
    assert engine.max_context == 128
    with pytest.raises(lk.RangeError, match="got a prompt of 129 tokens, need <= 128"):
        engine.submit([3] * 129)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"prompt": []}, lk.ShapeError, "Engine.submit: got an empty prompt"),
        ({"prompt": [1, 999]}, lk.RangeError, "Engine.submit: got token 999"),
        ({"prompt": [1.5]}, lk.DTypeError, "got token 1.5"),
        ({"prompt": b"ab"}, lk.DTypeError, "got text"),
        ({"prompt": [3] * 13}, lk.RangeError, "got a prompt of 13 tokens, need <= 12"),
        ({"max_new_tokens": 0}, lk.RangeError, "max_new_tokens 0"),
        ({"max_new_tokens": None}, lk.DTypeError, "max_new_tokens None"),
        ({"temperature": -1}, lk.RangeError, "temperature -1"),
        ({"top_k": 0}, lk.RangeError, "top_k 0"),
        ({"top_p": 1.5}, lk.RangeError, "top_p 1.5"),
        ({"seed": -1}, lk.RangeError, "seed -1"),
        ({"stop": ""}, lk.RangeError, "empty stop string"),
        ({"salt": "a"}, lk.DTypeError, "got salt str, need bytes"),
    ],
)
def test_arguments_are_checked_when_submitted(model, changes, error, words):
    engine = Engine(model, model.new_pool(3, 4))
    options = {"prompt": PROMPT, "max_new_tokens": 4} | changes
    with pytest.raises(error, match=words):
        engine.submit(options.pop("prompt"), **options)
    assert engine.idle
    check_nothing_left(engine)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_batch": 0}, lk.RangeError, "max_batch 0"),
        ({"max_chunk": 0}, lk.RangeError, "max_chunk 0"),
        ({"max_context": 0}, lk.RangeError, "max_context 0"),
        ({"max_batch": 1.5}, lk.DTypeError, "max_batch 1.5"),
        ({"policy": "fair"}, lk.DTypeError, "got policy str, need a function"),
        ({"pool": 5}, lk.PoolError, "got LlamaModel and int"),
        ({"model": None}, lk.PoolError, "got NoneType and DeviceKvPool"),
        ({"pool": OTHER}, lk.ShapeError, "got a pool of 1 layers"),
    ],
)  # fmt: skip
def test_engines_are_checked_when_made(model, options, error, words):
    given = {"model": model, "pool": model.new_pool(3, 4)} | options
    with pytest.raises(error, match=words):
        Engine(given.pop("model"), given.pop("pool"), **given)


def test_a_long_prompt_delays_the_others_by_a_chunk_a_round(model):
    """While 60 tokens run in chunks of 8, the other gets its token every round."""
    engine = Engine(model, model.new_pool(64, 4), max_chunk=8)
    first = engine.submit(PROMPT, 40)
    engine.step()
    # A chunk holds 4 of the prompt; the same round decodes once more.
    assert len(first.pieces) == 2
    rng = np.random.default_rng(3)
    long = engine.submit([int(t) for t in rng.integers(3, 9, 60)], 3)
    third = engine.submit(PROMPT[:2], 3)
    for n in range(1, 8):
        report = engine.step()
        assert (report.prefill_tokens, report.decoded) == (8, 1)
        assert len(first.pieces) == 2 + n
        assert (long.state, long.pieces) == (RequestState.RUNNING, [])
        assert third.state is RequestState.WAITING
        assert (long.prefill_tokens, report.admitted) == (8 * n, [long] if n == 1 else [])
    # Four tokens are left of the long prompt; the round has room for the next prompt as well.
    report = engine.step()
    assert (report.prefill_tokens, report.decoded) == (6, 3)
    assert [len(r.pieces) for r in (first, long, third)] == [10, 2, 2]
    assert report.admitted == [third]
    finish(engine)


def test_what_a_round_reports(model):
    engine = Engine(model, model.new_pool(20, 4), max_batch=2)
    assert engine.idle
    assert engine.step() == lk.serving.StepReport(idle=True)
    a, b, c = (engine.submit(PROMPT, n) for n in (1, 3, 2))
    assert not engine.idle
    report = engine.step()
    assert report.admitted == [a, b]
    # `b` found the first block of `a` and recomputed its last token in the decode step.
    assert (report.ended, report.prefill_tokens, report.decoded) == ([a], 5, 1)
    assert (report.preempted, report.errors, report.idle) == ([], [], False)
    report = engine.step()
    assert (report.admitted, report.ended, report.decoded) == ([c], [], 2)
    report = engine.step()
    assert (report.ended, report.idle) == ([b, c], True)


def test_plans_are_those_of_the_buckets(model, asks):
    """Decode batches of 1, 2 and 4, prompts in steps of 1 to 16 tokens: 1 is in both."""
    pool = model.new_pool(200, 4)
    engine = Engine(model, pool, max_batch=4, max_chunk=16)
    for a in asks:
        a.submit(engine)
    finish(engine)
    sizes = {(plan.batch, plan.seq) for plan in engine.decoder.plans}
    assert sizes == {(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (1, 8), (1, 16)}
    before = lk.stats()
    requests = [a.submit(engine, salt=b"again") for a in asks]
    finish(engine)
    after = lk.stats()
    assert (after.plans_built, after.allocations) == (before.plans_built, before.allocations)
    for a, request in zip(asks, requests, strict=True):
        a.check(request)


def test_tokens_run_are_the_prompts_and_one_for_each_further_token(model, asks):
    engine = Engine(model, model.new_pool(400, 4), prefix_cache=False)
    requests = [a.submit(engine) for a in asks]
    reports = finish(engine)
    rows = sum(len(r.prompt) + len(r.pieces) - 1 for r in requests)
    assert engine.decoder.tokens_run == rows
    assert [r.prefill_tokens for r in requests] == [len(r.prompt) for r in requests]
    assert sum(r.prefill_tokens for r in reports) == sum(len(r.prompt) for r in requests)
    assert {(r.tokens_found, r.preemptions, r.recomputations) for r in requests} == {(0, 0, 0)}
