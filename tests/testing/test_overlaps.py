"""Operands of layout `overlapping` share elements, and hold what they are said to hold."""

from itertools import pairwise

import numpy as np
import pytest

from lazykv.testing.golden import OVERLAPPING, Case, overlap_of, placed_operands
from lazykv.testing.suite.core import (
    test_attention,
    test_elementwise,
    test_moves,
    test_reductions,
)
from lazykv.testing.suite.paged import test_paged_attention

MODULES = (test_attention, test_elementwise, test_moves, test_reductions, test_paged_attention)
CASES = {case.name: case for m in MODULES for case, _, _ in m.PARAMS.values()}


def overlapped() -> list[Case]:
    return [case for case in CASES.values() if overlap_of(case) is not None]


@pytest.mark.parametrize("case", overlapped(), ids=[c.name for c in overlapped()])
def test_operands_share_elements(case: Case) -> None:
    for dtype in case.dtypes:
        runs = placed_operands(case, dtype, OVERLAPPING)
        found = overlap_of(case)
        assert found is not None
        windows = [run[n] for run in runs for n in found.operands]
        assert len(windows) > 1
        assert all(w.base is windows[0].base for w in windows)
        for a, b in pairwise(w for w in windows if w.value.size):
            assert np.shares_memory(a.value, b.value)
        for run in runs:
            for o, p in zip(case.operands, run, strict=True):
                assert p.value.shape == o.shape
                assert np.shares_memory(p.look(p.base), p.value) == bool(p.value.size)


def test_all_cases_have_it_but_those_whose_values_are_given() -> None:
    alone = {name for name, case in CASES.items() if overlap_of(case) is None}
    given = ("special", "far", "steep", "masked")
    assert {name for name in alone if not any(word in name for word in given)} == set()
    assert len(alone) < 20 < len(CASES) / 5
