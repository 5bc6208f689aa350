"""Which ops have CUDA kernels, for which operands; for all others the portable body runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lazykv.backends import cuda_attention as attention
from lazykv.backends import cuda_elementwise as elementwise
from lazykv.backends import cuda_moves as moves
from lazykv.backends import cuda_rows as rows
from lazykv.backends.cuda_site import Site, Steps
from lazykv.ops import elementwise as ew
from lazykv.ops.attention import Attention
from lazykv.ops.latent_attention import LatentAttention
from lazykv.ops.matmul import MatMul
from lazykv.ops.move import Cast, Concat, Copy, Take, Where
from lazykv.ops.norm import RmsNorm
from lazykv.ops.op import Op
from lazykv.ops.paged_attention import PagedAttention
from lazykv.ops.reduce import Softmax
from lazykv.ops.ring_attention import RingAttention
from lazykv.ops.rope import Rope
from lazykv.ops.sources import Fill, Iota, SymValue, ZeroFill
from lazykv.ops.views import View
from lazykv.ops.write import WriteSlice, WriteSliceDoff, WriteSliceRotating
from lazykv.ops.write_rows import WriteRows
from lazykv.spec import Spec

_Rule: TypeAlias = Callable[[Any, tuple[Spec, ...], Spec], bool]


def _any(op: Any, ins: tuple[Spec, ...], out: Spec) -> bool:
    return True


def _none(op: Any, ins: tuple[Spec, ...], out: Spec, multiprocessors: int) -> Sequence[Spec]:
    return ()


@dataclass(frozen=True, slots=True)
class CudaOp:
    """How an op runs: whether it takes the operands, the calls to make, and their scratch memory,
    which depends on the device's multiprocessors. One that `refuses` may find a number out of
    range when it runs."""

    emit: Callable[[Site], Steps]
    takes: _Rule = _any
    scratch: Callable[[Any, tuple[Spec, ...], Spec, int], Sequence[Spec]] = _none
    refuses: bool = False


OPS: dict[type[Op], CudaOp] = {
    ZeroFill: CudaOp(moves.zero_fill),
    Copy: CudaOp(moves.move),
    Concat: CudaOp(moves.concat),
    Take: CudaOp(moves.take, refuses=True),
    WriteSlice: CudaOp(moves.write_slice),
    WriteSliceDoff: CudaOp(moves.write_at, refuses=True),
    WriteSliceRotating: CudaOp(moves.write_rotating, refuses=True),
    WriteRows: CudaOp(moves.write_rows, scratch=moves.write_rows_scratch, refuses=True),
    Cast: CudaOp(elementwise.cast, elementwise.runs_cast),
    Where: CudaOp(elementwise.where),
    Fill: CudaOp(elementwise.fill, elementwise.runs_fill),
    Iota: CudaOp(elementwise.iota),
    SymValue: CudaOp(elementwise.symbol),
    ew.And: CudaOp(elementwise.both),
    RmsNorm: CudaOp(rows.rms_norm, rows.is_float),
    Softmax: CudaOp(rows.softmax, rows.is_float),
    Rope: CudaOp(rows.rope, rows.is_float),
    MatMul: CudaOp(rows.matmul, scratch=rows.matmul_scratch),
    Attention: CudaOp(attention.attention, attention.runs, attention.scratch, refuses=True),
    LatentAttention: CudaOp(
        attention.latent_attention, attention.runs, attention.scratch, refuses=True
    ),
    RingAttention: CudaOp(
        attention.ring_attention, attention.runs, attention.scratch, refuses=True
    ),
    PagedAttention: CudaOp(
        attention.paged_attention, attention.runs, attention.scratch, refuses=True
    ),
}
OPS |= dict.fromkeys(View.__subclasses__(), CudaOp(moves.move))
OPS |= dict.fromkeys(
    ew.Compare.__subclasses__(), CudaOp(elementwise.compare, elementwise.runs_compare)
)
OPS |= dict.fromkeys(
    (ew.Add, ew.Sub, ew.Mul, ew.Div), CudaOp(elementwise.binary, elementwise.runs_binary)
)
OPS |= dict.fromkeys(
    ew.BinaryScalar.__subclasses__(), CudaOp(elementwise.binary_scalar, elementwise.runs_binary)
)
OPS |= dict.fromkeys(ew.Unary.__subclasses__(), CudaOp(elementwise.unary, elementwise.runs_unary))


def find(op: Op, ins: tuple[Spec, ...], out: Spec) -> CudaOp | None:
    """The kernel for an op on these operands."""
    made = OPS.get(type(op))
    return made if made is not None and made.takes(op, ins, out) else None
