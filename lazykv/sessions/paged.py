"""PagedDecodeSession: a decode step over the sequences of a paged pool, planned once.

What a token changes is bound data: where its rows go, the block tables and the lengths. So growing
into new blocks, forking, evicting and restoring keep the plan, and so does serving other sequences.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lazykv.compiler.bindings import check_input
from lazykv.compiler.manifest import Manifest
from lazykv.compiler.plan import Plan
from lazykv.device import HostArray, device
from lazykv.dtypes import i64, u32
from lazykv.errors import BindingError, GraphError, PoolError, RangeError, ShapeError
from lazykv.graph import Tensor
from lazykv.ids import KvAllocId, SessionHandle
from lazykv.interchange import host_array
from lazykv.kv.pool import NO_BLOCK, DeviceKvPool
from lazykv.owner import Owner
from lazykv.pages.steps import PoolStep
from lazykv.sessions.captured import CapturedDecodeSession
from lazykv.sessions.context import InferenceContext
from lazykv.sessions.decode import DecodeSession, KvNodes
from lazykv.sessions.rebind import RebindRefusal
from lazykv.sessions.validity import PlanValidity
from lazykv.spec import Spec

PAGING = ("rows", "count", "block_table", "context_lens")
"""Bound inputs that the session fills by itself."""

StepData: TypeAlias = Mapping[str, Any] | Callable[[NDArray[np.int64]], Mapping[str, Any]]
"""Data of a step by name, or a function that makes it from the positions of the first new tokens,
i64 ``[n]``."""


class PagedDecodeSession:
    """A plan over a pool for up to `batch` sequences, each by `seq` tokens per step.

    Besides the caller's own inputs the graph takes, bound per step: ``rows`` i64 ``[batch * seq]``
    (row ``block * block_size + slot`` of every new token in the flattened pool), ``count`` i64 (how
    many of them are real), ``block_table`` u32 ``[batch, max_blocks]`` and ``context_lens`` u32
    ``[batch]`` (0 for sequences that only fill up the batch). A step of fewer sequences than
    `batch` is filled up with such ones, at the end. The graph must write the pool at these rows
    only.

    One thread owns it: a second concurrent call raises `SessionBusy` and changes nothing.
    """

    def __init__(
        self, held: DecodeSession, pool: DeviceKvPool, bound: Mapping[str, Tensor],
        model_key: tuple[object, ...],
    ) -> None:  # fmt: skip
        self._held = held
        self._model_key = model_key
        self.pool = pool
        self.batch, self.max_blocks = bound["block_table"].shape
        self.seq = bound["rows"].shape[0] // self.batch
        self._own = {name: t for name, t in bound.items() if name not in PAGING}
        # Not nested: a data function must not re-bind the plan that its step is about to run.
        self._running = Owner(nests=False)
        # A step writes only rows that no session counts before it has ended.
        held.plan.tears = False

    @classmethod
    def build(
        cls, ctx: InferenceContext, target: Tensor, *, pool: DeviceKvPool, kv_nodes: KvNodes,
        bound: Mapping[str, Tensor], model_key: tuple[object, ...] = (),
        keep: Sequence[Tensor] = (),
    ) -> "PagedDecodeSession":  # fmt: skip
        """Plan `target` for a pool.

        `kv_nodes` are the placeholders of K and V per layer, `bound` those whose data comes with
        every step: the four of the pool and the caller's own, whose first axis counts sequences (or
        tokens, sequence by sequence). So does the first axis of the target. `keep` are tensors that
        `read` gives after every step.
        """
        _check_build(target, pool, bound)
        seq = bound["rows"].shape[0] // bound["block_table"].shape[0]
        backend = device(pool.device_location()).backend
        kind = CapturedDecodeSession if backend.capabilities.capture else DecodeSession
        held = kind.build(
            ctx, target, kv=pool, kv_nodes=kv_nodes, bound=bound, seq=seq, model_key=model_key,
            keep=keep,
        )  # fmt: skip
        return cls(held, pool, bound, model_key)

    def step(self, sessions: Sequence[SessionHandle], data: StepData) -> HostArray:
        """Append `seq` tokens to each session and run the plan; a fresh array whose first axis
        counts the sessions given.

        A mapping is checked first; then the pool makes room (`OutOfBlocks`, `SessionNotResident`,
        `SessionBusy` change nothing). If anything fails later, what a data function gives included,
        every session is as long as before.
        """
        if not isinstance(sessions, Sequence) or isinstance(sessions, str | bytes):
            got = type(sessions).__name__
            raise PoolError(f"step: got sessions {got}, need a list of handles that `open` gave")
        n = len(sessions)
        if not 0 < n <= self.batch:
            raise ShapeError(f"step: got {n} sessions, need 1..{self.batch}")
        with self._owned("step"):
            given = data if callable(data) else self._filled(data, n)
            self._check_room(sessions)
            if self._model_key:
                self.pool.note_model(self._model_key)
            owner = object()
            try:
                step = self.pool.begin_step(sessions, self.seq, owner=owner)
                paging = self._paging(step)
                if callable(given):
                    given = self._filled(given(np.array(step.starts, np.int64)), n)
                out = self._held.step({**given, **paging})
                self.pool.end_step(step)
            except BaseException:
                self.pool.cancel_steps_of(owner)
                raise
        return out[: n * (out.shape[0] // self.batch)]

    def read(self, tensor: Tensor) -> HostArray:
        """What a tensor held in the last step, of all `batch` sequences: those that only filled up
        the batch are there too. See `DecodeSession.read`."""
        return self._held.read(tensor)

    def _owned(self, verb: str) -> AbstractContextManager[None]:
        return self._running.hold(self, f"a {verb} while a step runs", "it to end")

    def _check_room(self, sessions: Sequence[SessionHandle]) -> None:
        for session in sessions:
            tokens = self.pool.filled_tokens(session) + self.seq
            if self.pool.geometry.blocks_for(tokens) > self.max_blocks:
                raise RangeError(
                    f"step: got {tokens} tokens of {session!r}, need them in {self.max_blocks} "
                    f"blocks of {self.pool.geometry.block_size}"
                )

    def _paging(self, step: PoolStep) -> dict[str, HostArray]:
        """Where the new rows go and what is live, filled up to the batch."""
        n, size = len(step.sessions), self.pool.geometry.block_size
        table, lens = self.pool.materialize_block_table(step.sessions, self.max_blocks)
        places = np.array(step.starts, np.int64)[:, None] + np.arange(step.tokens)
        blocks = np.take_along_axis(table, places // size, 1).astype(np.int64)
        if n < self.batch:
            more = self.batch - n
            table = np.pad(table, ((0, more), (0, 0)), constant_values=NO_BLOCK)
            lens = np.pad(lens, (0, more))
        rows = np.zeros(self.batch * self.seq, np.int64)
        rows[: n * self.seq] = (blocks * size + places % size).reshape(-1)
        count = np.array(n * self.seq, np.int64)
        return {"rows": rows, "count": count, "block_table": table, "context_lens": lens}

    def _filled(self, data: Mapping[str, Any], n: int) -> dict[str, HostArray]:
        """The caller's inputs with zeros for the sequences that fill up the batch."""
        if not isinstance(data, Mapping):
            raise BindingError(f"step: got data {type(data).__name__}, need a mapping of names")
        filled: dict[str, HostArray] = {}
        for name, t in self._own.items():
            if name not in data:
                raise BindingError(f"bound {name!r}: got nothing, need it every step")
            leading = t.shape[0]
            array, rows = host_array(data[name]), leading // self.batch * n
            if array.ndim == 0 or len(array) != rows:
                raise ShapeError(
                    f"bound {name!r}: got shape {list(array.shape)}, need {rows} on the first axis "
                    f"for {n} sequences"
                )
            check_input(name, Spec((rows, *t.shape[1:]), t.dtype), array)
            filled[name] = array
            if rows < leading:
                filled[name] = np.zeros((leading, *array.shape[1:]), array.dtype)
                filled[name][:rows] = array
        return filled

    # Reuse

    @property
    def plan(self) -> Plan:
        return self._held.plan

    @property
    def alloc_id(self) -> KvAllocId:
        """The pool whose storages are baked into the plan."""
        return self._held.alloc_id

    @property
    def node_count(self) -> int:
        return self._held.node_count

    @property
    def realize_count(self) -> int:
        return self._held.realize_count

    @property
    def rebind_count(self) -> int:
        return self._held.rebind_count

    @property
    def kv_nodes(self) -> tuple[tuple[Tensor | None, ...] | None, ...]:
        return self._held.kv_nodes

    @property
    def history(self) -> deque[tuple[object, ...]]:
        return self._held.history

    @property
    def manifest(self) -> Manifest:
        manifest: Manifest = self._held.manifest
        return manifest

    def differences(
        self, pool: DeviceKvPool, *, seq: SupportsIndex = 1, model_key: tuple[object, ...]
    ) -> dict[str, tuple[object, object]]:
        """Every baked fact that differs from what a pool and model would bake now, as (baked,
        now)."""
        return self._held.differences(pool, seq=seq, model_key=model_key)

    def validity_for(
        self, pool: DeviceKvPool, *, seq: SupportsIndex = 1, model_key: tuple[object, ...]
    ) -> PlanValidity:
        """Whether this plan may run for a pool; see `DecodeSession.validity_for`."""
        return self._held.validity_for(pool, seq=seq, model_key=model_key)

    def is_valid_for(
        self, pool: DeviceKvPool, *, seq: SupportsIndex = 1, model_key: tuple[object, ...]
    ) -> bool:
        return self._held.is_valid_for(pool, seq=seq, model_key=model_key)

    def rebind_kv(self, pool: DeviceKvPool) -> RebindRefusal | None:
        """Weld the plan to another pool of the same geometry; None, or the reason why not."""
        if not isinstance(pool, DeviceKvPool):
            raise PoolError(f"rebind_kv: got {type(pool).__name__}, need a DeviceKvPool")
        with self._owned("rebind"):
            refusal = self._held.rebind_kv(pool)
            if refusal is None:
                self.pool = pool
        return refusal

    def retire(self) -> None:
        """Drop what was captured of this session: it is about to be let go."""
        self._held.retire()

    def __repr__(self) -> str:
        return (
            f"PagedDecodeSession(plan {self.plan.id}, batch {self.batch}, seq {self.seq}, "
            f"{self.realize_count} steps)"
        )


def _check_build(target: object, pool: object, bound: object) -> None:
    """The kinds and shapes of what a paged step needs."""
    who = "PagedDecodeSession.build"
    if not isinstance(pool, DeviceKvPool):
        raise PoolError(f"{who}: got {type(pool).__name__}, need a DeviceKvPool")
    if not isinstance(bound, Mapping):
        raise BindingError(f"{who}: got bound {type(bound).__name__}, need a mapping of names")
    missing = [name for name in PAGING if name not in bound]
    if missing:
        raise BindingError(f"{who}: got no {missing[0]!r} in bound, need {', '.join(PAGING)}")
    for name, t in {**bound, "target": target}.items():
        if not isinstance(t, Tensor):
            raise GraphError(f"{who}: got {type(t).__name__} for {name!r}, need a Tensor")
    rows, count, table, lens = (bound[name] for name in PAGING)
    batch = table.shape[0] if len(table.shape) == 2 else 0
    fits = batch > 0 and len(rows.shape) == 1 and rows.shape[0] % batch == 0 and rows.shape[0] > 0
    fits = fits and count.shape == () and lens.shape == (batch,)
    kinds = (rows.dtype, count.dtype, table.dtype, lens.dtype) == (i64, i64, u32, u32)
    if not fits or not kinds:
        got = ", ".join(f"{name} {bound[name].spec}" for name in PAGING)
        raise ShapeError(
            f"{who}: got {got}, need rows i64[batch*seq], count i64[], block_table u32[batch,M] "
            "and context_lens u32[batch]"
        )
    for name, t in {**bound, "target": target}.items():
        if name not in PAGING and (not t.shape or t.shape[0] % batch):
            raise ShapeError(
                f"{who}: got {name} {t.spec}, need a first axis that counts {batch} sequences"
            )
