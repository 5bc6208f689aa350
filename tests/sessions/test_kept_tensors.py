"""`keep`: tensors inside a step that can be read after it, captured or not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from captured_steps import token
from paged_state import make_pool, opened
from paged_steps import PagedStep
from paged_steps import data as paged_data
from sim_faults import fresh_sim
from small_llama import small_llama

import lazykv as lk
from lazykv.sessions.captured import CapturedDecodeSession
from lazykv.sessions.decode import DecodeSession

SIZE = 64


class Chain:
    """Layers that each need only the one before, so that their memory goes from one to the next;
    the rows of a cache are added at the end."""

    def __init__(self, place: str) -> None:
        self.place, g = place, lk.Graph()
        self.x = g.placeholder((SIZE,), "f64", "x")
        self.at = g.placeholder((1,), "i64", "at")
        self.pair = tuple(g.placeholder((1, 1, 4, SIZE), "f64", name) for name in "kv")
        self.layers = [self.x * 2.0]
        for n in range(5):
            self.layers.append(self.layers[-1] + float(n))
        flat = self.pair[0].reshape(4, SIZE).write_rows(
            self.layers[-1].reshape(1, SIZE), self.at, g.const(np.array(1))
        )  # fmt: skip
        self.target = flat.reshape(1, 1, 4, SIZE) + self.pair[1]
        self.unused = (self.x * 3.0).exp()

    def cache(self) -> lk.KvCache:
        return lk.KvCache.with_capacity(1, 1, SIZE, 4, "f64", self.place)

    def session(self, cache: lk.KvCache, kind: type[DecodeSession], **options: Any) -> Any:
        return kind.build(
            lk.InferenceContext(self.place), self.target, kv=cache, kv_nodes=[self.pair],
            bound={"x": self.x, "at": self.at}, **options,
        )  # fmt: skip

    def step(self, session: Any, value: float, at: int = 0) -> np.ndarray:
        return session.step({"x": np.full(SIZE, float(value)), "at": np.array([at])})

    def want(self, value: float) -> list[np.ndarray]:
        out = [np.full(SIZE, value) * 2.0]
        for n in range(5):
            out.append(out[-1] + float(n))
        return out


CASES = [("cpu", DecodeSession), ("sim:0", DecodeSession), ("sim:0", CapturedDecodeSession)]


@pytest.fixture(params=CASES, ids=["cpu", "sim", "captured"])
def case(request) -> tuple[Chain, type[DecodeSession]]:
    return Chain(request.param[0]), request.param[1]


def test_every_layer_can_be_read_after_every_step_and_every_rebind(case):
    chain, kind = case
    caches = [chain.cache() for _ in range(2)]
    session = chain.session(caches[0], kind, keep=[*chain.layers, chain.unused])
    for n in range(8):
        if n == 4:
            assert session.rebind_kv(caches[1]) is None
            with pytest.raises(lk.GraphError, match="need a pass before it"):
                session.read(chain.layers[0])
        out = chain.step(session, n, n % 4)
        got = [session.read(t) for t in chain.layers]
        np.testing.assert_array_equal(got, chain.want(n))
        np.testing.assert_allclose(session.read(chain.unused), np.exp(np.full(SIZE, 3.0 * n)))
        np.testing.assert_array_equal(out[0, 0, n % 4], chain.want(n)[-1])
        assert not np.shares_memory(session.read(chain.layers[0]), got[0])
    if kind is CapturedDecodeSession:
        assert (session.captures, session.captured, session.replays) == (2, True, 6)


def test_without_keep_the_memory_and_the_plan_are_as_before(case):
    chain, kind = case
    plain, kept = (
        chain.session(chain.cache(), kind, keep=keep).plan for keep in ([], chain.layers)
    )
    alone = lk.plan(
        chain.target, dict(zip(chain.pair, storages(chain.cache()), strict=True)),
        chain.place,
    )  # fmt: skip
    assert plain.structure == alone.structure
    assert plain.program is alone.program
    # The layers lie in bytes that the result gets in the end.
    assert plain.program.arenas == {lk.DeviceLocation(chain.place): chain.target.spec.nbytes}
    assert kept.structure != plain.structure
    assert kept.program.arena_bytes == chain.target.spec.nbytes + len(chain.layers) * 8 * SIZE
    assert kept.node_count == plain.node_count


def storages(cache: lk.KvCache) -> list[lk.Storage]:
    return [cache.slot_storage(0, half) for half in lk.KvSlot]


def test_what_was_not_kept_is_refused_with_the_way_to_get_it(case):
    chain, kind = case
    session = chain.session(chain.cache(), kind, keep=[chain.layers[3]])
    with pytest.raises(lk.GraphError, match="need a pass before it"):
        session.read(chain.layers[3])
    chain.step(session, 2)
    with pytest.raises(lk.GraphError, match="name it in `keep` when the session is built"):
        session.read(chain.layers[1])
    for other in (chain.unused, lk.Graph().const([1.0]), None, "x", 3):
        with pytest.raises(lk.GraphError, match="need a node that it was made from"):
            session.read(other)
    np.testing.assert_array_equal(session.read(chain.layers[3]), chain.want(2)[3])


def views(chain: Chain) -> dict[str, tuple[lk.Tensor, Callable[[int], np.ndarray]]]:
    """Tensors that no kernel makes by themselves, and what they hold."""
    layer, written = chain.layers[2], chain.target.inputs[0]
    return {
        "view": (layer.reshape(8, 8).transpose(0, 1)[2:4], lambda n: np.full((2, 8), 2.0 * n + 1)),
        "the rows": (written, rows),
        "a row": (written[0, 0, 1], lambda n: rows(n)[0, 0, 1]),
        "an input": (chain.x, lambda n: np.full(SIZE, float(n))),
        "the target": (chain.target, rows),
    }


def rows(n: int) -> np.ndarray:
    """K once `n` was written into row n % 4 of zeros, for every n from 0 on."""
    out = np.zeros((1, 1, 4, SIZE))
    for m in range(n + 1):
        out[0, 0, m % 4] = 2.0 * m + 10
    return out


@pytest.mark.parametrize("which", views(Chain("cpu")))
def test_views_rows_inputs_and_the_target_can_be_kept(case, which):
    chain, kind = case
    tensor, want = views(chain)[which]
    session = chain.session(chain.cache(), kind, keep=[tensor])
    for n in range(5):
        chain.step(session, n, n % 4)
        np.testing.assert_array_equal(session.read(tensor), want(n))


def test_what_is_written_again_in_the_step_cannot_be_kept_but_a_copy_can(case):
    chain, kind = case
    k = chain.pair[0]
    with pytest.raises(
        lk.GraphError, match=r"is written again later in the step.*copy made by `to`"
    ):
        chain.session(chain.cache(), kind, keep=[k])
    old = k.to(chain.place)
    session = chain.session(chain.cache(), kind, keep=[old])
    for n in range(4):
        chain.step(session, n, n)
        want = rows(n)
        want[0, 0, n] = 0
        np.testing.assert_array_equal(session.read(old), want)


def test_an_effect_of_a_plan_can_be_read_after_every_pass():
    chain = Chain("cpu")
    last, early = chain.layers[-1], chain.layers[1]
    for effects, left in (([], False), ([early], True)):
        plan = lk.plan(last, effects=effects)
        for n in range(3):
            plan.run({chain.x: np.full(SIZE, float(n))})
            if left:
                np.testing.assert_array_equal(plan.read(early), chain.want(n)[1])
        assert plan.is_left(early) is left
        with pytest.raises(lk.GraphError, match="make it a target or an effect"):
            plan.read(chain.layers[0])


def test_kept_tensors_are_of_the_graph():
    chain = Chain("cpu")
    with pytest.raises(lk.GraphError, match="of another graph"):
        chain.session(chain.cache(), DecodeSession, keep=[lk.Graph().const([1.0])])


def test_nothing_is_read_of_a_step_that_failed():
    with fresh_sim() as sim:
        chain = Chain("sim:0")
        session = chain.session(chain.cache(), DecodeSession, keep=chain.layers)
        chain.step(session, 1)
        real = sim.feeder

        def failing(*_: Any) -> None:
            raise RuntimeError("bus")

        for feed in session._feeds:
            feed.put = failing
        with pytest.raises(lk.LazyKvError):
            chain.step(session, 2)
        with pytest.raises(lk.GraphError, match="need a pass before it"):
            session.read(chain.x)
        assert sim.feeder == real


def test_hidden_states_of_a_model_are_those_of_planning_every_token():
    model = small_llama()
    cache, other = (model.new_cache(16, device="sim:0") for _ in range(2))
    step, again = (model.step_graph(c) for c in (cache, other))
    hidden = [(t, a) for t, a in zip(step.graph, again.graph, strict=True) if len(t.inputs) > 1]
    hidden = [(t, a) for t, a in hidden if t.op.destroys is None]

    def build(kind: Any, at: lk.KvCache, s: Any, **more: Any) -> Any:
        return kind.build(
            lk.InferenceContext("sim:0"),
            s.logits,
            kv=at,
            kv_nodes=s.kv_nodes,
            bound=s.bound,
            **more,
        )

    held = build(CapturedDecodeSession, cache, step, keep=[t for t, _ in hidden])
    assert len(hidden) > 20
    for value in range(3):
        logits = token(model, held, cache, value)
    assert held.captured
    got = [held.read(t) for t, _ in hidden]
    plain = build(DecodeSession, other, again)
    for value in range(2):
        token(model, plain, other, value)
    for (_, a), value in zip(hidden[::5], got[::5], strict=True):
        one = lk.DecodeSession.build(
            lk.InferenceContext("sim:0"), a, kv=other, kv_nodes=again.kv_nodes, bound=again.bound
        )
        np.testing.assert_array_equal(token(model, one, other, 2, start=2), value)
    np.testing.assert_array_equal(token(model, plain, other, 2), logits)


@pytest.mark.parametrize("place", ["cpu", "sim:0"])
def test_a_paged_step_keeps_values_of_the_whole_batch(place):
    pool = make_pool(8, 2, place=place)
    step = PagedStep(pool)
    doubled = step.bound["numbers"] * 2.0
    session = step.session(pool, keep=[doubled])
    a, b = opened(pool, [1]), opened(pool, [2])
    for n in range(3):
        session.step([a, b], paged_data(pool, [n], [n + 5]))
        assert session.read(doubled).tolist() == [2 * n, 2 * n + 10, 0, 0]
    assert session.plan.captured is (place != "cpu")
