"""What runs CUDA on the CPU finds the faults it is there to find."""

from typing import Any

import numpy as np
import pytest
from cuda_cpu import BACKWARDS, Array, Memory, build, needs_compiler, pointer, run

from lazykv.backends import cuda_kernels as ck

pytestmark = needs_compiler

KERNELS = """
extern "C" __global__ void turned(float* out, float* in) {
    __shared__ float line[64];
    line[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = line[(threadIdx.x + 1) % 64];
}
extern "C" __global__ void turned_without_barrier(float* out, float* in) {
    __shared__ float line[64];
    line[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = line[(threadIdx.x + 1) % 64];
}
extern "C" __global__ void overwritten_without_barrier(float* out, float* in) {
    __shared__ float line[64];
    line[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = line[(threadIdx.x + 1) % 64];
    line[threadIdx.x] = 0;
}
extern "C" __global__ void summed(float* out, float* in) {
    float x = in[threadIdx.x];
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    out[threadIdx.x] = x;
}
extern "C" __global__ void barrier_of_some(float* out, float*) {
    if (threadIdx.x != 5) __syncthreads();
    out[threadIdx.x] = 0;
}
extern "C" __global__ void shuffle_of_some(float* out, float*) {
    if (threadIdx.x != 5) out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}
extern "C" __global__ void one_too_many(float* out, float*) { out[threadIdx.x + 1] = 1; }
extern "C" __global__ void before_the_first(float* out, float* in) {
    out[threadIdx.x] = in[(int)threadIdx.x - 1];
}
extern "C" __global__ void unaligned(float* out, float* in) {
    struct alignas(16) Four { float at[4]; };
    Four four = *reinterpret_cast<Four*>(in + 1);
    out[threadIdx.x] = four.at[threadIdx.x % 4];
}
"""
NAMES = [line.split("void ")[1].split("(")[0] for line in KERNELS.splitlines() if "void " in line]
ONE_BLOCK = ck.Launch((1, 1, 1), (64, 1, 1))


@pytest.fixture(scope="module")
def library() -> Any:
    return build("\n".join([KERNELS, *(f"SHIM_KERNEL({name})" for name in NAMES)]))


def both_ways(library: Any, name: str, out: Array, given: Array) -> list[Array]:
    made = []
    for flags in (0, BACKWARDS):
        out[:] = -1
        assert run(library, name, ONE_BLOCK, [pointer(out), pointer(given)], flags) == ""
        made.append(out.copy())
    return made


def test_barriers_and_shuffles_work(memory: Memory, library: Any) -> None:
    given = memory.input(np.arange(64, dtype=np.float32))
    out = memory.output(np.zeros(64, np.float32))
    for made in both_ways(library, "turned", out, given):
        np.testing.assert_array_equal(made, np.roll(given, -1))
    for made in both_ways(library, "summed", out, given):
        np.testing.assert_array_equal(made, np.repeat(given.reshape(2, 32).sum(1), 32))


@pytest.mark.parametrize("name", ["turned_without_barrier", "overwritten_without_barrier"])
def test_a_missing_barrier_is_seen(memory: Memory, library: Any, name: str) -> None:
    given = memory.input(np.arange(1, 65, dtype=np.float32))
    out = memory.output(np.zeros(64, np.float32))
    made = both_ways(library, name, out, given)
    assert any((a != np.roll(given, -1)).any() for a in made)


@pytest.mark.parametrize(
    ("name", "fault"),
    [("barrier_of_some", "never come"), ("shuffle_of_some", "never come"),
     ("before_the_first", "protected memory")],
)  # fmt: skip
def test_a_fault_ends_the_launch(memory: Memory, library: Any, name: str, fault: str) -> None:
    given, out = (memory.output(np.zeros(64, np.float32)) for _ in range(2))
    assert fault in run(library, name, ONE_BLOCK, [pointer(out), pointer(given)], 0)


def test_a_write_behind_an_array_is_seen(library: Any) -> None:
    memory = Memory()
    out = memory.output(np.zeros(64, np.float32))
    assert run(library, "one_too_many", ONE_BLOCK, [pointer(out), pointer(out)], 0) == ""
    with pytest.raises(AssertionError, match="behind an array"):
        memory.check()


def test_an_unaligned_load_is_seen(library: Any, capfd: pytest.CaptureFixture[str]) -> None:
    memory = Memory()
    given, out = (memory.output(np.zeros(64, np.float32)) for _ in range(2))
    run(library, "unaligned", ONE_BLOCK, [pointer(out), pointer(given)], 0)
    assert "runtime error" in capfd.readouterr().err


def test_half_a_warp_is_refused(memory: Memory, library: Any) -> None:
    out = memory.output(np.zeros(64, np.float32))
    some = ck.Launch((1, 1, 1), (48, 1, 1))
    assert "half warps" in run(library, "turned", some, [pointer(out), pointer(out)], 0)
