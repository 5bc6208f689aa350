"""How the CUDA kernels are launched: grids, blocks, scratch, and what they are compiled for."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lazykv.backends.cuda_kernels.table import NO_WINDOW

_WARP = 32
_LOAD_BYTES = 16
"""The widest load of one lane."""

_MOST_BLOCKS = 1 << 16
"""Blocks of a kernel whose threads stride over the elements: more only wait in a queue."""

_STATE = 64
"""Floats of queries and sums a thread of the attention kernels should hold in registers: with what
else they need, 3 blocks of 128 threads fit in a multiprocessor's 65536 registers."""

_MOST_STATE = 144
"""What it may hold at all: above, a thread's 255 registers spill to memory."""

_MOST_SHARED_FLOATS = 3000
"""``LINES * VALUE_DIM`` whose sums of four warps fit in the 48 KB of static shared memory."""

_MOST_GRID_Y = 65535
"""CUDA's bound on a grid's second and third extent."""

_ROWS_PER_SPLIT = 256
"""Rows that a split of attention is worth: merging it costs about as much as reading a few."""

_MOST_SPLITS = 64
"""Splits of attention: the merge walks over them one by one."""

_K_PER_SPLIT = 64
"""Rows of a matrix that a split is worth: 16 for each of the four warps."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A grid of blocks of threads.

    An extent of 0 means that there is nothing to do; CuPy then launches one block, which finds
    nothing to do. All shared memory is static.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]


def _strided(size: int) -> Launch:
    """Threads that stride over so many elements."""
    return Launch((min(-(-size // 256), _MOST_BLOCKS), 1, 1), (256, 1, 1))


def _by_row(rows: int) -> Launch:
    """One block a row."""
    return Launch((min(rows, _MOST_BLOCKS), 1, 1), (256, 1, 1))


def _single() -> Launch:
    return Launch((1, 1, 1), (256, 1, 1))


def _attention(
    batch: int, heads: int, kv_heads: int, queries: int, lines: int, splits: int
) -> Launch:
    tiles = -(-(heads // kv_heads * queries) // lines)
    return Launch((tiles * splits, kv_heads, batch), (128, 1, 1))


def _attention_reduce(lines: int) -> Launch:
    return Launch((min(lines, _MOST_BLOCKS), 1, 1), (128, 1, 1))


def _gemv(n: int, vec: int, splits: int) -> Launch:
    return Launch((-(-n // (_WARP * vec)), splits, 1), (128, 1, 1))


_LAUNCHES: dict[str, Callable[..., Launch]] = {
    "copy": _strided,
    "write_slice_at": _strided,
    "write_slice_rotating": _strided,
    "write_rows_check": _single,
    "write_rows": _strided,
    "take": _strided,
    "rms_norm": _by_row,
    "softmax": _by_row,
    "rope": _strided,
    "attention": _attention,
    "paged_attention": _attention,
    "ring_attention": _attention,
    "latent_attention": _attention,
    "attention_reduce": _attention_reduce,
    "gemv": _gemv,
    "gemv_reduce": _strided,
    "map": _strided,
}


def launch_of(name: str, **sizes: int) -> Launch:
    """The launch of a kernel.

    Sizes are ``size`` (elements of the walk or the result; pairs for rope) of `copy`,
    `write_slice_at`, `write_slice_rotating`, `write_rows`, `take`, `rope`, `map` and `gemv_reduce`;
    ``rows`` of `rms_norm` and `softmax`; none of `write_rows_check`; ``batch, heads, kv_heads,
    queries, lines, splits`` of the attentions (`lines` as compiled), ``lines`` (``batch * heads *
    queries``) of `attention_reduce`; ``n, vec, splits`` of `gemv`.
    """
    return _LAUNCHES[name](**sizes)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an attention kernel is compiled for, besides its dtypes and extents."""

    lines: int
    team: int
    vec: int


def _power_of_two(at_least: int) -> int:
    return 1 << max(0, at_least - 1).bit_length()


def _load_width(itemsize: int, extents: Iterable[int], addresses: Iterable[int]) -> int:
    """Most elements a lane can read at once when all extents and steps are multiples of them."""
    whole = math.gcd(*extents)
    bytes_ = math.gcd(_LOAD_BYTES, *addresses)
    vec = _LOAD_BYTES // itemsize
    while vec > 1 and (whole % vec or bytes_ % (vec * itemsize)):
        vec //= 2
    return vec


def attention_shape(
    itemsize: int, dim: int, value_dim: int, lines: int, steps: Iterable[int] = (),
    addresses: Iterable[int] = (),
) -> AttentionShape | None:  # fmt: skip
    """The shape for rows of `dim` and `value_dim` elements and ``heads / kv_heads * queries`` lines
    a key head, or None if they do not fit.

    `steps` are the strides of k and v in elements, `addresses` where they start in memory. For
    latent attention `dim` is the extent of a latent row and of a rotary key together; the latent
    row's is `value_dim`.
    """
    if not (dim and value_dim):
        return None
    vec = _load_width(itemsize, (dim, value_dim, *steps), addresses)
    # A lane without elements would be idle.
    team = min(8, _power_of_two(-(-max(dim, value_dim) // vec)))
    wanted = min(4, _power_of_two(lines))
    while wanted * (dim + value_dim) > _STATE * team and team < _WARP:
        team *= 2
    while wanted > 1 and (
        wanted * (dim + value_dim) > _MOST_STATE * team or wanted * value_dim > _MOST_SHARED_FLOATS
    ):
        wanted //= 2
    if wanted * (dim + value_dim) > _MOST_STATE * team or value_dim > _MOST_SHARED_FLOATS:
        return None
    return AttentionShape(wanted, team, vec)


def fits_grid(batch: int, kv_heads: int) -> bool:
    """Whether the attention kernels can be launched for so many sequences and key heads."""
    return batch <= _MOST_GRID_Y and kv_heads <= _MOST_GRID_Y


def attention_splits(
    blocks: int, rows: int, queries: int, window: int = NO_WINDOW, sinks: int = 0,
    multiprocessors: int = 108,
) -> int:  # fmt: skip
    """Splits of the rows, so that two blocks run on every multiprocessor where rows allow it.

    `blocks` are those of one split, ``batch * kv_heads * ceil(lines / LINES)``; `rows` is the most
    that may be live, since the number is part of a captured launch.
    """
    in_view = min(rows, sinks + window + queries - 1)
    wanted = -(-2 * multiprocessors // max(1, blocks))
    return max(1, min(wanted, -(-in_view // _ROWS_PER_SPLIT), _MOST_SPLITS))


def attention_scratch(lines: int, splits: int, value_dim: int) -> tuple[int, int]:
    """f32 elements of `part_values` and `part_stats` for ``batch * heads * queries`` lines."""
    return (lines * splits * value_dim, 2 * lines * splits) if splits > 1 else (0, 0)


def gemv_lines(m: int) -> int:
    """LINES for m rows, at most 8: more are a matrix product for a library."""
    assert 1 <= m <= 8, "a gemv has 1 to 8 rows"
    return _power_of_two(m)


def gemv_vec(
    itemsize: int, n: int, steps: Iterable[int] = (), addresses: Iterable[int] = ()
) -> int:
    """VEC for n columns of `itemsize` bytes; `steps` and `addresses` are those of the matrix."""
    return _load_width(itemsize, (n, *steps), addresses)


def gemv_splits(k: int, n: int, vec: int, multiprocessors: int = 108) -> int:
    """Splits of K, so that two blocks run on every multiprocessor where K allows it."""
    columns = -(-n // (_WARP * vec))
    wanted = -(-2 * multiprocessors // max(1, columns))
    return max(1, min(wanted, -(-k // _K_PER_SPLIT)))


def gemv_scratch(m: int, n: int, splits: int) -> int:
    """f32 elements of `part`."""
    return m * n * splits if splits > 1 else 0
