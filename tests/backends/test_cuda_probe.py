"""Probing for CUDA: every stage fails by name, none raises, and a missing one is one clear line."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_cupy
import pytest
from cuda_cpu import needs_compiler
from fake_cupy.machine import machine

import lazykv as lk
from lazykv.backends.cuda import CudaBackend
from lazykv.backends.cuda_probe import probe
from lazykv.device import registry

REAL = importlib.util.find_spec("cupy") is not None


def fails(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("first line\n  second line")


BROKEN: dict[str, list[Callable[[Any], object]]] = {
    "cupy": [lambda cupy: setattr(cupy, "__version__", "13.6.0")],
    "driver": [
        lambda cupy: setattr(cupy.cuda.runtime, "driverGetVersion", lambda: 0),
        lambda cupy: setattr(cupy.cuda.runtime, "driverGetVersion", lambda: 11080),
        lambda cupy: setattr(cupy.cuda.runtime, "driverGetVersion", fails),
    ],
    "device": [
        lambda cupy: setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0),
        lambda cupy: setattr(cupy.cuda.runtime, "getDeviceCount", fails),
    ],
    "memory": [
        lambda cupy: setattr(cupy, "asarray", fails),
        lambda cupy: setattr(cupy, "asnumpy", lambda a: a.get() * 0),
    ],
    "compiler": [
        lambda cupy: setattr(cupy, "RawModule", fails),
        lambda cupy: setattr(cupy.RawModule, "get_function", lambda self, name: lambda *a: None),
    ],
    "libraries": [
        lambda cupy: setattr(cupy, "matmul", fails),
        lambda cupy: setattr(cupy, "matmul", lambda a, b: a),
        lambda cupy: setattr(cupy, "matmul", lambda a, b: None),  # and so nothing to add 1 to
    ],
    "capture": [
        lambda cupy: setattr(cupy.cuda.Stream, "begin_capture", fails),
        lambda cupy: setattr(cupy.cuda.Stream, "end_capture", _forgets),
        lambda cupy: setattr(cupy.cuda.Stream, "begin_capture", _runs_while_captured),
    ],
}
STAGES = list(BROKEN)


class _NoGraph:
    def launch(self, stream: Any) -> None:
        """Runs nothing."""


def _forgets(stream: Any) -> _NoGraph:
    stream.recording = None
    return _NoGraph()


def _runs_while_captured(stream: Any) -> None:
    stream.recording = []
    stream.push = lambda work: work()


@pytest.fixture
def cupy(kept_modules: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in, which may be broken: it is another one each time, and so are its parts."""
    with fake_cupy.installed():
        made = sys.modules["cupy"]
        for owner, names in (
            (made.cuda, ("Stream", "runtime")), (made, ("RawModule",)),
        ):  # fmt: skip
            for name in names:
                part = getattr(owner, name)
                monkeypatch.setattr(owner, name, _copied(part))
        yield made


def _copied(part: Any) -> Any:
    if isinstance(part, ModuleType):
        made = ModuleType(part.__name__)
        vars(made).update(vars(part))
        return made
    return type(part.__name__, (part,), {})


@needs_compiler
def test_all_stages_are_passed_in_their_order(cupy: ModuleType) -> None:
    found = probe()
    assert [s.name for s in found] == STAGES
    assert all(s.ok for s in found)
    assert "14.2.0" in found[0].detail
    assert "2 devices" in found[2].detail


@needs_compiler
@pytest.mark.parametrize(
    ("stage", "n"), [(stage, n) for stage, ways in BROKEN.items() for n in range(len(ways))]
)
def test_a_stage_that_fails_is_the_last_one(cupy: ModuleType, stage: str, n: int) -> None:
    BROKEN[stage][n](cupy)
    found = probe()
    assert [s.name for s in found] == STAGES[: STAGES.index(stage) + 1]
    assert [s.ok for s in found] == [True] * (len(found) - 1) + [False]
    assert "\n" not in found[-1].detail
    if stage == "capture":
        assert not CudaBackend().capabilities.capture
    else:
        with pytest.raises(lk.BackendUnavailable, match=rf"'cuda': got .*\(stage '{stage}'\)"):
            CudaBackend()


@pytest.mark.parametrize("stage", ["compiler", pytest.param("libraries", marks=needs_compiler)])
def test_what_a_toolkit_brings_says_what_to_install(cupy: ModuleType, stage: str) -> None:
    BROKEN[stage][0](cupy)
    hint = probe()[-1].hint
    assert "'lazykv[cuda13]' or 'lazykv[cuda12]'" in hint
    assert "headers" in hint  # without them CuPy compiles nothing
    assert ("cuBLAS" in hint) == (stage == "libraries")


@needs_compiler
def test_the_current_device_is_probed_and_no_other(cupy: ModuleType) -> None:
    with cupy.cuda.Device(1):
        assert probe()[-1].ok
    used = [bool(heap.taken) for heap in machine.heaps]
    assert used == [False, True]


@pytest.mark.skipif(REAL, reason="CuPy is installed")
def test_without_cupy_a_device_says_what_to_install() -> None:
    (stage,) = probe()
    assert (stage.name, stage.ok) == ("cupy", False)
    with pytest.raises(lk.BackendUnavailable) as caught:
        lk.device("cuda:0")
    text = str(caught.value)
    assert "\n" not in text
    assert "No module named 'cupy'" in text
    assert "pip install 'lazykv[cuda13]' or 'lazykv[cuda12]'" in text
    assert "cuda" not in registry.backends


def test_an_import_that_fails_in_any_way_is_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert probe()[-1].name == "cupy"
    monkeypatch.setattr("importlib.import_module", fails)
    (stage,) = probe()
    assert stage.detail == "RuntimeError: first line second line"


@pytest.mark.parametrize("text", ["no licence", "", 3])
def test_an_import_that_leaves_is_a_stage(
    text: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some packages end the program where a driver or a licence is missing; lazykv goes on."""
    (tmp_path / "cupy.py").write_text(f"raise SystemExit({text!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    (stage,) = probe()
    assert (stage.name, stage.ok, stage.detail) == ("cupy", False, f"SystemExit: {text}")
    with pytest.raises(lk.BackendUnavailable, match=rf"got SystemExit: {text} \(stage 'cupy'\)"):
        CudaBackend()


@needs_compiler
def test_a_stage_that_leaves_is_the_last_one(
    cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave() -> None:
        raise SystemExit(1)

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", leave)
    assert [(s.name, s.ok) for s in probe()][-1] == ("device", False)


@pytest.mark.skipif(not REAL, reason="CuPy is not installed")
def test_cupy_itself_is_probed_to_the_end_or_to_what_is_missing() -> None:
    found = probe()
    assert found[0].ok
    assert [s.ok for s in found[:-1]] == [True] * (len(found) - 1)
    if not found[-1].ok:
        assert found[-1].name in ("driver", "device")
        with pytest.raises(lk.BackendUnavailable, match=rf"stage '{found[-1].name}'"):
            CudaBackend()
