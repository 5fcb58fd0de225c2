// Who fills the ring of moe_wide.cu: one thread by the copy engine, or a warpgroup that gathers rows of x besides.
#pragma once
#include "moe/wide_shape.h"

namespace quire {

struct MoeLoads : MoeBlock {
    using MoeBlock::MoeBlock;

    __device__ static int n_loaded(const Place& at) { return (at.n + BOX_TOKENS - 1) / BOX_TOKENS * BOX_TOKENS; }
    __device__ void load_w(const CUtensorMap* map, const Place& at, int unit, int i) const {
        const uint64_t hint = 2 * a.n_slots <= a.n_experts * TOKENS ? L2_EVICT_FIRST : L2_EVICT_NORMAL;
        barrier_expect(full(i), W_BYTES + (GATHERS ? 0 : n_loaded(at) * (QUIRE_FP8 == 2 ? 128 + 4 : 128)));
        if (QUIRE_SILU) {
            load_box(stage(i), map, full(i), hint, unit * W_STEP, 0, 0, at.row / 8, at.expert);
        } else {
            load_box(stage(i), map, full(i), hint, unit * W_STEP, at.row, at.expert);
        }
    }
    __device__ void load_x(const CUtensorMap* map, const CUtensorMap* scale_map, const Place& at, int unit, int i) const {
        for (int first = 0; first < at.n; first += BOX_TOKENS) {
            load_box(stage(i) + W_BYTES + first * 128, map, full(i), L2_EVICT_NORMAL, unit * CHUNK, at.slot + first);
            if (QUIRE_FP8 == 2)
                load_box(scales(i) + first * 4, scale_map, full(i), L2_EVICT_NORMAL, (at.slot + first) * 4, unit);
        }
    }
    __device__ void feed(const CUtensorMap* w_map, const CUtensorMap* x_map, const CUtensorMap* scale_map) const {
        Place at = place(item(0)), next = place(item(1));
        const int n_first = at.n ? min(n_units, N_STAGES) : 0;
        if (!QUIRE_SILU) {
            for (int i = 0; i < n_first; i++) load_w(w_map, at, i, i);
            wait_for_previous_grid();
            for (int i = 0; i < n_first; i++) load_x(x_map, scale_map, at, i, i);
        }
        int unit = QUIRE_SILU ? 0 : n_first, at_stage = unit % N_STAGES, turn = unit / N_STAGES;
        for (int pass = 0; at.n > 0; pass++) {
            for (; unit < n_units; unit++) {
                if (turn > 0) await(empty(at_stage), (turn - 1) & 1);
                load_w(w_map, at, unit, at_stage);
                load_x(x_map, scale_map, at, unit, at_stage);
                if (++at_stage == N_STAGES) at_stage = 0, turn++;
            }
            unit = 0;
            at = next;
            next = place(item(pass + 2));
        }
    }

    // The warpgroup that gathers rows of x: eight threads a row, 16 rows at a time. A lane keeps the tokens of a warp's
    // rows, of each 16 four.
    __device__ void find_tokens(int (&tokens)[LANE_ROWS], const Place& at) const {
        const int lane = threadIdx.x & 31, warp = threadIdx.x % GROUP / 32;
#pragma unroll
        for (int i = 0; i < LANE_ROWS; i++) {
            const int row = (i * 8 + lane / 4) * 16 + warp * 4 + lane % 4;
            tokens[i] = row < at.n ? load_here(a.tokens + at.slot + row) : -1;
        }
    }
    __device__ void gather(const CUtensorMap* w_map) const {
        const int lane = threadIdx.x & 31, warp = threadIdx.x % GROUP / 32, row = warp * 4 + lane / 8, cell = lane % 8;
        const char* x = static_cast<const char*>(a.x) + cell * 16;
        const int64_t row_bytes = a.x_row * 2;
        const uint32_t to = W_BYTES + row * 128 + ((cell ^ (row & 7)) << 4);
        int at_stage = 0, turn = 0, tokens[LANE_ROWS], next_tokens[LANE_ROWS];
        Place at = place(item(0)), next = place(item(1));
        find_tokens(tokens, at);
        for (int pass = 0; at.n > 0; pass++) {
            find_tokens(next_tokens, next);
            const Place after = place(item(pass + 2));
            for (int unit = 0; unit < n_units; unit++) {
                if (turn > 0) await(empty(at_stage), (turn - 1) & 1);
                if (warp == 0 && lane == 0) load_w(w_map, at, unit, at_stage);
                __syncwarp();
#pragma unroll
                for (int j = 0; j < TOKENS / 16; j++) {
                    const int token = __shfl_sync(~0u, tokens[j / 8], j % 8 * 4 + lane / 8);
                    if (token >= 0)
                        copy_16_bytes_hinted(stage(at_stage) + to + j * 2048, x + token * row_bytes + unit * 128, L2_EVICT_LAST);
                }
                barrier_arrive_after_copies(full(at_stage));
                if (++at_stage == N_STAGES) at_stage = 0, turn++;
            }
            at = next, next = after;
#pragma unroll
            for (int i = 0; i < LANE_ROWS; i++) tokens[i] = next_tokens[i];
        }
    }
};

}  // namespace quire
