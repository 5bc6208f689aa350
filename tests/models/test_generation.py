"""lk.generate: text pieces as they come, why they end, and what is checked before the first."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from kv_state import refused
from tiny_models import spm_vocabulary, write_gguf

import lazykv as lk

PROMPT = [1, 3, 6, 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> lk.models.LlamaModel:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return lk.models.load(write_gguf(folder / "tiny.gguf", metadata=spm_vocabulary()))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> lk.models.LlamaModel:
    """A model without an end token."""
    folder: Path = tmp_path_factory.mktemp("endless")
    vocabulary = spm_vocabulary(**{"tokenizer.ggml.eos_token_id": None})
    loaded = lk.models.load(write_gguf(folder / "endless.gguf", metadata=vocabulary))
    assert loaded.tokenizer.eos_ids == ()
    return loaded


def greedy(model, prompt: list[int], n: int) -> list[int]:
    """Argmax after argmax, each from a prompt run into a new cache."""
    out: list[int] = []
    for _ in range(n):
        tokens = [*prompt, *out]
        out.append(int(np.argmax(model.prefill(tokens, model.new_cache(len(tokens))))))
    return out


def run(model, prompt=PROMPT, **options) -> list:
    return list(lk.generate(model, prompt, **options))


def text(pieces) -> str:
    return "".join(pieces)


def test_pieces_are_text_with_ids_and_one_reason(model):
    pieces = run(model, max_new_tokens=12)
    ids = [p.id for p in pieces]
    assert ids == greedy(model, PROMPT, len(ids))
    assert text(pieces) == model.tokenizer.decode(ids, skip_special=True)
    assert all(isinstance(p, str) and isinstance(p.id, int) for p in pieces)
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason in ("length", "stop")


def test_pieces_come_one_by_one(model):
    cache = model.new_cache(20)
    stream = lk.generate(model, PROMPT, max_new_tokens=10, cache=cache)
    assert len(cache) == 0
    first = next(stream)
    assert len(cache) == 4
    assert list(islice(stream, 2))
    assert len(cache) == 6
    stream.close()
    assert len(cache) == 6
    assert first.id == greedy(model, PROMPT, 1)[0]


@pytest.mark.parametrize("n", [1, 2, 7])
def test_the_budget_ends_with_length(endless, n):
    pieces = run(endless, max_new_tokens=np.int64(n), temperature=3.0, seed=0)
    assert (len(pieces), pieces[-1].finish_reason) == (n, "length")


def test_an_end_token_ends_with_stop_and_no_text(model):
    pieces = run(model, temperature=3.0, seed=0, max_new_tokens=60)
    ids = [p.id for p in pieces]
    assert pieces[-1].finish_reason == "stop"
    (eos,) = model.tokenizer.eos_ids
    assert ids[-1] == eos
    assert eos not in ids[:-1]
    assert "</s>" not in text(pieces)
    assert text(pieces) == model.tokenizer.decode(ids, skip_special=True)


@pytest.mark.parametrize("own", [False, True])
def test_capacity_is_used_up_exactly(endless, own):
    """Six rows for a prompt of four: two more tokens are stored, a third one is still chosen."""
    cache = None if own else endless.new_cache(6)
    pieces = run(
        endless, max_new_tokens=30, temperature=3.0, seed=0, cache=cache,
        max_seq_len=6 if own else None,
    )  # fmt: skip
    assert (len(pieces), pieces[-1].finish_reason) == (3, "capacity")
    longer = run(endless, max_new_tokens=30, temperature=3.0, seed=0)
    assert [p.id for p in pieces] == [p.id for p in longer[:3]]
    if cache is not None:
        assert len(cache) == 6


def test_without_a_cache_one_is_made_as_large_as_needed(model, monkeypatch):
    made = []
    real = type(model).new_cache
    monkeypatch.setattr(
        type(model), "new_cache", lambda self, n, **o: made.append(n) or real(self, n, **o)
    )
    lk.generate(model, PROMPT, max_new_tokens=5)
    lk.generate(model, PROMPT, max_new_tokens=1)
    lk.generate(model, PROMPT, max_new_tokens=10**9)
    lk.generate(model, PROMPT, max_new_tokens=5, max_seq_len=6)
    assert made == [8, 4, model.config.context_length, 6]


def test_stop_strings_end_the_text_and_are_left_out(endless):
    options = {"temperature": 3.0, "seed": 0, "max_new_tokens": 30}
    whole = text(run(endless, **options))
    assert len(whole) > 14
    for stop in (whole[3:5], whole[10:14], whole[-1:]):
        for form in (stop, [stop], (stop, "never to be seen")):
            pieces = run(endless, stop=form, **options)
            assert text(pieces) == whole[: whole.index(stop)]
            assert pieces[-1].finish_reason == "stop"
    pieces = run(endless, stop="never to be seen", **options)
    assert (text(pieces), pieces[-1].finish_reason) == (whole, "length")


def test_a_seed_makes_a_sample_reproducible(endless):
    options = {"temperature": 2.0, "max_new_tokens": 20}
    ids = [[p.id for p in run(endless, seed=seed, **options)] for seed in (1, 1, 2, 3)]
    assert ids[0] == ids[1]
    assert len({tuple(i) for i in ids}) == 3


def test_top_k_of_one_is_greedy(model):
    want = greedy(model, PROMPT, 6)
    pieces = run(model, temperature=2.0, top_k=1, seed=0, max_new_tokens=6)
    assert [p.id for p in pieces] == want[: len(pieces)]
    pieces = run(model, temperature=2.0, top_p=1e-9, seed=0, max_new_tokens=6)
    assert [p.id for p in pieces] == want[: len(pieces)]


def test_a_prompt_is_text_or_ids(model):
    as_text = run(model, "ab c", max_new_tokens=4)
    ids = model.tokenizer.with_bos(model.tokenizer.encode("ab c"))
    for prompt in (ids, tuple(ids), iter(ids), np.array(ids)):
        assert [p.id for p in run(model, prompt, max_new_tokens=4)] == [p.id for p in as_text]


def test_a_conversation_goes_on_in_one_cache(model):
    cache, ctx = model.new_cache(30), lk.InferenceContext()
    first = run(model, [1, 3, 4], max_new_tokens=3, cache=cache, ctx=ctx)
    assert ctx.has_decode_session()
    # The last token chosen has no row yet.
    kept = [1, 3, 4, *(p.id for p in first)][: len(cache)]
    second = run(model, [5, 6], max_new_tokens=3, cache=cache, ctx=ctx)
    want = greedy(model, [*kept, 5, 6], len(second))
    assert [p.id for p in second] == want


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"prompt": []}, lk.ShapeError, "empty prompt"),
        ({"prompt": [1, 999]}, lk.RangeError, "got token 999"),
        ({"prompt": [-1]}, lk.RangeError, "got token -1"),
        ({"prompt": [1.5]}, lk.DTypeError, "got token 1.5"),
        ({"prompt": 5}, lk.DTypeError, "got int"),
        ({"prompt": b"ab"}, lk.DTypeError, "got text"),
        ({"max_new_tokens": 0}, lk.RangeError, "max_new_tokens 0"),
        ({"max_new_tokens": -1}, lk.RangeError, "max_new_tokens -1"),
        ({"max_new_tokens": 2.5}, lk.DTypeError, "max_new_tokens 2.5"),
        ({"max_new_tokens": None}, lk.DTypeError, "max_new_tokens None"),
        ({"temperature": -1}, lk.RangeError, "temperature -1"),
        ({"temperature": "hot"}, lk.DTypeError, "temperature"),
        ({"top_k": 0}, lk.RangeError, "top_k 0"),
        ({"top_p": 1.5}, lk.RangeError, "top_p 1.5"),
        ({"seed": -1}, lk.RangeError, "seed -1"),
        ({"stop": ""}, lk.RangeError, "empty stop string"),
        ({"stop": [5]}, lk.DTypeError, "got int, need str"),
        ({"stop": 5}, lk.DTypeError, "got int, need str"),
        ({"max_seq_len": 3}, lk.RangeError, "got a prompt of 4 tokens, need <= capacity 3"),
        ({"max_seq_len": 0}, lk.RangeError, "max_seq_len 0"),
        ({"max_seq_len": "8"}, lk.DTypeError, "max_seq_len '8'"),
        ({"cache": 5}, lk.DTypeError, "generate: got int, need a KvCache"),
        ({"ctx": "cpu"}, lk.DTypeError, "generate: got str, need an InferenceContext or None"),
    ],
)
def test_arguments_are_checked_by_the_call_itself(model, changes, error, words):
    before = lk.stats().allocations
    options = {"prompt": PROMPT, "max_new_tokens": 4} | changes
    with pytest.raises(error, match=words.replace("(", "\\(")):
        lk.generate(model, options.pop("prompt"), **options)
    assert lk.stats().allocations == before


def test_a_cache_that_does_not_fit_is_refused_by_the_call(model):
    small = model.new_cache(3)
    with refused(small, lk.RangeError, "generate: got 4 tokens at length 0", "capacity 3"):
        lk.generate(model, PROMPT, cache=small)
    full = model.new_cache(5)
    full.cached_len = 2
    with refused(full, lk.RangeError, "got 4 tokens at length 2, need 6 <= capacity 5"):
        lk.generate(model, PROMPT, cache=full)
    other = lk.KvCache.with_capacity(2, 2, 4, 8, "f32")
    with refused(other, lk.ShapeError, "generate: got a cache of"):
        lk.generate(model, PROMPT, cache=other)
    several = lk.KvCache.with_capacity(2, 2, 16, 8, "f32", batch=2)
    with refused(several, lk.ShapeError, "generate: got a cache of 2 sequences"):
        lk.generate(model, PROMPT, cache=several)
    cleared, begun = model.new_cache(8), model.new_cache(8)
    cleared.clear()
    with refused(cleared, lk.GraphError, "generate: got a cleared cache", "reset()"):
        lk.generate(model, PROMPT, cache=cleared)
    row = np.ones((1, begun.n_kv_heads, 1, begun.head_dim), np.float32)
    begun.append(0, row, row)
    with refused(begun, lk.GraphError, "generate: got an open step", "abort_step()"):
        lk.generate(model, PROMPT, cache=begun)
