"""The CPU kernel of latent attention: one product of all heads' queries with the shared rows."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from lazykv.backends.cpu_rows import exp_in_place, widen_rows
from lazykv.device import Array, Call, Kernel, Step
from lazykv.dtypes import f32
from lazykv.ops.latent_attention import LatentAttention
from lazykv.spec import Spec
from lazykv.symbols import ScalarSlot

_SCORE_BYTES = 4 << 20
"""Scratch for the scores of several queries: stay in the L2/L3 caches."""


def runs_latent(op: LatentAttention, ins: tuple[Spec, ...], out: Spec) -> bool:
    """f32 queries over f32 or 16-bit rows."""
    rows = ins[2].dtype
    return out.dtype is f32 and (rows is f32 or rows.itemsize == 2) and out.size > 0


def _query_block(ins: tuple[Spec, ...]) -> int:
    """Queries handled at once, so that their scores over all S rows fit the scratch bound."""
    (_, heads, queries, _), rows = ins[0].shape, ins[2].shape[0]
    return max(1, min(queries, _SCORE_BYTES // max(1, 4 * heads * rows)))


def _scratch(op: LatentAttention, ins: tuple[Spec, ...], out: Spec) -> tuple[Spec, ...]:
    rows, rank = ins[2].shape
    width, lines = ins[3].shape[1], ins[0].shape[1] * _query_block(ins)
    sizes = [lines * rank, lines * width, lines * rows, lines * rows, lines]
    if ins[2].dtype is not f32:
        sizes += [rows * rank, rows * width]
    return tuple(Spec((n,), f32) for n in sizes)


def _latent_attention(call: Call) -> Iterable[Step]:
    op: LatentAttention = call.op
    q_latent, q_rope, latent, rope = call.ins[:4]
    steps: list[Step] = []
    source: tuple[Any, Any] = ([len(latent) if op.length is None else op.length], 0)
    if op.has_length:
        source = (call.ins[4], ())
        steps.append((_check_length, (op, q_latent.shape[2], len(latent), call.ins[4])))
    elif isinstance(op.length, ScalarSlot):
        source = (call.scalars, op.length.index)
    scale, bits = np.asarray(op.scale, np.float32), call.in_specs[2].dtype.is_bits
    args = (op.causal, scale, source, bits, q_latent[0], q_rope[0], latent, rope, call.out[0])
    steps.append((_attend, (*args, *call.scratch)))
    return steps


def _check_length(op: LatentAttention, queries: int, rows: int, length: Array) -> None:
    op.check_live(int(length), queries, rows)


def _attend(
    causal: bool, scale: Array, source: tuple[Any, Any], bits: bool, q_latent: Array,
    q_rope: Array, latent: Array, rope: Array, out: Array, lines_r: Array, lines_p: Array,
    flat: Array, more: Array, total: Array, *wide: Array,
) -> None:  # fmt: skip
    """q_latent ``[H, Sq, R]``, q_rope ``[H, Sq, P]``, latent ``[S, R]``, rope ``[S, P]``.

    Heads and a block of queries are the lines of one product; the softmax stays unnormalized and
    the result is divided instead. `lines_r` holds the scaled queries, then their result.
    """
    live = int(source[0][source[1]])
    if live == 0:
        out.fill(0)
        return
    if wide:
        latent = widen_rows(latent[:live], wide[0], bits)
        rope = widen_rows(rope[:live], wide[1], bits)
    heads, queries, rank = q_latent.shape
    width, block = q_rope.shape[2], len(total) // heads
    for start in range(0, queries, block):
        m = min(block, queries - start)
        seen = live - queries + start + m if causal else live
        n, mine = heads * m, slice(start, start + m)
        part, part_p = lines_r[: n * rank].reshape(n, rank), lines_p[: n * width].reshape(n, width)
        np.multiply(q_latent[:, mine], scale, part.reshape(heads, m, rank))
        np.multiply(q_rope[:, mine], scale, part_p.reshape(heads, m, width))
        scores, rotated = flat[: n * seen].reshape(n, seen), more[: n * seen].reshape(n, seen)
        np.matmul(part, latent[:seen].T, scores)
        np.matmul(part_p, rope[:seen].T, rotated)
        np.add(scores, rotated, scores)
        if causal and m > 1:
            _hide_later_rows(scores.reshape(heads, m, seen))
        sums = total[:n].reshape(n, 1)
        np.maximum.reduce(scores, 1, None, sums, True)  # type: ignore[call-overload]
        exp_in_place(scores, sums)
        np.add.reduce(scores, 1, None, sums, True)  # type: ignore[call-overload]
        np.matmul(scores, latent[:seen], part)
        np.divide(part.reshape(heads, m, rank), sums.reshape(heads, m, 1), out[:, mine])


def _hide_later_rows(scores: Array) -> None:
    """``[H, m, n]``: the last query sees all n rows, each earlier one a row less."""
    _, m, n = scores.shape
    for i in range(m - 1):
        scores[:, i, n - m + i + 1 :] = -np.inf


LATENT_ATTENTION = Kernel(_latent_attention, _scratch)
