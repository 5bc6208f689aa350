"""Bytes and plans of a backend that was replaced: refused by name, never read as something else."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from captured_steps import session_of
from sim_faults import fresh_sim
from small_llama import small_llama

import lazykv as lk
from lazykv.backends.cpu import CpuBackend
from lazykv.backends.sim import SimBackend
from lazykv.device import device, register_backend, unregister_backend
from lazykv.sessions.rebind import StorageDiffers

PLACE = lk.DeviceLocation("sim:0")


@pytest.fixture(autouse=True)
def sim() -> Iterator[SimBackend]:
    with fresh_sim() as made:
        yield made


@pytest.fixture
def cpu() -> Iterator[Any]:
    """The process's own, which is put back."""
    before = device("cpu").backend
    yield before
    register_backend("cpu", before)


def rows(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def replace() -> SimBackend:
    made = SimBackend()
    register_backend("sim", made)
    return made


def write(store: lk.Storage) -> None:
    with store.write():
        pass


def read(store: lk.Storage) -> None:
    with store.read():
        pass


def realized(store: lk.Storage) -> None:
    lk.realize(lk.Graph().const(store) + 1.0)


def planned(store: lk.Storage) -> None:
    x = lk.Graph().placeholder(store.shape, store.dtype)
    lk.plan(x + 1.0, {x: store}, store.location).run()


USES: dict[str, Callable[[lk.Storage], object]] = {
    "to_numpy": lk.Storage.to_numpy,
    "read": read,
    "write": write,
    "lent": lambda s: lk.Storage.wrap(s, s.location),
    "realized": realized,
    "planned": planned,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize(
    "lose", [replace, lambda: unregister_backend("sim")], ids=["replaced", "unregistered"]
)
def test_its_storages_are_refused(use, lose):
    store = lk.Storage.from_array(rows(1, 2), PLACE)
    use(store)
    lose()
    with pytest.raises(lk.TopologyChanged, match=r"got another backend of sim:0.*bytes are gone"):
        use(store)
    use(lk.Storage.from_array(rows(1, 2), PLACE))
    assert (store.version, store.torn) == (1 if use is write else 0, False)


def test_a_plan_of_the_new_one_takes_none_of_its_storages():
    old = lk.Storage.from_array(rows(1, 1), PLACE)
    replace()
    x = lk.Graph().placeholder((2,), "f32")
    plan = lk.plan(x + 1.0, {x: lk.Storage.from_array(rows(2, 2), PLACE)}, PLACE)
    for verb in (lambda: plan.run({x: old}), lambda: plan.rebind({x: old})):
        with pytest.raises(lk.TopologyChanged, match="bytes are gone"):
            verb()
        assert plan.run().tolist() == [3, 3]


def test_nothing_is_copied_to_the_old_one_st4(sim):
    """A driver whose context is gone may answer with more than an error."""
    g = lk.Graph()
    x = g.placeholder((2,), "f32")
    plan = lk.plan(x + 1.0, {x: rows(1, 1)}, PLACE)
    model = small_llama()
    ctx, cache = lk.InferenceContext(PLACE), model.new_cache(8, device=PLACE)
    model.prefill([1], cache, ctx)
    model.decode_step(2, cache, ctx)
    session = ctx.take_decode_session()
    data = {f.name: np.zeros(f.shape, f.dtype) for f in session._feeds}
    replace()
    sim.synchronize(PLACE)
    for use in (
        lambda: plan.run({x: rows(2, 2)}),
        lambda: plan.bind(x, rows(2, 2)),
        lambda: session.step(data, dict.fromkeys(session.plan.symbols, 1)),
    ):
        with pytest.raises(lk.TopologyChanged, match="plan again"):
            use()
        assert not sim.stream(PLACE).queue


def test_a_plan_made_while_its_backend_is_replaced_never_runs():
    """It would have the memory of one and the kernels of the other."""

    class Replaced(SimBackend):
        done = False

        def allocate(self, nbytes: int, location: lk.DeviceLocation) -> Any:
            made = super().allocate(nbytes, location)
            if not Replaced.done:  # as another thread does it
                Replaced.done = True
                replace()
            return made

    register_backend("sim", Replaced())
    x = lk.Graph().placeholder((2,), "f32")
    plan = lk.plan((x + 1.0) * 2.0, device=PLACE)
    assert Replaced.done
    for _ in range(2):
        with pytest.raises(lk.TopologyChanged, match="plan again"):
            plan.run({x: rows(1, 1)})
    again = lk.plan((x + 1.0) * 2.0, device=PLACE)
    assert again.run({x: rows(1, 1)}).tolist() == [4, 4]


def test_no_session_is_welded_to_a_cache_of_another_backend():
    model = small_llama()
    old = model.new_cache(8, device=PLACE)
    replace()
    cache = model.new_cache(8, device=PLACE)
    session = session_of(model, cache)
    refusal = session.rebind_kv(old)
    assert isinstance(refusal, StorageDiffers)
    assert (refusal.what, refusal.layer, refusal.which) == ("backend", 0, 0)
    assert session.alloc_id == cache.alloc_id()


@pytest.mark.parametrize("with_context", [False, True])
def test_a_model_places_its_weights_anew(with_context):
    model, ctx = small_llama(), lk.InferenceContext(PLACE) if with_context else None

    def decoded(cache: lk.KvCache, ctx: Any = None) -> np.ndarray:
        return np.stack([model.decode_step(v, cache, ctx) for v in range(3)])

    want = decoded(model.new_cache(8))
    for _ in range(3):
        cache = model.new_cache(8, device=PLACE)
        np.testing.assert_allclose(decoded(cache, ctx), want, rtol=1e-5, atol=1e-5)
        on_device = [key for key in model._placed if all(place == PLACE for place, _ in key)]
        assert len(on_device) == 1  # those of lost backends are let go
        replace()
        with pytest.raises(lk.TopologyChanged):
            model.decode_step(3, cache, ctx)
        assert len(cache) == 3


def test_host_memory_outlives_a_backend_of_its_class(cpu):
    """And is used by the next one where it is."""
    store, x = lk.Storage.from_array(rows(1, 2)), lk.Graph().placeholder((2,), "f32")
    old = lk.plan(x + 1.0, {x: store})
    old.run()
    register_backend("cpu", CpuBackend())
    assert store.to_numpy().tolist() == [1, 2]
    assert lk.plan(x + 1.0, {x: store}).run().tolist() == [2, 3]
    with store.write() as array:
        array[...] = 5
    assert np.shares_memory(np.asarray(store), array)
    with pytest.raises(lk.TopologyChanged, match="plan again"):
        old.run()

    class Other(CpuBackend):
        """Not known to lay its bytes out in the same way."""

    register_backend("cpu", Other())
    with pytest.raises(lk.TopologyChanged, match="bytes are gone"):
        store.to_numpy()
    register_backend("cpu", cpu)
    assert store.to_numpy().tolist() == [5, 5]
