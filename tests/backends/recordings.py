"""A recording that outlives its plan, and everybody else who had its memory."""

import gc

import numpy as np

import lazykv as lk


def replayed_alone(place: str) -> tuple[list[float], list[float]]:
    """What a recording of ``exp(x * w) + 1`` gives when nothing but it is left; what is right."""
    g, w = lk.Graph(), np.array([3, 4], np.float32)
    x = g.placeholder((2,), "f32")
    given = lk.Storage.from_array(np.array([1, 2], np.float32), place)
    plan = lk.plan((x * g.const(lk.Storage.from_array(w, place))).exp() + 1.0, {x: given}, place)
    want = plan.run().tolist()
    plan.capture()
    recording = plan._captured
    assert recording is not None
    del plan, g, x, given
    gc.collect()
    new = [lk.Storage.from_array(np.zeros(2, np.float32), place) for _ in range(8)]  # in its place
    recording.replay()
    del new
    return recording._registers.results[0].tolist(), want
