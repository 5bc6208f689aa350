"""A stand-in for the parts of CuPy that the CUDA backend uses, on the CPU.

It keeps what makes a GPU a GPU: work is queued on streams and runs when somebody waits, streams
know nothing of each other but for events, memory is reused in the order of its stream and holds a
pattern once freed, and queued work refers to memory by address only. Kernels are the shipped
source, compiled by g++. What CuPy refuses is refused: host arrays as operands, pageable copies that
would not be asynchronous, cuBLAS and waiting inside a capture, arrays of another device.

`installed` puts it in the place of CuPy.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from fake_cupy import arrays, dlpack, kernels, memory, runtime, streams
from fake_cupy.machine import CUDADriverError, Machine, machine

FUNCTIONS = (
    "add", "any", "arange", "asarray", "ascontiguousarray", "asnumpy", "astype", "broadcast_to",
    "concat", "divide", "empty", "empty_like", "equal", "exp", "expand_dims", "full", "greater",
    "greater_equal", "isfinite", "less", "less_equal", "logical_and", "matmul",
    "matrix_transpose", "max", "mean", "min", "moveaxis", "multiply", "nextafter", "not_equal",
    "ones_like", "permute_dims", "remainder", "reshape", "sqrt", "squeeze", "subtract", "sum",
    "take", "tanh", "where", "zeros", "zeros_like",
)  # fmt: skip
"""The functions of the namespace; the tests check that CuPy has them."""


DTYPES = ("bool", "int8", "int32", "int64", "uint8", "uint32", "float16", "float32", "float64")


def _namespace(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


def build(cupy: ModuleType | None = None) -> ModuleType:
    """The module `cupy`; of CuPy itself, if given, the arrays and what makes views of them."""
    cuda = _namespace(
        "cupy.cuda",
        Device=streams.Device, Stream=streams.Stream, Event=streams.Event, Graph=streams.Graph,
        get_current_stream=streams.current_stream, get_elapsed_time=streams.get_elapsed_time,
        MemoryPool=memory.MemoryPool, UnownedMemory=memory.UnownedMemory,
        MemoryPointer=memory.MemoryPointer,
        using_allocator=memory.using_allocator, alloc_pinned_memory=memory.alloc_pinned_memory,
        memory=_namespace("cupy.cuda.memory", OutOfMemoryError=memory.OutOfMemoryError),
        runtime=runtime, driver=_namespace("cupy.cuda.driver", CUDADriverError=CUDADriverError),
    )  # fmt: skip
    made = _namespace("cupy", __version__="14.2.0", inf=np.inf, isdtype=np.isdtype)
    vars(made).update({name: getattr(np, name) for name in DTYPES})
    vars(made).update({name: arrays.function(name) for name in FUNCTIONS})
    vars(made).update(ndarray=arrays.ndarray, from_dlpack=dlpack.from_dlpack)
    if cupy is not None:
        # What CuPy is made of looks for `_core` in whatever module has its name.
        own = (*FUNCTIONS, "ndarray", "_core")
        vars(made).update({name: getattr(cupy, name) for name in own})
        cuda.UnownedMemory, cuda.MemoryPointer = cupy.cuda.UnownedMemory, cupy.cuda.MemoryPointer
    vars(made).update(cuda=cuda, RawModule=kernels.RawModule)
    return made


@contextmanager
def installed(
    devices: int = 2, heap_bytes: int = 32 << 20, cupy: ModuleType | None = None
) -> Iterator[Machine]:
    """A fresh machine, and `import cupy` gives the stand-in."""
    before = sys.modules.get("cupy")
    machine.reset(devices, heap_bytes)
    machine.cupy = cupy
    sys.modules["cupy"] = build(cupy)
    try:
        yield machine
    finally:
        del sys.modules["cupy"]
        if before is not None:
            sys.modules["cupy"] = before
