"""A step over a pool small enough to check by hand: rows are numbers, and every live row weighs
the same unless a test asks for other queries (see `paged_state` for what rows hold)."""

from typing import Any

import numpy as np
from paged_state import number

import lazykv as lk

KEY = ("m",)


class PagedStep:
    """Per layer the rows of all new tokens are written, then the layer is attended to; the outputs
    ``[batch, heads, seq, dim]`` are added. Inputs: a number per token, queries per sequence."""

    def __init__(
        self, pool: lk.DeviceKvPool, *, batch: int = 4, seq: int = 1, max_blocks: int = 8
    ) -> None:
        g = self.graph = lk.Graph()
        heads, dim = pool.geometry.n_kv_heads, pool.geometry.head_dim
        self.bound = {
            "numbers": g.placeholder((batch * seq,), lk.f32, "numbers"),
            "q": g.placeholder((batch, heads, seq, dim), lk.f32, "q"),
            "rows": g.placeholder((batch * seq,), lk.i64, "rows"),
            "count": g.placeholder((), lk.i64, "count"),
            "block_table": g.placeholder((batch, max_blocks), lk.u32, "block_table"),
            "context_lens": g.placeholder((batch,), lk.u32, "context_lens"),
        }
        wide = self.bound["numbers"].reshape(batch * seq, 1, 1)
        wide = wide.broadcast_to((batch * seq, heads, dim))
        self.kv_nodes, total = [], None
        for layer in range(pool.n_layers()):
            pair, written = [], []
            for slot, name in enumerate("kv"):
                pair.append(g.placeholder(pool.pool_shape, pool.dtype, f"{name}{layer}"))
                new = wide + float(number((layer, slot), 0))
                new = new if pool.dtype is lk.f32 else new.cast(pool.dtype)
                flat = pair[-1].reshape(*pool.pool_shape_flat)
                flat = flat.write_rows(new, self.bound["rows"], self.bound["count"])
                written.append(flat.reshape(*pool.pool_shape))
            self.kv_nodes.append(tuple(pair))
            seen = lk.paged_attention(
                self.bound["q"], *written, self.bound["block_table"], self.bound["context_lens"]
            )
            total = seen if total is None else total + seen
        self.target = total

    def session(self, pool: lk.DeviceKvPool, **changes: Any) -> lk.PagedDecodeSession:
        options = {"kv_nodes": self.kv_nodes, "bound": self.bound, "model_key": KEY} | changes
        return lk.PagedDecodeSession.build(
            lk.InferenceContext(pool.device_location()), self.target, pool=pool, **options
        )


def hold(pool: lk.DeviceKvPool, **sizes: int) -> lk.PagedDecodeSession:
    return PagedStep(pool, **sizes).session(pool)


def data(pool: lk.DeviceKvPool, *numbers: list[int], seed: int | None = None) -> dict[str, Any]:
    """Inputs for sessions that append these numbers; queries of zeros, or random with a seed."""
    heads, dim = pool.geometry.n_kv_heads, pool.geometry.head_dim
    shape = (len(numbers), heads, len(numbers[0]), dim)
    q = np.zeros(shape) if seed is None else np.random.default_rng(seed).standard_normal(shape)
    return {"numbers": np.ravel(numbers).astype(np.float32), "q": q.astype(np.float32)}


def means(pool: lk.DeviceKvPool, rows: list[int], new: int) -> list[float]:
    """What a query of zeros gives for each of the last `new` rows of a session."""
    layers = range(pool.n_layers())
    base = sum(number((layer, lk.KvSlot.V), 0) for layer in layers)
    ends = range(len(rows) - new + 1, len(rows) + 1)
    return [base + len(layers) * sum(rows[:end]) / end for end in ends]


def check(pool: lk.DeviceKvPool, out: np.ndarray, *rows: list[int]) -> None:
    """A step's result: for each session the means of its rows, in every head and element."""
    heads, dim = pool.geometry.n_kv_heads, pool.geometry.head_dim
    seq = out.shape[2]
    assert out.shape == (len(rows), heads, seq, dim)
    for got, of_session in zip(out, rows, strict=True):
        want = np.array(means(pool, of_session, seq)).reshape(1, seq, 1)
        np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), rtol=1e-5, atol=1e-5)
