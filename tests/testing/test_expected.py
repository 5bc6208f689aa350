"""Files of expected failures: what they may hold, and that they are strict."""

import pytest
from broken_backends import Healthy
from broken_writes import OffsetIsOneOff

from lazykv.device import register_backend, unregister_backend
from lazykv.testing.expected import ExpectedFailures, ExpectedFailuresError
from lazykv.testing.runner import run_suite

AT_OFFSET = "core/test_writes.py::test_write[at_offset"
ONE = f"{AT_OFFSET}_axis0-f32-contiguous]"


@pytest.fixture
def backend():
    register_backend("broken", OffsetIsOneOff())
    yield
    unregister_backend("broken")


@pytest.fixture
def run(tmp_path):
    def suite(text: str, level: str = "core", keyword: str = "at_offset_axis0-f32"):
        path = tmp_path / "xfails.txt"
        path.write_text(text)
        done = run_suite("broken", xfails=str(path), levels=[level], keyword=keyword)
        return done.code, done.run.report

    return suite


def test_expected_failures_are_no_failures(backend, run):
    code, report = run(f"# a comment\n\n{AT_OFFSET}_axis0-f32*   # off by one, see issue 3\n")
    assert code == 0
    assert set(report.outcomes().values()) == {"xfailed"}
    assert {r.reason for r in report.results.values()} == {"off by one, see issue 3"}
    assert report.stale == []


def test_what_is_not_listed_fails_all_the_same(backend, run):
    code, report = run(f"{ONE} # known\n")
    assert code == 1
    outcomes = report.outcomes()
    assert outcomes.pop(ONE) == "xfailed"
    assert "failed" in outcomes.values()


def test_a_listed_test_that_passes_fails(run):
    register_backend("broken", Healthy())
    try:
        code, report = run(f"{ONE} # was true once\n")
    finally:
        unregister_backend("broken")
    assert code == 1
    assert report.results[ONE].outcome == "failed"
    assert "was true once" in report.results[ONE].reason


@pytest.mark.parametrize("stale", ["core/test_writes.py::test_gone", "core/gone*", "gone/test_x*"])
def test_an_entry_that_matches_nothing_fails(backend, run, stale):
    code, report = run(f"{AT_OFFSET}_axis0-f32* # known\n{stale} # gone\n")
    assert code == 1
    assert report.stale == [f"{stale}: got no such test, need one"]
    assert "failed" not in report.outcomes().values()


def test_an_entry_whose_tests_are_all_skipped_fails(run):
    register_backend("broken", Healthy())  # which declares no capture
    entry = "capture/test_replay.py::test_re*"
    try:
        code, report = run(f"{entry} # none\n", level="capture", keyword="test_re")
    finally:
        unregister_backend("broken")
    assert code == 1
    assert report.stale == [f"{entry}: got only skipped tests, need one that fails"]


def test_entries_of_levels_that_are_not_run_are_not_judged(backend, run):
    code, report = run(f"{AT_OFFSET}_axis0-f32* # known\nasync/test_gone* # another day\n")
    assert (code, report.stale) == (0, [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("core/test_x.py::test_y\n", r"1: got 'core/test_x.py::test_y', need .* a reason"),
        ("core/a # b\n\ncore/c #\n", r"3: got 'core/c #', need"),
        ("core/a # b\ncore/a # c\n", r"2: got core/a again, need it once"),
    ],
)
def test_what_breaks_the_format_is_refused(text, words):
    with pytest.raises(ExpectedFailuresError, match=words):
        ExpectedFailures.parse(text)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ExpectedFailuresError, match="nowhere"):
        ExpectedFailures.read(str(tmp_path / "nowhere"))


def test_reasons_may_hold_a_hash_and_ids_brackets():
    (entry,) = ExpectedFailures.parse("core/t.py::t[a-f32]  # see #12 # and #13\n").entries
    assert entry.pattern == "core/t.py::t[a-f32]"
    assert entry.reason == "see #12 # and #13"
    assert entry.matches("core/t.py::t[a-f32]")
    assert not entry.matches("core/t.py::t[a-f32-x]")
