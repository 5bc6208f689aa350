// Rotary position embedding, one thread a pair. ELEMENT is the dtype of every array.

// x is [batch, heads, queries, 2 * half] with steps in elements and neighbours side by side, the
// result contiguous; cos and sin are [queries, half] (table_step[0] is 0), or that for each batch.
struct RopeArgs {
    i64 batch, heads, queries, half;
    i64 x_step[3];
    i64 table_step[2];
    i64 interleaved;
};

extern "C" __global__ void __launch_bounds__(256)
lazykv_rope(ELEMENT* __restrict__ out, const ELEMENT* __restrict__ x,
            const ELEMENT* __restrict__ cos_table, const ELEMENT* __restrict__ sin_table,
            RopeArgs a) {
    i64 size = a.batch * a.heads * a.queries * a.half, step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < size; i += step) {
        i64 pair = i % a.half, line = i / a.half;
        i64 query = line % a.queries, head = line / a.queries % a.heads;
        i64 batch = line / a.queries / a.heads;
        i64 first = a.interleaved ? 2 * pair : pair;
        i64 second = a.interleaved ? first + 1 : pair + a.half;
        i64 angle = batch * a.table_step[0] + query * a.table_step[1] + pair;
        const ELEMENT* from = x + batch * a.x_step[0] + head * a.x_step[1] + query * a.x_step[2];
        float c = widen(cos_table[angle]), s = widen(sin_table[angle]);
        float low = widen(from[first]), high = widen(from[second]);
        out[line * 2 * a.half + first] = narrow<ELEMENT>(low * c - high * s);
        out[line * 2 * a.half + second] = narrow<ELEMENT>(high * c + low * s);
    }
}
