"""Who may have the blocks of a pool: asking the policy, and doing what it decides."""

from collections.abc import Collection, Sequence

from lazykv.errors import DTypeError, OutOfBlocks, RangeError, SessionBusy
from lazykv.ids import RequestId
from lazykv.kv.pool import DeviceKvPool
from lazykv.serving.job import Job
from lazykv.serving.policy import Decision, Policy
from lazykv.serving.queues import Queues
from lazykv.spec import whole


class Room:
    """The blocks of a pool, given to and taken from the jobs of an engine.

    Where bytes cannot be stored or brought back, rows are given up and computed again later: the
    failure is reported and ends nothing.
    """

    def __init__(self, pool: DeviceKvPool, queues: Queues, policy: Policy, max_batch: int) -> None:
        self._pool = pool
        self._queues = queues
        self._policy = policy
        self._max_batch = max_batch

    def decide(self, short: int = 0) -> Decision:
        """What the policy wants; an answer that cannot be followed is refused."""
        q, pool = self._queues, self._pool
        decision = self._policy(
            q.view(pool.free_blocks(), pool.capacity(), self._max_batch, short)
        )  # fmt: skip
        if not isinstance(decision, Decision):
            raise DTypeError(f"policy: got {type(decision).__name__}, need a Decision")
        _check_ids("preempt", decision.preempt, q.running)
        if short:
            if not decision.preempt:
                raise RangeError(f"policy: got nobody to preempt, need one for {short} blocks")
            return decision
        _check_ids("admit", decision.admit, {**q.waiting, **q.preempted})
        stay = len(q.running) - len(decision.preempt)
        if not 0 < stay + len(decision.admit) <= self._max_batch:
            raise RangeError(
                f"policy: got {len(decision.admit)} to admit beside {stay}, need 1 to "
                f"{self._max_batch} in all"
            )
        if whole("policy", "spare", decision.spare) < 0:
            raise RangeError(f"policy: got spare {decision.spare}, need spare >= 0")
        return decision

    def admit(self, job: Job, spare: int) -> bool:
        """Let a job run if its blocks fit beside those of others, or if nobody else runs."""
        pool, running = self._pool, self._queues.running
        new = not job.rows.there
        found = job.begin() if new else 0
        if running:
            taken = spare + sum(other.needed for other in running.values())
            if taken + job.needed > pool.free_blocks():
                if new:
                    job.rows.drop()
                return False
        while job.rows.missing > pool.free_blocks() and self._reclaim(keep=job):
            pass
        if not self._restore(job):
            return False
        job.request.tokens_found += found
        self._queues.run(job)
        return True

    def fit(self, group: Sequence[Job], n: int) -> list[Job]:
        """Those of a group that still run once n more tokens of each of them fit."""
        while left := [job for job in group if job.request.id in self._queues.running]:
            need = self._pool.step_required([job.rows.session for job in left], n)
            short = need - self._pool.free_blocks()
            if short <= 0:
                break
            self._make_room(left, short)
        return left

    def preempt(self, job: Job) -> None:
        """Store a job's blocks and free them."""
        self._evict(job)
        self._queues.preempt(job)

    def _make_room(self, group: Sequence[Job], short: int) -> None:
        """Free some blocks, or let one of the group go."""
        unpinned = [job.rows.unpin() for job in group]
        if any(unpinned) or any(map(self._evict, self._queues.preempted.values())):
            return
        if len(self._queues.running) > 1:
            for id in self.decide(short).preempt:
                self.preempt(self._queues.running[id])
        elif not self._reclaim():
            self._give_up(group[0], short)

    def _give_up(self, job: Job, short: int) -> None:
        """End a request for want of blocks; who asks can tell whether the pool is too small for it
        or its blocks are with others."""
        free = self._pool.free_blocks()
        others = self._pool.capacity() - free - job.rows.held
        if others > 0:
            job.request.error = OutOfBlocks(
                f"Engine: got {free} free blocks and {others} held by others, need {free + short} "
                "free ones; submit it again when they are",
                need=free + short,
                have=free,
            )
        self._queues.finish(job, "capacity")

    def _reclaim(self, keep: Job | None = None) -> bool:
        """Free blocks of one preempted job other than `keep`: those that others no longer share,
        or else all of them, shared ones included. False if there are none."""
        others = [j for j in self._queues.preempted.values() if j is not keep and j.rows.held]
        if any(map(self._evict, others)):
            return True
        if others:
            others[-1].forget()
        return bool(others)

    def _evict(self, job: Job) -> bool:
        """Whether this freed any of a job's blocks."""
        if not job.rows.held:
            return False
        try:
            return job.rows.evict() > 0
        except SessionBusy:
            raise
        except Exception as error:
            self._queues.report.errors.append(error)
            job.forget()
            return True

    def _restore(self, job: Job) -> bool:
        """Whether all blocks of a job are in the pool again."""
        try:
            job.rows.restore()
        except SessionBusy:
            raise
        except Exception as error:
            self._queues.report.errors.append(error)
            job.forget()
            return False
        return True


def _check_ids(what: str, ids: Sequence[RequestId], of: Collection[RequestId]) -> None:
    if not isinstance(ids, Sequence) or not all(isinstance(id, int) for id in ids):
        raise DTypeError(f"policy: got {what} {ids!r}, need a tuple of request ids")
    if len(set(ids)) != len(ids) or not set(ids) <= set(of):
        raise RangeError(f"policy: got {what} {list(ids)}, need different ids of {sorted(of)}")
