// Causal attention of ragged sequences whose rows lie in the blocks of a pool.

// q [B,Hq,Sq,DIM], pools [N,bs,Hkv,DIM] and [N,bs,Hkv,VALUE_DIM] with k_step and v_step of block,
// head and row; table u32 [B,M] with rows table_step apart, lens u32 [B]. A length of 0 gives
// zeros; so does one that does not fit, which is refused. The rows of a used block that lies
// outside the pool are left out and refused.
extern "C" __global__ void __launch_bounds__(THREADS)
lazykv_paged_attention(QUERY* __restrict__ out, const QUERY* __restrict__ q,
                       const ROW* __restrict__ k, const ROW* __restrict__ v,
                       const u32* __restrict__ table, const u32* __restrict__ lens,
                       float* __restrict__ part_values, float* __restrict__ part_stats,
                       i32* __restrict__ error, AttentionArgs a) {
    __shared__ Shared shared;
    Task t = task_of(a);
    i64 live = t.batch < a.batch ? (i64)lens[t.batch] : 0;
    if (live != 0 && (live < a.queries || live > a.rows)) {
        if (threadIdx.x == 0) refuse(error);
        live = 0;
    }
    float mine[LINES][KEY_PARTS * VEC];
    read_queries(a, t, mine, q);
    Sight sight[LINES];
    Sums sums;
    clear(sums);
    if (live > 0) {
        look(a, t, live, true, sight);
        const u32* blocks = table + t.batch * a.table_step;
        u32 size = (u32)a.block_size;
        fold_rows<KeyAndValue>(a, t, rows_in_view(a, sight), sight, mine, sums,
                           [&](i64 position, KeyAndValue& row) {
            u32 nth = (u32)position / size;  // positions are below 2^32, as lengths are
            i64 block = blocks[nth], slot = (u32)position - nth * size;
            if (block >= a.blocks) {
                refuse(error);
                return false;
            }
            row = {k + block * a.k_step[0] + t.head * a.k_step[1] + slot * a.k_step[2],
                   v + block * a.v_step[0] + t.head * a.v_step[1] + slot * a.v_step[2]};
            return true;
        });
    }
    store(a, t, sums, shared, out, part_values, part_stats);
}
