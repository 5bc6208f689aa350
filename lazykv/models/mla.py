"""A small DeepSeek-V2-type decoder: multi-head latent attention over a `LatentKvCache`.

The cache holds, per token and layer, one normalized latent ``[R]`` and one rotated key ``[P]`` for
all heads. Keys and values are never expanded: their up-projections are absorbed into the queries
and the output (DeepSeek-V2, arXiv:2405.04434, section 2.1). Queries are not compressed and the
feed-forward block is dense, as in the first layer of DeepSeek-V2-Lite.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import ClassVar, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from lazykv.device import DeviceLike
from lazykv.dtypes import DType, DTypeLike, f32, i64
from lazykv.errors import ModelFormatError, RangeError, ShapeError
from lazykv.functions import latent_attention
from lazykv.graph import Graph, Tensor
from lazykv.ids import ModelInstanceId
from lazykv.kv.latent import LatentKvCache
from lazykv.kv.rows import count
from lazykv.models.checks import Unique, no_storage, of_kind, row_dtype, token_ids
from lazykv.models.llama import StepGraph
from lazykv.models.weights import frozen
from lazykv.sessions.context import InferenceContext
from lazykv.sessions.decode import DecodeSession
from lazykv.storage import Storage
from lazykv.symbols import Sym

MAX_CHUNK = 256
"""Tokens of one prefill step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """What the graph depends on, apart from the weights.

    R is `kv_lora_rank`, N `qk_nope_head_dim`, P `qk_rope_head_dim`, V `v_head_dim`, H `n_heads`.
    Rotary pairs are neighbours. Raises ModelFormatError naming the field and its value.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 1):
                raise ModelFormatError(
                    f"MlaConfig: got {field.name} {value!r}, need a whole number >= 1"
                )
            if field.type is float and not (type(value) is float and 0 < value < math.inf):
                raise ModelFormatError(
                    f"MlaConfig: got {field.name} {value!r}, need a finite float above 0"
                )
        if self.qk_rope_head_dim % 2:
            raise ModelFormatError(
                f"MlaConfig: got qk_rope_head_dim {self.qk_rope_head_dim}, need an even number "
                "(rotary pairs)"
            )

    @property
    def slot_trailing(self) -> tuple[tuple[int], tuple[int]]:
        """One row of the cache: the latent and the rotary key."""
        return (self.kv_lora_rank,), (self.qk_rope_head_dim,)

    @property
    def query_width(self) -> int:
        """Elements of all heads' queries of one token."""
        return self.n_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)


@dataclass(frozen=True, slots=True)
class MlaLayerWeights:
    """One block. `down` is ``[hidden, H (N + P) + R + P]``: queries, latent and rotary key from one
    product. Up-projections of the latent are per head, as absorption wants them: `k_up` ``[H, N,
    R]``, `v_up` ``[H, R, V]``. `output` is ``[H V, hidden]``, `gate_up` ``[hidden, 2 inner]``,
    `ffn_down` ``[inner, hidden]``; norms are ``[hidden]``, `latent_norm` ``[R]``."""

    attn_norm: Storage
    down: Storage
    latent_norm: Storage
    k_up: Storage
    v_up: Storage
    output: Storage
    ffn_norm: Storage
    gate_up: Storage
    ffn_down: Storage


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """All weights: `embedding` ``[vocab, hidden]``, `head` ``[hidden, vocab]``, `norm`."""

    embedding: Storage
    head: Storage
    norm: Storage
    layers: tuple[MlaLayerWeights, ...]


def random_weights(config: MlaConfig, seed: int, scale: float = 0.05) -> MlaWeights:
    """Normal matrices of a standard deviation `scale`, and gains in 0.5..1.5."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> Storage:
        return frozen(rng.standard_normal(shape, np.float32) * np.float32(scale))

    def gains(n: int) -> Storage:
        return frozen(rng.uniform(0.5, 1.5, n).astype(np.float32))

    c, hidden, inner = config, config.hidden_size, config.intermediate_size
    rank, rope, heads = c.kv_lora_rank, c.qk_rope_head_dim, c.n_heads
    layers = tuple(
        MlaLayerWeights(
            attn_norm=gains(hidden), down=matrix(hidden, c.query_width + rank + rope),
            latent_norm=gains(rank), k_up=matrix(heads, c.qk_nope_head_dim, rank),
            v_up=matrix(heads, rank, c.v_head_dim), output=matrix(heads * c.v_head_dim, hidden),
            ffn_norm=gains(hidden), gate_up=matrix(hidden, 2 * inner),
            ffn_down=matrix(inner, hidden),
        )
        for _ in range(c.n_layers)
    )  # fmt: skip
    return MlaWeights(
        matrix(c.vocab_size, hidden), matrix(hidden, c.vocab_size), gains(hidden), layers
    )


def build_step(
    config: MlaConfig, weights: MlaWeights, *, seq: int, capacity: int, kv_dtype: DType
) -> StepGraph:
    """The step of `seq` tokens over caches of `capacity` rows; weights are taken by reference."""
    g = Graph()
    ids = g.placeholder((seq,), i64, "ids")
    half = (seq, config.qk_rope_head_dim // 2)
    cos, sin = g.placeholder(half, f32, "cos"), g.placeholder(half, f32, "sin")
    position = Sym("cached_len", 0, capacity - seq)
    x = g.const(weights.embedding, name="embedding").take(ids)
    kv_nodes = []
    for i, layer in enumerate(weights.layers):
        w = {
            name: g.const(getattr(layer, name), name=f"blk.{i}.{name}") for name in layer.__slots__
        }
        latent = g.placeholder((capacity, config.kv_lora_rank), kv_dtype, f"blk.{i}.latent")
        rope = g.placeholder((capacity, config.qk_rope_head_dim), kv_dtype, f"blk.{i}.rope")
        kv_nodes.append((latent, rope))
        x = x + _attention(config, w, x, (cos, sin), (latent, rope), position)
        x = x + _feed_forward(config, w, x)
    norm, head = g.const(weights.norm, name="norm"), g.const(weights.head, name="head")
    last = x.slice(0, seq - 1, 1).rms_norm(norm, config.rms_eps)
    logits = (last @ head).reshape(config.vocab_size)
    return StepGraph(g, logits, tuple(kv_nodes), {"ids": ids, "cos": cos, "sin": sin}, position)


def _attention(
    config: MlaConfig, w: dict[str, Tensor], x: Tensor, turn: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor], position: Sym,
) -> Tensor:  # fmt: skip
    """output(v_up(latent attention)), latent and rotary key written at `position` first."""
    seq, heads = x.shape[0], config.n_heads
    nope, rope, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    both = x.rms_norm(w["attn_norm"], config.rms_eps) @ w["down"]
    queries = both.slice(1, 0, config.query_width).reshape(seq, heads, nope + rope).transpose(0, 1)
    # q (k_up c) = (q k_up) c: queries move to the latent's space, the cached rows stay as they are.
    q_latent = queries.slice(2, 0, nope) @ w["k_up"]
    q_rope = queries.slice(2, nope, rope).rope(*turn, interleaved=True)
    latent = both.slice(1, config.query_width, rank).rms_norm(w["latent_norm"], config.rms_eps)
    key = both.slice(1, config.query_width + rank, rope).rope(*turn, interleaved=True)
    latents, keys = caches
    if latents.dtype is not x.dtype:
        latent, key = latent.cast(latents.dtype), key.cast(keys.dtype)
    seen = latent_attention(
        q_latent.unsqueeze(0), q_rope.unsqueeze(0),
        latents.at[position : position + seq].set(latent),
        keys.at[position : position + seq].set(key),
        length=position + seq, scale=1 / math.sqrt(nope + rope),
    )  # fmt: skip
    values = seen.squeeze(0) @ w["v_up"]
    return values.transpose(0, 1).reshape(seq, heads * config.v_head_dim) @ w["output"]


def _feed_forward(config: MlaConfig, w: dict[str, Tensor], x: Tensor) -> Tensor:
    """down(silu(gate) * up) (SwiGLU: Shazeer, 2020, arXiv:2002.05202)."""
    inner = config.intermediate_size
    both = x.rms_norm(w["ffn_norm"], config.rms_eps) @ w["gate_up"]
    return (both.slice(1, 0, inner).silu() * both.slice(1, inner, inner)) @ w["ffn_down"]


class MlaModel(Unique):
    """A decoder and its weights, shared by every cache made by `new_cache`."""

    instead: ClassVar[str] = "MlaModel(model.config, model.weights) shares the weights"

    def __init__(self, config: MlaConfig, weights: MlaWeights) -> None:
        self.config = of_kind("MlaModel", config, MlaConfig, "an MlaConfig")
        self.weights = of_kind("MlaModel", weights, MlaWeights, "MlaWeights")
        self.instance_id = ModelInstanceId()
        # Rotary frequencies reach the graph as bound tables, so theta is no part of the key.
        names = [f.name for f in fields(config) if f.name != "rope_theta"]
        structure = tuple(getattr(config, name) for name in names)
        self.model_key: tuple[object, ...] = ("mla", self.instance_id, structure)
        pairs = np.arange(0, config.qk_rope_head_dim, 2, dtype=np.float64)
        self._inv_freq = config.rope_theta ** (-pairs / config.qk_rope_head_dim)
        self._ctx = InferenceContext("cpu")

    def new_cache(
        self, max_seq_len: SupportsIndex, dtype: DTypeLike | None = None,
        device: DeviceLike | None = None,
    ) -> LatentKvCache:  # fmt: skip
        """A cache of this model's geometry: a latent and a rotary key per token and layer; f32 (or
        f16, bf16) on the CPU unless told otherwise."""
        c = self.config
        return LatentKvCache.with_capacity(
            c.n_layers, max_seq_len, c.slot_trailing, row_dtype("new_cache", dtype),
            "cpu" if device is None else device,
        )  # fmt: skip

    def prefill(self, ids: Iterable[SupportsIndex], cache: LatentKvCache) -> NDArray[np.float32]:
        """Run a prompt (or its continuation) into the cache; logits ``[vocab]`` of the last token.

        It runs in chunks whose lengths are powers of two, so that a handful of plans serves every
        prompt. Raises before anything is written if the prompt is empty, holds an unknown id or
        does not fit.
        """
        tokens = token_ids("prefill", ids, self.config.vocab_size)
        if not tokens.size:
            raise ShapeError("prefill: got an empty prompt, need at least one token")
        start = self._check_room("prefill", cache, tokens.size)
        logits, done = None, 0
        try:
            while done < tokens.size:
                seq = min(MAX_CHUNK, 1 << ((tokens.size - done).bit_length() - 1))
                logits = self._run(tokens[done : done + seq], cache)
                done += seq
        except BaseException:
            cache.truncate_to(start)
            raise
        assert logits is not None, "a prompt that is not empty ran"
        return logits

    def decode_step(self, token: SupportsIndex, cache: LatentKvCache) -> NDArray[np.float32]:
        """Append one token and return the logits ``[vocab]`` that follow it. The plan is made once
        and held with the cache."""
        tokens = token_ids("decode_step", (token,), self.config.vocab_size)
        self._check_room("decode_step", cache, 1)
        return self._run(tokens, cache)

    def session_for(self, cache: LatentKvCache, seq: int = 1) -> DecodeSession:
        """The held session for steps of `seq` tokens, planned anew if the held one is not valid."""
        of_kind("session_for", cache, LatentKvCache, "a LatentKvCache; use new_cache")
        seq = count("session_for", "seq", seq, 1)
        slot = ("mla", self.instance_id, seq)
        held: DecodeSession | None = cache.held.get(slot)
        if held is None or not held.is_valid_for(cache, seq=seq, model_key=self.model_key):
            if held is not None:
                held.retire()
            capacity = cache.max_seq_len
            assert capacity is not None, "a latent cache has a fixed capacity"
            step = build_step(
                self.config, self.weights, seq=seq, capacity=capacity, kv_dtype=cache.dtype
            )
            held = cache.held[slot] = DecodeSession.build(
                self._ctx, step.logits, kv=cache, kv_nodes=step.kv_nodes, bound=step.bound,
                seq=seq, model_key=self.model_key,
            )  # fmt: skip
        return held

    def _run(self, tokens: NDArray[np.int64], cache: LatentKvCache) -> NDArray[np.float32]:
        seq, start = len(tokens), len(cache)
        session = self.session_for(cache, seq)
        angles = np.arange(start, start + seq)[:, None] * self._inv_freq
        turn = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
        (position,) = session.plan.symbols
        logits = session.step({"ids": tokens, **turn}, {position: start})
        for layer in range(cache.n_layers()):
            for slot in range(len(cache.slot_trailing)):
                cache.bump_version(layer, slot)
        cache.cached_len = start + seq
        return logits

    def _check_room(self, who: str, cache: LatentKvCache, n: int) -> int:
        """The live length of a cache of this model's geometry that has room for n more rows, and
        no open step, whose rows would be at the same place."""
        of_kind(who, cache, LatentKvCache, "a LatentKvCache; use new_cache")
        c = self.config
        have, need = (cache.n_layers(), cache.slot_trailing), (c.n_layers, c.slot_trailing)
        if have != need:
            raise ShapeError(
                f"{who}: got a cache of {have[0]} layers with rows {have[1]}, need {need[0]} "
                f"layers with rows {need[1]}; use new_cache"
            )
        absent = [cache.slot_storage(i, 0) is None for i in range(c.n_layers)]
        if any(absent):
            raise no_storage(who, all(absent))
        row_dtype(who, cache.dtype)
        cache.check_no_open_step(who)
        start, capacity = len(cache), cache.max_seq_len
        if capacity is None or start + n > capacity:
            raise RangeError(
                f"{who}: got {n} tokens at length {start}, need {start + n} <= capacity {capacity}"
            )
        return start
