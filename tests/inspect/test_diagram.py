"""Drawings, read back with a foreign parser or line by line."""

import re

import pydot
import pytest
from graphs import layered, tangled

import lazykv as lk
from lazykv.inspect import describe, to_dot, to_mermaid

# The parser calls names that its own parser library has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NODE = re.compile(r'\s+(n\d+)(\[\(|\[\[|\[/|\[|>|\(\[)"(.+)"(\)\]|\]\]|/\]|\]|\]\))')
ARROW = re.compile(r"\s+(n\d+) (-->|== overwritten by ==>|-\. before \.->) (n\d+)")


def unquoted(text: str) -> str:
    return text.strip('"')


def all_of(drawing: pydot.Graph) -> tuple[dict[str, str], set[tuple[str, str]]]:
    graphs = [drawing, *drawing.get_subgraphs()]
    nodes = {unquoted(n.get_name()): n.get_label() for g in graphs for n in g.get_nodes()}
    nodes.pop("node", None)
    edges = {(unquoted(e.get_source()), unquoted(e.get_destination())) for e in drawing.get_edges()}
    return nodes, edges


@pytest.mark.parametrize("make", [tangled, layered])
def test_dot_is_the_planned_graph(make):
    d = make()
    (drawing,) = pydot.graph_from_dot_data(to_dot(d, full=True))
    nodes, edges = all_of(drawing)
    assert set(nodes) == {n.id for n in d.plan.nodes}
    flow = {(s, n.id) for n in d.plan.nodes for s in n.inputs}
    assert edges == flow | {(e.before, e.after) for e in d.plan.edges}
    assert all(n.op in nodes[n.id] and n.spec in nodes[n.id] for n in d.plan.nodes)


def test_dot_draws_writes_and_order_apart():
    (drawing,) = pydot.graph_from_dot_data(to_dot(tangled()))
    style = {
        (unquoted(e.get_source()), unquoted(e.get_destination()), e.get("style"))
        for e in drawing.get_edges()
    }
    assert ("%0", "%3", "bold") in style
    assert ("%6", "%3", "dashed") in style


def test_dot_joins_repeated_layers():
    (drawing,) = pydot.graph_from_dot_data(to_dot(layered()))
    nodes, edges = all_of(drawing)
    assert "same as layer 0" in nodes["layers 1..3"]
    assert ("layers 1..3", "layers 1..3") not in edges
    assert any(a == "layers 1..3" for a, _ in edges)
    assert any(b == "layers 1..3" for _, b in edges)
    assert len(drawing.get_subgraphs()) == 4


def test_names_cannot_break_out_of_dot():
    g = lk.Graph()
    name = 'a"]; evil [label="\\'
    d = describe(g.placeholder((2,), "f32", name=name).exp(), title=name)
    (drawing,) = pydot.graph_from_dot_data(to_dot(d))
    nodes, _ = all_of(drawing)
    assert set(nodes) == {"%0", "%1", "result0"}


@pytest.mark.parametrize("full", [False, True])
def test_mermaid_structure(full):
    d = layered()
    lines = to_mermaid(d, full=full).splitlines()
    assert lines[0] == "flowchart TB"
    nodes, arrows, depth = {}, [], 0
    for line in lines[1:]:
        if line.startswith("  subgraph "):
            depth += 1
        elif line == "  end":
            depth -= 1
        elif found := ARROW.fullmatch(line):
            arrows.append(found.groups())
        else:
            found = NODE.fullmatch(line)
            assert found, line
            nodes[found[1]] = found[3]
        assert depth in (0, 1)
    assert depth == 0
    assert {n for a, _, b in arrows for n in (a, b)} <= set(nodes)
    ids = {label.partition(" ")[0] for label in nodes.values()}
    planned = {n.id for n in d.plan.nodes}
    assert ids == planned if full else ids < planned | {"layers"}


def test_mermaid_escapes_names():
    g = lk.Graph()
    d = describe(g.placeholder((2,), "f32", name='a"]<b>#1\n').exp())
    assert "a#quot;]#lt;b#gt;#35;1 <br/>" in to_mermaid(d)
