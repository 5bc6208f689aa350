"""CUDA C kernels: source text, names, arguments and launches. No GPU, CuPy or compiler is needed.

**No kernel here has run on a GPU.** Each is compiled by NVRTC for sm_75, sm_80, sm_90 and sm_100,
and the same text is run on a CPU, where a block's threads, barriers and shuffles are emulated:
results, bounds and barriers are tested there. Speed, the memory model, and what a GPU's own `expf`
and fused multiply-add round differently are not.

Use, with a namespace `ck` for this package::

    shape = ck.attention_shape(2, 64, 64, lines=3)
    options = ck.defines("attention", QUERY="f32", ROW="f16", DIM=64, VALUE_DIM=64,
                         LINES=shape.lines, TEAM=shape.team, VEC=shape.vec)
    module = cupy.RawModule(code=ck.source("attention"), options=options)
    kernel = module.get_function(ck.KERNELS["attention"].symbol)
    launch = ck.launch_of("attention", batch=1, heads=9, kv_heads=3, queries=1,
                          lines=shape.lines, splits=1)
    kernel(launch.grid, launch.block, arguments)

`source` joins files, so that no include path is needed; a kernel is a plain C symbol whose variants
are macros (`defines`), one module per variant. Arguments follow `KERNELS[name].args`: arrays for
pointers, NumPy scalars of exactly the named width, and 0-d structured arrays (`struct`). A pointer
that is not needed is ``numpy.uint64(0)``.

Rules of all kernels

- Inputs and outputs of one launch must not overlap, the caches that writes go into excepted: there
  the source and the rows written must not.
- Outputs of compute kernels are contiguous. Inputs have strides, but the last axis has neighbours
  side by side, except in moves and `map`.
- What changes per token (lengths, positions, row numbers) is read from device memory, so a captured
  launch serves every step. Nothing allocates or waits for the host.
- A refusal (an offset, length, id or block out of range) puts 1 into the i32 `error` of the launch;
  the host clears and reads it when it likes.
  Writes that are refused write nothing; `take` gives zeros for the ids refused; attention treats
  a length refused as 0 and leaves out the rows of a block refused.
- Arithmetic is f32; results are rounded to nearest even once. Under ``-ftz=true``, which CuPy
  always sets, subnormal f32 numbers count as zeros, and so do results that small; moves and the
  conversions of `map` keep them.

What each needs besides `launch_of`

- Moves (`copy`, `write_slice_at`, `write_slice_rotating`, `write_rows`, `take`) take a walk from
  `move_of`, and BYTES is its `element_bytes`. `write_slice` is `copy` with the start by value.
- `write_rows` runs behind `write_rows_check`, which gives it `usable` (i64) by way of the scratch
  `owner` (i32, one per row of dest). The count is a null pointer for all rows; below 2**31 of them.
- `attention`, `paged_attention`, `ring_attention` and `latent_attention` are compiled for
  `attention_shape`; `attention_splits` says into how many parts the rows are split, and above 1 the
  parts (`attention_scratch`) are merged by `attention_reduce` of the same module. `length` is null
  where ``args.length`` holds it. ``args.window`` is `NO_WINDOW` without a window; `paged_attention`
  and `ring_attention` are causal whatever ``args.causal`` says; ``args.sinks`` is 0 but for rings.
  There are no masks. The kernels read rows once for up to 4 queries: for a long prompt a product of
  matrices is the better way.
- `map` is compiled for an expression (`EXPR`, see ``elementwise.cu``) over `INPUTS` operands, which
  may be any views; ``args`` has their steps on the axes of the contiguous result, merged to 6 or
  fewer. Types that are not used are ``u8`` and their pointers null.
- `gemv` is for at most 8 rows of x and a row-major matrix ``[K, N]``, with `gemv_lines`,
  `gemv_vec`, `gemv_splits` and `gemv_scratch`, and `gemv_reduce` behind it above one split.
"""

from lazykv.backends.cuda_kernels.shapes import (
    AttentionShape,
    Launch,
    attention_scratch,
    attention_shape,
    attention_splits,
    fits_grid,
    gemv_lines,
    gemv_scratch,
    gemv_splits,
    gemv_vec,
    launch_of,
)
from lazykv.backends.cuda_kernels.table import (
    AXES,
    ID_TYPES,
    KERNELS,
    NO_WINDOW,
    STRUCTS,
    CudaKernel,
    defines,
    source,
    struct,
)
from lazykv.backends.cuda_kernels.walks import Move, move_of

__all__ = [
    "AXES",
    "ID_TYPES",
    "KERNELS",
    "NO_WINDOW",
    "STRUCTS",
    "AttentionShape",
    "CudaKernel",
    "Launch",
    "Move",
    "attention_scratch",
    "attention_shape",
    "attention_splits",
    "defines",
    "fits_grid",
    "gemv_lines",
    "gemv_scratch",
    "gemv_splits",
    "gemv_vec",
    "launch_of",
    "move_of",
    "source",
    "struct",
]
