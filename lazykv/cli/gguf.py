"""``lazykv graph inspect FILE.gguf``: what a file says of itself, usable as a model or not."""

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from lazykv.errors import EnvironmentMissing
from lazykv.inspect.text import Row, count, size, table

if TYPE_CHECKING:
    from lazykv.models.gguf_header import GgufHeader

SCHEMA = "lazykv.gguf/1"
LONGEST = 60
"""Characters of a value that are shown, and members of a list."""


def is_gguf(target: str) -> bool:
    return target.endswith(".gguf") and not target.startswith("decode:")


def describe_file(path: str, *, as_json: bool) -> str:
    """The metadata and the tensors of a GGUF file, in its own order; no weight is read."""
    # Late, because the file readers come with the optional `models` extra.
    try:
        from lazykv.models.gguf_header import read_gguf_metadata  # noqa: PLC0415
    except ModuleNotFoundError as e:
        raise EnvironmentMissing(
            f"graph inspect: got no module {e.name!r}, need it; pip install 'lazykv[models]'"
        ) from e
    header = read_gguf_metadata(path)
    return _json(header) if as_json else _text(path, header)


def _json(header: "GgufHeader") -> str:
    value = {
        "schema": SCHEMA,
        "version": header.version,
        "alignment": header.alignment,
        "metadata": header.metadata,
        "tensors": [
            {"name": t.name, "shape": t.shape, "type": t.type_name, "bytes": t.n_bytes}
            for t in header.tensors
        ],
    }
    return json.dumps(value, indent=1, ensure_ascii=False, default=np.ndarray.tolist) + "\n"


def _text(path: str, header: "GgufHeader") -> str:
    pairs: list[Row] = [(_name(key), _short(value)) for key, value in header.metadata.items()]
    tensors: list[Row] = [
        (_name(t.name), t.type_name, f"[{','.join(map(str, t.shape))}]", size(t.n_bytes))
        for t in header.tensors
    ]
    lines = [
        f"file {path}: GGUF version {header.version}, {count(len(pairs), 'metadata key')}, "
        f"{count(len(tensors), 'tensor')}",
        "",
        "metadata",
        *(table(pairs) or ["  nothing"]),
        "",
        "tensors",
        *(table(tensors) or ["  nothing"]),
    ]
    return "\n".join(lines) + "\n"


def _name(name: str) -> str:
    """Without what a terminal might act on."""
    return ascii(name)[1:-1]


def _short(value: Any) -> str:
    """A value in one line; a list by its beginning."""
    if not isinstance(value, list | np.ndarray):
        return _cut(ascii(value))
    items = value[:LONGEST]
    start = ", ".join(
        ascii(v) for v in (items.tolist() if isinstance(items, np.ndarray) else items)
    )
    return f"{count(len(value), 'value')}: {_cut(start)}" if len(value) else "no values"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
