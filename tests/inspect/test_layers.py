"""Which layer a node is listed under."""

import pytest
from graphs import layered

from lazykv.inspect.layers import layer_in_name, layers_of, ranges, starred


@pytest.mark.parametrize(
    ("name", "layer"),
    [("blk.3.attn_q.weight", 3), ("model.layers.12.mlp", 12), ("cache.0.k", 0), ("x3", None),
     ("", None), (None, None), ("a.-1.b", None), ("a.٣.b", None)],
)  # fmt: skip
def test_layer_in_name(name, layer):
    assert layer_in_name(name) == layer


def test_starred_and_ranges():
    assert starred("blk.3.attn.3") == "blk.*.attn.3"
    assert starred("plain") == "plain"
    assert ranges([1, 2, 3, 7, 9, 10]) == "1..3, 7, 9..10"


def test_nodes_follow_the_data_they_work_on():
    nodes = [
        ("table", ()),  # 0
        (None, (0,)),  # 1: before
        ("blk.0.w", ()),  # 2
        (None, (1, 2)),  # 3: layer 0 begins
        (None, (3,)),  # 4
        ("blk.1.w", ()),  # 5
        (None, (4, 5)),  # 6: layer 1 begins
        (None, (6,)),  # 7
        (None, (7,)),  # 8: one more than layer 0 has
        ("norm", ()),  # 9
        (None, (8, 9)),  # 10: reads shared data
        (None, (10,)),  # 11
    ]
    assert layers_of(nodes) == [None, None, 0, 0, 0, 1, 1, 1, None, None, None, None]


def test_the_only_layer_ends_where_shared_data_is_read():
    nodes = [("blk.0.w", ()), (None, (0,)), (None, (1,)), ("norm", ()), (None, (2, 3))]
    assert layers_of(nodes) == [0, 0, 0, None, None]


def test_layers_of_a_model():
    d = layered(3)
    layers = [n.layer for n in d.graph.nodes if not n.is_leaf]
    assert layers == [None, *[0] * 4, *[1] * 4, *[2] * 4, *[None] * 4]
