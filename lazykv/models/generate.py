"""Generation: prefill, then one held-plan step per token, as a stream of text pieces."""

from collections.abc import Iterable, Iterator
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from lazykv.errors import RangeError, ShapeError
from lazykv.kv.pairs import KvPairCache
from lazykv.kv.rows import count
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
    tokenizer = model.tokenizer
    if isinstance(prompt, str):
        prompt = tokenizer.with_bos(tokenizer.encode(prompt))
    ids = model.check_tokens("generate", prompt)
    if not ids.size:
        raise ShapeError("generate: got an empty prompt, need at least one token")
    budget = count("generate", "max_new_tokens", max_new_tokens, 1)
    sampler = Sampler(temperature, top_k, top_p, seed)
    stops = StopStrings(() if stop is None else stop)
    if cache is None:
        limit = model.config.context_length
        if max_seq_len is not None:
            limit = count("generate", "max_seq_len", max_seq_len, 1)
        if len(ids) > limit:
            raise RangeError(
                f"generate: got a prompt of {len(ids)} tokens, need <= capacity {limit}"
            )
        # The last token's row is never needed, so the budget counts one less.
        cache = model.new_cache(min(limit, len(ids) + budget - 1))
    else:
        model.check_room("generate", cache, len(ids))
    return _stream(model, ids, budget, sampler, stops, cache, ctx)


def _stream(
    model: LlamaModel, ids: NDArray[np.int64], budget: int, sampler: Sampler,
    stops: StopStrings, cache: KvPairCache, ctx: InferenceContext | None,
) -> Iterator[Piece]:  # fmt: skip
    text = model.tokenizer.stream(skip_special=True)
    ends = frozenset(model.tokenizer.eos_ids)
    logits = model.prefill(ids, cache, ctx)
    for made in range(1, budget + 1):
        token = sampler(logits)
        visible = stops.push(text.push(token))
        reason = _finish_reason(token, ends, stops, made, budget, cache)
        if reason is not None:
            if not stops.stopped:
                visible += stops.push(text.finish())
                visible += "" if stops.stopped else stops.finish()
            yield Piece(visible, token, "stop" if stops.stopped else reason)
            return
        yield Piece(visible, token)
        logits = model.decode_step(token, cache, ctx)


def _finish_reason(
    token: int, ends: frozenset[int], stops: StopStrings, made: int, budget: int, cache: KvPairCache
) -> str | None:
    if token in ends or stops.stopped:
        return "stop"
    if made == budget:
        return "length"
    if cache.cached_len == cache.max_seq_len:
        return "capacity"
    return None
