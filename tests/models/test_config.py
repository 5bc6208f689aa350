"""LlamaConfig and its rotary frequencies."""

import math
from dataclasses import replace

import numpy as np
import pytest

from lazykv.errors import ModelFormatError
from lazykv.models.config import (
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    LlamaConfig,
    inv_freq,
)

CONFIG = LlamaConfig(
    architecture="llama",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    rms_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    rope_interleaved=True,
    context_length=64,
    tied_head=True,
)
LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 8192)


def test_inv_freq_is_powers_of_theta():
    expected = [10000.0 ** (-i / 8) for i in (0, 2, 4, 6)]
    np.testing.assert_allclose(inv_freq(CONFIG), expected, rtol=1e-15)
    assert inv_freq(CONFIG).dtype == np.float64


def test_O6_llama3_scaling():
    plain = replace(CONFIG, rope_theta=500000.0, head_dim=128)
    divisors = inv_freq(plain) / inv_freq(replace(plain, rope_scaling=LLAMA3))
    np.testing.assert_allclose(divisors[:29], 1.0, rtol=1e-12)
    np.testing.assert_allclose(divisors[[29, 31, 34]], [1.2075, 2.0263, 5.2573], atol=5e-5)
    np.testing.assert_allclose(divisors[35:], 8.0, rtol=1e-12)


def test_linear_scaling_and_stored_divisors():
    base = inv_freq(CONFIG)
    assert (inv_freq(replace(CONFIG, rope_scaling=LinearScaling(4.0))) == base / 4).all()
    divisors = FrequencyDivisors((1.0, 2.0, 3.0, 4.0))
    assert (inv_freq(replace(CONFIG, rope_scaling=divisors)) == base / [1, 2, 3, 4]).all()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sliding_window": 0}, "sliding_window 0"),
        ({"sliding_window": 2.5}, "sliding_window 2.5"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"n_layers": -1}, "n_layers -1"),
        ({"hidden_size": 2**31}, "hidden_size 2147483648"),
        ({"n_heads": True}, "n_heads True"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"n_kv_heads": 3}, "n_heads 4 and n_kv_heads 3"),
        ({"rms_eps": 0.0}, "rms_eps 0.0"),
        ({"rope_theta": math.nan}, "rope_theta nan"),
        ({"rope_scaling": LinearScaling(0.0)}, "rope factor 0.0"),
        ({"rope_scaling": FrequencyDivisors((1.0,))}, "1 rotary divisors"),
        ({"rope_scaling": FrequencyDivisors((1.0, 1.0, 0.0, 1.0))}, "rotary divisor 0.0"),
        ({"rope_scaling": replace(LLAMA3, high_freq_factor=1.0)}, "high_freq_factor 1.0"),
        ({"rope_scaling": replace(LLAMA3, original_context_length=0)}, "original_context_length 0"),
    ],
)
def test_refusals_name_the_value(changes, said):
    with pytest.raises(ModelFormatError, match=said):
        replace(CONFIG, **changes)
