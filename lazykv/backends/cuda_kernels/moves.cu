// Moves and writes: elements are copied as raw bits of BYTES bytes.
//
// A Walk says where the elements of both sides lie. Axis 0 is the axis of rows in the kernels that
// choose rows when they run; the extent of every side on it is an argument.

#if BYTES == 1
typedef u8 Element;
#elif BYTES == 2
typedef u16 Element;
#elif BYTES == 4
typedef u32 Element;
#elif BYTES == 8
typedef u64 Element;
#elif BYTES == 16
struct alignas(16) Element { u64 low, high; };
#else
#error "BYTES: need 1, 2, 4, 8 or 16"
#endif

constexpr int AXES = 6;

// Strides are in elements; axes from `rank` on are not looked at.
struct Walk {
    i64 shape[AXES];
    i64 dest[AXES];
    i64 src[AXES];
    i64 size;
    i64 rank;
};

// An element: its index on axis 0, and its offsets from the row on both sides.
struct Place { i64 row, dest, src; };

template <class Index> __device__ Place place_of(const Walk& walk, Index i) {
    Place at = {0, 0, 0};
    for (int axis = (int)walk.rank - 1; axis > 0; axis--) {
        Index extent = (Index)walk.shape[axis], above = i / extent;
        i64 index = (i64)(i - above * extent);
        at.dest += index * walk.dest[axis];
        at.src += index * walk.src[axis];
        i = above;
    }
    at.row = (i64)i;
    return at;
}

// Every element of the walk once, in the destination's order: `visit(place)`.
template <class Visit> __device__ void for_each(const Walk& walk, Visit visit) {
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < walk.size; i += step) {
        // A 64-bit division costs several 32-bit ones.
        visit(walk.size <= 0xffffffffll ? place_of(walk, (u32)i) : place_of(walk, (u64)i));
    }
}

__device__ inline i64 row_step(const Walk& walk, const i64* steps) {
    return walk.rank ? steps[0] : 0;
}

// dest[start + ...] = src. The host knows that the slab fits.
extern "C" __global__ void __launch_bounds__(256)
lazykv_copy(Element* dest, const Element* __restrict__ src, i64 start, Walk walk) {
    i64 to = row_step(walk, walk.dest), from = row_step(walk, walk.src);
    for_each(walk, [&](Place p) {
        dest[start + p.row * to + p.dest] = src[p.row * from + p.src];
    });
}

// dest[offset : offset + rows] = src along axis 0, the offset read here.
extern "C" __global__ void __launch_bounds__(256)
lazykv_write_slice_at(Element* dest, const Element* __restrict__ src, const i64* offset,
                      i64 dest_rows, i32* error, Walk walk) {
    i64 start = *offset;
    if (start < 0 || start > dest_rows - walk.shape[0]) {
        if (blockIdx.x == 0 && threadIdx.x == 0) refuse(error);
        return;
    }
    for_each(walk, [&](Place p) {
        dest[(start + p.row) * walk.dest[0] + p.dest] = src[p.row * walk.src[0] + p.src];
    });
}

// Row r has position `*position + r`; position p has slot p among the first `sinks`, else one of
// the `modulus - sinks` slots behind them. Of rows that share a slot the last one is written.
extern "C" __global__ void __launch_bounds__(256)
lazykv_write_slice_rotating(Element* dest, const Element* __restrict__ src, const i64* position,
                            i64 modulus, i64 sinks, i32* error, Walk walk) {
    i64 first = *position, ring = modulus - sinks, rows = walk.shape[0];
    if (first < 0 || first > 0x7fffffffffffffffll - rows) {
        if (blockIdx.x == 0 && threadIdx.x == 0) refuse(error);
        return;
    }
    i64 kept = greatest(sinks, first + rows - ring);
    for_each(walk, [&](Place p) {
        i64 at = first + p.row;
        if (at >= sinks && at < kept) return;
        i64 slot = at < sinks ? at : sinks + (at - sinks) % ring;
        dest[slot * walk.dest[0] + p.dest] = src[p.row * walk.src[0] + p.src];
    });
}

// How many of the row numbers may be used: the count (all n without one), or none if one lies
// outside, comes twice, or the count is not in 0..n. One block.
//
// Every row number puts its index at its row of `owner` (i32[dest_rows], uninitialized); where two
// meet, one of them finds the other's index.
extern "C" __global__ void __launch_bounds__(256)
lazykv_write_rows_check(i64* usable, i32* owner, const i64* rows, i64 n, const i64* count,
                        i64 dest_rows, i32* error) {
    __shared__ i32 bad;
    i64 used = count ? *count : n;
    if (threadIdx.x == 0) bad = used < 0 || used > n;
    if (used > n) used = n;
    __syncthreads();
    for (i64 i = threadIdx.x; i < used; i += blockDim.x) {
        if (rows[i] < 0 || rows[i] >= dest_rows) bad = 1;
        else owner[rows[i]] = (i32)i;
    }
    __syncthreads();
    for (i64 i = threadIdx.x; i < used; i += blockDim.x) {
        if (rows[i] >= 0 && rows[i] < dest_rows && owner[rows[i]] != (i32)i) bad = 1;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        *usable = bad ? 0 : used;
        if (bad) refuse(error);
    }
}

// dest[rows[i]] = src[i] for i below what the check has found usable.
extern "C" __global__ void __launch_bounds__(256)
lazykv_write_rows(Element* dest, const Element* __restrict__ src, const i64* rows,
                  const i64* usable, Walk walk) {
    i64 used = *usable;
    for_each(walk, [&](Place p) {
        if (p.row >= used) return;
        dest[rows[p.row] * walk.dest[0] + p.dest] = src[p.row * walk.src[0] + p.src];
    });
}

// dest[i] = table[ids[i]]; ids are i32 (ids_type 0), u32 (1) or i64 (2). A row whose id lies
// outside the table becomes zeros, so that nothing computes with bytes from before.
extern "C" __global__ void __launch_bounds__(256)
lazykv_take(Element* dest, const Element* __restrict__ table, const void* ids, i32 ids_type,
            i64 table_rows, i32* error, Walk walk) {
    for_each(walk, [&](Place p) {
        i64 id = ids_type == 0   ? (i64)((const i32*)ids)[p.row]
                 : ids_type == 1 ? (i64)((const u32*)ids)[p.row]
                                 : ((const i64*)ids)[p.row];
        Element* to = dest + p.row * walk.dest[0] + p.dest;
        if (id < 0 || id >= table_rows) {
            refuse(error);
            *to = Element{};
        } else {
            *to = table[id * walk.src[0] + p.src];
        }
    });
}
