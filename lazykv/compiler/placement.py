"""Step 2: where each node runs, and a `Copy` wherever an operand lives elsewhere.

A node runs where the buffer it destroys lives, else where its first input that is not on the host
lives: weights and caches stay, small host operands travel.
"""

from lazykv.compiler.ir import IR, Node
from lazykv.device import CPU, DeviceLocation
from lazykv.ops.move import Copy


def place(ir: IR) -> tuple[IR, list[int]]:
    """The IR with copies inserted, and where each old node went."""
    out, moved = IR(), list[int]()
    copies: dict[tuple[int, DeviceLocation], int] = {}
    for node in ir.nodes:
        inputs = [moved[i] for i in node.inputs]
        location = _location(out, node, inputs)
        for n, source in enumerate(inputs):
            if out[source].location == location or isinstance(node.op, Copy):
                continue
            key = (source, location)
            if key not in copies:
                reason = f"{node.op.name} runs on {location}, operand is on {out[source].location}"
                copy = Copy(str(location))
                copies[key] = out.add(
                    Node(copy, (source,), out[source].spec, location, reason=reason)
                )
            inputs[n] = copies[key]
        moved.append(
            out.add(Node(node.op, tuple(inputs), node.spec, location, node.origin, node.reason))
        )
    return out, moved


def _location(ir: IR, node: Node, inputs: list[int]) -> DeviceLocation:
    if isinstance(node.op, Copy) and node.op.location is not None:
        return DeviceLocation(node.op.location)
    if not inputs:
        return node.location
    if node.op.destroys is not None:
        return ir[inputs[node.op.destroys]].location
    for i in inputs:
        if ir[i].location != CPU:
            return ir[i].location
    return CPU
