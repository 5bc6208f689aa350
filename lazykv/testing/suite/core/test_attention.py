"""Attention over the live rows of caches: linear, rings, and latent rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lazykv.functions import attention, latent_attention, ring_attention
from lazykv.graph import Tensor
from lazykv.spec import Shape
from lazykv.symbols import Sym
from lazykv.testing import reference
from lazykv.testing.golden import (
    FLOATS,
    Case,
    Maker,
    Operand,
    Param,
    check_case,
    every,
    given,
    live,
    numbers,
    random_of,
)
from lazykv.testing.target import Target

N = Sym("n", 0, 2**20)
MIXED = ("f16", "bf16")


def case(
    name: str, *, batch: int = 1, heads: int = 4, kv: int = 2, queries: int = 1, rows: int = 7,
    dim: int = 8, dv: int = 8, alive: int | None = None, by: str = "number",
    make_q: Maker = numbers, mask: tuple[tuple[int, ...], str | None, Maker] | None = None,
    seen: int | None = None, q_dtype: str | None = None, **options: Any,
) -> Case:  # fmt: skip
    """Attention; `alive` rows are live, told by a number, a symbol or a tensor, and `seen` of them
    under the mask. Rows past them hold NaN."""
    n = rows if alive is None else alive
    shapes = [(batch, heads, queries, dim), (batch, kv, rows, dim), (batch, kv, rows, dv)]
    make = numbers if alive is None and seen is None else live(n if seen is None else seen)
    operands = [
        Operand(shapes[0], q_dtype, make_q), *(Operand(shape, make=make) for shape in shapes[1:])
    ]  # fmt: skip
    if mask is not None:
        operands.append(Operand(mask[0], mask[1], mask[2], plain=True))
    if by == "tensor":
        operands.append(Operand((), "i64", given(n)))

    def build(q: Tensor, k: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        length = {"number": alive, "symbol": N + 1, "tensor": extra[-1] if extra else None}[by]
        return attention(
            q, k, v, length=length, mask=extra[0] if mask is not None else None, **options
        )

    def want(q: Any, k: Any, v: Any, *extra: Any) -> Any:
        own = extra[0] if mask is not None else None
        return reference.attention(q, k, v, length=n, mask=own, **options)

    return Case(
        name, build, want, tuple(operands), MIXED if q_dtype else FLOATS,
        no_result(operands) if mask is None else None, env={N: n - 1},
    )  # fmt: skip


def no_result(operands: Sequence[Operand]) -> tuple[Shape, ...]:
    """Shapes of q, k, v and perhaps a length, of which the result has no element: no batch, or no
    queries where there are several."""
    q, *others = (o.shape for o in operands)
    if q[2] > 1:
        return ((*q[:2], 0, q[3]), *others)
    return tuple((0, *shape[1:]) if shape else shape for shape in (q, *others))


def flags(*shape: int) -> Maker:
    return given(random_of("mask", str(shape)).random(shape) < 0.6)


def additive(*shape: int) -> Maker:
    rng = random_of("additive", str(shape))
    return given(np.where(rng.random(shape) < 0.6, rng.standard_normal(shape), -np.inf))


HIDDEN = np.array([[False] * 5, [True, False, True, True, False], [False] * 5])
THREE_OF_FIVE = np.array([0.5, 0.5, -0.5, -np.inf, -np.inf]).reshape(1, 1, 1, 5)
STEEP = given(np.full((1, 4, 1, 8), 60.0))

LIVE: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("_queries", {"queries": 3}),
    ("_window", {"window": 2}),
    ("_not_causal", {"causal": False, "queries": 2}),
]

LINEAR = [
    case("attention"),
    case("attention_batch", batch=2, queries=3, dv=6),
    case("attention_one_kv_head", kv=1, queries=2),
    case("attention_own_heads", kv=4, queries=2),
    case("attention_six_heads", heads=6, kv=2),
    case("attention_wide", dim=64, dv=64, rows=40, heads=2, kv=1),
    case("attention_not_causal", queries=3, causal=False),
    case("attention_scale", scale=0.3),
    case("attention_steep", make_q=STEEP, scale=2.0),
    case("attention_window", window=2),
    case("attention_window_queries", window=3, queries=3),
    case("attention_window_of_one", window=1, queries=2),
    case("attention_window_not_causal", window=2, queries=3, causal=False),
    case("attention_window_longer", window=100, queries=2),
    *(
        case(f"attention_live_by_{by}{name}", alive=4, by=by, **options)
        for by in ("number", "symbol", "tensor")
        for name, options in LIVE
    ),
    case("attention_one_row", alive=1, by="tensor"),
    case("attention_all_rows", alive=7, by="tensor"),
    case("attention_none_live", alive=0, by="tensor", causal=False),
    case("attention_no_rows", rows=0, causal=False),
    case("attention_bool_mask", rows=5, queries=3, causal=False,
         mask=((1, 4, 3, 5), "bool", flags(1, 4, 3, 5))),
    case("attention_bool_mask_broadcast", rows=5, batch=2, queries=3,
         mask=((5,), "bool", flags(5))),
    case("attention_bool_mask_hides_all", rows=5, queries=3, causal=False,
         mask=((3, 5), "bool", given(HIDDEN))),
    case("attention_bool_mask_live", alive=5, queries=3, by="tensor",
         mask=((3, 5), "bool", flags(3, 5))),
    case("attention_additive_mask", rows=5, queries=3, causal=False,
         mask=((4, 3, 5), None, additive(4, 3, 5))),
    case("attention_additive_mask_live", alive=5, by="symbol", batch=2,
         mask=((2, 1, 1, 5), None, additive(2, 1, 1, 5))),
    case("attention_bool_mask_hides_nan", rows=5, queries=3, seen=3, causal=False,
         mask=((5,), "bool", given(np.arange(5) < 3))),
    case("attention_additive_mask_hides_nan", rows=5, batch=2, seen=3, causal=False,
         mask=((1, 1, 1, 5), None, given(THREE_OF_FIVE))),
    case("attention_f32_on_16_bit", q_dtype="f32", alive=5, by="tensor"),
    case("attention_f32_on_16_bit_queries", q_dtype="f32", alive=5, queries=3, by="symbol"),
    case("attention_f32_on_16_bit_window", q_dtype="f32", alive=6, window=3, by="tensor"),
]  # fmt: skip


def ring(
    name: str, *, length: int, rows: int = 6, window: int = 4, sinks: int = 0, queries: int = 1,
    batch: int = 1, by: str = "tensor", q_dtype: str | None = None,
) -> Case:  # fmt: skip
    """Ring attention; slots that nobody may look at hold NaN."""
    recent = range(max(0, length - queries + 1 - window), length)
    seen = {reference.ring_slot(p, rows, sinks) for p in (*range(min(sinks, length)), *recent)}
    hidden = [slot for slot in range(rows) if slot not in seen]

    def make(rng: Any, shape: Any, dt: Any) -> Any:
        out = numbers(rng, shape, dt)
        out[:, :, hidden] = np.nan
        return out

    kv = Operand((batch, 2, rows, 8), make=make, plain=True)
    operands = [Operand((batch, 4, queries, 8), q_dtype), kv, kv]
    if by == "tensor":
        operands.append(Operand((), "i64", given(length)))

    def build(q: Tensor, k: Tensor, v: Tensor, *n: Tensor) -> Tensor:
        return ring_attention(q, k, v, length=n[0] if n else N + 1, window=window, sinks=sinks)

    return Case(
        name, build,
        lambda q, k, v, *n: reference.ring_attention(
            q, k, v, length=length, window=window, sinks=sinks),
        tuple(operands), MIXED if q_dtype else FLOATS, no_result(operands), env={N: length - 1},
    )  # fmt: skip


RINGS = [
    ring("ring_first", length=1),
    ring("ring_filling", length=3),
    ring("ring_full", length=6),
    ring("ring_wrapped", length=9),
    ring("ring_far", length=1_000_003),
    ring("ring_by_symbol", length=9, by="symbol"),
    ring("ring_batch", length=9, batch=2, queries=2),
    ring("ring_queries", length=9, queries=3),
    ring("ring_queries_filling", length=4, queries=3, by="symbol"),
    ring("ring_sinks_filling", length=2, rows=7, sinks=2),
    ring("ring_sinks", length=6, rows=7, sinks=2),
    ring("ring_sinks_wrapped", length=12, rows=7, sinks=2),
    ring("ring_sinks_queries", length=13, rows=9, sinks=2, queries=3, by="symbol"),
    ring("ring_f32_on_16_bit", length=12, rows=7, sinks=1, q_dtype="f32"),
]


def latent(
    name: str, *, queries: int = 1, rows: int = 7, alive: int | None = None, by: str = "number",
    causal: bool = True, q_dtype: str | None = None,
) -> Case:  # fmt: skip
    n = rows if alive is None else alive
    make = numbers if alive is None else live(n, 0)
    operands = [
        Operand((1, 4, queries, 8), q_dtype), Operand((1, 4, queries, 4), q_dtype),
        Operand((rows, 8), make=make), Operand((rows, 4), make=make),
    ]  # fmt: skip
    if by == "tensor":
        operands.append(Operand((), "i64", given(n)))
    empty = ((1, 4, 0, 8), (1, 4, 0, 4), *(o.shape for o in operands[2:]))

    def build(q: Tensor, qr: Tensor, c: Tensor, r: Tensor, *extra: Tensor) -> Tensor:
        length = {"number": alive, "symbol": N + 1, "tensor": extra[0] if extra else None}[by]
        return latent_attention(q, qr, c, r, scale=0.3, length=length, causal=causal)

    return Case(
        name, build,
        lambda q, qr, c, r, *_: reference.latent_attention(
            q, qr, c, r, scale=0.3, length=n, causal=causal),
        tuple(operands), MIXED if q_dtype else FLOATS, empty, env={N: n - 1},
    )  # fmt: skip


LATENT = [
    latent("latent"),
    latent("latent_queries", queries=3),
    latent("latent_not_causal", queries=3, causal=False),
    latent("latent_live_by_number", alive=4),
    latent("latent_live_by_symbol", alive=4, by="symbol", queries=2),
    latent("latent_live_by_tensor", alive=4, by="tensor"),
    latent("latent_no_rows", rows=0, causal=False),
    latent("latent_f32_on_16_bit", alive=5, by="tensor", q_dtype="f32"),
]

PARAMS = every([*LINEAR, *RINGS, *LATENT])


@pytest.mark.parametrize("param", PARAMS.values(), ids=PARAMS.keys())
def test_op(target: Target, param: Param) -> None:
    check_case(target, *param)
