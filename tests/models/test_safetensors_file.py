"""Single safetensors files, whole and hostile (N1 to N7)."""

import json
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazykv.errors import ModelFormatError
from lazykv.models.safetensors_file import read_tensors


def raw(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def f32(shape, start, end):
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


@pytest.fixture
def read(tmp_path):
    def read_bytes(data):
        path = tmp_path / "x.safetensors"
        path.write_bytes(data)
        return {name: source.load() for name, source in read_tensors(path).items()}

    return read_bytes


def refused(read, data):
    with pytest.raises(ModelFormatError, match=r"safetensors file x\.safetensors"):
        read(data)


def test_N1_unchecked_header(read):
    refused(read, raw({"a": f32([1000, 1000], 0, 4)}, b"0000"))


def test_N2_overlap_and_gaps(read):
    refused(read, raw({"k": f32([16], 0, 64), "v": f32([16], 0, 64)}, b"0" * 64))
    refused(read, raw({"k": f32([1], 0, 4), "v": f32([1], 8, 12)}, b"0" * 12))


def test_N3_truncated(read):
    whole = raw({"a": f32([60], 0, 240)}, b"0" * 240)
    assert read(whole)["a"].shape == (60,)
    for length in range(len(whole)):
        refused(read, whole[:length])
    refused(read, whole + b"0")


def test_N4_zero_sizes(read):
    assert read(raw({"b": f32([2], 0, 8), "a": f32([0], 8, 8)}, b"\0" * 8))["a"].shape == (0,)
    refused(read, raw({"a": f32([1], 0, 0)}))
    assert read(raw({"a": f32([], 0, 4)}, b"\0" * 4))["a"] == 0.0


def test_N5_repeated_name(read):
    entry = json.dumps(f32([1], 0, 4)).encode()
    with pytest.raises(ModelFormatError, match="key 'a' twice"):
        read(raw(b'{"a":' + entry + b',"a":' + entry + b"}", b"0000"))


def test_N6_attacker_controlled_allocation(read):
    tracemalloc.start()
    refused(read, struct.pack("<Q", 2**63 - 1) + b"0" * 12)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_N7_unaligned_data(read):
    header = json.dumps({"a": f32([3], 0, 12)}, separators=(",", ":")).encode().ljust(61)
    assert len(header) == 61
    assert read(raw(header, np.array([1, 2, 3], "<f4").tobytes()))["a"].tolist() == [1, 2, 3]


@given(flips=st.lists(st.tuples(st.integers(0, 130), st.integers(0, 255)), max_size=4))
def test_flipped_bytes_are_refused_or_read(tmp_path_factory, flips):
    data = bytearray(raw({"a": f32([2, 3], 0, 24), "b": f32([1], 24, 28)}, b"\0" * 28))
    for place, value in flips:
        data[place] = value
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    path.write_bytes(data)
    try:
        tensors = read_tensors(path)
    except ModelFormatError:
        return
    for source in tensors.values():
        assert source.load().shape == source.shape
