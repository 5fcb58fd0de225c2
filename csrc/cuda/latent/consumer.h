// The consumer warpgroup of few rows: S^T = K Q^T, weights through shared memory, O^T += V^T P^T.
#pragma once
#include "latent/shape.h"
#include "latent/rows.h"

namespace quire {
namespace {

// Zeroes the values from key `first` of the stage on: what lies there is no key, and 0 * NaN is NaN.
__device__ __forceinline__ void clear_values(uint32_t stage, int first) {
    constexpr int CELLS = RANK / 8;
    for (int cell = first * CELLS + threadIdx.x; cell < KEYS * CELLS; cell += CONSUMERS) {
        const int key = cell / CELLS, of_key = cell % CELLS;
        clear_16_bytes(stage + key / 8 * EIGHT_BYTES + of_key / 8 * CHUNK_BYTES + key % 8 * 128 + of_key % 8 * 16);
    }
    async_fence();
    sync_consumers();
}

// A thread has keys warp * 16 + lane / 4 (+ 8) of a stage and, of each 8 rows, rows 2 (lane % 4) (+ 1); of each 64
// dimensions of the result warp * 16 + lane / 4 (+ 8), and the same rows.
struct Consumer {
    int lane, warp;
    float s[ROWS / 2];
    float o[TILES][ROWS / 2];
    float top[ROWS / 4], sum[ROWS / 4], move[ROWS / 4];  // of rows 8 (i / 2) + 2 (lane % 4) + i % 2

    __device__ __forceinline__ int row_of(int i) const { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

    __device__ __forceinline__ void start_line() {
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) top[i] = FLOOR, sum[i] = 0.f;
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) o[t][i] = 0.f;
    }

    __device__ __forceinline__ void multiply_keys(uint32_t stage, const Shared& shared) {
        const Operand k = rows_operand(uniform(stage), EIGHT_BYTES);
        const Operand q = rows_operand(uniform(shared.queries));
        float odd[ROWS / 2];  // with few rows a product is short: two sums take turns, none waits for its own
        pin(s);
        products_begin();
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i)
            Product<ROWS>::rows(CHAINS > 1 && i % 2 ? odd : s, k.further(i / 4 * CHUNK_BYTES + i % 4 * 32),
                                q.further(i / 4 * Q_CHUNK_BYTES + i % 4 * 32), i >= CHAINS);
        products_commit();
        products_wait<0>();
        pin(s);
        if constexpr (CHAINS > 1) {
            pin(odd);
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) s[i] += odd[i];
        }
    }

    __device__ __forceinline__ void hide(const Line& line, int start, const Shared& shared) {
        const int key = start + warp * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < ROWS / 2; ++i) {
            const int at = key + i / 2 % 2 * 8, position = shared.positions[row_of(i / 4 * 2 + i % 2)];
            if (at < line.begin || at >= line.end || at > position) s[i] = -INFINITY;
        }
    }

    // Logits become weights, in shared memory too, and `move` what older sums must be multiplied by.
    __device__ __forceinline__ void weigh(float scale, const Shared& shared) {
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) {
            const int at = i / 2 * 4 + i % 2;
            float high = fmaxf(s[at], s[at + 2]);
            for (int step = 4; step < 32; step *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
            if (lane < 4) shared.of_warps[warp * ROWS + row_of(i)] = high;
        }
        sync_consumers();  // also: all products of the block before have read its weights
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) {
            const float* maxima = shared.of_warps + row_of(i);
            const float high =
                fmaxf(fmaxf(maxima[0], maxima[ROWS]), fmaxf(maxima[2 * ROWS], maxima[3 * ROWS])) * scale;
            const bool follow = high > top[i] + SLACK;
            const float next = follow ? high : top[i];
            move[i] = follow ? exp2_fast(top[i] - next) : 1.f;
            top[i] = next;
            const int at = i / 2 * 4 + i % 2;
            s[at] = exp2_fast(fmaf(s[at], scale, -next));
            s[at + 2] = exp2_fast(fmaf(s[at + 2], scale, -next));
            sum[i] = sum[i] * move[i] + (s[at] + s[at + 2]);
        }
        const uint32_t row = lane / 16 * 8 + lane % 8, cell = warp * 2 + lane / 8 % 2;
        const uint32_t to = shared.weights + row * 128 + (cell ^ lane % 8) * 16;
#pragma unroll
        for (int j = 0; j < ROWS / 8; j += 2) {
            const float* x = s + 4 * j;
            store_matrices_transposed(to + j * 1024, pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]),
                                      pack(x[6], x[7]));
        }
        async_fence();
        sync_consumers();
    }

    __device__ __forceinline__ void rescale() {
        bool moved = false;
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) moved |= move[i] != 1.f;
        if (!__any_sync(~0u, moved)) return;
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i) o[t][i] *= move[i / 4 * 2 + i % 2];
    }

    __device__ __forceinline__ void multiply_values(uint32_t stage, const Shared& shared) {
        const Operand v = columns_operand(uniform(stage), CHUNK_BYTES, EIGHT_BYTES);
        const Operand p = rows_operand(uniform(shared.weights));
#pragma unroll
        for (int t = 0; t < TILES; ++t) pin(o[t]);
        products_begin();
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k)
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                Product<ROWS>::turned(o[t], v.further(t * CHUNK_BYTES + k * 2 * EIGHT_BYTES), p.further(k * 32), 1);
        products_commit();
        products_wait<0>();
#pragma unroll
        for (int t = 0; t < TILES; ++t) pin(o[t]);
    }

    __device__ __forceinline__ void finish(const Line& line, int first_row, const Shared& shared,
                                           const QuireAttnArgs& args);
};

// Normalises and writes a line's rows: final ones through the place of the queries, so that whole rows are written.
__device__ __forceinline__ void Consumer::finish(const Line& line, int first_row, const Shared& shared,
                                                 const QuireAttnArgs& args) {
    const QuireTile& tile = line.tile;
#pragma unroll
    for (int i = 0; i < ROWS / 4; ++i) {
        for (int step = 4; step < 32; step *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], step);
        if (lane < 4) shared.of_warps[warp * ROWS + row_of(i)] = sum[i];
    }
    sync_consumers();
    const auto total_of = [&](int row) {
        const float* sums = shared.of_warps + row;
        return (sums[0] + sums[ROWS]) + (sums[2 * ROWS] + sums[3 * ROWS]);
    };
    for (int i = 0; warp == 0 && lane < 4 && i < ROWS / 4; ++i) {
        const int row = row_of(i);
        if (row >= line.n_rows) continue;
        const float total = total_of(row);
        write_lse(line, first_row, row, total > 0.f ? top[i] + log2f(total) : -INFINITY, args);
    }
#pragma unroll
    for (int i = 0; i < ROWS / 4; ++i) {
        const float total = total_of(row_of(i)), by = total > 0.f ? 1.f / total : 0.f;
#pragma unroll
        for (int t = 0; t < TILES; ++t) o[t][i / 2 * 4 + i % 2] *= by, o[t][i / 2 * 4 + i % 2 + 2] *= by;
    }
    const int tile_at = warp * 16;  // first dimension of this warp in its first tile
    if (tile.partial >= 0) {
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) {
            const int row = row_of(i);
            if (row >= line.n_rows) continue;
            float* to = args.partial_out + static_cast<int64_t>(tile.partial + first_row + row) * RANK + tile_at;
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                to[t * 64 + lane / 4] = o[t][i / 2 * 4 + i % 2];
                to[t * 64 + lane / 4 + 8] = o[t][i / 2 * 4 + i % 2 + 2];
            }
        }
        return;
    }
    const uint32_t to = shared.queries + (lane / 16 * 8 + lane % 8) * RESULT_BYTES + (tile_at + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int j = 0; j < ROWS / 8; j += 2) {
            const float* x = o[t] + 4 * j;
            store_matrices_transposed(to + j * 8 * RESULT_BYTES + t * 128, pack(x[0], x[1]), pack(x[2], x[3]),
                                      pack(x[4], x[5]), pack(x[6], x[7]));
        }
    }
    sync_consumers();
    write_rows(line, first_row, shared, args);
}

__device__ __forceinline__ void consume(const QuireAttnArgs& args, const Shared& shared, const Share& share,
                                        int box_rows) {
    Consumer one;
    one.lane = threadIdx.x % 32, one.warp = threadIdx.x / 32;
    const float scale = args.scale * LOG2E;
    Stage place;
    for (int index = share.first; index < share.last; ++index) {
        const Line line = load_line(share, index, args.n_q_heads, box_rows);
        if (line.n_rows <= 0) continue;
        sync_consumers();  // results of the line before have left the place of its queries
        load_queries(line, shared, share.first_row, args);
        one.start_line();
        for (int i = 0; i < line.n_blocks; ++i) {
            const int start = line.start + i * KEYS;
            const uint32_t stage = shared.ring + place.at * STAGE_BYTES;
            await(shared.filled + place.at * 8, place.parity);
            if (start + KEYS > line.end) clear_values(stage, line.end - start);
            one.multiply_keys(stage, shared);
            if (start < line.begin || start + KEYS > line.end || start + KEYS - 1 > line.first_position)
                one.hide(line, start, shared);
            one.weigh(scale, shared);
            one.rescale();
            one.multiply_values(stage, shared);
            __syncwarp();
            if (one.lane == 0) barrier_arrive(shared.drained + place.at * 8);
            place.advance();
        }
        one.finish(line, share.first_row, shared, args);
    }
}

}  // namespace
}  // namespace quire
