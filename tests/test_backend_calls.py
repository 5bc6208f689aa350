"""A backend that fails at one of its calls: a typed error names it, and nothing of the caller's is
spoiled."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from toy_backends import Toy, registered

import lazykv as lk
from lazykv.device import Kernel

PLACE = "flaky:0"


class Flaky(Toy):
    """Fails in `broken`, the name of one of its methods, with `error`; or answers with it."""

    kind = "flaky"
    broken: str | None = None
    error: Any = None

    def fail(self, call: str) -> None:
        if self.broken == call:
            raise self.error

    def allocate(self, *args: Any) -> Any:
        self.fail("allocate")
        return super().allocate(*args)

    def view(self, *args: Any) -> Any:
        self.fail("view")
        return super().view(*args)

    def copy_in(self, *args: Any) -> None:
        self.fail("copy_in")
        super().copy_in(*args)

    def feeder(self, dest: Any) -> Any:
        put = super().feeder(dest)

        def feed(source: Any) -> None:
            self.fail("feeder")
            put(source)

        return feed

    def copy_out(self, *args: Any) -> Any:
        self.fail("copy_out")
        return super().copy_out(*args)

    def synchronize(self, *args: Any) -> None:
        self.fail("synchronize")

    def kernel(self, *args: Any) -> Any:
        if self.broken == "wrong kernel":
            return self.error
        self.fail("kernel")
        found = super().kernel(*args)
        if found is None:
            return None

        def emit(call: Any) -> Any:
            self.fail("emit")
            return found.emit(call)

        def scratch(*args: Any) -> Any:
            self.fail("scratch")
            return found.scratch(*args)

        return Kernel(emit, scratch)


@pytest.fixture
def backend() -> Iterator[Flaky]:
    with registered(made := Flaky()):
        yield made


def ones() -> np.ndarray[Any, Any]:
    return np.ones(2, np.float32)


def bound_plan() -> lk.Plan:
    """A plan that is not resolved yet, and that writes into what it copies in."""
    x = lk.Graph().placeholder((2,), "f32", name="x")
    made: lk.Plan = lk.plan(x.at[0:1].set(x[1:2] + 1.0), device=PLACE)
    return made


def run(plan: lk.Plan) -> Any:
    return plan.run({plan.leaves[0]: ones()})


def stored(_: object = None) -> lk.Storage:
    return lk.Storage.from_array(ones(), PLACE)


def allocated(_: object) -> lk.Storage:
    return lk.Storage.allocate((2,), "f32", PLACE)


def nothing() -> None:
    return None


def fresh_plan(_: object) -> Any:
    x = lk.Graph().placeholder((2,), "f32")
    lk.plan(x, device=PLACE)
    return lk.realize((x + 1.0) / 3.0, {x: ones()}, device=PLACE)


def live_cache() -> lk.KvCache:
    cache = lk.KvCache.with_capacity(1, 1, 2, 4, "f32", PLACE)
    rows = np.ones((1, 1, 1, 2), np.float32)
    cache.append(0, rows, rows)
    return cache


CASES: dict[str, tuple[str, Callable[[], Any], Callable[[Any], Any]]] = {
    "allocate": ("allocate of 8 bytes", nothing, allocated),
    "view": ("allocate of 8 bytes", nothing, allocated),
    "copy_in": ("copy_in", nothing, stored),
    "copy_in, a binding": ("copy_in", bound_plan, run),
    "copy_out": ("copy_out", stored, lambda s: s.to_numpy()),
    "copy_out, rows": ("copy_out", live_cache, lambda c: c.live(0)),
    "synchronize": ("synchronize", stored, lambda s: s.to_numpy()),
    "kernel": ("kernel() for add_scalar", nothing, fresh_plan),
    "emit": ("emit of add_scalar", nothing, fresh_plan),
    "scratch": ("scratch of add_scalar", nothing, fresh_plan),
}


@pytest.mark.parametrize(
    "error", [RuntimeError, OSError, TypeError, ZeroDivisionError, MemoryError]
)
@pytest.mark.parametrize("case", CASES)
def test_what_a_backend_raises_is_typed_and_names_the_call(
    backend: Flaky, case: str, error: type[Exception]
) -> None:
    call, make, use = CASES[case]
    given = make()
    backend.error, backend.broken = error("no luck"), case.partition(",")[0]
    kind = lk.OutOfMemory if error is MemoryError else lk.KernelError
    with pytest.raises(kind) as e:
        use(given)
    said = f"backend of flaky:0: got {error.__name__}: no luck in {call}, need it to run"
    assert str(e.value) == said
    assert e.value.__cause__ is backend.error
    backend.broken = None
    use(given)


def test_ST5_a_backends_memory_error_names_the_bytes_and_leaves_no_half_built_cache(
    backend: Flaky,
) -> None:
    backend.broken, backend.error = "allocate", MemoryError("vendor")
    with pytest.raises(lk.OutOfMemory, match="allocate of 32 bytes"):
        live_cache()
    backend.error = lk.OutOfMemory("the backend's own words")
    with pytest.raises(lk.OutOfMemory, match="the backend's own words"):
        live_cache()
    backend.broken = None
    assert live_cache().cached_len == 1


@pytest.mark.parametrize("answer", [3, "add", object, lambda call: []])
def test_a_kernel_that_is_none_is_refused(backend: Flaky, answer: object) -> None:
    backend.broken, backend.error = "wrong kernel", answer
    got = type(answer).__name__
    with pytest.raises(lk.KernelError, match=f"flaky:0: got {got} from kernel.* need a Kernel or"):
        fresh_plan(None)
    backend.broken = None
    assert fresh_plan(None).tolist() == pytest.approx([2 / 3] * 2)


def test_an_input_that_a_step_cannot_copy_in_is_typed(backend: Flaky) -> None:
    cache = lk.KvCache.with_capacity(1, 1, 2, 4, "f32", PLACE)
    g = lk.Graph()
    q = g.placeholder((1, 1, 1, 2), "f32")
    k, v = (g.placeholder((1, 1, 4, 2), "f32") for _ in range(2))
    target = lk.attention(q, k.at[:, :, 0:1].set(q), v.at[:, :, 0:1].set(q), length=1)
    session = lk.DecodeSession.build(
        lk.InferenceContext(PLACE), target, kv=cache, kv_nodes=[(k, v)], bound={"q": q}
    )
    row = np.ones((1, 1, 1, 2), np.float32)
    backend.broken, backend.error = "feeder", RuntimeError("no luck")
    with pytest.raises(lk.KernelError, match=r"flaky:0: got RuntimeError: no luck in feeder"):
        session.step({"q": row})
    backend.broken = None
    assert session.step({"q": row}).tolist() == row.tolist()
