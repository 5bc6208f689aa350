"""An op that a backend lists among its own runs there as itself, and not by its lowering."""

from collections.abc import Callable

import pytest

from lazykv.functions import attention, latent_attention, paged_attention, ring_attention
from lazykv.graph import Graph, Tensor
from lazykv.runtime.realize import plan
from lazykv.testing.target import Target


def some(g: Graph, *shape: int, dtype: str = "f32") -> Tensor:
    return g.placeholder(shape, dtype)


def paged(g: Graph) -> Tensor:
    pool = some(g, 3, 4, 2, 8)
    table, lens = some(g, 1, 2, dtype="u32"), some(g, 1, dtype="u32")
    return paged_attention(some(g, 1, 2, 1, 8), pool, pool, table, lens)


def ring(g: Graph) -> Tensor:
    q, kv, n = some(g, 1, 2, 1, 8), some(g, 1, 2, 6, 8), some(g, dtype="i64")
    return ring_attention(q, kv, kv, length=n, window=4)


# The plainest form of every op that has a lowering; of all others a missing kernel is an error.
FUSED: dict[str, Callable[[Graph], Tensor]] = {
    "silu": lambda g: some(g, 2, 8).silu(),
    "gelu": lambda g: some(g, 2, 8).gelu(),
    "softmax": lambda g: some(g, 2, 8).softmax(1),
    "rms_norm": lambda g: some(g, 2, 8).rms_norm(some(g, 8), 1e-5),
    "layer_norm": lambda g: some(g, 2, 8).layer_norm(some(g, 8), some(g, 8), 1e-5),
    "rope": lambda g: some(g, 1, 2, 4, 8).rope(some(g, 4, 4), some(g, 4, 4), False),
    "attention": lambda g: attention(some(g, 1, 2, 1, 8), some(g, 1, 2, 5, 8), some(g, 1, 2, 5, 8)),
    "ring_attention": ring,
    "latent_attention": lambda g: latent_attention(
        some(g, 1, 2, 1, 8), some(g, 1, 2, 1, 4), some(g, 5, 8), some(g, 5, 4), scale=0.3
    ),
    "paged_attention": paged,
}


@pytest.mark.parametrize("name", FUSED)
def test_it_runs_as_itself(target: Target, name: str) -> None:
    declared = target.backend.capabilities.ops
    if declared is None:
        pytest.skip(f"{target.name} lists no ops")
    if name not in declared:
        pytest.skip(f"{target.name} declares no {name}")
    made = plan(FUSED[name](Graph()), device=target.location)
    runs = [step.op.name for step in made.program.steps]
    assert name in runs, f"{name} is declared, and for f32 there is no kernel: it runs as {runs}"
