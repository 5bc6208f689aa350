"""LlamaModel: weights, tokenizer and the held plans that decode with them."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from lazykv.device import DeviceLike, DeviceLocation, generation
from lazykv.device import device as find_device
from lazykv.dtypes import DTypeLike
from lazykv.errors import GraphError, ModelFormatError, RangeError, ShapeError
from lazykv.ids import ModelInstanceId
from lazykv.kv.block_store import BlockStore
from lazykv.kv.cache import KvCache
from lazykv.kv.layer import KvSlot
from lazykv.kv.pairs import KvPairCache
from lazykv.kv.pool import DeviceKvPool
from lazykv.kv.rows import count
from lazykv.kv.sliding import SlidingKvCache
from lazykv.models.cache_rows import CacheRows, LinearRows, RingRows
from lazykv.models.checks import (
    Unique,
    check_cache,
    check_context,
    no_storage,
    of_kind,
    row_dtype,
    token_ids,
)
from lazykv.models.config import LlamaConfig
from lazykv.models.llama import RopeTable, StepGraph, build_step
from lazykv.models.weights import LlamaWeights, place_weights
from lazykv.pages.geometry import KvGeometry
from lazykv.sessions.captured import CapturedDecodeSession
from lazykv.sessions.context import InferenceContext
from lazykv.sessions.decode import DecodeSession

if TYPE_CHECKING:
    from lazykv.models.tokenizer import Tokenizer

MAX_CHUNK = 256
"""Tokens of one prefill step: large enough for matrix products to pay, small enough that
intermediates stay in the caches."""


HELD_PLANS = 16
"""Plans that a cache holds for its models; the least recently used goes first. More than the nine
chunks of a prompt need, with some for `score`."""


_STRUCTURE = (
    "n_layers", "hidden_size", "intermediate_size", "n_heads", "n_kv_heads", "head_dim",
    "vocab_size", "rms_eps", "rope_interleaved", "tied_head", "sliding_window",
)  # fmt: skip
"""Fields of the configuration that shape the graph. Rotary frequencies are not among them: they
reach it as bound tables."""


class LlamaModel(Unique):
    """A loaded Llama-type model. Weights are shared by every cache and session of this object.

    To change them, assign `weights` and raise `weights_epoch`: plans of the old are then stale.
    """

    instead: ClassVar[str] = "LlamaModel(model.config, model.weights) shares the weights"

    def __init__(
        self, config: LlamaConfig, weights: LlamaWeights, *, tokenizer: "Tokenizer | None" = None,
        chat_template: str | None = None, name: str = "llama",
    ) -> None:  # fmt: skip
        self.config = of_kind("LlamaModel", config, LlamaConfig, "a LlamaConfig")
        self.weights = of_kind("LlamaModel", weights, LlamaWeights, "LlamaWeights")
        self.name = name
        self.chat_template = chat_template
        self.instance_id = ModelInstanceId()
        self.weights_epoch = 0
        self._key: tuple[object, ...] | None = None
        self._placed: dict[tuple[tuple[DeviceLocation, int], ...], LlamaWeights] = {}
        self._placed_epoch = 0
        self._tokenizer = tokenizer
        self.rope = RopeTable(config)

    @property
    def tokenizer(self) -> "Tokenizer":
        if self._tokenizer is None:
            raise ModelFormatError(f"model {self.name!r}: got no vocabulary in its file, need one")
        return self._tokenizer

    @property
    def model_key(self) -> tuple[object, ...]:
        """What a held plan bakes about the model: family, instance, weights epoch, structure."""
        if self._key is None or self._key[2] != self.weights_epoch:
            structure = tuple(getattr(self.config, name) for name in _STRUCTURE)
            self._key = ("llama", self.instance_id, self.weights_epoch, structure)
        return self._key

    def present_key(self) -> tuple[object, ...]:
        """`model_key`, for those who ask again later."""
        return self.model_key

    def new_cache(
        self, max_seq_len: SupportsIndex, dtype: DTypeLike | None = None,
        device: DeviceLike | Sequence[DeviceLike] | None = None,
    ) -> KvPairCache:  # fmt: skip
        """A cache of this model's geometry; f32 (or f16, bf16) on the CPU unless told otherwise.

        With one device per layer the model decodes as a pipeline: each layer runs where its rows
        are. A model with a sliding window gets a `SlidingKvCache`, unless `max_seq_len` is within
        the window; its `rollback_slack` lets prompts run in chunks as long as the window, at most
        `MAX_CHUNK`.
        """
        c, most = self.config, count("new_cache", "max_seq_len", max_seq_len, 1)
        dt = row_dtype("new_cache", dtype)
        if c.sliding_window is None or most <= c.sliding_window:
            return self.full_cache(most, dt, device)
        return SlidingKvCache.with_capacity(
            c.n_layers, c.n_kv_heads, c.head_dim, c.sliding_window,
            dt, "cpu" if device is None else device,
            rollback_slack=min(c.sliding_window, MAX_CHUNK) - 1, max_seq_len=most,
        )  # fmt: skip

    def full_cache(
        self, max_seq_len: SupportsIndex, dtype: DTypeLike | None = None,
        device: DeviceLike | Sequence[DeviceLike] | None = None,
    ) -> KvCache:  # fmt: skip
        """A cache that keeps every row, also those that a sliding window has left behind."""
        c = self.config
        return KvCache.with_capacity(
            c.n_layers, c.n_kv_heads, c.head_dim, max_seq_len,
            row_dtype("full_cache", dtype), "cpu" if device is None else device,
        )  # fmt: skip

    def new_pool(
        self, num_blocks: SupportsIndex, block_size: SupportsIndex = 16,
        dtype: DTypeLike | None = None, device: DeviceLike | None = None, *,
        store: BlockStore | None = None,
    ) -> DeviceKvPool:  # fmt: skip
        """A paged pool of this model's geometry; f32 (or f16, bf16) on the CPU unless told
        otherwise.

        `PagedDecoder` runs the model over it. Evicted blocks go to `store`.
        """
        c, dt = self.config, row_dtype("new_pool", dtype)
        geometry = KvGeometry(
            c.n_layers, count("new_pool", "num_blocks", num_blocks, 1),
            count("new_pool", "block_size", block_size, 1), c.n_kv_heads, c.head_dim, dt.itemsize,
        )  # fmt: skip
        pool = DeviceKvPool(geometry, dt, "cpu" if device is None else device, store=store)
        pool.use_model(self.present_key)
        return pool

    def prefill(
        self, ids: Iterable[SupportsIndex], cache: KvPairCache, ctx: InferenceContext | None = None
    ) -> NDArray[np.float32]:
        """Run a prompt (or its continuation) into the cache; logits ``[vocab]`` of the last token.

        The prompt runs in chunks whose lengths are powers of two, so that a handful of plans serves
        every prompt. Raises before anything is written if the prompt is empty, holds an unknown id
        or does not fit, or if the cache has an open step. A failure midway rewinds the cache, or
        leaves the chunks that ran if they have overwritten too much of a ring.
        """
        tokens = self.check_tokens("prefill", ids)
        if not tokens.size:
            raise ShapeError("prefill: got an empty prompt, need at least one token")
        self.check_single("prefill", cache)
        check_context("prefill", ctx)
        with cache.owned("prefill"):
            return self._prefill(tokens, cache, ctx)

    def _prefill(
        self, tokens: NDArray[np.int64], cache: KvPairCache, ctx: InferenceContext | None
    ) -> NDArray[np.float32]:
        """Chunk after chunk; a failure rewinds to where the prompt began."""
        start = self.check_room("prefill", cache, tokens.size)
        done, longest = 0, MAX_CHUNK
        if isinstance(cache, SlidingKvCache):
            longest = min(longest, cache.rollback_slack + 1)
        try:
            while True:
                seq = 1 << (min(longest, tokens.size - done).bit_length() - 1)
                logits = self._run(tokens[done : done + seq], cache, ctx)
                done += seq
                if done == tokens.size:
                    return logits
        except BaseException as e:
            try:
                cache.truncate_to(start)
            except RangeError as kept:
                e.add_note(f"the first {done} tokens stay in the cache: {kept}")
            raise

    def decode_step(
        self, token: SupportsIndex | Iterable[SupportsIndex], cache: KvPairCache,
        ctx: InferenceContext | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """Append one token to the cache and return the logits ``[vocab]`` that follow it.

        With a batched cache, one token per sequence and logits ``[batch, vocab]``. The plan is made
        once and held with the cache (or in `ctx`); `cached_len` moves by one.
        """
        check_cache("decode_step", cache)
        check_context("decode_step", ctx)
        given: Any = (token,) if cache.batch == 1 else token
        tokens = self.check_tokens("decode_step", given)
        if tokens.size != cache.batch:
            raise ShapeError(f"decode_step: got {tokens.size} tokens, need {cache.batch}")
        with cache.owned("decode_step"):
            self.check_room("decode_step", cache, 1)
            return self._run(tokens, cache, ctx)

    def score(self, ids: Iterable[SupportsIndex], cache: KvPairCache) -> NDArray[np.float32]:
        """Append tokens in one step and return the logits ``[n, vocab]`` that follow each of them.

        What a speculative decoder verifies its drafts with: one plan per number of tokens.
        """
        tokens = self.check_tokens("score", ids)
        if not tokens.size:
            raise ShapeError("score: got no tokens, need at least one")
        self.check_single("score", cache)
        with cache.owned("score"):
            self.check_room("score", cache, tokens.size)
            return self._run(tokens, cache, None, every=True)

    def session_for(
        self, cache: KvPairCache, seq: int = 1, ctx: InferenceContext | None = None, *,
        every: bool = False,
    ) -> DecodeSession:  # fmt: skip
        """The held session for steps of `seq` tokens, planned anew if the held one is not valid.

        `every` asks for the logits of all positions.
        """
        check_cache("session_for", cache)
        check_context("session_for", ctx)
        seq = count("session_for", "seq", seq, 1)
        # A context carries one session, the single-token one; other plans stay with the cache.
        if ctx is not None and seq == 1 and not every:
            ctx.refresh(cache, seq=seq, model_key=self.model_key)
            session = ctx.take_decode_session() or self._plan(cache, seq, ctx, every)
            ctx.put_decode_session(session)
            return session
        slot = ("llama", self.instance_id, seq, every)
        held: DecodeSession | None = cache.held.pop(slot, None)
        if held is None or not held.is_valid_for(cache, seq=seq, model_key=self.model_key):
            if held is not None:
                held.retire()
            held = self._plan(cache, seq, ctx, every)
        cache.held[slot] = held
        while len(cache.held) > HELD_PLANS:
            cache.held.pop(next(iter(cache.held))).retire()
        return held

    def step_graph(self, cache: KvPairCache, seq: int = 1, *, every: bool = False) -> StepGraph:
        """The graph that `session_for` plans."""
        rows: CacheRows | None = None
        check_cache("step_graph", cache)
        seq = count("step_graph", "seq", seq, 1)
        if isinstance(cache, SlidingKvCache):
            rows = RingRows(cache.ring_rows, cache.sink_tokens)
        elif cache.max_seq_len is not None:
            rows = LinearRows(cache.max_seq_len, in_memory=captures(cache, seq))
        if rows is None or cache.dtype is None:
            raise GraphError("decode: got a cache without capacity, need one made by new_cache")
        return build_step(
            self.config, self.weights_for(cache), seq=seq, rows=rows, kv_dtype=cache.dtype,
            batch=cache.batch, every_logit=every,
        )  # fmt: skip

    def weights_for(self, cache: KvPairCache | DeviceKvPool) -> LlamaWeights:
        """The weights where the cache's layers are; copies are made once per set of places, and
        again where a backend was replaced."""
        if not isinstance(cache, DeviceKvPool):
            check_cache("weights_for", cache)
        slots = [cache.slot_storage(i, KvSlot.K) for i in range(cache.n_layers())]
        places = tuple(s.location for s in slots if s is not None)
        if len(places) != self.config.n_layers:
            raise GraphError(
                f"weights_for: got a cache of {len(places)} layers with storage, need "
                f"{self.config.n_layers}; use new_cache"
            )
        if self._placed_epoch != self.weights_epoch:
            self._placed.clear()
            self._placed_epoch = self.weights_epoch
        there = tuple((p, generation(p)) for p in places)
        if there not in self._placed:
            for gone in [k for k in self._placed if any(generation(p) != n for p, n in k)]:
                del self._placed[gone]
            self._placed[there] = place_weights(self.weights, places)
        return self._placed[there]

    def _plan(
        self, cache: KvPairCache, seq: int, ctx: InferenceContext | None, every: bool
    ) -> DecodeSession:
        step = self.step_graph(cache, seq, every=every)
        kind = CapturedDecodeSession if captures(cache, seq) else DecodeSession
        # Inputs are bound where the rows are, so that one place runs the whole step.
        place = ctx or InferenceContext(cache.only_location() or "cpu")
        return kind.build(
            place, step.logits, kv=cache, kv_nodes=step.kv_nodes, bound=step.bound,
            seq=seq, model_key=self.model_key,
        )  # fmt: skip

    def _run(
        self, tokens: NDArray[np.int64], cache: KvPairCache, ctx: InferenceContext | None, *,
        every: bool = False,
    ) -> NDArray[np.float32]:  # fmt: skip
        seq, start = len(tokens) // cache.batch, cache.cached_len
        cos, sin = self.rope.rows(start, seq)
        data: dict[str, NDArray[np.generic]] = {"ids": tokens, "cos": cos, "sin": sin}
        # A context's session must not be re-bound to another cache between this and the step.
        with nullcontext() if ctx is None else ctx.owned("decode"):
            session = self.session_for(cache, seq, ctx, every=every)
            if not session.plan.symbols:
                data["position"] = np.array(start)
            try:
                logits = session.step(data, dict.fromkeys(session.plan.symbols, start))
            except BaseException:
                cache.note_written(start + seq)  # some layers may be
                raise
        for layer in range(cache.n_layers()):
            cache.bump_version(layer, KvSlot.K)
            cache.bump_version(layer, KvSlot.V)
        cache.cached_len = start + seq
        return logits

    def check_single(self, who: str, cache: KvPairCache) -> None:
        """Refuse what is no cache, and one of several sequences."""
        check_cache(who, cache)
        if cache.batch != 1:
            raise ShapeError(
                f"{who}: got a cache of {cache.batch} sequences, need one; use repeat() afterwards"
            )

    def check_tokens(self, who: str, ids: Iterable[SupportsIndex]) -> NDArray[np.int64]:
        """Token ids as i64 ``[n]``, all of them in the vocabulary."""
        return token_ids(who, ids, self.config.vocab_size)

    def check_room(self, who: str, cache: KvPairCache, n: int) -> int:
        """The live length of a cache of this model's geometry that has room for n more rows, and
        no open step, whose rows would be at the same place."""
        check_cache(who, cache)
        c = self.config
        have = (cache.n_layers(), cache.n_kv_heads, cache.head_dim)
        if have != (c.n_layers, c.n_kv_heads, c.head_dim):
            raise ShapeError(
                f"{who}: got a cache of {have[0]} layers with {have[1]} heads of {have[2]}, need "
                f"{c.n_layers} layers with {c.n_kv_heads} heads of {c.head_dim}; use new_cache"
            )
        most, start = cache.max_seq_len, cache.cached_len
        if (cache.bounded and most is None) or any(layer is None for layer in cache.layers):
            bare = all(layer is None for layer in cache.layers)
            raise no_storage(who, bare and (most is not None or not cache.bounded))
        row_dtype(who, cache.dtype)
        cache.check_no_open_step(who)
        if isinstance(cache, SlidingKvCache) and cache.window != c.sliding_window:
            raise ShapeError(
                f"{who}: got a cache with window {cache.window}, need {c.sliding_window}; use "
                "new_cache"
            )
        if most is not None and start + n > most:
            raise RangeError(
                f"{who}: got {n} tokens at length {start}, need {start + n} <= capacity {most}"
            )
        return start

    def chat_prompt(self, messages: Iterable[Mapping[str, str]]) -> str:
        """Messages (``role``, ``content``) laid out by the model's own chat template."""
        if self.chat_template is None:
            raise ModelFormatError(
                f"model {self.name!r}: got no chat template in its file, need one"
            )
        # Late, because the template engine comes with the optional `models` extra.
        from lazykv.models.chat import render_chat  # noqa: PLC0415

        t = self.tokenizer
        bos = "" if t.bos_id is None else t.token_text(t.bos_id) or ""
        eos = t.token_text(t.eos_ids[0]) or "" if t.eos_ids else ""
        return render_chat(self.chat_template, messages, bos=bos, eos=eos)

    def __repr__(self) -> str:
        return f"LlamaModel({self.name!r}, {self.config.n_layers} layers, {self.instance_id})"


def captures(cache: KvPairCache, seq: int) -> bool:
    """Whether single-token steps over a cache are captured: its rows are in one place, whose
    backend can."""
    where = cache.only_location()
    if seq != 1 or where is None or isinstance(cache, SlidingKvCache):
        return False
    return find_device(where).backend.capabilities.capture
