"""What a latent cache is, as plain values: to show that a refused call changed nothing."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import lazykv as lk


def state(cache: lk.LatentKvCache) -> dict[str, Any]:
    """Length, ids, versions and the bytes of every slot."""
    slots = {}
    for i in range(cache.n_layers()):
        for s in range(len(cache.slot_trailing)):
            store = cache.slot_storage(i, s)
            if store is not None:
                seen = (int(store.id), store.version, cache.slot_version(i, s))
                slots[i, s] = (*seen, store.to_numpy().tobytes())
    fields = (cache.cached_len, cache.max_seq_len, cache.device_location())
    return {"fields": fields, "alloc_id": int(cache.alloc_id()), "slots": slots}


@contextmanager
def refused(cache: lk.LatentKvCache, error: type[lk.LazyKvError], *words: object) -> Iterator[None]:
    """The block raises `error`, its message holds `words`, and the cache is as it was."""
    before = state(cache)
    with pytest.raises(error) as caught:
        yield
    assert isinstance(caught.value, lk.LazyKvError)
    for word in words:
        assert str(word) in str(caught.value)
    assert state(cache) == before


def rows(values: list[float], *trailing: int, dtype: Any = np.float32) -> np.ndarray:
    """``[n, *trailing]`` where every element of row p is ``values[p]``."""
    column = np.asarray(values, np.float64).reshape(-1, *([1] * len(trailing)))
    return np.broadcast_to(column, (len(values), *trailing)).astype(dtype)


def line(view: np.ndarray) -> list[float]:
    """The values of rows that are constant within; fails where one is not."""
    flat = view.reshape(len(view), math.prod(view.shape[1:]))
    assert (flat == flat[:, :1]).all(), "a row holds different values"
    return [float(x) for x in flat[:, 0]]


def append_rows(cache: lk.LatentKvCache, values: list[float]) -> None:
    """One step for every layer: rows of slot s hold `values` plus 100 s."""
    of = cache.dtype.numpy
    made = [
        rows([100 * s + x for x in values], *trailing, dtype=of)
        for s, trailing in enumerate(cache.slot_trailing)
    ]
    cache.append_all(*([x] * cache.n_layers() for x in made))
