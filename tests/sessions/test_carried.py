"""A position that the pass itself moves on is copied in only where it is not there already."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from captured_steps import session_of, token
from small_llama import CONFIG, small_llama

import lazykv as lk
from lazykv.backends.sim import SimBackend
from lazykv.compiler.carried import CarriedInput, advance_of
from lazykv.device import register_backend, unregister_backend
from lazykv.errors import BindingError, KernelError
from lazykv.models.model import LlamaModel
from lazykv.sessions.captured import CapturedDecodeSession

PLACE = "sim:0"


@pytest.fixture
def sim() -> Iterator[SimBackend]:
    backend = SimBackend()
    register_backend("sim", backend)
    yield backend
    unregister_backend("sim")


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return small_llama()


def copies(sim: SimBackend, step: Callable[[], object]) -> int:
    before = sim.counts["copy"]
    step()
    return sim.counts["copy"] - before


def test_a_step_that_follows_another_copies_no_position(sim, model):
    cache = model.new_cache(16, device=PLACE)
    model.decode_step(1, cache)
    assert [copies(sim, lambda: model.decode_step(2, cache)) for _ in range(4)] == [3] * 4
    cache.truncate_to(3)
    assert copies(sim, lambda: model.decode_step(2, cache)) == 4  # the position too
    assert copies(sim, lambda: model.decode_step(2, cache)) == 3


@pytest.mark.parametrize("kind", [lk.DecodeSession, CapturedDecodeSession])
def test_steps_at_any_position_equal_those_of_the_host(sim, model, kind):
    """Forward, back, the same again, and forward by more than one."""
    cache, host = model.new_cache(32, device=PLACE), model.new_cache(32)
    session = session_of(model, cache, kind)
    for n, at in enumerate([0, 1, 2, 1, 1, 2, 3, 0, 1, 2, 3, 4]):
        host.truncate_to(at)
        want = model.decode_step(n, host)
        np.testing.assert_allclose(token(model, session, cache, n, at), want, rtol=1e-5, atol=1e-5)


def test_another_cache_of_another_length_is_not_stepped_at_the_old_position(sim, model):
    first, second = (model.new_cache(16, device=PLACE) for _ in range(2))
    host = model.new_cache(16)
    session = session_of(model, first, CapturedDecodeSession)
    for n in range(5):
        token(model, session, first, n)
    assert session.rebind_kv(second) is None
    for n in range(3):
        want = model.decode_step(n, host)
        got = token(model, session, second, n)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_after_a_failed_step_the_position_is_copied_again(sim, model):
    """Whichever kernel fails; a cache that it left torn is refused, and others go on right."""
    host, token_at, went_on = model.new_cache(16), 4, 0
    for n in range(4):
        model.decode_step(n, host)
    want = model.decode_step(9, host)
    for at in range(1, 1000):
        cache = model.new_cache(16, device=PLACE)
        for n in range(token_at):
            model.decode_step(n, cache)
        sim.fail("kernel", at)
        try:
            model.decode_step(9, cache)
        except KernelError:
            pass
        else:
            break  # a step has no more kernels
        if not any(s.torn for k in range(CONFIG.n_layers) for s in storages(cache, k)):
            np.testing.assert_allclose(model.decode_step(9, cache), want, rtol=1e-5, atol=1e-5)
            went_on += 1
    assert went_on > 10


def storages(cache: lk.KvCache, layer: int) -> list[lk.Storage]:
    slots = [cache.slot_storage(layer, s) for s in (lk.KvSlot.K, lk.KvSlot.V)]
    return [s for s in slots if s is not None]


def test_a_copy_that_fails_at_once_leaves_no_value_behind():
    given: list[int] = []

    def put(array: np.ndarray) -> None:
        given.append(int(array))
        if len(given) == 2:
            raise KernelError("scripted")

    carried = CarriedInput(put, 1)
    carried.feed(np.array(3))
    carried.value = carried.begin()
    carried.feed(np.array(4))
    carried.value = carried.begin()
    with pytest.raises(KernelError):
        carried.feed(np.array(2))
    carried.feed(np.array(5))
    assert given == [3, 2, 5]


def advances(write: Callable[[lk.Graph, lk.Tensor], lk.Tensor], dtype: lk.DType = lk.i64) -> object:
    """What is proven of a write into the placeholder of a plan that also reads it."""
    g = lk.Graph()
    p = g.placeholder((), dtype, "p")
    made = lk.plan([write(g, p), p + 0], {p: np.array(1, dtype.numpy)})
    (leaf,) = (n for n, t in enumerate(made.leaves) if t.name == "p")
    return advance_of(made.program, leaf)


@pytest.mark.parametrize("by", [1, 3, -2, 0])
def test_adding_a_number_in_place_is_proven(by):
    assert advances(lambda g, p: p.write_slice(p + by, ())) == by
    assert advances(lambda g, p: p.write_slice(by + p, ())) == by


@pytest.mark.parametrize(
    "write",
    [
        lambda g, p: p.write_slice(p * 2, ()),
        lambda g, p: p.write_slice(p - 1, ()),
        lambda g, p: p.write_slice((p + 1) + 1, ()),
        lambda g, p: p.write_slice(p + p, ()),
        lambda g, p: p.write_slice(g.const(np.array(4)), ()),
        lambda g, p: p.write_slice(g.const(np.array(4)) + 1, ()),
        lambda g, p: (lambda once: once.write_slice(once + 1, ()))(p.write_slice(p + 1, ())),
        lambda g, p: p.zero_fill(),
        lambda g, p: p + 1,
    ],
)
def test_anything_else_is_not(write):
    assert advances(write) is None


def test_other_dtypes_are_not():
    assert advances(lambda g, p: p.write_slice(p + 1, ()), lk.i32) is None


def test_a_plan_that_a_session_holds_takes_no_bindings_from_others(model):
    cache = model.new_cache(8)
    session = model.session_for(cache)
    model.decode_step(1, cache)
    k, _ = session.kv_nodes[0]
    other = lk.Storage.from_array(np.zeros(k.shape, np.float32))
    for attempt in (
        lambda: session.plan.bind(k, other),
        lambda: session.plan.run({k: other}, dict.fromkeys(session.plan.symbols, 1)),
    ):
        with pytest.raises(BindingError, match="holds it"):
            attempt()
    assert session.plan.storage_of(k) is cache.slot_storage(0, lk.KvSlot.K)
