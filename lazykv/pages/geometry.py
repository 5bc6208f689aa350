"""The shape of a paged pool, and the addresses that follow from it."""

from dataclasses import dataclass, fields
from typing import SupportsIndex

from lazykv.errors import BadBlockIndex, RangeError, ShapeError
from lazykv.spec import MAX_BYTES, whole


@dataclass(frozen=True)
class KvGeometry:
    """A pool of `num_blocks` blocks of `block_size` tokens, each block the same in every layer.

    Per layer and slot (K, V) the pool is one buffer ``[num_blocks, block_size, n_kv_heads,
    head_dim]`` of elements of `elem_size` bytes. Sizes are Python ints, so addresses never wrap.
    """

    n_layers: int
    num_blocks: int
    block_size: int
    n_kv_heads: int
    head_dim: int
    elem_size: int

    def __post_init__(self) -> None:
        for f in fields(self):
            value = whole("KvGeometry", f.name, getattr(self, f.name))
            if value < 1:
                raise RangeError(f"KvGeometry: got {f.name} {value}, need {f.name} >= 1")
            object.__setattr__(self, f.name, value)
        if self.total_bytes > MAX_BYTES:
            raise ShapeError(
                f"KvGeometry: got {self.total_bytes} bytes in all, need at most {MAX_BYTES}"
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of one layer's K or V: position-major blocks."""
        return (self.num_blocks, self.block_size, self.n_kv_heads, self.head_dim)

    @property
    def flat_shape(self) -> tuple[int, int, int]:
        """The same buffer with a row per token slot."""
        return (self.num_blocks * self.block_size, self.n_kv_heads, self.head_dim)

    @property
    def slot_block_bytes(self) -> int:
        """Bytes of one block in one layer's K or V: the stride between blocks."""
        return self.block_size * self.n_kv_heads * self.head_dim * self.elem_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return self.n_layers * 2 * self.slot_block_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def block_offset(self, block: int) -> int:
        """Byte offset of a block in one layer's K or V."""
        return self.check_block("block_offset", block) * self.slot_block_bytes

    def check_block(self, who: str, block: SupportsIndex) -> int:
        """A physical block number as a Python int."""
        b = whole(who, "block", block)
        if not 0 <= b < self.num_blocks:
            raise BadBlockIndex(f"{who}: got block {b}, need 0 <= block < {self.num_blocks}")
        return b

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)
