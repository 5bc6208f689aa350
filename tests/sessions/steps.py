"""A decode step small enough to check by hand: one attention over every layer of a cache."""

from dataclasses import dataclass
from typing import Any

import numpy as np

import lazykv as lk


@dataclass
class Step:
    """The graph of one step: per layer K and V rows are written at `pos`, then every layer is
    attended to; the outputs are added."""

    target: lk.Tensor
    kv_nodes: list[tuple[lk.Tensor, lk.Tensor]]
    bound: dict[str, lk.Tensor]
    pos: lk.Sym

    def session(self, cache: lk.KvCache, **key: Any) -> lk.DecodeSession:
        return lk.DecodeSession.build(
            lk.InferenceContext(), self.target, kv=cache, kv_nodes=self.kv_nodes,
            bound=self.bound, **key,
        )  # fmt: skip


def attention_step(cache: lk.KvCache, *, seq: int = 1, queries: int | None = None) -> Step:
    g, pos = lk.Graph(), lk.Sym("pos", 0, cache.max_seq_len - seq)
    heads, dim = cache.n_kv_heads, cache.head_dim
    shape = (1, heads, cache.max_seq_len, dim)
    new = (1, heads, seq, dim)
    bound = {
        "q": g.placeholder((1, queries or heads, seq, dim), lk.f32, "q"),
        "k": g.placeholder(new, cache.dtype, "k"),
        "v": g.placeholder(new, cache.dtype, "v"),
    }
    nodes, total = [], None
    for i in range(cache.n_layers()):
        pair = tuple(g.placeholder(shape, cache.dtype, f"{name}{i}") for name in "kv")
        nodes.append(pair)
        k, v = (
            dest.at[:, :, pos : pos + seq].set(bound[name])
            for dest, name in zip(pair, "kv", strict=True)
        )
        seen = lk.attention(bound["q"], k, v, length=pos + seq)
        total = seen if total is None else total + seen
    return Step(total, nodes, bound, pos)


def data(step: Step, value: float, seed: int | None = None) -> dict[str, np.ndarray]:
    """Rows that hold `value`, and a query of zeros: every live row then weighs the same. With a
    seed, random numbers instead."""
    out = {}
    rng = np.random.default_rng(seed)
    for name, t in step.bound.items():
        plain = np.full(t.shape, 0 if name == "q" else value)
        out[name] = (plain if seed is None else rng.standard_normal(t.shape)).astype(t.dtype.numpy)
    return out


def run(session: lk.DecodeSession, step: Step, cache: lk.KvCache, feed: dict) -> np.ndarray:
    """One step at the live length, which then counts the new rows, as an embedder does it."""
    out = session.step(feed, {step.pos: cache.cached_len})
    cache.cached_len += step.bound["k"].shape[2]
    return out
