"""A checksummed envelope for blocks that leave the program.

What comes back is what went, or an error that says what differs.
"""

import hashlib
import struct
from typing import TypeAlias

from lazykv.errors import BlockStoreError
from lazykv.storage import as_host_bytes

BytesLike: TypeAlias = bytes | bytearray | memoryview

_MAGIC = b"LKVB"
_VERSION = 1
_HEADER = struct.Struct("<4sIQ32s")
"""Magic, version, bytes of payload, SHA-256 of key and payload: 48 bytes, which keep it aligned."""


def seal(payload: BytesLike, key: str) -> bytes:
    """`payload` in an envelope that `open_sealed` can check, for this key and no other."""
    view = as_host_bytes("seal", payload).data
    header = _HEADER.pack(_MAGIC, _VERSION, len(view), _digest(view, key))
    return b"".join((header, view))


def _digest(payload: memoryview, key: str) -> bytes:
    """Of both: blocks that a store has swapped are found."""
    digest = hashlib.sha256(key.encode() + b"\0")
    digest.update(payload)
    return digest.digest()


def open_sealed(data: BytesLike, key: str) -> memoryview:
    """The payload that was sealed, a read-only view into `data`.

    Raises BlockStoreError, naming `key` and what differs, if `data` is not a whole, unchanged
    envelope of this version.
    """
    view = as_host_bytes(f"block {key!r}", data).data.toreadonly()
    if len(view) < _HEADER.size:
        raise BlockStoreError(
            f"block {key!r}: got {len(view)} bytes, need {_HEADER.size} of header or more"
        )
    magic, version, length, digest = _HEADER.unpack_from(view)
    payload = view[_HEADER.size :]
    if magic != _MAGIC:
        raise BlockStoreError(f"block {key!r}: got magic {magic!r}, need {_MAGIC!r}")
    if version != _VERSION:
        raise BlockStoreError(f"block {key!r}: got envelope version {version}, need {_VERSION}")
    if length != len(payload):
        raise BlockStoreError(
            f"block {key!r}: got {len(payload)} bytes of payload, need {length} as its header says"
        )
    found = _digest(payload, key)
    if found != digest:
        raise BlockStoreError(
            f"block {key!r}: got SHA-256 {found.hex()}, need {digest.hex()} as its header says"
        )
    return payload
