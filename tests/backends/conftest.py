"""Fixtures of the kernels' tests, and a CUDA backend on the stand-in for CuPy."""

from collections.abc import Iterator
from typing import NoReturn

import fake_cupy
import pytest
from cuda_cpu import Memory, needs_compiler
from fake_cupy import kernels

from lazykv.backends.cuda import CudaBackend
from lazykv.device import register_backend, registry, unregister_backend


@pytest.fixture(autouse=True)
def _marked_if_it_runs_kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a test without the mark fails here, and not only where there is no g++."""

    def refuse(text: str) -> NoReturn:
        raise AssertionError("a test without `needs_compiler` runs a kernel")

    if needs_compiler.mark not in request.node.iter_markers("skipif"):
        monkeypatch.setattr(kernels, "_library", refuse)


@pytest.fixture
def memory(capfd: pytest.CaptureFixture[str]) -> Iterator[Memory]:
    """Guarded memory; at the end of a test no guard is broken and no sanitizer has complained."""
    made = Memory()
    yield made
    made.check()
    assert "runtime error" not in capfd.readouterr().err


@pytest.fixture(scope="session")
def kept_modules(request: pytest.FixtureRequest) -> None:
    """Compiled kernels are kept between runs, if pytest keeps anything."""
    cache = getattr(request.config, "cache", None)
    kernels.folder = cache and cache.mkdir("cuda_modules")


@pytest.fixture
def cuda(kept_modules: None, capfd: pytest.CaptureFixture[str]) -> Iterator[CudaBackend]:
    """A fresh machine of two devices, and the backend on it in place of the process's own; no
    sanitizer has complained about a kernel in the end."""
    before = registry.backends.get("cuda")
    with fake_cupy.installed():
        made = CudaBackend()
        register_backend("cuda", made)
        yield made
        if before is None:
            unregister_backend("cuda")
        else:
            register_backend("cuda", before)
    assert "runtime error" not in capfd.readouterr().err
