"""The example on array-api-strict, of which lazykv knows nothing, keeps what it declares."""

import importlib
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import lazykv as lk
from lazykv.device import Kernel, register_backend, registry, unregister_backend
from lazykv.ops.op import Op
from lazykv.spec import Spec
from lazykv.testing.runner import Done, run_suite

pytest.importorskip("array_api_strict")

EXAMPLE = Path(__file__).parents[2] / "examples" / "strict_backend"
DECLARED = "not f16 and not f8"
"""Tests of dtypes that it does not store would only be skipped."""


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's package as it lies there, imported and not installed."""
    monkeypatch.syspath_prepend(EXAMPLE / "src")
    yield importlib.import_module("lazykv_strict")
    unregister_backend("strict")
    for name in [n for n in sys.modules if n.split(".")[0] == "lazykv_strict"]:
        del sys.modules[name]


def failures(done: Done) -> list[str]:
    found = done.run.report.results.values()
    return [f"{r.id}: {r.reason}" for r in found if r.outcome == "failed"]


@pytest.mark.slow
def test_it_keeps_what_it_declares(package: Any) -> None:
    register_backend("strict", package.StrictBackend())
    done = run_suite("strict", keyword=DECLARED)
    assert (done.code, failures(done)) == (0, [])
    passed = {level: c["passed"] for level, c in done.run.report.counts().items()}
    assert passed["core"] > 4000
    assert min(passed.values()) >= 3
    assert not hasattr(lk.Storage.allocate((2,), "f32", "strict:0").array, "__array__")


@pytest.mark.slow
def test_the_other_device_is_as_good(package: Any) -> None:
    register_backend("strict", package.StrictBackend())
    done = run_suite("strict", device="strict:1", levels=["session", "paged"], keyword=DECLARED)
    assert (done.code, failures(done)) == (0, [])


@pytest.mark.slow
def test_lowerings_hold_where_fused_ops_have_no_kernel(package: Any) -> None:
    asked = set()

    class Primitive(package.StrictBackend):  # type: ignore[misc, name-defined]
        def kernel(self, op: Op, ins: tuple[Spec, ...], out: Spec) -> Kernel | None:
            if type(op).lower is Op.lower:
                return super().kernel(op, ins, out)
            asked.add(op.name)
            return None

    register_backend("strict", Primitive())
    tests = [f"core/test_{n}.py" for n in ("attention", "elementwise", "reductions")]
    done = run_suite("strict", tests=[*tests, "paged/"], keyword=f"f32 and {DECLARED}")
    assert (done.code, failures(done)) == (0, [])
    assert {"attention", "paged_attention", "ring_attention", "softmax", "rope"} <= asked


def test_it_is_found_by_the_entry_point_of_its_project(
    package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    registry.backends.pop("strict", None)
    info = tmp_path / "lazykv_strict-7.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: 7.1\n")
    points = [
        f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in names.items())
        for group, names in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(points))
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(lk.device("strict:1").backend, package.StrictBackend)
    done = run_suite("strict", tests=["core/test_memory.py::test_declarations_make_sense"])
    assert done.code == 0, done.text
    report = done.run.report.to_dict()["backend"]
    assert report["package"] == {"name": "lazykv-strict", "version": "7.1"}
    assert report["class"] == "lazykv_strict.backend:StrictBackend"
