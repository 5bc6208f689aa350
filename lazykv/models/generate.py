"""Generation: prefill, then one held-plan step per token, as a stream of text pieces."""

from collections.abc import Iterable, Iterator
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from lazykv.errors import RangeError, ShapeError
from lazykv.kv.pairs import KvPairCache
from lazykv.kv.rows import count
from lazykv.models.checks import check_context, of_kind
from lazykv.models.model import LlamaModel
from lazykv.models.sampling import Sampler, StopStrings
from lazykv.sessions.context import InferenceContext


class Piece(str):
    """Text that one token made visible (it may be empty), and the token's `id`.

    `finish_reason` is None but on the last piece: ``"stop"`` (an end token or a stop string),
    ``"length"`` (`max_new_tokens`) or ``"capacity"`` (the cache is full).
    """

    id: int
    finish_reason: str | None

    def __new__(cls, text: str, id: int, finish_reason: str | None = None) -> "Piece":
        piece = super().__new__(cls, text)
        piece.id = id
        piece.finish_reason = finish_reason
        return piece


class Reply:
    """What follows one prompt: chooses tokens from logits, gives them out as pieces and ends.

    `prompt` are its ids, i64 ``[n]``. All arguments are those of `generate` and are checked here,
    in the name of `who`; where the logits come from is the caller's matter.
    """

    def __init__(
        self, who: str, model: LlamaModel, prompt: str | Iterable[SupportsIndex],
        max_new_tokens: SupportsIndex, temperature: float = 0, top_k: int | None = None,
        top_p: float | None = None, seed: int | None = None,
        stop: str | Iterable[str] | None = None,
    ) -> None:  # fmt: skip
        tokenizer = of_kind(who, model, LlamaModel, "a LlamaModel").tokenizer
        if isinstance(prompt, str):
            prompt = tokenizer.with_bos(tokenizer.encode(prompt))
        self.prompt = model.check_tokens(who, prompt)
        if not self.prompt.size:
            raise ShapeError(f"{who}: got an empty prompt, need at least one token")
        self.max_new_tokens = count(who, "max_new_tokens", max_new_tokens, 1)
        self._sampler = Sampler(temperature, top_k, top_p, seed)
        self._stops = StopStrings(() if stop is None else stop)
        self._text = tokenizer.stream(skip_special=True)
        self._ends = frozenset(tokenizer.eos_ids)
        self._made = 0

    def next(self, logits: NDArray[np.float32], *, full: bool) -> Piece:
        """The piece of the token chosen from `logits` ``[vocab]``. With a finish reason it is the
        last; `full` says that there is no row for this token, so none can follow it."""
        token = self._sampler(logits)
        self._made += 1
        visible = self._stops.push(self._text.push(token))
        reason = self._finish_reason(token, full)
        if reason is None:
            return Piece(visible, token)
        if not self._stops.stopped:
            visible += self._stops.push(self._text.finish())
            visible += "" if self._stops.stopped else self._stops.finish()
        return Piece(visible, token, "stop" if self._stops.stopped else reason)

    def _finish_reason(self, token: int, full: bool) -> str | None:
        if token in self._ends or self._stops.stopped:
            return "stop"
        if self._made == self.max_new_tokens:
            return "length"
        return "capacity" if full else None


def generate(
    model: LlamaModel, prompt: str | Iterable[SupportsIndex], max_new_tokens: SupportsIndex = 128,
    temperature: float = 0, top_k: int | None = None, top_p: float | None = None,
    seed: int | None = None, stop: str | Iterable[str] | None = None, *,
    max_seq_len: SupportsIndex | None = None, cache: KvPairCache | None = None,
    ctx: InferenceContext | None = None,
) -> Iterator[Piece]:  # fmt: skip
    """Yield one `Piece` per generated token; joined they are the generated text.

    `prompt` is text or token ids. Temperature 0 is greedy. Without `cache` one is made, as large as
    the prompt and `max_new_tokens` need (at most `max_seq_len`, by default the model's context).
    Special tokens are left out of the text; `stop` strings end it and are left out too. Arguments
    are checked by the call, before the first token is asked for.
    """
    reply = Reply(
        "generate", model, prompt, max_new_tokens, temperature, top_k, top_p, seed, stop
    )  # fmt: skip
    check_context("generate", ctx)
    n = len(reply.prompt)
    if cache is None:
        limit = model.config.context_length
        if max_seq_len is not None:
            limit = count("generate", "max_seq_len", max_seq_len, 1)
        if n > limit:
            raise RangeError(f"generate: got a prompt of {n} tokens, need <= capacity {limit}")
        # The last token's row is never needed, so the budget counts one less.
        cache = model.new_cache(min(limit, n + reply.max_new_tokens - 1))
    else:
        model.check_single("generate", cache)
        model.check_room("generate", cache, n)
    return _stream(model, reply, cache, ctx)


def _stream(
    model: LlamaModel, reply: Reply, cache: KvPairCache, ctx: InferenceContext | None
) -> Iterator[Piece]:
    logits = model.prefill(reply.prompt, cache, ctx)
    while True:
        piece = reply.next(logits, full=cache.cached_len == cache.max_seq_len)
        yield piece
        if piece.finish_reason is not None:
            return
        logits = model.decode_step(piece.id, cache, ctx)
