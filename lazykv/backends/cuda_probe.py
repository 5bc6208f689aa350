"""What a machine has for the CUDA backend, found out stage by stage.

Importing CuPy, `cupy.cuda.Device(0)` and `cupy.RawModule(...)` all succeed without a GPU, so every
stage does what it is named for and looks at the result.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

CUPY_MAJOR = 14

_EXTRAS = "pip install 'lazykv[cuda13]' or 'lazykv[cuda12]'"
_TOOLKIT = f"{_EXTRAS}, or a CUDA toolkit of CuPy's major version (CUDA_PATH)"
_SOURCE = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'
_VALUES = np.arange(32, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class Stage:
    """One thing the backend needs: what was found, and what to do about it if it is not `ok`."""

    name: str
    ok: bool
    detail: str
    hint: str


def probe() -> list[Stage]:
    """The stages up to the first that is not ok: ``cupy``, ``driver``, ``device``, ``memory``,
    ``compiler``, ``libraries`` and ``capture``. Never raises.

    ``capture`` is the last, since a backend does without it. All run on CuPy's current device,
    which is the first one unless another was made current: CUDA keeps some hundred MB there from
    then on.
    """
    made: list[Stage] = []
    cupy: Any = None
    for name, check, hint in _STAGES:
        try:
            if cupy is None:
                cupy = importlib.import_module("cupy")
            made.append(Stage(name, *check(cupy), hint))
        except (Exception, SystemExit) as e:  # some packages leave when a driver is missing
            text = " ".join(str(e).split())
            made.append(Stage(name, False, f"{type(e).__name__}: {text}", hint))
        if not made[-1].ok:
            break
    return made


def _cupy(cupy: Any) -> tuple[bool, str]:
    major = int(str(cupy.__version__).partition(".")[0])
    return major >= CUPY_MAJOR, f"CuPy {cupy.__version__}"


def _driver(cupy: Any) -> tuple[bool, str]:
    """Of a major version of CUDA all releases run on the driver of the first one."""
    have, built = cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.runtimeGetVersion()
    if not have:
        return False, "no CUDA driver"
    text = f"driver of CUDA {version(have)}, CuPy for CUDA {version(built)}"
    return have // 1000 >= built // 1000, text


def version(number: int) -> str:
    """Of CUDA: 12090 is ``12.9``."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _device(cupy: Any) -> tuple[bool, str]:
    count = cupy.cuda.runtime.getDeviceCount()
    return count > 0, f"{count} devices"


def _memory(cupy: Any) -> tuple[bool, str]:
    back = cupy.asnumpy(cupy.asarray(_VALUES))
    return bool((back == _VALUES).all()), f"{back.nbytes} bytes there and back"


def _compiler(cupy: Any) -> tuple[bool, str]:
    return _doubled(cupy, lambda kernel, x: kernel((1,), (32,), (x,))), "NVRTC compiles"


def _libraries(cupy: Any) -> tuple[bool, str]:
    """CuPy loads cuBLAS at the first product, and compiles its own kernels with headers of CUDA."""
    ones = cupy.asarray(np.ones((16, 16), np.float16))
    made = cupy.asnumpy(cupy.matmul(ones, ones) + 1)
    return bool((made == 17).all()), "cuBLAS and CuPy's own kernels run"


def _capture(cupy: Any) -> tuple[bool, str]:
    def run(kernel: Any, x: Any) -> None:
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture()
        kernel((1,), (32,), (x,))
        graph = stream.end_capture()
        if not (cupy.asnumpy(x) == _VALUES).all():
            raise RuntimeError("the kernel ran while it was captured")
        graph.launch(stream)

    return _doubled(cupy, run), "streams are captured and replayed"


def _doubled(cupy: Any, run: Callable[[Any, Any], None]) -> bool:
    """Whether a kernel that doubles its argument does so."""
    with cupy.cuda.Stream(non_blocking=True):
        kernel = cupy.RawModule(code=_SOURCE).get_function("twice")
        x = cupy.asarray(_VALUES)
        run(kernel, x)
        return bool((cupy.asnumpy(x) == 2 * _VALUES).all())


_STAGES: tuple[tuple[str, Callable[[Any], tuple[bool, str]], str], ...] = (
    ("cupy", _cupy, f"CuPy >= {CUPY_MAJOR}; {_EXTRAS}"),
    ("driver", _driver, f"an NVIDIA driver as new as CuPy's CUDA; {_EXTRAS}, as the driver allows"),
    ("device", _device, "a GPU; see `nvidia-smi` and CUDA_VISIBLE_DEVICES"),
    ("memory", _memory, "a GPU with free memory; see `nvidia-smi`"),
    ("compiler", _compiler, f"CUDA's NVRTC and headers; {_TOOLKIT}"),
    ("libraries", _libraries, f"CUDA's cuBLAS and headers; {_TOOLKIT}"),
    ("capture", _capture, "a driver that captures streams"),
)
