"""What every op means, in float64 or exact bytes, one element at a time where that is clearer.

Written from the ops' documentation. Nothing here calls an op, a body, a layout or a kernel of the
package. Arrays of floats come as float64, integers as int64, anything that only moves as its raw
bits; results are of the same kind.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Arithmetic


def silu(x: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(x / (1 + np.exp(-x)))


def gelu(x: Array) -> Array:
    """The tanh form."""
    with np.errstate(all="ignore"):
        return np.asarray(x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def softmax(x: Array, axis: int) -> Array:
    """A row of -inf only gives zeros."""
    out = np.zeros_like(x)
    rows, result = np.moveaxis(x, axis, -1), np.moveaxis(out, axis, -1)
    for at in np.ndindex(rows.shape[:-1]):
        row = rows[at]
        if row.size and row.max() > -math.inf:
            e = [math.exp(float(v - row.max())) for v in row]
            result[at] = [v / math.fsum(e) for v in e]
    return out


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    out = np.zeros_like(x)
    for at in np.ndindex(x.shape[:-1]):
        mean = math.fsum(v * v for v in x[at]) / x.shape[-1]
        out[at] = x[at] / math.sqrt(mean + eps) * weight
    return out


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    out = np.zeros_like(x)
    for at in np.ndindex(x.shape[:-1]):
        centred = x[at] - math.fsum(x[at]) / x.shape[-1]
        variance = math.fsum(v * v for v in centred) / x.shape[-1]
        out[at] = centred / math.sqrt(variance + eps) * weight + bias
    return out


def rope(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Pair i is rotated by the angle whose cosine and sine are ``cos[.., s, i], sin[.., s, i]``."""
    out, half = np.zeros_like(x), x.shape[-1] // 2
    for at in np.ndindex(x.shape[:-1]):
        for i in range(half):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            angle = (at[-1], i) if cos.ndim == 2 else (at[0], at[-1], i)
            c, s = cos[angle], sin[angle]
            out[(*at, first)] = x[(*at, first)] * c - x[(*at, second)] * s
            out[(*at, second)] = x[(*at, second)] * c + x[(*at, first)] * s
    return out


def matmul(a: Array, b: Array) -> Array:
    """``[..., M, K] @ [K, N]``, or with equal leading extents."""
    out = np.zeros((*a.shape[:-1], b.shape[-1]))
    for at in np.ndindex(out.shape):
        column = b[:, at[-1]] if b.ndim == 2 else b[at[:-2]][:, at[-1]]
        out[at] = math.fsum(x * y for x, y in zip(a[at[:-1]], column, strict=True))
    return out


# Attention


Seen = Callable[[int, int, int], dict[int, float]]
"""Of sequence b, head h and query i: the rows it sees, each with what is added to its score."""


def attend(q: Array, k: Array, v: Array, scale: float, seen: Seen) -> Array:
    """q ``[B, Hq, Sq, D]``, k ``[B, Hkv, S, D]``, v ``[B, Hkv, S, Dv]``; rows that are not seen are
    not looked at. A query that sees nothing gives zeros."""
    out = np.zeros((*q.shape[:3], v.shape[3]))
    group = q.shape[1] // k.shape[1]
    for b, h, i in np.ndindex(*q.shape[:3]):
        scores = {
            row: scale * math.fsum(q[b, h, i] * k[b, h // group, row]) + more
            for row, more in seen(b, h, i).items()
        }
        top = max(scores.values(), default=-math.inf)
        if top == -math.inf:
            continue
        weights = {row: math.exp(score - top) for row, score in scores.items()}
        total = math.fsum(weights.values())
        for row, weight in weights.items():
            out[b, h, i] += weight / total * v[b, h // group, row]
    return out


def attend_many(q: Array, k: Array, v: Array, *, scale: float, seen: Array) -> Array:
    """`attend` by whole matrices, for many rows: ``seen[i, row]`` says whether query i sees a row,
    of any sequence and head. Each query sees one; rows that none sees may hold NaN."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(np.nan_to_num(rows), group, 1) for rows in (k, v))
    scores = np.where(seen, scale * (q @ np.swapaxes(k, 2, 3)), -math.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ v)


def by_position(queries: int, length: int, causal: bool = True, window: int | None = None) -> Seen:
    """Of `length` live rows the last `queries` are the queries' own."""

    def seen(b: int, h: int, i: int) -> dict[int, float]:
        place = length - queries + i
        rows = range(place + 1) if causal else range(length)
        return {r: 0.0 for r in rows if window is None or r > place - window}

    return seen


def masked(seen: Seen, mask: Array, shape: Sequence[int]) -> Seen:
    """With a mask, bool (True is visible) or additive, broadcast to ``[B, Hq, Sq, length]``."""
    full = np.broadcast_to(mask, tuple(shape))

    def both(b: int, h: int, i: int) -> dict[int, float]:
        rows, own = seen(b, h, i), full[b, h, i]
        if full.dtype == np.bool_:
            return {r: more for r, more in rows.items() if own[r]}
        return {r: more + float(own[r]) for r, more in rows.items() if own[r] != -np.inf}

    return both


def attention(
    q: Array, k: Array, v: Array, *, scale: float | None = None, length: int | None = None,
    causal: bool = True, window: int | None = None, mask: Array | None = None,
) -> Array:  # fmt: skip
    live = k.shape[2] if length is None else length
    seen = by_position(q.shape[2], live, causal, window)
    if mask is not None:
        seen = masked(seen, mask, (*q.shape[:3], live))
    return attend(q, k, v, 1 / math.sqrt(q.shape[3]) if scale is None else scale, seen)


def ring_slot(position: int, ring: int, sinks: int) -> int:
    """Where position p of a ring with some first positions kept aside lies."""
    return position if position < sinks else sinks + (position - sinks) % (ring - sinks)


def ring_attention(
    q: Array, k: Array, v: Array, *, length: int, window: int, sinks: int = 0
) -> Array:  # fmt: skip
    """A query at position p sees p - window + 1 .. p, and of the first `sinks` those up to p."""
    queries, ring = q.shape[2], k.shape[2]

    def seen(b: int, h: int, i: int) -> dict[int, float]:
        p = length - queries + i
        recent = range(max(sinks, p + 1 - window), p + 1)
        return {ring_slot(r, ring, sinks): 0.0 for r in (*range(min(sinks, p + 1)), *recent)}

    return attend(q, k, v, 1 / math.sqrt(q.shape[3]), seen)


def latent_attention(
    q_latent: Array, q_rope: Array, latent: Array, rope_keys: Array, *, scale: float,
    length: int | None = None, causal: bool = True,
) -> Array:  # fmt: skip
    """One key head of ``[latent, rope]``, whose values are the latent rows."""
    q = np.concatenate([q_latent, q_rope], 3)
    k = np.concatenate([latent, rope_keys], 1)[None, None]
    live = len(latent) if length is None else length
    seen = by_position(q.shape[2], live, causal)
    return attend(q, k, latent[None, None], scale, seen)


def paged_attention(
    q: Array, k_pool: Array, v_pool: Array, table: Array, lens: Array, *,
    window: int | None = None, scale: float | None = None,
) -> Array:  # fmt: skip
    """Token t of sequence b is slot ``t % bs`` of block ``table[b, t // bs]``."""
    out = np.zeros((*q.shape[:3], v_pool.shape[3]))
    size = k_pool.shape[1]
    for b, n in enumerate(int(n) for n in lens):
        if n:
            first = 0 if window is None else max(0, n - q.shape[2] + 1 - window)
            k, v = (np.zeros((1, p.shape[2], n, p.shape[3])) for p in (k_pool, v_pool))
            for t in range(first, n):
                block = int(table[b, t // size])
                k[0, :, t], v[0, :, t] = k_pool[block, t % size], v_pool[block, t % size]
            out[b] = attention(q[b : b + 1], k, v, window=window, scale=scale)[0]
    return out


# Moves and writes, on raw bits


def take(table: Array, ids: Array) -> Array:
    out = np.zeros((*ids.shape, *table.shape[1:]), table.dtype)
    for at in np.ndindex(ids.shape):
        out[at] = table[int(ids[at])]
    return out


def concat(parts: Sequence[Array], axis: int) -> Array:
    shape = list(parts[0].shape)
    shape[axis] = sum(p.shape[axis] for p in parts)
    out, start = np.zeros(shape, parts[0].dtype), 0
    for part in parts:
        for at in np.ndindex(part.shape):
            out[(*at[:axis], at[axis] + start, *at[axis + 1 :])] = part[at]
        start += part.shape[axis]
    return out


def where(condition: Array, a: Array, b: Array) -> Array:
    out = np.zeros_like(a)
    for at in np.ndindex(a.shape):
        out[at] = a[at] if condition[at] else b[at]
    return out


def write_slice(dest: Array, src: Array, starts: Sequence[int]) -> None:
    for at in np.ndindex(src.shape):
        dest[tuple(n + s for n, s in zip(at, starts, strict=True))] = src[at]


def write_slice_at(dest: Array, src: Array, axis: int, offset: int) -> None:
    write_slice(dest, src, [offset if a == axis else 0 for a in range(dest.ndim)])


def write_slice_rotating(
    dest: Array, src: Array, axis: int, position: int, modulus: int, sinks: int = 0
) -> None:
    to, rows = np.moveaxis(dest, axis, 0), np.moveaxis(src, axis, 0)
    for r, row in enumerate(rows):
        to[ring_slot(position + r, modulus, sinks)] = row


def write_rows(dest: Array, src: Array, rows: Array, count: int | None = None) -> None:
    for i in range(len(rows) if count is None else count):
        dest[int(rows[i])] = src[i]


# Roundings


def round_float(
    x: float | int, exponent_bits: int, fraction_bits: int, *, finite_only: bool
) -> float:  # fmt: skip
    """x rounded to the nearest float of a format, ties to even, as IEEE 754 has it.

    What is too large becomes an infinity, or NaN where the format has none (`finite_only`, the
    "fn" formats, whose all-ones exponent is a number but for NaN).
    """
    if x == 0 or math.isnan(x):
        return float(x)
    bias = (1 << (exponent_bits - 1)) - 1
    top = bias if not finite_only else bias + 1
    largest = Fraction(2) ** top * (2 - Fraction(1 + finite_only, 1 << fraction_bits))
    if math.isinf(x):
        return math.nan if finite_only else x
    value = Fraction(x)
    size = x.bit_length() if isinstance(x, int) else math.frexp(x)[1]
    exponent = max(size - 1, 1 - bias)
    unit = Fraction(2) ** (exponent - fraction_bits)
    rounded = round(value / unit) * unit  # Fraction rounds half to even
    if abs(rounded) > largest:
        return math.nan if finite_only else math.copysign(math.inf, x)
    return math.copysign(float(rounded), x)


FORMATS: dict[str, tuple[int, int, bool]] = {
    "f64": (11, 52, False),
    "f32": (8, 23, False),
    "f16": (5, 10, False),
    "bf16": (8, 7, False),
    "f8_e5m2": (5, 2, False),
    "f8_e4m3": (4, 3, True),
}
"""Exponent bits, fraction bits and `finite_only` of the formats a cast can round to."""


def cast_float(x: Array, name: str) -> Array:
    """float64 values, or whole numbers, as the nearest ones of a floating dtype."""
    exponent, fraction, finite_only = FORMATS[name]
    flat = [
        round_float(v, exponent, fraction, finite_only=finite_only) for v in x.reshape(-1).tolist()
    ]
    return np.array(flat, np.float64).reshape(x.shape)
