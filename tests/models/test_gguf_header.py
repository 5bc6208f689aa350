"""The bounds-checked GGUF header reader, against hostile and truncated files."""

import contextlib
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import entry, pair, raw_gguf, spm_vocabulary, string, weights, write_gguf

from lazykv.errors import ModelFormatError
from lazykv.models.gguf_file import read_gguf
from lazykv.models.gguf_header import read_gguf_metadata

UINT32, INT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 7, 8, 9, 10


@pytest.fixture
def read(tmp_path):
    """Reads a header from bytes, failing if it takes much memory whatever the outcome."""

    def read_bytes(data: bytes):
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        tracemalloc.start()
        try:
            return read_gguf_metadata(path)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 2**20 + 20 * len(data)

    return read_bytes


def test_reads_what_a_writer_wrote(tmp_path):
    metadata = {"x.flag": True, "x.name": "é", "x.list": ["a", ""], "x.numbers": [1, 2]}
    header = read_gguf_metadata(write_gguf(tmp_path / "m.gguf", metadata=metadata))
    assert header.version == 3
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["x.flag"] is True
    assert header.metadata["x.name"] == "é"
    assert header.metadata["x.list"] == ["a", ""]
    assert header.metadata["x.numbers"].tolist() == [1, 2]
    assert type(header.metadata["llama.block_count"]) is int
    assert {t.name: t.shape for t in header.tensors} == {n: a.shape for n, a in weights().items()}


def test_nested_arrays(read):
    inner = struct.pack("<IQ", UINT32, 2) + struct.pack("<2I", 7, 8)
    outer = struct.pack("<IQ", ARRAY, 2) + inner + inner
    (first, second) = read(raw_gguf([pair("a", ARRAY, outer)])).metadata["a"]
    assert first.tolist() == second.tolist() == [7, 8]


def test_version_2_and_others(read):
    assert read(raw_gguf(version=2)).version == 2
    for version in (0, 1, 4, 3 << 24):
        with pytest.raises(ModelFormatError, match=f"version {version}"):
            read(raw_gguf(version=version))


def test_O1_untrusted_sizes(read):
    huge_rank = string("a") + struct.pack("<I", 1_000_000)
    with pytest.raises(ModelFormatError, match="1000000 dimensions"):
        read(raw_gguf(entries=[huge_rank + b"\0" * 100]))
    for dims in ((2**32, 2**32), (2**64 - 1, 2), (2**63, 2, 1, 1)):
        with pytest.raises(ModelFormatError, match="to hold tensor 'a'"):
            read(raw_gguf(entries=[entry("a", dims)], data=b"\0" * 64))


def test_O2_alignment_16(tmp_path):
    names = ("a", "b", "c")
    pairs = [pair("general.alignment", UINT32, struct.pack("<I", 16))]
    entries = [entry(name, (4,), offset=16 * place) for place, name in enumerate(names)]
    data = b"".join(np.full(4, place, "<f4").tobytes() for place in (1, 2, 3))
    for pad in range(64):  # some pad puts the data on a multiple of 16 that is none of 32
        file = raw_gguf([*pairs, pair("p", STRING, string("x" * pad))], entries, data, alignment=16)
        path = tmp_path / "m.gguf"
        path.write_bytes(file)
        header = read_gguf_metadata(path)
        for place, tensor in enumerate(header.tensors):
            stored = np.frombuffer(file, "<f4", 4, tensor.start)
            assert stored.tolist() == [place + 1] * 4


@pytest.mark.parametrize("value", [0, -8, 3, 4, 24])
def test_O3_untrusted_alignment(read, value):
    with pytest.raises(ModelFormatError, match=f"alignment {value},"):
        read(raw_gguf([pair("general.alignment", INT32, struct.pack("<i", value))]))


def test_alignment_past_the_file(read):
    pairs = [pair("general.alignment", UINT64, struct.pack("<Q", 2**63))]
    assert read(raw_gguf(pairs)).alignment == 2**63
    with pytest.raises(ModelFormatError, match="to hold tensor 'a'"):
        read(raw_gguf(pairs, [entry("a", (1,))]))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (pair("k", STRING, struct.pack("<Q", 2**62)), "4611686018427387904 bytes"),
        (pair("k", ARRAY, struct.pack("<IQ", UINT32, 2**61)), "count of k 2305843009213693952"),
        (pair("k", ARRAY, struct.pack("<IQ", STRING, 2**61)), "count of k 2305843009213693952"),
        (pair("k", ARRAY, struct.pack("<IQ", ARRAY, 2**61)), "count of k 2305843009213693952"),
        (pair("k", 99, b""), "value type 99"),
        (pair("k", ARRAY, struct.pack("<IQ", 99, 1)), "value type 99"),
        (pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 20), "nested over 4 deep"),
        (pair("k", BOOL, b"\2"), "boolean byte 2"),
        (pair("k", STRING, string(b"\xff")), "need UTF-8"),
        (string("k" * 70000), "metadata key of 70000 bytes"),
        (pair("k", UINT32, b"1234") * 2, "metadata key 'k' twice"),
    ],
)
def test_O12_untrusted_metadata(read, value, said):
    with pytest.raises(ModelFormatError, match=said):
        read(raw_gguf([value + b"\0" * 200], n_pairs=2))


@pytest.mark.parametrize("count", ["n_pairs", "n_tensors"])
def test_O12_untrusted_counts(read, count):
    for value in (2**64 - 1, 2**40, 1000):
        with pytest.raises(ModelFormatError, match=f"count {value}"):
            read(raw_gguf(data=b"\0" * 400, **{count: value}))


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([entry("a", (4,)), entry("a", (4,), offset=32)], "tensor 'a' twice"),
        ([entry("a", (16,)), entry("b", (4,), offset=32)], "'a' and 'b' sharing bytes"),
        ([entry("a", (4,), offset=16)], "offset 16"),
        ([entry("a", (4,), kind=4)], "tensor type 4"),
        ([entry("a", (4,), kind=999)], "tensor type 999"),
        ([entry("a", (33,), kind=8)], "rows of whole blocks of 32"),
        ([entry("a", (4, 0))], "no zeros"),
        ([entry("a", (24, 2))], "to hold tensor 'a'"),
    ],
)
def test_untrusted_tensor_table(read, entries, said):
    with pytest.raises(ModelFormatError, match=said):
        read(raw_gguf(entries=entries, data=b"\0" * 128))


def test_O11_metadata_without_tensors_can_be_inspected(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tensors={})
    assert read_gguf_metadata(path).metadata["llama.block_count"] == 2
    with pytest.raises(ModelFormatError, match="no tensors"):
        read_gguf(path)


def test_not_a_gguf_file(tmp_path, read):
    for data in (b"", b"GGU", b"GGML" + b"\0" * 100, b"\0" * 100):
        with pytest.raises(ModelFormatError, match="GGUF file"):
            read(data)
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ModelFormatError, match="need a file"):
            read_gguf_metadata(path)


def test_every_truncation_of_a_small_file(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf", metadata=spm_vocabulary(), type_name="Q4_0")
    tensors = read_gguf_metadata(whole).tensors
    end = max(tensor.start + tensor.n_bytes for tensor in tensors)
    header_end = min(tensor.start for tensor in tensors)
    data = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(header_end + 1), *range(header_end, end, 997), end - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(ModelFormatError):
            read_gguf(cut)
    cut.write_bytes(data[:end])  # only padding is missing
    assert read_gguf_metadata(cut).tensors == tensors


def test_first_2000_truncations_of_the_real_file(tmp_path, smollm2_path):
    with smollm2_path.open("rb") as file:
        data = file.read(2000)
    cut = tmp_path / "cut.gguf"
    for length in range(len(data) + 1):
        cut.write_bytes(data[:length])
        with pytest.raises(ModelFormatError):
            read_gguf_metadata(cut)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "m.gguf"
    write_gguf(path, metadata=spm_vocabulary())
    start = min(tensor.start for tensor in read_gguf_metadata(path).tensors)
    return path, path.read_bytes(), start


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_flipped_bytes_are_refused_or_read(small_file, data):
    path, original, header_bytes = small_file
    damaged = bytearray(original)
    flips = data.draw(
        st.lists(st.tuples(st.integers(0, header_bytes - 1), st.integers(0, 255)), max_size=6)
    )
    for place, value in flips:
        damaged[place] = value
    victim = path.with_name("flipped.gguf")
    victim.write_bytes(damaged)
    try:
        checkpoint = read_gguf(victim)
    except ModelFormatError:
        return
    for source in checkpoint.tensors.values():
        assert source.load().shape == source.shape


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=300), counts=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_random_headers_are_refused_or_read(small_file, body, counts):
    victim = small_file[0].with_name("random.gguf")
    victim.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + body)
    with contextlib.suppress(ModelFormatError):
        read_gguf_metadata(victim)
