"""Backends that are wrong at the edges of number formats."""

import numpy as np
from broken_backends import Cpu, caught, go, with_operand

from lazykv.dtypes import bf16, f16, f32, f64, to_logical
from lazykv.ops import elementwise as ew
from lazykv.ops.attention import Attention
from lazykv.ops.latent_attention import LatentAttention
from lazykv.ops.move import Cast, Take
from lazykv.ops.norm import LayerNorm, RmsNorm
from lazykv.ops.paged_attention import PagedAttention
from lazykv.ops.reduce import Max, Mean
from lazykv.ops.ring_attention import RingAttention
from lazykv.ops.rounding import odd_f32
from lazykv.ops.write import WriteSliceDoff, WriteSliceRotating
from lazykv.ops.write_rows import WriteRows

INTEGERS, BOUNDS, EDGES = "core/test_integers.py", "core/test_bounds.py", "core/test_edges.py"
ROUNDING = "dtype/test_rounding.py"

# Whole numbers


class Whole(Cpu):
    """Computes with whole numbers in another dtype."""

    ops = (ew.Binary, ew.BinaryScalar)

    def other(self, array, dtype):
        raise NotImplementedError

    def run(self, inner, call):
        if call.in_specs[0].dtype.name[0] not in "iu":
            return go(inner, call)
        changed = [self.other(a, s.dtype) for a, s in zip(call.ins, call.in_specs, strict=True)]
        with np.errstate(all="ignore"):
            call.out[...] = np.asarray(call.op.body(np, *changed)).astype(call.out.dtype)
        return None


@caught(INTEGERS, "test_comparisons_are_exact[lt-i32]", "i32 or i64")
class IntegersGoThroughF32(Whole):
    def other(self, array, dtype):
        return array.astype(np.float32)


@caught(INTEGERS, "test_arithmetic_with_a_number_wraps[mod_scalar-i64]", "i64")
class IntegersGoThroughF64(Whole):
    def other(self, array, dtype):
        return array.astype(np.float64)


@caught(INTEGERS, "test_comparisons_are_exact[gt-u8]", "u8 or u32")
class UnsignedIsSigned(Whole):
    def other(self, array, dtype):
        signed = {"u8": np.int8, "u32": np.int32}.get(dtype.name)
        return (array if signed is None else array.copy().view(signed)).astype(np.int64)


@caught(INTEGERS, "test_arithmetic_wraps[add-i8]", "arithmetic and (i8 or u8)")
class SaturatesSmallIntegers(Cpu):
    ops = (ew.Add, ew.Sub, ew.Mul, ew.AddScalar, ew.MulScalar, ew.SubScalar)

    def run(self, inner, call):
        if call.out_spec.dtype.name not in ("i8", "u8"):
            return go(inner, call)
        wide = call.op.body(np, *(a.astype(np.int32) for a in call.ins))
        info = np.iinfo(call.out.dtype)
        call.out[...] = np.clip(wide, info.min, info.max)
        return None


class CastsBy(Cpu):
    """Whole numbers are cast by way of something else, to some dtypes."""

    ops = (Cast,)
    to = ("i8", "u8", "i32", "u32", "i64")

    def by(self, array, dtype):
        raise NotImplementedError

    def run(self, inner, call):
        if call.in_specs[0].dtype.name[0] not in "iu" or call.out_spec.dtype.name not in self.to:
            return go(inner, call)
        with np.errstate(all="ignore"):
            found = self.by(call.ins[0], call.in_specs[0].dtype).astype(call.out_spec.dtype.numpy)
        to_logical(call.out, call.out_spec.dtype)[...] = found
        return None


@caught(ROUNDING, "a_whole_number_is_rounded_once_to_the_nearest_even[i32-bf16]", "whole_number")
class RoundsIntegersTwice(CastsBy):
    """To f32, and then to 16 bits."""

    to = ("bf16",)

    def by(self, array, dtype):
        return array.astype(np.float32)


@caught(ROUNDING, "a_whole_number_is_rounded_once_to_the_nearest_even[i64-bf16]", "whole_number")
class RoundsLongIntegersTwice(CastsBy):
    """To f64, which is enough for 32 bits, and then as f64 is rounded."""

    to = ("bf16",)

    def by(self, array, dtype):
        return odd_f32(np, array.astype(np.float64))


@caught(ROUNDING, "test_whole_numbers_that_do_not_fit_wrap[i64-i32]", "do_not_fit")
class SaturatesCasts(CastsBy):
    def by(self, array, dtype):
        return np.clip(array, -(2**31), 2**31 - 1) if dtype.name == "i64" else array


@caught(ROUNDING, "test_whole_numbers_that_do_not_fit_wrap[u32-i64]", "do_not_fit")
class CastsUnsignedAsSigned(CastsBy):
    def by(self, array, dtype):
        signed = {"u8": np.int8, "u32": np.int32}.get(dtype.name)
        return array if signed is None else array.copy().view(signed)


@caught(ROUNDING, "test_floats_lose_their_fraction[f32-i32]", "fraction")
class RoundsFloatsToIntegers(Cpu):
    ops = (Cast,)

    def change(self, call):
        is_whole = call.out_spec.dtype.name[0] in "iu"
        if not is_whole or call.in_specs[0].dtype is not f32:
            return call
        return with_operand(call, 0, np.rint(call.ins[0]))


# Ids, counts, lengths and positions that 32 bits cannot hold


class Cut(Cpu):
    """An operand is read as if it had 32 bits."""

    where: int

    def change(self, call):
        if len(call.ins) <= self.where or call.in_specs[self.where].dtype.name != "i64":
            return call
        return with_operand(
            call, self.where, call.ins[self.where].astype(np.int32).astype(np.int64)
        )


@caught(BOUNDS, "test_ids_outside_a_table_are_refused[i64-4294967299]", "ids")
class CutsIds(Cut):
    ops, where = (Take,), 1


@caught(BOUNDS, "writes_nothing[at_offset_4294967297]", "at_offset")
class CutsOffsets(Cut):
    ops, where = (WriteSliceDoff,), 2


@caught(BOUNDS, "writes_nothing[rows_4294967301]", "rows_")
class CutsRows(Cut):
    ops, where = (WriteRows,), 2


@caught(BOUNDS, "writes_nothing[count_4294967298]", "count_")
class CutsCounts(Cut):
    ops, where = (WriteRows,), 3


@caught(BOUNDS, "test_positions_in_a_ring_have_64_bits[4294967304]", "64_bits or rotating")
class CutsPositions(Cut):
    ops, where = (WriteSliceRotating,), 2


@caught(BOUNDS, "length_out_of_bounds_is_refused[attention_4294967302]", "length")
class CutsLengths(Cut):
    ops, where = (Attention,), 3


@caught(BOUNDS, "length_out_of_bounds_is_refused[latent_4294967302]", "length")
class CutsLatentLengths(Cut):
    ops, where = (LatentAttention,), 4


@caught(BOUNDS, "test_positions_in_a_ring_have_64_bits[1099511627779]", "64_bits or ring")
class CutsRingLengths(Cut):
    ops, where = (RingAttention,), 3


# Floats


@caught(ROUNDING, "test_every_nan_stays_one[f32-bf16]", "nan")
class NanPayloadsBecomeInfinity(Cpu):
    """Rounds by adding 0x7fff and the last bit that stays, without asking for NaN."""

    ops = (Cast,)

    def run(self, inner, call):
        if call.out_spec.dtype is not bf16 or call.in_specs[0].dtype is not f32:
            return go(inner, call)
        bits = np.ascontiguousarray(call.ins[0]).reshape(call.out.shape).view(np.uint32)
        odd = (bits >> 16) & np.uint32(1)
        call.out[...] = ((bits + (np.uint32(0x7FFF) + odd)) >> 16).astype(np.uint16)
        return None


@caught(ROUNDING, "test_every_nan_stays_one[f64-f32]", "nan")
class NanLosesItsLowerHalf(Cpu):
    """The exponent and the first bits of the fraction are taken over as they are."""

    ops = (Cast,)

    def run(self, inner, call):
        go(inner, call)
        if call.out_spec.dtype is f32 and call.in_specs[0].dtype is f64:
            bits = np.ascontiguousarray(call.ins[0]).reshape(call.out.shape).view(np.uint64)
            lost = np.isnan(call.ins[0]) & ((bits & np.uint64(0xFFFFFE0000000)) == 0)
            call.out[lost.reshape(call.out.shape)] = np.inf


@caught(EDGES, "test_far_arguments[tanh-f32]", "far")
class TanhByExponentials(Cpu):
    ops = (ew.Tanh,)

    def run(self, inner, call):
        if call.out_spec.dtype is not f32:
            return go(inner, call)
        with np.errstate(all="ignore"):
            e = np.exp(2 * call.ins[0])
            call.out[...] = (e - 1) / (e + 1)
        return None


@caught(EDGES, "test_far_arguments[silu-f32]", "far")
class SiluByExponentials(Cpu):
    ops = (ew.Silu,)

    def run(self, inner, call):
        if call.out_spec.dtype is not f32:
            return go(inner, call)
        with np.errstate(all="ignore"):
            e = np.exp(call.ins[0])
            call.out[...] = call.ins[0] * e / (1 + e)
        return None


@caught(EDGES, "test_far_arguments[gelu-f32]", "far")
class GeluIsHalvedLast(Cpu):
    """Twice the result overflows where the result does not."""

    ops = (ew.Gelu,)

    def run(self, inner, call):
        go(inner, call)
        if call.out_spec.dtype is f32:
            with np.errstate(over="ignore"):
                call.out[...] = call.out * np.float32(2) * np.float32(0.5)


@caught(EDGES, "test_roots_of_special_numbers[sqrt-f32]", "roots")
class RootsByReciprocalRoots(Cpu):
    """``x * rsqrt(x)`` is NaN at zero and at infinity."""

    ops = (ew.Sqrt,)

    def run(self, inner, call):
        if call.out_spec.dtype is not f32:
            return go(inner, call)
        with np.errstate(all="ignore"):
            call.out[...] = call.ins[0] * (1 / np.sqrt(call.ins[0]))
        return None


@caught(EDGES, "test_f16_subnormals_count[add]", "subnormals")
class FlushesF16Subnormals(Cpu):
    ops = (ew.Binary, ew.BinaryScalar)

    def run(self, inner, call):
        go(inner, call)
        if call.out_spec.dtype is f16:
            call.out[abs(call.out) < 2.0**-14] = 0


@caught(ROUNDING, "test_f64_to_f32_rounds_to_the_nearest_even", "f64_to_f32")
class CastsFlushSubnormals(Cpu):
    ops = (Cast,)

    def run(self, inner, call):
        go(inner, call)
        if call.out_spec.dtype is f32:
            call.out[abs(call.out) < 2.0**-126] = 0


@caught(EDGES, "test_the_variance_of_rows_far_from_zero[4-f32]", "variance")
class VarianceByDifference(Cpu):
    """``E[x**2] - E[x]**2``, in f32."""

    ops = (LayerNorm,)

    def run(self, inner, call):
        if call.out_spec.dtype is not f32:
            return go(inner, call)
        x, w, b = call.ins
        mean = x.mean(-1, keepdims=True)
        variance = (x * x).mean(-1, keepdims=True) - mean * mean
        with np.errstate(all="ignore"):
            call.out[...] = (x - mean) / np.sqrt(variance + np.float32(call.op.eps)) * w + b
        return None


@caught(EDGES, "test_the_maximum_of_nothing_but_infinities[0-f32]", "maximum")
class MaximumStartsAtTheLowestNumber(Cpu):
    ops = (Max,)

    def run(self, inner, call):
        go(inner, call)
        if call.out_spec.dtype is f32:
            np.maximum(call.out, np.finfo(np.float32).min, call.out)


@caught(EDGES, "test_results_of_f16_overflow_only_at_the_end[rms_norm]", "at_the_end")
class NormsSquareInF16(Cpu):
    ops = (RmsNorm,)

    def run(self, inner, call):
        if call.out_spec.dtype is not f16:
            return go(inner, call)
        x, w = call.ins
        with np.errstate(all="ignore"):
            square = (x * x).astype(np.float32).mean(-1, keepdims=True)
            call.out[...] = x / np.sqrt(square + call.op.eps) * w
        return None


@caught(EDGES, "test_results_of_f16_overflow_only_at_the_end[mean]", "at_the_end")
class MeanOverflowsF16(Cpu):
    """A sum that f16 cannot hold is infinite before it is divided."""

    ops = (Mean,)

    def run(self, inner, call):
        if call.out_spec.dtype is not f16:
            return go(inner, call)
        with np.errstate(all="ignore"):
            total = call.ins[0].astype(np.float32).sum(call.op.axis)
            total[abs(total) > 65504] *= np.inf
            call.out[...] = (total / call.ins[0].shape[call.op.axis]).reshape(call.out.shape)
        return None


class ScoresInF16(Cpu):
    """Scores of f16 are kept in f16; only the largest matter here."""

    ops = (Attention, RingAttention, LatentAttention, PagedAttention)

    def run(self, inner, call):
        go(inner, call)
        if call.in_specs[0].dtype is f16:
            sizes = [float(np.nanmax(abs(a.astype(np.float32)), initial=0)) for a in call.ins[:2]]
            if isinstance(call.op, LatentAttention):
                sizes[1] = float(np.nanmax(abs(call.ins[2].astype(np.float32)), initial=0))
            if sizes[0] * sizes[1] * call.out.shape[-1] > 65504:
                call.out[...] = np.nan


@caught(EDGES, "test_scores_may_be_larger_than_f16[latent]", "scores")
class ScoresOverflowF16(ScoresInF16):
    pass


@caught("paged/test_paged_sizes.py", "test_scores_may_be_larger_than_f16", "scores")
class PagedScoresOverflowF16(ScoresInF16):
    pass


@caught(EDGES, "test_masks_of_large_negative_numbers[1e9-f32]", "masks")
class OnlyInfiniteMasksHide(Cpu):
    """A mask is made to bool: what is finite is visible."""

    ops = (Attention,)

    def change(self, call):
        if not call.op.has_mask or call.in_specs[3].dtype is not f32:
            return call
        mask = call.ins[3]
        low = np.isfinite(mask) & (mask < -1e4)
        return with_operand(call, 3, np.where(low, np.float32(0), mask))
