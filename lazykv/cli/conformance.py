"""``lazykv conformance``: hold a backend to what it declares."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lazykv.cli.arguments import kind_name, location_name
from lazykv.cli.exits import CHECK_FAILED, ENDED, OK, UsageError
from lazykv.device import DeviceLocation
from lazykv.errors import EnvironmentMissing, KernelError
from lazykv.testing.levels import LEVELS


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "conformance",
        help="test a backend against what it declares",
        description="Run the conformance suite on the backend NAME (the kind of its locations: "
        "cpu, sim, cuda, or what a package brings).",
        epilog="Levels: " + "; ".join(f"{name}: {what}" for name, what in LEVELS.items()) + ".",
    )
    parser.add_argument("name", type=kind_name, metavar="NAME", help="the backend, such as cpu")
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
    parser.add_argument(
        "--in-process", action="store_true",
        help="run the tests in this process, not in one of their own, which a backend may end",
    )  # fmt: skip
    parser.set_defaults(run=_conformance)


def _conformance(args: argparse.Namespace) -> int:
    runner = _runner()
    if args.device is not None and DeviceLocation(args.device).kind != args.name:
        raise UsageError(f"--device: got {args.device}, need a location of backend {args.name!r}")
    if args.list and args.report is not None:
        raise UsageError("--report: got it with --list, need one of them; a list has no results")
    if args.report is not None:
        _try(lambda: runner.check_writable(args.report))
    return _run(args, runner) if args.in_process else _run_apart(args)


def _run_apart(args: argparse.Namespace) -> int:
    """Run the same command in a process of its own, and tell if that did not come to its end."""
    argv = [args.name, "--in-process", *(f"--level={level}" for level in args.level)]
    options = ("device", "xfails", "report")
    argv += [f"--{n}={v}" for n in options if (v := getattr(args, n)) is not None]
    argv += [f"--{n}" for n in ("list", "json") if getattr(args, n)]
    # The child finds the packages that this process finds, and none besides (-P).
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    command = [sys.executable, "-P", "-m", "lazykv.cli.child", "conformance", *argv]
    sys.stdout.flush()
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=env) as child:
        code = child.wait()
    if code < ENDED:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise KernelError(
            f"conformance: got the end of the process ({how}) in the tests, need one of the tests; "
            "pytest -v shows the last one"
        )
    return code - ENDED


def _run(args: argparse.Namespace, runner: Any) -> int:
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
        _try(lambda: Path(args.report).write_text(report.to_json(), encoding="utf-8"))
    sys.stdout.write(
        report.to_json() if args.json else _text(report.to_dict(), len(done.run.not_run()))
    )
    return OK if done.code == 0 else CHECK_FAILED


def _runner() -> Any:
    """The part that needs pytest, which comes with the `conformance` extra."""
    try:
        importlib.import_module("pytest")
        return importlib.import_module("lazykv.testing.runner")
    except ModuleNotFoundError as e:
        raise EnvironmentMissing(
            f"conformance: got no module {e.name!r}, need it; pip install 'lazykv[conformance]'"
        ) from e


def _try(write: Callable[[], object]) -> None:
    try:
        write()
    except (OSError, ValueError) as e:
        raise UsageError(f"--report: got {e}, need a file that can be written") from e


def _text(report: dict[str, Any], not_run: int) -> str:
    """What was declared, the levels, and every failure with its message."""
    backend, total = report["backend"], {"passed": 0, "failed": 0, "xfailed": 0, "skipped": 0}
    capabilities = backend["capabilities"]
    lists = [f"{len(v)} {n}" for n, v in capabilities.items() if isinstance(v, list)]
    flags = [n for n, v in capabilities.items() if v is True]
    lines = [f"{backend['name']} on {report['device']}: {', '.join([*lists, *flags])}"]
    for level, counts in report["counts"].items():
        parts = [f"{n} {outcome}" for outcome, n in counts.items() if n]
        lines.append(f"  {level:<10}{', '.join(parts)}")
        total = {outcome: n + counts[outcome] for outcome, n in total.items()}
    for test in report["tests"]:
        if test["outcome"] == "failed":
            reason = str(test["reason"]).strip().replace("\n", "\n    ")
            lines.append(f"FAILED {test['id']}\n    {reason}")
    lines += [f"STALE expected failure {line}" for line in report["stale_xfails"]]
    if not_run:
        lines.append(f"NOT RUN to the end: {not_run} tests")
    lines.append(", ".join(f"{n} {outcome}" for outcome, n in total.items() if n) or "no tests")
    return "\n".join(lines) + "\n"
