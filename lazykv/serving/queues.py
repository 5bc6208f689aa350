"""Every request of an engine that has not ended, by where it is."""

from collections.abc import Iterator

from lazykv.ids import RequestId
from lazykv.serving.job import Job
from lazykv.serving.policy import RequestView, View
from lazykv.serving.report import StepReport
from lazykv.serving.request import RequestState


class Queues:
    """A job is in exactly one of the three, or has ended and is in none. `report` is of the round
    that runs: whatever moves is noted there."""

    def __init__(self) -> None:
        self.waiting: dict[RequestId, Job] = {}
        self.running: dict[RequestId, Job] = {}
        self.preempted: dict[RequestId, Job] = {}
        self.report = StepReport()
        # What a policy sees of one that waits does not change.
        self._waiting_views: dict[RequestId, RequestView] = {}

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.preempted)

    def __iter__(self) -> Iterator[Job]:
        for queue in (self.waiting, self.running, self.preempted):
            yield from queue.values()

    def in_prompt(self) -> Job | None:
        """The first running job that needs more than one row for its next token."""
        return next((job for job in self.running.values() if job.left > 1), None)

    def view(self, free: int, capacity: int, max_batch: int, short: int) -> View:
        return View(
            waiting=tuple(self._waiting_views.values()),
            running=tuple(job.view() for job in self.running.values()),
            preempted=tuple(job.view() for job in self.preempted.values()),
            free_blocks=free,
            capacity=capacity,
            max_batch=max_batch,
            blocks_short=short,
        )

    def wait(self, job: Job) -> None:
        self.waiting[job.request.id] = job
        self._waiting_views[job.request.id] = job.view()

    def run(self, job: Job) -> None:
        self._leave(job)
        self.running[job.request.id] = job
        job.request.state = RequestState.RUNNING
        self.report.admitted.append(job.request)

    def preempt(self, job: Job) -> None:
        self._leave(job)
        self.preempted[job.request.id] = job
        job.request.preemptions += 1
        job.request.state = RequestState.PREEMPTED
        self.report.preempted.append(job.request)

    def finish(self, job: Job, reason: str) -> None:
        """It has all that it will get."""
        self._end(job, RequestState.FINISHED, reason)

    def cancel(self, job: Job) -> None:
        self._end(job, RequestState.CANCELLED, "cancelled")

    def fail(self, job: Job, error: Exception) -> None:
        job.request.error = error
        self._end(job, RequestState.FAILED, "error")

    def _end(self, job: Job, state: RequestState, reason: str) -> None:
        job.close()
        self._leave(job)
        job.request.finish_reason = reason
        # Last, since other threads take an ended request to be complete.
        job.request.state = state
        self.report.ended.append(job.request)

    def _leave(self, job: Job) -> None:
        id = job.request.id
        for queue in (self.waiting, self.running, self.preempted):
            queue.pop(id, None)
        self._waiting_views.pop(id, None)
