"""The real model against recorded greedy output of a reference implementation."""

import numpy as np
import pytest

import lazykv as lk

pytestmark = pytest.mark.slow

NAMES = ["sky", "plain", "code"]


@pytest.fixture
def model(smollm2_model) -> lk.models.LlamaModel:
    return smollm2_model


@pytest.fixture
def case(request, golden) -> dict:
    (found,) = [g for g in golden if g["name"] == request.param]
    return found


def test_every_recorded_prompt_is_run(golden):
    assert [g["name"] for g in golden] == NAMES


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_greedy_ids_are_the_recorded_ones(model, case):
    prompt, want = case["prompt_ids"], case["generated_ids"]
    assert model.tokenizer.encode(case["prompt"]) == prompt
    cache = model.new_cache(len(prompt) + len(want))
    logits, got = model.prefill(prompt, cache), []
    for token in want:
        got.append(int(np.argmax(logits)))
        logits = model.decode_step(token, cache)
    assert got == want
    assert len(cache) == cache.max_seq_len


@pytest.mark.parametrize("case", ["sky"], indirect=True)
def test_logits_and_margins_are_the_recorded_ones(model, case):
    cache = model.new_cache(128)
    logits = model.prefill(case["prompt_ids"], cache)
    top = np.argsort(-logits)[:8]
    assert top.tolist() == case["first_step_top8_ids"]
    np.testing.assert_allclose(logits[top], case["first_step_top8_logits"], atol=2e-3)
    margins = []
    for token in case["generated_ids"]:
        second, first = np.sort(logits)[-2:]
        margins.append(first - second)
        logits = model.decode_step(token, cache)
    np.testing.assert_allclose(margins, case["margins"], atol=5e-3)


@pytest.mark.parametrize("case", NAMES, indirect=True)
def test_generated_text_is_the_recorded_text(model, case):
    want = case["generated_ids"]
    end = next((n + 1 for n, t in enumerate(want) if t in model.tokenizer.eos_ids), len(want))
    pieces = list(lk.generate(model, case["prompt"], max_new_tokens=len(want)))
    assert [p.id for p in pieces] == want[:end]
    text = model.tokenizer.decode(want[:end], skip_special=True)
    assert "".join(pieces) == text == case.get("text", text)
    assert pieces[-1].finish_reason == ("stop" if end < len(want) else "length")


@pytest.mark.parametrize("case", ["sky"], indirect=True)
def test_a_bf16_cache_stays_near_the_f32_one(model, case):
    prompt, want = case["prompt_ids"], case["generated_ids"][:12]
    wide, narrow = model.new_cache(64), model.new_cache(64, dtype="bf16")
    a, b = model.prefill(prompt, wide), model.prefill(prompt, narrow)
    for token in want:
        # bf16 keeps 8 bits: rows are off by 2**-9 of themselves, logits by some tenths of 29.
        assert 0 < np.abs(a - b).max() < 0.5
        a, b = model.decode_step(token, wide), model.decode_step(token, narrow)
