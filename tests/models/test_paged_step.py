"""The step graph over pages, fed by hand: logits against a float64 forward pass and a `KvCache`.

Blocks that no table names hold NaN, table entries that name no block a mark that is out of range.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from llama_oracle import forward, frequencies, model
from toy_backends import Primitive, registered

import lazykv as lk
from lazykv.device import as_location
from lazykv.models.cache_rows import LinearRows, PagedRows, RingRows
from lazykv.models.llama import RopeTable, build_step
from lazykv.models.weights import place_weights

MARK = 2**32 - 1


def ids(n: int, seed: int = 0, vocab: int = 37) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab, n)]


def close(got: Any, want: Any, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


class Pool:
    """Pools of one model and the block lists of its sequences; blocks are taken in a mixed order.

    A step of each batch size and length is planned once and run again, as a session would.
    """

    def __init__(
        self, m: Any, *, block_size: int, num_blocks: int = 24, max_blocks: int = 24,
        dtype: str = "f32", places: Sequence[str] = ("cpu", "cpu"),
    ) -> None:  # fmt: skip
        self.model, self.dtype = m, getattr(lk, dtype)
        where = [as_location(p) for p in places[: m.config.n_layers]]
        self.weights = place_weights(m.weights, where)
        self.rows = PagedRows(num_blocks, block_size, max_blocks)
        shape = self.rows.cache_shape(1, m.config.n_kv_heads, m.config.head_dim)
        nan = np.full(shape, np.nan, np.float32).astype(self.dtype.numpy)
        self.pools = [[lk.Storage.from_array(nan, p) for _ in range(2)] for p in where]
        mixed = np.random.default_rng(num_blocks).permutation(num_blocks)
        self.free = [int(b) for b in mixed]
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []
        self.rope = RopeTable(m.config)
        self.held: dict[tuple[int, int, bool], Any] = {}

    def open(self) -> int:
        self.tables.append([])
        self.lengths.append(0)
        return len(self.tables) - 1

    def plan(self, batch: int, seq: int, every: bool = False) -> Any:
        if (batch, seq, every) not in self.held:
            step = build_step(
                self.model.config, self.weights, seq=seq, rows=self.rows, kv_dtype=self.dtype,
                batch=batch, every_logit=every,
            )  # fmt: skip
            storages = {
                node: store
                for nodes, stores in zip(step.kv_nodes, self.pools, strict=True)
                for node, store in zip(nodes, stores, strict=True)
            }
            self.held[batch, seq, every] = step, lk.plan(step.logits, storages)
        return self.held[batch, seq, every]

    def step(
        self, tokens: dict[int, list[int]], batch: int | None = None, every: bool = False
    ) -> np.ndarray:
        """Append equally many tokens to each of some sequences, padded to `batch` of them."""
        seq, batch = len(next(iter(tokens.values()))), batch or len(tokens)
        step, plan = self.plan(batch, seq, every)
        size, width = self.rows.block_size, self.rows.max_blocks
        position, row = np.zeros((batch, seq), np.int64), np.full((batch, seq), -1, np.int64)
        table, lens = np.full((batch, width), MARK, np.uint32), np.zeros(batch, np.uint32)
        token = np.zeros((batch, seq), np.int64)
        for b, (s, new) in enumerate(tokens.items()):
            start = self.lengths[s]
            end = self.lengths[s] = start + len(new)
            while len(self.tables[s]) * size < end:
                self.tables[s].append(self.free.pop())
            token[b], position[b], lens[b] = new, range(start, end), end
            row[b] = [self.tables[s][p // size] * size + p % size for p in range(start, end)]
            table[b, : len(self.tables[s])] = self.tables[s]
        cos, sin = self.rope.at(position)
        data = {
            "ids": token.reshape(-1), "rows": row.reshape(-1), "cos": cos, "sin": sin,
            "count": np.array(len(tokens) * seq), "block_table": table, "context_lens": lens,
        }  # fmt: skip
        return plan.run({step.bound[name]: array for name, array in data.items()})

    def live(self, s: int, layer: int, slot: int) -> np.ndarray:
        """Rows of a sequence ``[length, heads, D]``, gathered one by one."""
        pool, size = self.pools[layer][slot].to_numpy(), self.rows.block_size
        places = [(self.tables[s][p // size], p % size) for p in range(self.lengths[s])]
        return np.array([pool[place] for place in places])


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_one_sequence_token_by_token(interleaved, block_size):
    m, tokens = model(seed=1, rope_interleaved=interleaved), ids(19)
    want, cache = forward(m.config, m.weights, tokens), m.new_cache(19)
    pool = Pool(m, block_size=block_size)
    s = pool.open()
    for n, token in enumerate(tokens):
        logits = pool.step({s: [token]})
        assert logits.shape == (1, 37)
        close(logits[0], want[n])
        close(logits[0], m.decode_step(token, cache), 1e-5)
    for layer in range(2):
        for slot, rows in enumerate(cache.live(layer)):
            close(pool.live(s, layer, slot), rows[0].swapaxes(0, 1), 1e-5)
    assert [len(pool.held), len(pool.tables[s])] == [1, -(-19 // block_size)]


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_prompts_in_chunks_of_four(interleaved, block_size):
    m, tokens = model(seed=2, rope_interleaved=interleaved), ids(22, seed=2)
    want = forward(m.config, m.weights, tokens)
    pool = Pool(m, block_size=block_size)
    s = pool.open()
    close(pool.step({s: tokens[:1]}), want[:1])
    for n in range(1, 21, 4):
        every = n % 8 == 1
        logits = pool.step({s: tokens[n : n + 4]}, every=every)
        close(logits[0], want[n : n + 4] if every else want[n + 3])
    close(pool.step({s: tokens[21:]}), want[21:])


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_a_ragged_batch_with_padding(interleaved, block_size):
    m = model(seed=3, rope_interleaved=interleaved)
    prompts = [ids(n, seed=n) for n in (14, 8, 12)]
    want = [forward(m.config, m.weights, p) for p in prompts]
    pool = Pool(m, block_size=block_size, num_blocks=40)
    done = dict.fromkeys((pool.open() for _ in prompts), 0)
    for s, first in enumerate((8, 0, 4)):
        for n in range(0, first, 4):
            close(pool.step({s: prompts[s][n : n + 4]})[0], want[s][n + 3])
        done[s] = first
    for _ in range(6):
        logits = pool.step({s: [prompts[s][n]] for s, n in done.items()}, batch=4)
        assert logits.shape == (4, 37)
        for s, n in done.items():
            close(logits[s], want[s][n])
            done[s] = n + 1
    # A sequence leaves; another takes its place in the batch.
    logits = pool.step({2: [prompts[2][10]], 1: [prompts[1][6]]}, batch=4)
    close(logits[:2], [want[2][10], want[1][6]])


def test_several_tokens_of_several_sequences():
    m = model(seed=4)
    prompts = [ids(n, seed=n) for n in (9, 7, 8)]
    want = [forward(m.config, m.weights, p) for p in prompts]
    for dtype, tolerance in (("f32", 1e-4), ("bf16", 4e-2)):
        pool = Pool(m, block_size=2, dtype=dtype)
        done = [3, 1, 2]
        for s, n in enumerate(done):
            assert s == pool.open()
            for token in prompts[s][:n]:
                pool.step({s: [token]})
        for every in (True, False):
            new = {s: prompts[s][n : n + 3] for s, n in enumerate(done)}
            logits = pool.step(new, batch=4, every=every)
            assert logits.shape == ((4, 3, 37) if every else (4, 37))
            for s, n in enumerate(done):
                close(logits[s], want[s][n : n + 3] if every else want[s][n + 2], tolerance)
            done = [n + 3 for n in done]


def test_padding_writes_nothing_and_others_keep_their_rows():
    m, tokens = model(seed=5), ids(9)
    pool = Pool(m, block_size=4)
    a, b = pool.open(), pool.open()
    pool.step({a: tokens[:4]})
    pool.step({b: tokens[4:8]})
    before = [store.to_numpy().copy() for layer in pool.pools for store in layer]
    pool.step({b: [tokens[8]]}, batch=4)
    stores = [store for layer in pool.pools for store in layer]
    place = (pool.tables[b][1], 0)
    for was, store in zip(before, stores, strict=True):
        now = store.to_numpy().copy()
        assert np.isfinite(now[place]).all()
        now[place] = np.nan
        np.testing.assert_array_equal(now, was)


def test_sequences_that_share_a_block():
    m, tokens = model(seed=6), ids(8)
    tails = [[5, 6, 7], [9, 8, 7]]
    pool = Pool(m, block_size=4)
    a, b = pool.open(), pool.open()
    pool.step({a: tokens[:4]})
    pool.step({a: tokens[4:]})
    pool.tables[b], pool.lengths[b] = pool.tables[a][:], 8
    want = [forward(m.config, m.weights, [*tokens, *tail])[8:] for tail in tails]
    for n in range(3):
        logits = pool.step({a: [tails[0][n]], b: [tails[1][n]]})
        close(logits, [want[0][n], want[1][n]])


@pytest.mark.parametrize(("dtype", "tolerance"), [("f16", 6e-3), ("bf16", 4e-2)])
def test_16_bit_pools_round_as_16_bit_caches_do(dtype, tolerance):
    m, tokens = model(seed=7), ids(16, seed=7)
    want, cache = forward(m.config, m.weights, tokens), m.new_cache(16, dtype)
    pool = Pool(m, block_size=2, dtype=dtype)
    a, b = pool.open(), pool.open()
    for n in range(0, 12, 4):
        logits = pool.step({a: tokens[n : n + 4]})
        close(logits[0], m.prefill(tokens[n : n + 4], cache), tolerance / 8)
        pool.step({b: tokens[n : n + 4]})
    for n in range(12, 16):
        logits = pool.step({a: tokens[n : n + 1], b: tokens[n : n + 1]}, batch=4)
        close(logits[:2], [want[n]] * 2, tolerance)
        close(logits[0], m.decode_step(tokens[n], cache), tolerance / 8)


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_a_sliding_window_needs_only_the_blocks_in_view(block_size):
    window = 5
    m, tokens = model(seed=8, sliding_window=window), ids(40, seed=8)
    want = forward(m.config, m.weights, tokens)
    pool = Pool(m, block_size=block_size, num_blocks=40, max_blocks=40)
    s = pool.open()
    for n in range(0, 8, 4):
        close(pool.step({s: tokens[n : n + 4]})[0], want[n + 3])
    for n in range(8, 40):
        for block in range((n - window + 1) // block_size):
            pool.tables[s][block] = MARK
        close(pool.step({s: tokens[n : n + 1]}, batch=2)[0], want[n])


def test_head_groups_tied_heads_and_odd_sizes():
    for changes in (
        {"n_heads": 3, "n_kv_heads": 1}, {"n_heads": 2, "n_kv_heads": 2, "tied_head": True},
        {"n_heads": 1, "n_kv_heads": 1, "head_dim": 2, "n_layers": 1},
        {"n_heads": 8, "head_dim": 6, "hidden_size": 10, "rope_interleaved": False},
    ):  # fmt: skip
        m, tokens = model(seed=9, **changes), ids(9)
        want, pool = forward(m.config, m.weights, tokens), Pool(m, block_size=3)
        a, b = pool.open(), pool.open()
        close(pool.step({a: tokens[:4], b: tokens[:4]}, every=True), [want[:4]] * 2)
        for n in range(4, 9):
            close(pool.step({a: [tokens[n]], b: [tokens[n]]}), [want[n]] * 2)


@pytest.mark.parametrize("places", [("sim:0", "sim:0"), ("sim:1", "sim:0")], ids=str)
def test_pools_on_other_devices(places):
    m, tokens = model(seed=12), ids(12)
    want, pool = forward(m.config, m.weights, tokens), Pool(m, block_size=4, places=places)
    s = pool.open()
    close(pool.step({s: tokens[:4]}, every=True)[0], want[:4])
    for n in range(4, 12):
        close(pool.step({s: [tokens[n]]}, batch=2)[0], want[n])


def test_growth_into_new_blocks_is_one_plan():
    m, tokens = model(seed=10), ids(40, seed=10)
    pool = Pool(m, block_size=4, num_blocks=24, max_blocks=12)
    a, b = pool.open(), pool.open()
    pool.step({a: [tokens[0]], b: [tokens[0]]})
    _, plan = pool.plan(2, 1)
    before, known = lk.stats(), (plan.id, plan.node_count)
    for token in tokens[1:]:
        pool.step({a: [token], b: [token]})
    after = lk.stats()
    assert (after.plans_built, after.allocations) == (before.plans_built, before.allocations)
    assert (plan.id, plan.node_count) == known
    assert [len(t) for t in pool.tables] == [10, 10]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (8, 1), (1, 4)])
def test_no_row_is_moved_but_by_the_writes(batch, seq, dtype):
    pool = Pool(model(n_layers=1), block_size=4, dtype=dtype)
    _, plan = pool.plan(batch, seq)
    steps = re.findall(r"= (\w+)\(", plan.describe())
    moves = [name for name in steps if name in ("reshape", "contiguous", "copy", "permute")]
    # Attention's result has its heads outside; several of its rows must be put in order.
    assert moves == ["reshape"] * (seq > 1)
    assert steps.count("write_rows") == 2
    assert "0 safety copies" in plan.describe()


def test_what_a_step_binds():
    c = model().config
    step = build_step(
        c, model().weights, seq=2, rows=PagedRows(7, 4, 5), kv_dtype=lk.bf16, batch=3
    )  # fmt: skip
    assert step.position is None
    assert {name: str(t.spec) for name, t in step.bound.items()} == {
        "ids": "i64[6]", "cos": "f32[3,2,4]", "sin": "f32[3,2,4]", "rows": "i64[6]",
        "count": "i64[]", "block_table": "u32[3,5]", "context_lens": "u32[3]",
    }  # fmt: skip
    assert [str(t.spec) for pair in step.kv_nodes for t in pair] == ["bf16[7,4,2,8]"] * 4
    for rows in (LinearRows(8), RingRows(8, 1)):
        other = model(sliding_window=5)
        step = build_step(other.config, other.weights, seq=2, rows=rows, kv_dtype=lk.f32, batch=3)
        assert [step.position.low, *step.bound] == [0, "ids", "cos", "sin"]
        assert str(step.bound["cos"].spec) == "f32[2,4]"
        assert str(step.kv_nodes[1][1].spec) == "f32[3,2,8,8]"


def test_rings_need_a_window():
    m = model()
    with pytest.raises(lk.GraphError, match="RingRows: got a model without a sliding window"):
        build_step(m.config, m.weights, seq=1, rows=RingRows(8, 0), kv_dtype=lk.f32)


def test_the_graph_lowers_to_primitives_with_the_same_logits():
    m, tokens = model(seed=11, sliding_window=3), ids(6)
    step = build_step(
        m.config, m.weights, seq=2, rows=PagedRows(6, 2, 3), kv_dtype=lk.f32, batch=3
    )  # fmt: skip
    cos, sin = RopeTable(m.config).at(np.array([[2, 3], [0, 1], [0, 0]]))
    rng = np.random.default_rng(0)
    pools = {
        t: rng.standard_normal(t.shape).astype(np.float32) for pair in step.kv_nodes for t in pair
    }
    data = {
        "ids": np.array(tokens), "cos": cos, "sin": sin, "count": np.array(4),
        "rows": np.array([10, 11, 0, 1, -1, -1]), "context_lens": np.array([4, 2, 0], np.uint32),
        "block_table": np.array([[3, 5, MARK], [0, MARK, MARK], [MARK] * 3], np.uint32),
    }  # fmt: skip
    feed = pools | {step.bound[name]: array for name, array in data.items()}
    want = lk.realize(step.logits, feed)
    with registered(Primitive()):
        got = lk.realize(step.logits, feed, device="primitive:0")
    close(got[:2], want[:2], 1e-5)


# Rope tables of ragged positions


def test_tables_at_ragged_positions():
    c = model().config
    table = RopeTable(c)
    position = np.array([[0, 1, 2], [255, 256, 7], [1000, 1, 1]])
    cos, sin = table.at(position)
    assert (cos.shape, sin.shape, cos.dtype, sin.dtype) == ((3, 3, 4),) * 2 + (np.float32,) * 2
    angles = position[..., None] * np.array(frequencies(c))
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-6)
    for row in range(3):
        for n in range(3):
            for mine, theirs in zip((cos, sin), table.rows(int(position[row, n]), 1), strict=True):
                np.testing.assert_array_equal(mine[row, n], theirs[0])
    assert table.at(np.zeros((2, 0), np.int64))[0].shape == (2, 0, 4)
    cos[...] = 9  # a copy: the table stays as it was
    assert table.rows(0, 1)[0].max() == 1


def test_a_position_before_the_first_is_refused():
    with pytest.raises(lk.RangeError, match="got position -1, need position >= 0"):
        RopeTable(model().config).at(np.array([[3, -1]]))
