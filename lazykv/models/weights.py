"""Weights as the graph wants them: merged projections, input axis first, one storage each.

``x @ W`` with W ``[in, out]`` is the fastest matrix-vector product that NumPy has, and one merged
product costs less than the three or two it replaces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lazykv.device import DeviceLocation
from lazykv.models.config import LlamaConfig
from lazykv.storage import Storage

if TYPE_CHECKING:
    from lazykv.models.checkpoint import Checkpoint

Progress = Callable[[int, int], None]
"""Called with (tensors loaded, tensors in all)."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. Shapes: norms ``[hidden]``, `qkv` ``[hidden, (Hq + 2 Hkv) * D]``, `output``
    ``[Hq * D, hidden]``, `gate_up` ``[hidden, 2 * inner]``, `down` ``[inner, hidden]``."""

    attn_norm: Storage
    qkv: Storage
    output: Storage
    ffn_norm: Storage
    gate_up: Storage
    down: Storage


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All weights. `head` is ``[hidden, vocab]``; `embedding` is ``[vocab, hidden]``, or None where
    the head is tied: then the embedding is the transposed view of the same storage."""

    embedding: Storage | None
    head: Storage
    norm: Storage
    layers: tuple[LayerWeights, ...]

    @property
    def nbytes(self) -> int:
        total = self.head.nbytes + self.norm.nbytes
        total += 0 if self.embedding is None else self.embedding.nbytes
        for layer in self.layers:
            total += sum(getattr(layer, name).nbytes for name in LayerWeights.__slots__)
        return total


def load_weights(checkpoint: "Checkpoint", progress: Progress | None = None) -> LlamaWeights:
    """Read, dequantize to f32 and merge, one block at a time."""
    config, tensors = checkpoint.config, checkpoint.tensors
    total, done = len(tensors), 0

    def load(name: str) -> NDArray[np.float32]:
        nonlocal done
        array = tensors[name].load()
        done += 1
        if progress is not None:
            progress(done, total)
        return array

    def merged(*names: str) -> Storage:
        return frozen(np.concatenate([load(n).T for n in names], axis=1))

    embedding = None if config.tied_head else frozen(load("token_embd.weight"))
    head = merged("token_embd.weight" if config.tied_head else "output.weight")
    layers = []
    for i in range(config.n_layers):
        block = [f"blk.{i}.{part}.weight" for part in _PARTS]
        attn_norm, q, k, v, output, ffn_norm, gate, up, down = block
        layers.append(
            LayerWeights(
                frozen(load(attn_norm)), merged(q, k, v), merged(output),
                frozen(load(ffn_norm)), merged(gate, up), merged(down),
            )
        )  # fmt: skip
    return LlamaWeights(embedding, head, frozen(load("output_norm.weight")), tuple(layers))


_PARTS = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output",
    "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip


def frozen(array: NDArray[np.float32]) -> Storage:
    """A storage over an array that nobody writes any more."""
    array = np.ascontiguousarray(array)
    array.flags.writeable = False
    return Storage.wrap(array)


def place_weights(weights: LlamaWeights, places: Sequence[DeviceLocation]) -> LlamaWeights:
    """The weights with each layer's where `places` says, the embedding with the first layer and the
    head with the last. Storages that are already there are shared; a tied head that would have to
    be in two places becomes two storages."""

    def at(storage: Storage, place: DeviceLocation) -> Storage:
        if storage.location == place:
            return storage
        copy = Storage.from_array(storage.to_numpy(), place)
        copy.frozen = True
        return copy

    embedding, first, last = weights.embedding, places[0], places[-1]
    if embedding is None and first != last:
        embedding = frozen(weights.head.to_numpy().T)
    layers = tuple(
        LayerWeights(*(at(getattr(layer, name), place) for name in LayerWeights.__slots__))
        for layer, place in zip(weights.layers, places, strict=True)
    )
    placed = None if embedding is None else at(embedding, first)
    return LlamaWeights(placed, at(weights.head, last), at(weights.norm, last), layers)


def made_weights(
    config: LlamaConfig, make: Callable[[tuple[int, ...]], NDArray[np.float32]]
) -> LlamaWeights:
    """Weights of a configuration's shapes without a file; `make` gets each shape in turn."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.n_heads * dim, config.n_kv_heads * dim
    shapes = ((hidden,), (hidden, queries + 2 * keys), (queries, hidden), (hidden,),
              (hidden, 2 * inner), (inner, hidden))  # fmt: skip
    layers = tuple(
        LayerWeights(*(frozen(make(shape)) for shape in shapes)) for _ in range(config.n_layers)
    )
    embedding = None if config.tied_head else frozen(make((config.vocab_size, hidden)))
    head, norm = frozen(make((hidden, config.vocab_size))), frozen(make((hidden,)))
    return LlamaWeights(embedding, head, norm, layers)


def random_weights(config: LlamaConfig, seed: int, scale: float = 0.05) -> LlamaWeights:
    """Small random matrices and unit gains."""
    rng = np.random.default_rng(seed)

    def make(shape: tuple[int, ...]) -> NDArray[np.float32]:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    return made_weights(config, make)


def untouched_weights(config: LlamaConfig) -> LlamaWeights:
    """Zeroed memory that costs no pages until it is used: for graphs that are only looked at."""
    return made_weights(config, lambda shape: np.zeros(shape, np.float32))
