"""Reports of the conformance suite as one Markdown table: ``python tools/scoreboard.py REPORT...``

A row is a level, a column a report. Failures are listed below, and what was declared is in the
head.
"""

import argparse
import html
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import jsonschema

from lazykv.testing.levels import LEVELS

OUTCOMES = ("passed", "failed", "xfailed", "skipped")


class NotAReportError(ValueError):
    """A file is no report of this version, or contradicts itself."""


def read(path: str) -> dict[str, Any]:
    """A report; raises `NotAReportError`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        found: dict[str, Any] = json.loads(text, parse_constant=_no_number)
    except (OSError, ValueError, RecursionError) as e:
        raise NotAReportError(f"{path}: got {e}, need a report") from e
    schema = json.loads((files("lazykv.testing") / "report.schema.json").read_text())
    wrong = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(schema).iter_errors(found)
    )
    if wrong is not None:
        raise NotAReportError(
            f"{path}: got {_line(wrong.message)[:200]} at {wrong.json_path}, need a report of "
            f"{schema['properties']['schema']['const']}"
        )
    _agree(path, found)
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} for a number")


def _agree(path: str, report: dict[str, Any]) -> None:
    """The tests are each there once, on the level of their id, and are what the counts count."""
    ids = Counter(t["id"] for t in report["tests"])
    for test in report["tests"]:
        if ids[test["id"]] > 1 or test["id"].partition("/")[0] != test["level"]:
            got = f"{_line(test['id'])[:200]} on level {test['level']}"
            raise NotAReportError(f"{path}: got {got}, need each test once, on its own level")
    outcomes = Counter((t["level"], t["outcome"]) for t in report["tests"])
    counts = {
        level: {o: outcomes[level, o] for o in OUTCOMES}
        for level in LEVELS
        if any(outcomes[level, o] for o in OUTCOMES)
    }
    if counts != report["counts"]:
        raise NotAReportError(
            f"{path}: got counts {report['counts']}, need those of its tests: {counts}"
        )


def render(reports: Sequence[dict[str, Any]]) -> str:
    """The table, and the failures of every report."""
    rows = [["level", *(_title(r) for r in reports)]]
    rows.append(["---"] * len(rows[0]))
    for level in LEVELS:
        if any(level in r["counts"] for r in reports):
            rows.append([level, *(_cell(r["counts"].get(level)) for r in reports)])
    rows.append(["all", *(_cell(_total(r["counts"])) for r in reports)])
    rows.append(["declares", *(_declared(r["backend"]["capabilities"]) for r in reports)])
    rows.append(["runs on", *(_machine(r) for r in reports)])
    rows.append(["made with", *(_versions(r) for r in reports)])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    for report in reports:
        lines += _failures(report)
    return "\n".join(lines) + "\n"


def _title(report: dict[str, Any]) -> str:
    package = report["backend"]["package"]
    name = report["backend"]["name"]
    if package is not None:
        name = f"{name} ({package['name']} {package['version']})"
    return _plain(f"{name} on {report['device']}")


def _cell(counts: dict[str, int] | None) -> str:
    """``12 passed, 3 skipped``; failures in bold and first."""
    if counts is None:
        return "not run"
    parts = [f"**{counts['failed']} failed**"] if counts["failed"] else []
    parts += [f"{counts[o]} {o}" for o in ("passed", "xfailed", "skipped") if counts[o]]
    return ", ".join(parts) or "no tests"


def _total(counts: dict[str, dict[str, int]]) -> dict[str, int]:
    return {o: sum(level[o] for level in counts.values()) for o in OUTCOMES}


def _declared(capabilities: dict[str, Any]) -> str:
    lists = [f"{len(value)} {n}" for n, value in capabilities.items() if isinstance(value, list)]
    flags = [n for n, value in capabilities.items() if value is True]
    return _plain(", ".join([*lists, *flags]))


def _machine(report: dict[str, Any]) -> str:
    backend = report["backend"]
    facts = [f"{name} {value}" for name, value in backend["facts"].items()]
    left_out = len(backend["facts_left_out"])
    missing = [f"{left_out} facts left out"] if left_out else []
    return _plain(", ".join([*facts, *missing, report["cpu"]]))


def _versions(report: dict[str, Any]) -> str:
    v, day = report["versions"], report["started"][:10]
    return _plain(f"lazykv {v['lazykv']}, numpy {v['numpy']}, Python {v['python']}, {day}")


def _failures(report: dict[str, Any]) -> list[str]:
    failed = [t for t in report["tests"] if t["outcome"] == "failed"]
    if not failed and not report["stale_xfails"]:
        return []
    lines = ["", f"Failures of {_title(report)}:", ""]
    for test in failed:
        first = (test["reason"] or "no reason").strip().splitlines() or [""]
        lines.append(f"- {_code(test['id'])}: {_plain(first[0])}")
    lines += [f"- expected failure {_code(line)}" for line in report["stale_xfails"]]
    return lines


def _line(text: str) -> str:
    """In one line, without what a terminal or an encoding could trip over."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


def _plain(text: str) -> str:
    """Words of a report as Markdown that shows them as they are, also in a cell of a table."""
    return re.sub(r"([\\`*\[\]|~])", r"\\\1", html.escape(_line(text), quote=False))


def _code(text: str) -> str:
    """The same as code, between more backticks than it has in a row."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    room = " " if longest else ""
    return f"{'`' * (longest + 1)}{room}{_line(text)}{room}{'`' * (longest + 1)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Conformance reports as one Markdown table.")
    parser.add_argument("report", nargs="+", help="JSON, from `lazykv conformance --report`")
    args = parser.parse_args(argv)
    try:
        sys.stdout.write(render([read(path) for path in args.report]))
    except NotAReportError as e:
        print(f"scoreboard: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
