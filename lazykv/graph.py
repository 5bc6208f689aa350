"""Graph: an append-only DAG of immutable nodes. Building computes nothing and checks everything."""

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, SupportsFloat, SupportsIndex, TypeAlias

import numpy as np

from lazykv.device import DeviceLike, HostArray, as_location
from lazykv.dtypes import DType, DTypeLike, dtype
from lazykv.errors import DTypeError, GraphError, RangeError, ShapeError
from lazykv.ids import NodeId, next_node_id
from lazykv.indexing import expand, from_end, half_open, slice_bounds
from lazykv.interchange import host_array
from lazykv.layout import Layout
from lazykv.ops import elementwise as ew
from lazykv.ops.matmul import MatMul
from lazykv.ops.move import Cast, Copy, Take
from lazykv.ops.norm import LayerNorm, RmsNorm
from lazykv.ops.op import Op, need_number_of
from lazykv.ops.reduce import Max, Mean, Reduce, Softmax, Sum
from lazykv.ops.rope import Rope
from lazykv.ops.rounding import nearest
from lazykv.ops.sources import Alloc, Const, Fill, Placeholder, ZeroFill
from lazykv.ops.views import (
    BroadcastTo,
    Contiguize,
    Permute,
    Reshape,
    Slice,
    Squeeze,
    Unsqueeze,
)
from lazykv.ops.write import WriteSlice, WriteSliceDoff, WriteSliceRotating
from lazykv.ops.write_rows import WriteRows
from lazykv.spec import Shape, Spec, as_axis, as_shape, check_size, finite, whole
from lazykv.storage import Storage
from lazykv.symbols import DimLike, as_expr, dim_argument

Ranges: TypeAlias = Sequence[tuple[DimLike, DimLike]]


class Graph:
    """Nodes in build order. All tensors of one op must come from one graph."""

    def __init__(self) -> None:
        self._nodes: list[Tensor] = []
        self._by_id: dict[int, Tensor] = {}

    def const(
        self, data: object, dtype: DTypeLike | None = None, name: str | None = None
    ) -> "Tensor":
        """Data known now: an array (snapshotted) or a `Storage` (taken by reference).

        Nodes that run elsewhere copy it in every pass, but for a snapshot that is used on the
        device that a plan is for: that one is copied there once, when it is planned.

        Python numbers and lists take `dtype` (NumPy's choice if None); arrays and storages must
        already have it, since dtypes are never cast on the way in.
        """
        want = None if dtype is None else _dtype(dtype)
        if isinstance(data, Storage):
            store = data
        elif want is not None and isinstance(data, int | float | list | tuple):
            store = Storage.from_array(_numbers(data, want))
        else:
            store = Storage.from_array(host_array(data))
        if want is not None and store.dtype is not want:
            raise DTypeError(f"const: got {store.spec}, need dtype {want}; convert it first")
        if store is not data:
            store.frozen = True
        op = Const(store.shape, store.dtype, store.frozen, store.is_snapshot)
        return self._add(op, (), name=name, data=store)

    def placeholder(
        self, shape: Sequence[SupportsIndex], dtype: DTypeLike, name: str | None = None
    ) -> "Tensor":
        """A graph input, bound to a `Storage` or an array when realized."""
        return self._add(Placeholder(as_shape("placeholder", shape), _dtype(dtype)), (), name=name)

    def alloc(
        self, shape: Sequence[SupportsIndex], dtype: DTypeLike, device: DeviceLike = "cpu"
    ) -> "Tensor":
        """Uninitialized memory on a device."""
        where = as_location(device)
        return self._add(Alloc(as_shape("alloc", shape), _dtype(dtype), str(where)), ())

    def apply(self, op: Op, *inputs: "Tensor", name: str | None = None) -> "Tensor":
        """Append a node. The methods of `Tensor` are the usual way in."""
        for t in inputs:
            if not isinstance(t, Tensor):
                raise GraphError(f"{op.name}: got {type(t).__name__}, need a Tensor")
            if t.graph is not self:
                raise GraphError(f"{op.name}: got {t!r} of another graph, need one graph")
        return self._add(op, inputs, name=name)

    def _add(
        self, op: Op, inputs: tuple["Tensor", ...], name: str | None = None,
        data: Storage | None = None,
    ) -> "Tensor":  # fmt: skip
        if name is not None and not isinstance(name, str):
            raise GraphError(f"{op.name}: got name {name!r}, need a str or None")
        spec = check_size(op.name, op.infer(*(t.spec for t in inputs)))
        layout = None
        if op.destroys is not None:
            layout = inputs[op.destroys].layout
            if layout.repeats:
                raise GraphError(
                    f"{op.name}: got a broadcast view {inputs[op.destroys].spec} as dest, need one "
                    "where every element has its own memory; use contiguous()"
                )
        elif len(inputs) == 1:
            layout = op.alias(inputs[0].layout)
        layout = layout or Layout.contiguous(spec.shape)
        node = Tensor.made_of(_Fields(self, op, inputs, spec, layout, name, data))
        self._nodes.append(node)
        self._by_id[node.node_id] = node
        return node

    def node(self, node_id: int) -> "Tensor":
        """The node with this id; GraphError if it is not of this graph."""
        try:
            return self._by_id[whole("Graph.node", "id", node_id)]
        except KeyError:
            raise GraphError(f"Graph.node: got id {node_id}, need a node of this graph") from None

    def drop_nodes(self) -> None:
        """Empty a graph that is done with. Nodes and graph refer to each other, so without this
        the storages they name would live until the next garbage collection."""
        self._nodes.clear()
        self._by_id.clear()

    def __reduce__(self) -> NoReturn:
        # Also what copy.copy asks for: node ids are unique, so a copy cannot have the same nodes.
        raise GraphError(f"{self!r}: got a copy or a pickle, need a graph built anew")

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator["Tensor"]:
        return iter(self._nodes)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"Graph({len(self)} nodes)"


_dtype = dtype


def _numbers(data: object, want: DType) -> HostArray:
    """Python numbers as an array of a dtype that can hold them; floats are rounded, never cut."""
    found = host_array(data)
    who, got = "const", Spec(found.shape, dtype(found.dtype)) if found.size else None
    if got is not None and got.dtype.is_float and not want.is_float:
        raise DTypeError(f"{who}: got {got}, need whole numbers for dtype {want}")
    if got is not None and not want.is_float and found.size:
        need_number_of(who, Spec(found.shape, want), int(found.min()))
        need_number_of(who, Spec(found.shape, want), int(found.max()))
    return nearest(found, want)


class _Fields:
    """What a node consists of. Until it is a `Tensor`, these can be set."""

    __slots__ = (
        "__weakref__",
        "data",
        "graph",
        "inputs",
        "layout",
        "name",
        "node_id",
        "op",
        "spec",
    )

    def __init__(
        self, graph: Graph, op: Op, inputs: tuple["Tensor", ...], spec: Spec, layout: Layout,
        name: str | None, data: Storage | None,
    ) -> None:  # fmt: skip
        self.graph = graph
        self.node_id: NodeId = next_node_id()
        self.op = op
        self.inputs = inputs
        self.spec = spec
        self.layout = layout
        self.name = name
        self.data = data


class Tensor(_Fields):
    """A node of a graph and the handle to build on it. It never changes, and `==` and `hash` are
    identity.

    Elementwise comparison is `eq ne lt le gt ge`. Operands of arithmetic have equal shapes and
    dtypes (or one is a Python number): broadcasting is asked for with `broadcast_to`.
    """

    __slots__ = ()

    @classmethod
    def made_of(cls, fields: _Fields) -> "Tensor":
        """The same object as a node. Small graphs are built for every row that a cache takes, and
        to set fields one by one in spite of `__setattr__` would cost as much as all the rest."""
        fields.__class__ = cls
        assert isinstance(fields, Tensor)
        return fields

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{self!r}: got a new {name}, need none; a node never changes")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self!r}: got no {name}, need it; a node never changes")

    @property
    def shape(self) -> Shape:
        return self.spec.shape

    @property
    def dtype(self) -> DType:
        return self.spec.dtype

    def _do(self, op: Op, *others: "Tensor") -> "Tensor":
        return self.graph.apply(op, self, *others)

    # Writes

    def write_slice(self, src: "Tensor", ranges: Ranges) -> "Tensor":
        """This tensor with ``[start:end, ...]`` replaced by `src`; one half-open range per axis.

        The result adopts this tensor's storage. A bound may be a symbol expression as long as the
        width is a number; then the position is checked when realized.
        """
        if not isinstance(ranges, Sequence) or len(ranges) != len(self.shape):
            got = f"{len(ranges)} ranges" if isinstance(ranges, Sequence) else repr(ranges)
            raise ShapeError(f"write_slice: got {got} for {self.spec}, need one range per axis")
        pairs = [half_open("write_slice", axis, r) for axis, r in enumerate(ranges)]
        op = WriteSlice(tuple(s for s, _ in pairs), tuple(w for _, w in pairs))
        return self._do(op, src)

    @property
    def at(self) -> "_At":
        """Sugar: ``dest.at[:, :, pos:pos + n].set(src)``."""
        return _At(self)

    def write_slice_at(self, src: "Tensor", axis: int, offset: "Tensor") -> "Tensor":
        """Rows of one axis replaced from a position that a rank-0 i64 tensor holds at run time."""
        axis = as_axis("write_slice_at", axis, len(self.shape))
        return self._do(WriteSliceDoff(axis), src, offset)

    def write_slice_rotating(
        self, src: "Tensor", axis: int, position: "Tensor", modulus: int, sinks: int = 0
    ) -> "Tensor":
        """Rows written into a ring of `modulus` slots from ``position mod modulus``.

        The first `sinks` positions have slots of their own, and the others rotate behind them.
        """
        axis = as_axis("write_slice_rotating", axis, len(self.shape))
        who = "write_slice_rotating"
        op = WriteSliceRotating(axis, whole(who, "modulus", modulus), whole(who, "sinks", sinks))
        return self._do(op, src, position)

    def write_rows(self, src: "Tensor", rows: "Tensor", count: "Tensor | None" = None) -> "Tensor":
        """This tensor with ``self[rows[i]] = src[i]``; `rows` is i64 ``[n]``, none twice.

        `count`, a rank-0 i64 tensor, leaves out source rows from there on. Both are read at run
        time.
        """
        extra = () if count is None else (count,)
        return self._do(WriteRows(count is not None), src, rows, *extra)

    def zero_fill(self) -> "Tensor":
        """All bytes zero, in place."""
        return self._do(ZeroFill())

    # Views and moves

    def reshape(self, *shape: Any) -> "Tensor":
        dims = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        return self._do(Reshape(as_shape("reshape", dims)))

    def slice(self, axis: int, start: DimLike, length: SupportsIndex) -> "Tensor":
        """`length` elements of an axis from `start` (a number or a symbol expression)."""
        axis = as_axis("slice", axis, len(self.shape))
        n = dim_argument("slice", "length", length)
        if not isinstance(n, int):
            raise ShapeError(
                f"slice: got length {n}, need a number; only the start may be a symbol"
            )
        return self._do(Slice(axis, dim_argument("slice", "start", start), n))

    def permute(self, *axes: Any) -> "Tensor":
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], Sequence) else axes
        rank = len(self.shape)
        return self._do(Permute(tuple(as_axis("permute", a, rank) for a in order)))

    def transpose(self, a: int, b: int) -> "Tensor":
        """Two axes exchanged."""
        order = list(range(len(self.shape)))
        i, j = as_axis("transpose", a, len(order)), as_axis("transpose", b, len(order))
        order[i], order[j] = order[j], order[i]
        return self._do(Permute(tuple(order)))

    def broadcast_to(self, *shape: Any) -> "Tensor":
        dims = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        return self._do(BroadcastTo(as_shape("broadcast_to", dims)))

    def squeeze(self, axis: int) -> "Tensor":
        return self._do(Squeeze(as_axis("squeeze", axis, len(self.shape))))

    def unsqueeze(self, axis: int) -> "Tensor":
        return self._do(Unsqueeze(as_axis("unsqueeze", axis, len(self.shape) + 1)))

    def contiguous(self) -> "Tensor":
        """Row-major elements; no work where they already are."""
        return self._do(Contiguize())

    def cast(self, dtype: DTypeLike) -> "Tensor":
        return self._do(Cast(_dtype(dtype)))

    def to(self, device: DeviceLike) -> "Tensor":
        """A copy in the memory of a location."""
        return self._do(Copy(str(as_location(device))))

    def __getitem__(self, index: Any) -> "Tensor":
        """Basic indexing: integers, unit-step slices, None and Ellipsis. Nothing is clamped."""
        out, axis = self, 0
        for item in expand("index", index, len(self.shape)):
            if item is None:
                out = out.unsqueeze(axis)
                axis += 1
            elif isinstance(item, slice):
                start, width = slice_bounds("index", axis, item, out.shape[axis])
                if (start, width) != (0, out.shape[axis]):
                    out = out.slice(axis, start, width)
                axis += 1
            else:
                start = from_end(dim_argument("index", "index", item, axis), out.shape[axis])
                if isinstance(start, int) and not 0 <= start < out.shape[axis]:
                    n = out.shape[axis]
                    raise RangeError(f"index: got {item} on axis {axis}, need {-n} <= index < {n}")
                out = out.slice(axis, start, 1).squeeze(axis)
        return out

    # Arithmetic

    def _binary(self, op: Op, scalar: type[ew.BinaryScalar], other: Any, reverse: bool) -> "Tensor":
        if isinstance(other, Tensor):
            return other._do(op, self) if reverse else self._do(op, other)
        return self._do(scalar(self._number(op.name, other), reverse))

    def _number(self, who: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise GraphError(f"{who}: got {type(value).__name__}, need a Tensor or a number")
        if self.dtype.is_float or isinstance(value, float | np.floating):
            try:
                return float(value)
            except OverflowError:
                raise DTypeError(
                    f"{who}: got an integer of {int(value).bit_length()} bits with {self.spec}, "
                    "need one that a float can hold"
                ) from None
        return int(value)

    def __add__(self, other: Any) -> "Tensor":
        return self._binary(ew.Add(), ew.AddScalar, other, False)

    def __radd__(self, other: Any) -> "Tensor":
        return self._binary(ew.Add(), ew.AddScalar, other, False)

    def __sub__(self, other: Any) -> "Tensor":
        return self._binary(ew.Sub(), ew.SubScalar, other, False)

    def __rsub__(self, other: Any) -> "Tensor":
        return self._binary(ew.Sub(), ew.SubScalar, other, True)

    def __mul__(self, other: Any) -> "Tensor":
        return self._binary(ew.Mul(), ew.MulScalar, other, False)

    def __rmul__(self, other: Any) -> "Tensor":
        return self._binary(ew.Mul(), ew.MulScalar, other, False)

    def __truediv__(self, other: Any) -> "Tensor":
        return self._binary(ew.Div(), ew.DivScalar, other, False)

    def __rtruediv__(self, other: Any) -> "Tensor":
        return self._binary(ew.Div(), ew.DivScalar, other, True)

    def __neg__(self) -> "Tensor":
        return self._do(ew.Neg())

    def __matmul__(self, other: "Tensor") -> "Tensor":
        return self.matmul(other)

    # NumPy must not take the left side of `array * tensor` apart element by element.
    __array_ufunc__ = None

    def matmul(self, other: "Tensor") -> "Tensor":
        return self._do(MatMul(), other)

    def exp(self) -> "Tensor":
        return self._do(ew.Exp())

    def sqrt(self) -> "Tensor":
        return self._do(ew.Sqrt())

    def rsqrt(self) -> "Tensor":
        return self._do(ew.Rsqrt())

    def tanh(self) -> "Tensor":
        return self._do(ew.Tanh())

    def silu(self) -> "Tensor":
        return self._do(ew.Silu())

    def gelu(self) -> "Tensor":
        """The tanh form."""
        return self._do(ew.Gelu())

    def _reduce(self, op: type[Reduce], axis: int, keepdims: bool) -> "Tensor":
        return self._do(op(as_axis(op.name, axis, len(self.shape)), bool(keepdims)))

    def max(self, axis: int = -1, keepdims: bool = False) -> "Tensor":
        return self._reduce(Max, axis, keepdims)

    def sum(self, axis: int = -1, keepdims: bool = False) -> "Tensor":
        return self._reduce(Sum, axis, keepdims)

    def mean(self, axis: int = -1, keepdims: bool = False) -> "Tensor":
        return self._reduce(Mean, axis, keepdims)

    def softmax(self, axis: int = -1) -> "Tensor":
        return self._do(Softmax(as_axis("softmax", axis, len(self.shape))))

    def rms_norm(self, weight: "Tensor", eps: SupportsFloat = 1e-5) -> "Tensor":
        return self._do(RmsNorm(finite("rms_norm", "eps", eps)), weight)

    def layer_norm(self, weight: "Tensor", bias: "Tensor", eps: SupportsFloat = 1e-5) -> "Tensor":
        return self._do(LayerNorm(finite("layer_norm", "eps", eps)), weight, bias)

    def rope(self, cos: "Tensor", sin: "Tensor", interleaved: bool = False) -> "Tensor":
        """Rotate ``[..., S, D]`` by tables ``[S, D/2]``; pairs side by side if `interleaved`."""
        return self._do(Rope(bool(interleaved)), cos, sin)

    def take(self, ids: "Tensor") -> "Tensor":
        """Rows of this table by integer ids."""
        return self._do(Take(), ids)

    def _compare(self, op: Op, other: Any) -> "Tensor":
        if not isinstance(other, Tensor):
            value = self._number(op.name, other)
            # Checked under the name of the comparison, before a node is made for the number.
            op.infer(self.spec, self.spec)
            need_number_of(op.name, self.spec, value)
            other = self.graph.apply(Fill(self.shape, self.dtype, value))
        return self._do(op, other)

    def eq(self, other: Any) -> "Tensor":
        return self._compare(ew.Eq(), other)

    def ne(self, other: Any) -> "Tensor":
        return self._compare(ew.Ne(), other)

    def lt(self, other: Any) -> "Tensor":
        return self._compare(ew.Lt(), other)

    def le(self, other: Any) -> "Tensor":
        return self._compare(ew.Le(), other)

    def gt(self, other: Any) -> "Tensor":
        return self._compare(ew.Gt(), other)

    def ge(self, other: Any) -> "Tensor":
        return self._compare(ew.Ge(), other)

    def __bool__(self) -> bool:
        raise GraphError(f"bool({self!r}): got a lazy tensor, need a value; realize it first")

    def __reduce__(self) -> NoReturn:
        raise GraphError(f"{self!r}: got a copy or a pickle, need a node built anew")

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError(f"len({self!r}): got rank 0, need rank >= 1")
        return self.shape[0]

    def __iter__(self) -> Iterator["Tensor"]:
        raise GraphError(f"iter({self!r}): got a lazy tensor, need an index")

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"Tensor({self.op.name}#{self.node_id}{name} {self.spec})"


class _At:
    """``dest.at[...]``: remembers a slab of unit-step slices for `set`."""

    __slots__ = ("_dest", "_ranges")

    def __init__(self, dest: Tensor, ranges: Ranges | None = None) -> None:
        self._dest = dest
        self._ranges = ranges

    def __getitem__(self, index: Any) -> "_At":
        items = expand("at", index, len(self._dest.shape))
        if not all(isinstance(i, slice) for i in items):
            raise GraphError("at: got an index that is not a slice, need start:end on every axis")
        bounds = [
            slice_bounds("at", axis, item, self._dest.shape[axis])
            for axis, item in enumerate(items)
        ]
        return _At(self._dest, [(start, as_expr(start) + width) for start, width in bounds])

    def set(self, src: Tensor) -> Tensor:
        if self._ranges is None:
            raise GraphError("at: got set() without an index, need dest.at[...].set(src)")
        return self._dest.write_slice(src, self._ranges)
