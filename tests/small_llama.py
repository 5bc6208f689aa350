"""A made-up Llama that decodes in a millisecond."""

from dataclasses import replace
from typing import Any

from lazykv.models.config import LlamaConfig
from lazykv.models.model import LlamaModel
from lazykv.models.weights import random_weights

CONFIG = LlamaConfig(
    architecture="llama", vocab_size=32, hidden_size=16, intermediate_size=24, n_layers=2,
    n_heads=4, n_kv_heads=2, head_dim=4, rms_eps=1e-5, rope_theta=1e4, rope_scaling=None,
    rope_interleaved=True, context_length=512, tied_head=True,
)  # fmt: skip


def small_llama(seed: int = 0, **changes: Any) -> LlamaModel:
    config = replace(CONFIG, **changes)
    return LlamaModel(config, random_weights(config, seed))
