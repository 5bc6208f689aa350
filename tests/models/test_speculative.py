"""Speculative decoding: the model's own tokens, whatever the draft proposes."""

import numpy as np
import pytest
from llama_oracle import config

import lazykv as lk
from lazykv.models.model import LlamaModel
from lazykv.models.sampling import Sampler
from lazykv.models.speculative import ModelDraft, PromptLookup, Proposal, speculate
from lazykv.models.weights import random_weights

CONFIG = config(vocab_size=64, context_length=512)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def tiny(seed=0, scale=0.3):
    return LlamaModel(CONFIG, random_weights(CONFIG, seed, scale))


def greedy(model, ids, n):
    cache = model.new_cache(len(ids) + n)
    logits, out = model.prefill(ids, cache), []
    for _ in range(n):
        out.append(int(logits.argmax()))
        logits = model.decode_step(out[-1], cache)
    return out


class Scripted:
    """Proposes given tokens, right or wrong."""

    def __init__(self, propose):
        self.propose = propose


def oracle_draft(truth, wrong_at=()):
    """Proposes the true continuation, with mistakes at some places."""

    def propose(ids, n):
        at = len(ids) - len(PROMPT)
        tokens = [
            (t + 1) % 64 if at + i in wrong_at else t for i, t in enumerate(truth[at : at + n])
        ]
        return Proposal(tuple(tokens), (None,) * len(tokens))

    return Scripted(propose)


@pytest.mark.parametrize("draft_len", [1, 3, 7])
@pytest.mark.parametrize("wrong_at", [(), (0,), (3, 4, 11), tuple(range(40))])
def test_greedy_tokens_are_the_models_own(draft_len, wrong_at):
    model = tiny()
    truth = greedy(model, PROMPT, 40)
    draft = oracle_draft(truth, wrong_at)
    assert list(speculate(model, PROMPT, draft, max_new_tokens=40, draft_len=draft_len)) == truth


def test_prompt_lookup_and_a_draft_model():
    model, small = tiny(), tiny(seed=5)
    truth = greedy(model, PROMPT, 30)
    assert list(speculate(model, PROMPT, PromptLookup(), max_new_tokens=30)) == truth
    assert list(speculate(model, PROMPT, ModelDraft(small, 64), max_new_tokens=30)) == truth
    # A draft that is the model itself is always right, and its cache may be too small to go on.
    assert list(speculate(model, PROMPT, ModelDraft(model, 16), max_new_tokens=30)) == truth


def test_no_plan_is_built_after_the_first_scored_step():
    model = tiny()
    truth = greedy(model, PROMPT, 40)
    cache = model.new_cache(80)
    stream = speculate(model, PROMPT, oracle_draft(truth, (2, 9)), max_new_tokens=40, cache=cache)
    first = [next(stream) for _ in range(3)]
    ident, before = cache.alloc_id(), lk.stats()
    session = model.session_for(cache, 5, every=True)
    plan = session.plan.id
    assert first + list(stream) == truth
    after = lk.stats()
    assert (after.plans_built, after.plan_cache_hits) == (
        before.plans_built,
        before.plan_cache_hits,
    )
    assert cache.alloc_id() == ident
    assert model.session_for(cache, 5, every=True).plan.id == plan


def test_A5_the_bonus_token_is_not_cached_yet():
    model = tiny()
    truth = greedy(model, PROMPT[:4], 12)
    cache = model.new_cache(40)

    def propose(ids, n):
        at = len(ids) - 4
        return Proposal(tuple(truth[at : at + n]), (None,) * n)

    stream = speculate(
        model, PROMPT[:4], Scripted(propose), draft_len=3, max_new_tokens=9, cache=cache
    )
    next(stream)
    for _ in range(4):  # three drafts and the bonus
        next(stream)
    # Prompt 4, the first token and three drafts are cached; the bonus is pending.
    assert len(cache) == 8
    assert list(stream) == truth[5:9]


def test_generation_to_the_last_row():
    model = tiny()
    cache = model.new_cache(16)
    out = list(speculate(model, PROMPT, PromptLookup(), max_new_tokens=99, cache=cache))
    assert out == greedy(model, PROMPT, len(out))
    assert len(cache) == 16
    assert len(out) == 16 - len(PROMPT) + 1


def test_sampled_acceptance_keeps_the_models_distribution():
    """The first two tokens, sampled speculatively many times, against exact probabilities."""
    model = tiny(scale=0.6)
    cache = model.new_cache(40)
    sampler = Sampler(1.0, seed=0)
    first = sampler.distribution(model.prefill(PROMPT, cache))
    token = int(first.argmax())
    wanted = sampler.distribution(model.decode_step(token, cache))
    rng = np.random.default_rng(1)
    wrong = rng.dirichlet(np.ones(wanted.size))

    def propose(ids, n):
        drafted = int(rng.choice(wanted.size, p=wrong))
        return Proposal((drafted,), (wrong,))

    counts, runs = np.zeros(wanted.size), 0
    draft = Scripted(propose)
    cache = model.new_cache(40)
    for _ in range(1500):
        cache.reset()
        stream = speculate(
            model, PROMPT, draft, max_new_tokens=2, draft_len=1, sampler=sampler, cache=cache
        )
        if next(stream) == token:
            counts[next(stream)] += 1
            runs += 1
    # Four standard deviations per token, over all tokens: a seeded run, so no flake.
    limit = 4 * np.sqrt(wanted * (1 - wanted) / runs) + 2 / runs
    assert runs > 200
    assert (abs(counts / runs - wanted) < limit).all()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"ids": []}, lk.ShapeError),
        ({"ids": [64]}, lk.RangeError),
        ({"max_new_tokens": 0}, lk.RangeError),
        ({"draft_len": 0}, lk.RangeError),
    ],
)
def test_bad_arguments_are_refused_before_the_first_token(change, error):
    call = {"ids": PROMPT, "draft": PromptLookup(), **change}
    with pytest.raises(error):
        speculate(tiny(), call.pop("ids"), call.pop("draft"), **call)


def test_a_lookup_without_an_ngram_is_refused():
    with pytest.raises(lk.RangeError, match="got ngram 0, need 1 <= ngram"):
        PromptLookup(0)


@pytest.mark.slow
def test_the_real_model_with_prompt_lookup(smollm2_model, golden):
    for case in golden:
        cache = smollm2_model.new_cache(128)
        stream = speculate(
            smollm2_model, case["prompt_ids"], PromptLookup(), cache=cache,
            max_new_tokens=len(case["generated_ids"]),
        )  # fmt: skip
        out = [next(stream) for _ in range(2)]
        before = lk.stats().plans_built
        assert out + list(stream) == case["generated_ids"]
        assert lk.stats().plans_built == before
