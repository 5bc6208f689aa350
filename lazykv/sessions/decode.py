"""DecodeSession: a decode step planned once and run again for every token.

The session is welded to the storages of one cache allocation. Per token only the bound data (token,
rope tables, ...) and the symbols change; the plan, its registers and its kernels stay.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self, SupportsIndex, TypeAlias

import numpy as np

from lazykv.backend_call import typed
from lazykv.compiler.bindings import check_input
from lazykv.compiler.plan import Plan
from lazykv.device import HostArray
from lazykv.dtypes import to_raw
from lazykv.errors import BindingError, GraphError, LazyKvError, SessionBusy
from lazykv.graph import Tensor
from lazykv.ids import KvAllocId
from lazykv.interchange import host_array
from lazykv.locks import new_hold, this_thread
from lazykv.ops.sources import Placeholder
from lazykv.runtime.realize import plan as make_plan
from lazykv.sessions.context import InferenceContext, as_tensors
from lazykv.sessions.rebind import (
    Baked,
    KvRebindSource,
    RebindRefusal,
    Snapshot,
    every_slot,
    find_refusal,
)
from lazykv.sessions.validity import PlanValidity, SessionKey, check_asked
from lazykv.storage import Storage
from lazykv.symbols import EnvLike

KvNodes: TypeAlias = Sequence[tuple[Tensor | None, ...] | None]
"""Placeholders of slot 0, 1 (and further ones) per layer: None for a slot that the cache does not
have, or for a whole layer that this process does not have."""

_BUILD = "DecodeSession.build"

HISTORY = 64
"""Events a session remembers; older ones are dropped."""


class DecodeSession:
    """A plan, the cache allocation it is welded to, and the names of its bound inputs.

    `build` plans; `step` re-binds and runs; `read` gives other nodes of the last step. One thread
    owns a session: a second concurrent call raises `SessionBusy` and changes nothing.
    """

    def __init__(
        self, plan: Plan, key: SessionKey, kv_nodes: KvNodes, bound: Mapping[str, Tensor],
        alloc_id: KvAllocId, welded: Mapping[Tensor, Storage],
    ) -> None:  # fmt: skip
        self.plan = plan
        self.kv_nodes = tuple(pair if pair is None else tuple(pair) for pair in kv_nodes)
        self.realize_count = 0
        self.rebind_count = 0
        self.history: deque[tuple[object, ...]] = deque([("built", alloc_id)], maxlen=HISTORY)
        self._key = key
        self._alloc_id = alloc_id
        # Of slots that the plan does not need too: a re-bind compares them all.
        self._welded = welded
        plan.held = True
        self._feeds = [_Feed(name, plan, t) for name, t in bound.items() if t in plan.leaves]

    @classmethod
    def build(
        cls, ctx: InferenceContext, target: Tensor, *, kv: KvRebindSource, kv_nodes: KvNodes,
        bound: Mapping[str, Tensor], seq: SupportsIndex = 1, model_key: tuple[object, ...] = (),
        keep: Sequence[Tensor] = (),
    ) -> Self:  # fmt: skip
        """Plan `target` for a cache.

        `kv_nodes` are the placeholders of slot 0 and 1 per layer (``(slot_0, None)`` for a cache of
        one slot), `bound` the placeholders whose data comes with every step. Any other placeholder
        must have a storage in `ctx`. `keep` are tensors of the graph that `read` gives after every
        step, besides the result: each has memory of its own for the whole step, and is computed
        even if the target does not need it.

        Raises GraphError for nodes, a key or kept tensors that cannot be planned, BindingError for
        a cache or inputs that cannot be bound.
        """
        _check_build(ctx, target, kv, kv_nodes, bound)
        tokens = check_asked(_BUILD, seq, model_key)
        kept = as_tensors(_BUILD, "keep", keep)
        source = Snapshot(_BUILD, kv, kv_nodes)
        from_ctx = ctx.bindings_for([target, *kept])
        welded = _kv_bindings(source, kv_nodes)
        bindings: dict[Tensor, Storage] = {**from_ctx, **welded}
        for name, t in bound.items():
            if t in bindings:
                raise BindingError(
                    f"{_BUILD}: got {name!r} bound both per step and to a storage, need one of them"
                )
        plan = make_plan(target, bindings, ctx.device, effects=kept)
        for t in kept:
            if not plan.is_left(t):
                raise GraphError(
                    f"{_BUILD}: got keep {t!r}, whose memory is written again later in the step, "
                    "need a value that stays; keep a copy made by `to`"
                )
        for t in bound.values():
            if t in plan.leaves:
                plan.take_arrays(t)
        plan.resolve()
        owned = {t for pair in kv_nodes for t in pair or () if t is not None}
        lent = [t for t in from_ctx if t not in owned and t in plan.leaves]
        key = SessionKey(plan, ctx, lent, kv, tokens, model_key)
        return cls(plan, key, kv_nodes, bound, source.alloc_id(), welded)

    def step(self, data: Mapping[str, Any], env: EnvLike = None) -> HostArray:
        """Run the plan for new data and symbol values; returns a fresh array.

        Everything is checked before the first kernel: names, shapes, dtypes, symbol ranges. Names
        the plan does not need are ignored.
        """
        plan = self.plan
        hold, holds = new_hold(), plan.running.holds  # no `with`: two calls of Python functions
        try:
            holds[hold] = this_thread.number
            first, *_ = holds
            if first != hold:
                raise SessionBusy(
                    f"session of plan {plan.id}: got a step while one runs, need one owner"
                )
            if type(data) is not dict and not isinstance(data, Mapping):
                raise BindingError(f"step: got data {type(data).__name__}, need a mapping of names")
            arrays = []
            for feed in self._feeds:
                array: Any = data.get(feed.name)
                if (
                    type(array) is not feed.plain
                    or array.dtype != feed.dtype
                    or array.shape != feed.shape
                ):
                    array = feed.check(array)
                arrays.append(array)
            plan.set_symbols(env)
            plan.check_current()
            self._before_pass()
            try:  # no `with BackendCall`, which is two calls of Python functions per token
                for feed, array in zip(self._feeds, arrays, strict=True):
                    feed.put(array)
            except LazyKvError:
                raise
            except Exception as e:
                places = ", ".join(map(str, plan.program.locations))
                raise typed(e, places, "feeder") from e
            results = plan.execute()
        finally:
            holds.pop(hold, None)
        self.realize_count += 1
        return results[0] if plan.single else results  # type: ignore[return-value]

    def read(self, tensor: Tensor) -> HostArray:
        """What a tensor held in the last step, a fresh copy. Those named in `keep` can be read
        after every step; of the others those whose memory was not used again in it.

        What lies in a storage (a cache's rows) is read as it is now. Raises GraphError if the
        value is not there, or if no step has completed since the session was built or re-bound,
        and `SessionBusy` while one runs.
        """
        return self.plan.read(tensor)

    def _before_pass(self) -> None:
        """For a session that does more than walk the calls; the plan is its own meanwhile."""

    # Reuse

    @property
    def alloc_id(self) -> KvAllocId:
        """The cache allocation whose storages are baked into the plan."""
        return self._alloc_id

    @property
    def node_count(self) -> int:
        return self.plan.node_count

    @property
    def manifest(self) -> Any:
        """Everything baked into this session, and what is bound."""
        return self.plan.manifest.with_baked(self._key.baked)

    def differences(
        self, kv: KvRebindSource, *, seq: SupportsIndex = 1, model_key: tuple[object, ...]
    ) -> dict[str, tuple[object, object]]:
        """Every baked fact that differs from what a cache and model would bake now, by name, as
        (baked, now). Raises like `validity_for`."""
        return self._key.differences(kv, seq, model_key)

    def validity_for(
        self, kv: KvRebindSource, *, seq: SupportsIndex = 1, model_key: tuple[object, ...]
    ) -> PlanValidity:
        """Whether this plan may run for a cache: a comparison of what is baked, nothing else.

        `differences` names the facts that differ, with both values. Raises like `build` for what
        could not have been baked at all: BindingError for something that is no cache, GraphError
        for a key that is no tuple of plain values, DTypeError or RangeError for `seq`.
        """
        return self._key.validity(kv, seq, model_key)

    def is_valid_for(
        self, kv: KvRebindSource, *, seq: SupportsIndex = 1, model_key: tuple[object, ...]
    ) -> bool:
        return self._key.validity(kv, seq, model_key) is PlanValidity.Valid

    def rebind_kv(self, source: KvRebindSource) -> RebindRefusal | None:
        """Weld the plan to another allocation of the same kind; None, or the reason why not.

        Every slot is checked against the storage baked now, and all of them change or none.
        Raises `SessionBusy` while a step runs, `TopologyChanged` if a backend was replaced, and
        BindingError, DTypeError or RangeError for a source that is none.
        """
        plan = self.plan
        with plan.running.hold(f"session of plan {plan.id}", "a rebind while a step runs"):
            plan.check_topology()
            baked = self._baked()
            once = Snapshot("rebind_kv", source, baked)
            self._before_rebind()
            refusal, incoming = find_refusal(baked, once), once.alloc_id()
            if refusal is not None:
                self.history.append(("refused", self._alloc_id, incoming, refusal))
                return refusal
            welded = _kv_bindings(once, self.kv_nodes)
            plan.weld(welded)
            self._welded = welded
            self.history.append(("rebound", self._alloc_id, incoming))
            self._key.rebound(incoming)
            self._alloc_id = incoming
            self.rebind_count += 1
        return None

    def _before_rebind(self) -> None:
        """For a session that keeps something of the old allocation."""

    def retire(self) -> None:
        """Drop what was captured of this session: it is about to be let go."""
        self.plan.drop_capture()

    def _baked(self) -> Baked:
        at = self._welded
        return tuple(
            None if pair is None else tuple(None if t is None else at[t] for t in pair)
            for pair in self.kv_nodes
        )

    def __repr__(self) -> str:
        return f"DecodeSession(plan {self.plan.id}, {self.realize_count} steps)"


class _Feed:
    """One bound input: where its bytes go, and what they must look like."""

    __slots__ = ("dtype", "name", "plain", "put", "shape", "tensor")

    def __init__(self, name: str, plan: Plan, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.put = plan.feeder(tensor)
        self.shape = tensor.shape
        self.dtype = tensor.dtype.numpy
        # Raw-bit dtypes need a view of the array first: the exact-type shortcut must not match.
        self.plain: type[Any] = _Never if tensor.dtype.is_bits else np.ndarray

    def check(self, value: object) -> HostArray:
        if value is None:
            raise BindingError(
                f"bound {self.name!r}: got nothing, need {self.tensor.spec} every step"
            )
        array = host_array(value)
        check_input(self.name, self.tensor.spec, array)
        return to_raw(array)


def _check_build(
    ctx: object, target: object, kv: object, kv_nodes: KvNodes, bound: Mapping[str, Tensor]
) -> None:
    """The kinds of the arguments; every node stands for one slot or one input and no other."""
    if not isinstance(ctx, InferenceContext) or not isinstance(target, Tensor):
        got = f"{type(ctx).__name__} and {type(target).__name__}"
        raise GraphError(f"{_BUILD}: got {got}, need an InferenceContext and a target Tensor")
    if not isinstance(kv, KvRebindSource) or not isinstance(bound, Mapping):
        got = f"kv {type(kv).__name__} and bound {type(bound).__name__}"
        raise BindingError(f"{_BUILD}: got {got}, need a cache and a mapping of names")
    for name, t in bound.items():
        if not isinstance(t, Tensor) or not isinstance(t.op, Placeholder):
            raise GraphError(f"{_BUILD}: got {t!r} for {name!r}, need a placeholder")
    nodes = [n for pair in _layers(kv_nodes) for n in pair or () if n is not None]
    for what, given in (("slots", nodes), ("inputs", list(bound.values()))):
        if len(set(given)) != len(given):
            raise GraphError(f"{_BUILD}: got one node for several {what}, need one each")


def _layers(kv_nodes: object) -> KvNodes:
    """The nodes by layer and slot, if they are that."""
    if not isinstance(kv_nodes, list | tuple):
        got = type(kv_nodes).__name__
        raise GraphError(f"{_BUILD}: got kv_nodes {got}, need a list of a tuple per layer")
    for layer, slots in enumerate(kv_nodes):
        if slots is None:
            continue
        nodes = slots if isinstance(slots, list | tuple) else (slots,)
        if nodes is not slots or not all(n is None or isinstance(n, Tensor) for n in nodes):
            raise GraphError(
                f"{_BUILD}: got {slots!r} in kv_nodes for layer {layer}, need a tuple with a "
                "placeholder (or None) per slot, or None"
            )
    return kv_nodes


class _Never:
    """The type of no array."""


def _kv_bindings(kv: Snapshot, kv_nodes: KvNodes) -> dict[Tensor, Storage]:
    count = kv.n_layers
    if count is not None and count > len(kv_nodes):
        raise GraphError(
            f"{_BUILD}: got {count} layers in kv and {len(kv_nodes)} kv_nodes, need as many"
        )
    out: dict[Tensor, Storage] = {}
    for layer, which, node in every_slot(kv_nodes):
        storage = kv.rebind_slot(layer, which)
        if node is None:
            if storage is not None:
                raise GraphError(
                    f"{_BUILD}: got no node for layer {layer}, slot {which}, need one for every "
                    "slot of kv"
                )
            continue
        if storage is None:
            raise BindingError(
                f"{_BUILD}: got no storage for layer {layer}, slot {which}, need one"
            )
        out[node] = storage
    return out
