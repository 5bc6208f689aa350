"""A bounds-checked reader of GGUF headers: metadata and the table of tensors, no weights.

The layout is the one of the GGUF specification (versions 2 and 3, little-endian). Every count and
length in the file is held against the bytes that remain before anything is read or allocated for
it, so a hostile header costs no more memory than its own size.
"""

import math
import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFValueType,
)
from numpy.typing import NDArray

from lazykv.errors import ModelFormatError

MAX_NESTING = 4
"""Arrays of arrays go no deeper; no known writer nests them at all."""
MAX_NAME_BYTES = 65535
"""The specification's limit for metadata keys, used for tensor names too (theirs is 64)."""

Value = int | float | bool | str | NDArray[np.generic] | list["Value"]
"""A metadata value; arrays of numbers are NumPy arrays, others are lists."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies: `shape` in NumPy order, `start` in bytes from the file's beginning."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All of a GGUF file but the weights, in file order. `alignment` is in bytes."""

    version: int
    metadata: dict[str, Value]
    tensors: tuple[GgufTensor, ...]
    alignment: int


def read_header(file: BinaryIO) -> GgufHeader:
    """Read the header of an open GGUF file; raises ModelFormatError for anything malformed."""
    cursor = _Cursor(file, os.fstat(file.fileno()).st_size)
    magic = cursor.take(4, "magic number")
    if magic != GGUF_MAGIC.to_bytes(4, "little"):
        raise ModelFormatError(f"GGUF file: got first bytes {magic!r}, need b'GGUF'")
    version = cursor.unsigned(4, "version")
    if version not in (2, 3):
        big = " (a big-endian file)" if version in (2 << 24, 3 << 24) else ""
        raise ModelFormatError(f"GGUF file: got version {version}{big}, need 2 or 3")
    # The smallest tensor entry: name length, rank, type, offset. The smallest pair: key length,
    # value type, one byte.
    n_tensors = cursor.count("tensor count", entry_bytes=8 + 4 + 4 + 8)
    n_pairs = cursor.count("metadata count", entry_bytes=8 + 4 + 1)
    metadata: dict[str, Value] = {}
    for _ in range(n_pairs):
        key = cursor.name("metadata key")
        if key in metadata:
            raise ModelFormatError(f"GGUF file: got metadata key {key!r} twice, need it once")
        metadata[key] = _value(cursor, cursor.value_type(key), key)
    alignment = _alignment(metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT))
    entries = [_tensor(cursor, alignment) for _ in range(n_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    return GgufHeader(version, metadata, _place(entries, data_start, cursor.size), alignment)


def read_gguf_metadata(path: str | Path) -> GgufHeader:
    """The metadata and tensor table of a GGUF file, for inspection; it may hold no tensors.

    Raises ModelFormatError if the file is missing or malformed.
    """
    with open_regular(Path(path)) as file:
        return read_header(file)


def open_regular(path: Path) -> BinaryIO:
    """Open a plain file for reading; anything else is a ModelFormatError."""
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no plain file"
        raise ModelFormatError(f"model file {path}: got {found}, need a file")
    try:
        return path.open("rb")
    except OSError as error:
        raise ModelFormatError(f"model file {path}: got {error}, need a readable file") from error


class _Cursor:
    """Reads forward through a file, never past `size` and never more than is there."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self.size = size
        self.position = 0

    def take(self, n_bytes: int, what: str) -> bytes:
        self.need(n_bytes, what)
        data = self._file.read(n_bytes)
        if len(data) != n_bytes:
            raise ModelFormatError(f"GGUF file: got an early end in {what}, need a whole file")
        self.position += n_bytes
        return data

    def need(self, n_bytes: int, what: str) -> None:
        left = self.size - self.position
        if n_bytes > left:
            raise ModelFormatError(
                f"GGUF file: got {what} of {n_bytes} bytes at byte {self.position}, "
                f"need at most the {left} that remain"
            )

    def unsigned(self, n_bytes: int, what: str) -> int:
        return int.from_bytes(self.take(n_bytes, what), "little")

    def count(self, what: str, entry_bytes: int) -> int:
        """A 64-bit count of entries that take at least `entry_bytes` each."""
        count = self.unsigned(8, what)
        if count * entry_bytes > self.size - self.position:
            raise ModelFormatError(
                f"GGUF file: got {what} {count} at byte {self.position - 8}, need at most what "
                f"fits in the {self.size - self.position} bytes that remain"
            )
        return count

    def string(self, what: str) -> str:
        return _text(self.take(self.unsigned(8, f"length of {what}"), what), what)

    def name(self, what: str) -> str:
        n_bytes = self.unsigned(8, f"length of {what}")
        if n_bytes > MAX_NAME_BYTES:
            raise ModelFormatError(
                f"GGUF file: got {what} of {n_bytes} bytes, need at most {MAX_NAME_BYTES}"
            )
        return _text(self.take(n_bytes, what), what)

    def value_type(self, key: str) -> GGUFValueType:
        code = self.unsigned(4, f"value type of {key}")
        try:
            return GGUFValueType(code)
        except ValueError as error:
            raise ModelFormatError(
                f"GGUF file: got value type {code} for {key!r}, need one of 0 to 12"
            ) from error


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"GGUF file: got {what} {data[:40]!r}, need UTF-8") from error


_FORMATS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "<u1",
}


def _value(cursor: _Cursor, kind: GGUFValueType, key: str, depth: int = 0) -> Value:
    if kind is GGUFValueType.STRING:
        return cursor.string(f"value of {key}")
    if kind is GGUFValueType.ARRAY:
        return _array(cursor, key, depth)
    # `item` makes a Python number: no fixed-width arithmetic on sizes from a file.
    scalar: int | float | bool = _numbers(cursor, kind, 1, key)[0].item()
    return scalar


def _array(cursor: _Cursor, key: str, depth: int) -> Value:
    if depth == MAX_NESTING:
        raise ModelFormatError(
            f"GGUF file: got arrays nested over {MAX_NESTING} deep in {key!r}, need fewer"
        )
    kind = cursor.value_type(key)
    what = f"element count of {key}"
    if kind is GGUFValueType.STRING:
        count = cursor.count(what, entry_bytes=8)
        return [cursor.string(key) for _ in range(count)]
    if kind is GGUFValueType.ARRAY:
        count = cursor.count(what, entry_bytes=4 + 8)
        return [_array(cursor, key, depth + 1) for _ in range(count)]
    count = cursor.count(what, entry_bytes=np.dtype(_FORMATS[kind]).itemsize)
    return _numbers(cursor, kind, count, key)


def _numbers(cursor: _Cursor, kind: GGUFValueType, count: int, key: str) -> NDArray[np.generic]:
    dtype = np.dtype(_FORMATS[kind])
    array = np.frombuffer(cursor.take(count * dtype.itemsize, f"value of {key}"), dtype)
    if kind is not GGUFValueType.BOOL:
        return array
    if (array > 1).any():
        raise ModelFormatError(f"GGUF file: got a boolean byte {array.max()} in {key!r}, need 0, 1")
    return array.astype(np.bool_)


def _alignment(value: Value) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < 8 or value & (value - 1):  # type: ignore[operator]
        raise ModelFormatError(
            f"GGUF file: got general.alignment {value!r}, need a power of two of at least 8"
        )
    return int(value)  # type: ignore[arg-type]


def _tensor(cursor: _Cursor, alignment: int) -> GgufTensor:
    """One entry of the tensor table, `start` still relative to the data section."""
    name = cursor.name("tensor name")
    rank = cursor.unsigned(4, f"rank of {name}")
    if rank > 4:
        raise ModelFormatError(f"GGUF file: got {rank} dimensions for {name!r}, need at most 4")
    extents = struct.unpack(f"<{rank}Q", cursor.take(8 * rank, f"shape of {name}"))
    code = cursor.unsigned(4, f"type of {name}")
    start = cursor.unsigned(8, f"offset of {name}")
    if code not in GGML_QUANT_SIZES:
        known = ", ".join(str(int(kind)) for kind in GGML_QUANT_SIZES)
        raise ModelFormatError(
            f"GGUF file: got tensor type {code} for {name!r}, need one of {known}"
        )
    kind = GGMLQuantizationType(code)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    row = extents[0] if extents else 1
    if 0 in extents or row % block:
        raise ModelFormatError(
            f"GGUF file: got shape {list(extents[::-1])} for {name!r} of type {kind.name}, "
            f"need no zeros and rows of whole blocks of {block}"
        )
    if start % alignment:
        raise ModelFormatError(
            f"GGUF file: got offset {start} for {name!r}, need a multiple of {alignment}"
        )
    n_bytes = math.prod(extents) // block * block_bytes  # Python integers: no 64-bit wrap
    return GgufTensor(name, extents[::-1], kind.name, start, n_bytes)


def _place(entries: list[GgufTensor], data_start: int, size: int) -> tuple[GgufTensor, ...]:
    """The entries with absolute starts, held against the file's size and one another."""
    placed = []
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise ModelFormatError(f"GGUF file: got tensor {entry.name!r} twice, need it once")
        seen.add(entry.name)
        start = data_start + entry.start
        if start + entry.n_bytes > size:
            raise ModelFormatError(
                f"GGUF file: got {size} bytes, need {start + entry.n_bytes} to hold tensor "
                f"{entry.name!r} {list(entry.shape)}"
            )
        placed.append(GgufTensor(entry.name, entry.shape, entry.type_name, start, entry.n_bytes))
    for left, right in pairwise(sorted(placed, key=lambda tensor: tensor.start)):
        if left.start + left.n_bytes > right.start:
            raise ModelFormatError(
                f"GGUF file: got tensors {left.name!r} and {right.name!r} sharing bytes, "
                "need them apart"
            )
    return tuple(placed)
