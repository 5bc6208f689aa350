"""The backend under test, as the tests of the suite see it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from lazykv.device import (
    Backend,
    DeviceLocation,
    check_kind,
    device,
    locations_of,
    registry,
)
from lazykv.dtypes import dtype as find_dtype
from lazykv.errors import BackendUnavailable
from lazykv.graph import Tensor
from lazykv.kv.cache import KvCache
from lazykv.kv.pool import DeviceKvPool
from lazykv.pages.geometry import KvGeometry
from lazykv.runtime.realize import plan
from lazykv.storage import Storage
from lazykv.symbols import EnvLike


@dataclass(frozen=True, slots=True)
class Target:
    """A backend and the location that the tests run on."""

    backend: Backend
    location: DeviceLocation

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def place(self) -> str:
        return str(self.location)

    # What is declared

    def need(self, *dtypes: str) -> None:
        """Skip the test unless the backend declares these dtypes."""
        missing = [n for n in dtypes if n not in self.backend.capabilities.dtypes]
        if missing:
            pytest.skip(f"{self.name} declares no {missing[0]}")

    def undeclared(self, error: BackendUnavailable) -> str | None:
        """The op that a plan was refused for, if the backend declares neither it nor what it was
        lowered to; None for any other refusal."""
        declared = self.backend.capabilities.ops
        if declared is None or not error.ops or declared.intersection(error.ops):
            return None
        return error.ops[0]

    def need_capture(self) -> None:
        if not self.backend.capabilities.capture:
            pytest.skip(f"{self.name} declares no capture")

    def other_location(self) -> DeviceLocation:
        """A second location of the backend; skips the test if there is none."""
        for place in self.backend.locations():
            if place != self.location:
                return place
        pytest.skip(f"{self.name} has one location")

    # What tests do with it

    def storage(self, array: Any, place: DeviceLocation | None = None) -> Storage:
        """A copy of a host array on the location."""
        return Storage.from_array(array, place or self.location)

    def run(
        self, targets: Tensor | Sequence[Tensor], bindings: Mapping[Tensor, Any] | None = None,
        env: EnvLike = None,
    ) -> Any:  # fmt: skip
        """Realize targets on the location; sources without an operand run there too."""
        made = plan(targets, bindings, self.location)
        strays = {str(r.location) for r in made.program.registers} - {self.place}
        assert not strays, f"the plan has registers on {strays}, need all on {self.place}"
        return made.run(env=env)

    def cache(self, capacity: int = 8, dtype: str = "f32", **sizes: int) -> KvCache:
        """A small cache: 2 layers, 2 heads of 4."""
        self.need(dtype)
        layers, heads, dim = (sizes.get(n, d) for n, d in (("layers", 2), ("heads", 2), ("dim", 4)))
        return KvCache.with_capacity(layers, heads, dim, capacity, dtype, self.location)

    def pool(self, blocks: int = 8, size: int = 4, dtype: str = "f32") -> DeviceKvPool:
        """A small pool: 2 layers, 2 heads of 4."""
        self.need(dtype, "u32", "i64")
        geometry = KvGeometry(2, blocks, size, 2, 4, find_dtype(dtype).itemsize)
        return DeviceKvPool(geometry, dtype, self.location)


def find_target(name: str, place: str | None = None) -> Target:
    """A backend by its name, on one of its locations (None: its first).

    Raises `BackendUnavailable` if it does not load, bears another name, has no device or not this
    one.
    """
    backend = registry.find(check_kind(name))
    if backend.name != name:
        raise BackendUnavailable(
            f"backend {name!r}: got name {backend.name!r}, need the kind of its locations"
        )
    if place is None:
        places = locations_of(name, backend)
        if not places:
            raise BackendUnavailable(f"backend {name!r}: got no device, need at least one")
        return Target(backend, places[0])
    found = device(place)
    if found.location.kind != name:
        raise BackendUnavailable(f"--device: got {place}, need a location of backend {name!r}")
    return Target(found.backend, found.location)
