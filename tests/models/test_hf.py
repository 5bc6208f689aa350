"""Folders written by transformers, against transformers' own logits in f32."""

from typing import Any

import numpy as np
import pytest

import lazykv as lk

pytestmark = [pytest.mark.hf, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]


@pytest.fixture(scope="module")
def hf() -> tuple[Any, Any]:
    return pytest.importorskip("torch"), pytest.importorskip("transformers")


LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4, "head_dim": 16},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "hidden_size": 36},
        {"rope_scaling": LLAMA3, "num_key_value_heads": 1},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_logits_are_those_of_transformers(hf, tmp_path, changes):
    torch, transformers = hf
    settings = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "rope_theta": 1000.0, "tie_word_embeddings": False,
        "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings | changes))
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if "norm" in name:  # ones as made, which would hide a norm that is left out
                weight.uniform_(0.5, 1.5)
        want = theirs.eval()(torch.tensor([TOKENS])).logits[0].numpy()
    theirs.save_pretrained(tmp_path)
    mine = lk.models.load(tmp_path)
    assert not mine.config.rope_interleaved
    assert mine.config.tied_head == bool(changes.get("tie_word_embeddings"))
    cache = mine.new_cache(len(TOKENS))
    got = [mine.prefill(TOKENS[:9], cache)]
    got += [mine.decode_step(t, cache) for t in TOKENS[9:]]
    np.testing.assert_allclose(got, want[8:], atol=1e-4 * np.abs(want).max())
