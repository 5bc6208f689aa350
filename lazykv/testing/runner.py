"""Running the suite in this process, for the command and for tests of backends."""

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from lazykv.testing.expected import ExpectedFailures, ExpectedFailuresError
from lazykv.testing.plugin import RUN, SUITE, Run
from lazykv.testing.report import check_writable
from lazykv.testing.target import find_target

__all__ = ["Done", "ExpectedFailuresError", "check_writable", "run_suite"]

INI = Path(__file__).parent / "pytest.ini"


class _Keep:
    """Keeps the run that the plugin makes, and what stopped it."""

    run: Run | None = None
    stopped: type[BaseException] | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.run = session.config.stash[RUN]

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.stopped = excinfo.type  # pytest has kinds of its own besides KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class Done:
    """A finished run, pytest's exit code, and what pytest printed."""

    run: Run
    code: int
    text: str


def run_suite(
    name: str, *, device: str | None = None, levels: Sequence[str] = (), xfails: str | None = None,
    tests: Sequence[str] = (), keyword: str | None = None, collect_only: bool = False,
) -> Done:  # fmt: skip
    """Run the suite on a backend; `tests` are ids (or starts of them up to a ``::`` or ``[``) to
    run instead of all, and `keyword` is what pytest takes as ``-k``.

    pytest reads no settings of the folder it happens to run in. Raises `BackendUnavailable` and
    `ExpectedFailuresError` before any test, and RuntimeError if pytest itself fails, as it does for
    tests that do not exist.
    """
    find_target(name, device)
    ExpectedFailures.read(xfails)
    args = [
        *_paths(tests), "-c", str(INI), "--rootdir", str(SUITE.parent), "--noconftest", "--quiet",
        "--capture", "no", "--tb", "short", "-p", "no:cacheprovider", "-p", "no:faulthandler",
        "-p", "lazykv.testing.plugin", "--lazykv-backend", name,
    ]  # fmt: skip
    args += [] if device is None else ["--lazykv-device", device]
    args += [] if xfails is None else ["--lazykv-xfails", xfails]
    args += [part for level in levels for part in ("--lazykv-level", level)]
    args += [] if keyword is None else ["-k", keyword]
    args += ["--collect-only"] if collect_only else []
    kept, text = _Keep(), io.StringIO()
    with _alone(), contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = pytest.main(args, plugins=[kept])
    if kept.stopped is KeyboardInterrupt:
        raise KeyboardInterrupt
    broken = code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)
    broken |= kept.stopped is pytest.Session.Interrupted  # files that cannot be imported
    nothing = kept.run is None or not (kept.run.selected or keyword)
    if kept.run is None or broken or nothing:
        raise RuntimeError(f"conformance: got a failure of pytest, need a run: {text.getvalue()}")
    return Done(kept.run, int(code), text.getvalue())


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without the options and plugins that other people have set for their own tests."""
    ours = {"PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _paths(tests: Sequence[str]) -> list[str]:
    """The suite's folder, or ids as pytest takes them: a level is a folder."""
    paths = []
    for test in tests:
        level, _, rest = test.partition("/")
        folder = SUITE / level if (SUITE / level).is_dir() else SUITE / f"{level}_"
        paths.append(f"{folder}/{rest}")
    return paths or [str(SUITE)]
