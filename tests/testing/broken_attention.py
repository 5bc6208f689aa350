"""Backends whose attention sees, pairs or weighs the wrong rows."""

from dataclasses import replace

import numpy as np
from broken_backends import Cpu, OtherOp, caught, go, with_operand

from lazykv.dtypes import f32
from lazykv.ops.attention import Attention
from lazykv.ops.latent_attention import LatentAttention
from lazykv.ops.move import Take
from lazykv.ops.paged_attention import PagedAttention
from lazykv.ops.ring_attention import RingAttention
from lazykv.ops.write import WriteSlice


@caught("core/test_attention.py", "test_op[attention-f32-contiguous]", "attention-f32")
class TakesTheWrongKeyHead(Cpu):
    """Query head h reads key head ``h % Hkv`` instead of ``h // group``."""

    ops = (Attention,)

    def run(self, inner, call):
        q, k, v = call.ins[:3]
        groups = q.shape[1] // k.shape[1]
        order = np.arange(q.shape[1]).reshape(groups, -1).T.reshape(-1)
        out = np.empty_like(call.out)
        go(inner, call, ins=(q[:, order], k, v, *call.ins[3:]), out=out)
        call.out[:, order] = out


@caught(
    "core/test_attention.py",
    "test_op[attention_live_by_tensor-f32-",
    "attention_live_by_tensor-f32",
)
class ReadsPastTheLiveRows(Cpu):
    """Weighs dead rows with zero: a NaN there is NaN all the same."""

    ops = (Attention,)

    def run(self, inner, call):
        go(inner, call)
        if call.out_spec.dtype is f32 and call.ins[1].dtype == np.float32:
            call.out[...] += 0 * call.ins[2].sum()


@caught("core/test_attention.py", "test_op[attention-f32-contiguous]", "attention-f32")
class SwapsKeysAndValues(Cpu):
    ops = (Attention,)

    def change(self, call):
        q, k, v, *rest = call.ins
        return call if k.shape != v.shape else replace(call, ins=(q, v, k, *rest))


@caught("core/test_attention.py", "test_op[attention_bool_mask-f32-", "attention_bool_mask-f32")
class HidesWhereTheMaskIsTrue(Cpu):
    ops = (Attention,)

    def change(self, call):
        if not call.op.has_mask or call.ins[3].dtype != np.bool_:
            return call
        return with_operand(call, 3, ~call.ins[3])


@caught("core/test_attention.py", "test_op[attention_bool_mask_hides_nan-f32-", "hides_nan-f32")
class HiddenRowsCountForZero(Cpu):
    """A weight of zero does not silence a NaN."""

    ops = (Attention,)

    def run(self, inner, call):
        go(inner, call)
        if call.op.has_mask and call.out_spec.dtype is f32:
            call.out[...] += 0 * call.ins[2].sum()


@caught("core/test_attention.py", "test_op[attention_window-f32-", "attention_window-f32")
class WindowIsOneTooLong(OtherOp):
    ops = (Attention,)

    def other(self, op):
        return op if op.window is None else replace(op, window=op.window + 1)


@caught("core/test_attention.py", "test_op[attention_batch-f32-", "attention_batch and f32")
class SeesLaterRows(OtherOp):
    ops = (Attention,)

    def other(self, op):
        return replace(op, causal=False)


@caught("core/test_attention.py", "test_op[attention_scale-f32-", "scale and f32")
class HasAScaleOfItsOwn(OtherOp):
    ops = (Attention,)

    def other(self, op):
        return replace(op, scale=8**-0.5)


@caught("core/test_attention.py", "test_op[ring_sinks_wrapped-f32-", "ring_sinks_wrapped-f32")
class RingSinksRollAway(OtherOp):
    ops = (RingAttention,)

    def other(self, op):
        return replace(op, sinks=0)


@caught("core/test_attention.py", "test_op[latent-f32-", "latent-f32")
class LeavesOutRopeKeys(Cpu):
    ops = (LatentAttention,)

    def change(self, call):
        return with_operand(call, 1, np.zeros_like(call.ins[1]))


@caught("paged/test_paged_attention.py", "test_op[scattered-f32-", "scattered and f32")
class IgnoresTheBlockTable(Cpu):
    ops = (PagedAttention,)

    def change(self, call):
        table, blocks = call.ins[3], len(call.ins[1])
        in_order = np.arange(table.size, dtype=table.dtype) % blocks
        return with_operand(call, 3, in_order.reshape(table.shape))


@caught("paged/test_paged_attention.py", "test_op[padded-f32-", "padded-f32")
class FollowsEntriesThatAreNoBlocks(Cpu):
    """Gathers whole rows of the table before it looks at the lengths."""

    ops = (PagedAttention,)

    def run(self, inner, call):
        call.ins[1][call.ins[3]]
        go(inner, call)


@caught("paged/test_paged_attention.py", "test_op[window-f32-", "window-f32")
class PagesForgetTheWindow(OtherOp):
    ops = (PagedAttention,)

    def other(self, op):
        return replace(op, window=None)


@caught("core/test_bounds.py", "test_ids_outside_a_table_are_refused[i64--1]", "ids")
class TakeWrapsNegativeIds(Cpu):
    ops = (Take,)

    def run(self, inner, call):
        table, ids = call.ins
        call.out[...] = table[ids.astype(np.int64) % len(table)]


@caught("paged/test_paged_session.py", "test_forks_part_when_they_are_written", "forks")
class CopiesOfBlocksGoMissing(Cpu):
    """A write of a whole block from a symbol to another does nothing: copy on write has no copy."""

    ops = (WriteSlice,)

    def run(self, inner, call):
        if len(call.op.starts) != 4 or call.op.widths[0] != 1 or isinstance(call.op.starts[0], int):
            go(inner, call)


@caught("core/test_attention.py", "test_op[ring_batch-f32-broadcast]", "ring_batch-f32")
class RingsTakeNoStrideOfZero(Cpu):
    """Sequences of one and the same queries."""

    ops = (RingAttention,)

    def change(self, call):
        q = call.ins[0]
        if len(q) > 1 and not q.strides[0]:
            raise ValueError("got a stride of 0, need one of a row at least")
        return call


# Nothing to compute, or nothing to compute it from


class FailsWithoutElements(Cpu):
    """As a launch of no threads does."""

    def run(self, inner, call):
        if not call.out.size:
            raise ValueError("got a grid of 0 blocks, need 1")
        go(inner, call)


@caught("core/test_attention.py", "test_op[ring_first-f32-empty]", "ring_first-f32")
class RingsFailWithoutElements(FailsWithoutElements):
    ops = (RingAttention,)


@caught("core/test_attention.py", "test_op[latent-f32-empty]", "latent-f32")
class LatentFailsWithoutElements(FailsWithoutElements):
    ops = (LatentAttention,)


class NothingIsNan(Cpu):
    """Divides by the weights of no rows."""

    rows = 1

    def run(self, inner, call):
        go(inner, call)
        if not call.ins[self.rows].shape[-2]:
            call.out[...] = np.nan


@caught("core/test_attention.py", "test_op[attention_no_rows-f32-", "attention_no_rows-f32")
class AttentionOfNoRowsIsNan(NothingIsNan):
    ops = (Attention,)


@caught("core/test_attention.py", "test_op[latent_no_rows-f32-", "latent_no_rows-f32")
class LatentAttentionOfNoRowsIsNan(NothingIsNan):
    ops, rows = (LatentAttention,), 2
