"""Beam search against a search that keeps no cache at all."""

import numpy as np
import pytest
from llama_oracle import config

import lazykv as lk
from lazykv.models.beam import beam_search
from lazykv.models.model import LlamaModel
from lazykv.models.weights import random_weights

CONFIG = config(vocab_size=64, context_length=512)
PROMPT = [3, 1, 4, 1, 5]


def tiny(seed=0, scale=0.3):
    return LlamaModel(CONFIG, random_weights(CONFIG, seed, scale))


def log_probabilities(model, ids):
    """Of the next token after `ids`, from a fresh cache."""
    logits = model.prefill(ids, model.new_cache(len(ids))).astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def plain_search(model, beams, n, ends=()):
    live, done = [((), 0.0)], []
    for _ in range(n):
        grown = []
        for rank, (ids, score) in enumerate(live):
            for token, lp in enumerate(log_probabilities(model, [*PROMPT, *ids])):
                grown.append((-(score + lp), rank, token, (*ids, token)))
        grown.sort()
        best = [(ids, -score) for score, _, _, ids in grown[:beams]]
        done += [b for b in best if b[0][-1] in ends]
        live = [b for b in best if b[0][-1] not in ends]
        if not live:
            break
    return sorted([*done, *live], key=lambda b: -b[1])[:beams]


@pytest.mark.parametrize("beams", [1, 2, 5])
def test_beams_are_those_of_a_search_without_a_cache(beams):
    model = tiny(scale=0.5)
    found = beam_search(model, PROMPT, beams=beams, max_new_tokens=6)
    wanted = plain_search(model, beams, 6)
    assert [b.ids for b in found] == [ids for ids, _ in wanted]
    np.testing.assert_allclose(
        [b.log_probability for b in found], [s for _, s in wanted], atol=1e-4
    )


def test_one_beam_is_greedy():
    model = tiny(scale=0.5)
    cache, out = model.new_cache(32), []
    logits = model.prefill(PROMPT, cache)
    for _ in range(8):
        out.append(int(logits.argmax()))
        logits = model.decode_step(out[-1], cache)
    assert beam_search(model, PROMPT, beams=1, max_new_tokens=8)[0].ids == tuple(out)


def test_finished_beams_stay_among_the_best():
    model = tiny(scale=0.5)
    first = plain_search(model, 3, 2)
    ends = (first[0][0][-1],)
    found = beam_search(model, PROMPT, beams=3, max_new_tokens=5, eos_ids=ends)
    assert [b.ids for b in found] == [ids for ids, _ in plain_search(model, 3, 5, ends)]


def test_reordering_keeps_the_plan():
    model = tiny(scale=0.5)
    beam_search(model, PROMPT, beams=3, max_new_tokens=8)
    before = lk.stats().plans_built
    beam_search(model, PROMPT, beams=3, max_new_tokens=8)
    assert lk.stats().plans_built == before


@pytest.mark.parametrize("change", [{"ids": []}, {"beams": 0}, {"max_new_tokens": 0}])
def test_bad_arguments_are_refused(change):
    call = {"ids": PROMPT, **change}
    with pytest.raises(lk.LazyKvError):
        beam_search(tiny(), call.pop("ids"), **call)
