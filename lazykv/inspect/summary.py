"""A page on a graph and its plan: what it is made of, what it costs, what is biggest."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from lazykv.inspect.document import Document, Leaf, Plan, PlanNode, Step
from lazykv.inspect.layers import starred
from lazykv.inspect.text import Row, count, size, table

SCHEMA = "lazykv.summary/1"
BIGGEST = 5
"""Steps listed as the biggest."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, and in how many buffers they lie. `constant` is data that is only read (weights),
    `written` what the plan overwrites in place (caches), `inputs` is bound and only read."""

    constant: tuple[int, int]
    written: tuple[int, int]
    inputs: tuple[int, int]
    arena: tuple[int, int]
    results: int
    peak: int


@dataclass(frozen=True, slots=True)
class BigStep:
    """A step and the bytes of its operands and its result (of what a write overwrites, only the
    part that it overwrites). `times` counts the steps that differ only in their layer."""

    index: int
    nbytes: int
    times: int
    node: str
    call: str
    spec: str


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts over a document. `added` counts the plan's nodes by what they were added for."""

    title: str
    nodes: int
    layers: int
    data: int
    views: int
    writes: int
    ops: dict[str, int]
    steps: int
    edges: int
    added: dict[str, int]
    checks: int
    memory: Memory
    biggest: tuple[BigStep, ...]


def summarize(d: Document) -> Summary:
    nodes, p = d.graph.nodes, d.plan
    ops = Counter(n.op for n in nodes)
    added = Counter(n.added for n in p.nodes)
    return Summary(
        title=d.title,
        nodes=len(nodes),
        layers=len({n.layer for n in nodes} - {None}),
        data=sum(n.is_leaf for n in nodes),
        views=sum(n.view_of is not None for n in nodes),
        writes=sum(n.destroys is not None for n in nodes),
        ops=dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
        steps=len(p.steps),
        edges=len(p.edges),
        added={kind: added[kind] for kind in ("safety", "clone", "placement", "lowering")},
        checks=len(p.checks),
        memory=_memory(p),
        biggest=tuple(_biggest(p)),
    )


def summary_json(d: Document) -> str:
    return json.dumps({"schema": SCHEMA, **asdict(summarize(d))}, indent=1) + "\n"


def summary_text(d: Document) -> str:
    """Op histogram, memory, what the scheduler added, and the steps that touch most bytes."""
    s = summarize(d)
    rest = s.nodes - s.data - s.views - s.writes
    within = f" in {count(s.layers, 'layer')}" if s.layers else ""
    lines = [f"graph {s.title}: {count(s.nodes, 'node')}{within}"]
    lines.append(
        f"  {s.data} data, {s.views} views, {s.writes} writes, {rest} that compute or move"
    )
    lines += ["", "ops as built", *table([(op, str(n)) for op, n in s.ops.items()])]
    lines += ["", f"plan: {count(s.steps, 'step')}", *table(_scheduling(s))]
    lines += ["", "memory", *table(_memory_rows(s.memory))]
    lines += [
        "",
        "biggest steps, by the size of operands and results (take and attention read a part)",
    ]
    biggest: list[Row] = [
        (size(b.nbytes), f"{b.times} x", b.call, b.spec, f"first in step {b.index}, {b.node}")
        for b in s.biggest
    ]
    lines += table(biggest or ["none"])
    return "\n".join(lines) + "\n"


def _scheduling(s: Summary) -> list[Row]:
    return [
        (
            "ordering edges",
            str(s.edges),
            "a reader of old bytes before the write that destroys them",
        ),
        ("safety copies", str(s.added["safety"]), "for readers that have to run after the write"),
        ("clones", str(s.added["clone"]), "written instead of a destination that has to stay"),
        ("placement copies", str(s.added["placement"]), "carry operands to another location"),
        ("nodes from lowerings", str(s.added["lowering"]), "stand for ops without a kernel"),
        ("checks", str(s.checks), "of symbols, before every run"),
    ]


def _memory_rows(m: Memory) -> list[Row]:
    def row(what: str, entry: tuple[int, int]) -> Row:
        return (what, size(entry[0]), f"in {count(entry[1], 'buffer')}")

    return [
        row("constant data (weights)", m.constant),
        row("written in place (caches)", m.written),
        row("inputs, only read", m.inputs),
        ("arena", size(m.arena[0]), f"shared by {count(m.arena[1], 'intermediate')}"),
        ("results", size(m.results), "fresh for every run"),
        ("peak of a run", size(m.peak), "beyond the storages that are baked or bound"),
    ]


def _memory(p: Plan) -> Memory:
    def total(leaves: Iterable[Leaf]) -> tuple[int, int]:
        sizes = [leaf.nbytes for leaf in leaves]
        return sum(sizes), len(sizes)

    read = [leaf for leaf in p.leaves if not leaf.written]
    return Memory(
        constant=total(leaf for leaf in read if leaf.kind == "const"),
        written=total(leaf for leaf in p.leaves if leaf.written),
        inputs=total(leaf for leaf in read if leaf.kind != "const"),
        arena=(sum(p.arenas.values()), len(p.buffers)),
        results=p.result_bytes,
        peak=p.peak_bytes,
    )


def _biggest(p: Plan) -> list[BigStep]:
    nodes = {n.id: n for n in p.nodes}
    alike: dict[tuple[int, str, str], list[Step]] = {}
    for s in p.steps:
        n = nodes[s.node]
        if n.added != "result":
            ins = ", ".join(starred(nodes[i].name or nodes[i].spec) for i in n.inputs)
            key = (_operand_bytes(nodes, n), f"{n.op}({ins})", n.spec)
            alike.setdefault(key, []).append(s)
    ranked = sorted(alike.items(), key=lambda item: (-item[0][0], item[1][0].index))
    return [
        BigStep(steps[0].index, nbytes, len(steps), steps[0].node, call, spec)
        for (nbytes, call, spec), steps in ranked[:BIGGEST]
    ]


def _operand_bytes(nodes: dict[str, PlanNode], n: PlanNode) -> int:
    read = sum(nodes[i].nbytes for at, i in enumerate(n.inputs) if at != n.destroys)
    return 2 * read if n.destroys is not None else read + n.nbytes
