"""What a policy is shown, what it may decide, and answers that are refused."""

from dataclasses import replace

import numpy as np
import pytest
from solo import ask, finish, random_asks

import lazykv as lk
from lazykv.serving import Decision, Engine, RequestView, View, first_come_first_served


def tokens(n: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 9, n)]


class Watching:
    """First come, first served; keeps what it was shown."""

    def __init__(self) -> None:
        self.views: list[View] = []

    def __call__(self, view: View) -> Decision:
        self.views.append(view)
        return first_come_first_served(view)


def test_what_a_policy_sees(model):
    policy = Watching()
    engine = Engine(model, model.new_pool(20, 4), max_batch=2, max_chunk=8, policy=policy)
    a, b, c = (engine.submit(tokens(n, n), 5) for n in (9, 4, 21))
    engine.step()
    assert policy.views == [
        View(
            waiting=(
                RequestView(a.id, 9, 0, 0, 0, 3), RequestView(b.id, 4, 0, 0, 0, 1),
                RequestView(c.id, 21, 0, 0, 0, 6),
            ),
            running=(), preempted=(), free_blocks=20, capacity=20, max_batch=2,
        )
    ]  # fmt: skip
    # Eight of nine tokens ran as a chunk, the last one as a decode step. `b` was admitted when the
    # chunks of `a` were through, but the round had had its share of prompts.
    engine.step()
    assert policy.views[1].running == (
        RequestView(a.id, 9, 1, 9, 3, 0), RequestView(b.id, 4, 0, 0, 0, 1),
    )  # fmt: skip
    assert [r.id for r in policy.views[1].waiting] == [c.id]
    assert (policy.views[1].free_blocks, policy.views[1].blocks_short) == (17, 0)
    engine.step()
    # The rows of `b` filled its block, so its next token took another.
    assert policy.views[2].running == (
        RequestView(a.id, 9, 2, 10, 3, 0), RequestView(b.id, 4, 2, 5, 2, 0),
    )  # fmt: skip
    finish(engine)
    assert all(len(v.running) <= 2 for v in policy.views)


def test_it_is_asked_for_victims_when_blocks_run_short(model):
    policy = Watching()
    engine = Engine(model, model.new_pool(6, 4), max_batch=2, policy=policy)
    a, b = (engine.submit(tokens(8, n), 12) for n in (1, 2))
    while not b.preemptions:
        engine.step()
    short = policy.views[-1]
    assert (short.blocks_short, short.free_blocks) == (2, 0)
    assert short.running == (
        RequestView(a.id, 8, 5, 12, 3, 1), RequestView(b.id, 8, 5, 12, 3, 1),
    )  # fmt: skip
    finish(engine)
    assert [v.blocks_short > 0 for v in policy.views].count(True) == b.preemptions


def test_views_of_the_preempted(model):
    policy = Watching()
    engine = Engine(model, model.new_pool(6, 4), max_batch=2, policy=policy)
    a, b = (engine.submit(tokens(8, n), 12) for n in (1, 2))
    while not b.preemptions:
        engine.step()
    rows = 8 + len(b.pieces) - 1
    engine.step()
    (seen,) = policy.views[-1].preempted
    held = -(-rows // 4)
    assert seen == RequestView(b.id, 8, len(b.pieces), rows, 0, held + (rows % 4 == 0))
    assert [r.id for r in policy.views[-1].running] == [a.id]
    finish(engine)


def test_first_come_first_served():
    """By age, preempted or not, up to the batch, sparing a block for each that runs."""

    def views(*ids):
        return tuple(RequestView(id, 4, 0, 0, 0, 1) for id in ids)

    view = View(views(7, 8, 9), views(2, 6), views(5, 3), 10, 20, max_batch=6)
    assert first_come_first_served(view) == Decision(admit=(3, 5, 7, 8), spare=2)
    assert first_come_first_served(replace(view, max_batch=2)) == Decision(spare=2)
    assert first_come_first_served(replace(view, blocks_short=1)) == Decision(preempt=(6,))


def last_come_first_served(view: View) -> Decision:
    """The youngest requests run; the oldest running one gives way to one that waits."""
    if view.blocks_short:
        return Decision(preempt=(min(r.id for r in view.running),))
    everyone = sorted((r.id for r in (*view.waiting, *view.preempted, *view.running)), reverse=True)
    chosen, running = everyone[: view.max_batch], {r.id for r in view.running}
    return Decision(
        admit=tuple(id for id in chosen if id not in running),
        preempt=tuple(running - set(chosen)),
    )


def test_a_policy_of_ones_own(model):
    asks = random_asks(model, 9, seed=9)
    engine = Engine(model, model.new_pool(40, 4), max_batch=3, policy=last_come_first_served)
    requests = []
    for a in asks:
        requests.append(a.submit(engine))
        engine.step()
    finish(engine)
    for a, request in zip(asks, requests, strict=True):
        a.check(request)
    assert sum(r.preemptions for r in requests[:-3]) > 0
    assert requests[-1].preemptions == 0
    assert sum(r.recomputations for r in requests) == 0


@pytest.mark.parametrize(("spare", "n"), [(0, 3), (1, 3), (2, 2), (3, 2), (4, 1)])
def test_blocks_to_spare(model, spare, n):
    """Prompts of two blocks in a pool of seven; the first is admitted in any case."""

    def policy(view: View) -> Decision:
        everyone = () if view.running else view.waiting
        return Decision(admit=tuple(r.id for r in everyone), spare=spare)

    engine = Engine(model, model.new_pool(7, 4), max_batch=3, policy=policy)
    requests = [engine.submit(tokens(7, seed), 20) for seed in range(3)]
    assert engine.step().admitted == requests[:n]


def test_room_that_those_who_run_are_about_to_need(model):
    """Two blocks are free, and the first request is at the end of its second: a prompt of two
    blocks has to wait, one of one block need not."""
    for n, admitted in ((7, False), (4, True)):

        def policy(view: View) -> Decision:
            return Decision(admit=() if view.blocks_short else tuple(r.id for r in view.waiting))

        engine = Engine(model, model.new_pool(4, 4), policy=policy)
        first = engine.submit(tokens(7, 1), 20)
        engine.step()
        assert engine.pool.free_blocks() == 2
        second = engine.submit(tokens(n, 2), 1)
        assert (second in engine.step().admitted) is admitted
        assert first.preemptions == 0


FIRST = {
    "nothing": (lambda view: None, lk.DTypeError, "got NoneType, need a Decision"),
    "nobody": (lambda view: Decision(), lk.RangeError, "got 0 to admit beside 0, need 1 to 2"),
    "too many": (
        lambda view: Decision(admit=tuple(r.id for r in view.waiting)),
        lk.RangeError, "got 3 to admit beside 0, need 1 to 2",
    ),
    "one twice": (
        lambda view: Decision(admit=(view.waiting[0].id,) * 2),
        lk.RangeError, "got admit .* need different ids",
    ),
    "no ids": (lambda view: Decision(admit=5), lk.DTypeError, "got admit 5, need a tuple of requ"),
    "lists": (lambda view: Decision(admit=([],)), lk.DTypeError, r"got admit \(\[\],\), need"),
    "nobody's": (lambda view: Decision(preempt=None), lk.DTypeError, "got preempt None, need"),
    "a stranger": (lambda view: Decision(admit=(10**9,)), lk.RangeError, "got admit"),
    "preempting one that waits": (
        lambda view: Decision(preempt=(view.waiting[0].id,)), lk.RangeError, "got preempt",
    ),
    "negative spare": (
        lambda view: Decision(admit=(view.waiting[0].id,), spare=-1), lk.RangeError, "spare -1",
    ),
    "spare that is no number": (
        lambda view: Decision(admit=(view.waiting[0].id,), spare=0.5), lk.DTypeError, "spare 0.5",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("answer", "error", "words"), FIRST.values(), ids=FIRST.keys())
def test_answers_that_cannot_be_followed(model, answer, error, words):
    """They are raised and change nothing; with a better answer the engine goes on."""
    now = [answer]
    engine = Engine(model, model.new_pool(20, 4), max_batch=2, policy=lambda view: now[0](view))
    asks = [ask(model, tokens(5, n), max_new_tokens=3) for n in range(3)]
    requests = [a.submit(engine) for a in asks]
    for verb in (engine.step, engine.run, lambda: list(requests[0].stream())):
        with pytest.raises(error, match=f"policy: .*{words}"):
            verb()
        assert engine.pool.free_blocks() == 20
        assert {r.state.value for r in requests} == {"waiting"}
    now[0] = first_come_first_served
    finish(engine)
    for a, request in zip(asks, requests, strict=True):
        a.check(request)


def test_no_victim_where_one_is_needed(model):
    silent = [True]

    def policy(view: View) -> Decision:
        decision = first_come_first_served(view)
        return Decision() if view.blocks_short and silent[0] else decision

    engine = Engine(model, model.new_pool(6, 4), max_batch=2, policy=policy)
    asks = [ask(model, tokens(8, n), max_new_tokens=12) for n in (1, 2)]
    requests = [a.submit(engine) for a in asks]
    with pytest.raises(lk.RangeError, match="policy: got nobody to preempt, need one for 2 blocks"):
        engine.run()
    made = [len(r.pieces) for r in requests]
    with pytest.raises(lk.RangeError, match="nobody to preempt"):
        engine.step()
    assert [len(r.pieces) for r in requests] == made
    silent[0] = False
    finish(engine)
    for a, request in zip(asks, requests, strict=True):
        a.check(request)


def test_a_policy_that_raises(model):
    def policy(view: View) -> Decision:
        raise ZeroDivisionError("a bug")

    engine = Engine(model, model.new_pool(20, 4), policy=policy)
    request = engine.submit(tokens(5, 1), 3)
    with pytest.raises(ZeroDivisionError):
        engine.run()
    assert not request.ended


def test_a_policy_must_not_call_the_engine(model):
    engines = []

    def policy(view: View) -> Decision:
        engines[0].step()
        return first_come_first_served(view)

    engines.append(Engine(model, model.new_pool(20, 4), policy=policy))
    engines[0].submit(tokens(5, 1), 3)
    with pytest.raises(lk.SessionBusy, match="got a call from within a round"):
        engines[0].run()
