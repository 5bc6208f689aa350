"""Step 4a: which writes happen in place, and copies for those that cannot.

A *version* is a buffer plus the last write it has seen. Several writes on one version would destroy
each other's results: of those whose destinations share an element, the one built last works in
place and earlier ones work on a copy. Destinations are compared whole, not by the part written,
because later writes of either chain may touch any of it. Frozen data is never written.
"""

from dataclasses import replace

from lazykv.compiler.ir import IR, Node, places
from lazykv.layout import Layout, overlap
from lazykv.ops.move import Copy
from lazykv.ops.sources import Const


def clone_destinations(ir: IR) -> tuple[IR, list[int]]:
    """The IR in which every remaining destructive op may work in place, and where nodes went.

    Repeated until nothing is left to do: a copy is contiguous, so that a view of it that had to be
    a copy before may now share its bytes, and bring further writes to them.
    """
    moved = list(range(len(ir)))
    while needs := _needs_copy(ir):
        ir, step = _clone(ir, needs)
        moved = [step[i] for i in moved]
    return ir, moved


def _clone(ir: IR, needs: dict[int, str]) -> tuple[IR, list[int]]:
    out, moved = IR(), list[int]()
    for index, node in enumerate(ir.nodes):
        inputs = [moved[i] for i in node.inputs]
        if index in needs and node.op.destroys is not None:
            dest = inputs[node.op.destroys]
            copy = Node(Copy(), (dest,), out[dest].spec, out[dest].location, reason=needs[index])
            inputs[node.op.destroys] = out.add(copy)
        moved.append(out.add(replace(node, inputs=tuple(inputs))))
    return out, moved


def _needs_copy(ir: IR) -> dict[int, str]:
    """Position of each write that must work on a copy, with the reason."""
    where = places(ir)
    accepted: dict[int, list[tuple[int, Layout]]] = {}
    out: dict[int, str] = {}
    for index in range(len(ir) - 1, -1, -1):
        op = ir[index].op
        if op.destroys is None:
            continue
        dest = where[ir[index].inputs[op.destroys]]
        root = ir[dest.base].op
        if dest.version == dest.base and isinstance(root, Const) and root.frozen:
            out[index] = "the destination is constant data"
            continue
        later = accepted.setdefault(dest.version, [])
        clash = next((w for w, layout in later if overlap(dest.layout, layout)), None)
        if clash is None:
            later.append((index, dest.layout))
        else:
            out[index] = f"{_label(ir, clash)}, built later, writes the same destination in place"
    return out


def _label(ir: IR, index: int) -> str:
    return f"{ir[index].op.name}[{index}]"
