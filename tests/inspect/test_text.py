"""The text dumps, in full where the format itself is the point."""

import numpy as np
import pytest
from graphs import layered, tangled

import lazykv as lk
from lazykv.inspect import describe, graph_text, plan_text, summary_text
from lazykv.inspect.document import Document
from lazykv.kv.rows import write_graph


@pytest.fixture
def write_bytes() -> Document:
    cache = lk.KvCache.with_capacity(1, 2, 4, 16, "f16")
    storage = cache.slot_storage(0, lk.KvSlot.K)
    rows = np.zeros((1, 2, 3, 4), np.float16)
    effects, _ = write_graph([(storage, rows)], ["k"])
    return describe([], effects=effects, title="write-bytes")


GRAPH = """\
graph write-bytes: 3 nodes on cpu

  %0  const 'k'            f16[1,2,16,4]
  %1  const 'k.rows'       f16[1,2,3,4]   frozen snapshot
  %2  write_slice(%0, %1)  f16[1,2,16,4]  starts=(0,0,start,0) widths=(1,2,3,4); overwrites %0

symbol start: 0..13
writes for their effect: %2
"""

PLAN = """\
plan write-bytes: 1 step, arena 0 B, results 0 B, peak 0 B

steps, in the order they run
  0  k = write_slice(k, k.rows)  f16[1,2,16,4]  %2  starts=(0,0,start,0) widths=(1,2,3,4); in place

manifest
  baked: reused only where these are equal (ids are of this process, not shown)
    structure       STRUCTURE
    storage:k       id
    storage:k.rows  id
    generation:cpu  id
    range:start     0..13
  bound: supplied for every run
    start  symbol, 0..13
"""


def test_graph_of_an_eager_write(write_bytes):
    assert graph_text(write_bytes) == GRAPH


def test_plan_of_an_eager_write(write_bytes):
    assert plan_text(write_bytes) == PLAN.replace("STRUCTURE", write_bytes.plan.structure)


def test_plan_tells_why_it_added_what_it_added():
    text = plan_text(tangled())
    assert (
        """
order kept although no input asks for it
  copy0  before  %3  reads bytes of %0 first
  %6     before  %3  reads bytes of %4 first
  copy1  before  %3  safety copy of %0

nodes the compiler added
  copy0  copy(%0)  f32[1,2,16,4]  clone   %3, built later, writes the same destination in place
  copy1  copy(%0)  f32[1,2,16,4]  safety  %7 needs %3 and the bytes it overwrites

checked before every run
  write_slice  0 <= start <= 13      start on axis 2 (width 3)
  write_slice  0 <= start + 1 <= 13  start on axis 2 (width 3)
"""
        in text
    )


def test_views_are_told_apart_from_the_leaf_they_show():
    g = lk.Graph()
    square = g.placeholder((3, 3), "f32", name="square")
    text = plan_text(describe(square.transpose(0, 1) @ square))
    assert "r2 = matmul(r0, square)" in text
    assert "r0  of square  f32[3,3]  offset 0  strides (1,3)  %1" in text


def test_repeated_layers_are_shown_once():
    text = graph_text(layered())
    assert "layers 1..3: same as layer 0, 6 nodes each (--full shows all)" in text
    assert "layer 0:" in text
    assert "blk.0.norm" in text
    assert "blk.1.norm" not in text
    assert (
        text.index("before the layers:") < text.index("layer 0:") < text.index("after the layers:")
    )


def test_full_text_shows_every_node_and_step():
    d = layered()
    text = graph_text(d, full=True)
    assert "same as" not in text
    assert all(f"  {n.id} " in text for n in d.graph.nodes)
    steps = plan_text(d, full=True)
    assert "same as" not in steps
    assert all(f"\n  {s.index} " in steps for s in d.plan.steps)


def test_a_layer_that_differs_is_shown():
    g = lk.Graph()
    x = g.placeholder((2, 4), "f32", name="x").exp()
    for i, eps in enumerate((1e-5, 1e-5, 1e-6)):
        x = x.rms_norm(g.const(np.ones(4, np.float32), name=f"blk.{i}.norm"), eps)
    text = graph_text(describe(x))
    assert "layer 1: same as layer 0, 2 nodes (--full shows all)" in text
    assert "eps=1e-06" in text


def test_a_layer_wired_otherwise_is_shown():
    g = lk.Graph()
    x = g.placeholder((4,), "f32", name="x").exp()
    for i in range(3):
        y = x * g.const(np.ones(4, np.float32), name=f"blk.{i}.w")
        x = y - x if i < 2 else x - y
    text = graph_text(describe(x))
    assert "layer 1: same as layer 0" in text
    assert "layer 2:\n" in text


def test_facts_of_layers_share_a_row_of_the_manifest():
    lines = [" ".join(line.split()) for line in plan_text(layered()).splitlines()]
    assert "storage:blk.*.norm id * is 0..3" in lines
    assert "blk.*.rows f32[7,8] * is 0..3" in lines


def test_summary():
    text = summary_text(tangled())
    assert text.startswith("graph tangled: 8 nodes\n  2 data, 2 views, 2 writes, 2 that compute")
    assert "safety copies         1  for readers that have to run after the write" in text
    assert "clones                1  written instead of a destination that has to stay" in text
    assert "ordering edges        3" in text
    assert "written in place (caches)  512 B    in 1 buffer" in text


def test_names_that_would_break_a_line_are_quoted():
    g = lk.Graph()
    x = g.placeholder((2,), "f32", name="two\nlines")
    text = plan_text(describe(x.exp())) + graph_text(describe(x.exp()))
    assert "two\nlines" not in text.partition("manifest")[0]
