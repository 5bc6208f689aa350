"""Reads a graph and its plan into a `Document`."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lazykv.inspect.document as doc
from lazykv.compiler.bindings import distinct_names, leaf_name
from lazykv.compiler.ir import IR, Node, Output, Place, is_alias, places
from lazykv.compiler.plan import Bindings, Plan
from lazykv.compiler.program import Home, Program, Register
from lazykv.compiler.trace import Trace, stand_in, trace
from lazykv.device import CPU, DeviceLike, DeviceLocation, device
from lazykv.dtypes import DType
from lazykv.errors import GraphError
from lazykv.graph import Tensor
from lazykv.inspect.layers import layers_of
from lazykv.ops.move import Copy
from lazykv.ops.op import Op
from lazykv.ops.sources import Source
from lazykv.runtime.realize import plan as make_plan
from lazykv.storage import Storage
from lazykv.symbols import Dim, Expr, ScalarSlot, Sym

# Facts of a manifest that mean the same in every process; others name things by counters.
_PLAIN_FACTS = ("structure", "range:")


def describe(
    targets: Tensor | Sequence[Tensor], bindings: Bindings | None = None,
    device: DeviceLike = "cpu", *, effects: Sequence[Tensor] = (),
    kept: Mapping[Tensor, Storage] | None = None, title: str = "graph",
) -> doc.Document:  # fmt: skip
    """Plan targets without running them (arguments as for `lazykv.plan`) and describe the plan."""
    outputs = [targets] if isinstance(targets, Tensor) else list(targets)
    made = make_plan(outputs, bindings, device, effects=effects, kept=kept)
    return describe_plan(made, outputs, effects=effects, device=device, title=title)


def describe_plan(
    plan: Plan, targets: Sequence[Tensor], *, effects: Sequence[Tensor] = (),
    device: DeviceLike = "cpu", title: str = "graph",
) -> doc.Document:  # fmt: skip
    """Describe a plan already made for `targets` and `effects` on `device`.

    Raises `GraphError` if the plan was made for something else.
    """
    found = {t: leaf.location for t, leaf in zip(plan.leaves, plan.program.leaves, strict=True)}
    traced = trace(list(targets), list(effects), found, _location(device))
    if traced.key != plan.program.key:
        raise GraphError(f"describe_plan: got targets that plan {plan.id} is not for, need its own")
    return _Collector(plan, traced, title).document()


def _location(given: DeviceLike) -> DeviceLocation:
    return device(given).location if given != "cpu" else CPU


class _Collector:
    """One pass over a trace and a plan of the same structure."""

    def __init__(self, plan: Plan, traced: Trace, title: str) -> None:
        self.plan = plan
        self.program: Program = plan.program
        self.traced = traced
        self.title = title
        names = distinct_names([s.name for s in traced.symbols])
        self.names = dict(zip(traced.symbols, names, strict=True))
        # Ops of the compiler speak of stand-ins, at the positions of the user's symbols.
        for n, (s, name) in enumerate(zip(traced.symbols, names, strict=True)):
            self.names[stand_in(n, s.low, s.high)] = name
        self.ids = _plan_ids(self.program)
        self.leaves = distinct_names([leaf_name(t, n) for n, t in enumerate(plan.leaves)])

    def document(self) -> doc.Document:
        graph = self.graph()
        return doc.Document(self.title, graph, self._plan({n.id: n.layer for n in graph.nodes}))

    # The graph

    def graph(self) -> doc.Graph:
        tensors, ir = self.traced.origins, self.traced.ir
        where = places(ir)
        layers = layers_of([(t.name, n.inputs) for t, n in zip(tensors, ir.nodes, strict=True)])
        nodes = []
        for i, (t, node) in enumerate(zip(tensors, ir.nodes, strict=True)):
            planned = self.program.node_of[i]
            location = node.location if planned is None else self.program.nodes[planned].location
            # The user's own op, whose expressions name the user's symbols.
            common = self.common(i, t.op, node, ir, where, _graph_id)
            common |= {"name": t.name, "location": str(location), "layer": layers[i]}
            nodes.append(
                doc.GraphNode(**common, planned_as=None if planned is None else self.ids[planned])
            )
        symbols = tuple(doc.Symbol(self.names[s], s.low, s.high) for s in self.traced.symbols)
        return doc.Graph(
            nodes=tuple(nodes),
            targets=tuple(map(_graph_id, self.traced.outputs)),
            effects=tuple(map(_graph_id, self.traced.effects)),
            symbols=symbols,
        )

    def common(
        self, index: int, op: Op, node: Node, ir: IR, where: Sequence[Place],
        id_of: Callable[[int], str],
    ) -> dict[str, Any]:  # fmt: skip
        """The fields that nodes of graphs and of plans share."""
        place = where[index]
        return {
            "id": id_of(index),
            "op": op.name,
            "params": self.params(op),
            "inputs": tuple(map(id_of, node.inputs)),
            "shape": node.spec.shape,
            "dtype": node.spec.dtype.name,
            "nbytes": node.spec.nbytes,
            "location": str(node.location),
            "destroys": op.destroys,
            "view_of": id_of(node.inputs[0]) if is_alias(ir, list(where), index) else None,
            "buffer": id_of(place.base),
            "version": id_of(place.version),
        }

    def params(self, op: Op) -> dict[str, Any]:
        """An op's parameters as JSON values, without what its result's spec says already."""
        skip = {"shape", "dtype"} if isinstance(op, Source) else set()
        return {name: self.plain(v) for name, v in op.params().items() if name not in skip}

    def plain(self, value: Any) -> Any:
        if isinstance(value, Expr):
            return self.expression(value.const, [(self.names[s], c) for s, c in value.terms])
        if isinstance(value, ScalarSlot):
            return self.scalar(value.index)
        if isinstance(value, DType):
            return value.name
        if isinstance(value, tuple | list):
            return [self.plain(v) for v in value]
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)  # JSON has no word for infinity
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return str(value)

    def expression(self, const: int, terms: Sequence[tuple[str, int]]) -> str:
        return repr(Expr(tuple((Sym(name), c) for name, c in terms), const))

    def scalar(self, slot: int) -> str:
        s = self.program.scalars[slot]
        names = [self.names[sym] for sym in self.traced.symbols]
        return self.expression(s.const, [(names[n], c) for n, c in s.terms])

    # The plan

    def _plan(self, layer_of: Mapping[str, int | None]) -> doc.Plan:
        p = self.program
        return doc.Plan(
            structure=self.plan.structure,
            nodes=tuple(self.plan_nodes(layer_of)),
            edges=tuple(
                doc.Edge(self.ids[e.before], self.ids[e.after], self.reason(e.reason))
                for e in p.edges
            ),
            leaves=tuple(self.leaf(n) for n in range(len(p.leaves))),
            registers=tuple(self.register(n, r) for n, r in enumerate(p.registers)),
            steps=tuple(self.step(n) for n in range(len(p.steps))),
            arenas={str(place): size for place, size in p.arenas.items()},
            buffers=tuple(self.buffers()),
            checks=tuple(
                doc.Check(c.who, c.what, self.scalar(c.slot), c.low, c.high) for c in p.checks
            ),
            result_bytes=p.result_bytes,
            peak_bytes=self.plan.peak_bytes,
            manifest=self.manifest(),
        )

    def buffers(self) -> Iterator[doc.Buffer]:
        for b in sorted(self.program.buffers, key=lambda b: (str(b.location), b.first, b.offset)):
            place, node = str(b.location), self.ids[b.node]
            yield doc.Buffer(place, b.offset, b.nbytes, b.first, b.last, node, b.scratch)

    def plan_nodes(self, layer_of: Mapping[str, int | None]) -> list[doc.PlanNode]:
        p, where = self.program, self.program.places
        ir = IR(list(p.nodes))
        nodes: list[doc.PlanNode] = []
        for i, node in enumerate(p.nodes):
            common = self.common(i, node.op, node, ir, where, self.ids.__getitem__)
            origin = None if node.origin is None else _graph_id(node.origin)
            # A copy that was inserted belongs where the value it copies belongs.
            near = origin if origin is not None else self.ids[node.inputs[0]].partition(".")[0]
            common |= {"name": self.name(node), "layer": layer_of.get(near)}
            added = _added(p, i)
            if added == "result":
                common["layer"] = None
            reason = None if node.reason is None else self.reason(node.reason, added)
            nodes.append(doc.PlanNode(**common, origin=origin, added=added, reason=reason))
        return nodes

    def name(self, node: Node) -> str | None:
        if node.origin is None or isinstance(node.op, Output):
            return None
        t = self.traced.origins[node.origin]
        return t.name if t.op.name == node.op.name else None

    def reason(self, text: str, added: str | None = None) -> str:
        """A reason with the ids of this dump in place of the compiler's ``op[position]``."""
        order = list(range(len(self.program.nodes)))
        if added == "clone":
            # It was written before the clones took their places in the list.
            order = [i for i in order if _added(self.program, i) != "clone"]
        return re.sub(r"\b[a-z_]+\[(\d+)\]", lambda m: self.ids[order[int(m[1])]], text)

    def leaf(self, n: int) -> doc.Leaf:
        leaf = self.program.leaves[n]
        return doc.Leaf(
            name=self.leaves[n],
            node=self.ids[leaf.node],
            kind=leaf.op.name,
            shape=leaf.spec.shape,
            dtype=leaf.spec.dtype.name,
            nbytes=leaf.spec.nbytes,
            location=str(leaf.location),
            written=leaf.written,
        )

    def register(self, n: int, r: Register) -> doc.Register:
        in_leaf = r.home is Home.LEAF
        return doc.Register(
            id=f"r{n}",
            leaf=self.leaves[r.index] if in_leaf else None,
            arena_offset=None if in_leaf else r.index,
            location=str(r.location),
            shape=r.spec.shape,
            dtype=r.spec.dtype.name,
            offset=self.offset(r.layout.offset),
            strides=r.layout.strides,
            node=self.ids[r.node],
        )

    def offset(self, dim: Dim) -> int | str:
        return dim if isinstance(dim, int) else str(self.plain(dim))

    def step(self, n: int) -> doc.Step:
        s = self.program.steps[n]
        return doc.Step(
            index=n,
            op=s.op.name,
            params=self.params(s.op),
            inputs=tuple(f"r{i}" for i in s.inputs),
            output=f"r{s.output}",
            scratch=tuple(f"r{i}" for i in s.scratch),
            node=self.ids[s.node],
        )

    def manifest(self) -> doc.Manifest:
        facts = self.plan.manifest
        baked = {
            name: self.plain(value) if name.startswith(_PLAIN_FACTS) else None
            for name, value in facts.baked.items()
        }
        return doc.Manifest(baked, dict(facts.bound))


def _graph_id(position: int) -> str:
    return f"%{position}"


def _plan_ids(program: Program) -> list[str]:
    """Names of a plan's nodes: that of the graph's node it stands for; ``%5.1`` for what a lowering
    of %5 needs on the way; ``copy0`` and ``result0`` for what the graph does not have."""
    stands_for: dict[int, str] = {}
    for position, index in enumerate(program.node_of):
        if index is not None:
            stands_for.setdefault(index, _graph_id(position))
    ids, copies, parts = list[str](), 0, dict[int, int]()
    for index, node in enumerate(program.nodes):
        if index in stands_for:
            ids.append(stands_for[index])
        elif isinstance(node.op, Output):
            ids.append(f"result{node.op.position}")
        elif node.origin is not None:
            parts[node.origin] = parts.get(node.origin, 0) + 1
            ids.append(f"%{node.origin}.{parts[node.origin]}")
        else:
            ids.append(f"copy{copies}")
            copies += 1
    return ids


def _added(program: Program, index: int) -> str | None:
    """What the compiler made a node for, or None if it was built."""
    node = program.nodes[index]
    if isinstance(node.op, Output):
        return "result"
    if index in program.copies:
        return "safety"
    if node.origin is None:
        placed = isinstance(node.op, Copy) and node.op.location is not None
        return "placement" if placed else "clone"
    return "lowering" if node.reason is not None else None
