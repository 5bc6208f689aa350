"""Copies of what has an identity or moves on: refused, the same object, or one of their own."""

import copy
import pickle

import mla_oracle
import numpy as np
import pytest
from llama_oracle import model

import lazykv as lk
from lazykv.models import PagedDecoder
from lazykv.models.sampling import Sampler
from lazykv.models.speculative import ModelDraft
from lazykv.serving import Engine

M = model()
UNIQUE = {
    "LlamaModel": M,
    "MlaModel": mla_oracle.model(),
    "PagedDecoder": PagedDecoder(M, M.new_pool(2)),
    "ModelDraft": ModelDraft(M, 8),
    "Engine": Engine(M, M.new_pool(2)),
}


@pytest.mark.parametrize("name", UNIQUE)
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_second_one_is_refused(way, name):
    with pytest.raises(lk.GraphError, match=f"{name}: got a copy or a pickle, need a new one"):
        way(UNIQUE[name])


def test_weights_are_shared_by_a_model_made_of_the_same_parts():
    again = lk.models.LlamaModel(M.config, M.weights)
    assert again.weights is M.weights
    assert again.model_key != M.model_key


def test_a_copied_sampler_draws_on_by_itself():
    logits = np.zeros(1000)
    sampler = Sampler(1.0, seed=3)
    sampler(logits)
    for way in (copy.copy, copy.deepcopy):
        first, second = way(sampler), way(sampler)
        assert [first(logits) for _ in range(8)] == [second(logits) for _ in range(8)]
