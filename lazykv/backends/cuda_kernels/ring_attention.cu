// Attention over a ring of rows: the last `window` positions and the first `sinks`.

// As lazykv_attention, causal, over rings of a.rows slots: position p has slot p among the sinks,
// else one of the slots behind them. The length counts all positions so far and may exceed a.rows.
extern "C" __global__ void __launch_bounds__(THREADS)
lazykv_ring_attention(QUERY* __restrict__ out, const QUERY* __restrict__ q,
                      const ROW* __restrict__ k, const ROW* __restrict__ v,
                      const i64* __restrict__ length, float* __restrict__ part_values,
                      float* __restrict__ part_stats, i32* __restrict__ error, AttentionArgs a) {
    __shared__ Shared shared;
    Task t = task_of(a);
    i64 live = length ? *length : a.length;
    if (live < a.queries) {
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
        Rows rows = rows_in_view(a, sight);
        const ROW* keys = k + t.batch * a.k_step[0] + t.head * a.k_step[1];
        const ROW* values = v + t.batch * a.v_step[0] + t.head * a.v_step[1];
        // One division a block: no more positions than slots are in view.
        i64 ring = a.rows - a.sinks, turn = greatest(0, rows.low - a.sinks) % ring;
        fold_rows<KeyAndValue>(a, t, rows, sight, mine, sums, [&](i64 position, KeyAndValue& row) {
            i64 slot = position;
            if (position >= a.sinks) {
                slot = turn + position - rows.low;
                slot = a.sinks + (slot < ring ? slot : slot - ring);
            }
            row = {keys + slot * a.k_step[2], values + slot * a.v_step[2]};
            return true;
        });
    }
    store(a, t, sums, shared, out, part_values, part_stats);
}
