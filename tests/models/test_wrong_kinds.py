"""What is of the wrong kind gets a typed error from every verb, and nothing has happened."""

from typing import Any

import mla_oracle
import numpy as np
import pytest
from kv_state import state
from llama_oracle import model
from paged_state import refused

import lazykv as lk
from lazykv.models import PagedDecoder
from lazykv.models.beam import beam_search
from lazykv.models.mla import MlaModel
from lazykv.models.sampling import Sampler, StopStrings
from lazykv.models.speculative import ModelDraft, PromptLookup, speculate

M, MLA = model(), mla_oracle.model()
NO_CACHE: list[Any] = [None, 5, "x", b"", lk.KvCache, MLA.new_cache(4)]
NO_MODEL: list[Any] = [None, 5, "x", MLA, type(M)]


@pytest.mark.parametrize("bad", NO_CACHE)
def test_what_is_no_cache(bad):
    for who, call in {
        "prefill": lambda: M.prefill([3], bad),
        "decode_step": lambda: M.decode_step(3, bad),
        "score": lambda: M.score([3], bad),
        "session_for": lambda: M.session_for(bad),
        "step_graph": lambda: M.step_graph(bad),
        "weights_for": lambda: M.weights_for(bad),
    }.items():
        with pytest.raises(lk.DTypeError, match=f"{who}: got .*, need a KvCache"):
            call()
    if bad is not None:
        with pytest.raises(lk.DTypeError, match=r"speculate: got .*, need a KvCache"):
            speculate(M, [3], PromptLookup(), cache=bad)


@pytest.mark.parametrize("bad", [None, 5, "x", lk.LatentKvCache, M.new_cache(4)])
def test_what_is_no_latent_cache(bad):
    for who, call in {
        "prefill": lambda: MLA.prefill([3], bad),
        "decode_step": lambda: MLA.decode_step(3, bad),
        "session_for": lambda: MLA.session_for(bad),
    }.items():
        with pytest.raises(lk.DTypeError, match=f"{who}: got .*, need a LatentKvCache"):
            call()


@pytest.mark.parametrize("bad", ["cpu", 5, lk.InferenceContext, lk.device("cpu")])
def test_what_is_no_context(bad):
    cache = M.new_cache(8)
    before = state(cache)
    for who, call in {
        "prefill": lambda: M.prefill([3], cache, bad),
        "decode_step": lambda: M.decode_step(3, cache, bad),
        "session_for": lambda: M.session_for(cache, 1, bad),
    }.items():
        with pytest.raises(lk.DTypeError, match=f"{who}: got .*, need an InferenceContext or None"):
            call()
    assert state(cache) == before
    assert not cache.held


@pytest.mark.parametrize("bad", [None, "x", 1.5, True])
def test_what_is_no_number(bad):
    cache = M.new_cache(8)
    for who, call in {
        "session_for": lambda: M.session_for(cache, bad),
        "step_graph": lambda: M.step_graph(cache, bad),
        "speculate: got max_new_tokens": lambda: speculate(
            M, [3], PromptLookup(), max_new_tokens=bad
        ),
        "speculate: got draft_len": lambda: speculate(M, [3], PromptLookup(), draft_len=bad),
        "beam_search: got beams": lambda: beam_search(M, [3], beams=bad),
        "beam_search: got max_new_tokens": lambda: beam_search(M, [3], max_new_tokens=bad),
        "beam_search: got": lambda: beam_search(M, [3], eos_ids=bad),
        "PromptLookup": lambda: PromptLookup(bad),
        "ModelDraft|new_cache": lambda: ModelDraft(M, bad),
    }.items():
        with pytest.raises(lk.DTypeError, match=who):
            call()
    assert not cache.held


@pytest.mark.parametrize("bad", [None, 5, "x", b"x"])
def test_what_are_no_tokens(bad):
    cache = MLA.new_cache(4)
    with pytest.raises(lk.DTypeError, match=r"prefill: got .*, need token ids"):
        MLA.prefill(bad, cache)
    assert len(cache) == 0


@pytest.mark.parametrize("bad", NO_MODEL)
def test_what_is_no_model(bad):
    for who, call in {
        "generate": lambda: lk.generate(bad, [3]),
        "speculate": lambda: speculate(bad, [3], PromptLookup()),
        "beam_search": lambda: beam_search(bad, [3]),
        "ModelDraft": lambda: ModelDraft(bad, 8),
        "PagedDecoder": lambda: PagedDecoder(bad, M.new_pool(2)),
    }.items():
        with pytest.raises(lk.DTypeError, match=f"{who}: got .*, need a LlamaModel"):
            call()


@pytest.mark.parametrize("bad", [None, 5, "x"])
def test_what_a_model_is_not_made_of(bad):
    for kind, owner in ((lk.models.LlamaModel, M), (MlaModel, MLA)):
        for parts in ((bad, owner.weights), (owner.config, bad)):
            with pytest.raises(lk.DTypeError, match=f"{kind.__name__}: got"):
                kind(*parts)


@pytest.mark.parametrize("bad", [5, "x", object()])
def test_what_cannot_draft_or_sample(bad):
    for who, call in {
        "speculate: got draft": lambda: speculate(M, [3], bad),
        "speculate: got": lambda: speculate(M, [3], PromptLookup(), sampler=bad),
        "ModelDraft: got": lambda: ModelDraft(M, 8, bad),
    }.items():
        with pytest.raises(lk.DTypeError, match=who):
            call()


@pytest.mark.parametrize("bad", [["a"], [None], np.array([1, 2], object)])
def test_what_are_no_logits(bad):
    for call in (Sampler(), Sampler(1.0), Sampler().distribution, Sampler().draw):
        with pytest.raises(lk.DTypeError, match="need real numbers"):
            call(bad)


@pytest.mark.parametrize("bad", [None, 5, []])
def test_what_is_no_row_of_probabilities(bad):
    with pytest.raises(lk.ShapeError, match=r"draw: got probabilities of shape"):
        Sampler().draw(bad)


@pytest.mark.parametrize("bad", [None, 5, b"a"])
def test_what_is_no_text(bad):
    stops = StopStrings("ab")
    assert stops.push("a") == ""
    with pytest.raises(lk.DTypeError, match=r"StopStrings\.push: got"):
        stops.push(bad)
    assert stops.finish() == "a"


@pytest.mark.parametrize("bad", [None, 5, 1.5, b"x", [], True])
def test_what_is_no_path(bad):
    with pytest.raises(lk.DTypeError, match=r"models\.load: got .*, need a path or a model's name"):
        lk.models.load(bad)


def test_a_path_that_no_system_has():
    with pytest.raises(lk.ModelFormatError, match=r"model 'a+: got .*, need a path"):
        lk.models.load("a" * 5000)


@pytest.mark.parametrize("name", ["progress", "notify"])
def test_what_cannot_be_told(name, tmp_path):
    with pytest.raises(lk.DTypeError, match=f"got {name} int, need a function"):
        lk.models.load(tmp_path, **{name: 5})


@pytest.mark.parametrize("bad", [None, 5, lk.KvBlockPool(lk.KvGeometry(2, 2, 4, 2, 8, 4))])
def test_what_is_no_pool_of_bytes(bad):
    with pytest.raises(lk.DTypeError, match=r"PagedDecoder: got .*, need a DeviceKvPool"):
        PagedDecoder(M, bad)


def test_what_are_no_sessions_of_a_decoder():
    paged = PagedDecoder(M, M.new_pool(4, 4))
    session = paged.pool.open()
    for bad in (None, 5, session):
        with refused(paged.pool, lk.DTypeError, "decode: got", "need a list of sessions"):
            paged.decode(bad, [3])
    for bad in (None, 5, int(session), lk.SessionHandle()):
        with refused(paged.pool, lk.UnknownSession, f"prefill: got {bad!r}"):
            paged.prefill(bad, [3])
        with refused(paged.pool, lk.UnknownSession, f"decode: got {bad!r}"):
            paged.decode([bad], [3])
    for bad, error in ((None, lk.DTypeError), (1.5, lk.DTypeError), (0, lk.RangeError)):
        for call in (lambda b: paged.session_for(b), lambda b: paged.session_for(1, b)):
            with refused(paged.pool, error, "session_for: got"):
                call(bad)
    assert not paged.plans
    assert paged.decode(iter([session]), [3]).shape == (1, 37)
