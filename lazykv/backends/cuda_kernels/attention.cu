// Attention over the live rows of a key/value cache.

// q [B,Hq,Sq,DIM], k [B,Hkv,S,DIM], v [B,Hkv,S,VALUE_DIM]; the live length is *length, or a.length
// if that is null. A length that does not fit the operands is refused and gives zeros.
extern "C" __global__ void __launch_bounds__(THREADS)
lazykv_attention(QUERY* __restrict__ out, const QUERY* __restrict__ q, const ROW* __restrict__ k,
                 const ROW* __restrict__ v, const i64* __restrict__ length,
                 float* __restrict__ part_values, float* __restrict__ part_stats,
                 i32* __restrict__ error, AttentionArgs a) {
    __shared__ Shared shared;
    Task t = task_of(a);
    i64 live = length ? *length : a.length;
    i64 fewest = a.causal || a.window < NO_WINDOW ? a.queries : 0;
    if (live < fewest || live > a.rows) {
        if (threadIdx.x == 0) refuse(error);
        live = 0;
    }
    float mine[LINES][KEY_PARTS * VEC];
    read_queries(a, t, mine, q);
    Sight sight[LINES];
    Sums sums;
    clear(sums);
    if (live > 0) {
        look(a, t, live, a.causal, sight);
        const ROW* keys = k + t.batch * a.k_step[0] + t.head * a.k_step[1];
        const ROW* values = v + t.batch * a.v_step[0] + t.head * a.v_step[1];
        fold_rows<KeyAndValue>(a, t, rows_in_view(a, sight), sight, mine, sums,
                            [&](i64 position, KeyAndValue& row) {
            row = {keys + position * a.k_step[2], values + position * a.v_step[2]};
            return true;
        });
    }
    store(a, t, sums, shared, out, part_values, part_stats);
}
