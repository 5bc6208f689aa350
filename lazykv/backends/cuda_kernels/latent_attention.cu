// Attention over compressed rows that all heads share (multi-head latent attention).
//
// A key is a latent row and a rotary key behind it, DIM elements together; a value is the latent
// row, VALUE_DIM elements.

constexpr int ROTARY = DIM - VALUE_DIM;

static_assert(ROTARY >= 0, "a key holds its latent row");

struct LatentRow {
    const ROW* latent;
    const ROW* rotary;
    __device__ const ROW* key(int column) const {
        return column < VALUE_DIM ? latent + column : rotary + (column - VALUE_DIM);
    }
    __device__ const ROW* value(int column) const { return latent + column; }
};

// q_latent [1,H,Sq,VALUE_DIM] with q_step, q_rotary [1,H,Sq,ROTARY] with p_step, latent
// [S,VALUE_DIM] with rows k_step[2] apart, rotary [S,ROTARY] with rows v_step[2] apart; one key
// head. The length is given as in lazykv_attention.
extern "C" __global__ void __launch_bounds__(THREADS)
lazykv_latent_attention(QUERY* __restrict__ out, const QUERY* __restrict__ q_latent,
                        const QUERY* __restrict__ q_rotary, const ROW* __restrict__ latent,
                        const ROW* __restrict__ rotary, const i64* __restrict__ length,
                        float* __restrict__ part_values, float* __restrict__ part_stats,
                        i32* __restrict__ error, AttentionArgs a) {
    __shared__ Shared shared;
    Task t = task_of(a);
    i64 live = length ? *length : a.length;
    if (live < (a.causal ? a.queries : 0) || live > a.rows) {
        if (threadIdx.x == 0) refuse(error);
        live = 0;
    }
    float mine[LINES][KEY_PARTS * VEC];
    read_queries(a, t, mine, [&](int line, int column) {
        i64 head = head_of(t, line), query = query_of(t, line);
        if (column < VALUE_DIM) return q_latent[head * a.q_step[1] + query * a.q_step[2] + column];
        return q_rotary[head * a.p_step[1] + query * a.p_step[2] + column - VALUE_DIM];
    });
    Sight sight[LINES];
    Sums sums;
    clear(sums);
    if (live > 0) {
        look(a, t, live, a.causal, sight);
        fold_rows<LatentRow>(a, t, rows_in_view(a, sight), sight, mine, sums,
                             [&](i64 position, LatentRow& row) {
            row = {latent + position * a.k_step[2], rotary + position * a.v_step[2]};
            return true;
        });
    }
    store(a, t, sums, shared, out, part_values, part_stats);
}
