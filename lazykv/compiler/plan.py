"""Plan: a program with its data, its memory and its calls resolved, ready to run many times."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, TypeAlias

import numpy as np

from lazykv import config, counters
from lazykv.backend_call import BackendCall
from lazykv.compiler.bindings import LeafBindings, distinct_names, leaf_name
from lazykv.compiler.captured import CapturedCalls
from lazykv.compiler.failures import account
from lazykv.compiler.manifest import Manifest
from lazykv.compiler.program import Home, Program, ProgramStep
from lazykv.compiler.registers import Registers, Staged
from lazykv.compiler.row_watch import RowWatch
from lazykv.device import (
    HostArray,
    Step,
    device,
    generation,
    registry,
)
from lazykv.dtypes import to_logical
from lazykv.errors import (
    BindingError,
    GraphError,
    LazyKvError,
    RangeError,
    SymbolError,
    TopologyChanged,
)
from lazykv.graph import Tensor
from lazykv.ids import PlanId, next_plan_id
from lazykv.locks import new_hold
from lazykv.ops.sources import Placeholder
from lazykv.owner import Owner
from lazykv.storage import Claim, Storage, acquire_all, release_all
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
        self._id = next_plan_id()
        self.program = program
        self.leaves = tuple(leaves)
        self.symbols = tuple(symbols)
        self.single = single
        self.runs = 0
        self._bound = LeafBindings(program, self.leaves, kept)
        # By id: a plan does not keep the nodes of its graph.
        self._traced = tuple(t.node_id for t in traced)
        self.running = Owner(nests=False)
        # False where a failed write can have touched only rows that nobody counts.
        self.tears = True
        # True once a session relies on what is bound, and feeds the inputs by itself.
        self.held = False
        self._registers = Registers(program)
        self._calls: list[Step] = []
        self._captured: CapturedCalls | None = None
        self._complete = False
        self._claims: tuple[Claim, ...] = ()
        self._watch: RowWatch | None = None
        # Those of when its graph was traced: a backend replaced since then is noticed by the first
        # pass, whose epoch differs.
        self._epoch = -1
        self._generations = {p: program.generations[p.name] for p in program.locations}
        self._waits = {p: device(p).backend.synchronize for p in program.locations}
        self._kernels = sum(s.kernel is not None for s in program.steps)
        self._bytes_moved = sum(_moved(program, s) for s in program.steps)
        if not self.leaves:  # nothing will ever be bound
            self._commit(self._registers.stage((), ()))

    # What a plan is

    @property
    def id(self) -> PlanId:
        return self._id

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
        return self.program.arena_bytes + self.program.result_bytes + self._bound.own_bytes

    @property
    def manifest(self) -> Manifest:
        """What is baked (by name) and what is bound."""
        baked: dict[str, object] = {"structure": self.structure}
        bound: dict[str, str] = {}
        leaves = distinct_names([leaf_name(t, n) for n, t in enumerate(self.leaves)])
        for n, (name, t, s) in enumerate(
            zip(leaves, self.leaves, self._bound.storages, strict=True)
        ):
            if s is not None and s is not self._bound.inputs.get(n):
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
        """A few lines for people, without the plan's number, so that they are the same for the same
        graph; `lazykv plan` prints more."""
        p = self.program
        lines = [
            f"plan: {len(p.steps)} steps, {len(p.nodes)} nodes, {len(p.edges)} ordering "
            f"edges, {len(p.copies)} safety copies, arena {p.arena_bytes} bytes, peak "
            f"{self.peak_bytes} bytes"
        ]
        for n, step in enumerate(p.steps):
            ins = ", ".join(f"r{i}:{p.registers[i].spec}" for i in step.inputs)
            lines.append(f"  {n}: r{step.output} = {step.op.name}({ins})")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Plan(id={self.id}, {len(self.program.steps)} steps, runs={self.runs})"

    def __reduce__(self) -> NoReturn:
        # Also what copy.copy asks for: two plans with one id would share memory and not know it.
        raise GraphError(f"{self!r}: got a copy or a pickle, need a plan made anew")

    # Binding

    def bind(self, tensor: Tensor, value: object) -> None:
        """Bind a placeholder: a Storage by reference, anything else copied in.

        A tensor the plan does not need is ignored. Raises `BindingError` unless shape, dtype and
        location are what the placeholder declares (nothing is cast), and if a session holds the
        plan; `SessionBusy` while it runs. After a copy that failed the placeholder has to be bound
        again.
        """
        n = self._bound.position.get(tensor)
        if n is not None:
            with self.alone("a binding"):
                self._refuse_held()
                admitted = self._bound.admit(n, value)
                self.check_current()
                self._complete = False
                self._bound.bind(n, admitted)

    def _refuse_held(self) -> None:
        if self.held:
            raise BindingError(
                f"plan {self.id}: got a binding, need none while a session holds it; use step and "
                "rebind_kv of the session"
            )

    def storage_of(self, tensor: Tensor) -> Storage:
        """The storage bound to a leaf now; BindingError if it has none, takes arrays, or is not of
        this plan."""
        n = self._bound.position.get(tensor)
        store = None if n is None else self._bound.storages[n]
        if store is None or store is self._bound.inputs.get(self._bound.position[tensor]):
            raise BindingError(
                f"plan {self.id}: got {tensor!r}, need a leaf of it that a storage is bound to"
            )
        return store

    def take_arrays(self, tensor: Tensor) -> None:
        """Bind a placeholder to a buffer of the plan's own, for arrays to come."""
        self._bound.input_storage(self._bound.position[tensor])

    def feeder(self, tensor: Tensor) -> Callable[[HostArray], object]:
        """What copies an array in raw dtype into the plan's own buffer for a placeholder.

        An input that passes move on by themselves is copied only where it differs from what the
        last one left (`carried`).
        """
        return self._bound.feeder(self._bound.position[tensor])

    def resolve(self) -> None:
        """Make the calls for leaves whose storage changed; everything is checked first."""
        bound = self._bound
        if bound.stale:
            bound.check(bound.storages)
            self._commit(self._registers.stage(bound.storages, bound.stale))

    def rebind(self, storages: Mapping[Tensor, Storage]) -> None:
        """Bind other storages to placeholders, all of them or none.

        Raises `BindingError` and `SessionBusy` like `bind`, with everything as it was.
        """
        with self.alone("a binding"):
            self.weld(storages)

    def weld(self, storages: Mapping[Tensor, Storage]) -> None:
        """`rebind`, for the thread that has the plan to itself already."""
        bound = self._bound
        asked = {bound.position[t]: s for t, s in storages.items() if t in bound.position}
        if not bound.inputs.keys().isdisjoint(asked):
            self._refuse_held()
        for n, store in asked.items():
            bound.admit(n, store)
        changed = {n: s for n, s in asked.items() if bound.storages[n] is not s}
        after = [changed.get(n, store) for n, store in enumerate(bound.storages)]
        bound.check(after)
        staged = self._registers.stage(after, {*changed, *bound.stale})
        bound.replace(after, list(changed))
        self._commit(staged)

    def _commit(self, staged: Staged) -> None:
        self._captured = None  # it refers to the old memory
        self._complete = False
        self._calls = self._registers.commit(staged)
        self._claims = self._bound.claims()
        if config.POISON:
            self._watch = RowWatch(self.program, self._bound.storages, self._registers)
        self._bound.stale.clear()

    # Capture

    @property
    def captured(self) -> bool:
        """Whether passes replay a recording."""
        return self._captured is not None

    def capture(self) -> None:
        """Record the calls, so that every later pass replays them at once.

        Nothing runs. Raises `CaptureError` if this plan or its backend cannot be captured, and
        `SessionBusy` while a pass runs. Binding another storage drops the recording, and so does
        `drop_capture`.
        """
        with self.alone("a capture"):
            self.record()

    def record(self) -> None:
        """`capture`, for the thread that has the plan to itself already."""
        self.check_topology()
        self.resolve()
        self._captured = CapturedCalls(self.program, self._registers, self.symbols)

    def drop_capture(self) -> None:
        """Walk the calls again from the next pass on."""
        self._captured = None

    def read(self, tensor: Tensor) -> HostArray:
        """What a node held in the last pass, a fresh copy; a bound storage is read as it is now.

        Raises GraphError if nothing computes the node, if its memory has been used again since, or
        if no pass has completed since data or symbols were given, and `SessionBusy` while one runs.
        """
        register = self._left(tensor)
        if register is None:
            how = "name it in `keep` when the session is built"
            raise GraphError(
                f"plan {self.id}: got {tensor!r}, whose memory was used again or which became part "
                "of another node, need one that is left; "
                f"{how if self.held else 'make it a target or an effect'}"
            )
        with self.alone("a read"):
            if not self._complete:
                raise GraphError(f"plan {self.id}: got a read of {tensor!r}, need a pass before it")
            at = self.program.registers[register]
            store = self._bound.storages[at.index] if at.home is Home.LEAF else None
            with nullcontext() if store is None else store.read():
                return self._registers.copy_out(register)

    def is_left(self, tensor: Tensor) -> bool:
        """Whether `read` can give this node after a pass; GraphError if it is not of the plan."""
        return self._left(tensor) is not None

    def _left(self, tensor: Tensor) -> int | None:
        if not isinstance(tensor, Tensor) or tensor.node_id not in self._traced:
            raise GraphError(f"plan {self.id}: got {tensor!r}, need a node that it was made from")
        node = self.program.node_of[self._traced.index(tensor.node_id)]
        return None if node is None else self.program.register_left(node)

    def alone(self, got: str) -> AbstractContextManager[None]:
        """Have the plan to oneself, or `SessionBusy`."""
        who, need = f"plan {self.id}", "one thread at a time"
        return self.running.hold(who, f"{got} while it runs", need)

    # Running

    def run(self, bindings: Bindings | None = None, env: EnvLike = None) -> Any:
        """Bind, check, run; returns one fresh array, or a list if the plan was made for a list.

        Arrays given to a pass that fails have to be given again.
        """
        with self.alone("a call"):
            self.check_current()
            if bindings is not None and not isinstance(bindings, Mapping):
                got = type(bindings).__name__
                raise BindingError(f"plan {self.id}: got bindings {got}, need a mapping of Tensors")
            at, bound = self._bound.position, self._bound
            needed = [(at[t], v) for t, v in (bindings or {}).items() if t in at]
            if needed:
                self._refuse_held()
            checked = [(n, bound.admit(n, value)) for n, value in needed]
            bound.check_change(checked)
            self.set_symbols(env)
            try:
                for n, value in checked:
                    self._complete = False
                    bound.put(n, value)
                results = self.execute()
            except BaseException:
                bound.unsure |= {n for n, v in checked if not isinstance(v, Storage)}
                raise
        return results[0] if self.single else results

    def set_symbols(self, env: EnvLike) -> None:
        """Take symbol values and check every condition on them; nothing has run yet."""
        given: Any = env._values if isinstance(env, SymEnv) else {} if env is None else env
        if type(given) is not dict and not isinstance(given, Mapping):
            raise SymbolError(f"env: got {type(env).__name__}, need a SymEnv or a mapping of Syms")
        values, scalars = [], []
        for sym in self.symbols:
            if sym not in given:
                raise SymbolError(f"symbol {sym.name!r}: got no value, need one in env")
            value = given[sym]
            if type(value) is not int:
                value = as_int(f"symbol {sym.name!r}", value)
            if value < sym.low or (sym.high is not None and value > sym.high):
                sym.check(value)
            values.append(value)
        for scalar in self.program.scalars:
            total = scalar.const
            for n, factor in scalar.terms:
                total += factor * values[n]
            scalars.append(total)
        for c in self.program.checks:
            if not c.low <= scalars[c.slot] <= c.high:
                raise _out_of_bounds(c.who, c.what, scalars[c.slot], c.low, c.high)
        self._complete = False  # views that move with a symbol are elsewhere now
        self._registers.scalars[:] = scalars

    def execute(self) -> list[HostArray]:
        """Walk the calls with the storages locked; bindings and symbols are in place."""
        self._prepare()
        carried = [(c, c.begin()) for c in self._bound.carried.values()]
        self._complete, recording = False, self._captured
        claims, hold = self._claims, new_hold()
        try:
            acquire_all(claims, hold)
            if self._watch is not None:
                self._watch.begin()
            calls = iter(self._calls if recording is None else [(recording.replay, ())])
            try:
                with np.errstate(all="ignore"):  # inf and NaN are results, not news
                    for f, args in calls:
                        f(*args)
                for place in self.program.unawaited:  # a pass tells the failures that are its own
                    self._waits[place](place)
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
            try:
                release_all(claims, hold)
            except BaseException:  # an interrupt: what was ended already stays so
                release_all(claims, hold)
                raise
        self.runs += 1
        self._complete = True
        counters.add(kernels_run=self._kernels, bytes_moved=self._bytes_moved)
        for c, left in carried:
            c.value = left
        results = self._registers.take_results()
        return [
            to_logical(array, spec.dtype)
            for array, spec in zip(results, self.program.results, strict=True)
        ]

    def _prepare(self) -> None:
        """Calls and inputs for the next pass, or the reason why there can be none."""
        self.check_current()
        if self._bound.stale:
            self.resolve()
        if self._bound.unsure:
            self._bound.check_inputs()
        if self._bound.refills:
            self._bound.refill()

    def _settle(self) -> list[LazyKvError]:
        """After a failure: wait for what was given before it, so that no later pass is told of it.
        Returns what failed as well, which is no news."""
        failed = []
        for place, wait in self._waits.items():
            try:
                with BackendCall(place, "synchronize"):
                    wait(place)
            except LazyKvError as e:
                failed.append(e)
        return failed

    def check_current(self) -> None:
        """`check_topology`, if any backend was registered since; before anything is copied."""
        if self._epoch != registry.epoch:
            self.check_topology()

    def check_topology(self) -> None:
        """Refuse to run against another backend than the one planned for."""
        epoch = registry.epoch
        for place, planned in self._generations.items():
            now = generation(place)
            if now != planned:
                raise TopologyChanged(
                    f"plan {self.id}: got generation {now} of {place}, need {planned}; plan again"
                )
        self._epoch = epoch

    def _failed(self, e: BaseException, calls: Iterator[Step]) -> BaseException:
        """The error to raise, once the storages written so far are accounted for."""
        left = calls.__length_hint__()  # type: ignore[attr-defined]
        step_at = self._registers.step_of_call(len(self._calls) - left - 1)
        self._registers.take_results()
        try:
            others = self._settle()
        except BaseException:  # interrupted again: what has run by now is not known
            for store, written in self._claims:
                store.torn |= written and self.tears
            raise
        return account(
            e, self.program, self._bound.storages, step_at, tears=self.tears, others=others
        )


def _out_of_bounds(who: str, what: str, value: int, low: int, high: int) -> LazyKvError:
    return RangeError(f"{who}: got {what} = {value}, need {low} <= value <= {high}")


def _moved(program: Program, step: ProgramStep) -> int:
    """Bytes a step moves: what a write, a copy or a result carries; arithmetic moves none."""
    if not step.op.bits:
        return 0
    if step.op.destroys is not None and len(step.inputs) > 1:
        return program.registers[step.inputs[1]].spec.nbytes
    return program.registers[step.output].spec.nbytes
