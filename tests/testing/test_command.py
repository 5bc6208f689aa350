"""`lazykv conformance`: what it prints, its exit codes, and backends that leave."""

import json
import os
import subprocess
import sys

import pytest
from broken_attention import SeesLaterRows
from packages import install
from toy_backends import Toy, registered

from lazykv.backends.cuda_probe import probe
from lazykv.cli import main
from lazykv.device import register_backend, unregister_backend
from lazykv.testing.levels import LEVELS

SMALL = ["--level", "interop"]


@pytest.fixture
def run(capfd):
    """The command, whose tests run in a process of their own."""

    def command(*argv: str):
        code = main(["conformance", *argv])
        out, err = capfd.readouterr()
        return code, out, err

    return command


def fails(done, code: int) -> str:
    """The message of a failure, one line on standard error and nothing else."""
    got, out, err = done
    assert (got, out) == (code, "")
    assert err.startswith("lazykv: ")
    assert err.count("\n") == 1
    return err


def test_a_backend_that_passes_is_told_in_a_few_lines(run):
    code, out, err = run("sim", "--device", "sim:1", "--level", "capture", "--level", "interop")
    assert (code, err) == (0, "")
    first, *levels, total = out.splitlines()
    assert first == "sim on sim:1: 12 dtypes, is_async, capture"
    assert [line.split()[0] for line in levels] == ["capture", "interop"]
    assert "passed" in total
    assert "failed" not in total


def test_failures_are_told_with_their_message(run):
    register_backend("broken", SeesLaterRows())
    try:
        code, out, err = run("broken", "--level", "session", "--in-process")
    finally:
        unregister_backend("broken")
    assert (code, err) == (1, "")
    assert "FAILED session/test_held_plans.py::test_several_tokens_a_step\n" in out
    assert "elements are wrong, at [0, 0, 0, 0]" in out
    assert "Traceback" not in out


def test_json_is_the_report(run, tmp_path):
    path = tmp_path / "report.json"
    code, out, err = run("cpu", *SMALL, "--json", "--report", str(path))
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(path.read_text())
    assert list(json.loads(out)["counts"]) == ["interop"]


def test_the_list_names_every_test_and_runs_none(run):
    code, out, _ = run("cpu", "--list")
    assert code == 0
    tests = out.splitlines()
    assert len(set(tests)) == len(tests) > 7000
    assert {t.partition("/")[0] for t in tests} == set(LEVELS)
    code, out, _ = run("cpu", "--list", "--json", "--level", "async")
    assert json.loads(out) == [t for t in tests if t.startswith("async/")]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sim:1", "need a name such as"),
        ("Cpu", "need a name"),
        ("c pu", "need a name"),
    ],
)
def test_a_malformed_name_is_2(run, name, words):
    assert words in fails(run(name), 2)


def test_a_backend_that_is_not_there_is_3(run):
    assert "entry point 'quantum'" in fails(run("quantum"), 3)


def test_a_backend_of_another_name_is_3(run):
    with registered(Toy()):
        assert "'toy': got name 'cpu', need" in fails(run("toy", "--in-process"), 3)


def test_a_device_that_is_not_there_is_3(run):
    assert "need one of: sim:0, sim:1" in fails(run("sim", "--device", "sim:7"), 3)


def test_without_cupy_or_a_gpu_cuda_says_what_is_missing(run):
    last = probe()[-1]
    if last.ok or last.name == "capture":
        pytest.skip("this machine has a GPU")
    told = fails(run("cuda", *SMALL), 3)
    assert f"(stage {last.name!r}), need {last.hint}" in told


def test_without_pytest_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytest", None)  # makes importing it fail
    assert "pip install 'lazykv[conformance]'" in fails(run("cpu"), 3)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["cpu", "--level", "everything"],
        ["cpu", "--device", "sim:0"],
        ["cpu", "--device", "cpu:"],
        ["cpu", *SMALL, "--xfails", "/nowhere/xfails.txt"],
        ["cpu", *SMALL, "--xfails", "-x"],
        ["cpu", "--list", "--report", "report.json"],
    ],
)
def test_usage_is_2(run, argv):
    fails(run(*argv), 2)


def test_a_bad_file_of_expected_failures_is_2(run, tmp_path):
    path = tmp_path / "xfails.txt"
    path.write_text("interop/test_exchange.py*\n")
    assert "a reason after" in fails(run("cpu", *SMALL, "--xfails", str(path)), 2)


def test_stale_expected_failures_are_told(run, tmp_path):
    path = tmp_path / "xfails.txt"
    path.write_text("interop/gone* # why\n")
    code, out, _ = run("cpu", *SMALL, "--xfails", str(path))
    assert code == 1
    assert "STALE expected failure interop/gone*: got no such test, need one\n" in out


@pytest.mark.parametrize("path", ["/dev/null/x", "", "."])
def test_a_report_that_cannot_be_written_is_noticed_before_the_run(run, monkeypatch, path):
    monkeypatch.setattr("lazykv.testing.runner.run_suite", None)
    for argv in (["cpu", *SMALL], ["cpu", *SMALL, "--in-process"]):
        assert "need a file that can be written" in fails(run(*argv, "--report", path), 2)


def test_a_run_that_does_not_begin_leaves_no_report(run, tmp_path):
    path = tmp_path / "report.json"
    fails(run("quantum", "--report", str(path)), 3)
    assert not path.exists()
    path.write_text("of last week")
    fails(run("quantum", "--report", str(path)), 3)
    assert path.read_text() == "of last week"


LEAVING = """
import os
import sys
import time
import pytest
from lazykv.backends.cpu import CpuBackend
from lazykv.device import DeviceLocation

class Leaving(CpuBackend):
    name = "leaving"
    def locations(self):
        return (DeviceLocation("leaving:0"),)

class Early(Leaving):
    def __init__(self):
        sys.exit(0)

class Lost(Leaving):
    def locations(self):
        sys.exit(0)

class Late(Leaving):
    def kernel(self, op, ins, out):
        self.leave()

class Exits(Late):
    def leave(self):
        sys.exit(0)

class Ends(Late):
    def leave(self):
        os._exit(0)

class Dies(Late):
    def leave(self):
        os.kill(os.getpid(), 9)

class Stays(Leaving):
    def locations(self):
        print("here", flush=True)
        time.sleep(600)

class StopsWell(Leaving):
    def synchronize(self, location):
        pytest.exit("bye", 0)

class Stops(Leaving):
    def synchronize(self, location):
        pytest.exit("bye")
"""


@pytest.fixture
def leaving(tmp_path, monkeypatch):
    """Installs a backend that leaves in one of these ways."""

    def make(value: str) -> None:
        code = {"leaving.py": LEAVING, "leaving_import.py": "raise SystemExit(0)"}
        install(tmp_path, "leaving", code, {"leaving": value})
        monkeypatch.syspath_prepend(tmp_path)

    return make


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        ("leaving_import:Any", 3, "SystemExit: 0 while loading leaving_import:Any"),
        ("leaving:Early", 3, "SystemExit: 0 while loading leaving:Early"),
        ("leaving:Lost", 3, "SystemExit: 0 when asked for its devices"),
        ("leaving:Ends", 1, "the end of the process (exit code 0) in the tests"),
        ("leaving:Dies", 1, "the end of the process (signal 9) in the tests"),
    ],
)
def test_a_backend_that_leaves_is_told_in_one_line(run, leaving, value, code, words):
    leaving(value)
    assert words in fails(run("leaving", *SMALL), code)


@pytest.mark.parametrize("value", ["leaving:StopsWell", "leaving:Stops"])
def test_a_backend_that_stops_pytest_has_failed_a_test(run, leaving, value):
    leaving(value)
    code, out, err = run("leaving", "--level", "async")
    assert (code, err) == (1, "")
    assert "    got the end of the run, need one of the test\n" in out
    assert "NOT RUN to the end: " in out


def test_a_kernel_that_exits_fails_its_tests(run, leaving):
    leaving("leaving:Exits")
    code, out, err = run("leaving", *SMALL)
    assert (code, err) == (1, "")
    assert "SystemExit: 0" in out
    assert "NOT RUN" not in out


def test_no_process_stays_behind_one_that_is_killed(leaving, tmp_path):
    leaving("leaving:Stays")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "lazykv", "conformance", "leaving"]
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.kill()
        out, _ = process.communicate(timeout=60)  # until the last process that can write is gone
    assert out == ""
