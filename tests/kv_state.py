"""What a cache is, as plain values: to show that a refused call changed nothing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

import lazykv as lk


def machine_settings() -> settings:
    """How long state machines run: LAZYKV_MACHINE_EXAMPLES runs of LAZYKV_MACHINE_STEPS verbs."""
    return settings(
        max_examples=int(os.environ.get("LAZYKV_MACHINE_EXAMPLES", "200")),
        stateful_step_count=int(os.environ.get("LAZYKV_MACHINE_STEPS", "50")),
    )


def raw_bytes(store: lk.Storage) -> bytes:
    """The bytes of a storage, torn or not, wherever it lies."""
    return lk.device(store.location).backend.copy_out(store.array).tobytes()


def state(cache: lk.KvCache) -> dict[str, Any]:
    """Length, ids, versions and the bytes of every slot."""
    slots = {}
    for i, layer in enumerate(cache.layers):
        for name, store in () if layer is None else (("k", layer.k), ("v", layer.v)):
            version = getattr(layer, f"{name}_version")
            slots[i, name] = (int(store.id), store.version, version, raw_bytes(store))
    fields = (cache.cached_len, cache.max_seq_len, cache.dtype, cache.device_location())
    return {"fields": fields, "alloc_id": int(cache.alloc_id()), "slots": slots}


@contextmanager
def refused(cache: lk.KvCache, error: type[lk.LazyKvError], *words: object) -> Iterator[None]:
    """The block raises `error`, its message holds `words`, and the cache is as it was."""
    before = state(cache)
    with pytest.raises(error) as caught:
        yield
    assert isinstance(caught.value, lk.LazyKvError)
    for word in words:
        assert str(word) in str(caught.value)
    assert state(cache) == before


def rows(values: list[float], heads: int = 2, dim: int = 4, dtype: Any = np.float32) -> np.ndarray:
    """``[1, heads, n, dim]`` where every element of row p is ``values[p]``."""
    line = np.asarray(values, np.float64).reshape(1, 1, -1, 1)
    return np.broadcast_to(line, (1, heads, len(values), dim)).astype(dtype)


def line(view: np.ndarray) -> list[float]:
    """The values of rows that are constant within; fails where one is not."""
    first = view[0, 0, :, 0]
    assert (view == first[None, None, :, None]).all(), "a row holds different values"
    return [float(x) for x in first]


def append_rows(cache: lk.KvCache, values: list[float]) -> None:
    """One step for every layer: K rows hold `values`, V rows 1000 more."""
    shape = {"heads": cache.n_kv_heads, "dim": cache.head_dim, "dtype": cache.dtype.numpy}
    k, v = rows(values, **shape), rows([1000 + x for x in values], **shape)
    cache.append_all([k] * cache.n_layers(), [v] * cache.n_layers())
