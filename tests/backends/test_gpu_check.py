"""The check for machines with a GPU: it says so where there is none, its parts do run, and a part
that does not run or end is never taken for passed."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cuda_cpu import needs_compiler
from fake_cupy.machine import machine

from lazykv.backends.cuda import CudaBackend
from lazykv.testing.runner import run_suite

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
NO_GPU = not Path("/dev/nvidia0").exists() and shutil.which("nvidia-smi") is None


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("gpu_check")


@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_the_script_is_a_shell_script() -> None:
    assert subprocess.run(["sh", "-n", TOOLS / "gpu_check.sh"], check=False).returncode == 0
    assert os.access(TOOLS / "gpu_check.sh", os.X_OK)


@pytest.mark.skipif(not NO_GPU or shutil.which("sh") is None, reason="there may be a GPU")
@pytest.mark.parametrize(
    "command", [["sh", TOOLS / "gpu_check.sh"], [sys.executable, TOOLS / "gpu_check.py"]]
)
def test_without_a_gpu_it_says_so_in_one_line(command: list[Any], tmp_path: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("gpu_check: got ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("pip", "code", "text"), [(124, 4, "in 180 s"), (2, 1, "need lazykv[")])
def test_without_an_environment_it_says_why(pip: int, code: int, text: str, tmp_path: Path) -> None:
    """With a GPU, as far as the script sees, and an installation that fails or takes too long."""
    commands = {
        "nvidia-smi": "echo 'CUDA Version: 13.0'",
        "python3": 'mkdir -p "$3/bin"',
        "timeout": f"[ $1 = 180 ] && exit {pip}",
    }
    for name, line in commands.items():
        Path(tmp_path, name).write_text(f"#!/bin/sh\n{line}\n")
        Path(tmp_path, name).chmod(0o755)
    done = subprocess.run(
        ["sh", TOOLS / "gpu_check.sh"], capture_output=True, text=True, check=False,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (code, 1)
    assert text in done.stderr


def test_the_extras_bring_what_the_backend_uses_of_cuda() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for major in (12, 13):
        assert extras[f"cuda{major}"] == [
            f"cupy-cuda{major}x>=14", f"cuda-toolkit[cublas,cudart,nvrtc]=={major}.*"
        ]  # fmt: skip


# The parts, on the stand-in


@needs_compiler
@pytest.mark.slow
def test_parts_pass_on_the_stand_in(cuda: CudaBackend, check: ModuleType) -> None:
    parts = check.parts
    found = {
        "machine": check.machine(),
        "kernels": check.kernels.kernels(rows=300),
        "conformance": check.conformance("interop/test_exchange.py"),
        "capture": parts.capture(replays=12),
        "steps": parts.steps({"tiny": parts.SMALL}, tokens=2),
        "bandwidth": parts.bandwidth(k=64, n=96, copied=4096, times=3),
        "memory": parts.memory(),
        "dlpack": parts.dlpack(busy=1000),
    }
    assert {name: part["ok"] for name, part in found.items()} == dict.fromkeys(found, True), found
    assert found["capture"]["replays"] == 12
    assert found["conformance"]["counts"]["passed"] > 1
    assert list(found["machine"]["stages"])[-1] == "capture"
    for part in found.values():
        assert check.said(part | {"state": "passed"})
    json.dumps(found)


@needs_compiler
def test_few_kernels_are_those_of_one_dtype_without_cublas(
    cuda: CudaBackend, check: ModuleType
) -> None:
    before = machine.cublas_calls
    found = check.inner("few_kernels")
    assert found["ok"]
    assert found["counts"]["ops"] == len(check.kernels._cases(100, ["f16"])) - 1
    assert machine.cublas_calls == before
    assert check.kernels.kernels("f16", rows=100)["counts"]["ops"] == found["counts"]["ops"] + 1
    assert machine.cublas_calls == before + 1


@needs_compiler
def test_what_is_wrong_is_told(
    cuda: CudaBackend, check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, kernels = check.parts, check.kernels
    monkeypatch.setattr(kernels, "_run", lambda build, inputs, place: _off(place))
    found = kernels.kernels("f32", rows=20)
    assert not found["ok"]
    assert "paged f32" in check.said(found)
    monkeypatch.setattr(parts.lk.Storage, "wrap", lambda a: None)
    monkeypatch.setattr(parts.lk.Storage, "from_array", lambda *a: None)
    assert not parts._refused(None)


def _off(place: str) -> Any:
    return np.array([1.0 if place == "cpu" else 1.1], np.float32)


@needs_compiler
def test_a_file_of_the_suite_that_fails_is_told_by_its_tests(
    cuda: CudaBackend, check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "copy_out", lambda array: array.get() * 0)
    found = check.conformance("async/test_order.py")
    assert not found["ok"]
    assert check.said(found).startswith("async/test_order.py::")
    assert found["counts"]["failed"] == len(found["failed"]) > 1


@pytest.mark.parametrize("splits", [2, 8, 24])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_product_may_be_rounded_in_parts_and_no_more(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: str, splits: int
) -> None:
    """cuBLAS may add sums of parts of K that it has rounded to 16 bits."""
    kernels = check.kernels
    case = kernels._product(40, dtype)
    a, b = (x.astype(np.float32) for x in case.inputs)
    kind = case.inputs[0].dtype
    whole, made = (a @ b).astype(kind), 0
    for columns in np.array_split(np.arange(a.shape[1]), splits):
        made = (made + (a[:, columns] @ b[columns]).astype(kind)).astype(kind)

    def passes(got: Any, case: Any) -> bool:
        monkeypatch.setattr(kernels, "_run", lambda b, i, place: whole if place == "cpu" else got)
        return bool(kernels._compared({"": case})["ok"])

    assert passes(made, case)
    assert not passes(made, case._replace(size=1.0))
    assert not passes((a[:, 1:] @ b[1:]).astype(kind), case)
    assert kernels._product(40, "f32").size == kernels._product(8, dtype).size == 1


# Processes

PART = """
import json, os, signal, subprocess, sys, time

def passes(*share):
    print(json.dumps({"ok": True, "counts": {"tests": 2}}))

def fails():
    print(json.dumps({"ok": False, "error": "lines\\nand what went wrong"}))

def skips():
    print(json.dumps({"ok": True, "skipped": "there is no such thing"}))

def raises():
    raise ValueError("what went wrong")

def dies():
    print(json.dumps({"ok": True}), flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)

def silent():
    print("no result")

def hangs():
    beat = "import time\\nwhile True:\\n  print(1, file=open('beat', 'a')); time.sleep(0.01)"
    subprocess.Popen([sys.executable, "-c", beat])
    while not os.path.exists("beat"):
        time.sleep(0.01)
    print("was here", flush=True)
    time.sleep(60)

name = sys.argv[2]
vars()[name](*sys.argv[3:])
"""


@pytest.fixture
def run(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """Runs a part of `PART` for some seconds; its shares are what a test gives."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part.py").write_text(PART)
    monkeypatch.setattr(check, "__file__", str(tmp_path / "part.py"))

    def run(name: str, *shares: str, seconds: float = 20, width: int = 2) -> dict[str, Any]:
        monkeypatch.setitem(check.PARTS, name, check.Part(print, 1, shares))
        result: dict[str, Any] = check.run_part(name, time.perf_counter() + seconds, width)
        return result

    return run


ENDS = [
    ("passes", "passed", "2 tests"), ("fails", "FAILED", "and what went wrong"),
    ("skips", "skipped", "there is no such thing"),
    ("raises", "FAILED", "exit code 1: ValueError: what went wrong"),
    ("dies", "FAILED", "exit code -11"), ("silent", "FAILED", "no result"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "state", "text"), ENDS)
def test_how_a_part_ends(
    check: ModuleType, run: Callable[..., dict[str, Any]], name: str, state: str, text: str
) -> None:
    found = run(name)
    assert found["state"] == state
    assert check.line(name, found) == f"  {name:<12} {state} ({found['seconds']} s) {text}"


def still_beats(folder: Path) -> bool:
    sizes = []
    for _ in range(2):
        sizes.append((folder / "beat").stat().st_size)
        time.sleep(0.3)
    return sizes[0] != sizes[1]


def test_a_part_that_hangs_is_not_finished_and_what_it_started_ends(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    found = run("hangs", seconds=2)
    assert (found["state"], found["error"]) == ("not finished", "was here\n")
    assert not still_beats(tmp_path)


def test_shares_run_side_by_side_and_the_gravest_counts(
    check: ModuleType, run: Callable[..., dict[str, Any]]
) -> None:
    found = run("passes", "a", "b", "c")
    assert (found["state"], found["summary"]) == ("passed", "6 tests")
    states = [("passed", "skipped"), ("skipped", "not finished"), ("not finished", "FAILED")]
    for pair in states:
        shares = {
            s: {"state": s, "skipped": "why"} if s == "skipped" else {"state": s} for s in pair
        }
        made = check.merged(shares)
        assert made["state"] == pair[1]
        assert ("why" in made["summary"]) == ("skipped" in pair)


def test_a_share_for_which_no_time_is_left_is_named(run: Callable[..., dict[str, Any]]) -> None:
    found = run("passes", "a", "b", seconds=0)
    assert found["state"] == "not finished"
    assert found["summary"] == "a: not begun; b: not begun"


def test_processes_leave_room_on_small_gpus(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "cpus", lambda: 16)
    assert [check.at_once({"memory_bytes": n << 30}) for n in (0, 6, 139)] == [1, 6, 16]
    assert check.at_once(check.NOT_BEGUN) == 1


WHOLE = [
    (["passes"], 0, "gpu_check: passed"),
    (["passes", "skips"], 0, "gpu_check: passed; skipped: skips"),
    (["skips", "hangs"], 4, "gpu_check: not finished: hangs; skipped: skips"),
    (["hangs", "fails", "dies"], 1, "gpu_check: FAILED: fails, dies; not finished: hangs"),
]


@pytest.mark.parametrize(("names", "code", "text"), WHOLE)
def test_what_did_not_pass_is_in_the_last_line_the_code_and_the_report(
    check: ModuleType, run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path, names: list[str], code: int, text: str,
) -> None:  # fmt: skip
    (tmp_path / "part.py").write_text(
        PART.replace("def passes", "def machine(): passes()\n\ndef passes")
    )
    made = {name: check.Part(print, 1.5) for name in ["machine", *names]}
    monkeypatch.setattr(check, "PARTS", made)
    report = tmp_path / "report.json"
    assert check.check(names, 1.5 * len(made), report) == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(made) + 1
    assert lines[-1] == text
    written = json.loads(report.read_text())
    assert (written["code"], written["verdict"]) == (code, text)
    assert set(written["parts"]) == set(made)


def test_time_that_is_left_over_goes_to_later_parts(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[float] = []

    def ended(name: str, end: float, width: int) -> dict[str, Any]:
        ends.append(end - start)
        return {"state": "passed"}

    monkeypatch.setattr(check, "PARTS", {n: check.Part(print, s) for n, s in
                                         (("machine", 1), ("a", 2), ("b", 5))})  # fmt: skip
    monkeypatch.setattr(check, "run_part", ended)
    start = time.perf_counter()
    assert check.check(["a", "b"], 16, None) == 0
    assert ends == pytest.approx([2, 6, 16], abs=0.5)


def test_who_ends_the_check_ends_its_processes(run: Callable[..., Any], tmp_path: Path) -> None:
    text = f"import sys; sys.path.insert(0, {str(TOOLS)!r}); import gpu_check as check; " + (
        "check.PARTS = {'machine': check.Part(print, 9, ('hangs',))}; "
        "check.__file__ = 'part.py'; check.main([])"
    )
    (tmp_path / "part.py").write_text(
        PART.replace("sys.argv[2]", "sys.argv[3]").replace("[3:]", "[4:]")
    )
    process = subprocess.Popen([sys.executable, "-c", text], cwd=tmp_path)
    while not (tmp_path / "beat").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert not still_beats(tmp_path)


# What the parts are made of


def test_the_parts_fit_into_five_minutes_and_into_their_processes(check: ModuleType) -> None:
    assert sum(part.seconds for part in check.PARTS.values()) == 60 * 4.8
    assert set(check.PARTS["kernels"].shares) == {"f32", "f16", "bf16"}
    files = check.PARTS["conformance"].shares
    collected = run_suite("cpu", collect_only=True).run.collected
    assert list(files) == sorted({test.partition("::")[0] for test in collected})


SANITIZER = """#!/bin/sh
echo "$@" >>"{log}"
echo '{text}'
exit {code}
"""


@pytest.mark.parametrize(
    ("text", "code", "found"),
    [('{"ok": true}', 0, {"ok": True, "counts": {"tools without a finding": 1}}),
     ('{"ok": false}', 0, {"ok": False}), ("", 0, {"ok": False}),
     ('{"ok": true}', 9, {"ok": False}),
     ("Error: Device not supported.", 255,
      {"ok": True, "skipped": "compute-sanitizer does not support the device"})],
)  # fmt: skip
@pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")
def test_the_tools_of_compute_sanitizer(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, code: int,
    found: dict[str, Any],
) -> None:  # fmt: skip
    monkeypatch.setattr(check.shutil, "which", lambda name, path: None)
    assert check.sanitizer("memcheck")["skipped"] == "compute-sanitizer is not installed"
    tool, log = tmp_path / "compute-sanitizer", tmp_path / "log"
    tool.write_text(SANITIZER.format(log=log, text=text, code=code))
    tool.chmod(0o755)
    monkeypatch.setattr(check.shutil, "which", lambda name, path: str(tool))
    for name in ("memcheck", "racecheck"):
        made = check.sanitizer(name)
        assert found.items() <= made.items()
        assert made["ok"] or f"{name}: exit code {code}" in made["error"]
    given = log.read_text().splitlines()
    assert "--tool memcheck --report-api-errors no" in given[0]
    assert re.search("--tool racecheck --error-exitcode 9 .*--inner few_kernels$", given[1])
