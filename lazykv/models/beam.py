"""Beam search on a batched cache: the prompt is computed once, then repeated and reordered."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from lazykv.errors import ShapeError
from lazykv.kv.rows import count
from lazykv.models.checks import of_kind
from lazykv.models.model import LlamaModel


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation (an end token included, if one came) and the sum of its log-probabilities."""

    ids: tuple[int, ...]
    log_probability: float


def beam_search(
    model: LlamaModel, ids: Iterable[SupportsIndex], *, beams: SupportsIndex = 4,
    max_new_tokens: SupportsIndex = 32, eos_ids: Iterable[SupportsIndex] = (),
) -> list[Beam]:  # fmt: skip
    """The `beams` best continuations found, best first.

    A beam that meets one of `eos_ids` is finished and keeps its place among the best. Ties go to
    the earlier beam and the lower id, so the result is deterministic.
    """
    who = "beam_search"
    of_kind(who, model, LlamaModel, "a LlamaModel")
    tokens, ends = model.check_tokens(who, ids), frozenset(model.check_tokens(who, eos_ids))
    if not tokens.size:
        raise ShapeError(f"{who}: got an empty prompt, need at least one token")
    width, budget = count(who, "beams", beams, 1), count(who, "max_new_tokens", max_new_tokens, 1)
    cache = model.full_cache(tokens.size + budget)
    logits = model.prefill(tokens.tolist(), cache)[None]
    live, done = [Beam((), 0.0)], list[Beam]()
    for step in range(budget):
        parents, grown = _extend(live, logits, width)
        kept = [n for n, b in enumerate(grown) if b.ids[-1] not in ends]
        done += [b for b in grown if b.ids[-1] in ends]
        live = [grown[n] for n in kept]
        full = sorted(done, key=_worst_last)[:width]
        if not live or step == budget - 1:
            break
        if len(full) == width and full[-1].log_probability >= live[0].log_probability:
            break  # no live beam can still get among the best
        cache.select([parents[n] for n in kept])
        logits = np.atleast_2d(model.decode_step(_one_or_many([b.ids[-1] for b in live]), cache))
    return sorted([*done, *live], key=_worst_last)[:width]


def _extend(
    live: list[Beam], logits: NDArray[np.float32], beams: int
) -> tuple[list[int], list[Beam]]:
    """The best continuations by one token, and which live beam each continues."""
    scores = _log_softmax(logits) + np.array([b.log_probability for b in live])[:, None]
    best = np.argsort(-scores, axis=None, kind="stable")[:beams]
    rows, tokens = np.unravel_index(best, scores.shape)
    grown = [
        Beam((*live[r].ids, int(t)), float(scores[r, t])) for r, t in zip(rows, tokens, strict=True)
    ]
    return [int(r) for r in rows], grown


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    shifted: NDArray[np.float64] = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return shifted


def _one_or_many(tokens: list[int]) -> int | list[int]:
    return tokens[0] if len(tokens) == 1 else tokens


def _worst_last(beam: Beam) -> float:
    return -beam.log_probability
