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
        "level", "---", "session", "interop", "all", "declares", "runs on", "made with",
    ]  # fmt: skip
    assert {len(r) for r in rows} == {3}
    assert rows[2][1].endswith("passed")
    assert rows[2][2].startswith("**")
    assert rows[3][1] == "not run"
    assert failures.startswith("Failures of broken on broken:0:\n\n- `session/")
    failed = [t for t in json.loads(reports[1].read_text())["tests"] if t["outcome"] == "failed"]
    assert failures.count("\n- ") == len(failed) > 0


def refused(path: Path) -> str:
    """One line that names the file, and nothing printed."""
    done = scoreboard(path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"scoreboard: {path}: got ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "need a report"),
        ("[]", "is not of type 'object'"),
        ("[" * 100_000, "need a report"),
        ('{"schema": "lazykv.conformance/1"}', "need a report of lazykv.conformance/2"),
        ('{"schema": "lazykv.conformance/2"}', "need a report of lazykv.conformance/2"),
        ('{"duration_s": NaN}', "NaN for a number"),
    ],
)
def test_a_file_that_is_no_report_is_refused(tmp_path, text, words):
    path = tmp_path / "report.json"
    path.write_text(text)
    assert words in refused(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.pop("backend"), "'backend' is a required property at $"),
        (lambda r: r["backend"].update(facts={"gpu": 1}), "at $.backend.facts.gpu"),
        (lambda r: r.pop("cpu"), "'cpu' is a required property at $"),
        (lambda r: r.update(counts=[]), "at $.counts"),
        (lambda r: r["counts"]["session"].pop("failed"), "'failed' is a required"),
        (lambda r: r["counts"].update(future=r["counts"]["session"]), "'future'"),
        (lambda r: r["tests"][0].update(level="future"), "'future'"),
        (lambda r: r["tests"][0].update(duration_s="1"), "at $.tests[0].duration_s"),
        (lambda r: r["counts"]["session"].update(passed=99999), "need those of its tests"),
        (lambda r: r["tests"][0].update(outcome="failed"), "need those of its tests"),
        (lambda r: r["tests"].pop(), "need those of its tests"),
        (lambda r: r["tests"].append(r["tests"][0]), "need each test once"),
        (lambda r: r["tests"][0].update(id="core/test_x.py::test_y"), "on its own level"),
    ],
)
def test_a_report_that_lacks_something_or_contradicts_itself_is_refused(
    reports, tmp_path, change, words
):
    found = json.loads(reports[0].read_text())
    change(found)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(found))
    assert words in refused(path)


def test_words_of_a_report_are_no_markup(reports, tmp_path):
    """Names, versions, reasons and ids come from packages that anybody may have written."""
    found = json.loads(reports[1].read_text())
    found["backend"] |= {"name": "ev|il", "package": {"name": "p|q\n\n# H", "version": "<b>1</b>"}}
    found["backend"]["capabilities"]["a|b"] = True
    found["backend"] |= {"facts": {"g|pu": "x*y"}, "facts_left_out": ["a|b", "c"]}
    found |= {"device": "d|e", "cpu": "c|pu", "stale_xfails": ["a`b\n# c"]}
    found["versions"]["numpy"] = "2|\x1b[31m\ud800"
    (first, *_) = (t for t in found["tests"] if t["outcome"] == "failed")
    first |= {"id": "session/`` x", "reason": "boom `x` <script>alert(1)</script> | *pipe*\n# H"}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(found))
    done = scoreboard(reports[0], path)
    assert (done.returncode, done.stderr) == (0, "")
    table, _, failures = done.stdout.partition("\n\n")
    rows = table.splitlines()
    assert {line.replace("\\|", "").count("|") for line in rows} == {4}
    assert rows[0].endswith(r"| ev\|il (p\|q # H &lt;b&gt;1&lt;/b&gt;) on d\|e |")
    assert r"host_memory, a\|b |" in rows[-3]
    assert r"| g\|pu x\*y, 2 facts left out, c\|pu |" in rows[-2]
    assert "numpy 2\\|\ufffd\\[31m\ufffd, " in rows[-1]
    shown = r"boom \`x\` &lt;script&gt;alert(1)&lt;/script&gt; \| \*pipe\*"
    assert f"\n- ``` session/`` x ```: {shown}\n" in failures
    assert failures.endswith("\n- expected failure `` a`b # c ``\n")


def test_a_failure_without_a_reason_says_so(reports, tmp_path):
    found = json.loads(reports[1].read_text())
    for test in found["tests"]:
        test["reason"] = None
    path = tmp_path / "report.json"
    path.write_text(json.dumps(found))
    assert "`: no reason\n" in scoreboard(path).stdout
