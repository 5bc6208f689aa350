"""Backends that are right for small operands only."""

from dataclasses import replace

import numpy as np
from broken_backends import Cpu, caught, go

from lazykv.dtypes import f32
from lazykv.ops import elementwise as ew
from lazykv.ops import norm
from lazykv.ops.attention import Attention
from lazykv.ops.latent_attention import LatentAttention
from lazykv.ops.matmul import MatMul
from lazykv.ops.move import Cast, Concat, Copy, Take, Where
from lazykv.ops.paged_attention import PagedAttention
from lazykv.ops.reduce import Max, Mean, Softmax, Sum
from lazykv.ops.ring_attention import RingAttention
from lazykv.ops.rope import Rope

SIZES = "core/test_sizes.py"
ATTENTION = (Attention, RingAttention, LatentAttention, PagedAttention)


class StopsAt(Cpu):
    """One launch of so many threads, and no loop: the elements behind them are never written."""

    ops = (ew.Binary, ew.BinaryScalar, ew.Unary, Cast, Copy, Where, Take, Concat)
    threads = 0

    def run(self, inner, call):
        if call.out.size <= self.threads:
            return go(inner, call)
        before = call.out.copy()
        go(inner, call)
        call.out.reshape(-1)[self.threads :] = before.reshape(-1)[self.threads :]
        return None


@caught(SIZES, "test_many_elements[add-65537-f32]", "many_elements")
class ElementwiseStopsAt65536(StopsAt):
    threads = 65_536


@caught(SIZES, "test_many_elements[take-1000003-f32]", "many_elements")
class ElementwiseStopsAtAMillion(StopsAt):
    threads = 1_000_000


class RowsUpTo(Cpu):
    """A row of a reduction is looked at only as far as one block of threads goes."""

    ops = (Softmax, norm.RmsNorm, norm.LayerNorm, Max, Mean, Sum)
    width = 0

    def run(self, inner, call):
        x = call.ins[0]
        axis = getattr(call.op, "axis", x.ndim - 1)
        short = np.moveaxis(x, axis, -1)[..., : self.width]
        if short.shape[-1] == x.shape[axis] or call.out_spec.dtype is not f32:
            return go(inner, call)
        if isinstance(call.op, Max):
            call.out[...] = short.max(-1).reshape(call.out.shape)
        elif isinstance(call.op, Sum | Mean):
            n = x.shape[axis] if isinstance(call.op, Mean) else 1
            call.out[...] = (short.sum(-1) / n).reshape(call.out.shape)
        else:
            go(inner, call)
            np.moveaxis(call.out, axis, -1)[..., self.width :] = 0
        return None


@caught(SIZES, "test_long_rows[max-257-f32]", "long_rows")
class RowsLongerThanABlock(RowsUpTo):
    width = 256


@caught(SIZES, "test_long_rows[layer_norm-5000-f32]", "long_rows")
class RowsLongerThanSharedMemory(RowsUpTo):
    width = 4_900


@caught(SIZES, "test_every_term_of_a_long_sum_counts[1]", "sum_counts or sum_is")
class SumsStopAt4096(Cpu):
    ops = (Sum, MatMul)

    def change(self, call):
        a, *b = call.ins
        if a.shape[-1] <= 4096 or call.out_spec.dtype is not f32:
            return call
        cut = (a[..., :4096], *(x[..., :4096, :] for x in b))
        specs = tuple(
            replace(s, shape=x.shape) for s, x in zip(call.in_specs, cut, strict=True)
        )  # fmt: skip
        return replace(call, ins=cut, in_specs=specs)


@caught(SIZES, "test_every_term_of_a_long_sum_counts[1]", "sum_counts")
class AddsUpInF16(Cpu):
    """A wide sum whose parts are kept in 16 bits."""

    ops = (Sum,)

    def run(self, inner, call):
        x = call.ins[0]
        if x.shape[-1] < 1024 or call.out_spec.dtype is not f32:
            return go(inner, call)
        parts = np.add.reduceat(x, np.arange(0, x.shape[-1], 256), axis=-1)
        call.out[...] = parts.astype(np.float16).sum(-1, dtype=np.float32).reshape(call.out.shape)
        return None


def rows_in(call):
    if isinstance(call.op, PagedAttention):
        return call.ins[3].shape[1] * call.ins[1].shape[1]
    return call.ins[2].shape[-2]


class LosesRows(Cpu):
    """Flash decoding whose partial results past the first are never merged."""

    ops = ATTENTION

    def run(self, inner, call):
        go(inner, call)
        if rows_in(call) > 128:
            call.out[...] = 0


@caught(SIZES, "test_ring_attention[f32-3-1]", "attention")
class SecondSplitOfKeysIsLost(LosesRows):
    pass


@caught("paged/test_paged_sizes.py", "test_paged_attention[16-f32-1]")
class SecondSplitOfBlocksIsLost(LosesRows):
    pass


@caught(SIZES, "test_rope[False-False-f32]", "attention or rope")
class HeadsWiderThan64(Cpu):
    """One warp of 32 lanes with two elements each."""

    ops = (*ATTENTION, Rope)

    def run(self, inner, call):
        go(inner, call)
        call.out[..., 64:] = 0


@caught(SIZES, "test_latent_attention[f32-3-33]", "attention")
class TileOf32Queries(Cpu):
    ops = ATTENTION

    def run(self, inner, call):
        go(inner, call)
        call.out[:, :, 32:] = 0


@caught(SIZES, "test_attention[f32-3-1]", "attention")
class GroupsOfFour(Cpu):
    """Query heads that share a key head, beyond four of them."""

    ops = (Attention,)

    def run(self, inner, call):
        go(inner, call)
        group = call.ins[0].shape[1] // call.ins[1].shape[1]
        heads = np.arange(call.out.shape[1])
        call.out[:, heads % group >= 4] = 0


@caught(SIZES, "test_rope[False-True-f32]", "rope or attention")
class BatchesOfTwo(Cpu):
    ops = (*ATTENTION, Rope)

    def run(self, inner, call):
        go(inner, call)
        if call.out.ndim == 4:
            call.out[2:] = 0


@caught(SIZES, "test_many_axes[add_rank_5-f32-permuted]", "many_axes")
class AtMostFourAxes(Cpu):
    ops = (ew.Binary, ew.BinaryScalar, ew.Unary, Where, Cast, Softmax, Sum, Max, Mean, Concat)

    def run(self, inner, call):
        go(inner, call)
        if max(call.out.ndim, *(a.ndim for a in call.ins)) > 4:
            call.out[...] = 0


@caught(SIZES, "test_many_axes[concat_of_9-f32-contiguous]", "many_axes")
class ConcatOfEight(Cpu):
    """A launch has pointers to eight parts."""

    ops = (Concat,)

    def run(self, inner, call):
        go(inner, call)
        if len(call.ins) > 8:
            n = call.ins[8].shape[call.op.axis]
            np.moveaxis(call.out, call.op.axis, -1)[..., -n:] = 0


@caught("paged/test_paged_sizes.py", "test_paged_attention[3-f32-1]")
class BlockSizesArePowersOfTwo(Cpu):
    ops = (PagedAttention,)

    def run(self, inner, call):
        go(inner, call)
        size = call.ins[1].shape[1]
        if size & (size - 1):
            call.out[...] = 0


class Staging(Cpu):
    """Copies go through a staging buffer, and what is longer is cut."""

    size = 1 << 20

    def cut(self, array):
        line = np.array(array, order="C").reshape(-1)
        line[self.size // max(1, array.itemsize) :] = 0
        return line.reshape(array.shape)


@caught(SIZES, "test_long_copies_to_and_from_the_host", "long_copies")
class CopyInOfOneMiB(Staging):
    def copy_in(self, dest, source):
        dest[...] = self.cut(source)


@caught(SIZES, "test_long_copies_to_and_from_the_host", "long_copies")
class FeederOfOneMiB(Staging):
    def feeder(self, dest):
        return lambda source: dest.__setitem__(..., self.cut(source))


@caught(SIZES, "test_long_operands_and_results", "long_operands")
class CopyOutOfOneMiB(Staging):
    def copy_out(self, source):
        return self.cut(source)


@caught(SIZES, "test_long_transfers", "long_transfers")
class TransferOfOneMiB(Staging):
    def transfer(self, dest, to, source, from_):
        dest[...] = self.cut(source)
