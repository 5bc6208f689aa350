"""The graph of one step of a Llama-type transformer over a `KvCache` or a `SlidingKvCache`."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lazykv.device import DeviceLocation
from lazykv.dtypes import DType, f32, i64
from lazykv.functions import attention, ring_attention
from lazykv.graph import Graph, Tensor
from lazykv.models.config import LlamaConfig, inv_freq
from lazykv.models.weights import LayerWeights, LlamaWeights
from lazykv.ops.sources import SymValue
from lazykv.spec import MAX_BYTES
from lazykv.symbols import Sym, as_dim


@dataclass(frozen=True, slots=True)
class Ring:
    """How a sliding cache keeps rows: positions in view, and first positions that stay."""

    window: int
    sinks: int


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The graph of `seq` tokens of `batch` sequences: logits, the cache placeholders per layer, the
    inputs bound per step (``ids`` i64 ``[batch * seq]``, ``cos`` and ``sin`` ``[seq, D/2]``), and
    the symbol of the live length before the step.

    Logits are ``[vocab]`` of the last token, ``[seq, vocab]`` if all are asked for, each with a
    leading ``batch`` if that is not 1."""

    graph: Graph
    logits: Tensor
    kv_nodes: tuple[tuple[Tensor, Tensor], ...]
    bound: dict[str, Tensor]
    position: Sym


def build_step(
    config: LlamaConfig, weights: LlamaWeights, *, seq: int, capacity: int, kv_dtype: DType,
    batch: int = 1, every_logit: bool = False, ring: Ring | None = None,
) -> StepGraph:  # fmt: skip
    """Build the step for `seq` tokens of each sequence over caches of `capacity` rows, which are
    rings if `ring` says how.

    Weights are taken by reference, and a layer runs where its weights live: the hidden state moves
    where that changes. Attention sees ``position + seq`` rows: the live ones and the step's own.
    """
    g = Graph()
    ids = g.placeholder((batch * seq,), i64, "ids")
    half = (seq, config.head_dim // 2)
    cos, sin = g.placeholder(half, f32, "cos"), g.placeholder(half, f32, "sin")
    # The length of a ring is not bounded by its rows.
    position = Sym("cached_len", 0, (capacity if ring is None else MAX_BYTES) - seq)
    head = g.const(weights.head, name="head")
    if weights.embedding is None:
        table = head.transpose(0, 1)
    else:
        table = g.const(weights.embedding, name="embedding")
    x = table.take(ids)
    place = (weights.embedding or weights.head).location
    kv_nodes = []
    for i, layer in enumerate(weights.layers):
        x, place = _moved(x, place, layer.attn_norm.location)
        shape = (batch, config.n_kv_heads, capacity, config.head_dim)
        k_cache = g.placeholder(shape, kv_dtype, f"blk.{i}.k")
        v_cache = g.placeholder(shape, kv_dtype, f"blk.{i}.v")
        kv_nodes.append((k_cache, v_cache))
        x = _attention_block(config, layer, i, x, (cos, sin), (k_cache, v_cache), position, ring)
        x = _feed_forward_block(config, layer, i, x)
    x, _ = _moved(x, place, weights.norm.location)
    rows = x.reshape(batch, seq, config.hidden_size)
    logits = _logits(config, rows, g.const(weights.norm, name="norm"), head, every_logit)
    return StepGraph(g, logits, tuple(kv_nodes), {"ids": ids, "cos": cos, "sin": sin}, position)


def _moved(x: Tensor, here: DeviceLocation, there: DeviceLocation) -> tuple[Tensor, DeviceLocation]:
    """The hidden state where the next weights are, and that place."""
    return (x if here == there else x.to(there)), there


def _logits(config: LlamaConfig, x: Tensor, norm: Tensor, head: Tensor, every: bool) -> Tensor:
    """Logits of ``[batch, seq, hidden]``: of the last position, or of all."""
    batch, seq, hidden = x.shape
    rows = seq if every else 1
    last = x.slice(1, seq - rows, rows).reshape(batch * rows, hidden)
    logits = last.rms_norm(norm, config.rms_eps) @ head
    lead = ([batch] if batch > 1 else []) + ([seq] if every else [])
    return logits.reshape(*lead, config.vocab_size)


def _attention_block(
    config: LlamaConfig, layer: LayerWeights, i: int, x: Tensor, rope: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor], position: Sym, ring: Ring | None,
) -> Tensor:  # fmt: skip
    """x + output(attention(rope(q), cached k, cached v)), k and v written at `position` first."""
    g, dim, batch = x.graph, config.head_dim, caches[0].shape[0]
    seq = x.shape[0] // batch
    queries, keys = config.n_heads, config.n_kv_heads
    h = x.rms_norm(g.const(layer.attn_norm, name=f"blk.{i}.attn_norm"), config.rms_eps)
    qkv = h @ g.const(layer.qkv, name=f"blk.{i}.attn_qkv")
    heads = qkv.reshape(batch, seq, queries + 2 * keys, dim).transpose(1, 2)
    # One rotation for queries and keys together: half the calls of two.
    turned = heads.slice(1, 0, queries + keys).rope(*rope, interleaved=config.rope_interleaved)
    q, k = turned.slice(1, 0, queries), turned.slice(1, queries, keys)
    v = heads.slice(1, queries + keys, keys)
    if caches[0].dtype is not x.dtype:
        k, v = k.cast(caches[0].dtype), v.cast(caches[0].dtype)
    if ring is None:
        k_all, v_all = (c.at[:, :, position : position + seq].set(new)
                        for c, new in zip(caches, (k, v), strict=True))  # fmt: skip
        seen = attention(q, k_all, v_all, length=position + seq, window=config.sliding_window)
    else:
        seen = _attend_to_rings(q, (k, v), caches, position, ring)
    joined = seen.transpose(1, 2).reshape(batch * seq, queries * dim)
    return x + joined @ g.const(layer.output, name=f"blk.{i}.attn_output")


def _attend_to_rings(
    q: Tensor, new: tuple[Tensor, Tensor], caches: tuple[Tensor, Tensor], position: Sym, ring: Ring
) -> Tensor:
    """Attention to what is in view of the rings once they hold the new rows."""
    start = q.graph.apply(SymValue((), i64, as_dim(position)))
    k_all, v_all = (
        cache.write_slice_rotating(rows, 2, start, cache.shape[2], ring.sinks)
        for cache, rows in zip(caches, new, strict=True)
    )
    length = position + q.shape[2]
    return ring_attention(q, k_all, v_all, length=length, window=ring.window, sinks=ring.sinks)


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
        cos, sin = self._tables
        if start + n > len(cos):
            # Doubling keeps the cost per token constant on average.
            size = max(256, 2 * len(cos), start + n)
            angles = np.arange(size, dtype=np.float64)[:, None] * self._inv_freq
            cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
            self._tables = cos, sin
        return cos[start : start + n], sin[start : start + n]
