"""One layer of a cache: two storages, what is known about them, and the slots' names."""

from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from lazykv.device import CPU, DeviceLocation
from lazykv.errors import BindingError, DTypeError, ShapeError
from lazykv.layout import Layout
from lazykv.storage import Storage


class KvSlot(IntEnum):
    """The two halves of a layer, in the order a builder binds them."""

    K = 0
    V = 1


class AuthorityState:
    """Where the bytes of a slot are authoritative: `Host`, or `Device` with a location.

    Both are classes, also reachable as attributes here. A `Host` equals its class, so
    ``layer.k_authority == AuthorityState.Host`` reads as it should; a `Device` equals those of its
    location.
    """

    Host: "ClassVar[type[Host]]"
    Device: "ClassVar[type[Device]]"

    __slots__ = ()


class Host(AuthorityState):
    """The bytes that count are in host memory."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is Host or isinstance(other, Host)

    def __hash__(self) -> int:
        return hash(Host)

    def __repr__(self) -> str:
        return "Host"


@dataclass(frozen=True, slots=True)
class Device(AuthorityState):
    """The bytes that count are on a device; the host sees them through a copy."""

    location: DeviceLocation


AuthorityState.Host = Host
AuthorityState.Device = Device


def authority_of(storage: Storage) -> AuthorityState:
    return Host() if storage.location == CPU else Device(storage.location)


class KvLayer:
    """The K and V storages of one layer, each ``[B, n_kv_heads, capacity, head_dim]``.

    Immutable but for the version counters: `KvCache.set_layer` is the only way to another storage.
    The layouts describe the allocation; the live extent is the cache's `cached_len`.
    """

    __slots__ = ("_k", "_v", "_versions")

    def __init__(self, k: Storage, v: Storage) -> None:
        for name, half in (("K", k), ("V", v)):
            if not isinstance(half, Storage):
                raise BindingError(f"KvLayer: got {name} {type(half).__name__}, need a Storage")
        if k is v:
            raise BindingError(f"KvLayer: got {k!r} as K and as V, need two storages")
        if len(k.shape) != 4 or k.shape != v.shape:
            raise ShapeError(
                f"KvLayer: got K {k.spec} and V {v.spec}, need equal shapes [B,heads,capacity,dim]"
            )
        if k.dtype is not v.dtype:
            raise DTypeError(f"KvLayer: got K {k.spec} and V {v.spec}, need one dtype")
        self._k = k
        self._v = v
        self._versions = [0, 0]

    @property
    def k(self) -> Storage:
        return self._k

    @property
    def v(self) -> Storage:
        return self._v

    def slot(self, slot: KvSlot) -> Storage:
        return self._v if slot == KvSlot.V else self._k

    @property
    def k_layout(self) -> Layout:
        return Layout.contiguous(self._k.shape)

    @property
    def v_layout(self) -> Layout:
        return Layout.contiguous(self._v.shape)

    @property
    def k_version(self) -> int:
        return self._versions[KvSlot.K]

    @property
    def v_version(self) -> int:
        return self._versions[KvSlot.V]

    @property
    def k_authority(self) -> AuthorityState:
        return authority_of(self._k)

    @property
    def v_authority(self) -> AuthorityState:
        return authority_of(self._v)

    def bump(self, slot: KvSlot) -> None:
        """Count one successful cache-level write to a slot."""
        self._versions[slot] += 1

    def count_from(self, least: tuple[int, int]) -> None:
        """Raise the counters to at least these: the layer takes the place of another."""
        self._versions = [max(pair) for pair in zip(self._versions, least, strict=True)]

    def __repr__(self) -> str:
        return f"KvLayer(k={self._k!r}, v={self._v!r})"
