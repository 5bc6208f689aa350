"""Names, arguments and source text of the CUDA kernels."""

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

AXES = 6
"""Most axes of a walk; what moves more after merging goes through the portable body."""

NO_WINDOW = 2**62
"""The window of an attention without one."""

_I64, _I32, _F32 = "<i8", "<i4", "<f4"

STRUCTS: dict[str, np.dtype[Any]] = {
    "walk": np.dtype(
        [
            ("shape", _I64, (AXES,)),
            ("dest", _I64, (AXES,)),
            ("src", _I64, (AXES,)),
            ("size", _I64),
            ("rank", _I64),
        ]
    ),
    "rope": np.dtype(
        [
            ("batch", _I64),
            ("heads", _I64),
            ("queries", _I64),
            ("half", _I64),
            ("x_step", _I64, (3,)),
            ("table_step", _I64, (2,)),
            ("interleaved", _I64),
        ]
    ),
    "attention": np.dtype(
        [
            ("q_step", _I64, (3,)),
            ("p_step", _I64, (3,)),
            ("k_step", _I64, (3,)),
            ("v_step", _I64, (3,)),
            ("batch", _I64),
            ("heads", _I64),
            ("kv_heads", _I64),
            ("queries", _I64),
            ("rows", _I64),
            ("length", _I64),
            ("window", _I64),
            ("sinks", _I64),
            ("blocks", _I64),
            ("block_size", _I64),
            ("table_step", _I64),
            ("causal", _I32),
            ("splits", _I32),
            ("scale", _F32),
        ],
        align=True,  # as C pads it at the end
    ),
    "gemv": np.dtype(
        [
            ("m", _I64),
            ("k", _I64),
            ("n", _I64),
            ("x_step", _I64),
            ("w_step", _I64),
            ("splits", _I64),
        ]
    ),
    "map": np.dtype(
        [
            ("shape", _I64, (AXES,)),
            ("x", _I64, (AXES,)),
            ("y", _I64, (AXES,)),
            ("z", _I64, (AXES,)),
            ("size", _I64),
            ("rank", _I64),
        ]
    ),
}
"""Arguments passed by value, field by field as the kernels declare them: the comments are there."""


def struct(name: str, **fields: object) -> npt.NDArray[np.void]:
    """One argument of a struct type; what is not named is 0.

    A 0-d structured array, which CuPy passes by value.
    """
    made = np.zeros((), STRUCTS[name])
    for field, value in fields.items():
        made[field] = value
    return made


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """One kernel: its source files in order, the macros it is compiled for, and its arguments.

    `args` are pairs of a name and a type: ``pointer``, ``i32``, ``i64``, ``f32`` or the name of a
    struct.
    """

    name: str
    files: tuple[str, ...]
    defines: tuple[str, ...]
    args: tuple[tuple[str, str], ...]

    @property
    def symbol(self) -> str:
        """Its name in the compiled module."""
        return f"lazykv_{self.name}"


def _args(text: str) -> tuple[tuple[str, str], ...]:
    """``"dest* src* start:i64"``: pointers end with a star."""
    pairs = []
    for word in text.split():
        name, _, kind = word.partition(":")
        pairs.append((name.rstrip("*"), kind or "pointer"))
    return tuple(pairs)


_CORE = ("attention_core.cu",)
_HEADS = ("QUERY", "ROW", "DIM", "VALUE_DIM", "LINES", "TEAM", "VEC")
_PARTS = "part_values* part_stats* error* args:attention"

_ROWS: list[tuple[str, tuple[str, ...], tuple[str, ...], str]] = [
    ("copy", ("moves.cu",), ("BYTES",), "dest* src* start:i64 walk:walk"),
    ("write_slice_at", ("moves.cu",), ("BYTES",),
     "dest* src* offset* dest_rows:i64 error* walk:walk"),
    ("write_slice_rotating", ("moves.cu",), ("BYTES",),
     "dest* src* position* modulus:i64 sinks:i64 error* walk:walk"),
    ("write_rows_check", ("moves.cu",), ("BYTES",),
     "usable* owner* rows* n:i64 count* dest_rows:i64 error*"),
    ("write_rows", ("moves.cu",), ("BYTES",), "dest* src* rows* usable* walk:walk"),
    ("take", ("moves.cu",), ("BYTES",),
     "dest* table* ids* ids_type:i32 table_rows:i64 error* walk:walk"),
    ("rms_norm", ("norm.cu",), ("ELEMENT",),
     "out* x* weight* rows:i64 width:i64 step:i64 eps:f32"),
    ("softmax", ("norm.cu",), ("ELEMENT",), "out* x* rows:i64 width:i64 step:i64"),
    ("rope", ("rope.cu",), ("ELEMENT",), "out* x* cos* sin* args:rope"),
    ("attention", (*_CORE, "attention.cu"), _HEADS, f"out* q* k* v* length* {_PARTS}"),
    ("paged_attention", (*_CORE, "paged_attention.cu"), _HEADS,
     f"out* q* k_pool* v_pool* block_table* context_lens* {_PARTS}"),
    ("ring_attention", (*_CORE, "ring_attention.cu"), _HEADS, f"out* q* k* v* length* {_PARTS}"),
    ("latent_attention", (*_CORE, "latent_attention.cu"), _HEADS,
     f"out* q_latent* q_rope* latent* rope* length* {_PARTS}"),
    ("attention_reduce", _CORE, _HEADS, "out* part_values* part_stats* lines:i64 splits:i64"),
    ("gemv", ("gemv.cu",), ("INPUT", "WEIGHT", "LINES", "VEC"), "out* x* w* part* args:gemv"),
    ("gemv_reduce", ("gemv.cu",), ("INPUT", "WEIGHT", "LINES", "VEC"),
     "out* part* size:i64 splits:i64"),
    ("map", ("elementwise.cu",), ("OUT", "X", "Y", "Z", "INPUTS", "EXPR"),
     "out* x* y* z* real:f32 whole:i64 args:map"),
]  # fmt: skip

KERNELS: dict[str, CudaKernel] = {
    name: CudaKernel(name, ("common.cu", *files), defines, _args(args))
    for name, files, defines, args in _ROWS
}

ID_TYPES = {"i32": 0, "u32": 1, "i64": 2}
"""``ids_type`` of `take`, by dtype name."""


@cache
def source(*names: str) -> str:
    """The text of one module with these kernels; they must be compiled for the same macros."""
    files: dict[str, None] = {}
    for name in names:
        files |= dict.fromkeys(KERNELS[name].files)
    folder = resources.files(__package__)
    parts = [f'#line 1 "{f}"\n{(folder / f).read_text(encoding="utf-8")}' for f in files]
    return "\n".join(parts)


def defines(name: str, **macros: object) -> tuple[str, ...]:
    """Compiler options ``-DNAME=value`` for all macros of a kernel; dtypes go by lazykv's names."""
    assert set(macros) == set(KERNELS[name].defines), f"{name} is compiled for other macros"
    return tuple(f"-D{key}={macros[key]}" for key in KERNELS[name].defines)
