"""`realize`: what it may be asked for."""

import inspect

import numpy as np

import lazykv as lk


def test_the_arguments_have_the_documented_names() -> None:
    assert list(inspect.signature(lk.realize).parameters) == [
        "target_or_list", "bindings", "env", "device",
    ]  # fmt: skip
    p = lk.Graph().placeholder((2,), "f32")
    asked = {"bindings": {p: np.ones(2, np.float32)}, "env": None, "device": "cpu"}
    assert lk.realize(target_or_list=p + 1, **asked).tolist() == [2, 2]
    assert [a.tolist() for a in lk.realize(target_or_list=[p + 1, p], **asked)] == [[2, 2], [1, 1]]
    assert lk.realize(target_or_list=[]) == []
