"""What the leaves of one plan are bound to: storages by reference, arrays in buffers of its own."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lazykv.backend_call import BackendCall
from lazykv.compiler.carried import CarriedInput, advance_of
from lazykv.compiler.program import Program
from lazykv.device import HostArray
from lazykv.dtypes import dtype, to_raw
from lazykv.errors import BindingError
from lazykv.graph import Tensor
from lazykv.interchange import host_array
from lazykv.ops.sources import Alloc, Placeholder
from lazykv.spec import Spec
from lazykv.storage import Claim, Storage, overlapping


class LeafBindings:
    """Storages by leaf. `stale` are the leaves whose storage the plan's calls do not know yet.

    `inputs` are the buffers of leaves that take arrays, and `refills` the arrays that have to be
    copied in anew before every pass, because the pass writes into them. `carried` are inputs that
    are fed and that the pass moves on, `unsure` those that were given to a pass that failed.
    """

    def __init__(
        self, program: Program, leaves: Sequence[Tensor], kept: Mapping[Tensor, Storage] | None
    ) -> None:
        self.program = program
        self.leaves = tuple(leaves)
        self.storages: list[Storage | None] = [None] * len(self.leaves)
        self.inputs: dict[int, Storage] = {}
        self.refills: dict[int, HostArray] = {}
        self.carried: dict[int, CarriedInput] = {}
        self.unsure: set[int] = set()
        self.stale = set(range(len(self.leaves)))
        self.position = {t: n for n, t in enumerate(self.leaves)}
        for n, t in enumerate(self.leaves):
            if t.data is not None:
                self.storages[n] = t.data.at(program.leaves[n].location)
            elif isinstance(t.op, Alloc):
                self.storages[n] = (kept or {}).get(t) or Storage.allocate(
                    t.shape, t.dtype, t.op.location
                )

    @property
    def own_bytes(self) -> int:
        """Bytes of input buffers, made or still to be made, and of allocations."""
        total = sum(s.nbytes for n, s in self.inputs.items() if s is self.storages[n])
        for t, s in zip(self.leaves, self.storages, strict=True):
            if isinstance(t.op, Alloc) or (s is None and isinstance(t.op, Placeholder)):
                total += t.spec.nbytes
        return total

    def admit(self, n: int, value: object) -> Storage | HostArray:
        """What a leaf may be bound to: the storage itself, or a host array in raw dtype.

        Raises `BindingError` unless shape, dtype and location are what the placeholder declares;
        nothing is cast.
        """
        tensor, leaf = self.leaves[n], self.program.leaves[n]
        who = leaf_name(tensor, n)
        if not isinstance(tensor.op, Placeholder):
            raise BindingError(f"bind: got {tensor!r}, need a placeholder")
        if not isinstance(value, Storage):
            array = host_array(value)
            check_input(who, tensor.spec, array)
            return to_raw(array)
        if value.spec != leaf.spec:
            raise BindingError(f"placeholder {who}: got {value.spec}, need {leaf.spec}")
        if value.location != leaf.location:
            raise BindingError(
                f"placeholder {who}: got a storage on {value.location}, need one on {leaf.location}"
            )
        return value

    def put(self, n: int, value: Storage | HostArray) -> None:
        """Bind what `admit` gave."""
        self.unsure.discard(n)
        if isinstance(value, Storage):
            self._drop_input(n)
            self._point(n, value)
            return
        self.input_storage(n)
        if self.program.leaves[n].written:
            self.refills[n] = np.array(value)
        else:
            self._copy_in(n, value)

    def bind(self, n: int, value: Storage | HostArray) -> None:
        """`put`, and the wait for the copy: later it would fail in a pass that was not given it."""
        try:
            self.put(n, value)
            store = self.inputs.get(n)
            if store is not None:
                with BackendCall(store.location, "synchronize"):
                    store.made_by.synchronize(store.location)
        except BaseException:
            if self.storages[n] is self.inputs.get(n):
                self.unsure.add(n)
            raise

    def feeder(self, n: int) -> Callable[[HostArray], object]:
        """What a held plan calls to copy into a leaf's own buffer, which becomes bound to it."""
        store = self.input_storage(n)
        put = store.made_by.feeder(store.array)
        by = advance_of(self.program, n)
        if by is None:
            return put
        self.carried[n] = CarriedInput(put, by)
        return self.carried[n].feed

    def refill(self) -> None:
        """Copy arrays in again that the last pass wrote into."""
        for n, data in self.refills.items():
            self._copy_in(n, data)

    def _copy_in(self, n: int, data: HostArray) -> None:
        """Into a buffer that nobody else has, so without its lock. It is rewritten whole, whatever
        a failed pass has left in it."""
        store = self.inputs[n]
        store.torn = False
        with BackendCall(store.location, "copy_in"):
            store.made_by.copy_in(store.array, data)

    def input_buffer(self, n: int) -> Storage:
        """Memory for a placeholder that takes arrays, made once; not bound by this."""
        leaf = self.program.leaves[n]
        if n not in self.inputs:
            self.inputs[n] = Storage.allocate(leaf.spec.shape, leaf.spec.dtype, leaf.location)
        return self.inputs[n]

    def input_storage(self, n: int) -> Storage:
        """The plan's own buffer for a placeholder that takes arrays, bound to it."""
        buffer = self.input_buffer(n)
        self._point(n, buffer)
        return buffer

    def check_change(self, values: Sequence[tuple[int, Storage | HostArray]]) -> None:
        """`check` what binding these would leave, if that is another storage for any leaf."""
        given = {n: v if isinstance(v, Storage) else self.input_buffer(n) for n, v in values}
        if any(self.storages[n] is not s for n, s in given.items()):
            self.check([given.get(n, s) for n, s in enumerate(self.storages)])

    def replace(self, after: list[Storage | None], changed: Sequence[int]) -> None:
        """Take other storages for some leaves, in place of arrays too."""
        for n in changed:
            self._drop_input(n)
            self.unsure.discard(n)
        self.storages = after

    def check_inputs(self) -> None:
        """Refuse a pass whose inputs may hold part of what an earlier one was given."""
        for n in self.unsure:
            raise BindingError(
                f"placeholder {leaf_name(self.leaves[n], n)}: got no binding since a pass failed, "
                f"need {self.leaves[n].spec} again"
            )

    def _drop_input(self, n: int) -> None:
        self.inputs.pop(n, None)
        self.refills.pop(n, None)

    def _point(self, n: int, store: Storage) -> None:
        if self.storages[n] is not store:
            self.storages[n] = store
            self.stale.add(n)

    def check(self, storages: Sequence[Storage | None]) -> None:
        """Refuse leaves without a binding, storages of a backend that was replaced, and memory that
        several share if one is written."""
        users: dict[int, list[int]] = {}
        for n, store in enumerate(storages):
            if store is None:
                raise BindingError(
                    f"placeholder {leaf_name(self.leaves[n], n)}: got no binding, need "
                    f"{self.leaves[n].spec}"
                )
            store.check_backend()
            if self.program.leaves[n].written:
                store.check_writable()
            users.setdefault(store.id, []).append(n)
        for same in users.values():
            if len(same) > 1 and any(self.program.leaves[n].written for n in same):
                raise self._shared(same)
        for n, m in overlapping(storages):
            if self.program.leaves[n].written or self.program.leaves[m].written:
                raise self._shared((n, m))

    def _shared(self, leaves: Sequence[int]) -> BindingError:
        names = " and ".join(leaf_name(self.leaves[n], n) for n in leaves)
        return BindingError(
            f"{names}: got the same memory for all of them, need separate storages, because the "
            "plan writes it"
        )

    def claims(self) -> tuple[Claim, ...]:
        """The locks of a pass, in the order of the storages' ids; its own buffers need none."""
        claims: dict[int, Claim] = {}
        for leaf, store in zip(self.program.leaves, self.storages, strict=True):
            if store is not None and not store.frozen and not self._is_private(store):
                written = leaf.written or (store.id in claims and claims[store.id][1])
                claims[store.id] = (store, written)
        return tuple(claims[i] for i in sorted(claims))

    def _is_private(self, store: Storage) -> bool:
        return any(store is s for s in self.inputs.values())


def distinct_names(names: Sequence[str]) -> list[str]:
    """The names, a repeated one with its position: nothing baked may hide behind its namesake."""
    return [f"{s}#{n}" if s in names[:n] else s for n, s in enumerate(names)]


def leaf_name(t: Tensor, n: int) -> str:
    """The user's name for a leaf, else its kind and position."""
    return t.name or f"{t.op.name}{n}"


def check_input(who: str, want: Spec, array: HostArray) -> None:
    """An array that is to be copied in must already have the declared shape and dtype."""
    if array.shape != want.shape or dtype(array.dtype) is not want.dtype:
        got = Spec(array.shape, dtype(array.dtype))
        raise BindingError(f"placeholder {who}: got {got}, need {want}; dtypes are never cast")
