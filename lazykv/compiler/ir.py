"""The compiler's own graph: nodes by position, free of identities and of the user's objects."""

from dataclasses import dataclass, field
from typing import ClassVar

from lazykv.device import DeviceLocation
from lazykv.layout import Layout
from lazykv.ops.op import Op, need_arity
from lazykv.spec import Spec


@dataclass(frozen=True)
class Output(Op):
    """Hand a target to the caller: fresh memory, read like any other reader would."""

    name: ClassVar[str] = "output"
    bits: ClassVar[bool] = True
    pure: ClassVar[bool] = False
    position: int

    def infer(self, *ins: Spec) -> Spec:
        need_arity(self.name, ins, 1)
        return ins[0]


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. `inputs` are positions in the same IR; `origin` is the position of the traced
    node it stands for, and `reason` says why the compiler added it (None: the user built it)."""

    op: Op
    inputs: tuple[int, ...]
    spec: Spec
    location: DeviceLocation
    origin: int | None = None
    reason: str | None = None


@dataclass
class IR:
    """Nodes in an order where inputs come first, built by appending."""

    nodes: list[Node] = field(default_factory=list)

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value's bytes are: the node that owns the buffer, the last write it has seen (a
    write, or the owner itself), and the layout within the buffer."""

    base: int
    version: int
    layout: Layout


def place_of(where: list[Place], index: int, node: Node) -> Place:
    """The place of a node whose inputs have theirs: a view stays in its input's buffer and version,
    a destructive op makes a new version of its destination's buffer, anything else owns one."""
    if node.op.destroys is not None:
        dest = where[node.inputs[node.op.destroys]]
        return Place(dest.base, index, dest.layout)
    if len(node.inputs) == 1:
        source = where[node.inputs[0]]
        layout = node.op.alias(source.layout)
        if layout is not None:
            return Place(source.base, source.version, layout)
    return Place(index, index, Layout.contiguous(node.spec.shape))


def places(ir: IR) -> list[Place]:
    """The place of every node."""
    out: list[Place] = []
    for index, node in enumerate(ir.nodes):
        out.append(place_of(out, index, node))
    return out


def is_alias(ir: IR, where: list[Place], index: int) -> bool:
    """Whether a node only names bytes of another and needs no kernel."""
    node = ir.nodes[index]
    return bool(node.inputs) and node.op.destroys is None and where[index].base != index
