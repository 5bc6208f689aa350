"""The report of a run: plain values, described by ``report.schema.json`` beside this file."""

import json
import os
import platform
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lazykv.device import ENTRY_POINTS, Backend
from lazykv.testing.levels import LEVELS
from lazykv.testing.target import Target

SCHEMA = "lazykv.conformance/2"

Outcome: TypeAlias = Literal["passed", "failed", "xfailed", "skipped"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "xfailed", "skipped")

_PACKAGES = ("lazykv", "numpy", "ml_dtypes", "pytest")
_GRAVITY = {"passed": 0, "skipped": 1, "xfailed": 2, "failed": 3}


@dataclass
class Result:
    """One test. `reason` is why it was skipped or expected to fail, or the failure's message."""

    id: str
    level: str
    outcome: Outcome
    reason: str | None = None
    duration_s: float = 0.0


@dataclass
class Report:
    """The tests of one run on one target."""

    target: Target
    results: dict[str, Result] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    devices: list[str] = field(init=False)
    """The backend's when the run began."""
    facts: dict[str, str] = field(init=False)
    """What the backend said of the location then: a kernel may spoil a device."""
    facts_left_out: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.devices = [str(d) for d in self.target.backend.locations()]
        self.facts, self.facts_left_out = facts_of(self.target)

    def add(
        self, test_id: str, outcome: Outcome | None, reason: str | None, seconds: float
    ) -> None:
        """Note one phase of a test; the worst outcome of its phases is its own."""
        result = self.results.get(test_id)
        if result is None:
            result = Result(test_id, test_id.partition("/")[0], "passed")
            self.results[test_id] = result
        result.duration_s += seconds
        if outcome is not None and _GRAVITY[outcome] > _GRAVITY[result.outcome]:
            result.outcome, result.reason = outcome, reason

    def outcomes(self) -> dict[str, str]:
        return {r.id: r.outcome for r in self.results.values()}

    def to_dict(self) -> dict[str, Any]:
        backend = self.target.backend
        tests = [asdict(r) | {"duration_s": round(r.duration_s, 6)} for r in self.results.values()]
        return {
            "schema": SCHEMA,
            "started": self.started.isoformat(timespec="seconds"),
            "backend": {
                "name": backend.name,
                "class": f"{type(backend).__module__}:{type(backend).__qualname__}",
                "api_version": backend.api_version,
                "capabilities": _capabilities(backend),
                "package": _package(type(backend)),
                "facts": self.facts,
                "facts_left_out": self.facts_left_out,
            },
            "device": self.target.place,
            "devices": self.devices,
            "versions": {"python": platform.python_version(), **_versions()},
            "platform": platform.platform(),
            "cpu": cpu_name(),
            "counts": self.counts(),
            "stale_xfails": self.stale,
            "tests": tests,
        }

    def counts(self) -> dict[str, dict[str, int]]:
        """Tests of every level by outcome; levels that were not run are left out."""
        out: dict[str, dict[str, int]] = {}
        for level in LEVELS:
            mine = [r.outcome for r in self.results.values() if r.level == level]
            if mine:
                out[level] = {o: mine.count(o) for o in OUTCOMES}
        return out

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"


def check_writable(path: str) -> None:
    """Raises OSError, or ValueError for no path at all, if a report cannot be written there.
    Nothing is left behind."""
    there = os.path.lexists(path)
    with open(path, "a", encoding="utf-8"):
        pass
    if not there:
        os.unlink(path)


def _capabilities(backend: Backend) -> Mapping[str, Any]:
    declared = asdict(backend.capabilities)
    return {n: sorted(v) if isinstance(v, frozenset) else v for n, v in declared.items()}


def _package(kind: type[Backend]) -> dict[str, str] | None:
    """The installed package whose backend a class is: it names a module of the same top-level
    package in an entry point. None for lazykv's own, and for a class from elsewhere, under whatever
    name it is registered."""
    top = kind.__module__.partition(".")[0]
    if top == "lazykv":
        return None
    for point in metadata.entry_points(group=ENTRY_POINTS):
        module = point.value.partition(":")[0].strip()  # `point.module` fails on malformed values
        if point.dist is not None and module.partition(".")[0] == top:
            return {"name": point.dist.name, "version": point.dist.version}
    return None


def facts_of(target: Target) -> tuple[dict[str, str], list[str]]:
    """What a backend says of its location, and notes of what was left out: a report is made
    whatever a backend says."""
    try:
        told = dict(target.backend.facts(target.location))
    except (Exception, SystemExit) as e:
        said = "".join(traceback.format_exception_only(e)).strip()  # also where str(e) fails
        return {}, [f"facts: got {said}, need a mapping of strings to strings"]
    fine = {n: v for n, v in told.items() if isinstance(n, str) and isinstance(v, str)}
    wrong = [
        f"fact {n if isinstance(n, str) else type(n).__name__}: got {type(v).__name__}, need a "
        "string by the name of a string"
        for n, v in told.items() if n not in fine
    ]  # fmt: skip
    return fine, wrong


def cpu_name() -> str:
    """The processor's name, or at least its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or "unknown"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # lazykv on the path without being installed
            continue
    return found
