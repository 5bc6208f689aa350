"""A Llama forward pass in float64, position by position and head by head, and small models.

Nothing here is shared with the package but the weights' numbers: rotation, scaling, masking and
normalization are written out again from their papers.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from lazykv.models.config import Llama3Scaling, LlamaConfig
from lazykv.models.model import LlamaModel
from lazykv.models.weights import LlamaWeights, frozen, random_weights

Array = np.ndarray[Any, Any]


def config(**changes: Any) -> LlamaConfig:
    base = {
        "architecture": "llama", "vocab_size": 37, "hidden_size": 24, "intermediate_size": 40,
        "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "rms_eps": 1e-5,
        "rope_theta": 100.0, "rope_scaling": None, "rope_interleaved": True,
        "context_length": 2048, "tied_head": False,
    }  # fmt: skip
    return LlamaConfig(**(base | changes))


def model(seed: int = 0, **changes: Any) -> LlamaModel:
    """Random weights large enough that every part shows in the logits; norms that are not ones."""
    shape = config(**changes)
    weights = random_weights(shape, seed, 0.3)
    rng = np.random.default_rng(seed + 1)

    def norm() -> Any:
        return frozen(rng.uniform(0.5, 1.5, shape.hidden_size).astype(np.float32))

    layers = tuple(replace(w, attn_norm=norm(), ffn_norm=norm()) for w in weights.layers)
    return LlamaModel(shape, replace(weights, norm=norm(), layers=layers))


def frequencies(c: LlamaConfig) -> list[float]:
    """Radians per position of each pair."""
    out = []
    for pair in range(c.head_dim // 2):
        f = c.rope_theta ** (-2.0 * pair / c.head_dim)
        s = c.rope_scaling
        if isinstance(s, Llama3Scaling):
            wavelength = 2 * math.pi / f
            low = s.original_context_length / s.low_freq_factor
            high = s.original_context_length / s.high_freq_factor
            if wavelength > low:
                f /= s.factor
            elif wavelength >= high:
                smooth = (s.original_context_length / wavelength - s.low_freq_factor) / (
                    s.high_freq_factor - s.low_freq_factor
                )
                f = (1 - smooth) * f / s.factor + smooth * f
        elif s is not None:
            f /= s.factor
        out.append(f)
    return out


def rotate(c: LlamaConfig, x: Array, position: int) -> Array:
    """One head's vector turned by its position."""
    out, half = x.copy(), c.head_dim // 2
    for pair, f in enumerate(frequencies(c)):
        i, j = (2 * pair, 2 * pair + 1) if c.rope_interleaved else (pair, pair + half)
        cos, sin = math.cos(position * f), math.sin(position * f)
        out[i], out[j] = x[i] * cos - x[j] * sin, x[j] * cos + x[i] * sin
    return out


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean() + eps) * weight


def forward(c: LlamaConfig, weights: LlamaWeights, ids: list[int], sinks: int = 0) -> Array:
    """Logits ``[n, vocab]`` after every token. With a sliding window, full attention under a mask
    that leaves the last positions and the first `sinks`."""
    w = {name: getattr(weights, name) for name in ("head", "norm")}
    w = {name: s.to_numpy().astype(np.float64) for name, s in w.items()}
    table = w["head"].T if weights.embedding is None else weights.embedding.to_numpy()
    x = [table[t].astype(np.float64) for t in ids]
    queries, keys, dim = c.n_heads, c.n_kv_heads, c.head_dim
    for layer in weights.layers:
        p = {n: getattr(layer, n).to_numpy().astype(np.float64) for n in layer.__slots__}
        past_k: list[list[Array]] = [[] for _ in range(keys)]
        past_v: list[list[Array]] = [[] for _ in range(keys)]
        for position in range(len(ids)):
            qkv = rms_norm(x[position], p["attn_norm"], c.rms_eps) @ p["qkv"]
            heads = qkv.reshape(queries + 2 * keys, dim)
            for h in range(keys):
                past_k[h].append(rotate(c, heads[queries + h], position))
                past_v[h].append(heads[queries + keys + h])
            window = c.sliding_window or len(ids)
            near = [p for p in range(position + 1) if p > position - window or p < sinks]
            seen = []
            for h in range(queries):
                mine = h // (queries // keys)
                past = np.array(past_k[mine])[near]
                scores = past @ rotate(c, heads[h], position) / math.sqrt(dim)
                share = np.exp(scores - scores.max())
                seen.append(share / share.sum() @ np.array(past_v[mine])[near])
            x[position] = x[position] + np.concatenate(seen) @ p["output"]
            both = rms_norm(x[position], p["ffn_norm"], c.rms_eps) @ p["gate_up"]
            gate, up = both[: c.intermediate_size], both[c.intermediate_size :]
            x[position] = x[position] + (gate / (1 + np.exp(-gate)) * up) @ p["down"]
    return np.array([rms_norm(row, w["norm"], c.rms_eps) @ w["head"] for row in x])
