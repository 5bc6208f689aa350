"""The conformance suite on the CUDA backend, on the stand-in for CuPy."""

import pytest
from cuda_cpu import needs_compiler

from lazykv.backends.cuda import CudaBackend
from lazykv.testing.levels import LEVELS
from lazykv.testing.runner import run_suite

SKIPPED = {
    "cuda lists no ops",
    "cuda declares no survives_fork",
    "cuda declares no host_memory",
    "cuda declares capture",
    "cuda records no op by its body: capture on cuda:0: got fail of (f32[5,3]), for which there is "
    "no kernel, need queued work only",
    "memory of the host is wrapped on cpu",
    "Python 3.12 brought __buffer__ (PEP 688)",
}
"""Reasons; of what it declares nothing is left out."""


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_the_backend_conforms(cuda: CudaBackend, level: str) -> None:
    done = run_suite("cuda", levels=[level])
    results = done.run.report.results.values()
    assert done.code == 0, done.text
    assert {r.outcome for r in results} <= {"passed", "skipped"}
    assert {r.reason for r in results if r.outcome == "skipped"} <= SKIPPED
    assert "passed" in {r.outcome for r in results}


@needs_compiler
def test_its_facts_are_of_the_gpu(cuda: CudaBackend) -> None:
    assert cuda.facts(cuda.locations()[1]) == {
        "gpu": "no GPU",
        "compute_capability": "00",
        "driver_cuda": "12.8",
        "runtime_cuda": "12.9",
        "cupy": cuda.xp.__version__,
    }
