"""InferenceContext: long-lived storages by node, and the one session a decode loop holds."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, SupportsIndex

from lazykv.compiler.plan import Plan
from lazykv.device import Device, DeviceLike
from lazykv.device import device as find_device
from lazykv.errors import BindingError, GraphError
from lazykv.graph import Tensor
from lazykv.owner import Owner, exclusive
from lazykv.runtime.realize import realize
from lazykv.sessions.rebind import (
    Absent,
    Dropped,
    Kept,
    KvRebindSource,
    Rebound,
    SessionDisposition,
)
from lazykv.sessions.validity import PlanValidity, check_asked, kv_facts
from lazykv.storage import Storage
from lazykv.symbols import EnvLike

if TYPE_CHECKING:
    from lazykv.sessions.decode import DecodeSession


class InferenceContext:
    """Storages that outlive a pass, keyed by the node they are bound to, on one device."""

    def __init__(self, device: DeviceLike = "cpu") -> None:
        self.device: Device = find_device(device)
        self._owner = Owner()
        self._storages: dict[int, Storage] = {}
        self._session: DecodeSession | None = None

    def owned(self, who: str) -> AbstractContextManager[None]:
        """Hold the context from `refresh` to the end of the step that follows it."""
        return self._owner.hold(who)

    def insert(self, node: Tensor | int, storage: Storage) -> None:
        """Bind a node to a storage for every later pass."""
        if not isinstance(storage, Storage):
            raise BindingError(
                f"InferenceContext.insert: got {type(storage).__name__}, need a Storage"
            )
        if isinstance(node, Tensor) and node.spec != storage.spec:
            raise BindingError(f"InferenceContext.insert: got {storage.spec}, need {node.spec}")
        self._storages[_node_id(node)] = storage

    def remove(self, node: Tensor | int) -> Storage | None:
        """Forget a node's storage; returns it, or None if there was none."""
        return self._storages.pop(_node_id(node), None)

    def contains(self, node: Tensor | int) -> bool:
        return _node_id(node) in self._storages

    __contains__ = contains

    def get(self, node: Tensor | int) -> Storage | None:
        return self._storages.get(_node_id(node))

    def __len__(self) -> int:
        return len(self._storages)

    def __bool__(self) -> bool:
        return True

    def clear_persistent(self) -> None:
        """Forget every storage and the held session."""
        self._storages.clear()
        if self._session is not None:
            self._session.retire()
        self._session = None

    def bindings_for(self, targets: Sequence[Tensor]) -> dict[Tensor, Storage]:
        """The storages of this context that the graph of the targets has nodes for."""
        wanted = as_tensors("InferenceContext.bindings_for", "targets", targets)
        graph = wanted[0].graph if wanted else ()
        return {t: self._storages[t.node_id] for t in graph if t.node_id in self._storages}

    def realize(self, target: Tensor, env: EnvLike = None) -> Any:
        """One target with this context's storages bound."""
        if not isinstance(target, Tensor):
            raise GraphError(
                f"InferenceContext.realize: got {type(target).__name__}, need a Tensor; "
                "realize_many takes several"
            )
        return realize(target, self.bindings_for([target]), env, self.device)

    def realize_many(self, targets: Sequence[Tensor], env: EnvLike = None) -> list[Any]:
        """Several targets of one graph in one pass."""
        wanted = as_tensors("InferenceContext.realize_many", "targets", targets)
        out: list[Any] = realize(wanted, self.bindings_for(wanted), env, self.device)
        return out

    def take_decode_session(self) -> "DecodeSession | None":
        """Hand the held session out; the context no longer has it."""
        session, self._session = self._session, None
        return session

    def put_decode_session(self, session: "DecodeSession") -> None:
        """Hold a session; another one that is held is retired. A retired one stays retired."""
        if not isinstance(getattr(session, "plan", None), Plan):
            raise GraphError(
                f"InferenceContext.put_decode_session: got {type(session).__name__}, need a "
                "DecodeSession"
            )
        if self._session is not None and self._session is not session:
            self._session.retire()
        self._session = session

    def has_decode_session(self) -> bool:
        return self._session is not None

    @exclusive
    def refresh(
        self, kv: KvRebindSource, *, seq: SupportsIndex = 1, model_key: tuple[object, ...]
    ) -> SessionDisposition:
        """Decide, at the top of a step, what becomes of the held session.

        `Absent`: none is held. `Kept`: it is valid. `Rebound`: only the allocation differed, and it
        now runs on this one. `Dropped`: it is gone, with the refusal or the differences. Raises
        like `DecodeSession.validity_for`, and then the session stays.
        """
        session = self._session
        if session is None:
            check_asked("InferenceContext.refresh", seq, model_key)
            kv_facts("InferenceContext.refresh", kv)
            return Absent()
        validity = session.validity_for(kv, seq=seq, model_key=model_key)
        if validity is PlanValidity.Valid:
            return Kept()
        different = session.differences(kv, seq=seq, model_key=model_key)
        refusal = None
        if validity is PlanValidity.AllocationChanged:
            refusal = session.rebind_kv(kv)
            if refusal is None:
                return Rebound()
        session.retire()
        self._session = None
        return Dropped(refusal, different)


def as_tensors(who: str, name: str, given: object) -> list[Tensor]:
    """A caller's list of Tensors."""
    tensors = list(given) if isinstance(given, Iterable) and not isinstance(given, Tensor) else None
    if tensors is None or not all(isinstance(t, Tensor) for t in tensors):
        got = type(given).__name__ if tensors is None else [type(t).__name__ for t in tensors]
        raise GraphError(f"{who}: got {name} {got}, need a list of Tensors")
    return tensors


def _node_id(node: Tensor | int) -> int:
    if isinstance(node, Tensor):
        return node.node_id
    if isinstance(node, bool) or not isinstance(node, int):
        raise GraphError(f"InferenceContext: got {node!r}, need a Tensor or a node id")
    return node
