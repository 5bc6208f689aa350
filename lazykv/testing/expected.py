"""Files of expected failures: what a backend is known not to do, and why.

One test id a line, or the start of some with ``*`` behind it, and the reason after ``#``::

    core/test_attention.py::test_op[ring*    # no kernel for rings yet
    fault/test_memory_runs_out.py::test_no_half_of_a_cache_is_left         # issue 12

Empty lines and lines that begin with ``#`` are skipped. A file is strict: what it lists has to
fail, and it may list nothing that does not exist.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lazykv.errors import LazyKvError
from lazykv.testing.levels import LEVELS


class ExpectedFailuresError(LazyKvError, ValueError):
    """A file of expected failures cannot be read, or breaks the format."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: a test id, or the start of some."""

    pattern: str
    reason: str

    @property
    def level(self) -> str:
        return self.pattern.partition("/")[0]

    def matches(self, test_id: str) -> bool:
        if self.pattern.endswith("*"):
            return test_id.startswith(self.pattern[:-1])
        return test_id == self.pattern


@dataclass(frozen=True, slots=True)
class ExpectedFailures:
    """The entries of one file."""

    entries: tuple[Entry, ...] = ()

    @classmethod
    def read(cls, path: str | None) -> "ExpectedFailures":
        """The entries of a file; none without a path. Raises `ExpectedFailuresError`."""
        if path is None:
            return cls()
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ExpectedFailuresError(f"{path}: got {e}, need a readable text file") from e
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, where: str = "expected failures") -> "ExpectedFailures":
        entries: list[Entry] = []
        for n, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            pattern, *rest = re.split(r"\s#", line, maxsplit=1)
            pattern, reason = pattern.strip(), "".join(rest).strip()
            if not reason:
                raise ExpectedFailuresError(
                    f"{where}:{n}: got {line.strip()!r}, need a test id and a reason after ' #'"
                )
            if any(pattern == e.pattern for e in entries):
                raise ExpectedFailuresError(f"{where}:{n}: got {pattern} again, need it once")
            entries.append(Entry(pattern, reason))
        return cls(tuple(entries))

    def find(self, test_id: str) -> Entry | None:
        """The first entry that a test falls under."""
        return next((e for e in self.entries if e.matches(test_id)), None)

    def stale(
        self, levels: Sequence[str], collected: Sequence[str], outcomes: Mapping[str, str]
    ) -> list[str]:
        """Entries to take out of the file, one line each: they match no test, or nothing that they
        match has failed. Those of levels that were not run are not judged.

        A listed test that passes is a failed test of its own.
        """
        out = []
        for e in self.entries:
            if e.level in LEVELS and e.level not in levels:
                continue
            matched = [n for n in collected if e.matches(n)]
            if not matched:
                out.append(f"{e.pattern}: got no such test, need one")
            elif all(outcomes.get(n) == "skipped" for n in matched):
                out.append(f"{e.pattern}: got only skipped tests, need one that fails")
        return out
