"""Caches that are three methods and nothing else: what they have more or less than the plan, and
what they answer wrongly."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from steps import Step, attention_step, data, run

import lazykv as lk

SHAPE = (1, 2, 8, 4)


def zeros() -> lk.Storage:
    return lk.Storage.from_array(np.zeros(SHAPE, np.float32))


class Rows:
    """Storages by (layer, slot); None for every other, as the protocol says."""

    identity: Any = 7
    location: Any = lk.DeviceLocation("cpu")

    def __init__(self, layers: int = 2, slots: int = 2) -> None:
        self.there: dict[tuple[int, int], Any] = {
            (layer, which): zeros() for layer in range(layers) for which in range(slots)
        }

    def alloc_id(self) -> Any:
        return self.identity

    def rebind_location(self) -> Any:
        return self.location

    def rebind_slot(self, layer: int, which: int) -> Any:
        return self.there.get((layer, which))


class Raising(Rows):
    """The same over a container that raises for what it does not hold."""

    def rebind_slot(self, layer: int, which: int) -> Any:
        return self.there[layer, which]


def step_of(layers: int = 2) -> Step:
    return attention_step(lk.KvCache.with_capacity(layers, 2, 4, 8, "f32"))


@pytest.fixture(params=[Rows, Raising])
def kind(request) -> type[Rows]:
    return request.param


def test_more_layers_are_seen_without_a_count(kind):
    step = step_of()
    session = step.session(kind())
    more = kind(3)
    assert session.rebind_kv(more) == lk.StorageDiffers(2, 0)
    assert session.alloc_id == 7
    with pytest.raises(lk.GraphError, match="got no node for layer 2, slot 0, need one for every"):
        step.session(more)


def test_more_slots_are_seen_too(kind):
    step = step_of()
    session = step.session(kind())
    more = kind(2, 3)
    assert session.rebind_kv(more) == lk.StorageDiffers(0, 2)
    with pytest.raises(lk.GraphError, match="got no node for layer 0, slot 2"):
        step.session(more)
    one_more = kind()
    one_more.there[1, 2] = zeros()
    assert session.rebind_kv(one_more) == lk.StorageDiffers(1, 2)


def test_fewer_layers_are_a_missing_slot(kind):
    step = step_of()
    assert step.session(kind()).rebind_kv(kind(1)) == lk.MissingSlot(1, 0)
    with pytest.raises(lk.BindingError, match="no storage for layer 1, slot 0"):
        step.session(kind(1))


def test_as_much_as_the_plan_has_is_taken(kind):
    step = step_of()
    a, b = kind(), kind()
    session = step.session(a)
    assert session.rebind_kv(b) is None
    session.step(data(step, 3), {step.pos: 0})
    assert b.there[1, 1].to_numpy()[0, 0, 0].tolist() == [3] * 4
    assert not a.there[1, 1].to_numpy().any()


def test_a_latent_cache_of_three_slots_is_none_of_two():
    two, three = (lk.LatentKvCache.with_capacity(1, 8, [(4,)] * n, "f32") for n in (2, 3))
    g = lk.Graph()
    slots = [g.placeholder((8, 4), "f32", f"s{n}") for n in range(3)]
    out = slots[0] + slots[1]

    def build(cache: lk.LatentKvCache, nodes: list[lk.Tensor]) -> lk.DecodeSession:
        return lk.DecodeSession.build(
            lk.InferenceContext(), out, kv=cache, kv_nodes=[tuple(nodes)], bound={}
        )

    session = build(two, slots[:2])
    assert session.validity_for(three, model_key=()) is lk.PlanValidity.Stale
    assert session.rebind_kv(three) == lk.StorageDiffers(0, 2)
    with pytest.raises(lk.GraphError, match="got no node for layer 0, slot 2"):
        build(three, slots[:2])


def test_a_slot_that_the_target_does_not_need_moves_along():
    caches = [lk.KvCache.with_capacity(1, 2, 4, 8, "f32") for _ in range(2)]
    step = attention_step(caches[0])
    (k, v), new = step.kv_nodes[0], step.bound["k"]
    session = lk.DecodeSession.build(
        lk.InferenceContext(), k.at[:, :, step.pos : step.pos + 1].set(new) + 0.0, kv=caches[0],
        kv_nodes=[(k, v)], bound=step.bound,
    )  # fmt: skip
    assert session.rebind_kv(caches[1]) is None
    run(session, step, caches[1], data(step, 5))
    assert caches[1].slot_storage(0, 0).to_numpy()[0, 0, 0].tolist() == [5] * 4
    other = Rows(1)
    other.there[0, 1] = lk.Storage.from_array(np.zeros((1, 2, 9, 4), np.float32))
    assert session.rebind_kv(other) == lk.StorageDiffers(0, 1)
    assert session.rebind_kv(caches[0]) is None


WRONG: list[tuple[str, object, type[lk.LazyKvError], str]] = [
    ("alloc_id", 0, lk.RangeError, "got alloc_id 0, need a number above 0"),
    ("alloc_id", -3, lk.RangeError, "got alloc_id -3, need a number above 0"),
    ("alloc_id", "x", lk.DTypeError, "got alloc_id 'x', need a whole number"),
    ("alloc_id", None, lk.DTypeError, "got alloc_id None, need a whole number"),
    ("alloc_id", True, lk.DTypeError, "got alloc_id True, need a whole number"),
    ("alloc_id", 1.0, lk.DTypeError, "got alloc_id 1.0, need a whole number"),
    ("rebind_location", "cpu", lk.BindingError, "got location 'cpu', need a DeviceLocation"),
    ("rebind_slot", "x", lk.BindingError, "got str for layer 2, slot 0, need a Storage or None"),
    ("rebind_slot", np.zeros(SHAPE), lk.BindingError, "got ndarray for layer 2, slot 0"),
    ("n_layers", "x", lk.DTypeError, "got n_layers 'x', need a whole number"),
]


def calls(session: lk.DecodeSession) -> tuple[Any, ...]:
    """What a re-bind may change."""
    return (
        session.alloc_id, session.rebind_count, list(session.history), list(session.plan._calls)
    )  # fmt: skip


@pytest.mark.parametrize(("verb", "answer", "error", "words"), WRONG)
def test_a_wrong_answer_is_a_typed_error_and_changes_nothing(verb, answer, error, words):
    step = step_of()
    session = step.session(Rows())
    wrong: Any = Rows()
    setattr(wrong, verb, lambda *at: answer)
    before = calls(session)
    with pytest.raises(error) as caught:
        session.rebind_kv(wrong)
    assert words in str(caught.value)
    assert calls(session) == before
    with pytest.raises(error):
        step.session(wrong)
    if verb == "alloc_id":
        with pytest.raises(error):
            session.validity_for(wrong, model_key=())


NO_CACHE: list[object] = [None, "x", 3, object(), [1], lk.KvCache]


@pytest.mark.parametrize("kv", NO_CACHE, ids=lambda kv: type(kv).__name__)
@pytest.mark.parametrize(
    "verb",
    [
        lambda s, kv: s.rebind_kv(kv),
        lambda s, kv: s.validity_for(kv, model_key=()),
        lambda s, kv: s.is_valid_for(kv, model_key=()),
        lambda s, kv: s.differences(kv, model_key=()),
    ],
)
def test_what_is_no_cache_is_named(verb: Callable[..., object], kv):
    session = step_of().session(Rows())
    with pytest.raises(lk.BindingError, match=r"got \w+, need a cache"):
        verb(session, kv)
