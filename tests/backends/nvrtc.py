"""NVRTC through ctypes: compiles CUDA C for a GPU architecture on a machine without a GPU."""

import ctypes
import importlib.util
import platform
import sys
from functools import cache
from pathlib import Path

import pytest

# What CuPy adds to the options of every RawModule, so that we compile what it will run.
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")


@cache
def library() -> ctypes.CDLL | None:
    """The library of the wheel nvidia-cuda-nvrtc-cu12, or None where it is not installed."""
    try:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder, "lib").glob("libnvrtc.so.*")):
            return ctypes.CDLL(str(path))
    return None


# The `test` extra brings the library there: its absence is a failure, not a reason to skip.
needs_nvrtc = pytest.mark.skipif(
    library() is None and (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="nvidia-cuda-nvrtc-cu12 is not installed",
)


def compile_code(source: str, name: str, options: tuple[str, ...]) -> tuple[int, str, bytes]:
    """The status (0 is success), the log, and machine code (PTX where -arch is a compute_NN)."""
    nvrtc = library()
    assert nvrtc is not None, "need nvidia-cuda-nvrtc-cu12, of the test extra"
    program = ctypes.c_void_p()
    code = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), name.encode(), 0, None, None
    )
    assert code == 0, f"nvrtcCreateProgram: status {code}"
    try:
        array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), array)
        log = _read(nvrtc, "ProgramLog", program).rstrip(b"\0\n").decode()
        kind = "PTX" if any(o.startswith("-arch=compute") for o in options) else "CUBIN"
        return status, log, b"" if status else _read(nvrtc, kind, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    assert getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{what}")(program, text) == 0
    return text.raw
