"""Many requests behind one system prompt, on the real model: it is computed once and held once.

``LAZYKV_SHARED_REQUESTS`` says how many (256 is the size the design is for); every one is compared
with a contiguous run of its own.
"""

import os

import pytest

import lazykv as lk

REQUESTS = int(os.environ.get("LAZYKV_SHARED_REQUESTS", "8"))
SYSTEM_TOKENS, NEW, BLOCK = 512, 6, 16
SENTENCE = (
    "You answer in one short sentence, you never guess, and you say so when you do not know. "
)
QUESTIONS = ("What is the capital of", "Name a river in", "Which language is spoken in")
PLACES = ("France", "Peru", "Japan", "Kenya", "Norway", "Chile", "Egypt", "Vietnam")


@pytest.mark.slow
def test_a_shared_system_prompt_is_computed_once_and_held_once(smollm2_model):
    model = smollm2_model
    encode = model.tokenizer.encode
    system = encode(SENTENCE * 40)[:SYSTEM_TOKENS]
    tails = [
        encode(f" {n}. {QUESTIONS[n % len(QUESTIONS)]} {PLACES[n % len(PLACES)]}? ")
        for n in range(REQUESTS)
    ]
    pool = model.new_pool(128, BLOCK)
    engine = lk.serving.Engine(model, pool, max_batch=8)
    requests = [engine.submit(system + tail, max_new_tokens=NEW) for tail in tails]
    most, shared = 0, SYSTEM_TOKENS // BLOCK
    while not engine.step().idle:
        most = max(most, pool.kv_bytes_resident() // pool.geometry.block_bytes)
    own = max(-(-(len(t) + NEW) // BLOCK) for t in tails)
    assert most <= shared + 8 * (own + 1)
    assert sum(r.prefill_tokens for r in requests) <= SYSTEM_TOKENS + sum(map(len, tails))
    assert [r.tokens_found >= SYSTEM_TOKENS for r in requests[1:]] == [True] * (REQUESTS - 1)
    assert pool.free_blocks() == pool.capacity()
    for request, tail in zip(requests, tails, strict=True):
        cache = model.new_cache(SYSTEM_TOKENS + len(tail) + NEW)
        alone = [p.id for p in lk.generate(model, system + tail, NEW, cache=cache)]
        assert request.tokens == alone, tail
