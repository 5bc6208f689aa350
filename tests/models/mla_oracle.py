"""A multi-head latent attention decoder in float64, position by position and head by head.

Nothing is absorbed: the keys and values of every head are expanded from the latent, as the paper
first writes them (DeepSeek-V2, arXiv:2405.04434, equations 9 to 19 without query compression).
"""

import math
from typing import Any

import numpy as np

from lazykv.models.mla import MlaConfig, MlaModel, MlaWeights, random_weights

Array = np.ndarray[Any, Any]


def config(**changes: Any) -> MlaConfig:
    base: dict[str, Any] = {
        "vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "n_layers": 2, "n_heads": 3,
        "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
        "rms_eps": 1e-5, "rope_theta": 100.0,
    }  # fmt: skip
    return MlaConfig(**(base | changes))


def model(seed: int = 0, **changes: Any) -> MlaModel:
    """Random weights large enough that every part shows in the logits."""
    shape = config(**changes)
    return MlaModel(shape, random_weights(shape, seed, 0.3))


def rotate(c: MlaConfig, x: Array, position: int) -> Array:
    out = x.copy()
    for i in range(0, len(x), 2):
        angle = position * c.rope_theta ** (-i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i], out[i + 1] = x[i] * cos - x[i + 1] * sin, x[i + 1] * cos + x[i] * sin
    return out


def norm(x: Array, weight: Array, eps: float) -> Array:
    return x / math.sqrt((x * x).mean() + eps) * weight


def forward(c: MlaConfig, weights: MlaWeights, ids: list[int]) -> Array:
    """Logits ``[n, vocab]`` after every token."""
    top = {
        n: getattr(weights, n).to_numpy().astype(np.float64) for n in ("embedding", "head", "norm")
    }
    nope, rope, rank = c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank
    x = [top["embedding"][t] for t in ids]
    for layer in weights.layers:
        p = {n: getattr(layer, n).to_numpy().astype(np.float64) for n in layer.__slots__}
        keys: list[list[Array]] = [[] for _ in range(c.n_heads)]
        values: list[list[Array]] = [[] for _ in range(c.n_heads)]
        for position in range(len(ids)):
            both = norm(x[position], p["attn_norm"], c.rms_eps) @ p["down"]
            queries = both[: c.query_width].reshape(c.n_heads, nope + rope)
            latent = norm(both[c.query_width : c.query_width + rank], p["latent_norm"], c.rms_eps)
            shared = rotate(c, both[c.query_width + rank :], position)
            seen = []
            for h in range(c.n_heads):
                keys[h].append(np.concatenate([p["k_up"][h] @ latent, shared]))
                values[h].append(latent @ p["v_up"][h])
                q = np.concatenate([queries[h][:nope], rotate(c, queries[h][nope:], position)])
                scores = np.array(keys[h]) @ q / math.sqrt(nope + rope)
                share = np.exp(scores - scores.max())
                seen.append(share / share.sum() @ np.array(values[h]))
            x[position] = x[position] + np.concatenate(seen) @ p["output"]
            wide = norm(x[position], p["ffn_norm"], c.rms_eps) @ p["gate_up"]
            gate, up = wide[: c.intermediate_size], wide[c.intermediate_size :]
            x[position] = x[position] + (gate / (1 + np.exp(-gate)) * up) @ p["ffn_down"]
    return np.array([norm(row, top["norm"], c.rms_eps) @ top["head"] for row in x])
