"""Reports of the conformance suite as one Markdown table: ``python tools/scoreboard.py REPORT...``

A row is a level, a column a report. Failures are listed below, and what was declared is in the
head.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lazykv.testing.levels import LEVELS

SCHEMA = "lazykv.conformance/1"


class NotAReportError(ValueError):
    """A file is no report of this version."""


def read(path: str) -> dict[str, Any]:
    """A report; raises `NotAReportError`."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise NotAReportError(f"{path}: got {e}, need a report") from e
    got = found.get("schema") if isinstance(found, dict) else type(found).__name__
    if got != SCHEMA:
        raise NotAReportError(f"{path}: got schema {got!r}, need {SCHEMA!r}")
    return found


def render(reports: Sequence[dict[str, Any]]) -> str:
    """The table, and the failures of every report."""
    rows = [["level", *(_title(r) for r in reports)]]
    rows.append(["---"] * len(rows[0]))
    for level in LEVELS:
        if any(level in r["counts"] for r in reports):
            rows.append([level, *(_cell(r["counts"].get(level)) for r in reports)])
    rows.append(["all", *(_cell(_total(r["counts"])) for r in reports)])
    rows.append(["declares", *(_declared(r["backend"]["capabilities"]) for r in reports)])
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
    return f"{name} on {report['device']}"


def _cell(counts: dict[str, int] | None) -> str:
    """``12 passed, 3 skipped``; failures in bold and first."""
    if counts is None:
        return "not run"
    parts = [f"**{counts['failed']} failed**"] if counts["failed"] else []
    parts += [f"{counts[o]} {o}" for o in ("passed", "xfailed", "skipped") if counts[o]]
    return ", ".join(parts) or "no tests"


def _total(counts: dict[str, dict[str, int]]) -> dict[str, int]:
    outcomes = ("passed", "failed", "xfailed", "skipped")
    return {o: sum(level[o] for level in counts.values()) for o in outcomes}


def _declared(capabilities: dict[str, Any]) -> str:
    flags = [name for name, value in capabilities.items() if value is True]
    return ", ".join([f"{len(capabilities['dtypes'])} dtypes", *flags])


def _versions(report: dict[str, Any]) -> str:
    v, day = report["versions"], report["started"][:10]
    return f"lazykv {v['lazykv']}, numpy {v['numpy']}, Python {v['python']}, {day}"


def _failures(report: dict[str, Any]) -> list[str]:
    failed = [t for t in report["tests"] if t["outcome"] == "failed"]
    if not failed and not report["stale_xfails"]:
        return []
    lines = ["", f"Failures of {_title(report)}:", ""]
    for test in failed:
        first = str(test["reason"]).strip().splitlines() or [""]
        lines.append(f"- `{test['id']}`: {first[0]}")
    lines += [f"- expected failure `{line}`" for line in report["stale_xfails"]]
    return lines


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
