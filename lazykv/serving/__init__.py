"""Serving many requests at once over a paged pool."""

from lazykv.serving.engine import Engine
from lazykv.serving.policy import (
    Decision,
    Policy,
    RequestView,
    View,
    first_come_first_served,
)
from lazykv.serving.report import StepReport
from lazykv.serving.request import Request, RequestState

__all__ = [
    "Decision",
    "Engine",
    "Policy",
    "Request",
    "RequestState",
    "RequestView",
    "StepReport",
    "View",
    "first_come_first_served",
]
