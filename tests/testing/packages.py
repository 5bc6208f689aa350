"""Packages that bring a backend, as an installer would have left them in a folder."""

from collections.abc import Mapping
from pathlib import Path


def install(folder: Path, name: str, code: Mapping[str, str], backends: Mapping[str, str]) -> None:
    """Write files of code, and the entry points ``{kind: "module:Class"}`` of a package."""
    for path, text in code.items():
        (folder / path).write_text(text)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{kind} = {value}\n" for kind, value in backends.items()]
    (info / "entry_points.txt").write_text("[lazykv.backends]\n" + "".join(lines))
