// The matrix product of a decode step: a few rows of x times a matrix that is read once.
//
// x [M,K] with rows x_step apart, w [K,N] with rows w_step apart, neighbours side by side. A block
// makes 32 * VEC columns of the product from one split of K: a warp reads neighbouring columns of a
// row of w, its lanes VEC of them each, and the warps share the rows. Compiled for INPUT and WEIGHT
// (dtypes), LINES (at least M) and VEC. A product of few columns fills the GPU only if K is split.

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;
constexpr int COLUMNS = WARP * VEC;
constexpr int TILE = 128;  // rows of w whose factors lie in shared memory: 4 KB for 8 lines

struct GemvArgs {
    i64 m, k, n;
    i64 x_step, w_step;
    i64 splits;
};

// Sums go to out [M,N] if K is not split, else to part [splits,M,N].
extern "C" __global__ void __launch_bounds__(THREADS)
lazykv_gemv(INPUT* __restrict__ out, const INPUT* __restrict__ x, const WEIGHT* __restrict__ w,
            float* __restrict__ part, GemvArgs a) {
    // The factors of a tile, and the sums of all warps: at most 32 KB, for 8 lines of 8 columns.
    __shared__ float factor[LINES][TILE];
    __shared__ float partial[WARPS][LINES][COLUMNS];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    i64 first_column = (i64)blockIdx.x * COLUMNS, column = first_column + lane * VEC;
    i64 chunk = divide_up(a.k, a.splits);
    i64 begin = blockIdx.y * chunk, end = least(a.k, begin + chunk);
    float sum[LINES][VEC] = {};
    for (i64 base = begin; base < end; base += TILE) {
        int count = (int)least(TILE, end - base);
        __syncthreads();  // the tile before may still be read
        for (int i = threadIdx.x; i < LINES * TILE; i += THREADS) {
            int line = i / TILE, at = i % TILE;
            bool is_one = line < a.m && at < count;
            factor[line][at] = is_one ? widen(x[line * a.x_step + base + at]) : 0;
        }
        __syncthreads();
        if (column < a.n) {
#pragma unroll 4
            for (int at = warp; at < count; at += WARPS) {
                Pack<WEIGHT, VEC> pack = load<VEC>(w + (base + at) * a.w_step + column);
#pragma unroll
                for (int i = 0; i < VEC; i++) {
                    float weight = widen(pack.at[i]);
#pragma unroll
                    for (int line = 0; line < LINES; line++) {
                        sum[line][i] += factor[line][at] * weight;
                    }
                }
            }
        }
    }
#pragma unroll
    for (int line = 0; line < LINES; line++) {
#pragma unroll
        for (int i = 0; i < VEC; i++) partial[warp][line][lane * VEC + i] = sum[line][i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < LINES * COLUMNS; i += THREADS) {
        int line = i / COLUMNS;
        i64 at = first_column + i % COLUMNS;
        if (line >= a.m || at >= a.n) continue;
        float total = 0;
        for (int from = 0; from < WARPS; from++) total += partial[from][line][i % COLUMNS];
        if (a.splits == 1) out[line * a.n + at] = narrow<INPUT>(total);
        else part[(blockIdx.y * a.m + line) * a.n + at] = total;
    }
}

// out [size] from part [splits,size]
extern "C" __global__ void __launch_bounds__(256)
lazykv_gemv_reduce(INPUT* __restrict__ out, const float* __restrict__ part, i64 size, i64 splits) {
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < size; i += step) {
        float total = 0;
        for (i64 split = 0; split < splits; split++) total += part[split * size + i];
        out[i] = narrow<INPUT>(total);
    }
}
