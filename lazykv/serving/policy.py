"""What a policy sees and decides: who runs, who waits, who gives way."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from lazykv.ids import RequestId


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request as a policy sees it.

    `rows` counts the tokens whose keys and values are there, evicted ones included. `blocks_held`
    are its blocks in the pool, shared ones included; `blocks_needed` those it takes until its next
    token is chosen. While it waits that is all of its prompt: what the prefix index spares it is
    known when it is admitted.
    """

    id: RequestId
    prompt_tokens: int
    new_tokens: int
    rows: int
    blocks_held: int
    blocks_needed: int


@dataclass(frozen=True, slots=True)
class View:
    """An engine between two steps. `waiting` is in the order of submission, `running` in that of
    admission, `preempted` in that of preemption.

    With `blocks_short` above 0 a step of a running request does not fit, and the answer must name
    whom to preempt.
    """

    waiting: tuple[RequestView, ...]
    running: tuple[RequestView, ...]
    preempted: tuple[RequestView, ...]
    free_blocks: int
    capacity: int
    max_batch: int
    blocks_short: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do in this round, by ids.

    `preempt` names running requests whose blocks are stored and freed. `admit` names waiting and
    preempted ones in the order in which they start or go on: the engine takes them up while they
    fit beside those that run, with `spare` blocks left over, and leaves the rest for later rounds.
    """

    admit: tuple[RequestId, ...] = ()
    preempt: tuple[RequestId, ...] = ()
    spare: int = 0


Policy: TypeAlias = Callable[[View], Decision]
"""Called once a round, and again whenever blocks run short. It must not call the engine."""


def first_come_first_served(view: View) -> Decision:
    """The oldest requests run; when blocks run short, the youngest running one gives way.

    A block is spared for each request that runs, so that nobody is admitted only to be preempted
    at the next block's beginning.
    """
    if view.blocks_short:
        return Decision(preempt=(max(r.id for r in view.running),))
    line = sorted(r.id for r in (*view.preempted, *view.waiting[: view.max_batch]))
    admit = line[: view.max_batch - len(view.running)]
    return Decision(admit=tuple(admit), spare=len(view.running))
