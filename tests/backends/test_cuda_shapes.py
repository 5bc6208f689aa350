"""Arguments, launches and walks of the CUDA kernels, and that source and table agree."""

import itertools
import math
import re
from importlib import resources
from typing import Any

import numpy as np
import pytest
from cuda_cpu import module, needs_compiler
from hypothesis import given
from hypothesis import strategies as st
from test_cuda_compile import variants

from lazykv.backends import cuda_kernels as ck

FILES = {f.name: f.read_text() for f in resources.files(ck).iterdir() if f.name.endswith(".cu")}


def test_the_table_names_all_files_and_kernels_there_are() -> None:
    assert {f for k in ck.KERNELS.values() for f in k.files} == set(FILES)
    for name, kernel in ck.KERNELS.items():
        assert f"{kernel.symbol}(" in FILES[kernel.files[-1]], name
    defined = re.findall(r"^(?:lazykv_)(\w+)\(", "\n".join(FILES.values()), re.MULTILINE)
    assert sorted(defined) == sorted(ck.KERNELS)


def test_files_include_nothing_and_name_themselves() -> None:
    text = ck.source("attention", "paged_attention")
    assert "#include" not in text
    lines = re.findall(r'#line 1 "(.*)"', text)
    assert lines == ["common.cu", "attention_core.cu", "attention.cu", "paged_attention.cu"]


@needs_compiler
@pytest.mark.parametrize("names", sorted({names for names, _ in variants()}))
def test_parameters_are_what_the_table_says(names: tuple[str, ...]) -> None:
    macros = next(m for n, m in variants() if n == names)
    sizes = {name: dtype.itemsize for name, dtype in ck.STRUCTS.items()}
    for name in names:
        wanted = [sizes.get(kind, kind) for _, kind in ck.KERNELS[name].args]
        assert module(*names, **macros).kinds(name) == wanted, name


def test_structs_have_the_fields_of_the_source() -> None:
    source = "\n".join(FILES.values())
    for name, c_name in (("walk", "Walk"), ("rope", "RopeArgs"), ("attention", "AttentionArgs"),
                         ("gemv", "GemvArgs"), ("map", "MapArgs")):  # fmt: skip
        found = re.search(rf"struct {c_name} {{(.*?)}};", source, re.DOTALL)
        assert found is not None
        body = re.sub(r"//.*", "", found[1])
        fields = []
        for kind, group in re.findall(r"(\w+) ([^;]+);", body):
            for field in group.split(","):
                part = re.fullmatch(r"(\w+)(?:\[(\w+)\])?", field.strip())
                assert part is not None
                count = ck.AXES if part[2] == "AXES" else int(part[2] or 0)
                fields.append((part[1], kind, count))
        wanted = []
        for field in ck.STRUCTS[name].names or ():
            dtype = ck.STRUCTS[name].fields[field][0]  # type: ignore[index]
            kind = {"<i8": "i64", "<i4": "i32", "<f4": "f32"}[dtype.base.str]
            wanted.append((field, kind, math.prod(dtype.shape) if dtype.shape else 0))
        assert fields == wanted


def test_blocks_are_as_large_as_the_source_is_bound_to() -> None:
    sizes: dict[str, Any] = {
        "rms_norm": {"rows": 9}, "softmax": {"rows": 9}, "write_rows_check": {},
        "attention_reduce": {"lines": 9}, "gemv": {"n": 9, "vec": 1, "splits": 2},
    }  # fmt: skip
    attention = {"batch": 2, "heads": 8, "kv_heads": 2, "queries": 3, "lines": 4, "splits": 5}
    for name, kernel in ck.KERNELS.items():
        own = attention if name.endswith("attention") else {"size": 9}
        launch = ck.launch_of(name, **sizes.get(name, own))
        text = FILES[kernel.files[-1]]
        bound = re.search(rf"__launch_bounds__\((\w+)\)\n{kernel.symbol}\(", text)
        assert bound is not None, name
        assert launch.block == (128 if bound[1] == "THREADS" else int(bound[1]), 1, 1)
        if name.endswith("attention"):
            assert launch.grid == (3 * 5, 2, 2)  # 12 lines a key head in tiles of 4


@pytest.mark.parametrize("itemsize", [2, 4])
def test_attention_shapes_fit(itemsize: int) -> None:
    for dim, value_dim, lines in itertools.product(
        (1, 7, 64, 80, 128, 256, 576, 1000), (1, 5, 64, 128, 512), (1, 2, 3, 8, 500)
    ):
        shape = ck.attention_shape(itemsize, dim, value_dim, lines, (dim, value_dim, 8 * dim))
        assert shape is not None
        assert dim % shape.vec == value_dim % shape.vec == 0
        assert 32 % shape.team == 0
        assert shape.lines in (1, 2, 4)
        assert shape.lines < 2 * lines
        assert shape.lines * (dim + value_dim) <= 144 * shape.team
        assert 4 * 4 * shape.lines * (value_dim + 2) <= 48 << 10
    assert ck.attention_shape(4, 4000, 4000, 1) is None
    assert ck.attention_shape(4, 64, 0, 1) is None


def test_loads_are_as_wide_as_alignment_allows() -> None:
    shape = ck.attention_shape(2, 64, 64, 4, (64, 4096), (1 << 20, 1 << 16))
    assert shape == ck.AttentionShape(4, 8, 8)
    for steps, addresses, vec in (((68,), (0,), 4), ((64,), (4,), 2), ((64, 7), (0,), 1)):
        narrow = ck.attention_shape(2, 64, 64, 4, steps, addresses)
        assert narrow is not None
        assert narrow.vec == vec
    assert ck.gemv_vec(4, 96, (96,), (64,)) == 4
    assert ck.gemv_vec(2, 100, (104,), (64,)) == 4
    assert ck.gemv_vec(2, 96, (97,), (64,)) == 1


def test_splits_fill_the_gpu_but_not_beyond_what_there_is_to_do() -> None:
    assert ck.attention_splits(8, 100, 1) == 1
    assert ck.attention_splits(8, 8192, 1) == 27
    assert ck.attention_splits(1, 1 << 20, 1) == 64
    assert ck.attention_splits(500, 8192, 1) == 1
    assert ck.attention_splits(8, 8192, 1, window=512) == 2
    assert ck.attention_splits(0, 0, 0) == 1
    assert ck.attention_scratch(10, 1, 64) == (0, 0)
    assert ck.attention_scratch(10, 3, 64) == (1920, 60)
    assert ck.gemv_splits(576, 576, 4) == 9
    assert ck.gemv_splits(576, 49152, 4) == 1
    assert ck.gemv_splits(0, 0, 4) == 1
    assert [ck.gemv_lines(m) for m in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]
    assert (ck.gemv_scratch(2, 10, 1), ck.gemv_scratch(2, 10, 3)) == (0, 60)


@st.composite
def views(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A shape, and strides of two permuted slices of larger contiguous arrays."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), max_size=5)))
    sides = []
    for _ in range(2):
        order = draw(st.permutations(range(len(shape))))
        strides, step = [0] * len(shape), 1
        for axis in order:
            strides[axis] = step
            step *= shape[axis] + draw(st.sampled_from([0, 0, 0, 1, 4]))
        sides.append(tuple(strides))
    return shape, sides[0], sides[1]


def bytes_moved(
    shape: Any, dest: Any, src: Any, size: int, rank: int
) -> set[tuple[int, int]]:  # fmt: skip
    """Where every byte goes: pairs of offsets."""
    moved = set()
    for index in np.ndindex(*(int(n) for n in shape[:rank])):
        to = size * sum(i * int(s) for i, s in zip(index, dest, strict=False))
        at = size * sum(i * int(s) for i, s in zip(index, src, strict=False))
        moved |= {(to + n, at + n) for n in range(size)}
    return moved


@given(views(), st.sampled_from([1, 2, 4, 8]), st.sampled_from([16, 8, 4]), st.booleans())
def test_a_walk_moves_the_same_bytes(views: Any, itemsize: int, aligned: int, rows: bool) -> None:
    shape, dest, src = views
    by_row = rows and bool(shape)
    move = ck.move_of(shape, dest, src, itemsize, by_row=by_row, addresses=(16, 16 + aligned))
    assert move is not None
    assert move.element_bytes == itemsize * move.scale
    assert move.element_bytes <= max(itemsize, aligned)
    walk, rank = move.walk, int(move.walk["rank"])
    assert move.size == math.prod(walk["shape"][:rank].tolist())
    if by_row:
        assert (walk["shape"][0], walk["dest"][0] * move.scale) == (shape[0], dest[0])
    wanted = bytes_moved(shape, dest, src, itemsize, len(shape))
    got = bytes_moved(walk["shape"], walk["dest"], walk["src"], move.element_bytes, rank)
    assert got == wanted
