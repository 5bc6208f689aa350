"""The JSON dump: its schema, its agreement with the graph, and that it is the same everywhere."""

import itertools
import json
import os
import subprocess
import sys
from importlib.resources import files

import jsonschema
import networkx as nx
import numpy as np
import pytest
from graphs import layered, tangled

import lazykv as lk
from lazykv.errors import GraphError
from lazykv.inspect import describe, describe_plan


@pytest.fixture(scope="module")
def schema() -> dict:
    found = json.loads((files("lazykv.inspect") / "graph.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def objects(schema: dict) -> dict[str, dict]:
    return {name: d for name, d in schema["$defs"].items() if d.get("type") == "object"}


@pytest.mark.parametrize("make", [tangled, layered])
def test_dump_fits_the_schema(make, schema):
    jsonschema.validate(json.loads(make().to_json()), schema)


def test_schema_is_closed(schema):
    """A field the schema does not know is an error, so that the schema cannot fall behind."""
    value = json.loads(tangled().to_json())
    value["plan"]["steps"][0]["surprise"] = 1
    with pytest.raises(jsonschema.ValidationError, match="surprise"):
        jsonschema.validate(value, schema)


def test_dump_is_the_graph():
    g = lk.Graph()
    a = g.placeholder((2, 3), "f32", name="a")
    b = g.const(np.ones((3, 2), np.float32))
    unused = a.exp()
    c = (a @ b).softmax(0)
    value = json.loads(describe(c).to_json())

    built = nx.DiGraph()
    needed = [t for t in g if t is not unused]
    place = {t.node_id: f"%{n}" for n, t in enumerate(needed)}
    for t in needed:
        built.add_node(place[t.node_id], op=t.op.name, shape=list(t.shape), dtype=t.dtype.name)
        built.add_edges_from((place[s.node_id], place[t.node_id]) for s in t.inputs)

    nodes = value["graph"]["nodes"]
    links = [{"source": s, "target": n["id"]} for n in nodes for s in n["inputs"]]
    kept = ("id", "op", "shape", "dtype")
    dumped = nx.node_link_graph(
        {"nodes": [{k: n[k] for k in kept} for n in nodes], "edges": links}, directed=True,
        multigraph=False, edges="edges",
    )  # fmt: skip
    assert dict(dumped.nodes(data=True)) == dict(built.nodes(data=True))
    assert set(dumped.edges) == set(built.edges)
    assert value["graph"]["targets"] == [place[c.node_id]]


def test_effects_of_writes_and_views():
    nodes = {n.id: n for n in tangled().graph.nodes}
    write, view, kept = nodes["%3"], nodes["%4"], nodes["%7"]
    assert (write.op, write.destroys, write.buffer, write.version) == ("write_slice", 0, "%0", "%3")
    assert (view.op, view.view_of, view.buffer, view.version) == ("reshape", "%0", "%0", "%0")
    assert (kept.op, kept.destroys, kept.view_of, kept.buffer) == ("add", None, None, "%7")
    assert nodes["%5"].op == "contiguous"
    assert nodes["%5"].planned_as == "%4", "a view that changes nothing is not planned"


def test_version_chain_of_the_plan():
    """The clone takes the first write, so that one buffer's versions are a chain."""
    nodes = {n.id: n for n in tangled().plan.nodes}
    assert (nodes["%2"].buffer, nodes["%2"].version) == ("copy0", "%2")
    assert (nodes["%3"].buffer, nodes["%3"].version) == ("%0", "%3")
    assert nodes["copy0"].added == "clone"
    assert nodes["copy1"].added == "safety"


def test_steps_run_in_an_order_that_every_edge_allows():
    p = tangled().plan
    at = {s.node: s.index for s in p.steps}
    assert p.edges
    for e in p.edges:
        assert at[e.before] < at[e.after]
    for n in p.nodes:
        for source in n.inputs:
            if n.id in at and source in at:
                assert at[source] < at[n.id]


def test_buffers_that_live_together_do_not_overlap():
    p = layered().plan
    assert len(p.buffers) > 4
    for a, b in itertools.combinations(p.buffers, 2):
        together = a.first <= b.last and b.first <= a.last
        apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
        assert apart or not together
    firsts = [b.first for b in p.buffers]
    assert firsts == sorted(firsts)
    assert max(b.offset + b.nbytes for b in p.buffers) <= p.arenas["cpu"]


def test_registers_lie_where_their_buffers_are():
    p = layered().plan
    offsets = {b.node: b.offset for b in p.buffers if not b.scratch}
    owners = {n.id: n.buffer for n in p.nodes}
    scratch = {r for s in p.steps for r in s.scratch}
    checked = [r for r in p.registers if r.arena_offset is not None and r.id not in scratch]
    assert checked
    for r in checked:
        assert r.arena_offset == offsets[owners[r.node]]


def test_infinite_parameters_stay_json(schema):
    g = lk.Graph()
    x = g.placeholder((2,), "f32").lt(float("inf"))
    value = json.loads(describe(x).to_json())
    jsonschema.validate(value, schema)
    assert [n["params"] for n in value["graph"]["nodes"] if n["op"] == "fill"] == [{"value": "inf"}]


def test_namesakes_are_told_apart():
    g = lk.Graph()
    a, b = lk.Sym("pos", 0, 3), lk.Sym("pos", 0, 5)
    x = g.placeholder((8,), "f32", name="x")
    y = g.placeholder((8,), "f32", name="x")
    d = describe(x.slice(0, a, 2) + y.slice(0, b, 2))
    assert [s.name for s in d.graph.symbols] == ["pos", "pos#1"]
    assert [leaf.name for leaf in d.plan.leaves] == ["x", "x#1"]
    assert set(d.plan.manifest.bound) == {"x", "x#1", "pos", "pos#1"}


def test_identities_are_left_out():
    """Another allocation, another graph, another plan: the same dump."""
    for _ in range(3):
        lk.Graph().placeholder((1,), "f32")
        lk.Storage.from_array(np.zeros(3, np.float32))
    assert tangled().to_json() == tangled().to_json()


PROGRAM = """
import sys, numpy as np, lazykv as lk
for n in range(int(sys.argv[1])):
    lk.realize(lk.Graph().const(np.zeros(n + 1, np.float32)).exp())
from graphs import layered, tangled
from lazykv.inspect import graph_text, plan_text, to_dot, to_mermaid
for d in (tangled(), layered()):
    for form in (graph_text, plan_text, to_dot, to_mermaid, type(d).to_json):
        sys.stdout.write(form(d))
"""


def test_dumps_are_the_same_in_every_process():
    def run(seed: str, earlier: str) -> bytes:
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.path.dirname(__file__)}
        command = [sys.executable, "-c", PROGRAM, earlier]
        return subprocess.run(command, env=env, check=True, capture_output=True).stdout

    first = run("0", "0")
    assert len(first) > 10_000
    assert first == run("1", "3") == run("12345", "0")


def test_a_held_session_can_be_described():
    g = lk.Graph()
    cache = lk.KvCache.with_capacity(1, 1, 4, 8, "f32")
    k, v = (g.placeholder((1, 1, 8, 4), "f32", name=f"blk.0.{s}") for s in "kv")
    row = g.placeholder((1, 1, 1, 4), "f32", name="row")
    pos = lk.Sym("pos", 0, 7)
    k2 = k.at[:, :, pos : pos + 1].set(row)
    v2 = v.at[:, :, pos : pos + 1].set(row)
    out = lk.attention(row, k2, v2, length=pos + 1)
    session = lk.DecodeSession.build(
        lk.InferenceContext(), out, kv=cache, kv_nodes=[(k, v)], bound={"row": row}
    )
    d = describe_plan(session.plan, [out], title="session")
    assert [leaf.name for leaf in d.plan.leaves if leaf.written] == ["blk.0.k", "blk.0.v"]
    assert d.plan.manifest.baked["storage:blk.0.k"] is None
    assert d.plan.manifest.bound == {"row": "f32[1,1,1,4]", "pos": "symbol"}


def test_describing_a_plan_for_other_targets_is_refused():
    g = lk.Graph()
    x = g.placeholder((2,), "f32")
    made = lk.plan(x.exp())
    with pytest.raises(GraphError, match="need its own"):
        describe_plan(made, [x.sqrt()])
