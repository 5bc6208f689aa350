"""The real model over a pool: its greedy tokens are those of a contiguous cache, and recorded."""

from typing import Any

import numpy as np
import pytest

from lazykv.models import PagedDecoder

pytestmark = pytest.mark.slow

NEAR = 2e-3  # of logits up to 30; batches round matrix products otherwise than single rows

# The first 16 greedy tokens of each lead by 0.06 or more.
TEXTS = [
    "The capital of France is", "Once upon a time, there was a little girl who", "Water boils at",
    "1, 2, 3, 4,", "My favourite season is autumn because", "Hello",
    "A list of planets:\n- Mercury\n- Venus\n-", "import numpy as np\n\n",
]  # fmt: skip


def decoder(model: Any, size: int, tokens: int, **options: Any) -> PagedDecoder:
    return PagedDecoder(model, model.new_pool(-(-tokens // size), size), **options)


def alone(model: Any, ids: list[int], n: int) -> tuple[list[int], list[np.ndarray]]:
    """n greedy tokens over a contiguous cache, and the logits that chose them."""
    cache = model.new_cache(len(ids) + n)
    logits, out, seen = model.prefill(ids, cache), [], []
    for _ in range(n):
        seen.append(logits)
        out.append(int(logits.argmax()))
        logits = model.decode_step(out[-1], cache)
    return out, seen


@pytest.mark.parametrize("size", [1, 16, 64])
def test_greedy_ids_are_the_recorded_ones(smollm2_model, golden, size):
    """Recorded prompts in one pool, each decoded alone."""
    paged = decoder(smollm2_model, size, 64 * 8)
    cases = golden if size == 16 else golden[:1]
    for case in cases:
        session, got = paged.pool.open(), []
        logits = paged.prefill(session, case["prompt_ids"])
        for token in case["generated_ids"]:
            got.append(int(logits.argmax()))
            (logits,) = paged.decode([session], [token])
        assert got == case["generated_ids"], case["name"]
    (single,) = [s for s in paged.plans if s.seq == 1]
    # Prompts of odd length end with a chunk of one token.
    odd = sum(len(case["prompt_ids"]) % 2 for case in cases)
    assert single.realize_count == odd + sum(len(case["generated_ids"]) for case in cases)
    paged.pool.check()


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("past", [-1, 0, 1])
def test_prompts_that_end_at_a_block_boundary(smollm2_model, golden, size, past):
    """One token before it, on it and behind it, then across it."""
    text = golden[0]["prompt_ids"] + golden[0]["generated_ids"]
    ids = text[: size + past]
    want, logits = alone(smollm2_model, ids, 4)
    paged = decoder(smollm2_model, size, 128)
    session = paged.pool.open()
    got = paged.prefill(session, ids)
    for token, row in zip(want, logits, strict=True):
        np.testing.assert_allclose(got, row, rtol=0, atol=NEAR)
        assert int(got.argmax()) == token
        (got,) = paged.decode([session], [token])
    assert paged.pool.filled_tokens(session) == size + past + 4
    if size == 64:
        assert want == text[size + past : size + past + 4]


BUDGETS = [16, 9, 14, 16, 12, 7, 16, 10]


@pytest.fixture(scope="module")
def solo(smollm2_model):
    """Every ragged request by itself."""
    prompts = [smollm2_model.tokenizer.encode(text) for text in TEXTS]
    return [alone(smollm2_model, p, n) for p, n in zip(prompts, BUDGETS, strict=True)]


@pytest.mark.parametrize("size", [1, 16, 64])
def test_eight_ragged_requests_decode_as_each_does_alone(smollm2_model, solo, size):
    """Requests end one by one: batches of 8 down to 3 sequences, on plans for 8 and for 4."""
    prompts, budgets = [smollm2_model.tokenizer.encode(text) for text in TEXTS], BUDGETS
    assert len({len(p) for p in prompts}) > 4
    paged = decoder(smollm2_model, size, 512)
    live, done, batches = {}, {n: [] for n in range(8)}, set()
    for n, prompt in enumerate(prompts):
        session = paged.pool.open()
        live[n] = session, paged.prefill(session, prompt)
    while live:
        for n, (session, logits) in list(live.items()):
            np.testing.assert_allclose(logits, solo[n][1][len(done[n])], rtol=0, atol=NEAR)
            done[n].append(int(logits.argmax()))
            if len(done[n]) == budgets[n]:
                paged.pool.discard(session)
                del live[n]
        if live:
            sessions, chosen = [s for s, _ in live.values()], [done[n][-1] for n in live]
            batches.add(len(live))
            rows = paged.decode(sessions, chosen)
            live = {n: (s, row) for (n, (s, _)), row in zip(live.items(), rows, strict=True)}
    assert [done[n] for n in range(8)] == [ids for ids, _ in solo]
    assert {8, 3} <= batches
    assert {s.batch for s in paged.plans if s.seq == 1} == {8, 4, 1}
    assert paged.pool.free_blocks() == paged.pool.capacity()
    paged.pool.check()
