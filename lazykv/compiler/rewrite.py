"""Step 3: equal pure nodes merged, views that change nothing dropped, missing ops lowered.

One pass over the nodes in order reaches the fixpoint, because every node sees inputs that are
already rewritten. Data is never looked at: it is not structure.
"""

from dataclasses import dataclass, field
from typing import Any

from lazykv.compiler.ir import IR, Node, Place, place_of
from lazykv.compiler.kernels import find_kernel, no_kernel
from lazykv.device import DeviceLocation
from lazykv.dtypes import f32
from lazykv.ops.move import Cast
from lazykv.ops.op import Op
from lazykv.ops.sources import Alloc, Const, Placeholder
from lazykv.spec import Spec


@dataclass
class _Rewriter:
    """Appends rewritten nodes; the builder that lowerings use."""

    ir: IR = field(default_factory=IR)
    where: list[Place] = field(default_factory=list)
    known: dict[tuple[Any, ...], int] = field(default_factory=dict)
    location: DeviceLocation | None = None
    origin: int | None = None
    reason: str | None = None
    lowering: tuple[str, ...] = ()
    """Names of the ops whose lowerings are being built, the outermost first."""

    def spec(self, value: int) -> Spec:
        return self.ir[value].spec

    def apply(self, op: Op, *inputs: int) -> int:
        """What a lowering calls: infer, then append like any other node."""
        assert self.location is not None, "lowering happens at a location"
        spec = op.infer(*(self.spec(i) for i in inputs))
        return self.add(Node(op, inputs, spec, self.location, self.origin, self.reason))

    def add(self, node: Node) -> int:
        op = node.op
        alias = None
        if op.destroys is None and len(node.inputs) == 1:
            source = self.where[node.inputs[0]]
            alias = op.alias(source.layout)
            if alias == source.layout:
                return node.inputs[0]
        key = (op.key(), node.inputs, node.spec, node.location)
        if op.pure and op.destroys is None:
            found = self.known.get(key)
            if found is not None:
                return found
        if alias is None and op.destroys is None and not _runs(node, self.ir):
            lowered = self.lower(node)
            self.known[key] = lowered
            return lowered
        index = self.ir.add(node)
        self.where.append(place_of(self.where, index, node))
        self.known[key] = index
        return index

    def lower(self, node: Node) -> int:
        outer = (self.location, self.origin, self.reason, self.lowering)
        self.location, self.origin = node.location, node.origin
        self.lowering = (*self.lowering, node.op.name)
        self.reason = f"{node.op.name} has no kernel on {node.location}"
        value = None
        if type(node.op).lower is not Op.lower:  # widening may need a cast that has no kernel
            value = node.op.lower(self, *(self.widened(i) for i in node.inputs))
        if value is not None and self.spec(value).dtype is not node.spec.dtype:
            value = self.apply(Cast(node.spec.dtype), value)
        self.location, self.origin, self.reason, self.lowering = outer
        if value is None:
            specs = [self.spec(i) for i in node.inputs]
            raise no_kernel(node.location, node.op, specs, self.lowering)
        return value

    def widened(self, value: int) -> int:
        """16-bit floats as f32: a lowering rounds as its fused op does, once and at the end."""
        dt = self.spec(value).dtype
        return self.apply(Cast(f32), value) if dt.is_float and dt.compute != dt.numpy else value


def _runs(node: Node, ir: IR) -> bool:
    """Whether the node's backend has a kernel for it (sources that hold data need none)."""
    if isinstance(node.op, Const | Placeholder | Alloc):
        return True
    specs = tuple(ir[i].spec for i in node.inputs)
    return find_kernel(node.location, node.op, specs, node.spec) is not None


def rewrite(ir: IR) -> tuple[IR, list[int]]:
    """The rewritten IR, and where each old node went."""
    r, moved = _Rewriter(), list[int]()
    for node in ir.nodes:
        inputs = tuple(moved[i] for i in node.inputs)
        moved.append(
            r.add(Node(node.op, inputs, node.spec, node.location, node.origin, node.reason))
        )
    return r.ir, moved
