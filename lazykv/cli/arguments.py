"""Parsing: arguments that fail in one line, and types that name the rule they check."""

import argparse
from collections.abc import Callable
from typing import NoReturn, TypeAlias

from lazykv.cli.exits import UsageError
from lazykv.device import DeviceLocation, check_kind
from lazykv.dtypes import dtype
from lazykv.errors import LazyKvError

Command: TypeAlias = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` instead of printing the usage and leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def count(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def whole(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, 0)


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, need a number") from None


def dtype_name(text: str) -> str:
    """The name of an element type."""
    return _checked(lambda: dtype(text).name)


def kind_name(text: str) -> str:
    """A well-formed kind of locations."""
    return _checked(lambda: check_kind(text))


def location_name(text: str) -> str:
    """A well-formed location; whether its backend is there shows later."""
    return _checked(lambda: DeviceLocation(text).name)


def _checked(convert: Callable[[], str]) -> str:
    try:
        return convert()
    except LazyKvError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _whole(text: str, least: int) -> int:
    # Python's int() would take "1_0" and " 7 " as well.
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise argparse.ArgumentTypeError(f"got {text!r}, need a whole number of at least {least}")
    return int(text)
