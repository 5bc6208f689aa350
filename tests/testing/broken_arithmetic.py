"""Backends that compute something else."""

from dataclasses import replace

import numpy as np
from broken_backends import Cpu, caught, go

from lazykv.backends.cpu import CpuBackend
from lazykv.device import Capabilities, Kernel
from lazykv.dtypes import bf16, f32, to_logical
from lazykv.ops import elementwise as ew
from lazykv.ops.matmul import MatMul
from lazykv.ops.move import Cast, Where
from lazykv.ops.norm import RmsNorm
from lazykv.ops.reduce import Max, Softmax, Sum
from lazykv.ops.rope import Rope


@caught("core/test_elementwise.py", "test_op[add-f32-empty]", "add and f32")
class CrashesOnZeroSizes(Cpu):
    ops = (ew.Add,)

    def run(self, inner, call):
        assert 256 // call.out.size >= 0
        go(inner, call)


@caught("dtype/test_rounding.py", "rounds_once_to_the_nearest_even[f32-bf16]", "bf16")
class TruncatesToBf16(Cpu):
    ops = (Cast,)

    def run(self, inner, call):
        if call.out_spec.dtype is not bf16 or call.in_specs[0].dtype is not f32:
            go(inner, call)
        else:
            call.out[...] = np.ascontiguousarray(call.ins[0]).reshape(call.out.shape).view(
                np.uint32
            ) >> 16  # fmt: skip


@caught("dtype/test_rounding.py", "test_sums_of_16_bit_floats_are_wide[bf16]", "wide")
class AddsUpInBf16(Cpu):
    ops = (Sum,)

    def run(self, inner, call):
        if call.out_spec.dtype is not bf16:
            return go(inner, call)
        rows = np.moveaxis(to_logical(call.ins[0], bf16), call.op.axis, 0)
        total = np.zeros_like(rows[0])
        for row in rows:
            total = total + row
        to_logical(call.out, bf16)[...] = total.reshape(call.out.shape)
        return None


@caught("core/test_reductions.py", "test_op[softmax_steep-f32-", "softmax_steep-f32")
class SoftmaxWithoutMaximum(Cpu):
    ops = (Softmax,)

    def run(self, inner, call):
        if call.out_spec.dtype is not f32:
            return go(inner, call)
        e = np.exp(call.ins[0])
        total = e.sum(call.op.axis, keepdims=True)
        call.out[...] = e / np.where(total == 0, 1, total)
        return None


@caught(
    "core/test_reductions.py", "test_op[rope_halves-f32-", "rope_halves-f32 or rope_interleaved-f32"
)
class PairsRopeTheOtherWay(Cpu):
    ops = (Rope,)

    def change(self, call):
        return replace(call, op=replace(call.op, interleaved=not call.op.interleaved))

    def kernel(self, op, ins, out):
        inner = CpuBackend.kernel(self, op, ins, out)
        if not isinstance(op, Rope):
            return inner
        other = CpuBackend.kernel(self, replace(op, interleaved=not op.interleaved), ins, out)
        return Kernel(lambda call: other.emit(self.change(call)), other.scratch)


@caught("core/test_reductions.py", "test_op[rms_norm_large_eps-f32-", "large_eps-f32")
class AddsEpsilonOutsideTheRoot(Cpu):
    ops = (RmsNorm,)

    def run(self, inner, call):
        x, weight = call.ins
        if call.out_spec.dtype is not f32:
            return go(inner, call)
        root = np.sqrt((x * x).mean(-1, keepdims=True))
        call.out[...] = x / (root + np.float32(call.op.eps)) * weight
        return None


@caught("core/test_reductions.py", "test_op[max_special_axis1-f32-", "max_special_axis1-f32")
class MaximumPassesNansOver(Cpu):
    ops = (Max,)

    def run(self, inner, call):
        go(inner, call, ins=(np.where(np.isnan(call.ins[0]), -np.inf, call.ins[0]),))


@caught("core/test_elementwise.py", "test_op[mod_scalar-i32-", "mod_scalar and i32")
class RemainderTakesTheSignOfTheDividend(Cpu):
    ops = (ew.ModScalar,)

    def run(self, inner, call):
        call.out[...] = np.fmod(call.ins[0], call.op.value)


@caught("core/test_reductions.py", "test_op[matmul_row-f32-permuted]", "matmul_row and f32")
class MatrixIsTakenForRowMajor(Cpu):
    ops = (MatMul,)

    def run(self, inner, call):
        b = call.ins[1]
        if b.ndim == 2 and b.size and b.flags.f_contiguous and not b.flags.c_contiguous:
            b = np.ascontiguousarray(b.T).reshape(b.shape)
        go(inner, call, ins=(call.ins[0], b))


@caught("core/test_elementwise.py", "test_op[where-f32-sliced]", "where and f32")
class HasNoKernelForAnOp(Cpu):
    """And takes neither its body nor its lowering for it."""

    def kernel(self, op, ins, out):
        return None if isinstance(op, Where) else super().kernel(op, ins, out)


DECLARED = frozenset(
    {"copy", "write_slice", "zero_fill", "where", "silu", "neg", "exp", "add_scalar", "div"}
)


@caught("core/test_elementwise.py", "test_op[where-f32-sliced]", "where and f32")
class DeclaresAnOpItHasNot(HasNoKernelForAnOp):
    capabilities = Capabilities(host_memory=True, ops=DECLARED)


@caught("core/test_declared_ops.py", "test_it_runs_as_itself[silu]")
class DeclaresAnOpItLowers(Cpu):
    capabilities = Capabilities(host_memory=True, ops=DECLARED)

    def kernel(self, op, ins, out):
        return None if isinstance(op, ew.Silu) else super().kernel(op, ins, out)
