"""`register_backend` and `unregister_backend`: a refusal changes nothing."""

from typing import Any

import pytest
from toy_backends import Toy, registered

import lazykv as lk
from lazykv.backends.cpu import CpuBackend
from lazykv.device import Capabilities, register_backend, registry, unregister_backend


class Raising(Toy):
    """Its declarations cannot be read."""

    @property
    def capabilities(self) -> Any:
        raise OSError("no driver")


class Places(Toy):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def locations(self) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def declaring(**declared: Any) -> Toy:
    made = Toy()
    for name, value in declared.items():
        setattr(made, name, value)
    return made


def state() -> tuple[object, ...]:
    return registry.epoch, dict(registry.generations), dict(registry.backends)


@pytest.mark.parametrize(
    ("kind", "backend", "got"),
    [
        (None, Toy(), "got None, need a name such as"),
        ([], Toy(), r"got \[\], need a name"),
        (1, Toy(), "got 1, need a name"),
        ("", Toy(), "got '', need a name"),
        ("Toy", Toy(), "got 'Toy', need a name"),
        ("toy:0", Toy(), "got 'toy:0', need a name"),
        ("toy\n", Toy(), "need a name"),
        ("toy", None, "'toy': got None, need a Backend"),
        ("toy", object(), "got object, need a Backend"),
        ("toy", Toy, "got <class 'toy_backends.Toy'>, need a Backend"),
        ("toy", declaring(api_version=2), "got api_version 2, need .* 1"),
        ("toy", declaring(api_version=True), "got api_version True"),
        ("toy", declaring(api_version="1"), "got api_version 1, need"),
        ("toy", declaring(name=None), "got name None, need a string"),
        ("toy", declaring(capabilities=None), "got capabilities None, need Capabilities"),
        ("toy", declaring(capabilities={"dtypes": ["f32"]}), "need Capabilities"),
        ("toy", declaring(capabilities=Capabilities), "need Capabilities"),
        ("toy", declaring(capabilities=Capabilities(dtypes=["f32"])), r"got .*dtypes \['f32'\]"),
        ("toy", declaring(capabilities=Capabilities(dtypes=frozenset({lk.f32}))), "of names"),
        ("toy", declaring(capabilities=Capabilities(ops=["copy"])), "of names, or None"),
        ("toy", declaring(capabilities=Capabilities(is_async=1)), "is_async 1, need True or False"),
        ("toy", Raising(), "got OSError: no driver when asked for its capabilities"),
        ("toy", Places(OSError("gone")), "got OSError: gone when asked for its devices"),
        ("toy", Places(SystemExit(0)), "got SystemExit: 0 when asked for its devices"),
        ("toy", Places(None), "got TypeError: .* when asked for its devices"),
        ("toy", Places(("toy:0",)), "got 'toy:0' among its devices, need DeviceLocations"),
        ("other", Toy(), "need DeviceLocations of kind 'other'"),
        ("toy", CpuBackend(), "need DeviceLocations of kind 'toy'"),
    ],
)  # fmt: skip
def test_what_is_no_backend_is_refused_and_changes_nothing(kind, backend, got):
    before = state()
    with pytest.raises(lk.BackendUnavailable, match=got):
        register_backend(kind, backend)
    assert state() == before


@pytest.mark.parametrize("kind", [None, [], "Toy", "toy:0"])
def test_what_is_no_kind_is_not_unregistered(kind):
    before = state()
    with pytest.raises(lk.BackendUnavailable, match="need a name such as"):
        unregister_backend(kind)
    assert state() == before


def test_a_backend_may_have_no_device_yet():
    empty = Places(())
    with registered(empty):
        with pytest.raises(lk.BackendUnavailable, match="need one of: none"):
            lk.device("toy:0")
        empty.answer = (lk.DeviceLocation("toy:0"),)
        assert lk.device("toy:0").backend is empty


def test_a_kind_of_its_own_is_gone_and_a_known_one_is_loaded_anew():
    with registered(Toy()):
        lk.device("toy:0")
    with pytest.raises(lk.BackendUnavailable, match="got no backend, need one"):
        lk.device("toy:0")
    before = lk.device("sim:0").backend
    unregister_backend("sim")
    try:
        again = lk.device("sim:0").backend
        assert type(again) is type(before)
        assert again is not before
    finally:
        register_backend("sim", before)
