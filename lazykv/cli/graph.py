"""``lazykv graph dump`` and ``lazykv graph inspect``."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lazykv.cli.exits import OK, UsageError
from lazykv.cli.targets import add_target, document
from lazykv.inspect import (
    Document,
    graph_text,
    plan_text,
    summary_json,
    summary_text,
    to_dot,
    to_mermaid,
)


def _text(d: Document, full: bool) -> str:
    return graph_text(d, full=full) + "\n" + plan_text(d, full=full)


FORMATS: dict[str, Callable[[Document, bool], str]] = {
    "text": _text,
    "json": lambda d, full: d.to_json(),
    "dot": lambda d, full: to_dot(d, full=full),
    "mermaid": lambda d, full: to_mermaid(d, full=full),
}


def add_commands(commands: Any) -> None:
    graph = commands.add_parser("graph", help="show graphs and what the scheduler makes of them")
    verbs = graph.add_subparsers(metavar="VERB", required=True)
    dump = verbs.add_parser(
        "dump",
        help="write a graph and its plan out",
        description="Write a graph and the plan made for it. JSON always holds everything.",
    )
    add_target(dump)
    dump.add_argument("--format", choices=FORMATS, default="text", help="default text")
    dump.add_argument("-o", "--output", metavar="FILE", help="write to FILE, not standard output")
    dump.set_defaults(run=_dump)
    inspect = verbs.add_parser(
        "inspect",
        help="sum a graph up",
        description="Ops, memory and the biggest steps of a graph.",
    )
    add_target(inspect)
    inspect.add_argument("--json", action="store_true", help="JSON for programs")
    inspect.set_defaults(run=_inspect)


def _dump(args: argparse.Namespace) -> int:
    text = FORMATS[args.format](document(args), args.full)
    if args.output is None:
        sys.stdout.write(text)
        return OK
    try:
        Path(args.output).write_text(text, encoding="utf-8")
    except OSError as e:
        raise UsageError(
            f"--output: got {args.output!r} ({e.strerror}), need a file that can be written"
        ) from e
    return OK


def _inspect(args: argparse.Namespace) -> int:
    d = document(args)
    sys.stdout.write(summary_json(d) if args.json else summary_text(d))
    return OK
