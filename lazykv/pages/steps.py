"""Steps over several sequences: room for all of them at once, and nothing moves until they end."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import SupportsIndex

from lazykv.errors import DTypeError, PoolError, RangeError, must
from lazykv.ids import FenceId, SessionHandle
from lazykv.pages.geometry import KvGeometry
from lazykv.pages.prefix_index import Digest, sha256
from lazykv.pages.sequence import Sequence
from lazykv.pages.shared import locked
from lazykv.pages.sharing import SharingPool


@dataclass(frozen=True, slots=True)
class PoolStep:
    """A step that computes `tokens` more rows of each session; `starts` are their fills before."""

    sessions: tuple[SessionHandle, ...]
    starts: tuple[int, ...]
    tokens: int
    fence: FenceId
    owner: object = None


def as_sessions(who: str, sessions: Iterable[SessionHandle]) -> list[SessionHandle]:
    """A caller's several sessions, of whatever pool."""
    if isinstance(sessions, SessionHandle) or not isinstance(sessions, Iterable):
        raise DTypeError(f"{who}: got {sessions!r}, need a list of sessions")
    return list(sessions)


class SteppedPool(SharingPool):
    """Steps: `begin_step`, then `end_step` once the rows are there or `cancel_step`.

    Meanwhile the sessions refuse every change with `SessionBusy`, but for `discard`; the blocks it
    releases are handed out only when the step is over.
    """

    def __init__(self, geometry: KvGeometry, *, digest: Digest = sha256) -> None:
        super().__init__(geometry, digest=digest)
        self._steps: dict[FenceId, PoolStep] = {}

    # Hooks of a pool of bytes

    def _on_written(self, seq: Sequence, start: int) -> None:
        """The rows of a sequence from `start` on are in its blocks."""

    @locked
    def step_required(self, sessions: Iterable[SessionHandle], n: SupportsIndex) -> int:
        """Blocks that ``begin_step(sessions, n)`` takes."""
        who = "step_required"
        seqs = [self._find(who, s) for s in as_sessions(who, sessions)]
        return self._required_together(who, seqs, self._count(who, "n", n))

    @locked
    def begin_step(
        self, sessions: Iterable[SessionHandle], n: SupportsIndex, *, owner: object = None
    ) -> PoolStep:
        """Append n tokens to each of several different sessions, all of them or none.

        `owner` is any object; `cancel_steps_of` finds the step by it, if its `PoolStep` was lost to
        an interrupt.
        """
        who = "begin_step"
        given = as_sessions(who, sessions)
        seqs, tokens = [self._idle(who, s) for s in given], self._count(who, "n", n)
        if not seqs or len(set(given)) != len(seqs):
            raise PoolError(f"{who}: got sessions {given}, need different ones")
        if not tokens:
            raise RangeError(f"{who}: got n 0, need n >= 1")
        self._blocks.need(who, self._required_together(who, seqs, tokens))
        starts = tuple(seq.filled for seq in seqs)
        step = PoolStep(tuple(given), starts, tokens, self._blocks.open_fence(), owner)
        # Known before anything moves: an interrupt at any later moment leaves a step to cancel.
        self._steps[step.fence] = step
        try:
            for seq in seqs:
                self._grow(seq, tokens)
                seq.in_step = True
        except BaseException:
            self.cancel_step(step)
            raise
        return step

    @locked
    def end_step(self, step: PoolStep) -> None:
        """The rows of a step are in its blocks."""
        for seq, start in self._of("end_step", step):
            seq.in_step = False
            self._on_written(seq, start)
        self._close(step)

    @locked
    def cancel_step(self, step: PoolStep) -> None:
        """The step failed: its sessions are as long as before."""
        for seq, start in self._of("cancel_step", step):
            seq.in_step = False
            if seq.filled > start:
                self._drop_slots(seq, self.geometry.blocks_for(start))
                seq.filled = start
        self._close(step)

    @locked
    def cancel_steps_of(self, owner: object) -> None:
        """Cancel every open step that was begun with this owner, the same object."""
        for step in [s for s in self._steps.values() if s.owner is owner]:
            self.cancel_step(step)

    def _close(self, step: PoolStep) -> None:
        # Last: an interrupt before it leaves a step that can be cancelled.
        self._blocks.close_fence(step.fence)
        del self._steps[step.fence]

    @locked
    def check(self) -> None:
        super().check()
        running = {s for step in self._steps.values() for s in step.sessions}
        for session, seq in self._sequences.items():
            must(seq.in_step == (session in running), "a session is busy while its step is open")

    def _of(self, who: str, step: PoolStep) -> list[tuple[Sequence, int]]:
        """The sequences of an open step that were not discarded meanwhile, with their starts."""
        if not isinstance(step, PoolStep) or self._steps.get(step.fence) is not step:
            raise PoolError(f"{who}: got {step!r}, need an open step of this pool")
        pairs = zip(step.sessions, step.starts, strict=True)
        return [(self._sequences[s], start) for s, start in pairs if s in self._sequences]

    def _required_together(self, who: str, seqs: Items[Sequence], tokens: int) -> int:
        """Blocks for all; of those that share a partial tail, the last one keeps it if no other
        holder is left."""
        if not tokens:
            return 0
        tails = Counter(self._partial_tail(who, seq) for seq in seqs)
        refs = self._blocks.refs
        copies = sum(min(n, refs[tail] - 1) for tail, n in tails.items() if tail is not None)
        return copies + sum(self.blocks_required(seq.filled, tokens) for seq in seqs)
