"""Plan and realize: from targets to arrays, through the structural cache."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lazykv.compiler.plan import Bindings, Plan
from lazykv.compiler.trace import trace
from lazykv.device import DeviceLike, device
from lazykv.errors import GraphError
from lazykv.graph import Tensor
from lazykv.ops.sources import Alloc
from lazykv.runtime.plan_cache import plan_cache
from lazykv.storage import Storage
from lazykv.symbols import EnvLike


def plan(
    targets: Tensor | Sequence[Tensor], bindings: Bindings | None = None,
    device: DeviceLike = "cpu", *, effects: Sequence[Tensor] = (),
    kept: Mapping[Tensor, Storage] | None = None,
) -> Plan:  # fmt: skip
    """Plan targets without running them.

    `bindings` maps placeholders to Storages (by reference) or arrays (copied in); placeholders left
    out are bound when the plan runs. `effects` are tensors that must be computed but are not handed
    back: writes into storages, and what `Plan.read` shall find after a pass, since nothing else
    gets their memory. `kept` gives the storages that `Alloc` nodes shall fill.
    """
    single = isinstance(targets, Tensor)
    outputs = _targets(targets)
    if not outputs and not effects:
        raise GraphError("plan: got no targets, need at least one")
    if bindings is not None and not isinstance(bindings, Mapping):
        raise GraphError(f"plan: got bindings {type(bindings).__name__}, need a mapping of Tensors")
    given = dict(bindings or {})
    for t in given:
        if not isinstance(t, Tensor):
            raise GraphError(f"plan: got a binding for {t!r}, need placeholder Tensors as keys")
    places = {t: v.location for t, v in given.items() if isinstance(v, Storage)}
    traced = trace(outputs, effects, places, _device(device).location)
    program = plan_cache.program(traced)
    leaves = [traced.origins[leaf.position] for leaf in program.leaves]
    made = Plan(program, leaves, traced.symbols, single=single, kept=kept, traced=traced.origins)
    for t, value in given.items():
        made.bind(t, value)
    return made


_device = device


def _targets(targets: Tensor | Sequence[Tensor]) -> list[Tensor]:
    if isinstance(targets, Tensor):
        return [targets]
    if not isinstance(targets, Iterable):
        raise GraphError(f"plan: got {targets!r}, need a Tensor or a list of them")
    return list(targets)


def realize(
    target_or_list: Tensor | Sequence[Tensor], bindings: Bindings | None = None,
    env: EnvLike = None, device: DeviceLike = "cpu",
) -> Any:  # fmt: skip
    """Compute what is asked for: one NumPy array for a tensor, a list of them for a list.

    Every bound, binding and shape is checked before the first kernel runs. Results are fresh.
    """
    asked = target_or_list
    wanted = asked if isinstance(asked, Tensor) else _targets(asked)
    if isinstance(wanted, list) and not wanted:
        return []
    return plan(wanted, bindings, device).run(env=env)


def run_effects(
    effects: Sequence[Tensor], bindings: Bindings | None = None, env: EnvLike = None
) -> None:
    """Run writes of a throwaway graph for what they do to storages; the graph is used up."""
    try:
        made = plan([], bindings, effects=effects)
        made.run(env=env)
    finally:
        effects[0].graph.drop_nodes()


def allocate(tensors: Sequence[Tensor]) -> list[Storage]:
    """Realize ``Alloc -> fill`` chains of a throwaway graph in one pass, each into a new storage
    that the caller keeps; the graph is used up.

    All storages are allocated before the first fill, so a failed allocation leaves nothing behind.
    """
    if not tensors:
        return []
    try:
        return _allocate(tensors)
    finally:
        tensors[0].graph.drop_nodes()


def _allocate(tensors: Sequence[Tensor]) -> list[Storage]:
    kept: dict[Tensor, Storage] = {}
    for t in tensors:
        source = t
        while not isinstance(source.op, Alloc):
            if source.op.destroys is None:
                raise GraphError(f"allocate: got {source!r}, need a chain of writes on an Alloc")
            source = source.inputs[source.op.destroys]
        kept[source] = Storage.allocate(source.shape, source.dtype, source.op.location)
    made = plan([], effects=list(tensors), kept=kept)
    made.run()
    return list(kept.values())
