"""When a held plan may run again: everything it baked, compared with what would be baked now."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, SupportsIndex

from lazykv.compiler.bindings import leaf_name
from lazykv.compiler.manifest import Manifest, same
from lazykv.compiler.plan import Plan
from lazykv.device import DeviceLocation, generation, registry
from lazykv.errors import BindingError, GraphError
from lazykv.graph import Tensor
from lazykv.ids import KvAllocId
from lazykv.kv.rows import count
from lazykv.sessions.rebind import checked_id, layer_count
from lazykv.spec import not_plain

if TYPE_CHECKING:
    from lazykv.sessions.context import InferenceContext


class PlanValidity(Enum):
    """Whether a held plan may run for a cache.

    `AllocationChanged`: the storages are the only difference, so re-binding can help. `Stale`:
    something else that the plan baked differs. Which facts differ is not part of it:
    `DecodeSession.differences` names them, and so does the `Dropped` of a refresh.
    """

    Valid = "valid"
    AllocationChanged = "allocation changed"
    Stale = "stale"


ALLOCATION = "kv.alloc_id"
_ASKED = "validity_for"
_GENERATION = "generation:"
_OWN = ("structure", "storage:", "range:")
"""Facts of the plan itself, which no cache or model can change under it."""


def check_asked(who: str, seq: SupportsIndex, model_key: object) -> int:
    """The tokens of a step, if these can be baked: DTypeError or RangeError for the tokens,
    GraphError for a key that is no tuple of plain values."""
    if not isinstance(model_key, tuple):
        got = type(model_key).__name__
        raise GraphError(f"{who}: got model_key {got}, need a tuple of values")
    if found := not_plain(model_key):
        raise GraphError(f"{who}: got {found} in model_key, need plain values only")
    return count(who, "seq", seq, 1)


def kv_facts(who: str, kv: Any) -> dict[str, object]:
    """What a plan bakes about its cache, read from the cache: its own `plan_facts()` where it has
    them (so that a new kind of cache names its own), else the geometry any cache shows."""
    named = getattr(kv, "alloc_id", None)
    if not callable(named) or isinstance(kv, type):
        raise BindingError(f"{who}: got {type(kv).__name__}, need a cache")
    alloc_id = named()
    if type(alloc_id) not in (int, KvAllocId) or alloc_id < 1:
        alloc_id = checked_id(who, alloc_id)
    own = getattr(kv, "plan_facts", None)
    if own is not None:
        facts: dict[str, object] = own()
    else:
        dtype = getattr(kv, "dtype", None)
        facts = {
            "layers": layer_count(kv),
            "capacity": getattr(kv, "max_seq_len", None),
            "heads": getattr(kv, "n_kv_heads", None),
            "head_dim": getattr(kv, "head_dim", None),
            "dtype": None if dtype is None else str(dtype),
        }
    return {
        **{f"kv.{name}": value for name, value in facts.items()},
        ALLOCATION: int(alloc_id),
    }


class SessionKey:
    """The baked facts of one session, each with the way to read its present value.

    Every name in `baked` is compared, and a fact that a cache names now and did not name then (or
    the reverse) differs too: what is baked cannot be forgotten here.
    """

    def __init__(
        self, plan: Plan, ctx: "InferenceContext", lent: Sequence[Tensor], kv: Any, seq: int,
        model_key: tuple[object, ...],
    ) -> None:  # fmt: skip
        self._readers: dict[str, Callable[[], object]] = {}
        for name in plan.manifest.baked:
            if name.startswith(_OWN):
                continue
            if not name.startswith(_GENERATION):
                raise GraphError(f"session: got baked {name!r}, need a way to read its value now")
            place = DeviceLocation(name.removeprefix(_GENERATION))
            self._readers[name] = lambda place=place: generation(place)  # type: ignore[misc]
        for t in lent:
            name = f"ctx:{leaf_name(t, plan.leaves.index(t))}#{t.node_id}"
            self._readers[name] = lambda t=t: _id_of(ctx.get(t))  # type: ignore[misc]
        self._kv = kv_facts("DecodeSession.build", kv)
        self._rest = {name: read() for name, read in self._readers.items()}
        self._rest |= {"seq": seq, "model_key": model_key}
        self._epoch = registry.epoch
        self._lent = bool(lent)

    @property
    def baked(self) -> dict[str, object]:
        return {**self._kv, **self._rest}

    def rebound(self, alloc_id: KvAllocId) -> None:
        self._kv[ALLOCATION] = int(alloc_id)

    def differences(
        self, kv: Any, seq: SupportsIndex, model_key: tuple[object, ...]
    ) -> dict[str, tuple[object, object]]:
        """Facts that differ, as (baked, now)."""
        asked = check_asked(_ASKED, seq, model_key)
        now = {name: read() for name, read in self._readers.items()}
        now |= {"seq": asked, "model_key": model_key, **kv_facts(_ASKED, kv)}
        then = Manifest(self.baked)
        gone = {name: (value, None) for name, value in then.baked.items() if name not in now}
        return {**gone, **then.differences(now)}

    def validity(self, kv: Any, seq: SupportsIndex, model_key: tuple[object, ...]) -> PlanValidity:
        # The token path: nothing but the cache can have changed.
        if (
            registry.epoch == self._epoch
            and not self._lent
            and type(seq) is int
            and seq == self._rest["seq"]
            and (model_key is self._rest["model_key"] or same(model_key, self._rest["model_key"]))
            and _same_facts(kv_facts(_ASKED, kv), self._kv)
        ):
            return PlanValidity.Valid
        different = self.differences(kv, seq, model_key)
        if not different:
            return PlanValidity.Valid
        if set(different) == {ALLOCATION}:
            return PlanValidity.AllocationChanged
        return PlanValidity.Stale


def _same_facts(a: dict[str, object], b: dict[str, object]) -> bool:
    # In another order they are compared the long way.
    return list(a) == list(b) and all(map(same, a.values(), b.values()))


def _id_of(storage: Any) -> int | None:
    return None if storage is None else int(storage.id)
