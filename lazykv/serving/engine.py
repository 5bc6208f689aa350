"""The engine: requests come in at any time, and every round moves those that run on by a token."""

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from lazykv.errors import DTypeError, OutOfBlocks, PoolError, RangeError, SessionBusy
from lazykv.ids import RequestId
from lazykv.kv.pool import DeviceKvPool
from lazykv.kv.rows import count
from lazykv.models.checks import Unique
from lazykv.models.generate import Reply
from lazykv.models.model import LlamaModel
from lazykv.models.paged import PagedDecoder
from lazykv.owner import Owner, exclusive
from lazykv.serving.job import Job
from lazykv.serving.policy import Decision, Policy, first_come_first_served
from lazykv.serving.queues import Queues
from lazykv.serving.report import StepReport
from lazykv.serving.request import Request
from lazykv.serving.room import Room
from lazykv.serving.rows import Rows
from lazykv.serving.turns import Turns

MAX_FAILURES = 3
"""Steps of a request that may fail one after the other before it ends."""


class Engine(Unique):
    """Continuous batching of a model over a paged pool.

    A *round* asks the policy, takes up requests, runs prompts for at most `max_chunk` tokens, one
    prompt after the other, then one decode step of all requests that wait for their next token. So
    a long prompt delays the others by no more than a chunk a round, and a request starts once the
    prompt before it is through, when it finds what that has published.

    `max_context` is the most tokens of a request, prompt included; by default what the model was
    made for and the pool can hold. With `prefix_cache` full blocks are published and looked up.
    `policy` decides; see `lazykv.serving.policy`.

    `submit`, `Request.cancel` and `Request.stream` may be called from any thread; `step` and `run`
    by one at a time, a second one gets `SessionBusy`. The pool may serve others as well; blocks
    that they hold are not the engine's to free.
    """

    instead: ClassVar[str] = "requests run on in the engine that took them"

    def __init__(
        self, model: LlamaModel, pool: DeviceKvPool, *, max_batch: SupportsIndex = 8,
        max_context: SupportsIndex | None = None, max_chunk: SupportsIndex = 256,
        policy: Policy = first_come_first_served, prefix_cache: bool = True,
    ) -> None:  # fmt: skip
        if not isinstance(model, LlamaModel) or not isinstance(pool, DeviceKvPool):
            got = f"{type(model).__name__} and {type(pool).__name__}"
            raise PoolError(f"Engine: got {got}, need a LlamaModel and a DeviceKvPool")
        if not callable(policy):
            raise DTypeError(f"Engine: got policy {type(policy).__name__}, need a function")
        self.model = model
        self.pool = pool
        self.max_batch = count("Engine", "max_batch", max_batch, 1)
        self.max_chunk = count("Engine", "max_chunk", max_chunk, 1)
        most = model.config.context_length
        if max_context is not None:
            most = count("Engine", "max_context", max_context, 1)
        self.max_context = min(most, pool.capacity() * pool.geometry.block_size)
        self.prefix_cache = bool(prefix_cache)
        self.decoder = PagedDecoder(
            model, pool, max_batch=self.max_batch, max_context=self.max_context
        )
        self._queues = Queues()
        self._room = Room(pool, self._queues, policy, self.max_batch)
        self._inbox: deque[Job] = deque()
        self._model_key = model.model_key
        self._owner = Owner()
        self._turns = Turns()

    def submit(
        self, prompt: str | Iterable[SupportsIndex], max_new_tokens: SupportsIndex = 128,
        temperature: float = 0, top_k: int | None = None, top_p: float | None = None,
        seed: int | None = None, stop: str | Iterable[str] | None = None, *, salt: bytes = b"",
    ) -> Request:  # fmt: skip
        """Hand in a prompt (text or token ids); see `lazykv.generate` for the other arguments.

        Only requests of the same `salt` share rows through the prefix index. All is checked here:
        RangeError also for a prompt of more than `max_context` tokens.
        """
        who = "Engine.submit"
        reply = Reply(
            who, self.model, prompt, max_new_tokens, temperature, top_k, top_p, seed, stop
        )
        n = len(reply.prompt)
        if n > self.max_context:
            raise RangeError(f"{who}: got a prompt of {n} tokens, need <= {self.max_context}")
        if not isinstance(salt, bytes):
            raise DTypeError(f"{who}: got salt {type(salt).__name__}, need bytes")
        request = Request(RequestId(), tuple(reply.prompt.tolist()), self._drive)
        self._inbox.append(Job(request, reply, Rows(self.pool, salt, self.prefix_cache)))
        return request

    @property
    def idle(self) -> bool:
        """Whether every request has ended."""
        return not self._inbox and not len(self._queues)

    @exclusive
    def step(self) -> StepReport:
        """Run one round.

        A step of the model that fails leaves its requests as they were, to be tried again in the
        next round, each by itself; those that fail `MAX_FAILURES` times in a row end with the
        error. Raises what the policy raises, and RangeError or DTypeError for an answer that cannot
        be followed; the next call goes on from there.
        """
        with self._turns.take("Engine.step"):
            return self._run_round()

    @exclusive
    def run(self) -> None:
        """Run rounds until every request has ended."""
        while not self.step().idle:
            pass

    def owned(self, who: str) -> AbstractContextManager[None]:
        return self._owner.hold(who)

    def _drive(self, request: Request, given: int) -> None:
        """For a stream that has given so many pieces: run a round, or wait for that of another
        thread, unless there is something new."""

        def news() -> bool:
            return len(request.pieces) > given or request.ended

        with self._turns.take_unless("Engine.stream", news) as taken:
            if taken:
                self._run_round()

    # A round

    def _run_round(self) -> StepReport:
        report = self._queues.report = StepReport()
        self._take_mail()
        self._follow_weights()
        if len(self._queues):
            decision = self._room.decide()
            for id in decision.preempt:
                self._room.preempt(self._queues.running[id])
            self._admit_and_prefill(decision)
            self._decode()
        report.idle = self.idle
        return report

    def _take_mail(self) -> None:
        """What other threads have asked for since the last round."""
        while self._inbox:
            self._queues.wait(self._inbox[0])  # in one of the two at any time, see `idle`
            self._inbox.popleft()
        for job in [job for job in self._queues if job.request.cancel_asked]:
            self._queues.cancel(job)

    def _follow_weights(self) -> None:
        """Rows of other weights than the model's present ones are never attended to."""
        key = self.model.model_key
        # Before anything is looked up: this empties the index of what other weights have written.
        self.pool.follow_model(self.model.present_key)
        if key != self._model_key:
            self._model_key = key
            for job in list(self._queues):
                job.forget()
                if job.request.id in self._queues.running:
                    self._queues.preempt(job)

    def _admit_and_prefill(self, decision: Decision) -> None:
        """Take requests up in the order decided, as many as fit; run prompts until the round has
        had its share. Nobody starts a prompt before the one that runs is through."""
        q, budget = self._queues, self.max_chunk
        everyone = {**q.waiting, **q.preempted}
        line = deque(everyone[id] for id in decision.admit)
        while True:
            while line and (q.in_prompt() is None or line[0].left == 1):
                if not self._room.admit(line.popleft(), decision.spare):
                    line.clear()  # nobody overtakes one that does not fit
            job = q.in_prompt()
            if job is None or budget == 0:
                return
            n = min(budget, job.left)
            if not self._prefill(job, n):
                return
            budget -= n

    def _prefill(self, job: Job, n: int) -> bool:
        """Whether the next n tokens of a job now have their rows."""
        if not self._room.fit([job], n):
            return False
        start = job.rows.filled
        try:
            logits = self.decoder.prefill(job.rows.session, job.tokens[start : start + n])
        except Exception as error:
            self._failed([job], error)
            return False
        self._advanced(job, n, logits)
        return True

    def _decode(self) -> None:
        """One step of all that need one row for their next token. Those whose last step failed run
        alone, so that one that cannot succeed takes no others with it."""
        ready = [job for job in self._queues.running.values() if job.left == 1]
        groups = [[job for job in ready if not job.failures]]
        groups += [[job] for job in ready if job.failures]
        for group in groups:
            self._decode_group(self._room.fit(group, 1))

    def _decode_group(self, group: Sequence[Job]) -> None:
        if not group:
            return
        try:
            logits = self.decoder.decode(
                [job.rows.session for job in group], [job.tokens[-1] for job in group]
            )
        except Exception as error:
            self._failed(group, error)
            return
        self._queues.report.decoded += len(group)
        for job, row in zip(group, logits, strict=True):
            self._advanced(job, 1, row)

    def _advanced(self, job: Job, n: int, logits: NDArray[np.float32]) -> None:
        """A job has n more rows; if those were the last, choose its next token."""
        self._queues.report.prefill_tokens += job.advanced(n)
        if job.left:
            return
        try:
            piece = job.reply.next(logits, full=job.rows.filled == self.max_context)
        except Exception as error:  # logits that no token can be chosen from
            self._queues.report.errors.append(error)
            self._queues.fail(job, error)
            return
        job.tokens.append(piece.id)
        job.request.pieces.append(piece)
        if piece.finish_reason is not None:
            self._queues.finish(job, piece.finish_reason)

    def _failed(self, group: Sequence[Job], error: Exception) -> None:
        """A step of these jobs failed, and they are as before it."""
        if isinstance(error, SessionBusy):
            raise error
        self._queues.report.errors.append(error)
        if isinstance(error, OutOfBlocks):
            return  # somebody else has taken the blocks meanwhile
        for job in group:
            job.failures += 1
            if job.failures == MAX_FAILURES:
                self._queues.fail(job, error)

    def __repr__(self) -> str:
        q = self._queues
        return (
            f"Engine({self.model!r}, {len(q.waiting) + len(self._inbox)} waiting, "
            f"{len(q.running)} running, {len(q.preempted)} preempted)"
        )
