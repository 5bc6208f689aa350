"""Speculative decoding: a cheap draft proposes tokens, the model scores them all in one step.

What comes out is distributed exactly as if the model had decoded alone (Leviathan et al., 2023,
arXiv:2211.17192); at temperature 0 it is the model's greedy text. Rejected rows are rewound with
`truncate_to`, which keeps every plan.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from lazykv.errors import DTypeError, ShapeError
from lazykv.kv.pairs import KvPairCache
from lazykv.kv.rows import count
from lazykv.models.checks import Unique, of_kind
from lazykv.models.model import LlamaModel
from lazykv.models.sampling import Sampler

Row = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens, and for each the distribution it was drawn from: ``[vocab]``, or None where
    the draft was certain."""

    tokens: tuple[int, ...]
    rows: tuple[Row | None, ...]


class Draft(Protocol):
    """Where proposals come from."""

    def propose(self, ids: Sequence[int], n: int) -> Proposal:
        """At most n tokens that may follow `ids` (the prompt and everything accepted so far)."""


class PromptLookup:
    """Proposes what followed the last occurrence of the final `ngram` tokens: no model at all."""

    def __init__(self, ngram: SupportsIndex = 2) -> None:
        self.ngram = count("PromptLookup", "ngram", ngram, 1)

    def propose(self, ids: Sequence[int], n: int) -> Proposal:
        tail = list(ids[-self.ngram :])
        for start in range(len(ids) - self.ngram - 1, -1, -1):
            if list(ids[start : start + self.ngram]) == tail:
                found = tuple(ids[start + self.ngram : start + self.ngram + n])
                return Proposal(found, (None,) * len(found))
        return Proposal((), ())


class ModelDraft(Unique):
    """Proposes with a smaller model of the same vocabulary and a cache of its own."""

    instead: ClassVar[str] = "a draft has a cache of its own"

    def __init__(
        self, model: LlamaModel, max_seq_len: SupportsIndex, sampler: Sampler | None = None
    ) -> None:
        self.model = of_kind("ModelDraft", model, LlamaModel, "a LlamaModel")
        self.sampler = _sampler("ModelDraft", sampler)
        self.cache = model.new_cache(max_seq_len)
        self._seen: list[int] = []

    def propose(self, ids: Sequence[int], n: int) -> Proposal:
        """Rows of tokens that are still a prefix of `ids` are kept, the rest is rewound."""
        common = _common_prefix(self._seen, ids)
        self.cache.truncate_to(min(common, len(ids) - 1))
        n = min(n, (self.cache.capacity or 0) - len(ids) + 1)
        if n < 1:
            return Proposal((), ())
        logits = self.model.prefill(ids[len(self.cache) :], self.cache)
        tokens, rows = list[int](), list[Row | None]()
        for made in range(n):
            row = self.sampler.distribution(logits)
            tokens.append(self.sampler.draw(row))
            rows.append(row)
            if made < n - 1:
                logits = self.model.decode_step(tokens[-1], self.cache)
        self._seen = [*ids, *tokens][: len(self.cache)]
        return Proposal(tuple(tokens), tuple(rows))


def speculate(
    model: LlamaModel, ids: Iterable[SupportsIndex], draft: Draft, *,
    max_new_tokens: SupportsIndex = 128, draft_len: SupportsIndex = 4,
    sampler: Sampler | None = None, cache: KvPairCache | None = None,
) -> Iterator[int]:  # fmt: skip
    """Yield generated token ids. Every step scores the pending token and `draft_len` drafts.

    The plan for ``draft_len + 1`` tokens is made at the first step; shorter proposals are padded,
    and the padding is never accepted. Arguments are checked before the first token.
    """
    who = "speculate"
    of_kind(who, model, LlamaModel, "a LlamaModel")
    if not callable(getattr(draft, "propose", None)):
        raise DTypeError(f"{who}: got draft {type(draft).__name__}, need one with propose()")
    tokens = [int(t) for t in model.check_tokens(who, ids)]
    if not tokens:
        raise ShapeError(f"{who}: got an empty prompt, need at least one token")
    budget = count(who, "max_new_tokens", max_new_tokens, 1)
    length = count(who, "draft_len", draft_len, 1)
    chosen = _sampler(who, sampler)
    if cache is None:
        cache = model.new_cache(len(tokens) + budget + length)
    model.check_single(who, cache)
    model.check_room(who, cache, len(tokens))
    return _stream(model, tokens, draft, budget, length, chosen, cache)


def _sampler(who: str, given: Sampler | None) -> Sampler:
    return Sampler() if given is None else of_kind(who, given, Sampler, "a Sampler or None")


def _stream(
    model: LlamaModel, ids: list[int], draft: Draft, budget: int, draft_len: int, sampler: Sampler,
    cache: KvPairCache,
) -> Iterator[int]:  # fmt: skip
    pending = sampler(model.prefill(ids, cache))
    model.session_for(cache)  # planned now: the last rows of a full cache run token by token
    ids.append(pending)
    yield pending
    made = 1
    while made < budget and cache.capacity is not None and len(cache) < cache.capacity:
        start, room = len(cache), cache.capacity - len(cache)
        if room <= draft_len:  # the scored step would not fit: finish token by token
            accepted = [sampler(model.decode_step(pending, cache))]
        else:
            proposal = draft.propose(ids, draft_len)
            padded = [*proposal.tokens, *[0] * (draft_len - len(proposal.tokens))]
            logits = model.score([pending, *padded], cache)
            accepted = _accept(sampler, proposal, logits)
            # The pending token's row and those of accepted drafts stay; the last one is pending.
            cache.truncate_to(start + len(accepted))
        for token in accepted[: budget - made]:
            ids.append(token)
            yield token
        made += len(accepted)
        pending = accepted[-1]


def _accept(sampler: Sampler, proposal: Proposal, logits: NDArray[np.float32]) -> list[int]:
    """Drafts accepted in turn, then one token of the model's own."""
    out: list[int] = []
    for token, drafted, row in zip(proposal.tokens, proposal.rows, logits, strict=False):
        wanted = sampler.distribution(row)
        chance = wanted[token] / (1.0 if drafted is None else drafted[token])
        if sampler.uniform() < chance:
            out.append(token)
            continue
        rest = wanted.copy()
        if drafted is None:
            rest[token] = 0.0
        else:
            rest = np.maximum(wanted - drafted, 0.0)
        return [*out, sampler.draw(rest / rest.sum())]
    return [*out, sampler(logits[len(out)])]


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))
