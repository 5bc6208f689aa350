"""Where the caches of these tests live: every test that takes `new_cache` runs on each place."""

from collections.abc import Callable

import pytest

import lazykv as lk


@pytest.fixture(params=["cpu", "sim:0"])
def place(request) -> str:
    return request.param


@pytest.fixture
def new_cache(place) -> Callable[..., lk.KvCache]:
    def cache(layers=2, heads=2, dim=4, capacity=8, dtype="f32"):
        return lk.KvCache.with_capacity(layers, heads, dim, capacity, dtype, place)

    return cache
