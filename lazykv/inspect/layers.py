"""Which layer of a model a node belongs to, by the numbers in the names of its data.

A name such as ``blk.3.attn_q.weight`` carries the layer as its first numeric part. Nodes without a
name follow the data they work on: a layer begins with the first node that reads its data and lasts
until the next layer begins. The last one ends where, after its own data was read for the last time,
a node reads named data without a number (the final norm's weight, say), and is no longer than the
one before it.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lazykv.inspect.document import Node

Nodes = Sequence[tuple[str | None, tuple[int, ...]]]
"""Name and input positions of every node, inputs first."""


def layer_in_name(name: str | None) -> int | None:
    """The first dot-separated part of a name that is a whole number."""
    parts = (name or "").split(".")
    return next((int(p) for p in parts if p.isascii() and p.isdigit()), None)


def layers_of(nodes: Nodes) -> list[int | None]:
    """The layer of every node, None for those before, after and between layers."""
    own = [layer_in_name(name) for name, _ in nodes]
    reads = [_layer_read(own, nodes, i) for i in range(len(nodes))]
    last_reader = max((i for i, layer in enumerate(reads) if layer is not None), default=-1)
    out, current = list(own), None
    for i, (_, inputs) in enumerate(nodes):
        if not inputs:
            continue
        if i > last_reader and any(_is_shared(nodes, s) for s in inputs):
            current, last_reader = None, len(nodes)
        current = reads[i] if reads[i] is not None else current
        out[i] = own[i] if own[i] is not None else current
    return _shortened(out, nodes)


def _shortened(layers: list[int | None], nodes: Nodes) -> list[int | None]:
    """Take from the last layer the nodes by which it is longer than the one before."""
    numbers = sorted({n for n in layers if n is not None})
    if len(numbers) < 2:
        return layers
    before, last = ([i for i, n in enumerate(layers) if n == number and nodes[i][1]]
                    for number in numbers[-2:])  # fmt: skip
    for i in last[len(before) :]:
        layers[i] = None
    return layers


def _layer_read(own: Sequence[int | None], nodes: Nodes, index: int) -> int | None:
    """The layer whose data a node reads directly."""
    inputs = nodes[index][1]
    found = [own[s] for s in inputs if not nodes[s][1] and own[s] is not None]
    return max((n for n in found if n is not None), default=None)


def _is_shared(nodes: Nodes, index: int) -> bool:
    name, inputs = nodes[index]
    return not inputs and name is not None and layer_in_name(name) is None


N = TypeVar("N", bound=Node)


@dataclass(slots=True)
class Section(Generic[N]):
    """Nodes that are listed together. `same` are the layers that look just like this one."""

    title: str
    layer: int | None
    nodes: list[N] = field(default_factory=list)
    same: list[int] = field(default_factory=list)


def sections(nodes: Sequence[N], *, collapse: bool) -> list[Section[N]]:
    """Nodes by layer: shared data, what comes before, the layers, what comes after.

    With `collapse`, a layer of the same structure as an earlier one is only noted there.
    """
    numbers = sorted({n.layer for n in nodes if n.layer is not None})
    if not numbers:
        return [Section("", None, list(nodes))]
    computed = [i for i, n in enumerate(nodes) if n.layer is not None and not n.is_leaf]
    first = min(computed, default=len(nodes))
    data, before, after = (
        Section[N](title, None)
        for title in ("shared data", "before the layers", "after the layers")
    )
    layers = {n: Section[N](f"layer {n}", n) for n in numbers}
    for i, node in enumerate(nodes):
        if node.layer is not None:
            layers[node.layer].nodes.append(node)
        elif node.is_leaf:
            data.nodes.append(node)
        else:
            (before if i < first else after).nodes.append(node)
    middle = list(layers.values())
    if collapse:
        middle = _collapse(middle, {n.id for n in data.nodes})
    return [s for s in (data, before, *middle, after) if s.nodes]


def _collapse(layers: Sequence[Section[N]], shared: Set[str]) -> list[Section[N]]:
    kept: dict[object, Section[N]] = {}
    for section in layers:
        first = kept.setdefault(structure(section, shared), section)
        if first is not section and section.layer is not None:
            first.same.append(section.layer)
    return list(kept.values())


def structure(section: Section[N], shared: Set[str]) -> tuple[object, ...]:
    """What two layers must have in common: all but their number and what came before them.

    `shared` are the ids of data that every layer may read.
    """
    place = {n.id: i for i, n in enumerate(section.nodes)}
    return tuple(
        (
            n.op,
            starred(n.name or ""),
            repr(n.params),
            n.spec,
            n.location,
            n.destroys,
            n.view_of is not None,
            tuple(i if i in shared else place.get(i) for i in n.inputs),
        )
        for n in section.nodes
    )


def starred(name: str) -> str:
    """A name with ``*`` in place of its layer: ``blk.*.attn_q.weight``."""
    number = layer_in_name(name)
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isascii() and part.isdigit()), None)
    return name if number is None or at is None else ".".join([*parts[:at], "*", *parts[at + 1 :]])


def ranges(numbers: Sequence[int]) -> str:
    """``1..29`` or ``1, 3..5``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)
