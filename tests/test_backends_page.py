"""`docs/backends.md`: who types it in has the example, and every snippet prints what it says."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("array_api_strict")

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "strict_backend"
PAGE = (ROOT / "docs" / "backends.md").read_text()
FENCE = re.compile(r"^```(\w*)(?: title=\"(.*?)\")?\n(.*?)^```$", re.S | re.M)
BLOCKS = [m.groups() for m in FENCE.finditer(PAGE)]
SNIPPETS = [text for kind, title, text in BLOCKS if kind == "python" and title is None]
STUB = "src/lazykv_strict/kernels.py, for now"


def files() -> dict[str, str]:
    """The files that the page spells out; a file may come in several pieces."""
    made: dict[str, str] = {}
    for _, title, text in BLOCKS:
        if title is not None and title != STUB:
            made[title] = made.get(title, "") + text + "\n"
    return made


def lay_out(folder: Path) -> dict[str, str]:
    """Write the page's files, installed as far as finding its entry points goes; returns the
    environment to run in."""
    for name, text in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    project = tomllib.loads(files()["pyproject.toml"])["project"]
    info = folder / "src" / "lazykv_strict-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: 0\n")
    points = project["entry-points"]["lazykv.backends"]
    lines = [f"{name} = {value}\n" for name, value in points.items()]
    (info / "entry_points.txt").write_text("[lazykv.backends]\n" + "".join(lines))
    return {**os.environ, "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{ROOT}"}


def run(code: str, env: dict[str, str], folder: Path) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_page_holds_the_whole_example():
    sources = {str(p.relative_to(EXAMPLE)): p for p in EXAMPLE.glob("src/**/*.py")}
    sources["pyproject.toml"] = EXAMPLE / "pyproject.toml"
    assert files().keys() == sources.keys()
    for name, path in sources.items():
        page, source = (
            [line for line in text.splitlines() if line]
            for text in (files()[name], path.read_text())
        )
        assert page == source, name


@pytest.mark.slow
@pytest.mark.parametrize("n", range(len(SNIPPETS)))
def test_a_snippet_prints_what_it_says(n, tmp_path):
    want = re.findall(r"^ *print\(.*\)  # (.*)$", SNIPPETS[n], re.M)
    assert want, "a snippet shows what it does"
    assert run(SNIPPETS[n], lay_out(tmp_path), tmp_path).splitlines() == want


@pytest.mark.slow
def test_without_a_kernel_ops_are_refused_with_the_words_of_the_page(tmp_path):
    env = lay_out(tmp_path)
    (stub,) = (text for _, title, text in BLOCKS if title == STUB)
    (tmp_path / "src/lazykv_strict/kernels.py").write_text(stub)
    code = """
import numpy as np
import lazykv as lk
x = lk.Graph().placeholder((3,), "f32")
try:
    lk.plan(x * 2.0, device="strict:0")
except lk.BackendUnavailable as e:
    print(f"BackendUnavailable: {e}")
"""
    assert run(code, env, tmp_path) in PAGE
