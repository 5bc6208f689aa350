"""Envelopes: every change of every part is found and named."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazykv.errors import BlockStoreError, DTypeError
from lazykv.kv.envelope import open_sealed, seal


@given(st.binary(max_size=300))
def test_an_envelope_opens_to_what_was_sealed(payload):
    sealed = seal(payload, "k")
    assert sealed[48:] == payload
    assert open_sealed(sealed, "k") == payload
    assert open_sealed(bytearray(sealed), "k").readonly


def test_opening_copies_nothing():
    sealed = bytearray(seal(b"payload", "k"))
    payload = open_sealed(sealed, "k")
    sealed[48:] = b"PAYLOAD"
    assert payload == b"PAYLOAD"


def test_the_header_holds_magic_version_length_and_digest():
    want = b"LKVB" + b"\1\0\0\0" + b"\3" + bytes(7) + hashlib.sha256(b"k\0abc").digest() + b"abc"
    assert seal(b"abc", "k") == want
    assert seal(np.array([1, 2], ">u2"), "k")[48:] == b"\1\0\2\0"


FIELDS = {"magic": 0, "version": 4, "bytes of payload": 8, "SHA-256": 16, "SHA-256 ": 48}


@pytest.mark.parametrize("field", FIELDS)
def test_a_flipped_bit_is_found_and_its_field_named(field):
    starts = [*FIELDS.values(), 48 + 5]
    at = starts.index(FIELDS[field])
    for byte in range(starts[at], starts[at + 1]):
        for bit in range(8):
            bad = bytearray(seal(b"hello", "k"))
            bad[byte] ^= 1 << bit
            with pytest.raises(BlockStoreError, match=rf"block 'k-1': got .*{field.strip()}.*need"):
                open_sealed(bad, "k-1")


def test_an_envelope_of_any_other_length_is_refused():
    sealed = seal(b"hello world", "k")
    for n in range(len(sealed)):
        with pytest.raises(
            BlockStoreError, match=f"block 'k': got {n if n < 48 else n - 48} bytes"
        ):
            open_sealed(sealed[:n], "k")
    with pytest.raises(BlockStoreError, match="got 12 bytes of payload, need 11"):
        open_sealed(sealed + b"\0", "k")


def test_foreign_data_is_refused():
    with pytest.raises(BlockStoreError, match=r"block 'k': got magic b'GGUF', need b'LKVB'"):
        open_sealed(b"GGUF" + bytes(100), "k")
    with pytest.raises(DTypeError, match="block 'k': got NoneType"):
        open_sealed(None, "k")
    with pytest.raises(DTypeError, match="seal: got str"):
        seal("text", "k")


def test_an_envelope_is_of_its_key():
    with pytest.raises(BlockStoreError, match="'other': got SHA-256"):
        open_sealed(seal(b"payload", "k"), "other")
