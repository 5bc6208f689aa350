"""Backends that installed packages bring, found by entry point."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import lazykv as lk
from lazykv.device import register_backend, registry, unregister_backend

PACKAGE = {
    "half_backend/__init__.py": """
from lazykv.backends.cpu import CpuBackend
from lazykv.device import DeviceLocation

class HalfBackend(CpuBackend):
    name = "half"

    def locations(self):
        return (DeviceLocation("half:0"),)

class LaterBackend(HalfBackend):
    api_version = 2

class BoolBackend(HalfBackend):
    api_version = True

class SilentBackend(HalfBackend):
    api_version = property()

class NoBackend:
    api_version = 1

class BrokenBackend:
    def __init__(self):
        raise ValueError("no driver")

class LeavingBackend:
    def __init__(self):
        raise SystemExit("no licence")

class LostBackend(HalfBackend):
    def locations(self):
        raise OSError("the driver is gone")

class ClosedBackend(HalfBackend):
    def locations(self):
        raise SystemExit(0)

class UndeclaredBackend(HalfBackend):
    capabilities = None

class StrangeBackend(HalfBackend):
    def locations(self):
        return ("strange:0",)

class NamesakeBackend(HalfBackend):
    def locations(self):
        return (DeviceLocation("cpu"),)
""",
    "half_backend-1.0.dist-info/METADATA": "Name: half-backend\nVersion: 1.0\n",
    "half_backend-1.0.dist-info/entry_points.txt": """
[lazykv.backends]
half = half_backend:HalfBackend
broken = half_backend:BrokenBackend
missing = half_backend:NotThere
later = half_backend:LaterBackend
bool = half_backend:BoolBackend
silent = half_backend:SilentBackend
none = half_backend:NoBackend
leaving = half_backend:LeavingBackend
lost = half_backend:LostBackend
closed = half_backend:ClosedBackend
undeclared = half_backend:UndeclaredBackend
strange = half_backend:StrangeBackend
namesake = half_backend:NamesakeBackend
""",
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for kind in ("half", "lost", "closed", "strange", "namesake"):
        registry.backends.pop(kind, None)
    sys.modules.pop("half_backend", None)


def test_a_backend_is_found_by_name(installed):
    assert str(lk.device("half:0")) == "half:0"
    x = lk.Graph().const(np.float32([1, 2])).to("half:0")
    assert lk.realize(x + 1).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("place", "got"),
    [
        ("broken:0", "ValueError: no driver"),
        ("missing:0", "AttributeError"),
        ("leaving:0", "SystemExit: no licence"),
        ("lost:0", "OSError: the driver is gone"),
        ("closed:0", "SystemExit: 0 when asked for its devices"),
        ("undeclared:0", "capabilities None from half_backend:UndeclaredBackend"),
        ("strange:0", "'strange:0' among its devices"),
        ("namesake:0", "name='cpu'"),
    ],
)
def test_a_broken_one_is_named_and_breaks_no_other(installed, place, got):
    with pytest.raises(lk.BackendUnavailable, match=got):
        lk.device(place)
    assert lk.device("half:0").backend.name == "half"


@pytest.mark.parametrize(
    ("kind", "got"),
    [("later", "api_version 2"), ("bool", "api_version True"), ("silent", "api_version None"),
     ("none", "NoBackend")],
)  # fmt: skip
def test_a_backend_of_another_api_is_refused(installed, kind, got):
    with pytest.raises(lk.BackendUnavailable, match=f"got {got} from .* of api_version 1"):
        lk.device(f"{kind}:0")
    assert lk.device("half:0").backend.name == "half"


Bring = Callable[..., None]

MODULE = """
from lazykv.backends.cpu import CpuBackend
from lazykv.device import DeviceLocation

class Good(CpuBackend):
    name = "{name}"

    def locations(self):
        return (DeviceLocation("twice:0"),)

class Later(Good):
    api_version = 2

class Leaves(Good):
    def __init__(self):
        raise SystemExit("no licence")

class Lost(Good):
    def locations(self):
        raise OSError("the driver is gone")
"""


@pytest.fixture
def bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bring]:
    """Installs a package with a module of its own and one entry point, found before all others."""
    made = []

    def bring(name: str, cls: str, kind: str = "twice") -> None:
        made.append(f"{name}_backend")
        info = tmp_path / name / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info.parent / f"{made[-1]}.py").write_text(MODULE.format(name=name))
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[lazykv.backends]\n{kind} = {made[-1]}:{cls}\n")
        monkeypatch.syspath_prepend(info.parent)

    yield bring
    registry.backends.pop("twice", None)
    for module in made:
        sys.modules.pop(module, None)


@pytest.mark.parametrize("cls", ["Missing", "Later", "Leaves", "Lost"])
@pytest.mark.parametrize("broken_first", [True, False])
def test_of_several_packages_the_one_that_works_serves(
    bring: Bring, cls: str, broken_first: bool
) -> None:
    bring("alpha", cls if broken_first else "Good")
    bring("beta", "Good" if broken_first else cls)
    assert lk.device("twice:0").backend.name == ("beta" if broken_first else "alpha")


@pytest.mark.parametrize("names", [("alpha", "beta"), ("beta", "alpha")])
def test_two_packages_that_work_are_one_too_many(bring: Bring, names: tuple[str, str]) -> None:
    for name in names:
        bring(name, "Good")
    bring("gamma", "Lost")
    with pytest.raises(lk.BackendUnavailable) as caught:
        lk.device("twice:0")
    assert str(caught.value) == (
        "backend 'twice': got alpha 1.0: alpha_backend:Good and beta 1.0: beta_backend:Good, need "
        "one; uninstall the other, or choose with register_backend"
    )
    chosen = importlib.import_module("beta_backend").Good()
    register_backend("twice", chosen)
    assert lk.device("twice:0").backend is chosen


def test_if_none_of_several_works_each_says_why(bring: Bring) -> None:
    bring("beta", "Leaves")
    bring("alpha", "Lost")
    with pytest.raises(lk.BackendUnavailable, match="got 2 that fail, need one that loads") as told:
        lk.device("twice:0")
    text = str(told.value)
    alpha, beta = (text.index(f"{n} 1.0: {n}_backend:") for n in ("alpha", "beta"))
    assert alpha < text.index("OSError: the driver is gone") < beta
    assert beta < text.index("SystemExit: no licence")
    assert "twice" not in registry.backends


def test_a_package_that_names_a_kind_of_lazykv_is_not_asked(bring: Bring) -> None:
    before = lk.device("cpu").backend
    bring("alpha", "Leaves", kind="cpu")
    unregister_backend("cpu")
    try:
        assert type(lk.device("cpu").backend) is type(before)
        assert "alpha_backend" not in sys.modules
    finally:
        register_backend("cpu", before)


def test_a_location_nobody_serves_says_which_kinds_there_are(
    bring: Bring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # as where it is not installed
    bring("alpha", "Leaves")
    bring("beta", "Good", kind="No kind")
    with pytest.raises(lk.BackendUnavailable) as caught:
        lk.device("tpu:0")
    kinds, _, rest = str(caught.value).removeprefix(
        "location kind 'tpu': got no backend, need one of "
    ).partition("; ")  # fmt: skip
    assert {"cpu", "cuda", "sim", "twice"} <= set(kinds.split(", "))
    assert "No kind" not in kinds
    assert rest == "or install a package with an entry point 'tpu' in 'lazykv.backends'"
    with pytest.raises(lk.BackendUnavailable, match=r"lazykv\[cuda13\]"):
        lk.device("cuda:0")


@pytest.mark.parametrize("error", [SystemExit("no licence"), RuntimeError("no licence")])
def test_a_backend_of_lazykv_that_cannot_be_made_is_named(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object) -> None:
        raise error

    before = lk.device("sim:0").backend
    monkeypatch.setattr("lazykv.backends.sim.SimBackend.__init__", fail)
    unregister_backend("sim")
    try:
        need = f"'sim': got {type(error).__name__}: no licence while loading lazykv.backends.sim:"
        with pytest.raises(lk.BackendUnavailable, match=need):
            lk.device("sim:0")
    finally:
        register_backend("sim", before)


def test_an_index_nobody_serves_names_those_there_are():
    with pytest.raises(lk.BackendUnavailable, match="need one of: sim:0, sim:1"):
        lk.device("sim:7")
