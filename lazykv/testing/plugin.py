"""The pytest plugin of the suite: which backend, which levels, what is expected to fail, a report.

``python -m pytest -p lazykv.testing.plugin --pyargs lazykv.testing.suite --lazykv-backend NAME``
"""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from lazykv.errors import BackendUnavailable
from lazykv.testing.expected import ExpectedFailures, ExpectedFailuresError
from lazykv.testing.levels import LEVELS
from lazykv.testing.report import Outcome, Report, check_writable
from lazykv.testing.target import Target, find_target

SUITE = Path(__file__).parent / "suite"
_ID = "lazykv-id"
MISSING = 3
"""Exit code where the backend or its device is missing, as that of the command."""


class Run:
    """One run of the suite: what it was asked for, and what came of it (a plugin of its own)."""

    def __init__(self, target: Target, levels: list[str], expected: ExpectedFailures) -> None:
        self.target = target
        self.levels = [n for n in LEVELS if n in levels or not levels]
        self.expected = expected
        self.collected: list[str] = []
        self.selected: list[str] = []
        """What was collected and not deselected: all of these are to run."""
        self.ended: set[str] = set()
        self.report = Report(target)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        names = (suite_id(item.path, item.nodeid) for item in session.items)
        self.selected = [n for n in names if n is not None]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = dict(report.user_properties).get(_ID)
        if isinstance(name, str):
            self.report.add(name, _outcome(report), _reason(report), report.duration)
            if report.when == "teardown":
                self.ended.add(name)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """With pytest-xdist tests are collected by its workers alone: all of them by each."""
        self.collected, self.selected = getattr(node, "workeroutput", {}).get(
            _ID, (self.collected, self.selected)
        )

    def not_run(self) -> list[str]:
        """Tests that were to run and have not come to their end."""
        return [n for n in self.selected if n not in self.ended]

    def finish(self) -> bool:
        """Judge the run when it is over; whether every test has a result and none is a failure."""
        for name in self.report.results.keys() - self.ended:
            self.report.add(name, "failed", "got the end of the run, need one of the test", 0)
        outcomes = self.report.outcomes()
        self.report.stale = self.expected.stale(self.levels, self.collected, outcomes)
        return not self.report.stale and not self.not_run() and "failed" not in outcomes.values()


RUN: pytest.StashKey[Run] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lazykv", "lazykv backend conformance")
    group.addoption("--lazykv-backend", metavar="NAME", help="the backend, such as cpu or cuda")
    group.addoption("--lazykv-device", metavar="D", help="a location of it (default: its first)")
    group.addoption(
        "--lazykv-level", metavar="LEVEL", action="append", default=[], choices=list(LEVELS),
        help=f"only this level (may be given again): {', '.join(LEVELS)}",
    )  # fmt: skip
    group.addoption("--lazykv-xfails", metavar="FILE", help="tests expected to fail, with reasons")
    group.addoption("--lazykv-report", metavar="FILE", help="write a JSON report here")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("lazykv_backend")
    if name is None:
        raise pytest.UsageError("lazykv.testing.plugin: got no --lazykv-backend, need one")
    try:
        target = find_target(name, config.getoption("lazykv_device"))
    except BackendUnavailable as e:
        pytest.exit(str(e), MISSING)
    try:
        expected = ExpectedFailures.read(config.getoption("lazykv_xfails"))
        path = config.getoption("lazykv_report")
        if path is not None and not hasattr(config, "workerinput"):
            check_writable(path)
    except ExpectedFailuresError as e:
        raise pytest.UsageError(str(e)) from e
    except (OSError, ValueError) as e:
        raise pytest.UsageError(f"--lazykv-report: got {e}, need a writable file") from e
    run = config.stash[RUN] = Run(target, config.getoption("lazykv_level"), expected)
    config.pluginmanager.register(run, "lazykv-run")


# Which tests


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    levels = config.stash[RUN].levels
    if collection_path.parent == SUITE and collection_path.is_dir():
        return True if collection_path.name.rstrip("_") not in levels else None
    return None


def suite_id(path: Path, nodeid: str) -> str | None:
    """A test's name in reports: ``core/test_moves.py::test_op[...]``; None if not of the suite."""
    if not path.is_relative_to(SUITE):
        return None
    level, *rest = path.relative_to(SUITE).parts
    return "/".join([level.rstrip("_"), *rest]) + "::" + nodeid.split("::", 1)[1]


def _is_ours(node: pytest.Item) -> bool:
    return node.path.is_relative_to(SUITE)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives tests of the suite the backend under test, as a parameter that is not in their ids.

    A fixture would be one of all tests of the run, and a project that the suite runs beside may
    have its own `target`.
    """
    if "target" in metafunc.fixturenames and _is_ours(metafunc.definition):
        target = metafunc.config.stash[RUN].target
        metafunc.parametrize("target", [target], ids=[pytest.HIDDEN_PARAM])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run = config.stash[RUN]
    for item in items:
        name = suite_id(item.path, item.nodeid)
        if name is None:
            continue
        run.collected.append(name)
        item.user_properties.append((_ID, name))
        entry = run.expected.find(name)
        if entry is not None:
            item.add_marker(pytest.mark.xfail(reason=entry.reason, strict=True))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test that needs an op which the backend does not declare is skipped, whoever plans it."""
    target = pyfuncitem.config.stash[RUN].target
    try:
        return (yield)
    except BackendUnavailable as e:
        op = target.undeclared(e) if _is_ours(pyfuncitem) else None
        if op is None:
            raise
        pytest.skip(f"{target.name} declares no {op}")


# What came of them


def _outcome(report: pytest.TestReport) -> Outcome | None:
    """What one phase of a test says about it; None for one that only went well."""
    if report.failed:
        return "failed"
    if report.skipped:
        return "xfailed" if hasattr(report, "wasxfail") else "skipped"
    return "passed" if report.when == "call" else None


def _reason(report: pytest.TestReport) -> str | None:
    if report.passed:
        return None
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail)
    longrepr = report.longrepr
    if isinstance(longrepr, tuple):
        return str(longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(longrepr, "reprcrash", None)
    return str(getattr(crash, "message", longrepr))


def pytest_sessionfinish(session: pytest.Session) -> None:
    run, config = session.config.stash[RUN], session.config
    if hasattr(config, "workeroutput"):  # of pytest-xdist: its controller judges and reports
        config.workeroutput[_ID] = run.collected, run.selected
        return
    fine = config.option.collectonly or run.finish()
    if not fine and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    path = config.getoption("lazykv_report")
    if path is not None:
        Path(path).write_text(run.report.to_json(), encoding="utf-8")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    run = config.stash[RUN]
    for line in run.report.stale:
        terminalreporter.write_line(f"FAILED expected failure: {line}", red=True)
    if run.not_run() and not config.option.collectonly:
        terminalreporter.write_line(f"NOT RUN to the end: {len(run.not_run())} tests", red=True)
