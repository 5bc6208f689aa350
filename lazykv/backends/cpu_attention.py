"""CPU kernels of attention: live rows only, scores in planned scratch, no call per element."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from lazykv.backends.cpu_rows import divide_rows, exp_in_place, score_rows, widen_rows
from lazykv.device import Array, Call, Kernel, Step
from lazykv.dtypes import f32
from lazykv.ops.attention import Attention
from lazykv.spec import Spec
from lazykv.symbols import ScalarSlot

_SCORE_BYTES = 4 << 20
"""Scratch for attention scores of several queries: stay in the L2/L3 caches."""


def _query_block(op: Attention, ins: tuple[Spec, ...]) -> int:
    """Queries handled at once, so that their scores over all S rows fit the scratch bound."""
    heads, queries, rows = ins[0].shape[1], ins[0].shape[2], ins[1].shape[2]
    groups = heads // ins[1].shape[1]
    return max(1, min(queries, _SCORE_BYTES // max(1, 4 * groups * rows)))


def runs_wide(op: Attention, ins: tuple[Spec, ...], out: Spec) -> bool:
    return all(s.dtype is f32 for s in ins[:3]) and not op.has_mask and out.size > 0


def runs_narrow(op: Attention, ins: tuple[Spec, ...], out: Spec) -> bool:
    """f32 queries over 16-bit rows."""
    narrow = ins[1].dtype.is_float and ins[1].dtype.itemsize == 2
    return ins[0].dtype is f32 and narrow and not op.has_mask and out.size > 0


def _attention_scratch(op: Attention, ins: tuple[Spec, ...], out: Spec) -> tuple[Spec, ...]:
    q, k = ins[0].shape, ins[1].shape
    groups = q[1] // k[1]
    if q[2] == 1:
        return (Spec((k[1] * groups * k[2],), f32), Spec((k[1], groups, q[3]), f32),
                Spec((k[1], groups, 1), f32))  # fmt: skip
    block = _query_block(op, ins)
    return (Spec((groups * block * k[2],), f32), Spec((groups, block, q[3]), f32),
            Spec((groups, block, 1), f32))  # fmt: skip


def _attention(call: Call) -> Iterable[Step]:
    q, k, v = call.ins[:3]
    op: Attention = call.op
    scale = np.asarray(op.scale, np.float32)
    length = _length_reader(call)
    steps: list[Step] = []
    if op.has_length:
        steps.append((_check_length, (op, *call.in_specs[:2], call.ins[-1])))
    for b in range(q.shape[0]):
        if q.shape[2] == 1:
            groups = q.shape[1] // k.shape[1]
            shape = (k.shape[1], groups, q.shape[3])
            args = (q[b].reshape(shape), k[b], v[b],
                    call.out[b].reshape(*shape[:2], v.shape[3]))  # fmt: skip
            steps.append((_attend_one, (op, scale, length, *args, *call.scratch)))
        else:
            args = (q[b], k[b], v[b], call.out[b])
            steps.append((_attend_many, (op, scale, length, *args, *call.scratch)))
    return steps


def _narrow_scratch(op: Attention, ins: tuple[Spec, ...], out: Spec) -> tuple[Spec, ...]:
    rows = ins[1].shape[2]
    block = _query_block(op, ins)
    groups = ins[0].shape[1] // ins[1].shape[1]
    return (Spec((rows * ins[1].shape[3],), f32), Spec((rows * ins[2].shape[3],), f32),
            Spec((groups * block * rows,), f32), Spec((groups, block, ins[0].shape[3]), f32),
            Spec((groups, block, 1), f32))  # fmt: skip


def _narrow_attention(call: Call) -> Iterable[Step]:
    """16-bit rows: the live rows of one key head at a time are widened to f32 scratch."""
    q, k, v = call.ins[:3]
    op: Attention = call.op
    scale, length = np.asarray(op.scale, np.float32), _length_reader(call)
    steps: list[Step] = []
    if op.has_length:
        steps.append((_check_length, (op, *call.in_specs[:2], call.ins[-1])))
    groups = q.shape[1] // k.shape[1]
    bits = call.in_specs[1].dtype.is_bits
    for b in range(q.shape[0]):
        for head in range(k.shape[1]):
            mine = slice(head * groups, (head + 1) * groups)
            args = (op, scale, length, q[b, mine], k[b, head], v[b, head], call.out[b, mine], bits)
            steps.append((_attend_narrow, (*args, *call.scratch)))
    return steps


def _attend_narrow(
    op: Attention, scale: Array, source: tuple[Any, Any], q: Array, k: Array, v: Array, out: Array,
    bits: bool, wide_k: Array, wide_v: Array, flat: Array, scaled: Array, total: Array,
) -> None:  # fmt: skip
    live = int(source[0][source[1]])
    k32 = widen_rows(k[:live], wide_k, bits)
    v32 = widen_rows(v[:live], wide_v, bits)
    _attend_many(op, scale, source, q, k32[None], v32[None], out, flat, scaled, total)


def _length_reader(call: Call) -> tuple[Any, Any]:
    """(container, index) that give the live length when the kernel runs."""
    op: Attention = call.op
    if op.has_length:
        return (call.ins[-1], ())
    if isinstance(op.length, ScalarSlot):
        return (call.scalars, op.length.index)
    return ([call.ins[1].shape[2] if op.length is None else op.length], 0)


def _check_length(op: Attention, q: Spec, k: Spec, length: Array) -> None:
    op.check_live(int(length), (q, k))


def _attend_one(
    op: Attention, scale: Array, source: tuple[Any, Any], q: Array, k: Array, v: Array, out: Array,
    flat: Array, scaled: Array, total: Array,
) -> None:  # fmt: skip
    """One query per head: q ``[Hkv, G, D]``, k ``[Hkv, S, D]``, v ``[Hkv, S, Dv]``.

    The softmax stays unnormalized and the ``[G, Dv]`` result is divided instead.
    """
    live = int(source[0][source[1]])
    first = 0 if op.window is None else max(0, live - op.window)
    n = live - first
    if n == 0:
        out.fill(0)
        return
    heads, groups, _ = q.shape
    scores = flat[: heads * groups * n].reshape(heads, groups, n)
    np.multiply(q, scale, scaled)
    score_rows(scaled, k[:, first:live], scores)
    np.maximum.reduce(scores, 2, None, total, True)  # type: ignore[call-overload]
    exp_in_place(scores, total)
    np.add.reduce(scores, 2, None, total, True)  # type: ignore[call-overload]
    np.matmul(scores, v[:, first:live], out)
    divide_rows(out, total)


def _attend_many(
    op: Attention, scale: Array, source: tuple[Any, Any], q: Array, k: Array, v: Array, out: Array,
    flat: Array, scaled: Array, total: Array,
) -> None:  # fmt: skip
    """Several queries: one key head and a block of queries at a time, rows nobody sees left out.

    q ``[Hq, Sq, D]``, k ``[Hkv, S, D]``, v ``[Hkv, S, Dv]``.
    """
    queries, block, groups = q.shape[1], scaled.shape[1], scaled.shape[0]
    live = int(source[0][source[1]])
    place = live - queries
    for head in range(k.shape[0]):
        mine = slice(head * groups, (head + 1) * groups)
        for start in range(0, queries, block):
            stop = min(start + block, queries)
            last = place + stop if op.causal else live
            first = 0 if op.window is None else max(0, place + start + 1 - op.window)
            m, n = stop - start, last - first
            if n <= 0:
                out[mine, start:stop] = 0
                continue
            part, scores = scaled[:, :m], flat[: groups * m * n].reshape(groups, m, n)
            np.multiply(q[mine, start:stop], scale, part)
            np.matmul(part, k[head, first:last].T, scores)
            if op.causal or op.window is not None:
                seen = _visible(op, place + start, place + stop, first, last)
                np.copyto(scores, np.float32(-np.inf), where=~seen)
            np.maximum.reduce(scores, 2, None, total[:, :m], True)  # type: ignore[call-overload]
            exp_in_place(scores, total[:, :m])
            np.add.reduce(scores, 2, None, total[:, :m], True)  # type: ignore[call-overload]
            out[mine, start:stop] = np.matmul(scores, v[head, first:last])
            divide_rows(out[mine, start:stop], total[:, :m])


def _visible(op: Attention, start: int, stop: int, first: int, last: int) -> Array:
    """``[queries, rows]`` bool for queries at positions start..stop and rows first..last."""
    place, rows = np.arange(start, stop)[:, None], np.arange(first, last)[None]
    seen = rows <= place if op.causal else rows >= 0
    return seen if op.window is None else seen & (rows > place - op.window)


WIDE_ATTENTION = Kernel(_attention, _attention_scratch)
NARROW_ATTENTION = Kernel(_narrow_attention, _narrow_scratch)
