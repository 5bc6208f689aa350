"""Small, valid model files for tests, and raw GGUF headers that need not be valid."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS = 2, 64, 96, 4, 2
WORDS = ["<unk>", "<s>", "</s>", "a", "b", "c", " ", "ab", "abc"]

LLAMA = {
    "llama.block_count": LAYERS,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def shapes(*, vocab: int = len(WORDS), head_dim: int = HIDDEN // HEADS) -> dict[str, tuple]:
    block = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HEADS * head_dim, HIDDEN),
        "attn_k": (KV_HEADS * head_dim, HIDDEN),
        "attn_v": (KV_HEADS * head_dim, HIDDEN),
        "attn_output": (HIDDEN, HEADS * head_dim),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    named = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        named |= {f"blk.{layer}.{part}.weight": shape for part, shape in block.items()}
    return named


def weights(seed: int = 0, **options: Any) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in shapes(**options).items()
    }


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
    *,
    architecture: str = "llama",
    type_name: str = "F32",
    alignment: int | None = None,
) -> Path:
    """A GGUF file. `metadata` adds to or (value None) takes from the tiny model's own; lists become
    arrays. Matrices whose rows allow it are stored as `type_name`."""
    writer = GGUFWriter(path, architecture)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in (LLAMA | (metadata or {})).items():
        _add(writer, key, value)
    for name, array in (weights() if tensors is None else tensors).items():
        kind = GGMLQuantizationType[type_name if array.ndim == 2 else "F32"]
        if kind is GGMLQuantizationType.F32:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def spm_vocabulary(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary over WORDS, with 1 as its begin token."""
    words = [word.replace(" ", "\u2581") for word in WORDS]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": [float(-place) for place in range(len(words))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [1] * (len(words) - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
        **changes,
    }


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def entry(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name) + shape + struct.pack("<IQ", kind, offset)


def raw_gguf(
    pairs: list[bytes] = (), entries: list[bytes] = (), data: bytes = b"", *,
    version: int = 3, alignment: int = 32, n_pairs: int | None = None, n_tensors: int | None = None,
) -> bytes:  # fmt: skip
    counts = (
        len(entries) if n_tensors is None else n_tensors,
        len(pairs) if n_pairs is None else n_pairs,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join([*pairs, *entries])
    return head + b"\0" * (-len(head) % alignment) + data
