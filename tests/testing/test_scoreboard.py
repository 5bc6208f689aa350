"""Reports as one Markdown table."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from broken_attention import SeesLaterRows
from broken_backends import Healthy

from lazykv.device import register_backend, unregister_backend
from lazykv.testing.runner import run_suite

TOOL = Path(__file__).parents[2] / "tools" / "scoreboard.py"


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[Path]:
    folder, paths = tmp_path_factory.mktemp("scores"), []
    for backend, levels in ((Healthy(), ["session"]), (SeesLaterRows(), ["session", "interop"])):
        register_backend("broken", backend)
        try:
            report = run_suite("broken", levels=levels).run.report
            paths.append(folder / f"{len(paths)}.json")
            paths[-1].write_text(report.to_json())
        finally:
            unregister_backend("broken")
    return paths


def scoreboard(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_rows_are_levels_and_columns_reports(reports):
    done = scoreboard(*reports)
    assert (done.returncode, done.stderr) == (0, "")
    table, _, failures = done.stdout.partition("\n\n")
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0] == ["level", "broken on broken:0", "broken on broken:0"]
    assert [r[0] for r in rows] == [
        "level", "---", "session", "interop", "all", "declares", "made with",
    ]  # fmt: skip
    assert {len(r) for r in rows} == {3}
    assert rows[2][1].endswith("passed")
    assert rows[2][2].startswith("**")
    assert rows[3][1] == "not run"
    assert failures.startswith("Failures of broken on broken:0:\n\n- `session/")
    failed = [t for t in json.loads(reports[1].read_text())["tests"] if t["outcome"] == "failed"]
    assert failures.count("\n- ") == len(failed) > 0


def test_a_file_that_is_no_report_is_refused(tmp_path, reports):
    for text in ("{", "[]", '{"schema": "lazykv.conformance/0"}'):
        path = tmp_path / "report.json"
        path.write_text(text)
        done = scoreboard(reports[0], path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("scoreboard: ")
        assert done.stderr.count("\n") == 1
