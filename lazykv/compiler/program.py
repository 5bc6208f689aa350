"""Step 6: the compiled form of one graph structure, shared by every plan of that structure.

A `Program` is immutable and holds no data, no storages and no symbols: a flat list of steps over
registers, where every register says which buffer it lies in and how.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from lazykv.compiler.effects import clone_destinations
from lazykv.compiler.ir import IR, Node, Output, Place
from lazykv.compiler.kernels import find_kernel, no_kernel, scratch_of
from lazykv.compiler.memory import Interval, assign, last_uses
from lazykv.compiler.ordering import Edge, Order, order
from lazykv.compiler.placement import place
from lazykv.compiler.rewrite import rewrite
from lazykv.compiler.trace import Condition, Trace, stand_in
from lazykv.device import DeviceLocation, Kernel
from lazykv.layout import Layout
from lazykv.ops.op import Op
from lazykv.ops.sources import Alloc, Const, Placeholder
from lazykv.spec import Spec
from lazykv.symbols import Dim, Expr, ScalarSlot


class Home(Enum):
    """Which buffer a register lies in."""

    LEAF = "leaf"
    ARENA = "arena"


@dataclass(frozen=True, slots=True)
class Scalar:
    """An affine expression over symbol positions: ``const + sum(factor * symbols[position])``."""

    const: int
    terms: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Check:
    """``low <= scalars[slot] <= high``, tested before the first kernel of every pass."""

    slot: int
    low: int
    high: int
    who: str
    what: str


@dataclass(frozen=True, slots=True)
class Register:
    """One value of a program: `index` counts leaves, or is a byte offset into an arena."""

    home: Home
    index: int
    location: DeviceLocation
    spec: Spec
    layout: Layout
    node: int


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One kernel call. `inputs`, `output` and `scratch` are register numbers; the output of a
    result step is the input itself, whose bytes are handed to the caller."""

    op: Op
    kernel: Kernel | None
    inputs: tuple[int, ...]
    output: int
    scratch: tuple[int, ...]
    node: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """A buffer from outside: const data, a placeholder's binding, or an allocation that the caller
    keeps. `written` says that the program writes it in place, `position` which traced node it is,
    and `node` which of the program's."""

    op: Op
    spec: Spec
    location: DeviceLocation
    position: int
    node: int
    written: bool


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes of an arena that a node's result (or its kernel's scratch) holds from step `first` to
    step `last`, both included."""

    node: int
    scratch: bool
    location: DeviceLocation
    offset: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Program:
    """Everything that is the same for all graphs of one structure.

    `places` says where the bytes of each node are; `node_of` which node a traced one became (None:
    nothing needs it).
    """

    registers: tuple[Register, ...]
    steps: tuple[ProgramStep, ...]
    leaves: tuple[Leaf, ...]
    arenas: dict[DeviceLocation, int]
    scalars: tuple[Scalar, ...]
    checks: tuple[Check, ...]
    results: tuple[Spec, ...]
    nodes: tuple[Node, ...]
    places: tuple[Place, ...]
    node_of: tuple[int | None, ...]
    buffers: tuple[Buffer, ...]
    sequence: tuple[int, ...]
    edges: tuple[Edge, ...]
    copies: tuple[int, ...]
    key: tuple[object, ...]

    @property
    def generations(self) -> dict[str, int]:
        """Of every location by name, when the graph was traced."""
        traced_at: Any = self.key[-1]
        return dict(traced_at)

    @property
    def locations(self) -> tuple[DeviceLocation, ...]:
        """Every location the program touches, by name."""
        return tuple(sorted({r.location for r in self.registers}, key=str))

    @cached_property
    def unawaited(self) -> tuple[DeviceLocation, ...]:
        """The locations whose last step is no result: handing those out does not wait for it."""
        last = {self.registers[s.output].location: s.op for s in self.steps}
        return tuple(where for where, op in last.items() if not isinstance(op, Output))

    def register_left(self, node: int) -> int | None:
        """The register that still holds a node's value after a pass, or None if its bytes were used
        again (or if none ever held it)."""
        base = self.places[node].base
        scratch = {r for step in self.steps for r in step.scratch}
        mine = [n for n, r in enumerate(self.registers) if r.node == node and n not in scratch]
        # A view has seen the writes up to its version, and so holds them.
        version = self.places[node].version
        since = next((n for n, step in enumerate(self.steps) if step.node == version), -1)
        written_since = any(
            step.op.destroys is not None and self.places[step.node].base == base
            for step in self.steps[since + 1 :]
        )
        if not mine or written_since or self._overlaid(base):
            return None
        return mine[0]

    def _overlaid(self, base: int) -> bool:
        """Whether a later intermediate got bytes of a node's own buffer."""
        own = next((b for b in self.buffers if b.node == base and not b.scratch), None)
        return own is not None and any(
            b is not own
            and b.location == own.location
            and b.first > own.first
            and b.offset < own.offset + own.nbytes
            and own.offset < b.offset + b.nbytes
            for b in self.buffers
        )

    @property
    def arena_bytes(self) -> int:
        return sum(self.arenas.values())

    @property
    def result_bytes(self) -> int:
        return sum(s.nbytes for s in self.results)


def compile_trace(traced: Trace) -> Program:
    """Run the compiler on a traced graph. Raises typed errors for what cannot run anywhere."""
    ir, moved = place(traced.ir, traced.device)
    ir, moved = _chain(moved, rewrite(ir))
    outputs = [moved[i] for i in traced.outputs]
    for position, target in enumerate(outputs):
        node = ir[target]
        ir.add(Node(Output(position), (target,), node.spec, node.location, node.origin))
    ir, kept = _reachable(ir, [moved[i] for i in traced.effects])
    ir, cloned = clone_destinations(ir)
    node_of = tuple(cloned[kept[i]] if i in kept else None for i in moved)
    return _Assembler(order(ir), traced, node_of).program()


def _chain(first: list[int], second: tuple[IR, list[int]]) -> tuple[IR, list[int]]:
    ir, moved = second
    return ir, [moved[i] for i in first]


def _reachable(ir: IR, effects: Sequence[int]) -> tuple[IR, dict[int, int]]:
    """Drop nodes that rewriting left without a use; leaves and targets stay, of a snapshot those
    that are used. Also where the others went."""
    keep = {i for i, n in enumerate(ir.nodes) if isinstance(n.op, Output)} | set(effects)
    for index in range(len(ir) - 1, -1, -1):
        if index in keep:
            keep.update(ir[index].inputs)
    used = {ir[i].origin for i in keep if isinstance(ir[i].op, Const)}
    for index, node in enumerate(ir.nodes):
        if isinstance(node.op, Const | Placeholder | Alloc) and node.origin not in used:
            keep.add(index)
    out, moved = IR(), dict[int, int]()
    for index, node in enumerate(ir.nodes):
        if index in keep:
            inputs = tuple(moved[i] for i in node.inputs)
            moved[index] = out.add(
                Node(node.op, inputs, node.spec, node.location, node.origin, node.reason)
            )
    return out, moved


class _Assembler:
    """Turns an ordered IR into registers and steps."""

    def __init__(self, order: Order, traced: Trace, node_of: tuple[int | None, ...]) -> None:
        self.order = order
        self.traced = traced
        self.node_of = node_of
        self.buffers: list[Buffer] = []
        self.ir = order.ir
        self.registers: list[Register] = []
        self.register_of: dict[int, int] = {}
        self.leaves: list[Leaf] = []
        self.leaf_of: dict[int, int] = {}
        self.positions = {stand_in(n, s.low, s.high): n for n, s in enumerate(traced.symbols)}
        self.scalars: dict[Scalar, int] = {}

    def slot(self, dim: Dim) -> ScalarSlot:
        """The scalar slot that holds an expression's value when the plan runs."""
        assert isinstance(dim, Expr), "numbers need no slot"
        terms = tuple((self.positions[s], c) for s, c in dim.terms)
        return ScalarSlot(self.scalars.setdefault(Scalar(dim.const, terms), len(self.scalars)))

    def check(self, c: Condition) -> Check:
        b = c.bound
        return Check(self.slot(b.value).index, b.low, b.high, c.who, b.what)

    def program(self) -> Program:
        runs = [i for i in self.order.sequence if self._needs_kernel(i)]
        kernels = {i: self._kernel(i) for i in runs}
        scratch = {i: self._scratch(i, kernels[i]) for i in runs}
        self._find_leaves()
        offsets, arenas = self._memory(runs, scratch)
        steps = tuple(self._step(i, kernels[i], scratch[i], offsets) for i in runs)
        for i in self._effects():  # a view that no step reads has a place too
            self._register(i, offsets)
        results = [n for n in self.ir.nodes if isinstance(n.op, Output)]
        checks = tuple(self.check(c) for c in self.traced.conditions)
        return Program(
            registers=tuple(self.registers),
            steps=steps,
            leaves=tuple(self.leaves),
            arenas=arenas,
            scalars=tuple(self.scalars),
            checks=checks,
            results=tuple(n.spec for n in results),
            nodes=tuple(self.ir.nodes),
            places=tuple(self.order.where),
            node_of=self.node_of,
            buffers=tuple(self.buffers),
            sequence=tuple(self.order.sequence),
            edges=tuple(self.order.edges),
            copies=tuple(self.order.copies),
            key=self.traced.key,
        )

    def _needs_kernel(self, index: int) -> bool:
        node, where = self.ir[index], self.order.where
        if isinstance(node.op, Const | Placeholder | Alloc):
            return False
        return node.op.destroys is not None or where[index].base == index

    def _effects(self) -> list[int]:
        kept = (self.node_of[i] for i in self.traced.effects)
        return [i for i in kept if i is not None]

    def _specs(self, index: int) -> tuple[Spec, ...]:
        return tuple(self.ir[i].spec for i in self.ir[index].inputs)

    def _kernel(self, index: int) -> Kernel | None:
        node = self.ir[index]
        if isinstance(node.op, Output):
            return None
        specs = self._specs(index)
        kernel = find_kernel(node.location, node.op, specs, node.spec)
        if kernel is None:  # of a copy that keeps old bytes: all others have been asked for
            raise no_kernel(node.location, node.op, specs)
        return kernel

    def _scratch(self, index: int, kernel: Kernel | None) -> tuple[Spec, ...]:
        if kernel is None:
            return ()
        node = self.ir[index]
        return scratch_of(node.location, kernel, node.op, self._specs(index), node.spec)

    def _find_leaves(self) -> None:
        """Leaves in the order of the nodes, a snapshot once for each location that uses it."""
        where = self.order.where
        written = {where[i].base for i, n in enumerate(self.ir.nodes) if n.op.destroys is not None}
        for index, node in enumerate(self.ir.nodes):
            if isinstance(node.op, Const | Placeholder | Alloc):
                assert node.origin is not None, "the compiler makes no leaves of its own"
                self.leaf_of[index] = len(self.leaves)
                self.leaves.append(
                    Leaf(node.op, node.spec, node.location, node.origin, index, index in written)
                )

    def _memory(
        self, runs: list[int], scratch: dict[int, tuple[Spec, ...]]
    ) -> tuple[dict[tuple[int, int], int], dict[DeviceLocation, int]]:
        where, step_of = self.order.where, {index: n for n, index in enumerate(runs)}
        last = last_uses(
            (step_of[i], [where[i].base, *(where[s].base for s in self.ir[i].inputs)]) for i in runs
        )
        # An effect can be read after the pass, so nothing gets its bytes.
        last.update((where[i].base, len(runs) - 1) for i in self._effects())
        offsets: dict[tuple[int, int], int] = {}
        arenas: dict[DeviceLocation, int] = {}
        for location in sorted({self.ir[i].location for i in runs}, key=str):
            wanted = [i for i in runs if self.ir[i].location == location]
            intervals = [
                Interval((i, 0), self.ir[i].spec.nbytes, step_of[i], last[i])
                for i in wanted
                if where[i].base == i and not isinstance(self.ir[i].op, Output)
            ]
            for i in wanted:
                intervals += [
                    Interval((i, 1 + n), s.nbytes, step_of[i], step_of[i])
                    for n, s in enumerate(scratch[i])
                ]
            part, arenas[location] = assign(intervals)
            offsets.update(part)
            self.buffers += [
                Buffer(iv.owner[0], iv.owner[1] > 0, location, part[iv.owner], iv.nbytes,
                       iv.first, iv.last)
                for iv in intervals
            ]  # fmt: skip
        return offsets, {place: size for place, size in arenas.items() if size}

    def _step(
        self, index: int, kernel: Kernel | None, scratch: tuple[Spec, ...],
        offsets: dict[tuple[int, int], int],
    ) -> ProgramStep:  # fmt: skip
        node = self.ir[index]
        inputs = tuple(self._register(i, offsets) for i in node.inputs)
        output = inputs[0] if isinstance(node.op, Output) else self._register(index, offsets)
        extra = []
        for n, spec in enumerate(scratch):
            layout = Layout.contiguous(spec.shape)
            extra.append(
                self._add(
                    Register(Home.ARENA, offsets[index, 1 + n], node.location, spec, layout, index)
                )
            )
        return ProgramStep(node.op.map_dims(self.slot), kernel, inputs, output, tuple(extra), index)

    def _register(self, index: int, offsets: dict[tuple[int, int], int]) -> int:
        if index not in self.register_of:
            place, node = self.order.where[index], self.ir[index]
            if place.base in self.leaf_of:
                home, at = Home.LEAF, self.leaf_of[place.base]
            else:
                home, at = Home.ARENA, offsets[place.base, 0]
            location, layout = self.ir[place.base].location, place.layout
            if isinstance(layout.offset, Expr):
                layout = Layout(self.slot(layout.offset), layout.shape, layout.strides)
            self.register_of[index] = self._add(
                Register(home, at, location, node.spec, layout, index)
            )
        return self.register_of[index]

    def _add(self, register: Register) -> int:
        self.registers.append(register)
        return len(self.registers) - 1
