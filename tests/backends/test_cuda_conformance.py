"""The conformance suite on the CUDA backend, on the stand-in for CuPy."""

import pytest
from cuda_cpu import needs_compiler

from lazykv.backends.cuda import CudaBackend
from lazykv.testing.levels import LEVELS
from lazykv.testing.runner import run_suite


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_the_backend_conforms(cuda: CudaBackend, level: str) -> None:
    done = run_suite("cuda", levels=[level])
    failed = [r.id for r in done.run.report.results.values() if r.outcome != "passed"]
    assert done.code == 0, done.text
    assert len(failed) < len(done.run.report.results)
