"""What a held plan asks of a cache it is to be re-bound to, and the named ways to say no.

A refusal is a normal outcome, not an error: the caller builds a new session.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from lazykv.device import DeviceLocation
from lazykv.errors import BindingError, RangeError
from lazykv.ids import KvAllocId
from lazykv.spec import whole
from lazykv.storage import Storage


@runtime_checkable
class KvRebindSource(Protocol):
    """A cache whose storages a held plan can be welded to."""

    def alloc_id(self) -> KvAllocId:
        """Identity of the allocation."""

    def rebind_location(self) -> DeviceLocation | None:
        """Where all storages live, or None if that is not proven."""

    def rebind_slot(self, layer: int, which: int) -> Storage | None:
        """Storage of slot 0 or 1 of a layer, in the order the builder bound them.

        None, or a LookupError, for what the cache does not have. It is asked for one slot and one
        layer more than a plan has, since only that tells whether there are more.
        """


class RebindRefusal:
    """Why a plan was not re-bound; the plan and the cache are as they were.

    One of `ResidencyUnknown`, `ResidencyDiffers`, `MissingSlot`, `StorageDiffers`, `StorageTorn`:
    classes, also reachable as attributes here.
    """

    ResidencyUnknown: "type[ResidencyUnknown]"
    ResidencyDiffers: "type[ResidencyDiffers]"
    MissingSlot: "type[MissingSlot]"
    StorageDiffers: "type[StorageDiffers]"
    StorageTorn: "type[StorageTorn]"


@dataclass(frozen=True, slots=True)
class ResidencyUnknown(RebindRefusal):
    """The source cannot prove where a layer's storage lives."""

    layer: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ResidencyDiffers(RebindRefusal):
    """The source lives elsewhere than the plan was made for."""

    baked: DeviceLocation
    incoming: DeviceLocation


@dataclass(frozen=True, slots=True)
class MissingSlot(RebindRefusal):
    """The source has no storage for a slot that the plan binds."""

    layer: int
    which: int


@dataclass(frozen=True, slots=True)
class StorageDiffers(RebindRefusal):
    """A slot's storage is not like the baked one; `what` names the field that differs."""

    layer: int
    which: int
    what: str = field(default="", compare=False)
    baked: Any = field(default=None, compare=False)
    incoming: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class StorageTorn(RebindRefusal):
    """A slot's storage lost its last writer midway and has to be rewritten first."""

    layer: int
    which: int


RebindRefusal.ResidencyUnknown = ResidencyUnknown
RebindRefusal.ResidencyDiffers = ResidencyDiffers
RebindRefusal.MissingSlot = MissingSlot
RebindRefusal.StorageDiffers = StorageDiffers
RebindRefusal.StorageTorn = StorageTorn

Baked: TypeAlias = tuple[tuple[Storage | None, ...] | None, ...]
"""The storages a plan is welded to: the slots of every layer (None: it has no such slot, or no such
layer)."""


T = TypeVar("T")


def every_slot(
    layers: Sequence[tuple[T | None, ...] | None],
) -> Iterator[tuple[int, int, T | None]]:
    """What a plan has at every (layer, slot), and that it has nothing in the layer after its last
    one and in the slot after the last one of each layer."""
    yield len(layers), 0, None
    for layer, slots in enumerate(layers):
        if slots is not None:
            yield from ((layer, which, there) for which, there in enumerate((*slots, None)))


class Snapshot:
    """A source read once, so that what is checked is what is bound: its slots wherever a plan has
    some, and where it must not have more."""

    def __init__(
        self, who: str, source: object, planned: Sequence[tuple[object, ...] | None]
    ) -> None:
        if not isinstance(source, KvRebindSource) or isinstance(source, type):
            raise BindingError(f"{who}: got {type(source).__name__}, need a cache")
        self._id = checked_id(who, source.alloc_id())
        self._everywhere = _location(who, source.rebind_location())
        by_layer = getattr(source, "layer_location", None)
        self._by_layer = [
            _location(who, by_layer(n)) if by_layer else None for n in range(len(planned))
        ]
        self.n_layers = layer_count(source)
        self._slots = {
            (layer, which): _storage(who, source, layer, which)
            for layer, which, _ in every_slot(planned)
        }

    def alloc_id(self) -> KvAllocId:
        return self._id

    def rebind_location(self) -> DeviceLocation | None:
        return self._everywhere

    def layer_location(self, layer: int) -> DeviceLocation | None:
        return self._by_layer[layer]

    def rebind_slot(self, layer: int, which: int) -> Storage | None:
        return self._slots[layer, which]


def find_refusal(baked: Baked, source: Snapshot) -> RebindRefusal | None:
    """The first reason not to re-bind, or None.

    Residency is compared before any storage, and a torn storage is named last: it can be repaired.
    """
    refusal = _residency(baked, source)
    if refusal is not None:
        return refusal
    layers = source.n_layers
    if layers is not None and layers > len(baked):
        return StorageDiffers(len(baked), 0, "layers", len(baked), layers)
    seen: set[int] = set()
    torn: StorageTorn | None = None
    for layer, which, old in every_slot(baked):
        new = source.rebind_slot(layer, which)
        refusal = _slot(layer, which, old, new, seen)
        if refusal is not None:
            return refusal
        if torn is None and new is not None and new.torn:
            torn = StorageTorn(layer, which)
    return torn


def layer_count(kv: Any) -> int | None:
    """Layers of a cache, or None if it does not tell."""
    layers: Any = getattr(kv, "n_layers", None)
    layers = layers() if callable(layers) else layers
    return None if layers is None else whole(type(kv).__name__, "n_layers", layers)


def checked_id(who: str, alloc_id: Any) -> KvAllocId:
    """What a source calls its allocation; DTypeError or RangeError if that cannot name one."""
    number = whole(who, "alloc_id", alloc_id)
    if number < 1:
        raise RangeError(f"{who}: got alloc_id {number}, need a number above 0")
    return KvAllocId(number)


def _location(who: str, given: object) -> DeviceLocation | None:
    if given is not None and not isinstance(given, DeviceLocation):
        raise BindingError(f"{who}: got location {given!r}, need a DeviceLocation or None")
    return given


def _storage(who: str, source: KvRebindSource, layer: int, which: int) -> Storage | None:
    """What a source has at a slot; a source over a list says by a LookupError that it has none."""
    try:
        given: object = source.rebind_slot(layer, which)
    except LookupError:
        return None
    if given is not None and not isinstance(given, Storage):
        raise BindingError(
            f"{who}: got {type(given).__name__} for layer {layer}, slot {which}, need a Storage or "
            "None"
        )
    return given


def _residency(baked: Baked, source: Snapshot) -> RebindRefusal | None:
    everywhere = source.rebind_location()
    for layer, pair in enumerate(baked):
        if pair is None:
            continue
        incoming = everywhere
        if incoming is None:
            incoming = source.layer_location(layer)
        if incoming is None:
            return ResidencyUnknown(layer)
        for old in pair:
            if old is not None and old.location != incoming:
                return ResidencyDiffers(old.location, incoming)
    return None


def _slot(
    layer: int, which: int, old: Storage | None, new: Storage | None, seen: set[int]
) -> RebindRefusal | None:
    if old is None:
        return None if new is None else StorageDiffers(layer, which, "slot", None, new.id)
    if new is None:
        return MissingSlot(layer, which)
    for what in ("dtype", "shape", "location", "nbytes", "frozen"):
        before, after = getattr(old, what), getattr(new, what)
        if before != after:
            return StorageDiffers(layer, which, what, before, after)
    if not new.is_served_by(old.made_by):
        return StorageDiffers(layer, which, "backend", old.made_by, new.made_by)
    if new.id in seen:
        return StorageDiffers(layer, which, "id", "a storage of its own", new.id)
    seen.add(new.id)
    return None


class SessionDisposition:
    """What `InferenceContext.refresh` did with the held session.

    One of `Absent`, `Kept`, `Rebound`, `Dropped`: classes, also reachable as attributes here. A
    value equals its class and every value of it, so ``disposition == SessionDisposition.Kept``
    reads as it should.
    """

    Absent: "type[Absent]"
    Kept: "type[Kept]"
    Rebound: "type[Rebound]"
    Dropped: "type[Dropped]"

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is type(self) or type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return type(self).__name__


class Absent(SessionDisposition):
    """No session was held."""

    __slots__ = ()


class Kept(SessionDisposition):
    """The held session is valid as it is."""

    __slots__ = ()


class Rebound(SessionDisposition):
    """Only the allocation differed, and the plan now runs on the new one."""

    __slots__ = ()


class Dropped(SessionDisposition):
    """The session is gone. `refusal` says why re-binding was refused (None: it was not tried, since
    something else differs); `differences` names every baked fact that differs, as (baked, now)."""

    __slots__ = ("differences", "refusal")

    def __init__(
        self, refusal: RebindRefusal | None = None,
        differences: dict[str, tuple[object, object]] | None = None,
    ) -> None:  # fmt: skip
        self.refusal = refusal
        self.differences = differences or {}

    def __repr__(self) -> str:
        return f"Dropped({self.refusal or self.differences})"


SessionDisposition.Absent = Absent
SessionDisposition.Kept = Kept
SessionDisposition.Rebound = Rebound
SessionDisposition.Dropped = Dropped
