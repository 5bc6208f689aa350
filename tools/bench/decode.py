"""Decode speed on a real model, beside its limit and its peers, all in one run.

    python tools/bench/decode.py [--model smollm2] [--live 200] [--rounds 8] [--chunk 16]

Every decoder lives in a process of its own and decodes a chunk of tokens at the same live length,
in rotation, so that a slow second of the machine hits all of them. Reported are medians over all
chunks. The ceiling is the time of the model's matrix-vector products alone, in raw NumPy. The
second table compares one step at several capacities; the last line is one JSON object.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

import lazykv as lk
from lazykv.models.fetch import locate_model
from lazykv.models.gguf_file import read_gguf
from lazykv.models.llama import RopeTable

CAPACITIES = (512, 16384)
CAPACITY_LIVE = 128

Step = Callable[[], float]
"""Runs one token at the asked live length and returns the seconds it took."""


def timed(f: Callable[[], object]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


# Workers: each returns a Step.


def lazykv_step(model: str, live: int) -> Step:
    m = lk.models.load(model)
    cache = m.new_cache(max(512, live + 1))
    m.prefill(prompt(live), cache)

    def step() -> float:
        cache.truncate_to(live)
        return timed(lambda: m.decode_step(7, cache))

    step()
    return step


def matrices(model: str) -> list[np.ndarray]:
    """The model's matrices, input axis first, in the order a token meets them."""
    w = lk.models.load(model).weights
    out = []
    for layer in w.layers:
        out += [layer.qkv.array, layer.output.array, layer.gate_up.array, layer.down.array]
    return [*out, w.head.array]


def ceiling_step(model: str, live: int) -> Step:
    """Only the matrix-vector products, in the faster of NumPy's two forms."""
    rng = np.random.default_rng(0)
    forward = matrices(model)
    backward = [np.ascontiguousarray(w.T) for w in forward]
    xs = [rng.standard_normal(w.shape[0], dtype=np.float32) for w in forward]
    outs = [np.empty(w.shape[1], np.float32) for w in forward]

    def x_w() -> None:
        for x, w, out in zip(xs, forward, outs, strict=True):
            np.dot(x, w, out)

    def w_x() -> None:
        for x, w, out in zip(xs, backward, outs, strict=True):
            np.dot(w, x, out)

    best = min((x_w, w_x), key=lambda f: statistics.median(timed(f) for _ in range(9)))
    return lambda: timed(best)


def handwritten_step(model: str, live: int) -> Step:
    """What a careful person writes by hand: merged weights, preallocated cache, live rows only."""
    m = lk.models.load(model)
    c, w = m.config, m.weights
    hq, hkv, dim, inner = c.n_heads, c.n_kv_heads, c.head_dim, c.intermediate_size
    groups, eps = hq // hkv, np.float32(c.rms_eps)
    k_cache = np.zeros((c.n_layers, hkv, max(512, live + 1), dim), np.float32)
    v_cache = np.zeros_like(k_cache)
    cos, sin = (t[0] for t in RopeTable(c).rows(live, 1))
    pairs = (slice(0, None, 2), slice(1, None, 2))
    if not c.rope_interleaved:
        pairs = (slice(0, dim // 2), slice(dim // 2, None))

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(x @ x / np.float32(len(x)) + eps) * weight

    def turn(x: np.ndarray) -> np.ndarray:
        out = np.empty_like(x)
        a, b = x[:, pairs[0]], x[:, pairs[1]]
        out[:, pairs[0]], out[:, pairs[1]] = a * cos - b * sin, b * cos + a * sin
        return out

    def token() -> np.ndarray:
        x = w.head.array[:, 7].copy() if w.embedding is None else w.embedding.array[7].copy()
        for i, layer in enumerate(w.layers):
            qkv = (norm(x, layer.attn_norm.array) @ layer.qkv.array).reshape(-1, dim)
            turned = turn(qkv[: hq + hkv])
            k_cache[i, :, live], v_cache[i, :, live] = turned[hq:], qkv[hq + hkv :]
            k, v = k_cache[i, :, : live + 1], v_cache[i, :, : live + 1]
            q = turned[:hq].reshape(hkv, groups, dim) * np.float32(dim**-0.5)
            scores = q @ k.transpose(0, 2, 1)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            seen = (scores @ v) / scores.sum(-1, keepdims=True)
            x = x + seen.reshape(-1) @ layer.output.array
            both = norm(x, layer.ffn_norm.array) @ layer.gate_up.array
            gate, up = both[:inner], both[inner:]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down.array
        return norm(x, w.norm.array) @ w.head.array

    return lambda: timed(token)


def transformers_step(model: str, live: int) -> Step:
    """transformers, f32, DynamicCache, on the same weights."""
    import torch
    import transformers

    checkpoint = read_gguf(locate_model(model))
    c = checkpoint.config
    hf = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.n_layers,
            intermediate_size=c.intermediate_size, num_attention_heads=c.n_heads,
            num_key_value_heads=c.n_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_eps,
            rope_theta=c.rope_theta, tie_word_embeddings=c.tied_head,
            max_position_embeddings=c.context_length,
        )
    ).eval()  # fmt: skip
    hf.load_state_dict(hf_weights(checkpoint, torch), strict=False)
    with torch.inference_mode():
        cache = hf(torch.tensor([prompt(live)])).past_key_values
    token = torch.tensor([[7]])

    def step() -> float:
        with torch.inference_mode():
            seconds = timed(lambda: hf(token, past_key_values=cache))
        cache.crop(-1)
        return seconds

    step()
    return step


def hf_weights(checkpoint, torch) -> dict:  # type: ignore[no-untyped-def,type-arg]
    """The GGUF tensors under their transformers names, Q and K rows in half-split order."""
    c = checkpoint.config
    names = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    out = {}
    for name, source in checkpoint.tensors.items():
        array = source.load()
        parts = name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k") and c.rope_interleaved:
                pairs = array.reshape(-1, c.head_dim // 2, 2, c.hidden_size)
                array = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
            key = f"model.layers.{parts[1]}.{names[parts[2]]}.weight"
        else:
            key = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight",
                   "output": "lm_head.weight"}[parts[0]]  # fmt: skip
        out[key] = torch.from_numpy(array)
    return out


def llama_cpp_step(model: str, live: int) -> Step:
    """llama.cpp on the file itself (quantized weights, so another limit than the f32 ceiling)."""
    import llama_cpp

    llm = llama_cpp.Llama(
        str(locate_model(model)), n_ctx=max(512, live + 1), n_threads=os.cpu_count(), verbose=False
    )
    llm.eval(prompt(live))

    def step() -> float:
        llm.n_tokens = live
        return timed(lambda: llm.eval([7]))

    step()
    return step


WORKERS: dict[str, tuple[Callable[[str, int], Step], str | None]] = {
    "lazykv": (lazykv_step, None),
    "numpy ceiling": (ceiling_step, None),
    "numpy by hand": (handwritten_step, None),
    "transformers f32": (transformers_step, "transformers"),
    "llama.cpp (file bits)": (llama_cpp_step, "llama_cpp"),
}


def prompt(n: int) -> list[int]:
    """Some token ids; their values do not matter for speed."""
    return [100 + i % 1000 for i in range(n)]


def worker(name: str, model: str, live: int) -> None:
    """Serve chunks: a line with a count comes in, a JSON list of seconds goes out."""
    step = WORKERS[name][0](model, live)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps([step() for _ in range(int(line))]), flush=True)


class Peer:
    """One worker process."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self.seconds: list[float] = []
        command = [sys.executable, __file__, "--worker", name, "--model", args.model,
                   "--live", str(args.live)]  # fmt: skip
        env = {k: v for k, v in os.environ.items() if k not in SLOWED_BY}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.ready = self._answer() == "ready"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, tokens: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{tokens}\n")
        self.process.stdin.flush()
        self.seconds += json.loads(self._answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


SLOWED_BY = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Settings for old OpenBLAS builds that would slow every NumPy decoder down."""


def compare_peers(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    names = [n for n, (_, module) in WORKERS.items()
             if module is None or importlib.util.find_spec(module)]  # fmt: skip
    started = [Peer(name, args) for name in names]
    peers = [p for p in started if p.ready]
    for turn in range(args.rounds):
        for peer in peers[turn % len(peers) :] + peers[: turn % len(peers)]:
            peer.run(args.chunk)
    for peer in started:
        peer.close()
    ours = statistics.median(peers[0].seconds)
    rows = {}
    print(f"\none token at live length {args.live}, {args.rounds} x {args.chunk} tokens each")
    print(f"{'decoder':24}{'ms median':>11}{'ms best':>10}{'tokens/s':>10}{'lazykv is':>12}")
    for peer in peers:
        median, best = statistics.median(peer.seconds), min(peer.seconds)
        rows[peer.name] = {"ms": 1e3 * median, "best_ms": 1e3 * best, "ratio": median / ours}
        print(f"{peer.name:24}{1e3 * median:11.2f}{1e3 * best:10.2f}{1 / median:10.1f}"
              f"{median / ours:11.2f}x")  # fmt: skip
    for name in [n for n in WORKERS if n not in names]:
        print(f"{name:24}  not installed")
    for peer in started:
        if not peer.ready:  # such as a wheel for other processors
            print(f"{peer.name:24}  did not start, exit code {peer.process.returncode}")
    return rows


def compare_capacities(args: argparse.Namespace) -> dict[str, float]:
    """One step at the same live length in caches of different capacity, in turn, in one process."""
    m = lk.models.load(args.model)
    caches = [m.new_cache(n) for n in CAPACITIES]
    for cache in caches:
        m.prefill(prompt(CAPACITY_LIVE), cache)
    seconds: list[list[float]] = [[] for _ in caches]
    for turn in range(args.rounds * args.chunk):
        for n in (0, 1) if turn % 2 else (1, 0):
            caches[n].truncate_to(CAPACITY_LIVE)
            seconds[n].append(timed(lambda cache=caches[n]: m.decode_step(7, cache)))
    medians = [statistics.median(s) for s in seconds]
    print(f"\none token at live length {CAPACITY_LIVE}")
    for capacity, median in zip(CAPACITIES, medians, strict=True):
        print(f"capacity {capacity:<15}{1e3 * median:11.2f} ms {median / medians[0]:19.3f}x")
    return {"capacity_ratio": medians[1] / medians[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--live", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.model, args.live)
        return
    if any(os.environ.pop(name, None) for name in SLOWED_BY):
        os.execv(sys.executable, [sys.executable, *sys.argv])
    rows = compare_peers(args)
    result = {"bench": "decode", "live": args.live, "decoders": rows, **compare_capacities(args)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
