"""`main`: parse, run one command, and turn failures into one line and an exit code."""

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

import lazykv.cli.conformance as conformance
import lazykv.cli.generate as generate
import lazykv.cli.graph as graph
import lazykv.cli.plan as plan
import lazykv.cli.serve_batch as serve_batch
from lazykv import __version__
from lazykv.cli.arguments import Command, Parser
from lazykv.cli.exits import INTERRUPTED, OK, error_line, exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``lazykv ARGV``; returns the exit code.

    0 is fine, 1 a check or a run that failed, 2 arguments that cannot be used, 3 something missing
    outside the program (an extra, the network, a device, memory, a writable folder).
    """
    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal that cannot show a character shows a mark; text is no reason to stop.
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            args = _parser().parse_args(argv)
        except SystemExit:  # argparse leaves this way after --help and --version
            return OK
        run: Command = args.run
        code = run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has enough of it. Python flushes once more when it exits, so
        # standard output must lead somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (Exception, SystemExit) as e:  # a driver or a kernel may leave; the command has not
        print(f"lazykv: {error_line(e)}", file=sys.stderr)
        return exit_code(e)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="lazykv",
        description="Graphs and held plans for the key/value caches of language models.",
        epilog="Exit codes: 0 fine, 1 a check failed, 2 usage, 3 something missing outside.",
    )
    parser.add_argument("--version", action="version", version=f"lazykv {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (generate, serve_batch, graph, plan, conformance):
        module.add_commands(commands)
    return parser
