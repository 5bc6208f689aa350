"""What a backend says about forked children."""

import os
import subprocess
import sys

import pytest

from lazykv.testing.forked import UNMADE, work
from lazykv.testing.target import Target


def test_a_forked_child_goes_on_with_the_memory_of_its_parent(target: Target) -> None:
    made, place = type(target.backend), str(target.location)
    if not made.survives_fork:
        pytest.skip(f"{target.name} declares no survives_fork")
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    target.need("f32")
    work(target.location)  # an op of it that is not declared is refused here, too
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "lazykv.testing.forked",
         made.__module__, made.__qualname__, place],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=100, check=False, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode == UNMADE:
        pytest.skip(f"another process cannot make a {made.__qualname__}: {done.stdout.strip()}")
    assert done.returncode == 0, f"{place}: {done.stderr[-2000:]}"
