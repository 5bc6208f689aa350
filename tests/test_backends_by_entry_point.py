"""Backends that installed packages bring, found by entry point."""

import sys

import numpy as np
import pytest

import lazykv as lk
from lazykv.device import registry

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


def test_a_location_nobody_serves_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # as where it is not installed
    with pytest.raises(lk.BackendUnavailable, match=r"entry point 'tpu' in 'lazykv\.backends'"):
        lk.device("tpu:0")
    with pytest.raises(lk.BackendUnavailable, match=r"lazykv\[cuda13\]"):
        lk.device("cuda:0")


def test_an_index_nobody_serves_names_those_there_are():
    with pytest.raises(lk.BackendUnavailable, match="need one of: sim:0, sim:1"):
        lk.device("sim:7")
