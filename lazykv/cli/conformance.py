"""``lazykv conformance``: hold a backend to what it declares."""

import argparse
import importlib
import json
import sys
from typing import Any

from lazykv.cli.arguments import location_name
from lazykv.cli.exits import CHECK_FAILED, OK, UsageError
from lazykv.device import DeviceLocation
from lazykv.errors import EnvironmentMissing
from lazykv.testing.levels import LEVELS


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "conformance",
        help="test a backend against what it declares",
        description="Run the conformance suite on the backend NAME (the kind of its locations: "
        "cpu, sim, cuda, or what a package brings).",
        epilog="Levels: " + "; ".join(f"{name}: {what}" for name, what in LEVELS.items()) + ".",
    )
    parser.add_argument("name", metavar="NAME", help="the backend, such as cpu")
    parser.add_argument(
        "--level", action="append", default=[], choices=list(LEVELS), metavar="LEVEL",
        help="run only this level; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--device",
        type=location_name,
        metavar="D",
        help="a location of it (default: its first)",
    )
    parser.add_argument(
        "--xfails", metavar="FILE", help="tests expected to fail: an id (or the start of some and "
        "a *) and '# reason' per line; one that passes is a failure",
    )  # fmt: skip
    parser.add_argument("--report", metavar="FILE", help="write the report, JSON, here")
    parser.add_argument("--list", action="store_true", help="list the tests, run none")
    parser.add_argument("--json", action="store_true", help="print the report instead of text")
    parser.set_defaults(run=_conformance)


def _conformance(args: argparse.Namespace) -> int:
    runner = _runner()
    if args.device is not None and DeviceLocation(args.device).kind != args.name:
        raise UsageError(f"--device: got {args.device}, need a location of backend {args.name!r}")
    try:
        done = runner.run_suite(
            args.name, device=args.device, levels=args.level, xfails=args.xfails,
            collect_only=args.list,
        )  # fmt: skip
    except runner.ExpectedFailuresError as e:
        raise UsageError(f"--xfails: {e}") from e
    if args.list:
        tests = done.run.collected
        print(json.dumps(tests, indent=1) if args.json else "\n".join(tests))
        return OK
    report = done.run.report
    if args.report is not None:
        _write(args.report, report.to_json())
    sys.stdout.write(report.to_json() if args.json else _text(report.to_dict()))
    return OK if done.code == 0 else CHECK_FAILED


def _runner() -> Any:
    """The part that needs pytest, which comes with the `test` extra."""
    try:
        importlib.import_module("pytest")
        return importlib.import_module("lazykv.testing.runner")
    except ModuleNotFoundError as e:
        raise EnvironmentMissing(
            f"conformance: got no module {e.name!r}, need it; pip install 'lazykv[test]'"
        ) from e


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as e:
        raise UsageError(f"--report: got {e}, need a file that can be written") from e


def _text(report: dict[str, Any]) -> str:
    """What was declared, the levels, and every failure with its message."""
    backend, total = report["backend"], {"passed": 0, "failed": 0, "xfailed": 0, "skipped": 0}
    flags = [n for n, v in backend["capabilities"].items() if v is True]
    declared = f"{len(backend['capabilities']['dtypes'])} dtypes"
    lines = [f"{backend['name']} on {report['device']}: {', '.join([declared, *flags])}"]
    for level, counts in report["counts"].items():
        parts = [f"{n} {outcome}" for outcome, n in counts.items() if n]
        lines.append(f"  {level:<10}{', '.join(parts)}")
        total = {outcome: n + counts[outcome] for outcome, n in total.items()}
    for test in report["tests"]:
        if test["outcome"] == "failed":
            reason = str(test["reason"]).strip().replace("\n", "\n    ")
            lines.append(f"FAILED {test['id']}\n    {reason}")
    lines += [f"STALE expected failure {line}" for line in report["stale_xfails"]]
    lines.append(", ".join(f"{n} {outcome}" for outcome, n in total.items() if n) or "no tests")
    return "\n".join(lines) + "\n"
