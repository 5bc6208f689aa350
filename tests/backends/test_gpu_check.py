"""The check for machines with a GPU: it says so where there is none, and its parts do run."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cuda_cpu import needs_compiler

from lazykv.backends.cuda import CudaBackend

TOOLS = Path(__file__).parents[2] / "tools"
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


@needs_compiler
@pytest.mark.slow
def test_parts_pass_on_the_stand_in(cuda: CudaBackend, check: ModuleType) -> None:
    parts = check.parts
    found = {
        "kernels": parts.kernels(rows=300),
        "capture": parts.capture(replays=12),
        "steps": parts.steps({"tiny": parts.SMALL}, tokens=2),
        "bandwidth": parts.bandwidth(k=64, n=96, copied=4096, times=3),
        "memory": parts.memory(),
        "dlpack": parts.dlpack(),
    }
    assert {name: part["ok"] for name, part in found.items()} == dict.fromkeys(found, True), found
    assert found["capture"]["replays"] == 12
    assert "FAILED" not in "".join(check._line(name, part) for name, part in found.items())
    json.dumps(found)


@needs_compiler
def test_what_is_wrong_is_told(
    cuda: CudaBackend, check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = check.parts
    monkeypatch.setattr(parts, "_run", lambda build, inputs, place: _off(place))
    assert not parts.kernels(rows=20)["ok"]
    monkeypatch.setattr(parts.lk.Storage, "wrap", lambda a: None)
    monkeypatch.setattr(parts.lk.Storage, "from_array", lambda *a: None)
    assert not parts._refused(None)


def _off(place: str) -> Any:
    return np.array([1.0 if place == "cpu" else 1.1], np.float32)


def test_a_part_that_dies_or_hangs_leaves_the_others(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "__file__", "/nowhere/gpu_check.py")
    assert "No such file" in check.in_process("memory", 20)["error"]
    monkeypatch.setattr(check, "__file__", str(TOOLS / "gpu_check.py"))
    assert check.in_process("memory", 0.001)["error"] == "took more than 0 s"
    found = {"ok": False, "error": "Traceback\n  line\nValueError: what went wrong\n"}
    assert check._line("memory", found).endswith("FAILED (0 s) ValueError: what went wrong")
