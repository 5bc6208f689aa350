"""What deciding and re-binding cost, beside planning anew, in one run.

    python tools/bench/sessions.py [--layers 32] [--rounds 15]

A made-up Llama of the asked depth; medians. The last line is one JSON object.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import lazykv as lk
from lazykv.models.config import LlamaConfig
from lazykv.models.model import LlamaModel
from lazykv.models.weights import random_weights
from lazykv.runtime.plan_cache import plan_cache


def model_of(layers: int) -> LlamaModel:
    config = LlamaConfig(
        architecture="llama", vocab_size=256, hidden_size=64, intermediate_size=128,
        n_layers=layers, n_heads=8, n_kv_heads=2, head_dim=8, rms_eps=1e-5, rope_theta=1e4,
        rope_scaling=None, rope_interleaved=True, context_length=512, tied_head=True,
    )  # fmt: skip
    return LlamaModel(config, random_weights(config, 0))


def median(f: Callable[[], object], rounds: int, inner: int = 1) -> float:
    """Seconds of one call."""
    out = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(inner):
            f()
        out.append((time.perf_counter() - start) / inner)
    return statistics.median(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    model = model_of(args.layers)
    caches = [model.new_cache(128), model.new_cache(128)]
    session, key = model.session_for(caches[0]), model.model_key

    def rebind() -> None:
        caches.reverse()
        assert session.rebind_kv(caches[0]) is None

    def replan() -> None:
        plan_cache.clear()
        caches[0].held.clear()
        model.session_for(caches[0])

    def replan_known() -> None:
        caches[0].held.clear()
        model.session_for(caches[0])

    rows = {
        "validity_for": median(
            lambda: session.validity_for(caches[0], model_key=key), args.rounds, 2000
        ),
        "rebind_kv": median(rebind, args.rounds),
        "plan again, structure known": median(replan_known, args.rounds),
        "plan again": median(replan, args.rounds),
    }
    print(f"{args.layers} layers, lazykv {lk.__version__}")
    for name, seconds in rows.items():
        print(f"{name:30}{1e6 * seconds:12.1f} us{seconds / rows['plan again']:12.5f} of planning")
    print(json.dumps({"bench": "sessions", "layers": args.layers, "seconds": rows}))


if __name__ == "__main__":
    main()
