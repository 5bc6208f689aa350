"""What a plan baked in and what it leaves bound: the basis of every decision to reuse it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Manifest:
    """`baked`: facts by name that a plan depends on (storage ids, topology generations, symbol
    ranges, the structure's digest, and what a session adds). `bound`: what is supplied per run, as
    name to spec. A plan may be reused exactly where all baked facts are equal."""

    baked: Mapping[str, object] = field(default_factory=dict)
    bound: Mapping[str, str] = field(default_factory=dict)

    def with_baked(self, facts: Mapping[str, object]) -> "Manifest":
        return Manifest({**self.baked, **facts}, self.bound)

    def differences(self, facts: Mapping[str, object]) -> dict[str, tuple[object, object]]:
        """Baked facts that differ from `facts`, as (baked, given); by value and by type."""
        return {
            name: (self.baked.get(name), value)
            for name, value in facts.items()
            if not same(self.baked.get(name), value)
        }


def same(a: object, b: object) -> bool:
    """Equality by value and type: ``1``, ``True`` and ``1.0`` differ, floats compare by bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b
