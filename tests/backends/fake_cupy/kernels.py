"""Kernels: the CUDA source itself, compiled by g++ behind the shim."""

import hashlib
import re
from pathlib import Path
from typing import Any

import cuda_cpu
import numpy as np

from fake_cupy.arrays import ndarray
from fake_cupy.machine import CUDARuntimeError, machine
from fake_cupy.streams import current_stream
from lazykv.backends.cuda_kernels import Launch

_KERNEL = re.compile(r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(")
_loaded: dict[str, Any] = {}
folder: Path | None = None
"""Where compiled modules are kept between runs; None: nowhere."""


def _library(text: str) -> Any:
    if text not in _loaded:
        shim = "".join(Path(cuda_cpu.__file__).with_name(n).read_text() for n in (
            "cuda_shim.h", "cuda_shim.cpp", "cuda_cpu.py"))  # fmt: skip
        name = hashlib.sha256((shim + text).encode()).hexdigest()[:32] + ".so"
        _loaded[text] = cuda_cpu.build(text, folder and folder / name)
    return _loaded[text]


class RawModule:
    def __init__(self, *, code: str, options: tuple[str, ...] = ()) -> None:
        assert isinstance(options, tuple)
        assert all(o.startswith("-D") for o in options)
        self._code, self._options = code, options

    def get_function(self, name: str) -> "RawKernel":
        defines = "".join(f"#define {o[2:].replace('=', ' ', 1)}\n" for o in self._options)
        exported = "\n".join(f"SHIM_KERNEL({k})" for k in _KERNEL.findall(self._code))
        assert f"SHIM_KERNEL({name})" in exported
        machine.check()
        machine.compiled.append((self._code, self._options))
        return RawKernel(_library(f"{defines}{self._code}\n{exported}"), name)


class RawKernel:
    """A launch takes the values of its arguments, and the addresses of arrays."""

    num_regs = 0

    def __init__(self, library: Any, name: str) -> None:
        self._library, self._name = library, name
        kinds = (cuda_cpu.ctypes.c_int * 32)()
        count = library[f"kinds_{name}"](kinds)
        self._kinds = [cuda_cpu._KINDS.get(k, k) for k in kinds[:count]]

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]
    ) -> None:
        assert isinstance(grid, tuple)
        assert isinstance(block, tuple)
        if machine.cupy is not None:
            _check_conversion(args)
        values = [_value(a, kind) for a, kind in zip(args, self._kinds, strict=True)]
        shape = Launch((*grid, 1, 1)[:3], (*block, 1, 1)[:3])  # type: ignore[arg-type]
        machine.check()
        machine.launches += 1
        current_stream().push(lambda: self._run(shape, values))

    def _run(self, shape: Launch, values: list[Any]) -> None:
        with machine.running:
            wrong = cuda_cpu.run(self._library, self._name, shape, values, 0)
        if wrong:
            raise CUDARuntimeError(f"cudaErrorIllegalAddress: {self._name}: {wrong}")


class _Stream:
    ptr = 0


def _check_conversion(args: tuple[Any, ...]) -> None:
    """CuPy itself converts the arguments, and fails only where it needs a GPU."""
    cuda = machine.cupy.cuda
    try:
        cuda.Function.__new__(cuda.Function)((1,), (1,), args, 0, _Stream())
    except cuda.runtime.CUDARuntimeError:
        return


def _value(a: Any, kind: str | int) -> Any:
    """What the kernel is given: as wide as it declares, or a GPU would read something else."""
    if isinstance(a, ndarray if machine.cupy is None else machine.cupy.ndarray):
        assert kind == "pointer", f"a pointer for {kind}"
        assert not a.size or a.data.device_id == machine.device(), "an array of another device"
        return np.array(a.data.ptr, np.uint64)
    if kind == "pointer":
        assert isinstance(a, np.uint64)
        assert a == 0
        return np.array(a)
    wanted = {"f32": np.float32, "i32": np.int32, "i64": np.int64}.get(str(kind))
    if wanted is None:
        assert isinstance(a, np.ndarray)
        assert (a.size, a.nbytes) == (1, kind)
        return a.copy()
    assert type(a) is wanted, f"{type(a)} for {kind}"
    return np.array(a)
