"""The tests of the ops once more, with the CUDA backend among the places that they compare."""

import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import fake_cupy
import pytest
import toy_backends
from cuda_cpu import needs_compiler
from fake_cupy.machine import machine

from lazykv.backends.cuda import CudaBackend
from lazykv.device import register_backend, unregister_backend

pytestmark = [needs_compiler, pytest.mark.slow]

FOLDER = Path(__file__).parents[1] / "ops"


@pytest.fixture(scope="module", autouse=True)
def on_cuda(kept_modules: None) -> Iterator[None]:
    with fake_cupy.installed():
        register_backend("cuda", CudaBackend())
        toy_backends.OTHERS.append("cuda:0")
        yield
        toy_backends.OTHERS.remove("cuda:0")
        unregister_backend("cuda")


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ops_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _names(code: CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _compares(test: Any) -> bool:
    """Whether a test runs something on every place."""
    inner = getattr(getattr(test, "hypothesis", None), "inner_test", test)
    code = inspect.unwrap(inner).__code__
    return bool({"run_everywhere", "check_everywhere", "check"} & _names(code))


def _tests() -> dict[str, Any]:
    """By a name that no two modules have."""
    found = {}
    for path in sorted(FOLDER.glob("test_*.py")):
        if "from toy_backends import" not in path.read_text():
            continue
        for name, value in vars(_module(path)).items():
            if name.startswith("test_") and _compares(value):
                found[f"test_{path.stem[5:]}_{name[5:]}"] = value
            elif name == "small_pieces":
                found[name] = value
    return found


globals().update(_tests())


def test_kernels_have_run() -> None:
    assert machine.launches > 1000
