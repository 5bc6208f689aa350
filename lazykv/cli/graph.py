"""``lazykv graph dump`` and ``lazykv graph inspect``."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lazykv.cli.exits import OK, UsageError
from lazykv.cli.gguf import describe_file, is_gguf
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
    formats = dump.add_mutually_exclusive_group()
    formats.add_argument("--format", choices=FORMATS, default="text", help="default text")
    formats.add_argument(
        "--json", action="store_const", const="json", dest="format", help="as --format json"
    )
    dump.add_argument("-o", "--output", metavar="FILE", help="write to FILE, not standard output")
    dump.set_defaults(run=_dump)
    inspect = verbs.add_parser(
        "inspect",
        help="sum a graph up, or list what a .gguf file says",
        description="Ops, memory and the biggest steps of a graph. Of a file, TARGET.gguf: its "
        "metadata and its tensors, whether it can be used as a model or not.",
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
    if is_gguf(args.target):
        sys.stdout.write(describe_file(args.target, as_json=args.json))
        return OK
    d = document(args)
    sys.stdout.write(summary_json(d) if args.json else summary_text(d))
    return OK
