"""A decode step over a cache, held as a session, beside the rows that the cache should hold.

Per layer the new rows of K and V are written, then the layer is attended to; the outputs of all
layers are added. Rows and queries are random; the reference keeps them in lists.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lazykv.device import DeviceLocation
from lazykv.functions import attention, ring_attention
from lazykv.graph import Graph, Tensor
from lazykv.kv.cache import KvCache
from lazykv.kv.sliding import SlidingKvCache
from lazykv.runtime.realize import realize
from lazykv.sessions.context import InferenceContext
from lazykv.sessions.decode import DecodeSession
from lazykv.symbols import Sym
from lazykv.testing import reference
from lazykv.testing.compare import check_bits, check_close
from lazykv.testing.golden import Array, random_of

Cache = KvCache | SlidingKvCache
HEADS = 4
"""Query heads of every step, over the cache's own heads."""


class Step:
    """The graph of a step by `seq` tokens. Positions are symbols, or tensors that kernels read."""

    def __init__(
        self, cache: Cache, *, seq: int = 1, by: str = "tensor",
        last: Callable[[Tensor], Tensor] = lambda t: t,
    ) -> None:  # fmt: skip
        """`last` is done to the sum of all layers."""
        g, self.seq, self.by = Graph(), seq, by
        self.pos = Sym("pos", 0, 1 << 20)
        heads, dim, layers = cache.n_kv_heads, cache.head_dim, cache.n_layers()
        assert cache.dtype is not None, "a cache with a capacity has a dtype"
        self.dtype = cache.dtype
        rows = (layers, heads, seq, dim)
        self.bound = {
            "q": g.placeholder((1, HEADS, seq, dim), "f32", "q"),
            "k": g.placeholder(rows, cache.dtype, "k"),
            "v": g.placeholder(rows, cache.dtype, "v"),
        }
        if by == "tensor":
            self.bound["position"] = g.placeholder((), "i64", "position")
            self.bound["length"] = g.placeholder((), "i64", "length")
        self.kv_nodes: list[tuple[Tensor, Tensor]] = []
        outputs = [self._layer(g, cache, layer) for layer in range(layers)]
        self.target = outputs[0]
        for out in outputs[1:]:
            self.target = self.target + out
        self.target = last(self.target)

    def _layer(self, g: Graph, cache: Cache, layer: int) -> Tensor:
        storage = cache.slot_storage(layer, 0)
        assert storage is not None, "every layer has storage"
        k, v = (g.placeholder(storage.shape, storage.dtype, f"{n}{layer}") for n in "kv")
        self.kv_nodes.append((k, v))
        written = [
            self._write(cache, dest, self.bound[n].slice(0, layer, 1))
            for dest, n in ((k, "k"), (v, "v"))
        ]
        length: Any = self.bound["length"] if self.by == "tensor" else self.pos + self.seq
        if isinstance(cache, SlidingKvCache):
            return ring_attention(
                self.bound["q"], *written, length=length, window=cache.window,
                sinks=cache.sink_tokens,
            )  # fmt: skip
        return attention(self.bound["q"], *written, length=length)

    def _write(self, cache: Cache, dest: Tensor, rows: Tensor) -> Tensor:
        if isinstance(cache, SlidingKvCache):
            return dest.write_slice_rotating(
                rows, 2, self.bound["position"], cache.ring_rows, cache.sink_tokens
            )
        if self.by == "tensor":
            return dest.write_slice_at(rows, 2, self.bound["position"])
        return dest.at[:, :, self.pos : self.pos + self.seq].set(rows)


class Held:
    """A session over a cache; `token` takes a step and holds it against the reference."""

    def __init__(
        self, cache: Cache, place: DeviceLocation, *, seq: int = 1, by: str = "tensor",
        kind: type[DecodeSession] = DecodeSession, name: str = "held",
        last: Callable[[Tensor], Tensor] = lambda t: t,
    ) -> None:  # fmt: skip
        self.step = Step(cache, seq=seq, by=by, last=last)
        self.place = place
        self.session = kind.build(
            InferenceContext(place), self.step.target, kv=cache, kv_nodes=self.step.kv_nodes,
            bound=self.step.bound, model_key=("conformance",),
        )  # fmt: skip
        self.cache = cache
        self.rows: list[tuple[Array, Array]] = []
        """K and V ``[layers, heads, dim]`` of every position, as float64."""
        self._rng = random_of(name)

    def use(self, cache: Cache, rows: Sequence[tuple[Array, Array]] = ()) -> None:
        """Go on with another cache, which holds these rows."""
        refusal = self.session.rebind_kv(cache)
        assert refusal is None, f"rebind_kv: got {refusal}, need the plan on the other cache"
        self.cache, self.rows = cache, list(rows)

    def rewind(self, n: int) -> None:
        self.cache.truncate_to(n)
        del self.rows[n:]

    def data(self) -> dict[str, Array]:
        """Inputs of the next step."""
        out = {
            n: self._rng.standard_normal(t.shape).astype(t.dtype.numpy)
            for n, t in self.step.bound.items()
        }
        if self.step.by == "tensor":
            start = len(self.rows)
            out["position"] = np.array(start, np.int64)
            out["length"] = np.array(start + self.step.seq, np.int64)
        return out

    def token(self, data: dict[str, Array] | None = None) -> Array:
        """Take one step, compare with the reference, and count its rows."""
        given = self.data() if data is None else data
        got = self.run(given)
        self.note(given)
        check_close(f"step at {len(self.rows) - self.step.seq}", got, self.want(given["q"]))
        return got

    def run(self, data: dict[str, Array]) -> Array:
        env = {self.step.pos: len(self.rows)} if self.step.by == "symbol" else None
        out: Array = self.session.step(data, env)
        return out

    def note(self, data: dict[str, Array]) -> None:
        """The rows of a step that has run."""
        k, v = (data[n].astype(np.float64) for n in "kv")
        self.rows += [(k[:, :, i], v[:, :, i]) for i in range(self.step.seq)]
        self.cache.cached_len = len(self.rows)

    def want(self, q: Array) -> Array:
        """The output of the newest positions, from all rows."""
        keys, values = (np.stack([row[n] for row in self.rows], 2) for n in (0, 1))
        total = np.zeros(q.shape)
        for k, v in zip(keys, values, strict=True):
            total += self._attend(q.astype(np.float64), k[None], v[None])
        return total

    def _attend(self, q: Array, k: Array, v: Array) -> Array:
        cache = self.cache
        if not isinstance(cache, SlidingKvCache):
            return reference.attention(q, k, v)
        queries, length = q.shape[2], k.shape[2]

        def seen(b: int, h: int, i: int) -> dict[int, float]:
            p = length - queries + i
            sinks = range(min(cache.sink_tokens, p + 1))
            return dict.fromkeys((*sinks, *range(max(0, p + 1 - cache.window), p + 1)), 0.0)

        return reference.attend(q, k, v, q.shape[3] ** -0.5, seen)

    def check_rows(self) -> None:
        """The live rows of the cache, bit for bit."""
        for layer in range(self.cache.n_layers()):
            for slot, got in enumerate(self.cache.live(layer)):
                want = np.stack([row[slot][layer] for row in self.rows], 1)[None]
                check_bits(f"rows of layer {layer}, slot {slot}", np.array(got),
                           want.astype(self.step.dtype.numpy))  # fmt: skip

    def replanned(self, data: dict[str, Array]) -> Array:
        """The same step by a graph and a plan made anew, on copies of the cache's storages."""
        step = Step(self.cache, seq=self.step.seq, by=self.step.by)
        bindings: dict[Tensor, Any] = {step.bound[n]: data[n] for n in step.bound}
        for layer, pair in enumerate(step.kv_nodes):
            for slot, node in enumerate(pair):
                storage = self.cache.slot_storage(layer, slot)
                assert storage is not None, "every layer has storage"
                bindings[node] = type(storage).from_array(storage.to_numpy(), self.place)
        env = {step.pos: len(self.rows)} if step.by == "symbol" else None
        out: Array = realize(step.target, bindings, env, self.place)
        return out


def bytes_of(cache: Cache) -> list[bytes]:
    """Everything that a cache's storages hold."""
    return [
        storage.to_numpy().tobytes()
        for layer in range(cache.n_layers())
        for slot in (0, 1)
        if (storage := cache.slot_storage(layer, slot)) is not None
    ]
