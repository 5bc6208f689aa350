"""What one round did."""

from dataclasses import dataclass, field

from lazykv.serving.request import Request


@dataclass(slots=True)
class StepReport:
    """Requests that were taken up, preempted and ended in a round, in that order of events; prompt
    tokens run; requests that a decode step moved on; failures, whether or not they ended anything.

    `idle` says that every request has ended.
    """

    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    prefill_tokens: int = 0
    decoded: int = 0
    errors: list[Exception] = field(default_factory=list)
    idle: bool = False
