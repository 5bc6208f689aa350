"""What the commands that run a model have in common: options, and loading it."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from lazykv.cli.arguments import count, location_name, number, whole
from lazykv.cli.exits import UsageError
from lazykv.models import LlamaModel, load
from lazykv.models.sampling import Sampler, StopStrings


def add_model(parser: argparse.ArgumentParser) -> None:
    """``--model`` and ``--device``."""
    parser.add_argument(
        "--model", metavar="M", default="smollm2",
        help="smollm2 (the default: small, fetched once), a .gguf file or a safetensors folder",
    )  # fmt: skip
    parser.add_argument(
        "--device", type=location_name, metavar="LOCATION", default="cpu",
        help="where the cache lives and the model runs (default cpu)",
    )  # fmt: skip


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen, and where the text ends."""
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--temperature", type=number, metavar="T", default=0.0, help="0, the default, is greedy"
    )
    sampling.add_argument("--top-k", type=count, metavar="N", help="keep the N most likely tokens")
    sampling.add_argument("--top-p", type=number, metavar="P", help="keep the likeliest P in all")
    sampling.add_argument("--seed", type=whole, metavar="N", help="for the same text every time")
    sampling.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before TEXT (may be repeated)"
    )


def check_sampling(args: argparse.Namespace) -> None:
    """What can be wrong without the model is told before the wait for it."""
    Sampler(args.temperature, args.top_k, args.top_p, args.seed)
    StopStrings(args.stop or ())


def text_from(name: str, read: Callable[[], str]) -> str:
    """Text that a tokenizer can take."""
    try:
        text = read()
        text.encode()  # bytes that are no text may have come through as lone surrogates
    except UnicodeError as e:
        raise UsageError(f"{name}: got bytes that are not UTF-8, need text") from e
    return text


def load_model(args: argparse.Namespace) -> LlamaModel:
    """The model that the arguments name, with a progress bar while it loads."""
    bar = terminal_bar()
    if bar is None:
        return load(args.model, notify=_notify)
    with bar:
        task = bar.add_task("loading", total=None)
        return load(
            args.model, notify=_notify,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip


def terminal_bar() -> Any:
    """A rich progress display on standard error; None if that is no terminal or rich is missing."""
    if not sys.stderr.isatty():
        return None
    # Late, because rich comes with the optional `models` extra and is slow to import.
    try:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import Progress  # noqa: PLC0415
    except ModuleNotFoundError:
        return None
    # What is printed goes where it always goes.
    return Progress(
        console=Console(stderr=True), transient=True, redirect_stdout=False, redirect_stderr=False
    )


def _notify(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
