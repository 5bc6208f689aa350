"""The CPU kernel of ring attention: the few contiguous runs of a ring, one after another."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from lazykv.backends.cpu_rows import divide_rows, exp_in_place, score_rows, widen_rows
from lazykv.device import Array, Call, Kernel, Step
from lazykv.dtypes import f32
from lazykv.ops.ring_attention import RingAttention
from lazykv.spec import Spec
from lazykv.symbols import ScalarSlot

_SCORE_BYTES = 4 << 20
"""Scratch for the scores of several queries: stay in the L2/L3 caches."""


def runs_ring(op: RingAttention, ins: tuple[Spec, ...], out: Spec) -> bool:
    """f32 queries over f32 or 16-bit rows."""
    rows = ins[1].dtype
    return out.dtype is f32 and (rows is f32 or rows.itemsize == 2) and out.size > 0


def _in_view(op: RingAttention, queries: int) -> int:
    """Most rows that so many neighbouring queries see together."""
    return op.sinks + op.window + queries - 1


def _heads_at_once(ins: tuple[Spec, ...]) -> int:
    """All key heads; one where rows have to be widened first, so that scratch stays small."""
    return ins[1].shape[1] if ins[1].dtype is f32 else 1


def _query_block(op: RingAttention, ins: tuple[Spec, ...]) -> int:
    """Queries handled at once, so that their scores fit the scratch bound."""
    queries, groups = ins[0].shape[2], ins[0].shape[1] // ins[1].shape[1]
    lines = _heads_at_once(ins) * groups
    return max(1, min(queries, _SCORE_BYTES // (4 * lines * _in_view(op, queries))))


def _scratch(op: RingAttention, ins: tuple[Spec, ...], out: Spec) -> tuple[Spec, ...]:
    (_, heads, _, dim), (_, kv_heads, _, _), wide = ins[0].shape, ins[1].shape, out.shape[3]
    block = _query_block(op, ins)
    lines, rows = _heads_at_once(ins) * (heads // kv_heads) * block, _in_view(op, block)
    sizes = [lines * dim, lines * rows, lines, lines * wide, lines * wide]
    if ins[1].dtype is not f32:
        sizes += [rows * dim, rows * wide]
    return tuple(Spec((n,), f32) for n in sizes)


def _ring_attention(call: Call) -> Iterable[Step]:
    op: RingAttention = call.op
    q, k, v = call.ins[:3]
    steps: list[Step] = []
    source: tuple[Any, Any] = ([op.length], 0)
    if op.has_length:
        source = (call.ins[3], ())
        steps.append((_check_length, (op, q.shape[2], call.ins[3])))
    elif isinstance(op.length, ScalarSlot):
        source = (call.scalars, op.length.index)
    scale, bits = np.asarray(op.scale, np.float32), call.in_specs[1].dtype.is_bits
    block, step = _query_block(op, call.in_specs), _heads_at_once(call.in_specs)
    groups = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for head in range(0, k.shape[1], step):
            keys, mine = slice(head, head + step), slice(head * groups, (head + step) * groups)
            shape = (step, groups, q.shape[2])
            # Splitting the axis of heads keeps these views, whatever their strides.
            grouped = q[b, mine].reshape(*shape, q.shape[3])
            out = call.out[b, mine].reshape(*shape, v.shape[3])
            args = (op, scale, source, bits, block, grouped, k[b, keys], v[b, keys], out)
            steps.append((_attend, (*args, *call.scratch)))
    return steps


def _check_length(op: RingAttention, queries: int, length: Array) -> None:
    op.check_length(int(length), queries)


def _attend(
    op: RingAttention, scale: Array, source: tuple[Any, Any], bits: bool, block: int, q: Array,
    k: Array, v: Array, out: Array, scaled: Array, flat: Array, sums: Array, mixed: Array,
    more: Array, *wide: Array,
) -> None:  # fmt: skip
    """q ``[H, G, Sq, D]``, k ``[H, R, D]``, v ``[H, R, Dv]``, out ``[H, G, Sq, Dv]``.

    Per key head, the queries of its group and of a block of positions are the lines of one product
    with each run. The softmax stays unnormalized and the result is divided instead.
    """
    heads, groups, queries, dim = q.shape
    last = int(source[0][source[1]])
    for start in range(0, queries, block):
        m = min(block, queries - start)
        first = last - queries + start
        runs = op.runs(first, first + m, k.shape[1])
        keys, values = [k[:, s : s + n] for s, _, n in runs], [v[:, s : s + n] for s, _, n in runs]
        if wide:
            keys, values = _widened(keys, wide[0], bits), _widened(values, wide[1], bits)
        lines, rows = groups * m, sum(n for _, _, n in runs)
        part = scaled[: heads * lines * dim].reshape(heads, lines, dim)
        np.multiply(q[:, :, start : start + m], scale, part.reshape(heads, groups, m, dim))
        scores = flat[: heads * lines * rows].reshape(heads, lines, rows)
        _score(part, keys, scores)
        if m > 1:
            _hide(op, runs, first, scores.reshape(heads, groups, m, rows))
        total = sums[: heads * lines].reshape(heads, lines, 1)
        np.maximum.reduce(scores, 2, None, total, True)  # type: ignore[call-overload]
        exp_in_place(scores, total)
        np.add.reduce(scores, 2, None, total, True)  # type: ignore[call-overload]
        size = (heads, lines, out.shape[3])
        result = mixed[: heads * lines * size[2]].reshape(size)
        _mix(scores, values, result, more[: result.size].reshape(size))
        divide_rows(result, total)
        out[:, :, start : start + m] = result.reshape(heads, groups, m, size[2])


def _widened(runs: list[Array], flat: Array, bits: bool) -> list[Array]:
    """Runs of rows as f32, one behind the other in scratch."""
    done, at = [], 0
    for rows in runs:
        done.append(widen_rows(rows, flat[at:], bits))
        at += rows.size
    return done


def _score(queries: Array, keys: list[Array], scores: Array) -> None:
    at = 0
    for rows in keys:
        n = rows.shape[1]
        score_rows(queries, rows, scores[:, :, at : at + n])
        at += n


def _mix(weights: Array, values: list[Array], out: Array, more: Array) -> None:
    """``weights @ values`` over all runs; `more` is scratch like `out`."""
    at = 0
    for rows in values:
        n = rows.shape[1]
        np.matmul(weights[:, :, at : at + n], rows, more if at else out)
        if at:
            np.add(out, more, out)
        at += n


def _hide(op: RingAttention, runs: list[tuple[int, int, int]], first: int, scores: Array) -> None:
    """``[H, G, m, n]``: minus infinity where a query does not see a row that another one does."""
    positions = np.concatenate([np.arange(p, p + n) for _, p, n in runs])
    seen = op.visible(np, first, first + scores.shape[2], positions)
    np.copyto(scores, np.float32(-np.inf), where=~seen)


RING_ATTENTION = Kernel(_ring_attention, _scratch)
