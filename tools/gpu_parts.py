"""What `gpu_check` checks and measures on ``cuda:0``. Each part gives a dict with ``ok``."""

import importlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import lazykv as lk
from lazykv.backends.cuda import CudaBackend
from lazykv.device import Call, DeviceLocation, Step
from lazykv.models.config import LlamaConfig
from lazykv.models.model import LlamaModel
from lazykv.models.weights import made_weights
from lazykv.ops.matmul import MatMul
from lazykv.ops.move import Copy
from lazykv.ops.op import Op
from lazykv.sessions.captured import CapturedDecodeSession
from lazykv.sessions.decode import DecodeSession

Result = dict[str, Any]

PLACE = DeviceLocation("cuda:0")


def backend() -> CudaBackend:
    found = lk.device(PLACE).backend
    assert isinstance(found, CudaBackend)
    return found


def floats(shape: Sequence[int], dtype: str = "f32", seed: int = 0) -> Any:
    made = np.random.default_rng(seed).standard_normal(tuple(shape)).astype(np.float32)
    return made.astype(lk.dtype(dtype).numpy)


# A decode step, captured and plain


def model_of(hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int) -> LlamaModel:
    """A Llama of made-up weights; one block of random numbers, over and over."""
    config = LlamaConfig(
        architecture="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner,
        n_layers=layers, n_heads=heads, n_kv_heads=kv, head_dim=hidden // heads, rms_eps=1e-5,
        rope_theta=1e4, rope_scaling=None, rope_interleaved=False, context_length=8192,
        tied_head=True,
    )  # fmt: skip
    block = floats((1 << 16,)) * np.float32(hidden**-0.5)
    return LlamaModel(config, made_weights(config, lambda shape: np.resize(block, shape)))


SMALL = (128, 256, 4, 4, 2, 1000)
SIZES = {
    "30M": (512, 1408, 8, 8, 4, 16000), "135M": (576, 1536, 30, 9, 3, 49152),
    "1B": (2048, 8192, 16, 32, 8, 32000),
}  # fmt: skip


class Decoding:
    """One session on one cache, a token at a time."""

    def __init__(self, model: LlamaModel, kind: type[DecodeSession], capacity: int) -> None:
        self.model, self.cache = model, model.new_cache(capacity, "bf16", PLACE)
        step = model.step_graph(self.cache)
        self.session = kind.build(
            lk.InferenceContext(PLACE), step.logits, kv=self.cache, kv_nodes=step.kv_nodes,
            bound=step.bound, model_key=model.model_key,
        )  # fmt: skip

    def step(self, token: int) -> Any:
        start = self.cache.cached_len
        cos, sin = self.model.rope.rows(start, 1)
        out = self.session.step({
            "ids": np.array([token]), "cos": cos, "sin": sin, "position": np.array(start),
        })  # fmt: skip
        self.cache.cached_len = start + 1
        return out


def capture(replays: int = 1000) -> Result:
    """Replays equal plain steps bit for bit, and allocate nothing."""
    model = model_of(*SMALL)
    plain, held = (Decoding(model, k, 512) for k in (DecodeSession, CapturedDecodeSession))
    rng, differ, used = np.random.default_rng(0), 0, 0
    for n in range(replays + 1):
        if n % 500 == 499:
            for d in (plain, held):
                d.cache.reset()
        token = int(rng.integers(model.config.vocab_size))
        want, got = plain.step(token), held.step(token)
        differ += want.tobytes() != got.tobytes()
        if n == 2:
            used = backend().used_bytes(PLACE)
    session = held.session
    assert isinstance(session, CapturedDecodeSession)
    grown = backend().used_bytes(PLACE) - used
    refused = backend().queue(PLACE).refused_allocations
    return {
        "ok": not differ and not refused and not grown and session.replays == replays,
        "replays": session.replays, "captures": session.captures, "differ": differ,
        "refused_allocations": refused, "grown_bytes": grown, "reason": session.reason,
        "summary": f"{session.replays} replays, {differ} differ, {refused} allocations",
    }  # fmt: skip


def steps(sizes: dict[str, tuple[int, ...]] | None = None, tokens: int = 32) -> Result:
    """Milliseconds of a step, plain and captured, by CUDA events around many."""
    found, said = {}, []
    for name, size in (SIZES if sizes is None else sizes).items():
        model = model_of(*size)  # type: ignore[call-arg]
        times = {}
        for kind in (DecodeSession, CapturedDecodeSession):
            d = Decoding(model, kind, 3 * tokens)
            for n in range(4):
                d.step(n)
            times[kind.__name__] = timed(lambda d=d: d.step(1), tokens)
        plain, captured = times["DecodeSession"], times["CapturedDecodeSession"]
        read = model.weights.nbytes / captured / 1e6
        found[name] = {"plain_ms": plain, "captured_ms": captured, "weights_gb_s": read}
        said.append(f"{name} {plain:.2f} -> {captured:.2f} ms")
    return {"ok": True, "sizes": found, "summary": "; ".join(said)}


def timed(f: Callable[[], object], times: int) -> float:
    """Milliseconds per call, by CUDA events."""
    xp = backend().xp
    with backend().current(PLACE):
        start, end = xp.cuda.Event(), xp.cuda.Event()
        start.record()
        for _ in range(times):
            f()
        end.record()
        end.synchronize()
        return float(xp.cuda.get_elapsed_time(start, end)) / times


# Bandwidth


def calls_of(op: Op, ins: Sequence[lk.Storage], out: lk.Storage) -> list[Step]:
    """The calls of an op on storages."""
    specs, place = tuple(s.spec for s in ins), out.location
    kernel = backend().kernel(op, specs, out.spec)
    assert kernel is not None
    scratch = [lk.Storage.allocate(s.shape, s.dtype, place).array
               for s in kernel.scratch(op, specs, out.spec)]  # fmt: skip
    arrays = tuple(s.array for s in ins)
    return list(kernel.emit(Call(op, arrays, out.array, specs, out.spec, tuple(scratch), [])))


def run(calls: Sequence[Step]) -> None:
    for f, args in calls:
        f(*args)


def bandwidth(k: int = 4096, n: int = 14336, copied: int = 1 << 30, times: int = 40) -> Result:
    """Bytes per second of the decode product, beside a copy on the device and cuBLAS."""
    found: Result = {"copy_gb_s": _copy_speed(copied)}
    for dt in ("f32", "f16", "bf16"):
        # Several matrices, so that none is found in the cache of the last time.
        matrix = floats((k, n), dt)
        weights = [lk.Storage.from_array(matrix, PLACE) for _ in range(3)]
        for m in (1, 8):
            x = lk.Storage.from_array(floats((m, k), dt), PLACE)
            out = lk.Storage.allocate((m, n), dt, PLACE)
            ours = [calls_of(MatMul(), [x, w], out) for w in weights]
            theirs = [_cublas(x, w, out) for w in weights]
            for name, each in (("gemv", ours), ("cublas", theirs)):
                every = [call for calls in each for call in calls]
                run(every)
                ms = timed(lambda every=every: run(every), max(1, times // 3)) / len(weights)
                found[f"{name}_{dt}_{m}_gb_s"] = weights[0].nbytes / ms / 1e6
    text = f"copy {found['copy_gb_s']:.0f} GB/s, gemv f16 {found['gemv_f16_1_gb_s']:.0f}"
    rest = f"cuBLAS f16 {found['cublas_f16_1_gb_s']:.0f}"
    return {"ok": all(map(math.isfinite, found.values())), **found, "summary": f"{text}, {rest}"}


def _copy_speed(nbytes: int) -> float:
    """Bytes read and written by a copy on the device, in GB/s."""
    source, dest = (lk.Storage.allocate((nbytes,), "u8", PLACE) for _ in range(2))
    copying = calls_of(Copy(), [source], dest)
    run(copying)
    return 2 * nbytes / timed(lambda: run(copying), 10) / 1e6


def _cublas(x: lk.Storage, w: lk.Storage, out: lk.Storage) -> list[Step]:
    xp, queue = backend().xp, backend().queue(PLACE)
    a, b, c = (s.array.view(s.dtype.numpy) for s in (x, w, out))
    return [(queue.run, (lambda: xp.matmul(a, b, out=c),))]


# Limits and exchange


def memory(too_much: int = 1 << 45) -> Result:
    """Running out of memory is typed, leaks nothing and is survived."""
    before, raised = backend().used_bytes(PLACE), []
    for ask in (
        lambda: lk.Storage.allocate((too_much,), "u8", PLACE),
        lambda: lk.KvCache.with_capacity(64, 64, 128, too_much >> 24, "f32", PLACE),
    ):
        try:
            ask()
        except lk.OutOfMemory as e:
            raised.append(str(e))
    leaked = backend().used_bytes(PLACE) - before
    after = lk.Storage.from_array(floats((1000,)), PLACE).to_numpy()
    ok = len(raised) == 2 and not leaked and np.array_equal(after, floats((1000,)))
    return {"ok": bool(ok), "raised": raised, "leaked_bytes": leaked, "summary": raised[0][:60]}


def dlpack(busy: int = 1 << 26) -> Result:
    """Storages and arrays of CuPy and PyTorch share memory, both ways; where host memory is needed
    those of devices are refused. `busy` is the size of an array that takes a while to fill."""
    xp = backend().xp
    found = {f"cupy {k}": ok for k, ok in _exchange(xp, xp.asarray, _pointer_of_cupy).items()}
    found["cupy is refused as a host array"] = _refused(xp.asarray(np.ones(3, np.float32)))
    found["a lender is waited for"] = _waits_for_the_lender(busy)
    if importlib.util.find_spec("torch") is None:
        return {"ok": all(found.values()), **found, "summary": "PyTorch is not installed"}
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return {"ok": all(found.values()), **found, "summary": "PyTorch has no CUDA"}
    made = _exchange(torch, lambda a: _tensor_of(torch, a), lambda t: t.data_ptr())
    found |= {f"torch {k}": ok for k, ok in made.items()}
    found["torch is refused as a host array"] = _refused(torch.ones(3, device="cuda"))
    return {"ok": all(found.values()), **found, "summary": f"{len(found)} exchanges"}


def _pointer_of_cupy(array: Any) -> int:
    return int(array.data.ptr)


def _tensor_of(torch: Any, data: Any) -> Any:
    """A tensor on the GPU; NumPy's bf16 goes by way of f32, which holds it exactly."""
    if data.dtype.name == "bfloat16":
        return torch.tensor(data.astype(np.float32)).to(torch.bfloat16).to("cuda")
    return torch.tensor(data).to("cuda")


def _exchange(
    library: Any, put: Callable[[Any], Any], pointer: Callable[[Any], int]
) -> dict[str, bool]:
    """Out: the library sees a storage. In: a plan writes the library's array, which then comes
    back through DLPack, so that the library waits for it."""
    found = {}
    for name in ("f32", "f16", "bf16", "i64"):
        data = (4 * floats((3, 5))).astype(lk.dtype(name).numpy)
        store = lk.Storage.from_array(data, PLACE)
        seen = library.from_dlpack(store)
        again = lk.Storage.wrap(seen)
        found[f"out {name}"] = pointer(seen) == store.array.data.ptr and _equal(again, data)
        array = put(data)
        lent = lk.Storage.wrap(array)
        g = lk.Graph()
        x = g.placeholder((3, 5), name)
        lk.plan([], {x: lent}, PLACE, effects=[x.at[1:2].set(x[0:1] + x[2:3])]).run()
        data[1] = data[0] + data[2]
        back = library.from_dlpack(lent)
        found[f"in {name}"] = pointer(back) == lent.array.data.ptr == pointer(array) and _equal(
            lent, data
        )
    return found


def _equal(store: lk.Storage, want: Any) -> bool:
    return store.to_numpy().tobytes() == want.tobytes()


def _waits_for_the_lender(size: int, times: int = 50) -> bool:
    """What the lender has queued on a stream of its own is there when the storage is read."""
    xp = backend().xp
    with xp.cuda.Stream(non_blocking=True):
        array = xp.zeros((size,), np.float32)
        for n in range(times):
            array[...] = n + 1
        store = lk.Storage.wrap(array)
    return bool((store.to_numpy() == times).all())


def _refused(tensor: object) -> bool:
    try:
        lk.Storage.from_array(tensor)
    except lk.BindingError:
        return True
    return False
