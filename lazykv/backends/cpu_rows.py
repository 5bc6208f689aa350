"""What the CPU's attention kernels share: rows widened to f32, scores, the softmax in place."""

import numpy as np

from lazykv.device import Array


def widen_rows(rows: Array, flat: Array, bits: bool) -> Array:
    """Rows as f32 in scratch; a bf16 is the upper half of the f32 of the same value."""
    wide = flat[: rows.size].reshape(rows.shape)
    if bits:
        np.copyto(wide.view(np.uint32), rows)
        np.left_shift(wide.view(np.uint32), 16, wide.view(np.uint32))
    else:
        np.copyto(wide, rows)
    return wide


LEAST = np.finfo(np.float32).min
_TINY = np.finfo(np.float32).tiny


def exp_in_place(scores: Array, top: Array) -> None:
    """``exp(scores - top)``; a row of -inf only (nothing is visible) gives zeros, not NaN."""
    np.maximum(top, LEAST, out=top)
    np.subtract(scores, top, scores)
    np.exp(scores, scores)


def divide_rows(out: Array, total: Array) -> None:
    """``out / total``; a total of 0 divides zeros, which stay zeros."""
    np.maximum(total, _TINY, out=total)
    np.divide(out, total, out)


_SMALL_PRODUCT, _FEW_LINES = 1200, 24
"""Scores up to which OpenBLAS multiplies by transposed rows without packing them first, and lines
of queries up to which several such products are quicker than one that packs."""


def score_rows(queries: Array, rows: Array, out: Array) -> None:
    """``queries @ rows^T`` per head: ``[H, G, D]`` by ``[H, n, D]``."""
    lines, n = queries.shape[1], rows.shape[1]
    if lines * n <= _SMALL_PRODUCT or lines > _FEW_LINES:
        np.matmul(queries, rows.mT, out)
        return
    step = _SMALL_PRODUCT // lines
    for at in range(0, n, step):
        np.matmul(queries, rows[:, at : at + step].mT, out[:, :, at : at + step])
