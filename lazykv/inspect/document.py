"""What a dump says about a graph and its plan, as plain values; `docs/dump-format.md` explains it.

Nothing here depends on the process: nodes are named by their place in the graph (``%0``), and
identities such as storage ids are left out.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA = "lazykv.graph/1"


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. `inputs`, `view_of`, `buffer` and `version` are ids of nodes.

    `destroys` is the position of the input that is overwritten in place. `buffer` is the node that
    owns the bytes, `version` the last write those bytes have seen (or the owner itself), and
    `view_of` is the input whose bytes a view names. `layer` is the number in the name of the data
    that the node works on, if that is how the graph is named.
    """

    id: str
    op: str
    name: str | None
    params: dict[str, Any]
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    location: str
    destroys: int | None
    view_of: str | None
    buffer: str
    version: str
    layer: int | None

    @property
    def spec(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def is_leaf(self) -> bool:
        """Whether the bytes come from outside the plan."""
        return self.op in ("const", "placeholder", "alloc")


@dataclass(frozen=True, slots=True)
class GraphNode(Node):
    """A node as built. `planned_as` is the plan's node for it; None if the plan needs none."""

    planned_as: str | None


@dataclass(frozen=True, slots=True)
class PlanNode(Node):
    """A node that is planned. `origin` is the graph's node it was made from. `added` tells what the
    compiler made it for (None: it was built): ``lowering``, ``placement``, ``clone``, ``safety`` or
    ``result``; `reason` says why."""

    origin: str | None
    added: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Symbol:
    """An integer that is known when the plan runs, within ``low..high`` (None: no limit)."""

    name: str
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Graph:
    """The part of a graph that the targets need, in build order. `targets` are handed back to the
    caller, `effects` are writes that only have to happen."""

    nodes: tuple[GraphNode, ...]
    targets: tuple[str, ...]
    effects: tuple[str, ...]
    symbols: tuple[Symbol, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """`before` runs before `after` although its result is not an input of it."""

    before: str
    after: str
    reason: str


@dataclass(frozen=True, slots=True)
class Leaf:
    """A buffer from outside the plan. `kind` is the op of its node; `written` says that the plan
    overwrites it in place."""

    name: str
    node: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    location: str
    written: bool


@dataclass(frozen=True, slots=True)
class Register:
    """Where a step finds a value: in a leaf (by name) or at a byte offset of an arena, and there
    at `offset` with `strides`, in elements. `node` is the value; for scratch, the one using it."""

    id: str
    leaf: str | None
    arena_offset: int | None
    location: str
    shape: tuple[int, ...]
    dtype: str
    offset: int | str
    strides: tuple[int, ...]
    node: str


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel call over registers. A write's output is the register of what it overwrites."""

    index: int
    op: str
    params: dict[str, Any]
    inputs: tuple[str, ...]
    output: str
    scratch: tuple[str, ...]
    node: str


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes of an arena held by a node's result (or its kernel's scratch), steps `first` to `last`,
    both included."""

    location: str
    offset: int
    nbytes: int
    first: int
    last: int
    node: str
    scratch: bool


@dataclass(frozen=True, slots=True)
class Check:
    """``low <= value <= high``, tested before the first step of every run."""

    op: str
    what: str
    value: str
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """`baked` facts that must be equal for a plan to be reused (None: an identity, which means
    something only within its process) and what is `bound` at every run."""

    baked: dict[str, Any]
    bound: dict[str, str]


@dataclass(frozen=True, slots=True)
class Plan:
    """The compiled form. `nodes` are listed as the compiler holds them, `steps` as they run."""

    structure: str
    nodes: tuple[PlanNode, ...]
    edges: tuple[Edge, ...]
    leaves: tuple[Leaf, ...]
    registers: tuple[Register, ...]
    steps: tuple[Step, ...]
    arenas: dict[str, int]
    buffers: tuple[Buffer, ...]
    checks: tuple[Check, ...]
    result_bytes: int
    peak_bytes: int
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Document:
    """A graph and the plan made for it."""

    title: str
    graph: Graph
    plan: Plan

    def to_dict(self) -> dict[str, Any]:
        """The dump as JSON values, in a fixed order; `graph.schema.json` is its schema."""
        return {"schema": SCHEMA, **asdict(self)}

    def to_json(self) -> str:
        """The dump as JSON text, the same bytes in every process for the same graph."""
        return _pretty(self.to_dict(), "") + "\n"


def _pretty(value: Any, pad: str) -> str:
    """JSON with one line an entry: a node, a step, a buffer."""
    inner = pad + " "
    if isinstance(value, dict) and value:
        entries = [f"{inner}{_compact(key)}: {_pretty(v, inner)}" for key, v in value.items()]
        return "{\n" + ",\n".join(entries) + f"\n{pad}}}"
    if isinstance(value, tuple | list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(inner + _compact(v) for v in value) + f"\n{pad}]"
    return _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)
