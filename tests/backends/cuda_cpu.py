"""Runs the CUDA kernels on the CPU: the shipped text, compiled by g++ behind `cuda_shim.h`."""

import ctypes
import mmap
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lazykv.backends import cuda_kernels as ck

Array = np.ndarray[Any, Any]

COMPILER = (
    shutil.which("g++") if (sys.platform, platform.machine()) == ("linux", "x86_64") else None
)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++ on x86-64 Linux")

BACKWARDS, FLUSH = 1, 2
_RESULTS = ("", "threads wait for others that never come", "a block of half warps",
            "access to protected memory")  # fmt: skip

_FOLDER = Path(__file__).parent
# No _FORTIFY_SOURCE: it takes a jump between fibers for a broken stack. Null pointers are found by
# the protected first page, without a check at every access.
_OPTIONS = ("-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
            "-U_FORTIFY_SOURCE", f"-I{_FOLDER}")  # fmt: skip
_SANITIZE = ("-fsanitize=undefined", "-fno-sanitize=null,nonnull-attribute,vptr")
_SCALARS: dict[str, Any] = {"f32": np.float32, "i32": np.int32, "i64": np.int64}
_KINDS = {-1: "pointer", -2: "f32", -3: "i32", -4: "i64"}


def _compile(text: str, *options: str) -> None:
    done = subprocess.run(
        [str(COMPILER), *_OPTIONS, *options, "-x", "c++", "-"],
        input=text, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@cache
def _shim() -> bytes:
    """The object file of what runs the kernels."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "shim.o")
        _compile(Path(_FOLDER, "cuda_shim.cpp").read_text(), "-c", "-o", str(built))
        return built.read_bytes()


def build(text: str, keep: Path | None = None) -> ctypes.CDLL:
    """CUDA C with `SHIM_KERNEL(name)` for every kernel, compiled and loaded.

    The library is left at `keep`, and taken from there if it is there already.
    """
    if keep is not None and keep.exists():
        return ctypes.CDLL(str(keep))
    with tempfile.TemporaryDirectory(dir=keep and keep.parent) as folder:
        shim, kernels, built = (Path(folder, n) for n in ("shim.o", "kernels.o", "kernels.so"))
        shim.write_bytes(_shim())
        _compile(f'#include "cuda_shim.h"\n{text}', *_SANITIZE, "-c", "-o", str(kernels))
        link = [str(COMPILER), "-shared", *_SANITIZE, str(kernels), str(shim), "-o", str(built)]
        subprocess.run(link, check=True)
        return ctypes.CDLL(str(built if keep is None else built.replace(keep)))


def run(library: ctypes.CDLL, symbol: str, launch: ck.Launch, args: list[Array], flags: int) -> str:
    """Runs a kernel on arguments by value; what went wrong, if anything did."""
    pointers = (ctypes.c_void_p * len(args))(*(a.ctypes.data for a in args))
    # As CuPy does: a grid without blocks is launched with one.
    grid = (ctypes.c_uint * 3)(*(max(1, n) for n in launch.grid))
    assert launch.block[1:] == (1, 1)
    return _RESULTS[library[f"run_{symbol}"](grid, launch.block[0], pointers, flags)]


def pointer(array: Array | None) -> Array:
    """An argument that points to an array."""
    return np.array(0 if array is None else array.ctypes.data, np.uint64)


class CpuModule:
    """Some kernels compiled for one set of macros, as a `cupy.RawModule` would be."""

    def __init__(self, names: tuple[str, ...], macros: dict[str, object], extra: str = "") -> None:
        defines = (d[2:].replace("=", " ", 1) for d in ck.defines(names[0], **macros))
        text = [*(f"#define {d}" for d in defines), ck.source(*names), extra]
        self.library = build("\n".join([*text, *(f"SHIM_KERNEL(lazykv_{n})" for n in names)]))

    def kinds(self, name: str) -> list[str | int]:
        """What the compiler takes a kernel's parameters for; a struct is its size."""
        out = (ctypes.c_int * 32)()
        count = self.library[f"kinds_{ck.KERNELS[name].symbol}"](out)
        return [_KINDS.get(kind, kind) for kind in out[:count]]

    def launch(self, name: str, launch: ck.Launch, *args: Any, flags: int = 0) -> None:
        """Arguments as for CuPy, with NumPy arrays for pointers and None for null."""
        kernel = ck.KERNELS[name]
        kept = [
            pointer(a) if kind == "pointer" else np.array(a, _SCALARS.get(kind) or ck.STRUCTS[kind])
            for (_, kind), a in zip(kernel.args, args, strict=True)
        ]
        wrong = run(self.library, kernel.symbol, launch, kept, flags)
        assert not wrong, f"{name}: {wrong}"


@cache
def module(*names: str, extra: str = "", **macros: object) -> CpuModule:
    return CpuModule(names, macros, extra)


class Memory:
    """Arrays between canaries and protected pages; `check` finds what no kernel may have written.

    Canaries are NaN to every float dtype. An array starts with a page, behind a protected one; the
    bytes up to the end of its last page are canaries, and the next page is protected.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._maps: list[tuple[Array, int, int, bytes | None]] = []

    def _array(self, data: Any, is_input: bool) -> Array:
        data = np.asarray(data)
        pages = -(-max(data.nbytes, 1) // mmap.PAGESIZE)
        size = (pages + 2) * mmap.PAGESIZE
        line = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        line[:] = 0xFF
        start = mmap.PAGESIZE
        made = line[start : start + data.nbytes].view(data.dtype).reshape(data.shape)
        made[...] = data
        self._protect(line[:start])
        self._protect(line[size - mmap.PAGESIZE :])
        before = made.tobytes() if is_input else None
        self._maps.append((line, start, start + data.nbytes, before))
        return made

    def input(self, data: Any) -> Array:
        """A contiguous copy that must stay as it is."""
        return self._array(data, True)

    def output(self, data: Any) -> Array:
        """A contiguous copy that kernels may write."""
        return self._array(data, False)

    def forbid(self, part: Array) -> None:
        """Protect whole pages of an array: whoever touches them fails. `check` is then limited."""
        assert part.flags.c_contiguous
        assert part.ctypes.data % mmap.PAGESIZE == 0
        assert part.nbytes % mmap.PAGESIZE == 0
        self._protect(part)
        self._maps = [m for m in self._maps if not np.shares_memory(m[0], part)]

    def _protect(self, part: Array) -> None:
        no_access = 0
        done = self._libc.mprotect(ctypes.c_void_p(part.ctypes.data), part.nbytes, no_access)
        assert done == 0, "whole pages can be protected"

    def check(self) -> None:
        for line, start, end, before in self._maps:
            page = line[end : len(line) - mmap.PAGESIZE]
            assert (page == 0xFF).all(), "bytes behind an array were written"
            if before is not None:
                assert line[start:end].tobytes() == before, "an input was written"
