"""A checked model on disk: its configuration, its tokenizer, and weights that load one at a time.

Tensors go by their GGUF names whatever the file format:
`token_embd.weight`, `output_norm.weight`, `output.weight` (absent when the head is tied) and
`blk.{i}.` + `attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down` +
`.weight`. Matrices are `[out, in]`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lazykv.errors import ModelFormatError
from lazykv.models.config import LlamaConfig
from lazykv.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One weight still on disk. `shape` is in NumPy order, `type_name` is how it is stored."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    read: Callable[[], NDArray[np.float32]]

    def load(self) -> NDArray[np.float32]:
        """Read and dequantize to a fresh C-contiguous float32 array of `shape`.

        Raises ModelFormatError if the file has changed or cannot be read any more.
        """
        return np.require(self.read(), np.float32, ["C", "W"]).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything a model file says, validated; nothing but the header has been read.

    `tokenizer` is None for a file without a vocabulary.
    """

    config: LlamaConfig
    tensors: Mapping[str, TensorSource]
    tokenizer: Tokenizer | None
    chat_template: str | None
    name: str
    file_path: Path

    @property
    def bos_id(self) -> int | None:
        return self.tokenizer.bos_id if self.tokenizer else None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.tokenizer.eos_ids if self.tokenizer else ()

    @property
    def add_bos(self) -> bool:
        return self.tokenizer.add_bos if self.tokenizer else False


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and `[out, in]` shape of every tensor a Llama-type model of this configuration needs."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, hidden),
        "output_norm.weight": (hidden,),
    }
    if not config.tied_head:
        shapes["output.weight"] = (config.vocab_size, hidden)
    block = {
        "attn_norm": (hidden,),
        "attn_q": (query, hidden),
        "attn_k": (key, hidden),
        "attn_v": (key, hidden),
        "attn_output": (hidden, query),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    for layer in range(config.n_layers):
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in block.items()}
    return shapes


def check_tensors(
    config: LlamaConfig, tensors: Mapping[str, TensorSource]
) -> dict[str, TensorSource]:
    """The tensors the configuration needs, in model order.

    Raises ModelFormatError if one is missing, has another shape, or is not part of this
    architecture (a bias, an expert, an extra norm would change the arithmetic).
    """
    if not tensors:
        raise ModelFormatError("model file: got no tensors, need a model's weights")
    # Before the table of expected shapes is built: its size follows n_layers, a number from the
    # file, and every layer needs several tensors, which the file has paid for with bytes.
    if config.n_layers > len(tensors):
        raise ModelFormatError(
            f"model file: got {len(tensors)} tensors, need those of {config.n_layers} layers"
        )
    shapes = expected_shapes(config)
    for name in tensors:
        if name not in shapes:
            raise ModelFormatError(
                f"model file: got tensor {name!r}, need only those of the "
                f"{config.architecture} architecture with {config.n_layers} layers and no biases"
            )
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelFormatError(f"model file: got no tensor {name!r}, need shape {list(shape)}")
        if tensors[name].shape != shape:
            raise ModelFormatError(
                f"model file: got tensor {name!r} of shape {list(tensors[name].shape)}, "
                f"need {list(shape)}"
            )
    return {name: tensors[name] for name in shapes}
