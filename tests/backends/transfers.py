"""A copy between two devices, and work on its source right behind it."""

import numpy as np

import lazykv as lk
from lazykv.device import Backend


def overwritten_source(backend: Backend, kind: str) -> list[float]:
    """What arrives of a 1 that becomes a 7 right after the transfer was given."""
    places = [lk.DeviceLocation(f"{kind}:{n}") for n in range(2)]
    source = lk.Storage.from_array(np.ones(1, np.float32), places[0])
    dest = lk.Storage.allocate((1,), "f32", places[1])
    backend.transfer(dest.array, places[1], source.array, places[0])
    backend.copy_in(source.array, np.full(1, 7, np.float32))
    source.to_numpy()  # only this stream is waited for
    out: list[float] = dest.to_numpy().tolist()
    return out
