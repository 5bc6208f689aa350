"""Inputs that a pass itself moves on, such as a position: what it leaves there is where the next
pass goes on, so that a step that follows another has nothing to copy in."""

from collections.abc import Callable

from lazykv.compiler.program import Program
from lazykv.device import HostArray
from lazykv.dtypes import i64
from lazykv.ops.elementwise import AddScalar
from lazykv.ops.sources import Placeholder
from lazykv.ops.write import WriteSlice
from lazykv.spec import Spec


class CarriedInput:
    """One rank-0 i64 input to which every pass adds `by` in place.

    `value` is what its memory is known to hold, None after a pass that failed or before the first.
    """

    __slots__ = ("_put", "by", "value")

    def __init__(self, put: Callable[[HostArray], object], by: int) -> None:
        self._put = put
        self.by = by
        self.value: int | None = None

    def feed(self, array: HostArray) -> None:
        """Copy a value in, unless the last pass left that very value: nobody else has the plan's
        own buffers."""
        value = int(array)
        if value != self.value:
            self.value = None
            self._put(array)
            self.value = value

    def begin(self) -> int | None:
        """What the pass will leave, to be put back into `value` once it has run."""
        left = None if self.value is None else self.value + self.by
        self.value = None
        return left


def advance_of(program: Program, leaf: int) -> int | None:
    """What a program adds to a leaf in place, where that is all it does to it.

    Proven from the nodes: the leaf is one i64, its one write replaces it whole, and the source of
    that write is the leaf plus a number.
    """
    held, nodes = program.leaves[leaf], program.nodes
    if held.spec != Spec((), i64) or not isinstance(held.op, Placeholder):
        return None
    (base,) = (
        n
        for n, x in enumerate(nodes)
        if isinstance(x.op, Placeholder) and x.origin == held.position
    )
    writes = [
        x
        for n, x in enumerate(nodes)
        if x.op.destroys is not None and program.places[n].base == base
    ]
    if len(writes) != 1 or not isinstance(writes[0].op, WriteSlice):
        return None
    dest, source = writes[0].inputs
    added = nodes[source]
    if dest != base or not isinstance(added.op, AddScalar) or added.inputs != (base,):
        return None
    return int(added.op.value)
