"""Step 2: where each node runs, and a `Copy` wherever an operand lives elsewhere.

A node runs where the buffer it destroys lives, else where its first input that is not on the host
lives: weights and caches stay, small host operands travel. Snapshots have no place of their own:
what has nothing else to go by runs on the plan's device, where they (and views of them) are leaves
whose data is copied once, not in every pass.
"""

from dataclasses import replace

from lazykv.compiler.ir import IR, Node
from lazykv.device import CPU, DeviceLocation
from lazykv.ops.move import Copy
from lazykv.ops.op import Op
from lazykv.ops.sources import Const


def place(ir: IR, home: DeviceLocation) -> tuple[IR, list[int]]:
    """The IR of a plan for `home` with operands where they are needed, and where each old node
    went."""
    out, moved = IR(), list[int]()
    known: dict[tuple[int, DeviceLocation], int] = {}

    def at(source: int, location: DeviceLocation, reason: str | None) -> int:
        """A node's value on another location: a copy, or at home the leaf of a snapshot."""
        if (source, location) not in known:
            node = out[source]
            if location == home and _of_snapshot(out, node):
                inputs = tuple(at(i, location, reason) for i in node.inputs)
                made = replace(node, inputs=inputs, location=location, reason=reason)
            else:
                made = Node(Copy(str(location)), (source,), node.spec, location, reason=reason)
            known[source, location] = out.add(made)
        return known[source, location]

    for node in ir.nodes:
        inputs = [moved[i] for i in node.inputs]
        location = _location(out, node, inputs, home)
        if isinstance(node.op, Copy):
            source = out[inputs[0]]
            if location == home != source.location and _of_snapshot(out, source):
                moved.append(at(inputs[0], location, None))
                continue
        else:
            for n, i in enumerate(inputs):
                if out[i].location != location:
                    operand = f"operand is on {out[i].location}"
                    inputs[n] = at(i, location, f"{node.op.name} runs on {location}, {operand}")
        moved.append(out.add(replace(node, inputs=tuple(inputs), location=location)))
    return out, moved


def _of_snapshot(ir: IR, node: Node) -> bool:
    """Whether a node is a snapshot or a view of one."""
    while type(node.op).alias is not Op.alias and len(node.inputs) == 1:
        node = ir[node.inputs[0]]
    return isinstance(node.op, Const) and node.op.snapshot


def _location(ir: IR, node: Node, inputs: list[int], home: DeviceLocation) -> DeviceLocation:
    if isinstance(node.op, Copy) and node.op.location is not None:
        return DeviceLocation(node.op.location)
    if not inputs:
        return node.location
    if type(node.op).alias is not Op.alias:
        return ir[inputs[0]].location
    deciding = inputs if node.op.destroys is None else [inputs[node.op.destroys]]
    placed = [ir[i].location for i in deciding if not _of_snapshot(ir, ir[i])]
    return next((p for p in placed if p != CPU), CPU) if placed else home
