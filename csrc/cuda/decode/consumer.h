// The consumer warps: S^T = K Q^T and O^T += V^T P^T, each warp under its own running maximum.
#pragma once
#include "decode/codes.h"
#include "decode/results.h"

namespace quire {
namespace {

struct Consumer {
    int lane, key_at, row_at;                // first key in a stage, first packed row of this warp
    uint32_t k_from[KEY_TILES], v_from[KEY_TILES], chunk_bytes;  // of this lane's matrix rows in a stage
    uint32_t q[DIM_TILES][ROW_TILES][2];     // Q^T
    float o[DIM_TILES][ROW_TILES][4];        // O^T: dimension as `dim_of`, row 2 (lane % 4) (+ 1)
    float top[ROW_TILES][2], sum[ROW_TILES][2];  // maximum (base 2); this lane's share of the sum of weights
    int tokens[ROW_TILES][2], heads[ROW_TILES][2];  // of a line, of a group
    Row rows[ROW_TILES][2];
    int first_position, last_position;
    int n_tiles;                             // of 8 packed rows that the line has here

    __device__ __forceinline__ void place(const BoxShape& shape, int group);
    __device__ __forceinline__ uint32_t cell(uint32_t from, int d) const;
    __device__ __forceinline__ void start_line(const QuireTile& tile, uint32_t queries, int group,
                                               const QuireAttnArgs& args);
    __device__ __forceinline__ void stage(const Line& line, int start, const Slot<STAGES>& slot, const Shared& shared,
                                          const BoxShape& shape, const QuireAttnArgs& args);
    __device__ __forceinline__ void add_lanes();
    template <int TILES>
    __device__ __forceinline__ void block(const Line& line, int start, uint32_t stage, const int* positions,
                                          const BoxShape& shape, bool whole, const QuireAttnArgs& args) {
        if (whole)
            block_of<false, TILES>(line, start, stage, positions, shape, args);
        else
            block_of<true, TILES>(line, start, stage, positions, shape, args);
    }
    template <bool EDGE, int TILES>
    __device__ __forceinline__ void block_of(const Line& line, int start, uint32_t stage, const int* positions,
                                             const BoxShape& shape, const QuireAttnArgs& args);
    template <int TILES>
    __device__ __forceinline__ void raise_tops(const float (&s)[KEY_TILES][TILES][4]);
    __device__ __forceinline__ void share_round(float* sums, float2* states, int round, float v_scale) const;
};

__device__ __forceinline__ void Consumer::place(const BoxShape& shape, int group) {
    const int warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    key_at = warp / ROW_WARPS * KEY_TILES * 16;
    row_at = warp % ROW_WARPS * WARP_ROWS;
    for (int r = 0; r < ROW_TILES; ++r) {
        for (int c = 0; c < 2; ++c) {
            const int row = row_at + r * 8 + lane % 4 * 2 + c;
            tokens[r][c] = row / group, heads[r][c] = row % group;
        }
    }
    const bool packed = MAY_PACK && shape.packed;
    chunk_bytes = packed ? 128 : shape.rows * 128;
    const auto row_offset = [&](int key) {
        return packed ? key * DIM * NUMBER_BYTES : key / shape.rows * (CHUNKS * chunk_bytes) + key % shape.rows * 128;
    };
    for (int i = 0; i < KEY_TILES; ++i) {
        k_from[i] = row_offset(key_at + i * 16 + lane % 16) + lane / 16 * 16;
        if (CODED) {
            v_from[i] = k_from[i] + HALF_BYTES;
            continue;
        }
        v_from[i] = row_offset(key_at + i * 16 + lane % 8 + lane / 16 * 8) + lane / 8 % 2 * 16 + HALF_BYTES;
        if (!MAY_PACK) k_from[i] ^= lane % 8 * 16, v_from[i] ^= lane % 8 * 16;
    }
}

// The address of this lane's matrix row for dimensions 16 d .. 16 d + 15, swizzled.
__device__ __forceinline__ uint32_t Consumer::cell(uint32_t from, int d) const {
    const uint32_t chunk = from + d / 4 * chunk_bytes;
    if (!MAY_PACK) return chunk ^ (d % 4 * 32);  // `from` holds the swizzle already: a key lies on one row
    const uint32_t plain = CODED ? from + d * 16 : chunk + d % 4 * 32;
    return plain ^ (plain / 8 & 0x70);
}

__device__ __forceinline__ void Consumer::start_line(const QuireTile& tile, uint32_t queries, int group,
                                                     const QuireAttnArgs& args) {
    n_tiles = min(max((tile.n_tokens * group - row_at + 7) / 8, 0), ROW_TILES);
    const uint32_t from = queries + (row_at + lane % 8) * Q_ROW_BYTES + lane / 8 * 16;
    for (int r = 0; r < ROW_TILES; ++r) {
        if (r >= n_tiles) continue;
        for (int d = 0; CODED && d < DIM_TILES; ++d) {
            const uint32_t row = queries + (row_at + r * 8 + lane / 4) * Q_ROW_BYTES;
            const uint2 found = load_8_bytes(row + d * 32 + lane % 4 * 8);
            q[d][r][0] = halves_of_elements(found.x), q[d][r][1] = halves_of_elements(found.y);
        }
        for (int d = 0; !CODED && d < DIM_TILES; d += 2) {
            uint32_t found[4];
            load_matrices(found, from + r * 8 * Q_ROW_BYTES + d * 32);
            for (int i = 0; i < 4; ++i) q[d + i / 2][r][i % 2] = found[i];
        }
    }
    first_position = tile.position, last_position = tile.position + tile.n_tokens - 1;
    if (tile.gathered) first_position = 0x7fffffff, last_position = 0;
    for (int r = 0; r < ROW_TILES; ++r) {
        for (int c = 0; c < 2; ++c) {
            rows[r][c] = find_row(tile, tokens[r][c], heads[r][c], group, args);
            first_position = min(first_position, rows[r][c].q_pos);
            last_position = max(last_position, rows[r][c].q_pos);
            top[r][c] = Variant::softmax ? FLOOR : 0.f;
            sum[r][c] = 0.f;
        }
        for (int d = 0; d < DIM_TILES; ++d)
            for (int e = 0; e < 4; ++e) o[d][r][e] = 0.f;
    }
    if (tile.gathered) {
        first_position = __reduce_min_sync(~0u, first_position);
        last_position = __reduce_max_sync(~0u, last_position);
    }
}

// Adds what the stage holds to the sums, and gives the stage back.
__device__ __forceinline__ void Consumer::stage(const Line& line, int start, const Slot<STAGES>& slot,
                                                const Shared& shared, const BoxShape& shape,
                                                const QuireAttnArgs& args) {
    const uint32_t from = shared.ring + slot.at * STAGE_BYTES;
    const int* positions = shared.box_positions + slot.at * MAX_BOXES;
    bool whole = !Variant::has_mask && line.holds_block(start);
    barrier_wait(shared.filled + slot.at * 8, slot.parity);
    if (start + key_at < line.end) {  // else nothing was loaded for this warp
        int low = start, high = start + KEYS - 1;
        if (LAYOUT == SPARSE) low = positions[0], high = positions[KEYS / shape.rows - 1] + shape.rows - 1;
        if (Variant::causal) whole = whole && high <= first_position;
        if (Variant::window && args.window > 0)
            whole = whole && (low > last_position - args.window || high < args.n_first);
        if (n_tiles == 1) block<1>(line, start, from, positions, shape, whole, args);
        if (ROW_TILES > 1 && n_tiles == 2) block<ROW_TILES>(line, start, from, positions, shape, whole, args);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.drained + slot.at * 8);
}

// The sums of weights of all lanes.
__device__ __forceinline__ void Consumer::add_lanes() {
    for (int r = 0; r < ROW_TILES; ++r)
        for (int c = 0; c < 2; ++c)
            for (int step = 4; step < 32; step *= 2) sum[r][c] += __shfl_xor_sync(~0u, sum[r][c], step);
}

// Moves maxima that a score passes by too much, and what was summed under them.
template <int TILES>
__device__ __forceinline__ void Consumer::raise_tops(const float (&s)[KEY_TILES][TILES][4]) {
    bool passed = false;
    float high[TILES][2];
    for (int r = 0; r < TILES; ++r) {
        for (int c = 0; c < 2; ++c) {
            high[r][c] = s[0][r][c];
            for (int i = 0; i < 2 * KEY_TILES; ++i) high[r][c] = fmaxf(high[r][c], s[i / 2][r][i % 2 * 2 + c]);
            passed |= high[r][c] > top[r][c] + SLACK;
        }
    }
    if (!__any_sync(~0u, passed)) return;
    for (int r = 0; r < TILES; ++r) {
        for (int c = 0; c < 2; ++c) {
            float found = fmaxf(high[r][c], top[r][c]);
            for (int step = 4; step < 32; step *= 2) found = fmaxf(found, __shfl_xor_sync(~0u, found, step));
            const float factor = exp2_fast(top[r][c] - found);
            top[r][c] = found;
            sum[r][c] *= factor;
            for (int d = 0; d < DIM_TILES; ++d) o[d][r][c] *= factor, o[d][r][c + 2] *= factor;
        }
    }
}

// One stage. EDGE: some keys are hidden from some rows; TILES: of 8 packed rows, beyond them the line has none.
template <bool EDGE, int TILES>
__device__ __forceinline__ void Consumer::block_of(const Line& line, int start, uint32_t stage, const int* positions,
                                                   const BoxShape& shape, const QuireAttnArgs& args) {
    float s[KEY_TILES][TILES][4] = {};
    for (int i = 0; i < KEY_TILES; ++i) {
        float odd[TILES][4] = {};  // two chains of sums are shorter than one
        for (int first = 0; first < DIM_TILES; first += TILES_READ) {
            Fragment k[TILES_READ];
            load_keys(k, cell(stage + k_from[i], first));
            for (int d = first; d < first + TILES_READ; ++d)
                for (int r = 0; r < TILES; ++r)
                    multiply_add_fragment(d % 2 ? odd[r] : s[i][r], k[d - first], q[d][r][0], q[d][r][1]);
        }
        for (int r = 0; r < TILES; ++r)
            for (int e = 0; e < 4; ++e) s[i][r][e] += odd[r][e];
    }
    const float scale = Variant::has_logits || !Variant::softmax ? args.scale : args.scale * LOG2E;
    for (int i = 0; i < KEY_TILES; ++i) {
        for (int h = 0; h < 2; ++h) {
            const int in_block = key_at + i * 16 + h * 8 + lane / 4, key = start + in_block;
            int k_pos = key;
            if (LAYOUT == SPARSE && (EDGE || Variant::has_logits))
                k_pos = positions[in_block / shape.rows] + in_block % shape.rows;
            for (int r = 0; r < TILES; ++r) {
                for (int c = 0; c < 2; ++c) {
                    float& x = s[i][r][h * 2 + c];
                    const Row& row = rows[r][c];
                    const Site site{row.q_row, row.q_pos, k_pos, row.q_head, line.tile.kv_head, 0};
                    bool seen = true;  // hooks are asked about keys that exist only
                    if (EDGE) {
                        seen = line.holds(key) && (!Variant::causal || k_pos <= row.q_pos);
                        if (Variant::window && args.window > 0)
                            seen = seen && (k_pos > row.q_pos - args.window || k_pos < args.n_first);
                        if (Variant::has_mask) seen = seen && Variant::mask(site, args);
                    }
                    x *= scale;
                    if (Variant::has_logits && seen)
                        x = Variant::logits(x, site, args) * (Variant::softmax ? LOG2E : 1.f);
                    if (EDGE && !seen) x = Variant::softmax ? -INFINITY : 0.f;
                }
            }
        }
    }
    if (Variant::softmax) raise_tops<TILES>(s);
    for (int i = 0; i < KEY_TILES; ++i) {
        uint32_t p[TILES][2];
        for (int r = 0; r < TILES; ++r) {
            float* x = s[i][r];
            if (Variant::softmax) {
                for (int e = 0; e < 4; ++e) x[e] = exp2_fast(x[e] - top[r][e % 2]);
                sum[r][0] += x[0] + x[2], sum[r][1] += x[1] + x[3];
            }
            for (int h = 0; h < 2; ++h) p[r][h] = transpose_matrix(pack_weights(x[h * 2], x[h * 2 + 1]));
        }
        uint32_t kept[2];  // of values of keys that the line does not hold nothing is kept: they may be NaN
        if (EDGE) {
            for (int h = 0; h < 2; ++h) {
                const int key = start + key_at + i * 16 + h * 8 + lane % 4 * 2;
                kept[h] = (line.holds(key) ? 0x0000ffffu : 0u) | (line.holds(key + 1) ? 0xffff0000u : 0u);
            }
        }
        for (int first = 0; first < DIM_TILES; first += TILES_READ) {
            Fragment v[TILES_READ];
            load_values(v, cell(stage + v_from[i], first));
            for (int d = first; d < first + TILES_READ; ++d) {
                if (EDGE)
                    for (int e = 0; e < 4; ++e) v[d - first][e] &= kept[e / 2];
                for (int r = 0; r < TILES; ++r) multiply_add_fragment(o[d][r], v[d - first], p[r][0], p[r][1]);
            }
        }
    }
}

// One round of the warp's results, as one of the KEY_WARPS that have results of these rows; its sums are whole already.
__device__ __forceinline__ void Consumer::share_round(float* sums, float2* states, int round,
                                                      float v_scale) const {
    const int key_warp = threadIdx.x / 32 / ROW_WARPS;
    float* to = sums + key_warp * ROWS * SUM_STRIDE;
    for (int r = 0; r < ROW_TILES; ++r) {
        if (r >= n_tiles) continue;
        for (int c = 0; c < 2; ++c) {
            const int row = row_at + r * 8 + lane % 4 * 2 + c;
            if (lane < 4) states[key_warp * ROWS + row] = make_float2(top[r][c], sum[r][c]);
        }
        for (int i = 0; i < DIM_TILES / ROUNDS; ++i) {
            for (int e = 0; e < 4; ++e) {
                const int row = row_at + r * 8 + lane % 4 * 2 + e % 2;
                const float sum_of_e = o[round * (DIM_TILES / ROUNDS) + i][r][e];
                to[row * SUM_STRIDE + i * 16 + dim_of(lane, e)] = CODED ? sum_of_e * v_scale : sum_of_e;
            }
        }
    }
}

__device__ __forceinline__ void consume(const QuireAttnArgs& args, const Shared& shared, int first, int last,
                                        const BoxShape& shape) {
    QuireTile coming = load_tile(args.small_lines, first);
    const int group = args.n_q_heads / args.n_kv_heads;
    Consumer warp;
    warp.place(shape, group);
    Slot<STAGES> slot;
    Slot<QUERIES> query;
    Slot<RESULTS> result;
    for (int index = first; index < last; ++index) {
        const Line line = make_line(coming, args, shape);
        if (index + 1 < last) coming = load_tile(args.small_lines, index + 1);
        if (line.tile.n_tokens == 0) continue;
        barrier_wait(shared.q_filled + query.at * 8, query.parity);
        warp.start_line(line.tile, shared.queries + query.at * Q_BYTES, group, args);
        query.advance();
        for (int i = 0; i < line.n_blocks; ++i, slot.advance())
            warp.stage(line, line.block_start(i), slot, shared, shape, args);
        warp.add_lanes();
        const bool finish = FINISH && index + 1 == last;
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round, result.advance()) {
            float* sums = shared.sums + result.at * SUMS;
            float2* states = shared.states + result.at * STATES;
            if (!finish || round < RESULTS) barrier_wait(shared.read + result.at * 8, result.parity ^ 1);
            warp.share_round(sums, states, round, args.v_scale);
            if (finish) {
                named_sync(1, WARPS * 32);
                write_round<WARPS * 32>(threadIdx.x, sums, states, line.tile, round, group, args);
            } else {
                __syncwarp();
                if (warp.lane == 0) barrier_arrive(shared.written + result.at * 8);
            }
        }
    }
}

}  // namespace
}  // namespace quire
