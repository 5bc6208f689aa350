"""What is structure and what is not; the cache stays bounded."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import Field, fields, replace
from typing import Any

import numpy as np
import pytest
from toy_backends import Toy, registered

import lazykv as lk
from lazykv import dtypes
from lazykv.compiler.trace import trace
from lazykv.device import register_backend
from lazykv.ops.op import Op
from lazykv.runtime.plan_cache import PlanCache, plan_cache
from lazykv.symbols import as_expr

N = lk.Sym("n")
DIM = "int | lazykv.symbols.Expr | lazykv.symbols.ScalarSlot"

# Two values per type of parameter.
SAMPLES: dict[str, tuple[Any, Any]] = {
    "<class 'bool'>": (False, True),
    "<class 'int'>": (1, 2),
    "<class 'float'>": (0.0, -0.0),
    "<class 'str'>": ("cpu", "cuda:0"),
    "<class 'lazykv.dtypes.DType'>": (dtypes.f32, dtypes.bf16),
    "int | None": (None, 0),
    "str | None": (None, "cpu"),
    DIM: (1, as_expr(N)),
    f"{DIM} | None": (None, 0),
    "tuple[int, ...]": ((0, 1), (1, 0)),
    f"tuple[{DIM}, ...]": ((0, 1), (0, as_expr(N + 1))),
}


def op_classes(base: type[Op] = Op) -> Iterator[type[Op]]:
    """Every op class of the package that can be a node."""
    for cls in base.__subclasses__():
        yield from op_classes(cls)
        if hasattr(cls, "name") and cls.__module__.startswith("lazykv."):
            yield cls


def values(field: "Field[Any]") -> tuple[Any, Any]:
    return SAMPLES[str(field.type)]


@pytest.mark.parametrize("cls", sorted(op_classes(), key=lambda c: c.name), ids=lambda c: c.name)
def test_every_parameter_of_every_op_is_structure(cls: type[Op]) -> None:
    op = cls(**{f.name: values(f)[0] for f in fields(cls)})
    assert op.key() == replace(op).key()
    assert hash(op.key()) == hash(replace(op).key())
    for f in fields(cls):
        other = replace(op, **{f.name: values(f)[1]})
        assert other.key() != op.key(), f"{f.name} is missing from the key"
    assert set(op.params()) == {f.name for f in fields(cls)}


def test_no_two_ops_share_a_key() -> None:
    classes = list(op_classes())
    keys = {cls(**{f.name: values(f)[0] for f in fields(cls)}).key() for cls in classes}
    assert len(keys) == len(classes) == len({c.name for c in classes})


def key(build: Callable[[lk.Graph], Any], **options: Any) -> Any:
    made = build(lk.Graph())
    return trace(made if isinstance(made, list) else [made], [], {}, **options).key


def x(g: lk.Graph, shape: tuple[int, ...] = (2, 4), dtype: str = "f32") -> lk.Tensor:
    return g.placeholder(shape, dtype)


SAME: list[tuple[str, Callable[[lk.Graph], Any], Callable[[lk.Graph], Any]]] = [
    ("const data", lambda g: g.const([1.0, 2.0]) + 1, lambda g: g.const([5.0, 6.0]) + 1),
    ("names", lambda g: g.placeholder((1,), "f32", "a"), lambda g: g.placeholder((1,), "f32", "b")),
    ("symbol objects", lambda g: x(g)[lk.Sym("a")], lambda g: x(g)[lk.Sym("b")]),
    ("nodes nobody needs", lambda g: x(g) + 1, lambda g: [x(g) + 1, x(g).exp()][:1]),
    ("order of addition", lambda g: x(g)[lk.Sym("a") + 1], lambda g: x(g)[1 + lk.Sym("b")]),
]

DIFFERENT: list[tuple[str, Callable[[lk.Graph], Any], Callable[[lk.Graph], Any]]] = [
    ("F4 shape", lambda g: x(g) + 1, lambda g: x(g, (2, 8)) + 1),
    ("dtype", lambda g: x(g) + 1, lambda g: x(g, dtype="f16") + 1),
    ("op", lambda g: x(g) + 1, lambda g: x(g) * 1),
    ("number", lambda g: x(g) + 1, lambda g: x(g) + 2),
    ("sign of zero", lambda g: x(g) * 0.0, lambda g: x(g) * -0.0),
    ("targets", lambda g: x(g) + 1, lambda g: [x(g) + 1, next(iter(g))]),
    ("order of targets", lambda g: [a := x(g), a + 1], lambda g: [a := x(g), a + 1][::-1]),
    ("operands", lambda g: (a := x(g)) - x(g) - a, lambda g: x(g) - (b := x(g)) - b),
    ("const or placeholder", lambda g: g.const(np.zeros((2, 4), "f")), lambda g: x(g)),
    ("frozen or not", lambda g: g.const([1.0]),
     lambda g: g.const(lk.Storage.from_array(np.array([1.0])))),
    ("number or symbol", lambda g: x(g)[1], lambda g: x(g)[N]),
    ("expression", lambda g: x(g)[N], lambda g: x(g)[N + 1]),
    ("range of a symbol", lambda g: x(g)[lk.Sym("a", 0, 1)], lambda g: x(g)[lk.Sym("a", 0, 2)]),
    ("one symbol or two", lambda g: x(g)[N, N], lambda g: x(g)[N, lk.Sym("m")]),
    ("location of an alloc", lambda g: g.alloc((1,), "f32"),
     lambda g: g.alloc((1,), "f32", "toy:0")),
    ("location of a copy", lambda g: x(g).to("cpu"), lambda g: x(g).to("toy:0")),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), [c[1:] for c in SAME], ids=[c[0] for c in SAME])
def test_SCH8_data_and_symbol_values_are_not_structure(a: Any, b: Any) -> None:
    assert key(a) == key(b)
    assert hash(key(a)) == hash(key(b))


@pytest.mark.parametrize(("a", "b"), [c[1:] for c in DIFFERENT], ids=[c[0] for c in DIFFERENT])
def test_SCH8_everything_else_is(a: Any, b: Any) -> None:
    assert key(a) != key(b)


def test_SCH8_locations_and_generations_are_structure() -> None:
    with registered(Toy()):
        g = lk.Graph()
        p = x(g)
        here = lk.plan(p + 1)
        there = lk.plan(p + 1, device="toy:0")
        bound = lk.plan(p + 1, {p: lk.Storage.from_array(np.zeros((2, 4), np.float32), "toy:1")})
        assert len({plan.structure for plan in (here, there, bound)}) == 3
        before = key(lambda g: x(g).to("toy:0"))
        register_backend("toy", Toy())
        assert key(lambda g: x(g).to("toy:0")) != before


def test_F4_another_length_is_another_plan() -> None:
    for n, want in ((4, 1.5), (8, 3.5)):
        g = lk.Graph()
        q, k = g.const(np.zeros((1, 1, 1, 1), "f")), g.const(np.zeros((1, 1, n, 1), "f"))
        v = g.const(np.arange(n, dtype="f").reshape(1, 1, n, 1))
        assert lk.realize(lk.attention(q, k, v)).item() == want


def test_a_cached_program_keeps_no_data_alive() -> None:
    store = lk.Storage.from_array(np.zeros(4))
    g = lk.Graph()
    p = g.placeholder((4,), "f64")
    lk.realize(p * 3 + g.const(store), {p: store})
    gone = weakref.ref(store), weakref.ref(g.node(p.node_id))
    del store, p, g
    gc.collect()
    assert [r() for r in gone] == [None, None]


def test_the_cache_is_bounded_and_drops_the_oldest_use() -> None:
    cache = PlanCache(2)

    def traced(n: int) -> Any:
        return trace([x(lk.Graph()) + n], [], {})

    one, two = cache.program(traced(1)), cache.program(traced(2))
    assert cache.program(traced(1)) is one
    cache.program(traced(3))
    assert len(cache) == 2
    assert cache.program(traced(1)) is one
    assert cache.program(traced(2)) is not two
    cache.clear()
    assert len(cache) == 0


def test_the_size_comes_from_the_environment() -> None:
    code = "from lazykv.runtime.plan_cache import plan_cache; print(plan_cache.size)"

    def run(value: str) -> "subprocess.CompletedProcess[str]":
        env = {**os.environ, "LAZYKV_PLAN_CACHE": value}
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)

    assert run("7").stdout.strip() == "7"
    bad = run("0")
    assert bad.returncode != 0
    assert "LAZYKV_PLAN_CACHE: got '0', need a whole number" in bad.stderr


def test_Q1_a_chain_that_is_written_and_never_read_does_not_grow() -> None:
    store = lk.Storage.from_array(np.zeros(8, np.float32))
    sizes = []
    for step in range(1000):
        g = lk.Graph()
        v = g.placeholder((8,), "f32")
        row = g.const(np.full(1, step, np.float32))
        lk.realize(v.at[N : N + 1].set(row), {v: store}, {N: step % 8})
        if step in (10, 999):
            gc.collect()
            sizes.append(
                sum(issubclass(type(o), lk.Tensor | lk.Storage | lk.Plan) for o in gc.get_objects())
            )
    assert sizes[1] <= sizes[0]
    assert store.to_numpy()[7] == 999


def test_Q2_a_changing_offset_needs_one_plan() -> None:
    plan_cache.clear()
    store = lk.Storage.from_array(np.zeros(1000, np.float32))
    before = lk.stats()
    for step in range(1000):
        g = lk.Graph()
        v = g.placeholder((1000,), "f32")
        lk.realize(v.at[N : N + 1].set(g.const(np.ones(1, np.float32))), {v: store}, {N: step})
    after = lk.stats()
    assert after.plans_built - before.plans_built == 1
    assert after.plan_cache_hits - before.plan_cache_hits == 999
    assert store.to_numpy().all()
    assert len(plan_cache) == 1


def test_threads_share_the_cache() -> None:
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for i in range(50):
                g = lk.Graph()
                got = lk.realize(g.const([float(n)]) + (i % 5))
                assert got.tolist() == [n + i % 5]
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert not failures
