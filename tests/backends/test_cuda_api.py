"""CuPy itself, without a GPU: that it has what the backend calls, and that its arrays and argument
conversions are what the stand-in takes them for. Skipped where CuPy is not installed."""

import ast
import ctypes
import gc
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cupy
import numpy as np
import pytest
from cuda_cpu import needs_compiler
from small_llama import small_llama

import lazykv as lk
from lazykv.backends import cuda as cuda_module
from lazykv.backends.cuda import CudaBackend
from lazykv.backends.cuda_probe import Stage
from lazykv.device import register_backend, unregister_backend
from lazykv.testing.runner import run_suite

cupy = pytest.importorskip("cupy")

BACKENDS = Path(cuda_module.__file__).parent
SOURCES = [*sorted(BACKENDS.glob("cuda*.py")), *sorted((BACKENDS.parent / "ops").glob("*.py"))]
NO_GPU = "cudaErrorInsufficientDriver|cudaErrorNoDevice|no CUDA-capable device"


def chains(path: Path) -> set[str]:
    """What a file takes from CuPy: ``cuda.runtime.memcpyAsync``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            names.append(node.id)
        line = names[::-1]
        for at, name in enumerate(line[:-1]):
            if name in ("cupy", "xp") and (at == 0 or line[0] in ("self", "site", "queue")):
                found.add(".".join(line[at + 1 :]))
            elif name in ("runtime", "_runtime") and "cuda" not in line:
                found.add(".".join(["cuda.runtime", *line[at + 1 :]]))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_cupy_has_every_name_that_is_used(path: Path) -> None:
    for chain in chains(path):
        part = cupy
        for name in chain.split("."):
            assert hasattr(part, name), f"{path.name}: cupy.{chain}"
            part = getattr(part, name)


def test_names_are_found_in_the_sources() -> None:
    """The search above finds what there is."""
    found = {c for path in SOURCES for c in chains(path)}
    assert {"cuda.MemoryPool", "cuda.runtime.memcpyAsync", "matmul", "where", "ndarray"} <= found


@pytest.mark.parametrize("name", [*fake_cupy.FUNCTIONS, *fake_cupy.DTYPES, "isdtype", "inf"])
def test_cupy_has_what_the_stand_in_has(name: str) -> None:
    assert hasattr(cupy, name)


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("cuda.Stream", (), {"non_blocking": True}),
    ("cuda.Event", (), {"disable_timing": True}),
    ("cuda.Event.record", (None, None), {}),
    ("cuda.Event.synchronize", (None,), {}),
    ("cuda.Stream.record", (None,), {}),
    ("cuda.Stream.wait_event", (None, None), {}),
    ("cuda.Stream.synchronize", (None,), {}),
    ("cuda.Stream.begin_capture", (None,), {}),
    ("cuda.Stream.end_capture", (None,), {}),
    ("cuda.using_allocator", (None,), {}),
    ("moveaxis", (None, 0, 0), {}),
    ("ascontiguousarray", (None,), {}),
    ("empty", ((1,), np.dtype(np.float32)), {}),
    ("asarray", (None,), {}),
    ("asarray", (None,), {"copy": True}),
]


@pytest.mark.parametrize(("name", "args", "options"), CALLS, ids=lambda v: str(v)[:30])
def test_calls_fit_the_signatures(name: str, args: Any, options: Any) -> None:
    part: Any = cupy
    for step in name.split("."):
        part = getattr(part, step)
    inspect.signature(part).bind(*args, **options)


DOCUMENTED = {
    "cuda.runtime.memcpyAsync": "(intptr_t dst, intptr_t src, size_t size, int kind, intptr_t str",
    "cuda.runtime.memsetAsync": "(intptr_t ptr, int value, size_t size, intptr_t stream)",
    "cuda.runtime.memcpyPeerAsync": "(intptr_t dst, int dstDevice, intptr_t src, int srcDevice, si",
    "cuda.alloc_pinned_memory": "(size_t size)",
    "cuda.MemoryPool.malloc": "(self, size_t size)",
    "cuda.MemoryPool.set_limit": "(self, size=None, fraction=None)",
    "cuda.MemoryPool.used_bytes": "(self)",
    "cuda.Graph.launch": "(self, stream=None)",
    "RawModule.get_function": "(self, str name)",
    "ndarray.astype": "(self, dtype, order='K', casting=None, subok=None, copy=True)",
}
"""Of compiled functions the first line of the documentation is the signature."""


@pytest.mark.parametrize("name", DOCUMENTED)
def test_compiled_functions_are_documented_as_they_are_called(name: str) -> None:
    part: Any = cupy
    for step in name.split("."):
        part = getattr(part, step)
    assert DOCUMENTED[name] in str(part.__doc__).splitlines()[0]
    assert cupy.cuda.runtime.memcpyHostToDevice == 1
    assert cupy.cuda.runtime.memcpyDeviceToHost == 2


def test_a_kernel_tells_what_makes_the_driver_load_it() -> None:
    assert "registers" in str(cupy.RawKernel.num_regs.__doc__)


def test_errors_are_what_they_are_taken_for() -> None:
    assert issubclass(cupy.cuda.memory.OutOfMemoryError, MemoryError)
    assert issubclass(cupy.cuda.runtime.CUDARuntimeError, RuntimeError)
    assert issubclass(cupy.cuda.driver.CUDADriverError, RuntimeError)


def test_numbers_are_passed_by_value_as_wide_as_they_are() -> None:
    from cupy._core._scalar import CScalar  # noqa: PLC0415 (CuPy may be missing)

    for value in (np.int32(-7), np.int64(-(2**40)), np.uint64(0), np.float32(1.5)):
        made = CScalar(value)
        assert ctypes.string_at(made.ptr, value.nbytes) == value.tobytes()


# CuPy's arrays, on memory of the host; kernels by the shim


@pytest.fixture
def real(kept_modules: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaBackend]:
    """The backend on CuPy's own arrays, which every launch lets CuPy itself convert."""
    monkeypatch.setattr(cuda_module, "probe", lambda: [Stage("capture", True, "", "")])
    with fake_cupy.installed(cupy=cupy):
        made = CudaBackend()
        register_backend("cuda", made)
        yield made
        unregister_backend("cuda")


@needs_compiler
def test_the_model_decodes_captured_on_arrays_of_cupy(real: CudaBackend) -> None:
    model, ids = small_llama(), []
    for place in ("cpu", "cuda:0"):
        cache, out = model.new_cache(32, "bf16", place), []
        logits = model.prefill([3, 1, 4, 1, 5], cache)
        for _ in range(12):
            out.append(int(logits.argmax()))
            logits = model.decode_step(out[-1], cache)
        ids.append(out)
    assert isinstance(cache.slot_storage(0, 0).array, cupy.ndarray)
    assert ids[0] == ids[1]
    assert model.session_for(cache).replays == 12


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("level", ["session", "capture", "async", "fault", "paged", "dtype"])
def test_the_suite_fails_only_where_cupy_needs_a_gpu(real: CudaBackend, level: str) -> None:
    results = run_suite("cuda", levels=[level]).run.report.results.values()
    failed = [r for r in results if r.outcome == "failed"]
    assert not [r for r in failed if not re.search(NO_GPU, r.reason or "")]
    assert len(failed) < len(results) / 2


@needs_compiler
def test_lent_memory_becomes_an_array_of_cupy(real: CudaBackend) -> None:
    """The lender is the stand-in, since CuPy asks the driver before it lends."""
    lender = fake_cupy.arrays.ndarray((2, 3), np.float32)
    lender._host()[...] = np.arange(6).reshape(2, 3)
    store = lk.Storage.wrap(lender)
    assert isinstance(store.array, cupy.ndarray)
    assert (store.array.data.ptr, store.array.device.id) == (lender.data.ptr, 0)
    assert store.to_numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    real.copy_in(store.array, np.ones((2, 3), np.float32))
    del store
    gc.collect()
    assert lender._host().tolist() == [[1, 1, 1], [1, 1, 1]]


@needs_compiler
def test_lazykv_arrays_export_and_refuse_as_cupy_does(real: CudaBackend) -> None:
    store = lk.Storage.allocate((2, 3), "bf16", "cuda:0")
    with pytest.raises(lk.BindingError, match="got a host access"):
        np.asarray(store)
    assert real.view(store.array, lk.bf16, lk.layout.Layout(1, (2,), (3,))).strides == (6,)
