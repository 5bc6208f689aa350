"""Step 1: what the targets need, and the structural key of it.

The traced nodes stand in build order, which is topological, and hold no data, no symbol objects
and no identities: two graphs of one structure trace to equal keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

from lazykv.compiler.ir import IR, Node
from lazykv.device import CPU, DeviceLocation, generation
from lazykv.errors import GraphError
from lazykv.graph import Tensor
from lazykv.ops.move import Copy
from lazykv.ops.op import Bound, is_proved
from lazykv.ops.sources import Alloc, Const, Placeholder
from lazykv.symbols import Dim, Expr, Sym


@dataclass(frozen=True, slots=True)
class Condition:
    """A bound that declared ranges do not prove: tested before the first kernel of every pass."""

    bound: Bound
    who: str


@dataclass(frozen=True, slots=True)
class Trace:
    """The reachable part of a graph, twice: as positions, and as the user's own objects.

    Ops of the IR speak of stand-in symbols; `symbols[n]` is the user's symbol for stand-in n.
    `device` is the one that the plan is for.
    """

    ir: IR
    origins: tuple[Tensor, ...]
    leaves: tuple[int, ...]
    symbols: tuple[Sym, ...]
    conditions: tuple[Condition, ...]
    outputs: tuple[int, ...]
    effects: tuple[int, ...]
    device: DeviceLocation
    key: tuple[Any, ...]


def reachable(targets: Sequence[Tensor]) -> list[Tensor]:
    """Every node the targets need, in build order."""
    seen: dict[int, Tensor] = {}
    stack = list(targets)
    while stack:
        t = stack.pop()
        if t.node_id not in seen:
            seen[t.node_id] = t
            stack.extend(t.inputs)
    return [seen[i] for i in sorted(seen)]


@lru_cache(maxsize=1024)
def stand_in(position: int, low: int, high: int | None) -> Sym:
    """The symbol that takes the place of the user's n-th one, so that structure has no identity."""
    return Sym(f"s{position}", low, high)


class _Symbols:
    """Numbers the user's symbols in the order they are met."""

    def __init__(self) -> None:
        self.positions: dict[Sym, int] = {}

    def rename(self, dim: Dim) -> Dim:
        assert isinstance(dim, Expr), "a graph holds expressions, never slots"
        terms = []
        for sym, factor in dim.terms:
            n = self.positions.setdefault(sym, len(self.positions))
            terms.append((n, stand_in(n, sym.low, sym.high), factor))
        return Expr(
            tuple((sym, factor) for _, sym, factor in sorted(terms, key=itemgetter(0))), dim.const
        )


def trace(
    outputs: Sequence[Tensor],
    effects: Sequence[Tensor],
    leaf_locations: Mapping[Tensor, DeviceLocation],
    default: DeviceLocation = CPU,
) -> Trace:
    """Trace the targets: `outputs` are handed back, `effects` only have to happen."""
    targets = [*outputs, *effects]
    for t in targets:
        if not isinstance(t, Tensor):
            raise GraphError(f"realize: got {type(t).__name__}, need Tensors")
        if t.graph is not targets[0].graph:
            raise GraphError(f"realize: got {t!r} of another graph, need targets of one graph")
    origins = reachable(targets)
    position = {t.node_id: i for i, t in enumerate(origins)}
    ir, symbols = IR(), _Symbols()
    conditions: dict[Condition, None] = {}
    key: list[Any] = []
    leaves: list[int] = []
    for i, t in enumerate(origins):
        op = t.op.map_dims(symbols.rename)
        for b in op.bounds(*(s.spec for s in t.inputs)):
            if not is_proved(b):
                conditions[Condition(b, op.name)] = None
        inputs = tuple(position[s.node_id] for s in t.inputs)
        location = default
        if isinstance(op, Const | Placeholder | Alloc):
            leaves.append(i)
            location = _leaf_location(t, leaf_locations, default)
        elif isinstance(op, Copy) and op.location is not None:
            location = DeviceLocation(op.location)
        ir.add(Node(op, inputs, t.spec, location, origin=i))
        key.append((op.key(), inputs, t.spec.shape, t.spec.dtype.name, location.name))
    out = tuple(position[t.node_id] for t in outputs)
    done = tuple(position[t.node_id] for t in effects)
    ranges = tuple((s.low, s.high) for s in symbols.positions)
    used = sorted({n.location for n in ir.nodes}, key=str)
    generations = tuple((place.name, generation(place)) for place in used)
    return Trace(
        ir, tuple(origins), tuple(leaves), tuple(symbols.positions), tuple(conditions), out, done,
        default, (tuple(key), ranges, out, done, default.name, generations),
    )  # fmt: skip


def _leaf_location(
    t: Tensor, given: Mapping[Tensor, DeviceLocation], default: DeviceLocation
) -> DeviceLocation:
    if t.data is not None:
        return t.data.location
    if isinstance(t.op, Alloc):
        return DeviceLocation(t.op.location)
    return given.get(t, default)
