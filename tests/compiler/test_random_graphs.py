"""Random graphs against the functional oracle: results and the final bytes of storages.

LAZYKV_RANDOM_GRAPHS sets how many graphs run. A failure prints the seed of its graph, and
``LAZYKV_RANDOM_SEED=<seed> pytest tests/compiler/test_random_graphs.py`` runs that one alone.
"""

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from oracle import evaluate, landed, needed, start_of
from toy_backends import Toy, registered

import lazykv as lk
from lazykv.compiler import effects, ordering, program
from lazykv.compiler.memory import Interval, assign
from lazykv.errors import RangeError
from lazykv.runtime.plan_cache import plan_cache

GRAPHS = int(os.environ.get("LAZYKV_RANDOM_GRAPHS", "400"))
FAILED = os.environ.get("LAZYKV_RANDOM_SEED")
SEEDS = range(GRAPHS) if FAILED is None else [int(FAILED)]
DTYPES = ("i32", "f32", "f16", "bf16", "u8")


class Mismatch(AssertionError):
    """A planned result differs from the oracle's."""


class Builder:
    """One random graph. Tensors of one dtype meet each other, so one dtype fills the graph."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = lk.dtype(self.pick(DTYPES))
        self.places = self.pick((("cpu",), ("cpu",), ("cpu", "toy:0", "toy:1")))
        self.g = lk.Graph()
        self.bindings: dict[lk.Tensor, Any] = {}
        self.env: dict[lk.Sym, int] = {}
        for name, high in (("a", 4), ("b", None)):
            self.env[lk.Sym(name, 0, high)] = int(self.rng.integers(0, 4))
        self.live = [self.leaf() for _ in range(self.rng.integers(1, 4))]
        for _ in range(self.rng.integers(4, 22)):
            self.step()
        count = self.rng.integers(1, len(self.live) + 1)
        chosen = self.rng.choice(len(self.live), count, replace=bool(self.rng.random() < 0.2))
        self.targets = [self.live[i] for i in chosen]

    def pick(self, items: Any) -> Any:
        return items[self.rng.integers(len(items))]

    def below(self, n: int) -> int:
        return int(self.rng.integers(n))

    def array(self, shape: tuple[int, ...]) -> Any:
        return self.rng.integers(0, 9, shape).astype(self.dtype.numpy)

    def shape(self) -> tuple[int, ...]:
        extents = (1, 2, 3, 4, 4, 6, 8) if self.rng.random() < 0.95 else (0, 1, 2)
        return tuple(self.pick(extents) for _ in range(self.pick((0, 1, 1, 2, 2, 3))))

    def place(self) -> str:
        return self.pick(self.places)

    def leaf(self, shape: tuple[int, ...] | None = None) -> lk.Tensor:
        shape = self.shape() if shape is None else shape
        kind = self.below(6)
        if kind == 0:
            return self.g.const(self.array(shape))
        if kind == 1:
            return self.g.const(lk.Storage.from_array(self.array(shape), self.place()))
        if kind == 2:
            return self.g.alloc(shape, self.dtype, self.place()).zero_fill()
        t = self.g.placeholder(shape, self.dtype)
        data = self.array(shape)
        self.bindings[t] = data if kind == 3 else lk.Storage.from_array(data, self.place())
        return t

    def number(self, high: int) -> lk.Tensor:
        """A rank-0 i64 below `high`: a constant, a bound one, or part of a bound row."""
        value, kind = self.below(high), self.below(3)
        if kind == 0:
            return self.g.const(np.int64(value))
        t = self.g.placeholder((), "i64") if kind == 1 else self.g.placeholder((2,), "i64")
        self.bindings[t] = np.int64(value) if kind == 1 else np.array([7, value])
        return t if kind == 1 else t[1]

    def start(self, room: int) -> Any:
        """A start in 0..room, at times as a symbol expression with that value."""
        value = self.below(room + 1)
        if self.rng.random() < 0.7:
            return value
        sym = self.pick(list(self.env))
        return sym + (value - self.env[sym])

    def fitted(self, shape: tuple[int, ...]) -> lk.Tensor:
        """Some tensor of a shape, preferably cut out of what is there."""
        for _ in range(6):
            t = self.pick(self.live)
            if t.shape == shape:
                return t
            size = int(np.prod(shape, dtype=int))
            if len(t.shape) == len(shape) and all(
                n >= m for n, m in zip(t.shape, shape, strict=True)
            ):
                for axis, n in enumerate(shape):
                    t = t.slice(axis, self.start(t.shape[axis] - n), n)
                return t
            if int(np.prod(t.shape, dtype=int)) >= size > 0:
                flat = t.reshape(int(np.prod(t.shape, dtype=int)))
                return flat.slice(0, self.below(flat.shape[0] - size + 1), size).reshape(shape)
        return self.leaf(shape)

    def dest(self) -> lk.Tensor | None:
        found = [t for t in self.live if not t.layout.repeats]
        recent = found[-6:] if self.rng.random() < 0.5 else found
        return self.pick(recent) if recent else None

    def source(self, shape: tuple[int, ...]) -> lk.Tensor:
        t = self.fitted(shape)
        return t + self.fitted(shape) if self.rng.random() < 0.3 else t

    def step(self) -> None:
        kind = self.pick((self.view, self.view, self.write, self.write, self.read))
        made = kind()
        if made is not None:
            self.live.append(made)

    def view(self) -> lk.Tensor | None:
        t = self.pick(self.live)
        kind = self.below(7)
        if kind == 0 and len(t.shape) < 4:
            return t.unsqueeze(self.below(len(t.shape) + 1))
        if kind == 1:
            shape = tuple(self.pick((1, 2, 3)) if n == 1 else n for n in t.shape)
            return t.broadcast_to((self.pick((1, 2)), *shape)) if len(shape) < 4 else None
        if not t.shape:
            return t.contiguous()
        axis = self.below(len(t.shape))
        if kind == 2:
            ones = [a for a, n in enumerate(t.shape) if n == 1]
            return t.squeeze(self.pick(ones)) if ones else t.transpose(0, axis)
        if kind == 3:
            return t.permute(*self.rng.permutation(len(t.shape)))
        if kind == 4:
            return t.reshape(self.refold(t.shape))
        length = self.below(t.shape[axis] + 1)
        return t.slice(axis, self.start(t.shape[axis] - length), length)

    def refold(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        size, out = int(np.prod(shape, dtype=int)), []
        if size == 0:
            return shape[::-1]
        for factor in (2, 3, 2):
            if size % factor == 0 and self.rng.random() < 0.6:
                out.append(factor)
                size //= factor
        out.insert(self.below(len(out) + 1), size)
        return tuple(out)

    def write(self) -> lk.Tensor | None:
        dest = self.dest()
        if dest is None:
            return None
        kind = self.below(9)
        if kind == 0:
            return dest.zero_fill()
        if kind == 8 and dest.shape:
            return self.write_rows(dest)
        if kind in (1, 2) and dest.shape:
            axis = self.below(len(dest.shape))
            extent = dest.shape[axis]
            rows = self.below(extent + 3 if kind == 2 else extent + 1)
            shape = (*dest.shape[:axis], rows, *dest.shape[axis + 1 :])
            src = self.source(shape)
            if kind == 1:
                return dest.write_slice_at(src, axis, self.number(extent - rows + 1))
            modulus = self.below(extent) + 1 if extent else 0
            return (
                dest.write_slice_rotating(src, axis, self.number(40), modulus) if modulus else None
            )
        widths = tuple(
            self.pick((n, max(n - 1, 0), max(n - 2, 0), 1 if n else 0)) for n in dest.shape
        )
        starts = [self.start(n - w) for n, w in zip(dest.shape, widths, strict=True)]
        src = self.source(widths)
        return dest.write_slice(src, [(s, s + w) for s, w in zip(starts, widths, strict=True)])

    def write_rows(self, dest: lk.Tensor) -> lk.Tensor:
        """Some rows of `dest`, at times followed by ones that are not used and may be anything."""
        extent = dest.shape[0]
        used, spare = self.below(extent + 1), self.pick((0, 0, 2))
        rows = np.r_[self.rng.permutation(extent)[:used], self.rng.integers(-9, 9, spare)]
        src, at = self.source((used + spare, *dest.shape[1:])), self.g.const(rows)
        if self.rng.random() < 0.5:
            at = self.g.placeholder(rows.shape, "i64")
            self.bindings[at] = rows
        if not spare and self.rng.random() < 0.5:
            return dest.write_rows(src, at)
        return dest.write_rows(src, at, self.g.const(np.int64(used)))

    def read(self) -> lk.Tensor | None:
        t = self.pick(self.live)
        kind = self.below(7)
        if kind == 0:
            return t + self.fitted(t.shape)
        if kind == 1:
            return t + 1
        if kind == 2:
            return t.contiguous()
        if kind == 3:
            return t.to(self.place())
        if kind == 4 and t.shape and t.shape[0]:
            ids = self.rng.integers(0, t.shape[0], self.pick(((), (2,), (1, 2))))
            return t.take(self.g.const(ids))
        if kind == 5 and t.shape:
            return lk.concat([t, self.fitted(t.shape)], axis=self.below(len(t.shape)))
        return lk.where(t.lt(self.fitted(t.shape)), t, self.fitted(t.shape))


def same_bits(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def run_and_compare(seed: int) -> None:
    """Plan a random graph, run it twice, and compare both passes with the oracle."""
    b = Builder(seed)
    plan = lk.plan(b.targets, b.bindings)
    for env in (b.env, {s: int(b.rng.integers(0, 5)) for s in b.env}):
        storages = {t: v for t, v in b.bindings.items() if isinstance(v, lk.Storage)}
        storages.update({t: t.data for t in b.g if t.data is not None})
        before = {t: s.to_numpy() for t, s in storages.items()}
        if not in_bounds(b, env):
            with pytest.raises(RangeError):
                plan.run(env=env)
            after = before
        else:
            values = evaluate(b.targets, b.bindings, env)
            idle = {t: v for t, v in before.items() if t not in values}
            after = idle | landed(b.targets, b.bindings, env)
            for t, got in zip(b.targets, plan.run(env=env), strict=True):
                if not same_bits(got, values[t]):
                    raise Mismatch(f"seed {seed}: {t!r} is\n{got}\ninstead of\n{values[t]}")
        for t, store in storages.items():
            if t in after and not same_bits(store.to_numpy(), after[t]):
                raise Mismatch(
                    f"seed {seed}: bytes of {t!r} are\n{store.to_numpy()}\ninstead of\n{after[t]}"
                )


def in_bounds(b: Builder, env: dict[lk.Sym, int]) -> bool:
    """Whether every start that a target needs lies in its tensor."""
    for t in needed(b.targets):
        if t.op.name == "slice":
            slabs = [(t.op.start, t.op.length, t.inputs[0].shape[t.op.axis])]
        elif t.op.name == "write_slice":
            slabs = list(zip(t.op.starts, t.op.widths, t.shape, strict=True))
        else:
            continue
        if any(not 0 <= start_of(s, env) <= n - w for s, w, n in slabs):
            return False
    return True


def run_all(seeds: Iterable[int]) -> None:
    with registered(Toy()):
        for seed in seeds:
            try:
                run_and_compare(seed)
            except BaseException as e:
                e.add_note(f"LAZYKV_RANDOM_SEED={seed}")
                raise


@pytest.mark.parametrize("part", range(8))
def test_random_graphs_equal_the_oracle(part: int) -> None:
    run_all(SEEDS[part::8])


# The suite has teeth: a compiler with one part broken is caught.


def no_edge(self: Any, before: int, after: int, reason: str) -> None:
    """Readers are not ordered before the write that destroys what they read."""


def no_copy(self: Any, reader: int, n: int, write: int) -> None:
    """A reader that depends on the write reads the destroyed bytes."""


def late_copy(self: Any, reader: int, n: int, write: int) -> None:
    """The safety copy is taken, but nothing says when."""
    self.writes.clear()
    give_copy(self, reader, n, write)


def no_clone(ir: Any) -> Any:
    """All writes on one version work in place."""
    return {write: why for write, why in needs_copy(ir).items() if "constant" in why}


def short_lives(intervals: Any) -> Any:
    """Intermediates are thought dead right after they are made."""
    return assign(Interval(i.owner, i.nbytes, i.first, i.first) for i in intervals)


give_copy = ordering._Scheduler.give_copy
needs_copy = effects._needs_copy


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (ordering._Scheduler, "add_edge", no_edge),
        (ordering._Scheduler, "give_copy", no_copy),
        (ordering._Scheduler, "give_copy", late_copy),
        (effects, "_needs_copy", no_clone),
        (program, "assign", short_lives),
    ],
    ids=["no edge", "no safety copy", "late safety copy", "no clone", "memory reused too early"],
)
def test_a_broken_compiler_is_found(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, broken: Any
) -> None:
    monkeypatch.setattr(where, name, broken)
    plan_cache.clear()
    try:
        with pytest.raises(Mismatch):
            run_all(range(100))
    finally:
        plan_cache.clear()
