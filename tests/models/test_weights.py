"""Weights as the graph wants them: merged, input axis first, shared where the head is tied."""

from pathlib import Path

import numpy as np
import pytest
from llama_oracle import config

from lazykv.models.checkpoint import Checkpoint, TensorSource, expected_shapes
from lazykv.models.weights import load_weights, random_weights


def checkpoint(tied: bool) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    shape, rng = config(tied_head=tied), np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal(extent).astype(np.float32)
        for name, extent in expected_shapes(shape).items()
    }
    sources = {
        name: TensorSource(name, a.shape, "F32", lambda a=a: a) for name, a in arrays.items()
    }
    return Checkpoint(shape, sources, None, None, "made up", Path("none")), arrays


@pytest.mark.parametrize("tied", [False, True])
def test_projections_are_merged_and_turned(tied):
    source, a = checkpoint(tied)
    seen = []
    weights = load_weights(source, lambda done, total: seen.append((done, total)))
    assert seen == [(n + 1, len(a)) for n in range(len(a))]
    for i, layer in enumerate(weights.layers):
        block = {n.split(".")[2]: x for n, x in a.items() if n.startswith(f"blk.{i}.")}
        for name, parts in {
            "qkv": ["attn_q", "attn_k", "attn_v"],
            "output": ["attn_output"],
            "gate_up": ["ffn_gate", "ffn_up"],
            "down": ["ffn_down"],
        }.items():
            want = np.concatenate([block[p] for p in parts]).T
            np.testing.assert_array_equal(getattr(layer, name).to_numpy(), want)
        for name in ("attn_norm", "ffn_norm"):
            np.testing.assert_array_equal(getattr(layer, name).to_numpy(), block[name])
    np.testing.assert_array_equal(weights.norm.to_numpy(), a["output_norm.weight"])
    head = a["token_embd.weight" if tied else "output.weight"]
    np.testing.assert_array_equal(weights.head.to_numpy(), head.T)
    assert (weights.embedding is None) == tied
    assert weights.nbytes == sum(x.nbytes for x in a.values())


def test_every_weight_is_frozen_and_contiguous():
    for weights in (load_weights(checkpoint(False)[0]), random_weights(config(), 1)):
        stores = [weights.head, weights.norm, weights.embedding]
        stores += [getattr(w, n) for w in weights.layers for n in w.__slots__]
        assert len({s.id for s in stores}) == len(stores)
        for store in stores:
            assert store.frozen
            assert store.array.flags.c_contiguous


def test_random_weights_have_the_shapes_of_loaded_ones():
    for tied in (False, True):
        made, loaded = random_weights(config(tied_head=tied), 3), load_weights(checkpoint(tied)[0])
        assert made.nbytes == loaded.nbytes
        for a, b in zip(made.layers, loaded.layers, strict=True):
            assert [getattr(a, n).spec for n in a.__slots__] == [
                getattr(b, n).spec for n in b.__slots__
            ]
    again, other = random_weights(config(), 3), random_weights(config(), 4)
    first = random_weights(config(), 3).head.to_numpy()
    np.testing.assert_array_equal(again.head.to_numpy(), first)
    assert not np.array_equal(other.head.to_numpy(), first)
