"""Dumps for people: the graph as it was built, and the plan as it runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias, TypeVar

from lazykv.inspect.document import Buffer, Check, Document, GraphNode, Node, Plan, Register, Step
from lazykv.inspect.layers import layer_in_name, ranges, sections, starred
from lazykv.layout import Layout

Row: TypeAlias = tuple[str, ...] | str
"""Cells that are aligned with those of other rows, or a line that stands alone."""

T = TypeVar("T")


def graph_text(d: Document, *, full: bool = False) -> str:
    """The nodes in build order, grouped by layer; repeated layers only once unless `full`."""
    nodes = d.graph.nodes
    places = sorted({n.location for n in nodes})
    rows: list[Row] = []
    for section in sections(nodes, collapse=not full):
        rows += ["", f"{section.title}:"] if section.title else [""]
        rows += [_node_row(n, show_place=len(places) > 1) for n in section.nodes]
        if section.same:
            rows.append(_same(section.layer, section.same, count(len(section.nodes), "node")))
    lines = [f"graph {d.title}: {count(len(nodes), 'node')} on {', '.join(places)}", *table(rows)]
    lines.append("")
    lines += [
        f"symbol {s.name}: {s.low}{' or more' if s.high is None else f'..{s.high}'}"
        for s in d.graph.symbols
    ]
    if d.graph.targets:
        lines.append(f"returns {', '.join(d.graph.targets)}")
    if d.graph.effects:
        lines.append(f"writes for their effect: {_some(d.graph.effects, full)}")
    return "\n".join(lines) + "\n"


def plan_text(d: Document, *, full: bool = False) -> str:
    """The steps as they run, what was added to order them, where values lie, and the manifest."""
    p = d.plan
    lines = [
        f"plan {d.title}: {count(len(p.steps), 'step')}, arena {size(sum(p.arenas.values()))}, "
        f"results {size(p.result_bytes)}, peak {size(p.peak_bytes)}"
    ]
    view = _PlanView(p, full)
    lines += view.block("steps, in the order they run", p.steps, view.step, "step")
    lines += view.block(
        "order kept although no input asks for it",
        p.edges,
        lambda e: (e.before, "before", e.after, e.reason),
        "edge",
        node_of=lambda e: e.after,
    )
    lines += view.block(
        "nodes the compiler added",
        [n for n in p.nodes if n.added not in (None, "result")],
        lambda n: (n.id, call(n), n.spec, n.added or "", n.reason or ""),
        "node",
        node_of=lambda n: n.id,
    )
    lines += _block("checked before every run", [_check(c) for c in p.checks])
    views = [r for r in p.registers if view.nodes[r.node].view_of is not None]
    lines += view.block("registers that are views", views, view.register, "register")
    for place, nbytes in p.arenas.items():
        held = [b for b in p.buffers if b.location == place]
        lines += view.block(f"arena on {place}, {size(nbytes)}", held, view.buffer, "buffer")
    lines += [
        "",
        "manifest",
        "  baked: reused only where these are equal (ids are of this process, not shown)",
    ]
    lines += table(_folded({name: _fact(v) for name, v in p.manifest.baked.items()}, full), 4)
    lines.append("  bound: supplied for every run")
    ranges_of = {s.name: f"symbol, {_range(s.low, s.high)}" for s in d.graph.symbols}
    bound = {name: ranges_of.get(name, spec) for name, spec in p.manifest.bound.items()}
    lines += table(_folded(bound, full), 4) or ["    nothing"]
    return "\n".join(lines) + "\n"


class _PlanView:
    """Rows of a plan's lists, with repeated layers left out unless `full`."""

    def __init__(self, p: Plan, full: bool) -> None:
        self.nodes = {n.id: n for n in p.nodes}
        self.leaves = {leaf.name: leaf for leaf in p.leaves}
        self.registers = {r.id: r for r in p.registers}
        self.holders = {r.node: r.id for r in reversed(p.registers)}
        self.same = {s.layer: s.same for s in sections(p.nodes, collapse=not full)}
        self.hidden = {n for same in self.same.values() for n in same}

    def block(
        self, title: str, items: Sequence[T], row: Callable[[T], Row], what: str,
        node_of: Callable[[T], str] = lambda item: item.node,  # type: ignore[attr-defined]
    ) -> list[str]:  # fmt: skip
        """A titled table of items, with a heading wherever the layer changes."""

        def layer(item: T) -> int | None:
            return self.nodes[node_of(item)].layer

        rows: list[Row] = []
        grouped = len({layer(i) for i in items}) > 1 or any(self.same.values())
        for number, run in groupby(items, layer):
            members = list(run)
            if number in self.hidden:
                continue
            if grouped:
                rows += [f"layer {number}:" if number is not None else "outside the layers:"]
            rows += [row(i) for i in members]
            if self.same.get(number):
                rows.append(_same(number, self.same[number], count(len(members), what)))
        return _block(title, rows)

    def operand(self, r: Register) -> str:
        """A leaf by its name where a register is all of it, else the register."""
        leaf = self.leaves.get(r.leaf or "")
        if leaf is None or r.offset != 0 or r.shape != leaf.shape:
            return r.id
        if r.strides != Layout.contiguous(leaf.shape).strides:
            return r.id
        return leaf.name if leaf.name.isprintable() else repr(leaf.name)

    def step(self, s: Step) -> Row:
        ins = ", ".join(self.operand(self.registers[r]) for r in s.inputs)
        node = self.nodes[s.node]
        if node.added == "result":
            return (str(s.index), f"return {ins}", node.spec, s.node, "")
        out = self.operand(self.registers[s.output])
        said = [params(s.params)] if params(s.params) else []
        if node.destroys is not None:
            dest = self.operand(self.registers[s.inputs[node.destroys]])
            said.append("in place" if dest == out else f"in place of {dest}")
        if s.scratch:
            said.append(f"scratch {','.join(s.scratch)}")
        return (str(s.index), f"{out} = {s.op}({ins})", node.spec, s.node, "; ".join(said))

    def register(self, r: Register) -> Row:
        strides = ",".join(map(str, r.strides))
        base = r.leaf or self.holders.get(self.nodes[r.node].buffer, "")
        return (r.id, f"of {base}", self.nodes[r.node].spec, f"offset {r.offset}",
                f"strides ({strides})", r.node)  # fmt: skip

    def buffer(self, b: Buffer) -> Row:
        what = f"scratch of {b.node}" if b.scratch else f"{self.holders.get(b.node, '')} {b.node}"
        until = f"steps {b.first}..{b.last}" if b.first != b.last else f"step {b.first}"
        return (f"at {b.offset}", size(b.nbytes), until, what)


def call(n: Node) -> str:
    """``op 'name'`` for a leaf, ``op(%1, %2)`` otherwise."""
    head = f"{n.op}({', '.join(n.inputs)})" if n.inputs else n.op
    return f"{head} {n.name!r}" if n.name else head


def params(values: Mapping[str, Any]) -> str:
    """``axis=2 keepdims``: parameters without those that are off or absent."""
    said = []
    for name, value in values.items():
        if value is True:
            said.append(name)
        elif value is not None and value is not False:
            said.append(f"{name}={_value(value)}")
    return " ".join(said)


def count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def size(nbytes: int) -> str:
    """``512 B``, ``1.5 KiB``, ``512 MiB``: rounded, for people."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def table(rows: Iterable[Row], indent: int = 2) -> list[str]:
    """Cells in columns as wide as their widest; lines that stand alone are indented as well."""
    rows = list(rows)
    cells = [r for r in rows if not isinstance(r, str)]
    columns = max((len(r) for r in cells), default=0)
    widths = [max((len(r[c]) for r in cells if c < len(r)), default=0) for c in range(columns)]
    lines = []
    for row in rows:
        if isinstance(row, str):
            lines.append(row and " " * indent + row)
        else:
            line = "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=False))
            lines.append((" " * indent + line).rstrip())
    return lines


def _block(title: str, rows: Sequence[Row]) -> list[str]:
    return ["", title, *table(rows)] if rows else []


def _node_row(n: GraphNode, *, show_place: bool) -> Row:
    said = [params(n.params)] if params(n.params) else []
    if n.destroys is not None:
        said.append(f"overwrites {n.inputs[n.destroys]}")
    if n.view_of is not None:
        said.append(f"view of {n.view_of}")
    if n.planned_as != n.id:
        said.append(f"planned as {n.planned_as}" if n.planned_as else "not needed by the plan")
    return (n.id, call(n), n.spec, *([n.location] if show_place else []), "; ".join(said))


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"({','.join(map(_value, value))})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _check(c: Check) -> Row:
    return (c.op, f"{c.low} <= {c.value} <= {c.high}", c.what)


def _same(layer: int | None, same: Sequence[int], members: str) -> str:
    which = f"layers {ranges(same)}" if len(same) > 1 else f"layer {same[0]}"
    each = " each" if len(same) > 1 else ""
    return f"{which}: same as layer {layer}, {members}{each} (--full shows all)"


def _range(low: int, high: int | None) -> str:
    return f"{low} or more" if high is None else f"{low}..{high}"


def _some(ids: Sequence[str], full: bool) -> str:
    shown = ids if full or len(ids) <= 8 else [*ids[:4], "...", ids[-1]]
    return ", ".join(shown)


def _fact(value: Any) -> str:
    if value is None:
        return "id"
    return _range(*value) if isinstance(value, list) else str(value)


def _folded(facts: Mapping[str, str], full: bool) -> list[Row]:
    """One row a fact; facts that differ only in the layer's number share one unless `full`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, value in facts.items():
        groups.setdefault((name if full else starred(name), value), []).append(name)
    rows: list[Row] = []
    for (name, value), names in groups.items():
        numbers = sorted(n for n in map(layer_in_name, names) if n is not None)
        if len(names) == 1:
            rows.append((names[0], value, ""))
        else:
            rows.append((name, value, f"* is {ranges(numbers)}"))
    return rows
