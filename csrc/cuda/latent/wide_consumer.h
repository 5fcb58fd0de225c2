// The consumer warpgroups ("teams") of many rows: S = Q K^T of blocks in turn, O += P V of all blocks, half of the
// dimensions each. While one team makes weights of its logits, the products of the other run.
#pragma once
#include "latent/wide_shape.h"
#include "latent/rows.h"

namespace quire {
namespace {

// A thread has rows warp * 16 + lane / 4 (+ 8) of the tile; of each 8 keys of a block, and of each 8 dimensions of its
// team's half, 2 (lane % 4) (+ 1): element 4 j + 2 r + c is row r of the two, column 8 j + c. Blocks 2 i are team 0's,
// in stage 0; blocks 2 i + 1 team 1's, in stage 1. The maximum passes from block to block.
struct Consumer {
    int lane, warp, team, n_sharing;  // CTAs that copy keys for one another
    uint32_t parities;  // bit i: of the current use of stage i
    float s[KEYS / 2], o[TEAM_PARTS][PART_DIM / 2];
    float top[2], sum[2];  // of the two rows: the maximum that o and sum are relative to; of own blocks

    __device__ __forceinline__ int row_of(int r) const { return warp * 16 + lane / 4 + r * 8; }
    __device__ __forceinline__ void sync_team() const { named_sync(BARRIER_TEAM + team, TEAM_THREADS); }

    __device__ __forceinline__ void start_line() {
#pragma unroll
        for (int r = 0; r < 2; ++r) top[r] = FLOOR, sum[r] = 0.f;
#pragma unroll
        for (int i = 0; i < TEAM_DIM / 2; ++i) o[i / (PART_DIM / 2)][i % (PART_DIM / 2)] = 0.f;
    }

    // Begins to multiply a part of the keys of the team's next block, once it is there.
    __device__ __forceinline__ void multiply_part(int part, const Shared& shared) {
        const Operand q = rows_operand(uniform(shared.queries + part * PART_CHUNKS * Q_CHUNK_BYTES));
        const Operand k = rows_operand(uniform(shared.stage(team) + part * PART_BYTES), eight_of(part));
        await(shared.filled_of(team, part), parities >> team & 1);
        products_begin();
#pragma unroll
        for (int i = 0; i < chunks_of(part) * 4; ++i)
            Product<KEYS>::rows(s, q.further(i / 4 * Q_CHUNK_BYTES + i % 4 * 32),
                                k.further(i / 4 * CHUNK_BYTES + i % 4 * 32), part > 0 || i > 0);
    }
    __device__ __forceinline__ void start_keys(const Shared& shared) {
        pin(s);
        multiply_part(0, shared);
        multiply_part(1, shared);
        products_commit();
    }
    __device__ __forceinline__ void start_more_keys(const Shared& shared) {
        multiply_part(2, shared);
        multiply_part(3, shared);
        products_commit();
    }
    // LATER products that were begun after them may still run.
    template <int LATER = 0> __device__ __forceinline__ void end_keys() {
        products_wait<LATER>();
        pin(s);
    }

    // Zeroes the values of the team's block from key `first` on: what lies there is no key, and 0 * NaN is NaN.
    // Made visible together with the block's weights.
    __device__ __forceinline__ void clear_values(int first, const Shared& shared) const {
        constexpr int CELLS = RANK / 8;
        for (int cell = first * CELLS + threadIdx.x % TEAM_THREADS; cell < KEYS * CELLS; cell += TEAM_THREADS) {
            const int key = cell / CELLS, chunk = cell % CELLS / 8;
            const int part = chunk / PART_CHUNKS, in_part = key / 8 * eight_of(part) + chunk % PART_CHUNKS * CHUNK_BYTES;
            clear_16_bytes(shared.stage(team) + part * PART_BYTES + in_part + key % 8 * 128 + cell % 8 * 16);
        }
    }

    // At the edges of a line: keys that are none, or that a row does not see.
    __device__ __forceinline__ void hide(const Line& line, int start, const Shared& shared) {
        if (start + KEYS > line.end) clear_values(line.end - start, shared);
        if (start >= line.begin && start + KEYS <= line.end && start + KEYS - 1 <= line.first_position) return;
        const int positions[2] = {shared.positions[row_of(0)], shared.positions[row_of(1)]};
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) {
            const int at = start + i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (at < line.begin || at >= line.end || at > positions[i / 2 % 2]) s[i] = -INFINITY;
        }
    }

    // Sums become relative to another maximum.
    __device__ __forceinline__ void move_to(const float (&next)[2]) {
        const bool moved = next[0] != top[0] || next[1] != top[1];
        if (!__any_sync(~0u, moved)) return;
        products_wait<0>();
        pin(o[0]), pin(o[1]);
        float by[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) by[r] = exp2_fast(top[r] - next[r]), top[r] = next[r], sum[r] *= by[r];
#pragma unroll
        for (int i = 0; i < TEAM_DIM / 2; ++i) o[i / (PART_DIM / 2)][i % (PART_DIM / 2)] *= by[i / 2 % 2];
    }

    // Whatever maximum the other team has found.
    __device__ __forceinline__ void follow(const Shared& shared) {
        const float* tops = shared.tops + (1 - team) * ROWS;
        const float next[2] = {tops[row_of(0)], tops[row_of(1)]};
        move_to(next);
    }

    // The maximum behind the team's block: it moves only if a logit passes it by SLACK.
    __device__ __forceinline__ void find_top(float (&next)[2], float scale) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float high = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
            for (int j = 1; j < KEYS / 8; ++j) high = fmaxf(high, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
            high = fmaxf(high, __shfl_xor_sync(~0u, high, 2)) * scale;
            next[r] = high > top[r] + SLACK ? high : top[r];
        }
    }

    // Logits become weights relative to `next`, in shared memory, which says so to the other team. Returns their sums.
    __device__ __forceinline__ void weigh(float (&added)[2], const float (&next)[2], float scale,
                                          const Shared& shared) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            added[r] = 0.f;
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i) {
                float& x = s[i / 2 * 4 + r * 2 + i % 2];
                x = exp2_fast(fmaf(x, scale, -next[r]));
                added[r] += x;
            }
            if (lane % 4 == 0) shared.tops[team * ROWS + row_of(r)] = next[r];
        }
        sync_team();  // all warps have multiplied the columns where weights go
        const uint32_t row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
        const uint32_t to = shared.stage(team) + WEIGHTS_AT + row / 8 * eight_of(LAST) + row % 8 * 128;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j += 2) {
            const float* x = s + 4 * j;
            store_matrices(to + ((j + lane / 16) ^ lane % 8) * 16, pack(x[0], x[1]), pack(x[2], x[3]),
                           pack(x[4], x[5]), pack(x[6], x[7]));
        }
        async_fence();
        named_arrive(BARRIER_WEIGHTS + team, CONSUMERS);
        sync_team();
    }
    __device__ __forceinline__ void await_weights() const { named_sync(BARRIER_WEIGHTS + 1 - team, CONSUMERS); }

    // Begins to add the team's dimensions of the values of a stage.
    __device__ __forceinline__ void start_values(int stage, const Shared& shared) {
        const Operand p = rows_operand(uniform(shared.stage(stage) + WEIGHTS_AT), eight_of(LAST));
        pin(o[0]), pin(o[1]);
        products_begin();
#pragma unroll
        for (int i = 0; i < TEAM_PARTS; ++i) {
            const int part = team * TEAM_PARTS + i, eight = eight_of(part);
            const Operand v = columns_operand(uniform(shared.stage(stage) + part * PART_BYTES), CHUNK_BYTES, eight);
#pragma unroll
            for (int k = 0; k < KEYS / 16; ++k)
                Product<PART_DIM>::columns_shared(o[i], p.further(k * 32), v.further(k * 2 * eight), 1);
            products_commit();
        }
    }

    // Waits until they are added and gives the parts back. LATER products that were begun after them may still run.
    template <int LATER = 0> __device__ __forceinline__ void end_values(int stage, const Shared& shared) {
        products_wait<LATER + 1>();
        release(stage, team * TEAM_PARTS, shared);
        products_wait<LATER>();
        pin(o[0]), pin(o[1]);
        if (team == 0) release(stage, TEAM_PARTS - 1, shared);
        release(stage, LAST, shared);  // both teams read the weights there
    }
    __device__ __forceinline__ void release(int stage, int part, const Shared& shared) const {
        __syncwarp();
        if (lane < n_sharing) arrive_there_plainly(address_in(shared.drained_of(stage, part), lane));
    }

    __device__ __forceinline__ void lead(const Line& line, float scale, const Shared& shared);
    __device__ __forceinline__ void trail(const Line& line, float scale, const Shared& shared);
    __device__ __forceinline__ void finish(const Line& line, int first_row, const Shared& shared,
                                           const QuireAttnArgs& args);
};

// Team 0: blocks 0, 2 .. The logits of its next block follow the values of this one without a pause.
__device__ __forceinline__ void Consumer::lead(const Line& line, float scale, const Shared& shared) {
    if (line.n_blocks == 0) return;
    start_keys(shared);
    const auto add_own = [&](int i) {
        start_more_keys(shared);
        end_keys();
        if (i + 1 < line.n_blocks) named_arrive(BARRIER_TURN, CONSUMERS);
        hide(line, line.start + i * KEYS, shared);
        float next[2], added[2];
        find_top(next, scale);
        weigh(added, next, scale, shared);
        move_to(next);
        sum[0] += added[0], sum[1] += added[1];
        start_values(0, shared);
        end_values(0, shared);
        parities ^= 1;
    };
    int i = 0;
    for (; i + 2 < line.n_blocks; i += 2) {
        add_own(i);
        await_weights();
        follow(shared);
        start_values(1, shared);
        start_keys(shared);
        end_values<1>(1, shared);
        parities ^= 2;
    }
    add_own(i);
    if (i + 1 == line.n_blocks) return;
    await_weights();
    follow(shared);
    start_values(1, shared);
    end_values(1, shared);
    parities ^= 2;
}

// Team 1: blocks 1, 3 .. Values of the block before are added while it makes weights.
__device__ __forceinline__ void Consumer::trail(const Line& line, float scale, const Shared& shared) {
    int i = 1;
    for (; i < line.n_blocks; i += 2) {
        named_sync(BARRIER_TURN, CONSUMERS);
        start_keys(shared);
        start_more_keys(shared);
        await_weights();
        follow(shared);
        start_values(0, shared);
        end_keys<TEAM_PARTS>();
        hide(line, line.start + i * KEYS, shared);
        float next[2], added[2];
        find_top(next, scale);
        weigh(added, next, scale, shared);
        end_values(0, shared);
        parities ^= 1;
        move_to(next);
        sum[0] += added[0], sum[1] += added[1];
        start_values(1, shared);
        end_values(1, shared);
        parities ^= 2;
    }
    if (i != line.n_blocks) return;
    await_weights();
    follow(shared);
    start_values(0, shared);
    end_values(0, shared);
    parities ^= 1;
}

// Normalises and writes a line's rows: final ones through the place of the queries, so that whole rows are written.
__device__ __forceinline__ void Consumer::finish(const Line& line, int first_row, const Shared& shared,
                                                 const QuireAttnArgs& args) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
        sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
        if (lane % 4 == 0) shared.sums[team * ROWS + row_of(r)] = sum[r];
    }
    sync_consumers();  // also: nobody reads the queries any more
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row_of(r);
        const float total = shared.sums[row] + shared.sums[ROWS + row], by = total > 0.f ? 1.f / total : 0.f;
        if (team == 0 && lane % 4 == 0 && row < line.n_rows)
            write_lse(line, first_row, row, total > 0.f ? top[r] + log2f(total) : -INFINITY, args);
#pragma unroll
        for (int i = 0; i < TEAM_DIM / 4; ++i) o[i / (PART_DIM / 4)][i % (PART_DIM / 4) / 2 * 4 + r * 2 + i % 2] *= by;
    }
    if (line.tile.partial >= 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (row_of(r) >= line.n_rows) continue;
            float* to = args.partial_out + static_cast<int64_t>(line.tile.partial + first_row + row_of(r)) * RANK;
            to += team * TEAM_DIM + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < TEAM_DIM / 8; ++j) {
                const float* x = o[j / (PART_DIM / 8)] + j % (PART_DIM / 8) * 4 + 2 * r;
                *reinterpret_cast<float2*>(to + j * 8) = make_float2(x[0], x[1]);
            }
        }
        return;
    }
    const uint32_t row = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
    const uint32_t to = shared.queries + row * RESULT_BYTES + (team * TEAM_DIM + lane / 16 * 8) * 2;
#pragma unroll
    for (int j = 0; j < TEAM_DIM / 8; j += 2) {
        const float* x = o[j / (PART_DIM / 8)] + j % (PART_DIM / 8) * 4;
        store_matrices(to + j * 16, pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
    }
    sync_consumers();
    write_rows(line, first_row, shared, args);
}

__device__ __forceinline__ void consume(const QuireAttnArgs& args, const Shared& shared, const Share& share,
                                        int box_rows, int n_sharing) {
    Consumer one;
    one.lane = threadIdx.x % 32, one.warp = threadIdx.x / 32 % 4, one.team = uniform(threadIdx.x / TEAM_THREADS);
    one.parities = 0, one.n_sharing = n_sharing;
    const float scale = args.scale * LOG2E;
    for (int index = share.first; index < share.last; ++index) {
        const Line line = load_line(share, index, args.n_q_heads, box_rows);
        if (line.n_rows <= 0) continue;
        sync_consumers();  // results of the line before have left the place of its queries
        load_queries(line, shared, share.first_row, args);
        one.start_line();
        if (one.team == 0) {
            one.lead(line, scale, shared);
        } else {
            one.trail(line, scale, shared);
        }
        one.finish(line, share.first_row, shared, args);
    }
}

}  // namespace
}  // namespace quire
