"""The plugin used by pytest itself, in projects of other people."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packages import install

from lazykv.testing.expected import ExpectedFailures
from lazykv.testing.plugin import Run
from lazykv.testing.target import find_target


def pytest_alone(
    *argv: str, cwd: Path, tests: str = "lazykv.testing.suite"
) -> subprocess.CompletedProcess[str]:
    """The suite as a stranger's own pytest runs it."""
    suite = ["-p", "lazykv.testing.plugin", "--pyargs", tests]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *suite, "--quiet", *argv]
    path = os.pathsep.join(filter(None, [str(cwd), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)


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


@pytest.mark.parametrize("path", ["/dev/null/x", "."])
def test_a_report_that_cannot_be_written_is_noticed_before_the_run(tmp_path, path):
    done = pytest_alone("--lazykv-backend", "cpu", "--lazykv-report", path, cwd=tmp_path)
    assert done.returncode == 4
    assert "--lazykv-report: got" in done.stderr
    assert "passed" not in done.stdout


def test_fixtures_of_the_project_and_of_the_suite_do_not_meet(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import pytest\n@pytest.fixture\ndef target(): return 'mine'\n"
    )
    (tmp_path / "test_mine.py").write_text("def test_mine(target): assert target == 'mine'\n")
    path = tmp_path / "report.json"
    done = pytest_alone(
        "test_mine.py", "--lazykv-backend", "cpu", "--lazykv-level", "async", "--lazykv-report",
        str(path), cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    ran = sum(report["counts"]["async"].values())
    assert list(report["counts"]) == ["async"]
    assert report["counts"]["async"]["passed"] > 10
    passed = report["counts"]["async"]["passed"] + 1
    assert f"{passed} passed" in done.stdout, f"all {ran} of the suite and one of the project"
    assert all("target" not in t["id"] for t in report["tests"])


WRONG = """
from lazykv.backends.cpu import CpuBackend
from lazykv.device import DeviceLocation, Kernel

class Wrong(CpuBackend):
    name = "wrong"
    def locations(self):
        return (DeviceLocation("wrong:0"),)

    def kernel(self, op, ins, out):
        inner = super().kernel(op, ins, out)
        if op.name != "silu":
            return inner
        return Kernel(lambda call: [(call.out.fill, (77,))])
"""

SILU = "core/test_elementwise.py::test_op[silu*"


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_expected_failures_are_judged_with_and_without_workers(tmp_path, workers):
    pytest.importorskip("xdist")
    install(tmp_path, "wrong", {"wrong.py": WRONG}, {"wrong": "wrong:Wrong"})
    listed, path = tmp_path / "xfails.txt", tmp_path / "report.json"

    def run(*lines: str) -> tuple[int, str, dict]:
        listed.write_text("".join(f"{line} # known\n" for line in lines))
        done = pytest_alone(
            "--lazykv-backend", "wrong", "--lazykv-xfails", str(listed), "--lazykv-report",
            str(path), "-k", "(silu or tanh) and contiguous", *workers, cwd=tmp_path,
            tests="lazykv.testing.suite.core.test_elementwise",
        )  # fmt: skip
        return done.returncode, done.stdout, json.loads(path.read_text())

    code, text, report = run(SILU, "core/test_elementwise.py::test_op[gelu*")  # gelu is deselected
    assert (code, report["stale_xfails"]) == (0, []), text
    counts = report["counts"]["core"]
    assert counts["xfailed"] > 3
    assert counts["passed"] > 3
    assert counts["failed"] == 0

    code, text, report = run(SILU, "core/test_gone*", "core/test_elementwise.py::test_op[tanh*")
    gone = "core/test_gone*: got no such test, need one"
    assert (code, report["stale_xfails"]) == (1, [gone])
    assert f"FAILED expected failure: {gone}" in text
    again = report["counts"]["core"]
    assert again["xfailed"] == counts["xfailed"]
    assert (again["passed"], again["failed"]) == (0, counts["passed"]), "what passes must not"


def test_a_run_that_ends_before_its_tests_is_not_fine():
    run = Run(find_target("cpu"), [], ExpectedFailures())
    run.collected = run.selected = ["core/test_x.py::test_y", "core/test_x.py::test_z"]
    for name in run.selected:
        assert not run.finish()
        run.report.add(name, "passed", None, 0.0)
        run.ended.add(name)
    assert run.finish()


def test_a_test_that_has_only_begun_has_failed():
    run = Run(find_target("cpu"), [], ExpectedFailures())
    run.collected = run.selected = [SILU[:-1]]
    run.report.add(SILU[:-1], None, None, 0.0)
    assert not run.finish()
    assert run.report.outcomes() == {SILU[:-1]: "failed"}
