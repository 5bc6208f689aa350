"""All kernels compiled by NVRTC, as CuPy would, for several generations of GPUs."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import nvrtc
import pytest

from lazykv.backends import cuda_kernels as ck

pytestmark = nvrtc.needs_nvrtc

MOVES = ("copy", "write_slice_at", "write_slice_rotating", "write_rows_check", "write_rows", "take")
ROWS = ("rms_norm", "softmax", "rope")
ATTENTION = ("attention", "paged_attention", "ring_attention", "attention_reduce")
PAIRS = [("f32", "f32"), ("f32", "f16"), ("f32", "bf16"), ("f16", "f16"), ("bf16", "bf16")]


def variants() -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every kernel and dtype, in modules of kernels that are compiled for the same macros."""
    made: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    made += [(MOVES, {"BYTES": n}) for n in (1, 2, 4, 8, 16)]
    made += [(ROWS, {"ELEMENT": t}) for t in ("f32", "f16", "bf16")]
    for a, b in PAIRS:
        shape = {"VALUE_DIM": 32, "LINES": 2, "TEAM": 8, "VEC": 4}
        made.append((ATTENTION, {"QUERY": a, "ROW": b, "DIM": 32, **shape}))
        made.append((("latent_attention",), {"QUERY": a, "ROW": b, "DIM": 64, **shape}))
        made.append((("attention_reduce",), {"QUERY": a, "ROW": b, "DIM": 64, **shape}))
        made.append((("gemv", "gemv_reduce"), {"INPUT": a, "WEIGHT": b, "LINES": 2, "VEC": 4}))
    some = {"OUT": "bf16", "X": "u8", "Y": "f64", "Z": "f16", "INPUTS": 3}
    made.append((("map",), {**some, "EXPR": "x?y:z*real+whole+index"}))
    return made


def compiled(
    names: tuple[str, ...], macros: dict[str, Any], arch: str, *options: str
) -> tuple[str, bytes]:
    """The log and the code; a failure shows the log."""
    options = (f"-arch={arch}", *nvrtc.CUPY_OPTIONS, *options, *ck.defines(names[0], **macros))
    status, log, code = nvrtc.compile_code(ck.source(*names), "kernels.cu", options)
    assert status == 0, f"{names} {macros} {arch}\n{log}"
    return log, code


def test_every_kernel_is_among_the_variants() -> None:
    assert {name for names, _ in variants() for name in names} == set(ck.KERNELS)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_every_variant_compiles_without_a_warning(arch: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        for (names, macros), (log, code) in zip(
            variants(), pool.map(lambda v: compiled(*v, arch), variants()), strict=True
        ):
            assert log == "", f"{names} {macros}\n{log}"
            for name in names:
                assert ck.KERNELS[name].symbol.encode() in code


def test_the_compiler_would_warn() -> None:
    source = 'extern "C" __global__ void f() { int unused; }'
    status, log, _ = nvrtc.compile_code(source, "f.cu", ("-arch=sm_90",))
    assert status == 0
    assert "unused" in log
    assert nvrtc.compile_code("__global__ void f() { g(); }", "f.cu", ("-arch=sm_90",))[0] != 0


# Dtypes, extents of keys and values, and lines of a key head, as models have them.
MODELS = [
    ("f32", "f32", 64, 64, 3), ("f32", "f16", 128, 128, 8), ("bf16", "bf16", 128, 128, 4),
    ("f16", "f16", 256, 256, 2), ("f32", "f32", 576, 512, 16), ("bf16", "bf16", 576, 512, 128),
]  # fmt: skip


@pytest.mark.parametrize(("query", "row", "dim", "value_dim", "lines"), MODELS)
def test_what_a_thread_holds_fits_in_its_registers(
    query: str, row: str, dim: int, value_dim: int, lines: int
) -> None:
    shape = ck.attention_shape(4 if row == "f32" else 2, dim, value_dim, lines)
    assert shape is not None
    macros = {"QUERY": query, "ROW": row, "DIM": dim, "VALUE_DIM": value_dim}
    macros |= {"LINES": shape.lines, "TEAM": shape.team, "VEC": shape.vec}
    name = "latent_attention" if dim != value_dim else "paged_attention"
    log, _ = compiled((name,), macros, "sm_90", "--ptxas-options=-v")
    spills = re.findall(r"(\d+) bytes spill stores", log)
    assert len(spills) == 2, log
    assert set(spills) == {"0"}, log


@pytest.mark.parametrize("name", ["copy", "paged_attention", "gemv"])
def test_rows_are_read_16_bytes_at_a_time(name: str) -> None:
    macros: dict[str, Any] = {
        "copy": {"BYTES": 16},
        "paged_attention": {"QUERY": "f32", "ROW": "f16", "DIM": 64, "VALUE_DIM": 64, "LINES": 4,
                            "TEAM": 8, "VEC": 8},
        "gemv": {"INPUT": "f32", "WEIGHT": "bf16", "LINES": 1, "VEC": 8},
    }  # fmt: skip
    _, code = compiled((name,), macros[name], "compute_80")
    assert re.search(rb"ld\.global(\.nc)?\.v(4\.[ufb]32|2\.[ub]64)", code)
