"""The functional reading of a graph in plain NumPy: every write makes a new array.

Nothing here uses the bodies, layouts or kernels of the package: ops are recognized by name and
computed by the first NumPy expression that comes to mind. Arithmetic is meant for values whose
results are exact (integers, small whole floats).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import lazykv as lk

Array = np.ndarray[Any, Any]


def start_of(dim: Any, env: Mapping[lk.Sym, int]) -> int:
    """The value of a number or a symbol expression."""
    if isinstance(dim, int):
        return dim
    return dim.const + sum(factor * env[sym] for sym, factor in dim.terms)


def needed(targets: Iterable[lk.Tensor]) -> list[lk.Tensor]:
    """Everything the targets need, in build order."""
    found: dict[int, lk.Tensor] = {}
    todo = list(targets)
    while todo:
        t = todo.pop()
        if t.node_id not in found:
            found[t.node_id] = t
            todo += t.inputs
    return [found[i] for i in sorted(found)]


def leaf_data(t: lk.Tensor, bindings: Mapping[lk.Tensor, Any]) -> Array:
    if t.data is not None:
        return t.data.to_numpy()
    value = bindings[t]
    return value.to_numpy() if isinstance(value, lk.Storage) else np.array(value)


def slab_of(t: lk.Tensor, values: Mapping[lk.Tensor, Array], env: Mapping[lk.Sym, int]) -> Any:
    """For a write: pairs (index into dest, index into src) that it copies, in order."""
    op, dest = t.op, t.inputs[0]
    if op.name == "zero_fill":
        return [(..., None)]
    src = values[t.inputs[1]]
    if op.name == "write_slice":
        starts = [start_of(s, env) for s in op.starts]
        index = tuple(slice(s, s + w) for s, w in zip(starts, src.shape, strict=True))
        return [(index, ...)]
    if op.name == "write_rows":
        rows = values[t.inputs[2]].tolist()
        count = int(values[t.inputs[3]]) if op.has_count else len(rows)
        assert 0 <= count <= len(rows), "the caller of the oracle stays in bounds"
        return [(row, i) for i, row in enumerate(rows[:count])]
    lead = (slice(None),) * op.axis
    first, rows = int(values[t.inputs[2]]), src.shape[op.axis]
    if op.name == "write_slice_at":
        assert 0 <= first <= dest.shape[op.axis] - rows, "the caller of the oracle stays in bounds"
        return [((*lead, slice(first, first + rows)), ...)]
    return [((*lead, (first + r) % op.modulus), (*lead, r)) for r in range(rows)]


def compute(t: lk.Tensor, ins: list[Array], env: Mapping[lk.Sym, int]) -> Array:
    """One node that is neither a leaf nor a write."""
    op, a = t.op, ins[0]
    match op.name:
        case "reshape":
            return a.reshape(op.shape)
        case "slice":
            return np.take(a, range(first := start_of(op.start, env), first + op.length), op.axis)
        case "permute":
            return a.transpose(op.axes)
        case "broadcast_to":
            return np.broadcast_to(a, op.shape)
        case "squeeze" | "unsqueeze":
            return a.reshape(t.shape)
        case "contiguous" | "copy":
            return a
        case "add":
            return a + ins[1]
        case "sub":
            return a - ins[1]
        case "mul":
            return a * ins[1]
        case "add_scalar":
            return a + np.asarray(op.value, a.dtype)
        case "mul_scalar":
            return a * np.asarray(op.value, a.dtype)
        case "neg":
            return -a
        case "where":
            return np.where(a, ins[1], ins[2])
        case "lt":
            return a < ins[1]
        case "concat":
            return np.concatenate(ins, op.axis)
        case "take":
            return np.stack([a[i] for i in ins[1].reshape(-1)]).reshape(t.shape)
        case "sum":
            return a.sum(op.axis, keepdims=op.keepdims)
    raise NotImplementedError(op.name)


def evaluate(
    targets: Iterable[lk.Tensor], bindings: Mapping[lk.Tensor, Any], env: Mapping[lk.Sym, int]
) -> dict[lk.Tensor, Array]:
    """The value of every node that the targets need. Allocs hold zeros."""
    values: dict[lk.Tensor, Array] = {}
    for t in needed(targets):
        ins = [values[s] for s in t.inputs]
        if t.op.name == "alloc":
            result = np.zeros(t.shape, t.dtype.numpy)
        elif not ins:
            result = leaf_data(t, bindings)
        elif t.op.name.startswith("write_") or t.op.name == "zero_fill":
            result = ins[0].copy()
            for to, of in slab_of(t, values, env):
                result[to] = 0 if of is None else ins[1][of]
        else:
            result = compute(t, ins, env)
        values[t] = np.array(result, t.dtype.numpy)
        assert values[t].shape == t.shape, f"{t!r} declares a wrong shape"
    return values


@dataclass(frozen=True)
class View:
    """Which elements of a leaf's buffer a node names: `at` has the node's shape and holds element
    numbers. `moves` says that a symbol decides where the view lies."""

    leaf: lk.Tensor
    version: lk.Tensor
    at: Array
    moves: bool = False

    def meets(self, other: "View") -> bool:
        """Whether two views of one buffer share an element."""
        return bool(np.intersect1d(self.at, other.at).size)


def view_of(t: lk.Tensor, views: Mapping[lk.Tensor, View], env: Mapping[lk.Sym, int]) -> View:
    """Views follow NumPy's own: a reshape is one where NumPy needs no copy."""
    op = t.op
    own = View(t, t, np.arange(int(np.prod(t.shape, dtype=np.int64))).reshape(t.shape))
    if not t.inputs:
        return own
    source = views[t.inputs[0]]
    at, moves = source.at, source.moves
    match op.name:
        case "write_slice" | "write_slice_at" | "write_slice_rotating" | "write_rows" | "zero_fill":
            return View(source.leaf, t, at, moves)
        case "slice":
            first = start_of(op.start, env)
            at = at[(*(slice(None),) * op.axis, slice(first, first + op.length))]
            moves = moves or not isinstance(op.start, int)
        case "permute":
            at = at.transpose(op.axes)
        case "broadcast_to":
            at = np.broadcast_to(at, op.shape)
        case "squeeze":
            at = np.squeeze(at, op.axis)
        case "unsqueeze":
            at = np.expand_dims(at, op.axis)
        case "reshape":
            try:
                at = np.reshape(at, op.shape, copy=False)
            except ValueError:
                return own
        case "contiguous" if at.flags.c_contiguous:
            pass
        case _:
            return own
    return View(source.leaf, source.version, at, moves)


def landed(
    targets: Iterable[lk.Tensor], bindings: Mapping[lk.Tensor, Any], env: Mapping[lk.Sym, int]
) -> dict[lk.Tensor, Array]:
    """The bytes of the leaves after the targets were realized.

    Of several needed writes on one version whose destinations overlap, the one built last happens
    in place; earlier ones do not. Constant data is never written. A leaf is left out where one of
    two such destinations moves with a symbol: then a planner has to guess.
    """
    values = evaluate(targets, bindings, env)
    views: dict[lk.Tensor, View] = {}
    for t in values:
        views[t] = view_of(t, views, env)
    writes = [t for t in values if t.inputs and views[t].version is t and views[t].leaf is not t]
    in_place: set[lk.Tensor] = set()
    unknown: set[lk.Tensor] = set()
    taken: dict[lk.Tensor, list[View]] = {}
    for t in reversed(writes):
        dest = views[t.inputs[0]]
        others = taken.setdefault(dest.version, [])
        if others and any(v.moves for v in (dest, *others)):
            unknown.add(dest.leaf)
        frozen = dest.leaf.data is not None and dest.leaf.data.frozen
        if not (frozen and dest.version is dest.leaf) and not any(map(dest.meets, others)):
            others.append(dest)
            in_place.add(t)
    buffers = {t: v.reshape(-1).copy() for t, v in values.items() if not t.inputs}
    for t in writes:
        root = t
        while root in in_place:
            root = views[root.inputs[0]].version
        if root in buffers:
            for to, of in slab_of(t, values, env):
                buffers[root][views[t].at[to]] = 0 if of is None else values[t.inputs[1]][of]
    return {t: b.reshape(t.shape) for t, b in buffers.items() if t not in unknown}
