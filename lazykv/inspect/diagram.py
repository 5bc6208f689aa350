"""Drawings of a planned graph, for Graphviz and for Mermaid.

Both show the plan's nodes: data flows along plain arrows, a bold arrow leads from what a write
overwrites, and a dashed one keeps an order that no input asks for. Repeated layers are one box
unless `full`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from lazykv.inspect.document import Document, PlanNode
from lazykv.inspect.layers import ranges, sections


@dataclass(frozen=True, slots=True)
class _Box:
    id: str
    lines: tuple[str, ...]
    kind: str


@dataclass(slots=True)
class _Drawing:
    """Boxes by heading, and arrows ``(from, to, kind)`` in a fixed order without repetition."""

    groups: list[tuple[str, list[_Box]]] = field(default_factory=list)
    arrows: dict[tuple[str, str, str], None] = field(default_factory=dict)


def to_dot(d: Document, *, full: bool = False) -> str:
    """A Graphviz digraph."""
    drawing = _draw(d, full)
    shapes = {"data": "cylinder", "write": "box", "view": "parallelogram", "compute": "box",
              "added": "note", "result": "ellipse", "layers": "box3d"}  # fmt: skip
    styles = {"flow": "", "overwrite": ' [style=bold, color=red, label="overwritten by"]',
              "order": ' [style=dashed, color=gray, label="before"]'}  # fmt: skip
    lines = [f"digraph {_dot(d.title)} {{", "  rankdir=TB;", "  node [fontname=monospace];"]
    for n, (heading, boxes) in enumerate(drawing.groups):
        pad = "    " if heading else "  "
        if heading:
            lines += [f"  subgraph cluster_{n} {{", f"    label={_dot(heading)};"]
        for box in boxes:
            look = f"shape={shapes[box.kind]}" + (", color=red" if box.kind == "write" else "")
            lines.append(f"{pad}{_dot(box.id)} [label={_dot(*box.lines)}, {look}];")
        lines += ["  }"] if heading else []
    lines += [f"  {_dot(a)} -> {_dot(b)}{styles[kind]};" for a, b, kind in drawing.arrows]
    return "\n".join([*lines, "}"]) + "\n"


def to_mermaid(d: Document, *, full: bool = False) -> str:
    """A Mermaid flowchart."""
    drawing = _draw(d, full)
    shapes = {"data": ("[(", ")]"), "write": ("[", "]"), "view": ("[/", "/]"),
              "compute": ("[", "]"), "added": (">", "]"), "result": ("([", "])"),
              "layers": ("[[", "]]")}  # fmt: skip
    arrows = {"flow": "-->", "overwrite": "== overwritten by ==>", "order": "-. before .->"}
    lines = ["flowchart TB"]
    # Mermaid's ids are words; the labels carry the real ones.
    ids = {box.id: f"n{n}" for n, box in enumerate(b for _, bs in drawing.groups for b in bs)}
    for n, (heading, boxes) in enumerate(drawing.groups):
        pad = "    " if heading else "  "
        lines += [f"  subgraph g{n}[{_mermaid(heading)}]"] if heading else []
        for box in boxes:
            left, right = shapes[box.kind]
            lines.append(f"{pad}{ids[box.id]}{left}{_mermaid(*box.lines)}{right}")
        lines += ["  end"] if heading else []
    lines += [f"  {ids[a]} {arrows[kind]} {ids[b]}" for a, b, kind in drawing.arrows]
    return "\n".join(lines) + "\n"


def _draw(d: Document, full: bool) -> _Drawing:
    drawing, drawn = _Drawing(), {n.id: n.id for n in d.plan.nodes}
    hidden: dict[int | None, str] = {}
    for section in sections(d.plan.nodes, collapse=not full):
        boxes = [_box(n) for n in section.nodes]
        drawing.groups.append((section.title, boxes))
        if section.same:
            title = f"layers {ranges(section.same)}"
            drawing.groups.append(
                ("", [_Box(title, (title, f"same as layer {section.layer}"), "layers")])
            )
            hidden |= dict.fromkeys(section.same, title)
    drawn |= {n.id: hidden[n.layer] for n in d.plan.nodes if n.layer in hidden}
    for n in d.plan.nodes:
        for position, source in enumerate(n.inputs):
            kind = "overwrite" if position == n.destroys else "flow"
            _arrow(drawing, drawn, source, n.id, kind)
    for e in d.plan.edges:
        _arrow(drawing, drawn, e.before, e.after, "order")
    return drawing


def _arrow(drawing: _Drawing, drawn: dict[str, str], a: str, b: str, kind: str) -> None:
    if drawn[a] != drawn[b]:
        drawing.arrows[drawn[a], drawn[b], kind] = None


def _box(n: PlanNode) -> _Box:
    lines = [f"{n.id} {n.op}", n.spec]
    if n.name:
        lines.insert(1, n.name)
    if n.added not in (None, "result"):
        lines.append(f"added: {n.added}")
    return _Box(n.id, tuple(lines), _kind(n))


def _kind(n: PlanNode) -> str:
    if n.added is not None:
        return "result" if n.added == "result" else "added"
    if n.is_leaf:
        return "data"
    if n.destroys is not None:
        return "write"
    return "view" if n.view_of is not None else "compute"


def _quoted(lines: tuple[str, ...], escape: Callable[[str], str], newline: str) -> str:
    return '"' + newline.join(escape(line) for line in lines) + '"'


def _dot(*lines: str) -> str:
    return _quoted(lines, lambda t: t.replace("\\", "\\\\").replace('"', '\\"'), "\\n")


def _mermaid(*lines: str) -> str:
    """Text with Mermaid's entity codes for what would end it or be read as markup."""
    codes = {'"': "#quot;", "#": "#35;", "<": "#lt;", ">": "#gt;", "\n": " "}
    return _quoted(lines, lambda t: "".join(codes.get(c, c) for c in t), "<br/>")
