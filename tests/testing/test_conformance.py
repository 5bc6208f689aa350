"""The backends of the package keep what they declare, and the report says so."""

import json
from importlib.resources import files

import jsonschema
import pytest

import lazykv
from lazykv.testing.levels import LEVELS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def schema():
    found = json.loads((files("lazykv.testing") / "report.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def test_everything_declared_is_kept(report):
    failed = [t for t in report["tests"] if t["outcome"] in ("failed", "xfailed")]
    assert failed == []
    assert report["exit code"] == 0
    assert len(report["tests"]) > 7000


def test_nothing_is_skipped_but_what_is_not_declared(report):
    reasons = {t["reason"] for t in report["tests"] if t["outcome"] == "skipped"}
    assert (
        reasons
        <= {
            "cpu": {
                "cpu has one location",
                "cpu declares no capture",
                "cpu does not tell its used_bytes",
                "cpu has host_memory",
                "cpu lists no ops",
                "this system has no fork",
                "Python 3.12 brought __buffer__ (PEP 688)",
            },
            "sim": {
                "sim declares capture",
                "sim declares no host_memory",
                "arrays of sim tell no address",
                "sim lists no ops",
                "sim declares no survives_fork",
                "memory of the host is wrapped on cpu",
                "the xp of sim has no from_dlpack of its own",
                "Python 3.12 brought __buffer__ (PEP 688)",
            },
        }[report["backend"]["name"]]
    )


def test_the_report_fits_its_schema(report, schema):
    found = {name: value for name, value in report.items() if name != "exit code"}
    jsonschema.validate(found, schema, format_checker=jsonschema.FormatChecker())
    for place in (found, found["tests"][0], found["backend"], found["counts"]["core"]):
        place["surprise"] = 1
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(found, schema)
        del place["surprise"]
    assert list(LEVELS) == schema["$defs"]["level"]["enum"]


def test_the_report_says_what_was_tested(report):
    assert list(report["counts"]) == list(LEVELS)
    for level, counts in report["counts"].items():
        mine = [t["outcome"] for t in report["tests"] if t["level"] == level]
        assert counts == {o: mine.count(o) for o in counts}
        assert all(t["id"].startswith(f"{t['level']}/") for t in report["tests"])
    assert report["versions"]["lazykv"] == lazykv.__version__
    assert report["backend"]["api_version"] == 1
    assert report["device"] == report["devices"][0]
    assert report["backend"]["package"] is None
    assert report["backend"]["facts"].keys() == {"blas"}
    assert report["backend"]["facts_left_out"] == []
    assert report["cpu"].strip()
