"""Ops on several tensors that are functions and not methods: attention, `concat`, `where`."""

import math
from collections.abc import Sequence
from typing import SupportsFloat

from lazykv.errors import GraphError, ShapeError
from lazykv.graph import Tensor
from lazykv.ops.attention import Attention
from lazykv.ops.latent_attention import LatentAttention
from lazykv.ops.move import Concat, Where
from lazykv.ops.paged_attention import PagedAttention
from lazykv.ops.ring_attention import RingAttention
from lazykv.spec import as_axis, finite, whole
from lazykv.symbols import Dim, DimLike, dim_argument


def _need_tensors(who: str, **operands: object) -> None:
    for name, value in operands.items():
        if not isinstance(value, Tensor):
            raise GraphError(f"{who}: got {type(value).__name__} as {name}, need a Tensor")


def _scale(who: str, scale: SupportsFloat | None, q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[3]) if scale is None else finite(who, "scale", scale)


def _length(who: str, length: DimLike | Tensor | None) -> Dim | None:
    """A length as a parameter; None where all rows are live or a tensor counts them."""
    if length is None or isinstance(length, Tensor):
        return None
    return dim_argument(who, "length", length)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, length: DimLike | Tensor | None = None,
    scale: SupportsFloat | None = None, causal: bool = True, window: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``softmax(scale * q k^T + mask) v`` over the first `length` rows of k and v; see `Attention`.

    q ``[B, Hq, Sq, D]``; k, v ``[B, Hkv, S, D]``. `length` is a number, a symbol expression or a
    rank-0 i64 tensor (None: all S rows); the last Sq live rows are the queries' own. `scale` is
    1/sqrt(D) if None. `mask` is bool (True: visible) or additive, broadcastable to
    ``[B, Hq, Sq, length]``.
    """
    _need_tensors("attention", q=q, k=k, v=v)
    if len(q.shape) != 4 or q.shape[3] == 0:
        raise ShapeError(f"attention: got q {q.spec}, need rank 4 and D >= 1")
    is_tensor = isinstance(length, Tensor)
    op = Attention(
        scale=_scale("attention", scale, q),
        causal=bool(causal),
        window=None if window is None else whole("attention", "window", window),
        length=_length("attention", length),
        has_mask=mask is not None,
        has_length=is_tensor,
    )
    extra = [t for t in (mask, length if is_tensor else None) if t is not None]
    return q.graph.apply(op, q, k, v, *extra)  # type: ignore[arg-type]


def latent_attention(
    q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, *, scale: SupportsFloat,
    length: DimLike | Tensor | None = None, causal: bool = True,
) -> Tensor:  # fmt: skip
    """Absorbed multi-head latent attention over the first `length` rows; see `LatentAttention`.

    q_latent ``[1, H, Sq, R]``, q_rope ``[1, H, Sq, P]``, latent ``[S, R]``, rope ``[S, P]``; the
    result is ``[1, H, Sq, R]``. `length` is a number, a symbol expression or a rank-0 i64 tensor
    (None: all S rows); the last Sq live rows are the queries' own. `scale` has no default: it is
    1/sqrt of the width of the keys before compression, which no operand shows.
    """
    operands = {"q_latent": q_latent, "q_rope": q_rope, "latent": latent, "rope": rope}
    _need_tensors("latent_attention", **operands)
    is_tensor = isinstance(length, Tensor)
    op = LatentAttention(
        scale=finite("latent_attention", "scale", scale),
        causal=bool(causal),
        length=_length("latent_attention", length),
        has_length=is_tensor,
    )
    extra = (length,) if is_tensor else ()
    return q_latent.graph.apply(op, *operands.values(), *extra)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, length: DimLike | Tensor, window: int,
    sinks: int = 0, scale: SupportsFloat | None = None,
) -> Tensor:  # fmt: skip
    """Attention over rings that `write_slice_rotating` fills; see `RingAttention`.

    q ``[B, Hq, Sq, D]``; k, v ``[B, Hkv, R, D]`` with ``R - sinks >= window + Sq - 1``. `length` (a
    number, a symbol expression or a rank-0 i64 tensor) counts all positions so far, the queries'
    own included, and may exceed R. A query sees the last `window` positions, its own included, and
    the first `sinks`. `scale` is 1/sqrt(D) if None.
    """
    _need_tensors("ring_attention", q=q, k=k, v=v)
    if len(q.shape) != 4 or q.shape[3] == 0:
        raise ShapeError(f"ring_attention: got q {q.spec}, need rank 4 and D >= 1")
    who = "ring_attention"
    op = RingAttention(
        scale=_scale(who, scale, q),
        window=whole(who, "window", window),
        sinks=whole(who, "sinks", sinks),
        length=None if isinstance(length, Tensor) else dim_argument(who, "length", length),
        has_length=isinstance(length, Tensor),
    )
    return q.graph.apply(op, q, k, v, *([length] if isinstance(length, Tensor) else []))


def paged_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, context_lens: Tensor, *,
    scale: SupportsFloat | None = None, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of ragged sequences over blocks of a pool; see `PagedAttention`.

    q ``[B, Hq, Sq, D]``; k_pool, v_pool ``[N, bs, Hkv, D]``; block_table u32 ``[B, M]``, the blocks
    of each sequence in order; context_lens u32 ``[B]``, the live tokens of each, the last Sq of
    which are the queries' own (0: padding, whose result is zeros). Entries past a sequence's last
    block are never looked at. `scale` is 1/sqrt(D) if None.
    """
    operands = {"q": q, "k_pool": k_pool, "v_pool": v_pool, "block_table": block_table,
                "context_lens": context_lens}  # fmt: skip
    _need_tensors("paged_attention", **operands)
    if len(q.shape) != 4 or q.shape[3] == 0:
        raise ShapeError(f"paged_attention: got q {q.spec}, need rank 4 and D >= 1")
    op = PagedAttention(
        scale=_scale("paged_attention", scale, q),
        window=None if window is None else whole("paged_attention", "window", window),
    )
    return q.graph.apply(op, *operands.values())


def concat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors one after another along an axis."""
    if not isinstance(tensors, Sequence):
        raise GraphError(f"concat: got {type(tensors).__name__}, need a list of Tensors")
    if not tensors:
        raise ShapeError("concat: got no tensors, need at least one")
    _need_tensors("concat", **{f"tensor {n}": t for n, t in enumerate(tensors)})
    axis = as_axis("concat", axis, len(tensors[0].shape))
    return tensors[0].graph.apply(Concat(axis), *tensors)


def where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`a` where the bool condition holds, else `b`; three equal shapes."""
    _need_tensors("where", condition=condition, a=a, b=b)
    return condition.graph.apply(Where(), condition, a, b)
