"""Step 4b: an order in which every reader of old bytes runs before the write that destroys them.

For each in-place write, a reader of bytes it destroys gets an edge reader -> write. A reader that
depends on the write cannot get one: it is given a *safety copy* of the view it reads, taken before
the write. A copy depends on nothing but the version it copies, and that version is an ancestor of
every write that destroys it, so its edges never close a cycle.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import networkx as nx

from lazykv.compiler.ir import IR, Node, Place, is_alias, places
from lazykv.layout import Layout, overlap
from lazykv.ops.move import Copy


@dataclass(frozen=True, slots=True)
class Edge:
    """`before` runs before `after`, although `after` does not use its result."""

    before: int
    after: int
    reason: str


@dataclass
class Order:
    """A schedule: positions of nodes in the order they run, and what was added to get it."""

    ir: IR
    where: list[Place]
    sequence: list[int]
    edges: list[Edge]
    copies: list[int]


@dataclass
class _Scheduler:
    ir: IR
    where: list[Place]
    graph: "nx.DiGraph[int]" = field(default_factory=nx.DiGraph)
    readers: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    writes: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    edges: list[Edge] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)

    def load(self) -> None:
        """Data edges, and for each buffer its readers (node, input position) and its writes."""
        for index, node in enumerate(self.ir.nodes):
            self.graph.add_node(index)
            self.graph.add_edges_from((source, index) for source in node.inputs)
            if node.op.destroys is not None:
                self.writes[self.where[index].base].append(index)
            if not is_alias(self.ir, self.where, index):
                self.note_reader(index)

    def note_reader(self, index: int) -> None:
        node = self.ir[index]
        for n, source in enumerate(node.inputs):
            if n != node.op.destroys:
                self.readers[self.where[source].base].append((index, n))

    def region(self, write: int) -> Layout:
        op = self.ir[write].op
        assert op.destroys is not None, "only destructive ops have a region"
        return op.region(self.where[self.ir[write].inputs[op.destroys]].layout)

    def builds_on(self, write: int, version: int) -> bool:
        """Whether a version is one that the write has in its chain, before itself. Versions of one
        buffer that do not build on each other lie in destinations that share no element."""
        at = write
        while at > version:
            op = self.ir[at].op
            if op.destroys is None:
                return False
            at = self.where[self.ir[at].inputs[op.destroys]].version
        return at == version != write

    def destroys(self, write: int, source: int) -> bool:
        """Whether the write overwrites bytes that a read of `source` wants."""
        place = self.where[source]
        return self.builds_on(write, place.version) and overlap(place.layout, self.region(write))

    def order_write(self, write: int) -> None:
        for reader, n in list(self.readers[self.where[write].base]):
            source = self.ir[reader].inputs[n]
            if self.where[source].base != self.where[write].base or not self.destroys(
                write, source
            ):
                continue
            if reader == write or nx.has_path(self.graph, write, reader):
                self.give_copy(reader, n, write)
            elif not self.graph.has_edge(reader, write):
                self.add_edge(reader, write, f"reads bytes of {self.label(source)} first")

    def add_edge(self, before: int, after: int, reason: str) -> None:
        self.graph.add_edge(before, after)
        self.edges.append(Edge(before, after, reason))

    def give_copy(self, reader: int, n: int, write: int) -> None:
        """Let operand n of a reader come from a copy taken before the write."""
        source = self.ir[reader].inputs[n]
        if source not in self.copies:
            self.copies[source] = self.take_copy(source, reader, write)
        copy, node = self.copies[source], self.ir[reader]
        inputs = (*node.inputs[:n], copy, *node.inputs[n + 1 :])
        self.ir.nodes[reader] = Node(
            node.op, inputs, node.spec, node.location, node.origin, node.reason
        )
        if source not in inputs:
            self.graph.remove_edge(source, reader)
        self.graph.add_edge(copy, reader)

    def take_copy(self, source: int, reader: int, write: int) -> int:
        of = self.ir[source]
        reason = f"{self.label(reader)} needs {self.label(write)} and the bytes it overwrites"
        index = self.ir.add(Node(Copy(), (source,), of.spec, of.location, reason=reason))
        self.where.append(Place(index, index, Layout.contiguous(of.spec.shape)))
        self.graph.add_edge(source, index)
        self.note_reader(index)
        for other in self.writes[self.where[source].base]:
            if self.destroys(other, source):
                self.add_edge(index, other, f"safety copy of {self.label(source)}")
        return index

    def label(self, index: int) -> str:
        return f"{self.ir[index].op.name}[{index}]"


def order(ir: IR) -> Order:
    """Order the nodes; safety copies are appended to the IR."""
    s = _Scheduler(IR(list(ir.nodes)), places(ir))
    s.load()
    for write in [w for ws in s.writes.values() for w in ws]:
        s.order_write(write)
    sequence = list(nx.lexicographical_topological_sort(s.graph))
    return Order(s.ir, s.where, sequence, s.edges, sorted(s.copies.values()))
