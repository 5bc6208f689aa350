"""Plan: a program with its data, its memory and its calls resolved, ready to run many times."""

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from lazykv import config, counters
from lazykv.compiler.captured import CapturedCalls
from lazykv.compiler.failures import account, step_of_op, tear
from lazykv.compiler.manifest import Manifest
from lazykv.compiler.program import Program, ProgramStep
from lazykv.compiler.registers import Registers, Staged
from lazykv.compiler.row_watch import RowWatch
from lazykv.device import (
    HostArray,
    Step,
    device,
    generation,
    host_array,
    registry,
)
from lazykv.dtypes import dtype, to_logical, to_raw
from lazykv.errors import (
    BindingError,
    GraphError,
    KernelError,
    LazyKvError,
    RangeError,
    SessionBusy,
    SymbolError,
    TopologyChanged,
)
from lazykv.graph import Tensor
from lazykv.ids import PlanId, next_plan_id
from lazykv.ops.sources import Alloc, Placeholder
from lazykv.spec import Spec
from lazykv.storage import Claim, Storage, acquire_all, overlapping, release_all
from lazykv.symbols import EnvLike, Sym, SymEnv, as_int

Bindings: TypeAlias = Mapping[Tensor, Any]


class Plan:
    """A compiled graph that can be run again with other data.

    `run` takes placeholder bindings (Storages by reference, arrays copied in) and symbol values,
    and returns fresh NumPy arrays. One plan runs in one thread at a time; a second concurrent call
    raises `SessionBusy`.
    """

    def __init__(
        self, program: Program, leaves: Sequence[Tensor], symbols: Sequence[Sym], *,
        single: bool = False, kept: Mapping[Tensor, Storage] | None = None,
        traced: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        self.id: PlanId = next_plan_id()
        self.program = program
        self.leaves = tuple(leaves)
        self.symbols = tuple(symbols)
        self.single = single
        self.runs = 0
        self._position = {t: n for n, t in enumerate(self.leaves)}
        # By id: a plan does not keep the nodes of its graph.
        self._traced = tuple(t.node_id for t in traced)
        self._storages: list[Storage | None] = [None] * len(self.leaves)
        self._inputs: dict[int, Storage] = {}
        self._refills: dict[int, HostArray] = {}
        self._values = [0] * len(self.symbols)
        self.running = threading.Lock()
        # False where a failed write can have touched only rows that nobody counts.
        self.tears = True
        self._registers = Registers(program)
        self._calls: list[Step] = []
        self._captured: CapturedCalls | None = None
        self._claims: tuple[Claim, ...] = ()
        self._watch: RowWatch | None = None
        self._stale = set(range(len(self.leaves)))
        self._epoch = registry.epoch
        self._generations = {place: generation(place) for place in program.locations}
        self._bytes_moved = sum(_moved(program, s) for s in program.steps)
        for n, t in enumerate(self.leaves):
            if t.data is not None:
                self._storages[n] = t.data
            elif isinstance(t.op, Alloc):
                self._storages[n] = (kept or {}).get(t) or Storage.allocate(
                    t.shape, t.dtype, t.op.location
                )
        if not self.leaves:  # nothing will ever be bound
            self._commit(self._registers.stage((), ()))

    # What a plan is

    @property
    def steps(self) -> tuple[ProgramStep, ...]:
        """The kernel calls in order, over integer registers."""
        return self.program.steps

    @property
    def node_count(self) -> int:
        return len(self.program.nodes)

    @property
    def peak_bytes(self) -> int:
        """Bytes one run holds beyond the storages bound to it: the arenas of intermediates and
        scratch, copied-in inputs (a placeholder with no binding yet counts as one), private
        allocations and the results. A kernel that runs an op's portable body takes temporary
        arrays of its own on top while it runs."""
        own = sum(s.nbytes for s in self._inputs.values())
        own += sum(
            t.spec.nbytes
            for t, s in zip(self.leaves, self._storages, strict=True)
            if s is None and isinstance(t.op, Placeholder)
        )
        for t, s in zip(self.leaves, self._storages, strict=True):
            own += s.nbytes if s is not None and isinstance(t.op, Alloc) else 0
        return self.program.arena_bytes + self.program.result_bytes + own

    @property
    def manifest(self) -> Manifest:
        """What is baked (by name) and what is bound."""
        baked: dict[str, object] = {"structure": self.structure}
        bound: dict[str, str] = {}
        leaves = distinct_names([leaf_name(t, n) for n, t in enumerate(self.leaves)])
        for n, (name, t, s) in enumerate(zip(leaves, self.leaves, self._storages, strict=True)):
            if s is not None and n not in self._inputs:
                baked[f"storage:{name}"] = int(s.id)
            elif isinstance(t.op, Placeholder):
                bound[name] = str(t.spec)
        for place, count in self._generations.items():
            baked[f"generation:{place}"] = count
        for name, sym in zip(
            distinct_names([s.name for s in self.symbols]), self.symbols, strict=True
        ):
            baked[f"range:{name}"] = (sym.low, sym.high)
            bound[name] = "symbol"
        return Manifest(baked, bound)

    @property
    def structure(self) -> str:
        """A digest of the structural key, equal in every process (so without its generations)."""
        return hashlib.sha256(repr(self.program.key[:-1]).encode()).hexdigest()[:16]

    def describe(self) -> str:
        """A few lines for people; `lazykv plan` prints more."""
        p = self.program
        lines = [
            f"plan {self.id}: {len(p.steps)} steps, {len(p.nodes)} nodes, {len(p.edges)} ordering "
            f"edges, {len(p.copies)} safety copies, arena {p.arena_bytes} bytes, peak "
            f"{self.peak_bytes} bytes"
        ]
        for n, step in enumerate(p.steps):
            ins = ", ".join(f"r{i}:{p.registers[i].spec}" for i in step.inputs)
            lines.append(f"  {n}: r{step.output} = {step.op.name}({ins})")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Plan(id={self.id}, {len(self.program.steps)} steps, runs={self.runs})"

    # Binding

    def bind(self, tensor: Tensor, value: object) -> None:
        """Bind a placeholder: a Storage by reference, anything else copied in.

        A tensor the plan does not need is ignored. Raises `BindingError` unless shape, dtype and
        location are what the placeholder declares; nothing is cast.
        """
        n = self._position.get(tensor)
        if n is not None:
            self._bind(n, self.check_binding(n, value))

    def check_binding(self, n: int, value: object) -> Storage | HostArray:
        """What a leaf may be bound to: the storage itself, or a host array in raw dtype."""
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

    def _bind(self, n: int, value: Storage | HostArray) -> None:
        if isinstance(value, Storage):
            self._inputs.pop(n, None)
            self._refills.pop(n, None)
            if self._storages[n] is not value:
                self._storages[n] = value
                self._stale.add(n)
            return
        store = self.input_storage(n)
        if self.program.leaves[n].written:
            self._refills[n] = np.array(value)
            return
        with store.write() as dest:
            device(store.location).backend.copy_in(dest, value)

    def storage_of(self, tensor: Tensor) -> Storage:
        """The storage bound to a leaf now; BindingError if it has none or is not of this plan."""
        store = self._storages[self._position[tensor]] if tensor in self._position else None
        if store is None:
            raise BindingError(f"plan {self.id}: got {tensor!r}, need a bound leaf of the plan")
        return store

    def input_buffer(self, n: int) -> Storage:
        """Memory for a placeholder that takes arrays, made once; not bound by this."""
        leaf = self.program.leaves[n]
        if n not in self._inputs:
            self._inputs[n] = Storage.allocate(leaf.spec.shape, leaf.spec.dtype, leaf.location)
        return self._inputs[n]

    def input_storage(self, n: int) -> Storage:
        """The plan's own buffer for a placeholder that takes arrays, bound to it."""
        self.input_buffer(n)
        if self._storages[n] is not self._inputs[n]:
            self._storages[n] = self._inputs[n]
            self._stale.add(n)
        return self._inputs[n]

    def resolve(self) -> None:
        """Make the calls for leaves whose storage changed; everything is checked first."""
        if self._stale:
            self._check_bindings(self._storages)
            self._commit(self._registers.stage(self._storages, self._stale))

    def rebind(self, storages: Mapping[Tensor, Storage]) -> None:
        """Bind other storages to placeholders, all of them or none.

        Raises `BindingError` like `bind`, with everything as it was.
        """
        asked = {self._position[t]: s for t, s in storages.items() if t in self._position}
        for n, store in asked.items():
            self.check_binding(n, store)
        changed = {n: s for n, s in asked.items() if self._storages[n] is not s}
        after = [changed.get(n, store) for n, store in enumerate(self._storages)]
        self._check_bindings(after)
        staged = self._registers.stage(after, {*changed, *self._stale})
        for n in changed:
            self._inputs.pop(n, None)
            self._refills.pop(n, None)
        self._storages = after
        self._commit(staged)

    def _commit(self, staged: Staged) -> None:
        self._captured = None  # it refers to the old memory
        self._calls = self._registers.commit(staged)
        self._claims = self._make_claims()
        if config.POISON:
            self._watch = RowWatch(self.program, self._storages, self._registers)
        self._stale.clear()

    def _check_bindings(self, storages: Sequence[Storage | None]) -> None:
        users: dict[int, list[int]] = {}
        for n, store in enumerate(storages):
            name = leaf_name(self.leaves[n], n)
            if store is None:
                raise BindingError(
                    f"placeholder {name}: got no binding, need {self.leaves[n].spec}"
                )
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

    def _make_claims(self) -> tuple[Claim, ...]:
        claims: dict[int, Claim] = {}
        for leaf, store in zip(self.program.leaves, self._storages, strict=True):
            if store is not None and not store.frozen and not self._is_private(store):
                written = leaf.written or (store.id in claims and claims[store.id][1])
                claims[store.id] = (store, written)
        return tuple(claims[i] for i in sorted(claims))

    def _is_private(self, store: Storage) -> bool:
        return any(store is s for s in self._inputs.values())

    # Capture

    @property
    def captured(self) -> bool:
        """Whether passes replay a recording."""
        return self._captured is not None

    def capture(self) -> None:
        """Record the calls, so that every later pass replays them at once.

        Nothing runs. Raises `CaptureError` if this plan or its backend cannot be captured. Binding
        another storage drops the recording, and so does `drop_capture`.
        """
        self.check_topology()
        self.resolve()
        self._captured = CapturedCalls(self.program, self._registers, self.symbols, self._storages)

    def drop_capture(self) -> None:
        """Walk the calls again from the next pass on."""
        self._captured = None

    def read(self, tensor: Tensor) -> HostArray:
        """What a node held in the last pass, a fresh copy; GraphError if nothing computes it or if
        its memory has been used again since."""
        if tensor.node_id not in self._traced:
            raise GraphError(f"plan {self.id}: got {tensor!r}, need a node that it was made from")
        node = self.program.node_of[self._traced.index(tensor.node_id)]
        register = None if node is None else self.program.register_left(node)
        if register is None:
            raise GraphError(
                f"plan {self.id}: got {tensor!r}, whose memory was used again or which became part "
                "of another node, need one that is left; make it a target"
            )
        return self._registers.copy_out(register)

    # Running

    def run(self, bindings: Bindings | None = None, env: EnvLike = None) -> Any:
        """Bind, check, run; returns one fresh array, or a list if the plan was made for a list."""
        if not self.running.acquire(blocking=False):
            raise SessionBusy(
                f"plan {self.id}: got a call while it runs, need one thread at a time"
            )
        try:
            if bindings is not None and not isinstance(bindings, Mapping):
                got = type(bindings).__name__
                raise BindingError(f"plan {self.id}: got bindings {got}, need a mapping of Tensors")
            needed = [(self._position[t], v) for t, v in (bindings or {}).items()
                      if t in self._position]  # fmt: skip
            checked = [(n, self.check_binding(n, value)) for n, value in needed]
            self.set_symbols(env)
            if checked:
                self._check_bindings(self._after(checked))
            for n, value in checked:
                self._bind(n, value)
            results = self.execute()
        finally:
            self.running.release()
        return results[0] if self.single else results

    def _after(self, bindings: Sequence[tuple[int, Storage | HostArray]]) -> list[Storage | None]:
        """The storages that binding these would leave."""
        after = list(self._storages)
        for n, value in bindings:
            after[n] = value if isinstance(value, Storage) else self.input_buffer(n)
        return after

    def set_symbols(self, env: EnvLike) -> None:
        """Take symbol values and check every condition on them; nothing has run yet."""
        given: Any = env._values if isinstance(env, SymEnv) else {} if env is None else env
        if type(given) is not dict and not isinstance(given, Mapping):
            raise SymbolError(f"env: got {type(env).__name__}, need a SymEnv or a mapping of Syms")
        values, scalars = self._values, self._registers.scalars
        for n, sym in enumerate(self.symbols):
            if sym not in given:
                raise SymbolError(f"symbol {sym.name!r}: got no value, need one in env")
            value = given[sym]
            if type(value) is not int:
                value = as_int(f"symbol {sym.name!r}", value)
            if value < sym.low or (sym.high is not None and value > sym.high):
                sym.check(value)
            values[n] = value
        for slot, scalar in enumerate(self.program.scalars):
            total = scalar.const
            for n, factor in scalar.terms:
                total += factor * values[n]
            scalars[slot] = total
        for c in self.program.checks:
            if not c.low <= scalars[c.slot] <= c.high:
                raise _out_of_bounds(c.who, c.what, scalars[c.slot], c.low, c.high)

    def execute(self) -> list[HostArray]:
        """Walk the calls with the storages locked; bindings and symbols are in place."""
        if self._epoch != registry.epoch:
            self.check_topology()
        if self._stale:
            self.resolve()
        for n, data in self._refills.items():  # the last pass wrote into these inputs
            store = self._inputs[n]
            device(store.location).backend.copy_in(store.array, data)
        claims = self._claims
        acquire_all(claims)
        try:
            if self._watch is not None:
                self._watch.begin()
            calls = iter(self._calls if self._captured is None else [(self._captured.replay, ())])
            try:
                with np.errstate(all="ignore"):  # inf and NaN are results, not news
                    for f, args in calls:
                        f(*args)
            except BaseException as e:
                error = self._failed(e, calls)
                if error is e:
                    raise
                raise error from e
            for store, written in claims:
                if written:
                    store.version += 1
            if self._watch is not None:
                self._watch.end()
        finally:
            release_all(claims)
        self.runs += 1
        counters.add(kernels_run=len(self.program.steps), bytes_moved=self._bytes_moved)
        results = self._registers.take_results()
        return [
            to_logical(array, spec.dtype)
            for array, spec in zip(results, self.program.results, strict=True)
        ]

    def synchronize(self) -> None:
        """Wait for the passes so far; raises the first failure of work that was still queued.

        Results wait by themselves. This is for passes that are run for what they write.
        """
        try:
            for place in self.program.locations:
                device(place).backend.synchronize(place)
        except KernelError as e:
            step = step_of_op(self.program, e.op)
            if step is not None and self.tears:
                tear(self.program, self._storages, step)
            raise

    def check_topology(self) -> None:
        """Refuse to run against another backend than the one planned for."""
        for place, planned in self._generations.items():
            now = generation(place)
            if now != planned:
                raise TopologyChanged(
                    f"plan {self.id}: got generation {now} of {place}, need {planned}; plan again"
                )
        self._epoch = registry.epoch

    def _failed(self, e: BaseException, calls: Iterator[Step]) -> BaseException:
        """The error to raise, once the storages written so far are accounted for."""
        left = calls.__length_hint__()  # type: ignore[attr-defined]
        step_at = self._registers.step_of_call(len(self._calls) - left - 1)
        self._registers.take_results()
        return account(e, self.program, self._storages, step_at, tears=self.tears)


def _out_of_bounds(who: str, what: str, value: int, low: int, high: int) -> LazyKvError:
    return RangeError(f"{who}: got {what} = {value}, need {low} <= value <= {high}")


def _moved(program: Program, step: ProgramStep) -> int:
    """Bytes a step moves: what a write, a copy or a result carries; arithmetic moves none."""
    if not step.op.bits:
        return 0
    if step.op.destroys is not None and len(step.inputs) > 1:
        return program.registers[step.inputs[1]].spec.nbytes
    return program.registers[step.output].spec.nbytes


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
