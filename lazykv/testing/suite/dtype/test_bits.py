"""Every bit pattern of a dtype, moved in every way, arrives as it was: NaN payloads, signs of zero
and subnormals included."""

from collections.abc import Callable

import numpy as np
import pytest

from lazykv.dtypes import dtype as find_dtype
from lazykv.dtypes import to_raw
from lazykv.functions import concat, where
from lazykv.graph import Graph, Tensor
from lazykv.runtime.realize import realize
from lazykv.storage import Storage
from lazykv.testing.compare import check_bits
from lazykv.testing.golden import STORED, Array, random_of
from lazykv.testing.target import Target

ROWS, WIDTH = 64, 1024


def every_pattern(name: str) -> Array:
    """All patterns of 8 and 16 bits, and many of longer dtypes: ``[64, 1024]``."""
    dt = find_dtype(name)
    n = ROWS * WIDTH
    if name == "bool":
        return np.asarray(np.arange(n) % 2 == 1).reshape(ROWS, WIDTH)
    if dt.itemsize <= 2:
        raw = np.arange(n).astype(f"u{dt.itemsize}")
    else:
        raw = np.frombuffer(random_of(name).bytes(n * dt.itemsize), f"u{dt.itemsize}").copy()
        bits = 8 * dt.itemsize
        # Ones and zeros in a row: signs, exponents alone, largest and smallest.
        raw[: bits + 1] = [(1 << k) - 1 for k in range(bits + 1)]
        raw[bits + 1 : 2 * bits + 1] = [1 << k for k in range(bits)]
    return raw.view(dt.numpy).reshape(ROWS, WIDTH)


def by_take(t: Tensor) -> Tensor:
    return t.take(t.graph.const(np.arange(ROWS)))


def by_where(t: Tensor) -> Tensor:
    flags = t.graph.const(np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) % 3 == 0)
    return where(flags, t, t.graph.placeholder(t.shape, t.dtype, "same"))


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "result": lambda t: t,
    "permuted": lambda t: t.permute(1, 0).contiguous().permute(1, 0),
    "concat": lambda t: concat([t.slice(0, 0, 7), t.slice(0, 7, ROWS - 7)], 0),
    "take": by_take,
    "where": by_where,
    "to_the_host": lambda t: t.to("cpu"),
}


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("move", MOVES)
def test_a_move_keeps_every_bit(target: Target, move: str, name: str) -> None:
    target.need(name, *{"take": ["i64"], "where": ["bool"]}.get(move, []))
    data = every_pattern(name)
    g = Graph()
    x = g.placeholder(data.shape, name, "x")
    out = MOVES[move](x)
    bindings = {t: target.storage(data) for t in g if t.name in ("x", "same")}
    got = realize(out, bindings, device=target.location)
    check_bits(f"{move} of every {name}", to_raw(got), to_raw(data))


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("way", ["slice", "offset", "rotating", "rows"])
def test_a_write_keeps_every_bit(target: Target, way: str, name: str) -> None:
    target.need(name, "i64")
    data = every_pattern(name)
    g = Graph()
    dest = g.placeholder(data.shape, name, "dest")
    src = g.const(target.storage(data))
    out = {
        "slice": lambda: dest.at[:, :].set(src),
        "offset": lambda: dest.write_slice_at(src, 0, g.const(np.array(0))),
        "rotating": lambda: dest.write_slice_rotating(src, 1, g.const(np.array(0)), WIDTH),
        "rows": lambda: dest.write_rows(src, g.const(np.arange(ROWS))),
    }[way]()
    store = target.storage(np.zeros(data.shape, data.dtype))
    realize(out, {dest: store}, device=target.location)
    check_bits(f"write by {way} of every {name}", to_raw(store.to_numpy()), to_raw(data))


@pytest.mark.parametrize("name", STORED)
def test_a_copy_between_locations_keeps_every_bit(target: Target, name: str) -> None:
    target.need(name)
    place, data = target.other_location(), every_pattern(name)
    g = Graph()
    x = g.placeholder(data.shape, name, "x")
    there = x.to(place)
    back = there.to(target.location)
    for out in (there, back):
        got = realize(out, {x: target.storage(data)}, device=target.location)
        check_bits(f"copy of every {name} to {place}", to_raw(got), to_raw(data))


def test_big_endian_arrays_keep_their_values(target: Target) -> None:
    target.need("f32", "i64")
    for values in (np.arange(5, dtype=">f4"), np.arange(-2, 3, dtype=">i8")):
        got = Storage.from_array(values, target.location).to_numpy()
        check_bits("a big-endian array", got, values.astype(values.dtype.newbyteorder("<")))
