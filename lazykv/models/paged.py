"""A model over a paged pool: many sequences at their own lengths, one plan per size of batch."""

from collections.abc import Iterable, Sequence
from typing import ClassVar, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from lazykv.errors import RangeError, ShapeError
from lazykv.ids import SessionHandle
from lazykv.kv.pool import DeviceKvPool
from lazykv.kv.rows import count
from lazykv.models.cache_rows import PagedRows
from lazykv.models.checks import Unique, of_kind, row_dtype
from lazykv.models.llama import build_step
from lazykv.models.model import MAX_CHUNK, LlamaModel
from lazykv.pages.steps import as_sessions
from lazykv.sessions.context import InferenceContext
from lazykv.sessions.paged import PagedDecodeSession


class PagedDecoder(Unique):
    """Runs a model over the sessions of a pool. Plans are made at first use and held.

    A step of n sessions runs the plan of the next power of two; prompts run one session at a time,
    in chunks whose lengths are powers of two. `max_batch` and `max_context` (tokens of the longest
    sequence; None: all the pool can hold) are sizes that plans bake. One thread at a time.
    """

    instead: ClassVar[str] = "several decoders of one model may share a pool"

    def __init__(
        self, model: LlamaModel, pool: DeviceKvPool, *, max_batch: SupportsIndex = 8,
        max_context: SupportsIndex | None = None,
    ) -> None:  # fmt: skip
        self.model = of_kind("PagedDecoder", model, LlamaModel, "a LlamaModel")
        self.pool = of_kind("PagedDecoder", pool, DeviceKvPool, "a DeviceKvPool; use new_pool")
        row_dtype("PagedDecoder", pool.dtype)
        self.max_batch = count("PagedDecoder", "max_batch", max_batch, 1)
        g, c = pool.geometry, model.config
        if (g.n_layers, g.n_kv_heads, g.head_dim) != (c.n_layers, c.n_kv_heads, c.head_dim):
            raise ShapeError(
                f"PagedDecoder: got a pool of {g.n_layers} layers with {g.n_kv_heads} heads of "
                f"{g.head_dim}, need {c.n_layers} with {c.n_kv_heads} of {c.head_dim}; "
                "use model.new_pool"
            )
        most = g.num_blocks * g.block_size
        self.max_context = (
            most if max_context is None else count("PagedDecoder", "max_context", max_context, 1)
        )
        self._max_blocks = min(g.num_blocks, g.blocks_for(self.max_context))
        self._ctx = InferenceContext(pool.device_location())
        self._held: dict[tuple[int, int], PagedDecodeSession] = {}
        self.tokens_run = 0
        pool.follow_model(model.present_key)

    def prefill(self, session: SessionHandle, ids: Iterable[SupportsIndex]) -> NDArray[np.float32]:
        """Append a prompt (or its continuation) to a session; logits ``[vocab]`` of its last token.

        Raises before anything runs if the prompt is empty, holds an unknown id, or does not fit the
        pool; a failure midway rewinds the session.
        """
        tokens = self.model.check_tokens("prefill", ids)
        if not tokens.size:
            raise ShapeError("prefill: got an empty prompt, need at least one token")
        start = self.check_room("prefill", session, tokens.size)
        self.pool.check_append("prefill", session, tokens.size)
        done = 0
        try:
            while True:
                seq = chunk_of(tokens.size - done)
                logits = self._run([session], tokens[done : done + seq].reshape(1, seq))
                done += seq
                if done == tokens.size:
                    first: NDArray[np.float32] = logits[0]
                    return first
        except BaseException:
            self.pool.truncate(session, start)
            raise

    def decode(
        self, sessions: Iterable[SessionHandle], tokens: Iterable[SupportsIndex]
    ) -> NDArray[np.float32]:
        """Append one token to each of several sessions; logits ``[n, vocab]`` that follow them.

        Every row equals what the session alone would give up to the rounding of matrix products.
        """
        ids, given = self.model.check_tokens("decode", tokens), as_sessions("decode", sessions)
        if len(ids) != len(given) or not 0 < len(ids) <= self.max_batch:
            raise ShapeError(
                f"decode: got {len(ids)} tokens for {len(given)} sessions, need one each for "
                f"1..{self.max_batch}"
            )
        for session in given:
            self.check_room("decode", session, 1)
        return self._run(given, ids.reshape(-1, 1))

    def session_for(self, n: int, seq: int = 1) -> PagedDecodeSession:
        """The held plan for steps of n sequences by `seq` tokens, made anew if it is not valid."""
        seq, most = count("session_for", "seq", seq, 1), count("session_for", "n", n, 1)
        size = 1 << (most - 1).bit_length()
        key = self.model.model_key
        held = self._held.get((size, seq))
        if held is None or not held.is_valid_for(self.pool, seq=seq, model_key=key):
            if held is not None:
                held.retire()
            held = self._held[size, seq] = self._plan(size, seq)
        return held

    @property
    def plans(self) -> tuple[PagedDecodeSession, ...]:
        """The plans held now."""
        return tuple(self._held.values())

    def check_room(self, who: str, session: SessionHandle, n: int) -> int:
        """The tokens of a session that may take n more."""
        self.pool.check_append(who, session, 0)
        start = self.pool.filled_tokens(session)
        if start + n > self.max_context:
            raise RangeError(
                f"{who}: got {n} tokens at length {start}, need {start + n} <= max_context "
                f"{self.max_context}"
            )
        return start

    def _plan(self, batch: int, seq: int) -> PagedDecodeSession:
        g = self.pool.geometry
        step = build_step(
            self.model.config, self.model.weights_for(self.pool), seq=seq, batch=batch,
            rows=PagedRows(g.num_blocks, g.block_size, self._max_blocks), kv_dtype=self.pool.dtype,
        )  # fmt: skip
        return PagedDecodeSession.build(
            self._ctx, step.logits, pool=self.pool, kv_nodes=step.kv_nodes, bound=step.bound,
            model_key=self.model.model_key,
        )  # fmt: skip

    def _run(
        self, sessions: Sequence[SessionHandle], tokens: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """One step of tokens ``[n, seq]``."""
        self.pool.follow_model(self.model.present_key)  # it may have been handed over
        n, seq = tokens.shape
        held = self.session_for(n, seq)

        def data(starts: NDArray[np.int64]) -> dict[str, NDArray[np.generic]]:
            cos, sin = self.model.rope.at(starts[:, None] + np.arange(seq))
            return {"ids": tokens.reshape(-1), "cos": cos, "sin": sin}

        logits: NDArray[np.float32] = held.step(sessions, data)
        self.tokens_run += tokens.size
        return logits

    def __repr__(self) -> str:
        return f"PagedDecoder({self.model!r}, {self.pool!r}, {len(self._held)} plans)"


def chunk_of(left: int) -> int:
    """Tokens of the next prefill step: the largest power of two within what is left."""
    return 1 << (min(MAX_CHUNK, left).bit_length() - 1)
