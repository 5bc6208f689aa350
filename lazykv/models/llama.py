"""The graph of one step of a Llama-type transformer, wherever the cached rows are kept."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lazykv.device import DeviceLocation
from lazykv.dtypes import DType, i64
from lazykv.errors import RangeError
from lazykv.graph import Graph, Tensor
from lazykv.models.cache_rows import CacheRows, Caches, StepInputs
from lazykv.models.config import LlamaConfig, inv_freq
from lazykv.models.weights import LayerWeights, LlamaWeights
from lazykv.symbols import Sym


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The graph of `seq` tokens of `batch` sequences: logits, the cache placeholders per layer, the
    inputs bound per step (``ids`` i64 ``[batch * seq]`` and those of the `CacheRows`), and the
    symbol of the live length before the step, None where that is bound.

    Logits are ``[vocab]`` of the last token, ``[seq, vocab]`` if all are asked for, each with a
    leading ``batch`` if that is not 1 or sequences have lengths of their own."""

    graph: Graph
    logits: Tensor
    kv_nodes: tuple[tuple[Tensor, Tensor], ...]
    bound: dict[str, Tensor]
    position: Sym | None


def build_step(
    config: LlamaConfig, weights: LlamaWeights, *, seq: int, rows: CacheRows, kv_dtype: DType,
    batch: int = 1, every_logit: bool = False,
) -> StepGraph:  # fmt: skip
    """Build the step for `seq` tokens of each sequence over caches that keep their `rows`.

    Weights are taken by reference, and a layer runs where its weights live: the hidden state moves
    where that changes. Attention sees the rows that are live and the step's own.
    """
    g = Graph()
    ids = g.placeholder((batch * seq,), i64, "ids")
    step = rows.inputs(g, batch, seq, config.head_dim // 2)
    head = g.const(weights.head, name="head")
    if weights.embedding is None:
        table = head.transpose(0, 1)
    else:
        table = g.const(weights.embedding, name="embedding")
    x = table.take(ids)
    place = (weights.embedding or weights.head).location
    shape = rows.cache_shape(batch, config.n_kv_heads, config.head_dim)
    kv_nodes = []
    for i, layer in enumerate(weights.layers):
        x, place = _moved(x, place, layer.attn_norm.location)
        k_cache = g.placeholder(shape, kv_dtype, f"blk.{i}.k")
        v_cache = g.placeholder(shape, kv_dtype, f"blk.{i}.v")
        kv_nodes.append((k_cache, v_cache))
        x = _attention_block(config, layer, i, x, rows, (k_cache, v_cache), step)
        x = _feed_forward_block(config, layer, i, x)
    x, _ = _moved(x, place, weights.norm.location)
    x = x.reshape(batch, seq, config.hidden_size)
    logits = _logits(config, x, g.const(weights.norm, name="norm"), head, rows, every_logit)
    return StepGraph(g, logits, tuple(kv_nodes), {"ids": ids, **step.bound}, step.position)


def _moved(x: Tensor, here: DeviceLocation, there: DeviceLocation) -> tuple[Tensor, DeviceLocation]:
    """The hidden state where the next weights are, and that place."""
    return (x if here == there else x.to(there)), there


def _logits(
    config: LlamaConfig, x: Tensor, norm: Tensor, head: Tensor, rows: CacheRows, every: bool
) -> Tensor:
    """Logits of ``[batch, seq, hidden]``: of the last position, or of all."""
    batch, seq, hidden = x.shape
    n = seq if every else 1
    last = x.slice(1, seq - n, n).reshape(batch * n, hidden)
    logits = last.rms_norm(norm, config.rms_eps) @ head
    lead = ([batch] if batch > 1 or rows.ragged else []) + ([seq] if every else [])
    return logits.reshape(*lead, config.vocab_size)


def _attention_block(
    config: LlamaConfig, layer: LayerWeights, i: int, x: Tensor, rows: CacheRows, caches: Caches,
    step: StepInputs,
) -> Tensor:  # fmt: skip
    """x + output(attention(rope(q), cached k, cached v)), the step's k and v written first."""
    g, dim = x.graph, config.head_dim
    queries, keys = config.n_heads, config.n_kv_heads
    h = x.rms_norm(g.const(layer.attn_norm, name=f"blk.{i}.attn_norm"), config.rms_eps)
    qkv = h @ g.const(layer.qkv, name=f"blk.{i}.attn_qkv")
    heads = qkv.reshape(step.batch, step.seq, queries + 2 * keys, dim).transpose(1, 2)
    # One rotation for queries and keys together: half the calls of two.
    turned = heads.slice(1, 0, queries + keys).rope(
        step.bound["cos"], step.bound["sin"], interleaved=config.rope_interleaved
    )
    q, k = turned.slice(1, 0, queries), turned.slice(1, queries, keys)
    v = heads.slice(1, queries + keys, keys)
    if caches[0].dtype is not x.dtype:
        k, v = k.cast(caches[0].dtype), v.cast(caches[0].dtype)
    seen = rows.attend(q, k, v, caches, step, config.sliding_window)
    joined = seen.transpose(1, 2).reshape(step.batch * step.seq, queries * dim)
    return x + joined @ g.const(layer.output, name=f"blk.{i}.attn_output")


def _feed_forward_block(config: LlamaConfig, layer: LayerWeights, i: int, x: Tensor) -> Tensor:
    """x + down(silu(gate) * up) (SwiGLU: Shazeer, 2020, arXiv:2002.05202)."""
    g, inner = x.graph, config.intermediate_size
    h = x.rms_norm(g.const(layer.ffn_norm, name=f"blk.{i}.ffn_norm"), config.rms_eps)
    both = h @ g.const(layer.gate_up, name=f"blk.{i}.ffn_gate_up")
    gate, up = both.slice(1, 0, inner), both.slice(1, inner, inner)
    return x + (gate.silu() * up) @ g.const(layer.down, name=f"blk.{i}.ffn_down")


class RopeTable:
    """Cosines and sines of every position asked for so far, computed in f64 and kept in f32."""

    def __init__(self, config: LlamaConfig) -> None:
        self._inv_freq = inv_freq(config)
        none = np.empty((0, len(self._inv_freq)), np.float32)
        # One attribute for both, so that threads sharing a model never see a pair half replaced.
        self._tables = none, none

    def rows(self, start: int, n: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """cos and sin ``[n, D/2]`` for positions start..start+n."""
        cos, sin = self._up_to(start + n)
        return cos[start : start + n], sin[start : start + n]

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """cos and sin ``[batch, seq, D/2]`` for positions ``[batch, seq]``."""
        low, high = (int(positions.min()), int(positions.max())) if positions.size else (0, 0)
        if low < 0:
            raise RangeError(f"RopeTable: got position {low}, need position >= 0")
        cos, sin = self._up_to(high + 1)
        return cos[positions], sin[positions]

    def _up_to(self, n: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Tables of at least `n` positions."""
        cos, sin = self._tables
        if n > len(cos):
            # Doubling keeps the cost per token constant on average.
            size = max(256, 2 * len(cos), n)
            angles = np.arange(size, dtype=np.float64)[:, None] * self._inv_freq
            cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
            self._tables = cos, sin
        return cos, sin
