"""What is refused while a graph is built, and with which words."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lazykv as lk
from lazykv.errors import (
    DTypeError,
    GraphError,
    LazyKvError,
    RangeError,
    ShapeError,
    SymbolError,
)

POS = lk.Sym("pos")
SHORT = lk.Sym("short", 0, 3)


class Nodes:
    """A graph with some placeholders to build on."""

    def __init__(self) -> None:
        self.g = lk.Graph()
        self.v = self.p((4,))
        self.m = self.p((3, 4))
        self.t = self.p((2, 3, 4))
        self.i = self.p((4,), "i32")
        self.big = self.p((4,), "i64")
        self.flags = self.p((4,), "bool")
        self.at0 = self.p((), "i64")
        self.s = self.p(())
        self.q = self.p((1, 6, 2, 8))
        self.k = self.p((1, 2, 5, 8))
        self.wide = self.p((1, 4)).broadcast_to(3, 4)
        self.raw8 = self.p((4,), "f8_e4m3")

    def p(self, shape: tuple[int, ...], dtype: str = "f32") -> lk.Tensor:
        return self.g.placeholder(shape, dtype)


Case = tuple[str, Callable[[Nodes], Any], type[LazyKvError], list[str]]

CASES: list[Case] = [
    # sources
    ("extent", lambda n: n.p((2, -1)), ShapeError, ["placeholder", "-1"]),
    ("extent type", lambda n: n.p((2.0,)), ShapeError, ["2.0", "integer"]),  # type: ignore[arg-type]
    ("shape type", lambda n: n.p(2.5), ShapeError, ["2.5"]),  # type: ignore[arg-type]
    ("alloc size", lambda n: n.g.alloc((2**40, 2**40), "f32"), ShapeError, ["alloc", "2**63"]),
    ("alloc bytes", lambda n: n.g.alloc((2**61,), "f32"), ShapeError, ["alloc", "2**63 bytes"]),
    ("alloc nothing", lambda n: n.p((2**60, 0), "f64"), ShapeError, ["f64[", "extents of 0"]),
    ("rank of a source", lambda n: n.p((1,) * 65), ShapeError, ["placeholder", "65", "64"]),
    ("rank of a view", lambda n: n.p((1,) * 64).unsqueeze(0), ShapeError, ["unsqueeze", "65"]),
    ("bytes of a view", lambda n: n.p((1,), "f64").broadcast_to(2**60), ShapeError,
     ["broadcast_to", "f64[1152921504606846976]"]),
    ("bytes of a product", lambda n: n.p((2**40, 1)) @ n.p((1, 2**40)), ShapeError,
     ["matmul", "2**63"]),
    ("const dtype", lambda n: n.g.const(np.zeros(2), "f32"), DTypeError, ["f64[2]", "f32"]),
    ("const fraction", lambda n: n.g.const([1.5], "i32"), DTypeError, ["const", "i32"]),
    ("const too large", lambda n: n.g.const([300], "u8"), DTypeError, ["300", "0..255"]),
    ("const negative", lambda n: n.g.const(-1, "u32"), DTypeError, ["-1", "u32"]),
    ("const text", lambda n: n.g.const("x"), DTypeError, ["U1"]),
    ("const name", lambda n: n.g.const(1.0, name=3), GraphError, ["const: got name 3", "str"]),
    ("placeholder name", lambda n: n.g.placeholder((1,), "f32", b"x"), GraphError,
     ["placeholder: got name b'x'", "str or None"]),
    ("const ragged", lambda n: n.g.const([[1], [2, 3]]), ShapeError, ["rectangular"]),
    # writes
    ("rank", lambda n: n.m.write_slice(n.v, [(0, 1), (0, 4)]), ShapeError, ["f32[3,4]", "f32[4]"]),
    ("ranges", lambda n: n.m.write_slice(n.m, [(0, 3)]), ShapeError, ["1 ranges", "f32[3,4]"]),
    ("a pair", lambda n: n.v.write_slice(n.v, [3]), ShapeError, ["(start, end)"]),
    ("extent of source", lambda n: n.v.write_slice(n.v, [(0, 3)]), ShapeError,
     ["got f32[4]", "need f32[3]"]),
    ("end", lambda n: n.v.write_slice(n.p((2,)), [(3, 5)]), RangeError, ["start", "3", "<= 2"]),
    ("negative start", lambda n: n.v.write_slice(n.p((2,)), [(-1, 1)]), RangeError, ["-1"]),
    ("reversed", lambda n: n.v.write_slice(n.p((2,)), [(3, 1)]), RangeError, ["3..1"]),
    ("no end", lambda n: n.m.write_slice(n.m, [(0, 3), (0, None)]), SymbolError,
     ["write_slice: got None as end on axis 1", "an integer or a symbol expression"]),
    ("fractional start", lambda n: n.v.write_slice(n.v, [(0.0, 4)]), SymbolError,
     ["write_slice: got 0.0 as start on axis 0"]),
    ("bool end", lambda n: n.v.write_slice(n.p((1,)), [(0, True)]), SymbolError,
     ["write_slice: got True as end on axis 0"]),
    ("at end", lambda n: n.m.at[:, :2.5].set(n.m), SymbolError, ["at: got 2.5 as end on axis 1"]),
    ("sinks", lambda n: n.v.write_slice_rotating(n.v, 0, n.at0, 4, 0.5), DTypeError,
     ["write_slice_rotating: got sinks 0.5"]),
    ("wider than dest", lambda n: n.v.write_slice(n.p((5,)), [(0, 5)]), RangeError, ["5", "4"]),
    ("dtype", lambda n: n.v.write_slice(n.i, [(0, 4)]), DTypeError, ["f32[4]", "i32[4]", "cast"]),
    ("broadcast dest", lambda n: n.wide.write_slice(n.m, [(0, 3), (0, 4)]), GraphError,
     ["broadcast view f32[3,4]", "contiguous"]),
    ("fill a broadcast", lambda n: n.wide.zero_fill(), GraphError, ["zero_fill", "broadcast"]),
    ("symbolic width", lambda n: n.v.write_slice(n.v, [(0, POS)]), ShapeError, ["width pos"]),
    ("symbol never fits", lambda n: n.v.write_slice(n.p((2,)), [(POS + 3, POS + 5)]), RangeError,
     ["pos + 3", "<= 2"]),
    ("source kind", lambda n: n.v.write_slice(np.zeros(4), [(0, 4)]), GraphError, ["ndarray"]),
    ("offset kind", lambda n: n.v.write_slice_at(n.v, 0, n.s), ShapeError, ["f32[]", "i64[]"]),
    ("offset rank", lambda n: n.v.write_slice_at(n.v, 0, n.big), ShapeError, ["i64[4]", "i64[]"]),
    ("doff rows", lambda n: n.v.write_slice_at(n.p((5,)), 0, n.at0), RangeError, ["5 rows", "4"]),
    ("doff extent", lambda n: n.m.write_slice_at(n.p((3, 2)), 0, n.at0), ShapeError,
     ["f32[3,2]", "f32[n,4]"]),
    ("doff axis", lambda n: n.m.write_slice_at(n.m, 2, n.at0), ShapeError, ["axis 2", "rank 2"]),
    ("doff dest", lambda n: n.wide.write_slice_at(n.m, 0, n.at0), GraphError, ["broadcast"]),
    ("modulus", lambda n: n.v.write_slice_rotating(n.v, 0, n.at0, 5), RangeError, ["5", "<= 4"]),
    ("no modulus", lambda n: n.v.write_slice_rotating(n.v, 0, n.at0, 0), RangeError, ["modulus 0"]),
    ("ring dtype", lambda n: n.v.write_slice_rotating(n.i, 0, n.at0, 4), DTypeError, ["i32[4]"]),
    ("at index", lambda n: n.m.at[0].set(n.v), GraphError, ["slice"]),
    ("at step", lambda n: n.v.at[::2].set(n.p((2,))), GraphError, ["step 2"]),
    ("at nothing", lambda n: n.v.at.set(n.v), GraphError, ["set() without"]),
    # views
    ("reshape", lambda n: n.m.reshape(5), ShapeError, ["f32[3,4]", "12 elements"]),
    ("reshape -1", lambda n: n.m.reshape(-1), ShapeError, ["-1"]),
    ("slice end", lambda n: n.v.slice(0, 3, 2), RangeError, ["3", "<= 2"]),
    ("slice length", lambda n: n.v.slice(0, 0, 5), RangeError, ["length 5", "f32[4]"]),
    ("slice negative", lambda n: n.v.slice(0, 0, -1), RangeError, ["-1"]),
    ("F2 length", lambda n: n.v.slice(0, 0, SHORT), ShapeError, ["short", "number"]),
    ("F2 index", lambda n: n.v[:SHORT], ShapeError, ["short"]),
    ("slice symbol", lambda n: n.v.slice(0, SHORT + 4, 1), RangeError, ["short + 4"]),
    ("slice start", lambda n: n.v.slice(0, 1.5, 1), SymbolError, ["slice: got 1.5 as start"]),
    ("slice length kind", lambda n: n.v.slice(0, 0, "1"), SymbolError,
     ["slice: got '1' as length"]),
    ("permute twice", lambda n: n.m.permute(0, 0), ShapeError, ["[0, 0]"]),
    ("permute few", lambda n: n.t.permute(1, 0), ShapeError, ["[1, 0]", "f32[2,3,4]"]),
    ("transpose", lambda n: n.m.transpose(0, 2), ShapeError, ["axis 2"]),
    ("broadcast", lambda n: n.v.broadcast_to(2, 3), ShapeError, ["f32[4]", "[2, 3]"]),
    ("broadcast fewer", lambda n: n.m.broadcast_to(4), ShapeError, ["f32[3,4]"]),
    ("squeeze", lambda n: n.m.squeeze(0), ShapeError, ["extent 3"]),
    ("unsqueeze", lambda n: n.m.unsqueeze(3), ShapeError, ["axis 3"]),
    ("cast", lambda n: n.v.cast("f31"), DTypeError, ["f31"]),
    ("index count", lambda n: n.v[0, 0], ShapeError, ["2 indices", "rank 1"]),
    ("index end", lambda n: n.v[4], RangeError, ["4"]),
    ("index below", lambda n: n.v[-5], RangeError, ["-5"]),
    ("index slice", lambda n: n.v[2:7], RangeError, ["5"]),
    ("index step", lambda n: n.v[::-1], GraphError, ["step -1"]),
    ("index kind", lambda n: n.v[1.0], SymbolError, ["1.0"]),
    ("index list", lambda n: n.m[..., [0, 1]], SymbolError,
     ["index: got [0, 1] as index on axis 1"]),
    ("index start", lambda n: n.v[1.5:], SymbolError, ["index: got 1.5 as start on axis 0"]),
    ("index tensor", lambda n: n.v[n.v], SymbolError, ["need an integer"]),
    # compute
    ("add shapes", lambda n: n.v + n.m, ShapeError, ["f32[4]", "f32[3,4]", "broadcast_to"]),
    ("add dtypes", lambda n: n.v + n.i, DTypeError, ["f32[4]", "i32[4]", "cast"]),
    ("add kind", lambda n: n.v + "1", GraphError, ["add", "str"]),
    ("add array", lambda n: n.v + np.zeros(4), GraphError, ["ndarray"]),
    ("add bool", lambda n: n.v + True, GraphError, ["bool"]),
    ("add fraction", lambda n: n.i + 0.5, DTypeError, ["0.5", "i32[4]"]),
    ("add too large", lambda n: n.i + 2**31, DTypeError, [str(2**31)]),
    ("compare fraction", lambda n: n.i.eq(0.5), DTypeError, ["eq: got 0.5 with i32[4]"]),
    ("compare too large", lambda n: n.i.lt(2**31), DTypeError, ["lt: got 2147483648 with i32[4]"]),
    ("compare bools", lambda n: n.flags.eq(1), DTypeError, ["eq: got bool[4]"]),
    ("divide integers", lambda n: n.i / 2, DTypeError, ["i32[4]", "floating"]),
    ("bools have no sum", lambda n: n.flags + n.flags, DTypeError, ["bool[4]"]),
    ("f8 is for storage", lambda n: n.raw8 + n.raw8, DTypeError, ["f8_e4m3[4]", "cast"]),
    ("exp of integers", lambda n: n.i.exp(), DTypeError, ["exp", "i32[4]"]),
    ("neg of unsigned", lambda n: -n.p((2,), "u8"), DTypeError, ["u8[2]", "signed"]),
    ("matmul", lambda n: n.m @ n.m, ShapeError, ["f32[3,4]", "[K, N]"]),
    ("matmul batch", lambda n: n.t @ n.p((1, 4, 3)), ShapeError, ["f32[2,3,4]", "f32[1,4,3]"]),
    ("matmul rank", lambda n: n.v @ n.m, ShapeError, ["f32[4]"]),
    ("matmul dtype", lambda n: n.m @ n.p((4, 2), "f16"), DTypeError, ["f16[4,2]"]),
    ("max of nothing", lambda n: n.p((2, 0)).max(), ShapeError, ["f32[2,0]", ">= 1"]),
    ("sum axis", lambda n: n.m.sum(2), ShapeError, ["axis 2"]),
    ("sum of integers", lambda n: n.i.sum(), DTypeError, ["i32[4]"]),
    ("softmax of rank 0", lambda n: n.s.softmax(), ShapeError, ["rank 0"]),
    ("sum of rank 0", lambda n: n.s.sum(), ShapeError,
     ["sum: got axis -1 for rank 0", "rank >= 1"]),
    ("rms weight", lambda n: n.m.rms_norm(n.p((3,))), ShapeError, ["f32[3]", "f32[4]"]),
    ("rms eps", lambda n: n.m.rms_norm(n.v, -1.0), RangeError, ["-1.0"]),
    ("rms eps kind", lambda n: n.m.rms_norm(n.v, "x"), RangeError, ["rms_norm: got eps 'x'"]),
    ("layer eps", lambda n: n.m.layer_norm(n.v, n.v, math.inf), RangeError,
     ["layer_norm: got eps inf"]),
    ("rms empty", lambda n: n.p((2, 0)).rms_norm(n.p((0,))), ShapeError, ["f32[2,0]"]),
    ("layer bias", lambda n: n.m.layer_norm(n.v, n.p((3,))), ShapeError, ["f32[3]"]),
    ("rope odd", lambda n: n.p((2, 3)).rope(n.m, n.m), ShapeError, ["f32[2,3]", "even"]),
    ("rope tables", lambda n: n.m.rope(n.m, n.m), ShapeError, ["f32[3,4]", "f32[3,2]"]),
    ("take ids", lambda n: n.m.take(n.v), DTypeError, ["ids f32[4]"]),
    ("take rank", lambda n: n.s.take(n.i), ShapeError, ["f32[]"]),
    ("concat", lambda n: lk.concat([n.m, n.t]), ShapeError, ["f32[3,4]", "f32[2,3,4]"]),
    ("concat none", lambda n: lk.concat([]), ShapeError, ["no tensors"]),
    ("concat of one", lambda n: lk.concat(n.m), GraphError, ["concat: got Tensor", "list"]),
    ("concat kind", lambda n: lk.concat([n.m, 1]), GraphError, ["concat: got int as tensor 1"]),
    ("where kind", lambda n: lk.where(n.flags, n.v, 0), GraphError, ["where: got int as b"]),
    ("where condition", lambda n: lk.where(n.v, n.v, n.v), DTypeError, ["condition f32[4]"]),
    ("where shapes", lambda n: lk.where(n.flags, n.s, n.s), ShapeError, ["bool[4]", "f32[]"]),
    # attention
    ("I4 heads", lambda n: lk.attention(n.q, n.p((1, 4, 5, 8)), n.p((1, 4, 5, 8))), ShapeError,
     ["6 query heads", "4 key heads"]),
    ("q rank", lambda n: lk.attention(n.m, n.k, n.k), ShapeError, ["f32[3,4]", "rank 4"]),
    ("k and v", lambda n: lk.attention(n.q, n.k, n.p((1, 2, 4, 8))), ShapeError, ["f32[1,2,4,8]"]),
    ("head size", lambda n: lk.attention(n.q, n.p((1, 2, 5, 4)), n.p((1, 2, 5, 4))), ShapeError,
     ["f32[1,2,5,4]"]),
    ("window", lambda n: lk.attention(n.q, n.k, n.k, window=0), RangeError, ["window 0"]),
    ("length", lambda n: lk.attention(n.q, n.k, n.k, length=6), RangeError, ["6", "<= 5"]),
    ("length below Sq", lambda n: lk.attention(n.q, n.k, n.k, length=1), RangeError, ["1", "2 <="]),
    ("rows below Sq", lambda n: lk.attention(n.p((1, 2, 6, 8)), n.k, n.k), RangeError, ["5", "6"]),
    ("no rows", lambda n: lk.attention(n.q, n.p((1, 2, 0, 8)), n.p((1, 2, 0, 8))), RangeError,
     ["got 2 queries over 0 rows", "at least as many"]),
    ("rows below a length on the device", lambda n: lk.attention(
        n.p((1, 2, 6, 8)), n.k, n.k, length=n.at0), RangeError, ["6 queries over 5 rows"]),
    ("no latent rows", lambda n: lk.latent_attention(
        n.p((1, 2, 1, 8)), n.p((1, 2, 1, 4)), n.p((0, 8)), n.p((0, 4)), scale=1.0), RangeError,
     ["latent_attention: got 1 queries over 0 rows"]),
    ("operand", lambda n: lk.attention(n.q, n.k, 1), GraphError, ["attention: got int as v"]),
    ("ring operand", lambda n: lk.ring_attention(n.q, None, n.k, length=1, window=1), GraphError,
     ["ring_attention: got NoneType as k"]),
    ("ring sinks", lambda n: lk.ring_attention(n.q, n.k, n.k, length=1, window=1, sinks="1"),
     DTypeError, ["ring_attention: got sinks '1'"]),
    ("scale", lambda n: lk.attention(n.q, n.k, n.k, scale=math.nan), RangeError,
     ["attention: got scale nan", "finite"]),
    ("length of no kind", lambda n: lk.attention(n.q, n.k, n.k, length=2.5), SymbolError,
     ["attention: got 2.5 as length"]),
    ("length kind", lambda n: lk.attention(n.q, n.k, n.k, length=n.s), ShapeError, ["f32[]"]),
    ("K3 integer mask", lambda n: lk.attention(n.q, n.k, n.k, mask=n.p((2, 5), "i32")), DTypeError,
     ["i32[2,5]", "bool or additive f32"]),
    ("mask extent", lambda n: lk.attention(n.q, n.k, n.k, mask=n.p((2, 4), "bool")), ShapeError,
     ["bool[2,4]", "5"]),
    ("mask heads", lambda n: lk.attention(n.q, n.k, n.k, mask=n.p((3, 1, 5), "bool")), ShapeError,
     ["bool[3,1,5]", "1,6,2,5"]),
    ("attention dtype", lambda n: lk.attention(n.q, n.k, n.p((1, 2, 5, 8), "f16")), DTypeError,
     ["f16[1,2,5,8]"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "error", "words"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_G1_what_cannot_work_is_refused_when_built(
    build: Callable[[Nodes], Any], error: type[LazyKvError], words: list[str]
) -> None:
    nodes = Nodes()
    before = len(nodes.g)
    with pytest.raises(LazyKvError) as e:
        build(nodes)
    assert type(e.value) is error, f"{type(e.value).__name__}: {e.value}"
    for word in (*words, "got"):
        assert word in str(e.value)
    new = list(nodes.g)[before:]
    assert all(t.op.name in ("placeholder", "slice", "squeeze") for t in new), "a bad node was kept"


def test_tensors_of_two_graphs_do_not_meet() -> None:
    a, b = Nodes(), Nodes()
    for build in (lambda: a.v + b.v, lambda: a.v.write_slice(b.v, [(0, 4)]),
                  lambda: lk.concat([a.v, b.v])):  # fmt: skip
        with pytest.raises(GraphError, match="another graph"):
            build()
    with pytest.raises(GraphError, match="one graph"):
        lk.plan([a.v, b.v])


def test_errors_are_also_what_python_users_catch() -> None:
    n = Nodes()
    with pytest.raises(ValueError, match="elements"):
        n.m.reshape(5)
    with pytest.raises(TypeError):
        n.v + n.i
    with pytest.raises(IndexError):
        n.v.slice(0, 3, 2)


def test_tensors_compare_and_hash_by_identity() -> None:
    n = Nodes()
    assert n.v == n.v
    assert n.v != n.m
    assert (n.v == 3) is False
    assert len({n.v, n.m, n.v}) == 2
    with pytest.raises(GraphError, match="lazy tensor"):
        bool(n.v.eq(n.v))
    with pytest.raises(GraphError, match="index"):
        iter(n.v)
    assert (len(n.m), n.m.shape, n.m.dtype) == (3, (3, 4), lk.f32)
    with pytest.raises(ShapeError, match="rank 0"):
        len(n.s)


def test_G1_nodes_are_kept_in_build_order_with_unique_ids() -> None:
    g = lk.Graph()
    a = g.const([1.0], "f32", name="a")
    b = a + 1
    other = lk.Graph().placeholder((1,), "f32")
    assert list(g) == [a, b]
    assert (len(g), bool(lk.Graph()), repr(g)) == (2, True, "Graph(2 nodes)")
    assert g.node(a.node_id) is a
    assert 0 < a.node_id < b.node_id < other.node_id
    assert (a.name, b.name, a.op.name, b.op.name) == ("a", None, "const", "add_scalar")
    assert "const" in repr(a)
    assert "'a'" in repr(a)
    with pytest.raises(GraphError, match=str(other.node_id)):
        g.node(other.node_id)
    assert g.node(np.int64(a.node_id)) is a  # type: ignore[arg-type]
    for bad in (True, float(a.node_id), str(a.node_id), None, [1]):
        with pytest.raises(DTypeError, match=r"Graph\.node: got id .*, need a whole number"):
            g.node(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field", ["op", "node_id", "graph", "name", "inputs", "data", "spec", "layout", "shape", "new"]
)
def test_G1_nodes_never_change(field: str) -> None:
    g = lk.Graph()
    node, other = g.const([1.0], "f32", name="a"), g.const([2.0], "f32", name="b")
    before = getattr(node, field, None)
    with pytest.raises(AttributeError):
        setattr(node, field, getattr(other, field, None))
    with pytest.raises(AttributeError):
        delattr(node, field)
    assert getattr(node, field, None) is before
    assert lk.realize(node).tolist() == [1.0]


def test_building_computes_nothing() -> None:
    before = lk.stats()
    n = Nodes()
    n.v.write_slice(n.v + 1, [(0, 4)]).sum()
    after = lk.stats()
    assert (after.kernels_run, after.plans_built) == (before.kernels_run, before.plans_built)


def test_const_snapshots_arrays_and_takes_storages_by_reference() -> None:
    data = np.arange(3, dtype=np.float32)
    store = lk.Storage.from_array(data)
    g = lk.Graph()
    copied, shared = g.const(data), g.const(store)
    data[:] = 9
    with store.write() as a:
        a[...] = 5
    assert lk.realize(copied).tolist() == [0, 1, 2]
    assert lk.realize(shared).tolist() == [5, 5, 5]
    assert copied.dtype is lk.f32
    assert shared.data is store


@pytest.mark.parametrize(
    ("data", "dtype", "want"),
    [
        ([1, 2], "f32", [1.0, 2.0]),
        ([1, 2], "u8", [1, 2]),
        (2.5, "bf16", 2.5),
        (2**40, "i64", 2**40),
        ([], "i32", []),
        ([True, False], "bool", [True, False]),
        (np.float16(1.5), None, 1.5),
    ],
)
def test_const_takes_python_numbers(data: object, dtype: str | None, want: object) -> None:
    t = lk.Graph().const(data, dtype)
    assert lk.realize(t).tolist() == want
    assert dtype is None or t.dtype is lk.dtype(dtype)


NUMPY = np.arange(24).reshape(2, 3, 4)
INDEXES = [0, -1, (1, 2), (1, 2, 3), slice(1, 2), (slice(None), -1), ..., (..., 2), (0, ...),
           (None, 1), (slice(None), None, slice(0, 2)), (1, ..., slice(-3, -1)), (..., None), (),
           (np.int64(1), slice(np.int64(1), None)), slice(2, 2)]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=repr)
def test_indexing_is_numpys_basic_indexing(index: object) -> None:
    got = lk.realize(lk.Graph().const(NUMPY)[index])
    want = NUMPY[index]  # type: ignore[index]
    assert got.shape == want.shape
    assert np.array_equal(got, want)


def test_indexing_a_scalar_and_by_symbols() -> None:
    g = lk.Graph()
    assert lk.realize(g.const(5)[...]).tolist() == 5
    assert lk.realize(g.const(5)[()]).tolist() == 5
    row = g.const(np.arange(6))
    got = lk.realize([row[POS], row[POS + 1 : POS + 3]], env={POS: 2})
    assert [x.tolist() for x in got] == [2, [3, 4]]


def test_numpy_scalars_on_the_left() -> None:
    t = lk.Graph().const([1.0, 2.0], "f32")
    assert lk.realize(np.float32(2) * t).tolist() == [2, 4]
    assert lk.realize(1 - t).tolist() == [0, -1]
    assert lk.realize(2 / t).tolist() == [2, 1]
    assert lk.realize(np.int64(3) + t).tolist() == [4, 5]
    with pytest.raises(GraphError, match="ndarray"):
        np.zeros(2) + t


def test_at_is_write_slice() -> None:
    g = lk.Graph()
    dest = g.const(np.zeros((2, 5)))
    src = g.const(np.ones((2, 2)))
    pos = lk.Sym("p", 0, 3)
    for made in (dest.at[:, 1:3].set(src), dest.at[..., pos : pos + 2].set(src),
                 dest.at[:, -4:-2].set(src)):  # fmt: skip
        assert lk.realize(made, env={pos: 1}).tolist() == [[0, 1, 1, 0, 0]] * 2
