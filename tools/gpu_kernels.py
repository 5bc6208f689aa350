"""Every kernel on ``cuda:0``, against the CPU backend."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from gpu_parts import Result, floats

import lazykv as lk
from lazykv.backends.cuda_rows import GEMV_ROWS

TOLERANCE = {"f32": 1e-4, "f16": 4e-3, "bf16": 3e-2}


def kernels(*dtypes: str, rows: int = 3000) -> Result:
    """One op for every kernel, of sizes that fit no block, against the CPU backend."""
    return _compared(_cases(rows, dtypes or tuple(TOLERANCE)))


def few_kernels() -> Result:
    """Every kernel once on little, without cuBLAS: for tools under which a GPU is slow."""
    cases = _cases(100, ("f16",))
    return _compared({name: case for name, case in cases.items() if "40 rows" not in name})


class Case(NamedTuple):
    """An op on inputs, and what size errors of its result are measured by."""

    build: Callable[..., lk.Tensor]
    inputs: list[Any]
    size: float = 1.0


def _compared(cases: dict[str, Case]) -> Result:
    wrong = {}
    for name, (build, inputs, size) in cases.items():
        want, got = (_run(build, inputs, place) for place in ("cpu", "cuda:0"))
        limit = TOLERANCE.get(lk.dtype(want.dtype).name, 0.0)
        want, got = want.astype(np.float64), got.astype(np.float64)
        if not np.allclose(got, want, limit, limit * size):
            wrong[name] = float(np.abs(got - want).max())
    counts = {"ops": len(cases)}
    return {"ok": not wrong, "wrong": wrong, "counts": counts, "error": ", ".join(wrong)}


def _run(build: Callable[..., lk.Tensor], inputs: Sequence[Any], place: str) -> Any:
    g = lk.Graph()
    return lk.realize(
        build(*(g.const(lk.Storage.from_array(a, place)) for a in inputs)), device=place
    )


_Ops = dict[str, tuple[Callable[..., lk.Tensor], list[Any]]]


def _cases(rows: int, dtypes: Sequence[str]) -> dict[str, Case]:
    made: dict[str, Case] = {}
    for dt in dtypes:
        for group in (_attentions(dt, rows), _rows(dt), _moves(dt)):
            made |= {f"{name} {dt}": Case(*case) for name, case in group.items()}
        made |= {f"matmul of {m} rows {dt}": _product(m, dt) for m in (1, 5, 8, 40)}
    return made


def _product(m: int, dt: str, k: int = 777) -> Case:
    """Random numbers, whose sums of K products are as large as sqrt(K).

    More rows than `GEMV_ROWS` go to cuBLAS. That may split K, round the sums of the parts to the 16
    bits of the result and add those, unless CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION is
    set, which CuPy does not do (https://docs.nvidia.com/cuda/cublas/#cublasmath-t). So the error of
    an element is in the last places of numbers of that size, however small the element.
    """
    pair = [floats((m, k), dt), floats((k, 1036), dt, 1)]
    is_rounded_in_parts = m > GEMV_ROWS and dt != "f32"
    return Case(lambda a, b: a @ b, pair, math.sqrt(k) if is_rounded_in_parts else 1.0)


def _attentions(dt: str, rows: int) -> _Ops:
    q, k, v = (floats(s, dt, n) for n, s in enumerate([(2, 6, 1, 64), *[(2, 2, rows, 64)] * 2]))
    length, blocks = np.array(rows - 7), rows // 16
    table = np.random.default_rng(4).permutation(blocks).astype(np.uint32).reshape(1, -1)
    pools = [floats((blocks, 16, 2, 64), dt, seed) for seed in (5, 6)]
    latent = [(1, 5, 1, 96), (1, 5, 1, 32), (rows, 96), (rows, 32)]
    return {
        "attention": (lambda *t: lk.attention(*t[:3], length=t[3]), [q, k, v, length]),
        "window": (lambda *t: lk.attention(*t[:3], length=t[3], window=100), [q, k, v, length]),
        "ring": (
            lambda *t: lk.ring_attention(*t[:3], length=t[3], window=rows // 2, sinks=4),
            [q, k, v, length * 3],
        ),
        "latent": (
            lambda *t: lk.latent_attention(*t[:4], length=t[4], scale=0.1),
            [*(floats(s, dt, n) for n, s in enumerate(latent)), length],
        ),
        "paged": (
            lk.paged_attention, [q[:1], *pools, table, np.array([blocks * 16 - 5], np.uint32)]
        ),
    }  # fmt: skip


def _rows(dt: str) -> _Ops:
    x, turn = floats((3, 5, 7, 40), dt), [floats((7, 20), dt, seed) for seed in (1, 2)]
    return {
        "rms_norm": (lambda a, w: a.rms_norm(w), [x, floats((40,), dt, 1)]),
        "softmax": (lambda a: a.softmax(), [x]),
        "rope of neighbours": (lambda a, c, s: a.rope(c, s, interleaved=True), [x, *turn]),
        "rope of halves": (lambda a, c, s: a.rope(c, s), [x, *turn]),
        "elementwise": (lambda a, b: (a * b).silu() + a.gelu() / 2.0, [x, x]),
    }


def _moves(dt: str) -> _Ops:
    x, cache = floats((3, 5, 7, 4), dt), floats((3, 9, 5), dt)
    return {
        "take and concat": (
            lambda a, i: lk.concat([a.permute(2, 0, 3, 1).take(i), a.permute(2, 0, 3, 1)]),
            [x, np.array([6, 0, 3])],
        ),
        "write_slice": (
            lambda a, b: a.write_slice(b, [(0, 3), (2, 4), (0, 5)]), [cache, cache[:, :2]]
        ),
        "write_slice_at": (
            lambda a, b, i: a.write_slice_at(b, 1, i), [cache, cache[:, :2], np.array(3)]
        ),
        "write_slice_rotating": (
            lambda a, b, i: a.write_slice_rotating(b, 1, i, 8, 2),
            [cache, cache[:, :5], np.array(9)],
        ),
        "write_rows": (
            lambda a, b, i: a.write_rows(b, i),
            [floats((9, 5), dt), floats((3, 5), dt, 1), np.array([8, 0, 4])],
        ),
    }  # fmt: skip
