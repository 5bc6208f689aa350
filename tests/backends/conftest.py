"""Fixtures of the kernels' tests."""

from collections.abc import Iterator

import pytest
from cuda_cpu import Memory


@pytest.fixture
def memory(capfd: pytest.CaptureFixture[str]) -> Iterator[Memory]:
    """Guarded memory; at the end of a test no guard is broken and no sanitizer has complained."""
    made = Memory()
    yield made
    made.check()
    assert "runtime error" not in capfd.readouterr().err
