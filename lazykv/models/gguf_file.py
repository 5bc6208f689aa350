"""Llama-type models in GGUF files: header to configuration, tokenizer and lazily loaded weights.

Rows of Q and K are kept as the file stores them, in the order of interleaved rotary pairs, and
the configuration says so (`rope_interleaved`).
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from lazykv.errors import ModelFormatError
from lazykv.models.checkpoint import Checkpoint, TensorSource, check_tensors
from lazykv.models.config import FrequencyDivisors, LinearScaling, LlamaConfig, RopeScaling
from lazykv.models.gguf_fields import Fields
from lazykv.models.gguf_header import GgufHeader, GgufTensor, open_regular, read_header
from lazykv.models.gguf_vocabulary import tokenizer_from_fields

TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K")
"""The storage types whose weights can be loaded."""

# Keys under `llama.` that change the arithmetic, with the value that leaves it alone.
_NEUTRAL: dict[str, float | bool] = {
    "expert_count": 0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.causal": True,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "use_parallel_residual": False,
    "attention.scale": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "embedding_scale": 1.0,
}
_ROPE_DIVISORS = "rope_freqs.weight"


def read_gguf(path: str | Path) -> Checkpoint:
    """Read and check a GGUF file of the `llama` architecture; weights stay on disk.

    Raises ModelFormatError if the file is missing, malformed, or not such a model.
    """
    file_path = Path(path)
    with open_regular(file_path) as file:
        header = read_header(file)
        stamp = _stamp(os.fstat(file.fileno()))
    sources = {t.name: _source(file_path, t, stamp) for t in header.tensors}
    if not sources:
        raise ModelFormatError(
            f"GGUF file {file_path.name}: got no tensors, need a model's weights"
        )
    fields = Fields(header.metadata)
    divisors = sources.pop(_ROPE_DIVISORS, None)
    tokenizer = tokenizer_from_fields(fields)
    config = _config(fields, header, divisors)
    if tokenizer is not None and tokenizer.vocab_size != config.vocab_size:
        raise ModelFormatError(
            f"GGUF file {file_path.name}: got {tokenizer.vocab_size} tokens, "
            f"need {config.vocab_size}, one for each row of token_embd.weight"
        )
    template = "tokenizer.chat_template"
    return Checkpoint(
        config=config,
        tensors=check_tensors(config, sources),
        tokenizer=tokenizer,
        chat_template=fields.text(template) if fields.has(template) else None,
        name=fields.text("general.name", file_path.stem),
        file_path=file_path,
    )


def _config(fields: Fields, header: GgufHeader, divisors: TensorSource | None) -> LlamaConfig:
    architecture = fields.text("general.architecture")
    if architecture != "llama":
        raise ModelFormatError(f"GGUF file: got architecture {architecture!r}, need 'llama'")
    if fields.integer("split.count", 1) > 1:
        raise ModelFormatError("GGUF file: got one part of a split model, need a whole file")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    n_layers = fields.integer("llama.block_count")
    hidden = fields.integer("llama.embedding_length")
    n_heads = fields.per_layer_integer("llama.attention.head_count", n_layers)
    context = fields.integer("llama.context_length")
    head_dim = _head_dim(fields, hidden, n_heads)
    _refuse_variants(fields)
    return LlamaConfig(
        architecture=architecture,
        vocab_size=_vocab_size(fields, shapes.get("token_embd.weight", ())),
        hidden_size=hidden,
        intermediate_size=fields.per_layer_integer("llama.feed_forward_length", n_layers),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=fields.per_layer_integer("llama.attention.head_count_kv", n_layers, n_heads),
        head_dim=head_dim,
        rms_eps=fields.number("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("llama.rope.freq_base", 10000.0),
        rope_scaling=_scaling(fields, divisors),
        rope_interleaved=True,
        context_length=context,
        tied_head="output.weight" not in shapes,
        sliding_window=_sliding_window(fields, n_layers, context),
    )


def _vocab_size(fields: Fields, embedding_shape: tuple[int, ...]) -> int:
    rows = embedding_shape[0] if embedding_shape else fields.integer("llama.vocab_size")
    stated = fields.integer("llama.vocab_size", rows)
    if stated != rows:
        raise ModelFormatError(
            f"GGUF file: got llama.vocab_size {stated}, need {rows}, the rows of token_embd.weight"
        )
    return rows


def _head_dim(fields: Fields, hidden: int, n_heads: int) -> int:
    if fields.has("llama.attention.key_length"):
        head_dim = fields.integer("llama.attention.key_length")
    elif n_heads > 0 and hidden % n_heads == 0:
        head_dim = hidden // n_heads
    else:
        raise ModelFormatError(
            f"GGUF file: got embedding_length {hidden} and head_count {n_heads} "
            "without llama.attention.key_length, need a whole number of values per head"
        )
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise ModelFormatError(
                f"GGUF file: got {key} {fields.integer(key)}, need {head_dim} like the key length"
            )
    return head_dim


def _refuse_variants(fields: Fields) -> None:
    for key, neutral in _NEUTRAL.items():
        key = f"llama.{key}"
        if isinstance(neutral, bool):
            value: float | bool = fields.flag(key, neutral)
        else:
            value = fields.number(key, neutral)
        if value != neutral:
            raise ModelFormatError(f"GGUF file: got {key} = {value}, need {neutral} or no such key")


def _sliding_window(fields: Fields, n_layers: int, context: int) -> int | None:
    """The window of every layer; None where it is no narrower than the context."""
    key = "llama.attention.sliding_window"
    window = fields.per_layer_integer(key, n_layers, 0)
    if not 0 < window < context:
        return None
    if fields.has(f"{key}_pattern"):
        raise ModelFormatError(
            f"GGUF file: got {key}_pattern, need no such key: one window of {window} for all layers"
        )
    return window


def _scaling(fields: Fields, divisors: TensorSource | None) -> RopeScaling | None:
    kind = fields.text("llama.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelFormatError(
            f"GGUF file: got llama.rope.scaling.type {kind!r}, need none or linear"
        )
    if divisors is None:
        if kind == "none":
            return None
        return LinearScaling(fields.number("llama.rope.scaling.factor"))
    if kind == "linear" or len(divisors.shape) != 1:
        raise ModelFormatError(
            f"GGUF file: got {_ROPE_DIVISORS} {list(divisors.shape)} with rope scaling {kind!r}, "
            "need one row of divisors and no other scaling"
        )
    return FrequencyDivisors(tuple(divisors.load().astype(np.float64).tolist()))


def _source(path: Path, tensor: GgufTensor, stamp: tuple[int, ...]) -> TensorSource:
    if tensor.type_name not in TENSOR_TYPES:
        raise ModelFormatError(
            f"GGUF file: got tensor {tensor.name!r} of type {tensor.type_name}, "
            f"need one of {', '.join(TENSOR_TYPES)}"
        )
    return TensorSource(tensor.name, tensor.shape, tensor.type_name, _reader(path, tensor, stamp))


def _reader(
    path: Path, tensor: GgufTensor, stamp: tuple[int, ...]
) -> Callable[[], NDArray[np.float32]]:
    kind = GGMLQuantizationType[tensor.type_name]

    def read() -> NDArray[np.float32]:
        with open_regular(path) as file:
            # Offsets belong to the file whose header was checked, not to one put in its place.
            if _stamp(os.fstat(file.fileno())) != stamp:
                raise ModelFormatError(f"GGUF file {path}: got a changed file, need the one opened")
            data = np.fromfile(file, np.uint8, tensor.n_bytes, offset=tensor.start)
        if data.size != tensor.n_bytes:
            raise ModelFormatError(f"GGUF file {path}: got an early end in {tensor.name!r}")
        rows = data.reshape(*tensor.shape[:-1], -1)
        return quants.dequantize(rows, kind)

    return read


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
