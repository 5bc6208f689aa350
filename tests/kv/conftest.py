"""Where the caches of these tests live: every test that takes `make` runs on each place."""

from collections.abc import Callable

import numpy as np
import pytest

import lazykv as lk


@pytest.fixture(params=["cpu", "sim:0"])
def place(request) -> str:
    return request.param


@pytest.fixture
def make(place) -> Callable[..., lk.KvCache]:
    def cache(capacity=8, *, layers=2, heads=2, dim=4, dtype="f32", batch=1):
        return lk.KvCache.with_capacity(layers, heads, dim, capacity, dtype, place, batch)

    return cache


@pytest.fixture
def layer(place) -> Callable[..., lk.KvLayer]:
    def zeros(capacity=8, heads=2, dim=4, dtype="f32", batch=1):
        array = np.zeros((batch, heads, capacity, dim), lk.dtype(dtype).numpy)
        return lk.KvLayer(*(lk.Storage.from_array(array, place) for _ in lk.KvSlot))

    return zeros
