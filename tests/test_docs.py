"""The pages say what is there: names of tests exist, snippets run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def test_every_test_that_the_model_page_names_exists():
    text = "\n".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))
    page = (ROOT / "docs" / "model.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 40
    assert [n for n in sorted(named) if f"def {n}(" not in text] == []


def test_every_test_of_the_bug_cases_exists_where_the_page_says():
    page = (ROOT / "docs" / "bug-cases.md").read_text()
    named = re.findall(r"`(test_\w+)` in `([\w/]+\.py)`", page)
    assert len(named) > 100
    assert [
        (name, file) for name, file in named
        if f"def {name}(" not in (ROOT / "tests" / file).read_text()
    ] == []  # fmt: skip


def test_every_file_that_the_pages_name_exists():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {n for p in pages for n in re.findall(r"`((?:\w+/)+\w+\.(?:py|md))`", p.read_text())}
    places = [ROOT, ROOT / "lazykv", ROOT / "tests"]
    missing = [n for n in sorted(named) if not any((place / n).exists() for place in places)]
    assert missing == []


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_the_snippets_of_the_readme_run(snippet):
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
