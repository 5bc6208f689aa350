"""JSON from model folders: objects whose fields are checked for type as they are read."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

from lazykv.errors import ModelFormatError

MAX_JSON_BYTES = 2**28
"""The largest real ones are tokenizers of some tens of MiB."""

T = TypeVar("T")


def parse_json(text: str | bytes, what: str) -> Any:
    """The value of a JSON text; raises ModelFormatError if it is invalid or repeats a key."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise ModelFormatError(f"{what}: got key {twice!r} twice, need it once")
        return result

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError as error:
        raise ModelFormatError(f"{what}: got values nested too deep, need fewer levels") from error
    except ValueError as error:
        if isinstance(error, ModelFormatError):
            raise
        raise ModelFormatError(f"{what}: got {error}, need valid JSON") from error


class JsonObject:
    """The top-level object of one file. A getter refuses a value of another type.

    JSON null counts as missing, as it does for the writers of these files.
    """

    def __init__(self, values: dict[str, Any], name: str) -> None:
        self.values = values
        self.name = name

    def optional(self, key: str, kind: type[T]) -> T | None:
        value = self.values.get(key)
        if value is None:
            return None
        # A JSON integer is a fine float; true and false are no numbers, though Python's are.
        if kind is float and isinstance(value, int):
            value = value if isinstance(value, bool) else _float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelFormatError(
                f"{self.name}: got {key} = {str(value)[:60]!r}, need {kind.__name__}"
            )
        return value

    def need(self, key: str, kind: type[T]) -> T:
        value = self.optional(key, kind)
        if value is None:
            raise ModelFormatError(f"{self.name}: got no {key}, need {kind.__name__}")
        return value

    def get(self, key: str, kind: type[T], default: T) -> T:
        value = self.optional(key, kind)
        return default if value is None else value


def read_object(path: Path) -> JsonObject:
    """The JSON object in a file; raises ModelFormatError if it is missing or something else."""
    values = parse_json(read_text(path), path.name)
    if not isinstance(values, dict):
        raise ModelFormatError(f"{path.name}: got {type(values).__name__}, need a JSON object")
    return JsonObject(values, path.name)


def read_text(path: Path) -> str:
    """The text of a UTF-8 file of bounded size; raises ModelFormatError otherwise."""
    try:
        size = path.stat().st_size if path.is_file() else -1
        if not 0 <= size <= MAX_JSON_BYTES:
            found = "no such file" if size < 0 else f"{size} bytes"
            raise ModelFormatError(
                f"{path}: got {found}, need a file of at most {MAX_JSON_BYTES} bytes"
            )
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path.name}: got {error.reason}, need UTF-8") from error
    except OSError as error:
        raise ModelFormatError(f"{path}: got {error.strerror}, need a readable file") from error


def _float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf")
