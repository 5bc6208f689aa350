"""`lazykv conformance`, and the plugin used by pytest itself."""

import json
import subprocess
import sys

import pytest
from broken_attention import SeesLaterRows

from lazykv.cli import main
from lazykv.device import register_backend, unregister_backend
from lazykv.testing.levels import LEVELS

SMALL = ["--level", "interop"]


@pytest.fixture
def run(capsys):
    def command(*argv: str):
        code = main(["conformance", *argv])
        out, err = capsys.readouterr()
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
        code, out, err = run("broken", "--level", "session")
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
        ("quantum", "entry point 'quantum'"),
        ("sim:1", "need a name such as"),
        ("Cpu", "need a name"),
    ],
)
def test_a_backend_that_is_not_there_is_3(run, name, words):
    assert words in fails(run(name), 3)


def test_a_device_that_is_not_there_is_3(run):
    assert "need one of: sim:0, sim:1" in fails(run("sim", "--device", "sim:7"), 3)


def test_without_cupy_or_a_gpu_cuda_says_what_is_missing(run):
    done = run("cuda", *SMALL)
    if done[0] in (0, 1):
        pytest.skip("this machine has a GPU")
    assert "cupy" in fails(done, 3).lower()


def test_without_pytest_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytest", None)  # makes importing it fail
    assert "pip install 'lazykv[test]'" in fails(run("cpu"), 3)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["cpu", "--level", "everything"],
        ["cpu", "--device", "sim:0"],
        ["cpu", "--device", "cpu:"],
        ["cpu", *SMALL, "--xfails", "/nowhere/xfails.txt"],
        ["cpu", *SMALL, "--report", "/dev/null/x"],
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


def pytest_alone(*argv: str, cwd=None) -> subprocess.CompletedProcess[str]:
    """The suite as a stranger's own pytest runs it."""
    suite = ["-p", "lazykv.testing.plugin", "--pyargs", "lazykv.testing.suite"]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *suite, "--quiet", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def test_the_plugin_works_in_anybodys_pytest(tmp_path):
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = -ra --strict-markers --strict-config\nfilterwarnings = error\n"
    )
    path = tmp_path / "report.json"
    done = pytest_alone(
        "--lazykv-backend", "sim", "--lazykv-device", "sim:1", "--lazykv-level", "async",
        "--lazykv-level", "session", "--lazykv-report", str(path), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["device"] == "sim:1"
    assert sorted(report["counts"]) == ["async", "session"]


def test_the_plugin_refuses_what_the_command_refuses(tmp_path):
    done = pytest_alone("--lazykv-backend", "quantum", cwd=tmp_path)
    assert done.returncode == 3
    assert "entry point 'quantum'" in done.stdout + done.stderr
    done = pytest_alone(cwd=tmp_path)
    assert done.returncode == 4
    assert "need one" in done.stderr
