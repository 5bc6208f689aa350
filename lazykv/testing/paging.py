"""A paged decode step, held as a session, beside the rows that every sequence should hold."""

import numpy as np

from lazykv.functions import paged_attention
from lazykv.graph import Graph, Tensor
from lazykv.ids import SessionHandle
from lazykv.kv.pool import DeviceKvPool
from lazykv.sessions.context import InferenceContext
from lazykv.sessions.paged import PagedDecodeSession
from lazykv.testing import reference
from lazykv.testing.compare import check_bits, check_close
from lazykv.testing.golden import Array, random_of

HEADS = 4
"""Query heads, over the pool's own heads."""

Row = tuple[Array, Array]
"""K and V ``[layers, heads, dim]`` of one position, as float64."""


class PagedHeld:
    """A session over a pool; `tokens` takes a step and holds it against the reference."""

    def __init__(
        self, pool: DeviceKvPool, *, batch: int = 3, seq: int = 1, max_blocks: int = 4
    ) -> None:
        self.pool, self.seq = pool, seq
        self._rng = random_of("paged")
        self.rows: dict[SessionHandle, list[Row]] = {}
        g, geometry = Graph(), pool.geometry
        heads, dim, n = geometry.n_kv_heads, geometry.head_dim, batch * seq
        rows = (n, pool.n_layers(), heads, dim)
        bound = self.bound = {
            "q": g.placeholder((batch, HEADS, seq, dim), "f32", "q"),
            "k": g.placeholder(rows, pool.dtype, "k"),
            "v": g.placeholder(rows, pool.dtype, "v"),
            "rows": g.placeholder((n,), "i64", "rows"),
            "count": g.placeholder((), "i64", "count"),
            "block_table": g.placeholder((batch, max_blocks), "u32", "block_table"),
            "context_lens": g.placeholder((batch,), "u32", "context_lens"),
        }
        nodes, total = [], None
        for layer in range(pool.n_layers()):
            pair = [g.placeholder(pool.pool_shape, pool.dtype, f"{s}{layer}") for s in "kv"]
            nodes.append(tuple(pair))
            written = [self._write(dest, s, layer) for dest, s in zip(pair, "kv", strict=True)]
            out = paged_attention(
                bound["q"], written[0], written[1], bound["block_table"], bound["context_lens"]
            )
            total = out if total is None else total + out
        assert total is not None, "a pool has layers"
        self.session = PagedDecodeSession.build(
            InferenceContext(pool.device_location()), total, pool=pool, kv_nodes=nodes,
            bound=bound, model_key=("conformance",),
        )  # fmt: skip

    def _write(self, dest: Tensor, slot: str, layer: int) -> Tensor:
        new = self.bound[slot].slice(1, layer, 1).squeeze(1)
        flat = dest.reshape(*self.pool.pool_shape_flat)
        written = flat.write_rows(new, self.bound["rows"], self.bound["count"])
        return written.reshape(*self.pool.pool_shape)

    def open(self) -> SessionHandle:
        handle = self.pool.open()
        self.rows[handle] = []
        return handle

    def fork(self, handle: SessionHandle) -> SessionHandle:
        made = self.pool.fork(handle)
        self.rows[made] = list(self.rows[handle])
        return made

    def tokens(self, *handles: SessionHandle) -> Array:
        """One step of some sequences, compared with the reference."""
        n, data = len(handles), {}
        for name in "qkv":
            _, *rest = self.bound[name].shape
            shape = (n, *rest) if name == "q" else (n * self.seq, *rest)
            data[name] = self._rng.standard_normal(shape).astype(self.bound[name].dtype.numpy)
        out = self.session.step(handles, data)
        k, v = (data[s].astype(np.float64) for s in "kv")
        for i, handle in enumerate(handles):
            own = range(i * self.seq, (i + 1) * self.seq)
            self.rows[handle] += [(k[r], v[r]) for r in own]
        for i, handle in enumerate(handles):
            want = self.want(handle, data["q"][i : i + 1].astype(np.float64))
            what = f"step of {n} sequences, the one of {len(self.rows[handle])} tokens"
            check_close(what, out[i : i + 1], want)
        return out

    def want(self, handle: SessionHandle, q: Array) -> Array:
        total = np.zeros(q.shape)
        for k, v in zip(*(self._of(handle, slot) for slot in (0, 1)), strict=True):
            total += reference.attention(q, k[None], v[None])
        return total

    def _of(self, handle: SessionHandle, slot: int) -> Array:
        """``[layers, heads, rows, dim]``"""
        return np.stack([row[slot] for row in self.rows[handle]], 2)

    def check_rows(self, *handles: SessionHandle) -> None:
        """The rows of sequences in their blocks, bit for bit."""
        for handle in handles:
            for slot in (0, 1):
                want = self._of(handle, slot).astype(self.pool.dtype.numpy)
                check_bits(f"rows in slot {slot}", rows_of(self.pool, handle, slot), want)


def rows_of(pool: DeviceKvPool, handle: SessionHandle, slot: int) -> Array:
    """``[layers, heads, rows, dim]`` of a sequence whose blocks are all there."""
    table = [b for b in pool.session_block_table(handle) if b is not None]
    out = []
    for layer in range(pool.n_layers()):
        blocks = [pool.read_block(layer, slot, b) for b in table]
        rows = np.concatenate(blocks)[: pool.filled_tokens(handle)]
        out.append(np.moveaxis(rows, 1, 0))
    return np.stack(out)


def fill_block(pool: DeviceKvPool, block: int, seed: str) -> dict[tuple[int, int], bytes]:
    """Random bytes in every layer and slot of a block; returns them."""
    size = pool.geometry.block_size * pool.geometry.n_kv_heads * pool.geometry.head_dim
    made = {}
    for layer in range(pool.n_layers()):
        for slot in (0, 1):
            name = (seed, str(block), str(layer), str(slot))
            made[layer, slot] = random_of(*name).bytes(size * pool.dtype.itemsize)
            pool.write_block_bytes(layer, slot, block, made[layer, slot])
    return made


def block_bytes(pool: DeviceKvPool, block: int) -> dict[tuple[int, int], bytes]:
    return {
        (layer, slot): pool.read_block_bytes(layer, slot, block)
        for layer in range(pool.n_layers())
        for slot in (0, 1)
    }
