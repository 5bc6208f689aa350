"""The shape and constants of a Llama-type transformer, checked once, and its rotary frequencies."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lazykv.errors import ModelFormatError

MAX_EXTENT = 2**31 - 1
"""No single extent of a model passes this; it keeps products of a few of them in 64 bits."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation: every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's rule: long wavelengths divided by `factor`, short ones kept, a ramp between.

    `original_context_length` is in tokens; the two `freq_factor`s divide it to give the
    wavelengths (in tokens) between which the ramp lies.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


@dataclass(frozen=True, slots=True)
class FrequencyDivisors:
    """One divisor for each rotary pair, as a GGUF file stores them in `rope_freqs.weight`."""

    divisors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | FrequencyDivisors


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """What the graph of a Llama-type model depends on, apart from its weights.

    `rope_interleaved` tells how Q and K rows pair up for rotation: neighbours (2i, 2i+1) when
    true (GGUF files store rows in that order), halves (i, i + head_dim/2) when false (Hugging Face
    folders). `context_length` is in tokens. `tied_head` means the output projection is the
    embedding table. `head_dim` is independent of `hidden_size / n_heads`. `sliding_window` is how
    many positions a query sees, its own included (Mistral 7B, arXiv:2310.06825, section 2; None:
    all).

    Raises ModelFormatError naming the field, its value and the rule it breaks.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    rope_interleaved: bool
    context_length: int
    tied_head: bool
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for field in _EXTENTS:
            _need_extent(field, getattr(self, field))
        if self.sliding_window is not None:
            _need_extent("sliding_window", self.sliding_window)
        _need_positive("rms_eps", self.rms_eps)
        _need_positive("rope_theta", self.rope_theta)
        if self.head_dim % 2:
            raise ModelFormatError(
                f"LlamaConfig: got head_dim {self.head_dim}, need an even number (rotary pairs)"
            )
        if self.n_heads % self.n_kv_heads:
            raise ModelFormatError(
                f"LlamaConfig: got n_heads {self.n_heads} and n_kv_heads {self.n_kv_heads}, "
                "need n_heads to be a multiple of n_kv_heads"
            )
        if self.rope_scaling is not None:
            _check_scaling(self.rope_scaling, self.head_dim)


def inv_freq(config: LlamaConfig) -> NDArray[np.float64]:
    """Radians per position for each rotary pair, float64 `[head_dim / 2]`, scaling applied.

    The base rule is `theta ** (-2i / head_dim)` (Su et al. 2021, RoFormer); the scaled ones are
    described at the scaling classes.
    """
    pairs = np.arange(0, config.head_dim, 2, dtype=np.float64)
    base = config.rope_theta ** (-pairs / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return base
    if isinstance(scaling, LinearScaling):
        return base / scaling.factor
    if isinstance(scaling, FrequencyDivisors):
        return base / np.asarray(scaling.divisors, dtype=np.float64)
    return _llama3(base, scaling)


def _llama3(base: NDArray[np.float64], scaling: Llama3Scaling) -> NDArray[np.float64]:
    wavelength = 2 * math.pi / base
    turns = scaling.original_context_length / wavelength
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)  # 1: kept as it is, 0: divided by the whole factor
    return base * (kept + (1.0 - kept) / scaling.factor)


_EXTENTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "context_length",
)


def _need_extent(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_EXTENT:
        raise ModelFormatError(
            f"LlamaConfig: got {field} {value!r}, need a whole number from 1 to {MAX_EXTENT}"
        )


def _need_positive(field: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ModelFormatError(f"LlamaConfig: got {field} {value!r}, need a finite number above 0")


def _check_scaling(scaling: RopeScaling, head_dim: int) -> None:
    if isinstance(scaling, FrequencyDivisors):
        if len(scaling.divisors) != head_dim // 2:
            raise ModelFormatError(
                f"LlamaConfig: got {len(scaling.divisors)} rotary divisors, "
                f"need head_dim/2 = {head_dim // 2}"
            )
        for divisor in scaling.divisors:
            _need_positive("rotary divisor", divisor)
        return
    _need_positive("rope factor", scaling.factor)
    if isinstance(scaling, Llama3Scaling):
        _need_positive("low_freq_factor", scaling.low_freq_factor)
        _need_positive("high_freq_factor", scaling.high_freq_factor)
        _need_extent("original_context_length", scaling.original_context_length)
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ModelFormatError(
                f"LlamaConfig: got high_freq_factor {scaling.high_freq_factor}, "
                f"need more than low_freq_factor {scaling.low_freq_factor}"
            )
