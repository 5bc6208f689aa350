"""The real model on the simulated device: its greedy tokens are those of the host, and recorded."""

import pytest

from lazykv.models import PagedDecoder

pytestmark = pytest.mark.slow


def test_greedy_ids_on_sim_are_the_recorded_ones(smollm2_model, golden):
    """Single tokens are captured and replayed."""
    case = golden[0]
    cache, got = smollm2_model.new_cache(128, device="sim:0"), []
    logits = smollm2_model.prefill(case["prompt_ids"], cache)
    for _ in case["generated_ids"]:
        got.append(int(logits.argmax()))
        logits = smollm2_model.decode_step(got[-1], cache)
    assert got == case["generated_ids"]
    assert smollm2_model.session_for(cache).replays >= len(got) - 1


def test_greedy_ids_over_a_pool_on_sim_are_the_recorded_ones(smollm2_model, golden):
    case = golden[0]
    pool, got = smollm2_model.new_pool(8, 16, device="sim:0"), []
    paged, session = PagedDecoder(smollm2_model, pool), pool.open()
    logits = paged.prefill(session, case["prompt_ids"])
    for _ in case["generated_ids"]:
        got.append(int(logits.argmax()))
        (logits,) = paged.decode([session], [got[-1]])
    assert got == case["generated_ids"]
