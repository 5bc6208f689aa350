// The heart of all attention kernels: one softmax over rows, read once, for several queries.
//
// A *line* is one query of one head. The lines of a key head are its group's queries, the heads of
// one position side by side. A block works on LINES lines and one *split* of the rows they see. A
// *team* of TEAM lanes reads one row at a time, VEC neighbouring elements a lane, and keeps sums of
// its own for every line (the online softmax of FlashAttention, arXiv:2205.14135); at the end the
// teams merge theirs. A score costs log2(TEAM) shuffles, and rows no line sees cost nothing.
//
// Compiled for QUERY and ROW (dtypes), DIM and VALUE_DIM (extents of a key and a value), LINES,
// TEAM and VEC. A thread holds LINES * (DIM + VALUE_DIM) / TEAM floats in registers.

constexpr int THREADS = 128;  // four warps: enough loads in flight, and 255 registers a thread
constexpr int WARPS = THREADS / WARP;
constexpr int TEAMS = THREADS / TEAM;
constexpr int SPAN = TEAM * VEC;  // elements that a team reads at once
constexpr int KEY_PARTS = (DIM + SPAN - 1) / SPAN;
constexpr int VALUE_PARTS = (VALUE_DIM + SPAN - 1) / SPAN;

static_assert(TEAM >= 1 && WARP % TEAM == 0, "a team lies in one warp");
static_assert(DIM % VEC == 0 && VALUE_DIM % VEC == 0, "no load passes the end of a row");

// Strides are in elements, the last axis has neighbours side by side, the result is contiguous.
struct AttentionArgs {
    i64 q_step[3];      // batch, head, query
    i64 p_step[3];      // latent: the same of the rotary queries
    i64 k_step[3];      // batch (paged: block), head, row; latent: of the latent rows
    i64 v_step[3];      // the same; latent: of the rotary keys
    i64 batch, heads, kv_heads, queries;
    i64 rows;           // most live rows: of k and v, of a ring, or of a block table's row
    i64 length;         // live rows, where no pointer gives them
    i64 window, sinks;
    i64 blocks, block_size, table_step;
    i32 causal, splits;
    f32 scale;
};

constexpr i64 NO_WINDOW = 1ll << 62;  // a window wider than all positions

// The pointers of a row, for kernels whose keys and values are rows of one tensor each.
struct KeyAndValue {
    const ROW* k;
    const ROW* v;
    __device__ const ROW* key(int column) const { return k + column; }
    __device__ const ROW* value(int column) const { return v + column; }
};

// What one line sees: positions oldest..newest, and those below the number of sinks.
struct Sight { i64 oldest, newest; };

// The rows that the lines of a block see together: positions 0..sinks-1 and low..high-1.
struct Rows { i64 sinks, low, high; };

// A line's part of a softmax: the highest score, the sum of weights, and of weighted values.
struct Sums {
    float top[LINES], total[LINES], value[LINES][VALUE_PARTS * VEC];
};

// Where a block stands: the batch, the key head, the split, and its first line of the group.
struct Task {
    i64 batch, head, split, first_line, group;
};

__device__ inline Task task_of(const AttentionArgs& a) {
    return {(i64)blockIdx.z, (i64)blockIdx.y, (i64)blockIdx.x % a.splits,
            (i64)blockIdx.x / a.splits * LINES, a.heads / a.kv_heads};
}

__device__ inline bool is_line(const AttentionArgs& a, const Task& t, int line) {
    return t.batch < a.batch && t.first_line + line < t.group * a.queries;
}

__device__ inline i64 query_of(const Task& t, int line) { return (t.first_line + line) / t.group; }

__device__ inline i64 head_of(const Task& t, int line) {
    return t.head * t.group + (t.first_line + line) % t.group;
}

// What every line sees when `live` rows are live, the last ones the queries' own.
__device__ inline void look(const AttentionArgs& a, const Task& t, i64 live, bool causal,
                            Sight* sight) {
    for (int line = 0; line < LINES; line++) {
        i64 place = live - a.queries + query_of(t, line);
        sight[line].oldest = greatest(0, place - a.window + 1);
        sight[line].newest = !is_line(a, t, line) ? -1 : causal ? place : live - 1;
    }
}

__device__ inline Rows rows_in_view(const AttentionArgs& a, const Sight* sight) {
    Rows rows = {0, 0x7fffffffffffffffll, 0};
    for (int line = 0; line < LINES; line++) {
        if (sight[line].newest < 0) continue;
        rows.low = least(rows.low, greatest(a.sinks, sight[line].oldest));
        rows.high = greatest(rows.high, sight[line].newest + 1);
    }
    rows.sinks = least(a.sinks, rows.high);
    rows.low = least(rows.low, rows.high);
    return rows;
}

// The queries of the lines, scaled, as a lane needs them. `element(line, column)` reads one.
template <class Element>
__device__ void read_queries(const AttentionArgs& a, const Task& t, float (*q)[KEY_PARTS * VEC],
                             Element element) {
    int lane = threadIdx.x % TEAM;
    for (int line = 0; line < LINES; line++) {
        for (int i = 0; i < KEY_PARTS * VEC; i++) {
            int column = (i / VEC * TEAM + lane) * VEC + i % VEC;
            bool is_one = column < DIM && is_line(a, t, line);
            q[line][i] = is_one ? widen(element(line, column)) * a.scale : 0;
        }
    }
}

// The same from a tensor of queries.
__device__ inline void read_queries(const AttentionArgs& a, const Task& t,
                                    float (*mine)[KEY_PARTS * VEC], const QUERY* q) {
    read_queries(a, t, mine, [&](int line, int column) {
        return q[t.batch * a.q_step[0] + head_of(t, line) * a.q_step[1]
                 + query_of(t, line) * a.q_step[2] + column];
    });
}

// One row added to a line's sums.
__device__ inline void fold(Sums& sums, int line, float score, const float* value) {
    float top = fmaxf(sums.top[line], score);
    float base = top == minus_infinity() ? 0 : top;  // -inf - -inf would be NaN
    float decay = expf(sums.top[line] - base), weight = expf(score - base);
    sums.top[line] = top;
    sums.total[line] = sums.total[line] * decay + weight;
#pragma unroll
    for (int i = 0; i < VALUE_PARTS * VEC; i++) {
        sums.value[line][i] = sums.value[line][i] * decay + weight * value[i];
    }
}

// This block's split of the rows, added to the sums. `find(position, row)` gives a row's place, or
// false to leave it out; `row.key(column)` and `row.value(column)` are pointers.
template <class Row, class Find>
__device__ void fold_rows(const AttentionArgs& a, const Task& t, const Rows& rows,
                          const Sight* sight, const float (*q)[KEY_PARTS * VEC], Sums& sums,
                          Find find) {
    int lane = threadIdx.x % TEAM, team = threadIdx.x / TEAM;
    i64 count = rows.sinks + rows.high - rows.low;
    i64 chunk = divide_up(divide_up(count, a.splits), TEAMS) * TEAMS;
    i64 end = least(count, (t.split + 1) * chunk);
    for (i64 base = t.split * chunk; base < end; base += TEAMS) {
        i64 index = base + team;
        i64 position = index < rows.sinks ? index : rows.low + index - rows.sinks;
        Row row;
        bool is_row = index < end && find(position, row);
        float score[LINES] = {}, value[VALUE_PARTS * VEC] = {};
        if (is_row) {
#pragma unroll
            for (int part = 0; part < VALUE_PARTS; part++) {  // asked for early: it takes longest
                int column = (part * TEAM + lane) * VEC;
                if (column >= VALUE_DIM) break;
                Pack<ROW, VEC> pack = load<VEC>(row.value(column));
#pragma unroll
                for (int i = 0; i < VEC; i++) value[part * VEC + i] = widen(pack.at[i]);
            }
#pragma unroll
            for (int part = 0; part < KEY_PARTS; part++) {
                int column = (part * TEAM + lane) * VEC;
                if (column >= DIM) break;
                Pack<ROW, VEC> pack = load<VEC>(row.key(column));
#pragma unroll
                for (int i = 0; i < VEC; i++) {
                    float key = widen(pack.at[i]);
#pragma unroll
                    for (int line = 0; line < LINES; line++) {
                        score[line] += q[line][part * VEC + i] * key;
                    }
                }
            }
        }
#pragma unroll
        for (int line = 0; line < LINES; line++) {
#pragma unroll
            for (int step = TEAM / 2; step; step /= 2) {
                score[line] += __shfl_xor_sync(ALL_LANES, score[line], step);
            }
            bool is_recent = position >= sight[line].oldest || position < a.sinks;
            if (is_row && is_recent && position <= sight[line].newest) {
                fold(sums, line, score[line], value);
            }
        }
    }
}

__device__ inline void clear(Sums& sums) {
    for (int line = 0; line < LINES; line++) {
        sums.top[line] = minus_infinity();
        sums.total[line] = 0;
        for (int i = 0; i < VALUE_PARTS * VEC; i++) sums.value[line][i] = 0;
    }
}

// The weight of a part whose highest score is `top` in a softmax whose highest score is `all`.
__device__ inline float share(float top, float all) {
    return expf(top - (all == minus_infinity() ? 0 : all));
}

// The teams of each warp merged, so that every team has the sums of its warp.
__device__ inline void merge_teams(Sums& sums) {
#pragma unroll
    for (int step = TEAM; step < WARP; step *= 2) {
#pragma unroll
        for (int line = 0; line < LINES; line++) {
            float other = __shfl_xor_sync(ALL_LANES, sums.top[line], step);
            float top = fmaxf(sums.top[line], other);
            float mine = share(sums.top[line], top), theirs = share(other, top);
            float total = __shfl_xor_sync(ALL_LANES, sums.total[line], step);
            sums.top[line] = top;
            sums.total[line] = sums.total[line] * mine + total * theirs;
#pragma unroll
            for (int i = 0; i < VALUE_PARTS * VEC; i++) {
                float value = __shfl_xor_sync(ALL_LANES, sums.value[line][i], step);
                sums.value[line][i] = sums.value[line][i] * mine + value * theirs;
            }
        }
    }
}

// Shared memory in which the warps of a block merge; at most 48 KB bounds LINES * VALUE_DIM.
struct Shared {
    float top[WARPS][LINES], total[WARPS][LINES], value[WARPS][LINES][VALUE_DIM];
};

__device__ inline void share_sums(const Sums& sums, Shared& shared) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (lane < TEAM) {
        for (int line = 0; line < LINES; line++) {
            if (lane == 0) shared.top[warp][line] = sums.top[line];
            if (lane == 0) shared.total[warp][line] = sums.total[line];
#pragma unroll
            for (int i = 0; i < VALUE_PARTS * VEC; i++) {
                int column = (i / VEC * TEAM + lane) * VEC + i % VEC;
                if (column < VALUE_DIM) shared.value[warp][line][column] = sums.value[line][i];
            }
        }
    }
    __syncthreads();
}

// The block's sums merged: the result itself if the rows are not split, else what the kernel
// `lazykv_attention_reduce` merges. A line's place among the parts is its place in the result.
__device__ inline void store(const AttentionArgs& a, const Task& t, Sums& sums, Shared& shared,
                             QUERY* out, float* part_values, float* part_stats) {
    merge_teams(sums);
    share_sums(sums, shared);
    for (int i = threadIdx.x; i < LINES * VALUE_DIM; i += THREADS) {
        int line = i / VALUE_DIM, column = i % VALUE_DIM;
        if (!is_line(a, t, line)) continue;
        float top = minus_infinity(), total = 0, value = 0;
        for (int warp = 0; warp < WARPS; warp++) top = fmaxf(top, shared.top[warp][line]);
        for (int warp = 0; warp < WARPS; warp++) {
            float weight = share(shared.top[warp][line], top);
            total += shared.total[warp][line] * weight;
            value += shared.value[warp][line][column] * weight;
        }
        i64 place = (t.batch * a.heads + head_of(t, line)) * a.queries + query_of(t, line);
        if (a.splits == 1) {
            out[place * VALUE_DIM + column] = narrow<QUERY>(total == 0 ? 0 : value / total);
            continue;
        }
        i64 part = place * a.splits + t.split;
        part_values[part * VALUE_DIM + column] = value;
        if (column == 0) {
            part_stats[2 * part] = top;
            part_stats[2 * part + 1] = total;
        }
    }
}

// Results from the parts of all splits, one block a line. A part that saw nothing weighs nothing.
extern "C" __global__ void __launch_bounds__(128)
lazykv_attention_reduce(QUERY* __restrict__ out, const float* __restrict__ part_values,
                        const float* __restrict__ part_stats, i64 lines, i64 splits) {
    for (i64 line = blockIdx.x; line < lines; line += gridDim.x) {
        const float* stats = part_stats + 2 * line * splits;
        float top = minus_infinity(), total = 0;
        for (i64 s = 0; s < splits; s++) top = fmaxf(top, stats[2 * s]);
        for (i64 s = 0; s < splits; s++) total += stats[2 * s + 1] * share(stats[2 * s], top);
        for (int column = threadIdx.x; column < VALUE_DIM; column += blockDim.x) {
            float value = 0;
            for (i64 s = 0; s < splits; s++) {
                value += part_values[(line * splits + s) * VALUE_DIM + column]
                         * share(stats[2 * s], top);
            }
            out[line * VALUE_DIM + column] = narrow<QUERY>(total == 0 ? 0 : value / total);
        }
    }
}
