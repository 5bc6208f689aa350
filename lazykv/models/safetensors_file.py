"""One safetensors file: its table of tensors, checked, and reading them as float32."""

import os
from collections.abc import Callable
from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors asks for by name
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from lazykv.errors import ModelFormatError
from lazykv.models.checkpoint import TensorSource
from lazykv.models.json_file import parse_json

TENSOR_TYPES = ("F32", "F16", "BF16")
"""The storage types whose weights can be loaded."""


def read_tensors(path: Path) -> dict[str, TensorSource]:
    """Every tensor of the file, by the name it has there; the weights stay on disk.

    The library checks the header against the file (lengths, offsets, gaps, overlap); a name given
    twice, of which it would keep the last, is refused here.

    Raises ModelFormatError if the file is missing, malformed or holds other types.
    """
    stamp = _stamp(path)
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {n: (tuple(s.get_shape()), str(s.get_dtype())) for n, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ModelFormatError(
            f"safetensors file {path.name}: got {error}, need a whole, valid file"
        ) from error
    _refuse_repeated_names(path)
    for name, (_, type_name) in found.items():
        if type_name not in TENSOR_TYPES:
            raise ModelFormatError(
                f"safetensors file {path.name}: got tensor {name!r} of type {type_name}, "
                f"need one of {', '.join(TENSOR_TYPES)}"
            )
    return {
        name: TensorSource(name, shape, type_name, _reader(path, name, stamp))
        for name, (shape, type_name) in found.items()
    }


def _reader(path: Path, name: str, stamp: tuple[int, ...]) -> Callable[[], NDArray[np.float32]]:
    def read() -> NDArray[np.float32]:
        if _stamp(path) != stamp:
            raise ModelFormatError(
                f"safetensors file {path}: got a changed file, need the one opened"
            )
        with safe_open(path, framework="numpy") as file:
            array: NDArray[np.float32] = file.get_tensor(name).astype(np.float32)
        return array

    return read


def _refuse_repeated_names(path: Path) -> None:
    # Called once the library has accepted the file, so the length it starts with is sound.
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    parse_json(header, f"safetensors file {path.name}")


def _stamp(path: Path) -> tuple[int, ...]:
    if not path.is_file():
        raise ModelFormatError(f"safetensors file {path}: got no plain file, need one")
    try:
        status = os.stat(path)
    except OSError as error:
        raise ModelFormatError(
            f"safetensors file {path}: got {error.strerror}, need a readable file"
        ) from error
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
