"""What a report says of the backend and its machine, whatever the backend does when it is asked."""

import json
from importlib.resources import files
from types import MappingProxyType

import jsonschema
import pytest
from broken_backends import Cpu
from packages import install

from lazykv.device import Backend, register_backend, unregister_backend
from lazykv.testing.report import Report, cpu_name
from lazykv.testing.target import find_target


def report_of(backend, place="broken:1"):
    """What would be written, as it is read."""
    register_backend("broken", backend)
    try:
        made = json.loads(Report(find_target("broken", place)).to_json())
    finally:
        unregister_backend("broken")
    schema = json.loads((files("lazykv.testing") / "report.schema.json").read_text())
    jsonschema.validate(made, schema)
    return made["backend"]


class Telling(Cpu):
    def __init__(self, tell):
        super().__init__()
        self.tell = tell

    def facts(self, location):
        return self.tell(location)


def test_facts_are_of_the_location():
    for place in ("broken:0", "broken:1"):
        found = report_of(Telling(lambda at: MappingProxyType({"chip": f"of {at}"})), place)
        assert (found["facts"], found["facts_left_out"]) == ({"chip": f"of {place}"}, [])


def test_facts_are_those_of_the_beginning():
    """A kernel that fails may leave a device that answers nothing more."""
    backend = Telling(lambda at: {"chip": "works"})
    register_backend("broken", backend)
    try:
        made = Report(find_target("broken"))
        backend.tell = None
        assert made.to_dict()["backend"]["facts"] == {"chip": "works"}
    finally:
        unregister_backend("broken")


class Silent(Exception):
    def __str__(self):
        raise RuntimeError


def fails(error):
    raise error


@pytest.mark.parametrize(
    ("tell", "kept", "notes"),
    [
        (lambda at: {"a": "b", "n": 3}, {"a": "b"}, ["fact n: got int"]),
        (lambda at: {"a": "b", 7: "c", None: None}, {"a": "b"}, ["fact int: got", "fact NoneType"]),
        (lambda at: None, {}, ["facts: got TypeError"]),
        (lambda at: "H200", {}, ["facts: got ValueError"]),
        (lambda at: fails(OSError("no driver")), {}, ["facts: got OSError: no driver, need a"]),
        (lambda at: fails(SystemExit(3)), {}, ["facts: got SystemExit: 3"]),
        (lambda at: fails(Silent()), {}, ["Silent"]),
        (lambda at: {"lone": "\ud800"}, {"lone": "\ud800"}, []),
    ],
)
def test_bad_facts_are_left_out_and_told(tell, kept, notes):
    found = report_of(Telling(tell))
    assert found["facts"] == kept
    assert len(found["facts_left_out"]) == len(notes)
    for note, words in zip(found["facts_left_out"], notes, strict=True):
        assert words in note


def test_a_backend_need_not_tell_any():
    class Quiet(Cpu):
        facts = Backend.facts

    assert report_of(Quiet())["facts"] == {}


def test_the_processor_has_a_name(monkeypatch):
    assert cpu_name().strip()
    monkeypatch.setattr("lazykv.testing.report.Path.read_text", lambda *_, **__: fails(OSError()))
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert cpu_name() == "riscv64"


CODE = """
from lazykv.backends.cpu import CpuBackend
from lazykv.device import DeviceLocation

class Packed(CpuBackend):
    name = "broken"
    def locations(self):
        return tuple(DeviceLocation(f"broken:{n}") for n in range(2))
"""


def test_the_package_is_that_of_the_class(tmp_path, monkeypatch):
    (tmp_path / "packed").mkdir()
    code = {"packed/__init__.py": "", "packed/inner.py": CODE}
    install(tmp_path, "broken-of-packed", code, {"broken": "packed.inner:Packed"})
    install(tmp_path, "malformed", {}, {"other": "!"})
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("packed.inner").inner
    want = {"name": "broken-of-packed", "version": "1.0"}
    assert report_of(module.Packed())["package"] == want
    assert report_of(Cpu())["package"] is None, "another backend under the package's kind"

    class Mine(module.Packed):
        pass

    assert report_of(Mine())["package"] is None
