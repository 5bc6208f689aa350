"""``lazykv plan``."""

import argparse
import sys
from typing import Any

from lazykv.cli.exits import OK
from lazykv.cli.targets import add_target, document
from lazykv.inspect import plan_text


def add_commands(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="show the steps, the memory and the manifest of a plan",
        description="Show a plan: its steps in order, its arena, what is baked and what is bound.",
    )
    add_target(plan)
    plan.add_argument("--json", action="store_true", help="JSON, as `graph dump --json`")
    plan.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    d = document(args)
    sys.stdout.write(d.to_json() if args.json else plan_text(d, full=args.full))
    return OK
