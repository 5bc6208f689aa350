"""GGUF models: configuration, tensors, dequantization, and refusals by name."""

import os
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from tiny_models import HEADS, HIDDEN, KV_HEADS, WORDS, spm_vocabulary, weights, write_gguf

from lazykv.errors import ModelFormatError
from lazykv.models.config import FrequencyDivisors, LinearScaling, inv_freq
from lazykv.models.gguf_file import TENSOR_TYPES, read_gguf


@pytest.fixture
def build(tmp_path):
    """Writes a tiny model with the given changes and reads it back."""
    return lambda **changes: read_gguf(write_gguf(tmp_path / "m.gguf", **changes))


def test_tiny_model(build):
    checkpoint = build(metadata={"general.name": "tiny"})
    config = checkpoint.config
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.vocab_size, config.context_length) == (len(WORDS), 128)
    assert config.rope_interleaved
    assert config.rope_theta == 10000.0
    assert checkpoint.name == "tiny"
    assert checkpoint.tokenizer is None
    assert (checkpoint.bos_id, checkpoint.eos_ids, checkpoint.add_bos) == (None, (), False)
    for name, array in weights().items():
        loaded = checkpoint.tensors[name].load()
        assert loaded.flags.c_contiguous
        assert loaded.flags.writeable
        np.testing.assert_array_equal(loaded, array)


def test_real_model(smollm2):
    config = smollm2.config
    assert (config.n_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.n_heads, config.n_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.rope_theta == 100000.0
    assert config.tied_head
    assert (smollm2.bos_id, smollm2.eos_ids, smollm2.add_bos) == (1, (2,), False)
    assert len(smollm2.tensors) == 2 + 30 * 9
    assert smollm2.tensors["blk.0.attn_k.weight"].type_name == "Q4_1"
    assert smollm2.tensors["blk.0.attn_k.weight"].load().shape == (192, 576)


def test_O4_tied_head(build):
    assert build().config.tied_head
    assert "output.weight" not in build().tensors
    untied = build(tensors=weights() | {"output.weight": weights(1)["token_embd.weight"]})
    assert not untied.config.tied_head
    assert untied.tensors["output.weight"].shape == (len(WORDS), HIDDEN)


def test_O5_rows_stay_as_stored_and_pair_up_as_the_config_says(build):
    """Interleaved pairs of GGUF rows turn like half-split pairs of the rows they were made from."""
    half_split = weights()
    stored = half_split | {
        name: _gguf_order(array, KV_HEADS if "attn_k" in name else HEADS)
        for name, array in half_split.items()
        if "attn_q" in name or "attn_k" in name
    }
    small = np.arange(8.0)[:, None]
    assert _gguf_order(small, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]

    checkpoint = build(tensors=stored)
    assert checkpoint.config.rope_interleaved
    loaded = checkpoint.tensors["blk.0.attn_q.weight"].load()
    np.testing.assert_array_equal(loaded, stored["blk.0.attn_q.weight"])

    frequencies, x = inv_freq(checkpoint.config), np.random.default_rng(2).standard_normal(HIDDEN)
    pairs = len(frequencies)
    queries = (loaded @ x).reshape(HEADS, pairs, 2)
    ours = _turn(queries[..., 0], queries[..., 1], 5 * frequencies)
    plain = (half_split["blk.0.attn_q.weight"] @ x).reshape(HEADS, 2, pairs)
    theirs = _turn(plain[:, 0], plain[:, 1], 5 * frequencies)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def _gguf_order(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Half-split rotary rows in the interleaved order that GGUF files of Llama models use."""
    return rows.reshape(n_heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _turn(first: np.ndarray, second: np.ndarray, angles: np.ndarray) -> list[np.ndarray]:
    cos, sin = np.cos(angles), np.sin(angles)
    return [first * cos - second * sin, second * cos + first * sin]


def test_O7_a_block_decoded_by_hand(build):
    block = bytes.fromhex("003800c2f0e1d2c3b4a5968778695a4b3c2d1e0f")
    rising = [-3.0 + 0.5 * i for i in range(16)]
    row = np.array(rising + rising[::-1])
    checkpoint = build(type_name="Q4_1")
    source = checkpoint.tensors["token_embd.weight"]
    with checkpoint.file_path.open("r+b") as file:
        file.seek(_start(checkpoint.file_path, source.name))
        file.write(block * (len(WORDS) * HIDDEN // 32))
    decoded = read_gguf(checkpoint.file_path).tensors["token_embd.weight"].load()
    np.testing.assert_array_equal(decoded.reshape(-1, 32), np.tile(row, (18, 1)))


def _start(path, name: str) -> int:
    from lazykv.models.gguf_header import read_gguf_metadata  # noqa: PLC0415

    return next(t.start for t in read_gguf_metadata(path).tensors if t.name == name)


@pytest.mark.parametrize(
    ("type_name", "relative"),
    [
        ("F32", 0),
        ("F16", 1e-3),
        ("BF16", 8e-3),
        ("Q8_0", 0.02),
        ("Q4_0", 0.3),
        ("Q4_1", 0.3),
        ("Q5_0", 0.15),
        ("Q5_1", 0.15),
    ],
)
def test_stored_types(build, type_name, relative):
    assert type_name in TENSOR_TYPES
    checkpoint = build(type_name=type_name)
    for name, array in weights().items():
        source = checkpoint.tensors[name]
        assert source.type_name == (type_name if array.ndim == 2 else "F32")
        error = np.abs(source.load().astype(np.float64) - array)
        bound = relative * np.abs(array).reshape(array.shape[0], -1).max(axis=1) + 1e-6
        assert (error.reshape(array.shape[0], -1).max(axis=1) <= bound).all()


def _plain_q8_0(block: bytes) -> list[float]:
    scale = float(np.frombuffer(block[:2], "<f2")[0])
    return [scale * (byte - 256 if byte > 127 else byte) for byte in block[2:]]


def _plain_q4_0(block: bytes) -> list[float]:
    scale = float(np.frombuffer(block[:2], "<f2")[0])
    low = [scale * ((byte & 15) - 8) for byte in block[2:]]
    return low + [scale * ((byte >> 4) - 8) for byte in block[2:]]


def _plain_q4_k(block: bytes) -> list[float]:
    scale, least = (float(x) for x in np.frombuffer(block[:4], "<f2"))
    packed, quarters, values = block[4:16], block[16:], []
    for group in range(8):
        if group < 4:
            s, m = packed[group] & 63, packed[group + 4] & 63
        else:
            s = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            m = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        for place in range(32):
            byte = quarters[32 * (group // 2) + place]
            nibble = byte >> 4 if group % 2 else byte & 15
            values.append(scale * s * nibble - least * m)
    return values


def _plain_q6_k(block: bytes) -> list[float]:
    low, high = block[:128], block[128:192]
    scales, scale = np.frombuffer(block[192:208], "i1"), float(np.frombuffer(block[208:], "<f2")[0])
    values = []
    for i in range(256):
        half, within = divmod(i, 128)
        lane, place = divmod(within, 32)
        byte = low[64 * half + 32 * (lane % 2) + place]
        nibble = byte >> 4 if lane >= 2 else byte & 15
        top = high[32 * half + place] >> (2 * lane) & 3
        values.append(scale * int(scales[i // 16]) * ((top << 4 | nibble) - 32))
    return values


@pytest.mark.parametrize(
    ("type_name", "block_bytes", "plain"),
    [
        ("Q8_0", 34, _plain_q8_0),
        ("Q4_0", 18, _plain_q4_0),
        ("Q4_K", 144, _plain_q4_k),
        ("Q6_K", 210, _plain_q6_k),
    ],
)
def test_dequantization_against_plain_float64(type_name, block_bytes, plain):
    random = np.random.default_rng(3)
    blocks = random.integers(0, 256, (50, block_bytes), dtype=np.uint8)
    # Bytes that hold half-precision scales: keep them finite and moderate.
    scale_bytes = {"Q4_K": [1, 3], "Q6_K": [209]}.get(type_name, [1])
    blocks[:, scale_bytes] = blocks[:, scale_bytes] % 8 + 0x30
    decoded = quants.dequantize(blocks, GGMLQuantizationType[type_name])
    expected = [plain(block.tobytes()) for block in blocks]
    np.testing.assert_allclose(decoded, expected, rtol=1e-5, atol=1e-4)


def test_unsupported_type_is_named_with_the_supported_ones(build):
    embedding = {"token_embd.weight": np.zeros((len(WORDS), 256), np.float32)}
    path = build(tensors=weights()).file_path
    write_gguf(path, embedding, type_name="BF16")
    data = path.read_bytes()
    old = np.array([30], "<u4").tobytes()  # BF16's code in the tensor table
    place = data.index(b"token_embd.weight") + 17 + 4 + 16
    assert data[place : place + 4] == old
    path.write_bytes(data[:place] + np.array([16], "<u4").tobytes() + data[place + 4 :])
    with pytest.raises(ModelFormatError, match=r"IQ2_XXS, need one of F32, F16, BF16, Q8_0, Q4_0"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("declared", "window"),
    [(None, None), (0, None), (64, 64), ([64, 64], 64), (127, 127), (128, None), (4096, None)],
)
def test_sliding_windows_narrower_than_the_context(build, declared, window):
    metadata = {"llama.attention.sliding_window": declared}
    assert build(metadata=metadata).config.sliding_window == window


def test_O8_heads_per_layer(build):
    same = build(metadata={"llama.attention.head_count_kv": [2, 2]})
    assert same.config.n_kv_heads == 2
    for counts in ([0, 2], [2, 2, 2], [2]):
        with pytest.raises(ModelFormatError, match="head_count_kv"):
            build(metadata={"llama.attention.head_count_kv": counts})


def test_O9_head_size_of_its_own(build):
    lengths = {"llama.attention.key_length": 24, "llama.attention.value_length": 24}
    checkpoint = build(tensors=weights(head_dim=24), metadata=lengths)
    assert checkpoint.config.head_dim == 24
    assert checkpoint.tensors["blk.1.attn_output.weight"].shape == (HIDDEN, HEADS * 24)
    with pytest.raises(ModelFormatError, match="value_length 16, need 24"):
        build(tensors=weights(head_dim=24), metadata=lengths | {"llama.attention.value_length": 16})


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8"),
        ({"llama.rope.scaling.type": "yarn"}, "scaling.type 'yarn'"),
        ({"llama.rope.scaling.type": "linear"}, "no llama.rope.scaling.factor"),
        ({"llama.expert_count": 8}, "expert_count = 8"),
        ({"llama.attention.causal": False}, "causal = False"),
        ({"llama.attention.sliding_window": "64"}, "sliding_window = '64'"),
        ({"llama.attention.sliding_window": [64, 0]}, r"sliding_window = \[64, 0\]"),
        (
            {"llama.attention.sliding_window": 64, "llama.attention.sliding_window_pattern": 2},
            "sliding_window_pattern, need no such key: one window of 64 for all layers",
        ),
        ({"llama.logit_scale": 0.5}, "logit_scale = 0.5"),
        ({"llama.vocab_size": 8}, "vocab_size 8, need 9"),
        ({"llama.block_count": None}, "no llama.block_count"),
        ({"llama.block_count": "2"}, "block_count = '2'"),
        ({"llama.block_count": 3}, "no tensor 'blk.2"),
        ({"llama.block_count": 10**6}, "20 tensors, need those of 1000000 layers"),
        ({"llama.block_count": 1}, "tensor 'blk.1"),
        ({"llama.attention.head_count": 0}, "head_count 0"),
        ({"llama.attention.head_count": 3}, "head_count 3"),
        ({"llama.embedding_length": 32}, "need"),
        ({"split.count": 2}, "split model"),
    ],
)
def test_refused_by_name(build, metadata, said):
    with pytest.raises(ModelFormatError, match=said):
        build(metadata=metadata)


def test_other_architectures_are_refused_by_name(build):
    with pytest.raises(ModelFormatError, match="architecture 'gemma2'"):
        build(architecture="gemma2")


def test_tensor_set_is_checked(build):
    whole = weights()
    with pytest.raises(ModelFormatError, match=r"no tensor 'blk\.1\.ffn_up\.weight'"):
        build(tensors={n: a for n, a in whole.items() if n != "blk.1.ffn_up.weight"})
    with pytest.raises(ModelFormatError, match=r"got tensor 'blk\.0\.attn_q\.bias'"):
        build(tensors=whole | {"blk.0.attn_q.bias": np.zeros(64, np.float32)})
    with pytest.raises(ModelFormatError, match=r"of shape \[64, 32\], need \[64, 64\]"):
        build(tensors=whole | {"blk.0.attn_q.weight": np.zeros((64, 32), np.float32)})


def test_vocabulary_matches_the_embedding(build):
    assert build(metadata=spm_vocabulary()).tokenizer.vocab_size == len(WORDS)
    with pytest.raises(ModelFormatError, match="9 tokens, need 12"):
        build(tensors=weights(vocab=12), metadata=spm_vocabulary())


def test_rope_scaling(build):
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert build(metadata=linear).config.rope_scaling == LinearScaling(4.0)
    divisors = np.arange(1, 9, dtype=np.float32)
    scaled = build(tensors=weights() | {"rope_freqs.weight": divisors})
    assert scaled.config.rope_scaling == FrequencyDivisors(tuple(float(i) for i in range(1, 9)))
    assert "rope_freqs.weight" not in scaled.tensors
    plain = inv_freq(replace(scaled.config, rope_scaling=None))
    np.testing.assert_array_equal(inv_freq(scaled.config), plain / divisors)
    with pytest.raises(ModelFormatError, match="4 rotary divisors"):
        build(tensors=weights() | {"rope_freqs.weight": divisors[:4]})


def test_a_file_changed_after_opening_is_not_read(build):
    checkpoint = build()
    source = checkpoint.tensors["token_embd.weight"]
    source.load()
    other = write_gguf(checkpoint.file_path.with_name("other.gguf"), weights(1))
    os.replace(other, checkpoint.file_path)
    with pytest.raises(ModelFormatError, match="changed file"):
        source.load()
    checkpoint.file_path.unlink()
    with pytest.raises(ModelFormatError, match="need a file"):
        source.load()
