// What becomes of the sums of moe_wide.cu: with bias and activation through shared memory, where a slot's rows of y come to
// lie side by side.
#pragma once
#include "moe/wide_products.h"

namespace quire {

struct MoeResults : MoeProducts {
    using MoeProducts::MoeProducts;

    __device__ uint32_t out_at(int buffer) const { return base + OUT_AT + (group() * N_OUT + buffer) * OUT_BYTES; }
    __device__ static uint32_t out_cell(uint32_t out, int token, int cell) {  // swizzled as the tensor map has it
        return out + (token * CELLS + (CELLS == 8 ? cell ^ (token & 7) : cell ^ (token >> 1 & 3))) * 16;
    }
    __device__ void stage_round(const float* d, uint32_t out, float above, float below) const {
        const int lane = threadIdx.x & 31, warp = threadIdx.x % GROUP / 32;
        const Gating gate{a.slope, a.offset, a.limit};
#pragma unroll
        for (int v = 0; v < ROUND_TOKENS / 8; v++) {
            const float x = d[4 * v] + above, y = d[4 * v + 1] + above, z = d[4 * v + 2] + below, w = d[4 * v + 3] + below;
            const int token = v * 8 + (lane & 7);
            if (QUIRE_SILU) {
                store_transposed(out_cell(out, token, warp), pack(gate(x, z), gate(y, w)));
            } else {
                store_transposed(out_cell(out, token, warp * 2 + (lane >> 3 & 1)), pack(x, y), pack(z, w));
            }
        }
    }
    // A whole round by the copy engine; the last of an expert by threads, as what follows is another expert's.
    __device__ void store_round(const CUtensorMap* map, uint32_t out, int row, int slot, int n) const {
        const int thread = threadIdx.x % GROUP;
        if (n >= ROUND_TOKENS) {
            if (thread == 0) store_box(map, out, row, slot);
            return;
        }
        for (int i = thread; i < n * CELLS; i += GROUP) {
            const int to_row = row + i % CELLS * 8;
            if (to_row >= a.n_rows) continue;
            Element* to = static_cast<Element*>(a.y) + int64_t(slot + i / CELLS) * a.n_rows + to_row;
            *reinterpret_cast<uint4*>(to) = read16(out_cell(out, i / CELLS, i % CELLS));
        }
        named_sync(1 + group(), GROUP);
        if (thread == 0) stores_commit();  // one for each buffer that is used, as `stores_have_read` counts
    }
    // n_rounds: of this warpgroup so far; buffers take turns.
    __device__ void store(const CUtensorMap* map, const float (&d)[HALVES][TOKENS / 2], const Place& at, int& n_rounds) const {
        constexpr int N_ROUNDS = TOKENS / ROUND_TOKENS;
        const int barrier = 1 + group();
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const int row = at.row + (group() * HALVES + half) * OUT_ROWS, own = upper_row(at, half);
            const int n = n_matrix_rows(), last = n - 1;  // rows beyond are not stored
            const float above = bias_of(a.bias, n, at.expert, min(own, last));
            const float below = bias_of(a.bias, n, at.expert, min(lower_row(own), last));
#pragma unroll
            for (int i = 0; i < N_ROUNDS; i++) {
                const int first = i * ROUND_TOKENS;
                if (first >= at.n || row >= a.n_rows) continue;
                const uint32_t out = out_at(n_rounds++ % N_OUT);
                if (threadIdx.x % GROUP == 0) stores_have_read<N_OUT - 1>();
                named_sync(barrier, GROUP);
                stage_round(&d[half][first / 2], out, above, below);
                async_fence();
                named_sync(barrier, GROUP);
                store_round(map, out, row, at.slot + first, at.n - first);
            }
        }
    }

    // By the narrowest instruction for the tokens of the tile.
    template <int N> __device__ __forceinline__ void multiply_width(float (&d)[HALVES][TOKENS / 2], int first, const Place& at) const {
        if constexpr (N - WIDTH_STEP >= 64) {
            if (at.n <= N - WIDTH_STEP) return multiply_width<N - WIDTH_STEP>(d, first, at);
        }
        multiply<N>(d, first, at);
    }
    __device__ void work(const CUtensorMap* y_map) const {
        if (!QUIRE_SILU) wait_for_previous_grid();
        int n_rounds = 0;
        Place at = place(item(0));
        for (int pass = 0; at.n > 0; pass++) {
            const Place next = place(item(pass + 1));
            float d[HALVES][TOKENS / 2];
            multiply_width<TOKENS>(d, pass * n_units, at);
            store(y_map, d, at, n_rounds);
            at = next;
        }
        if (threadIdx.x % GROUP == 0) stores_wait();
    }
};

}  // namespace quire
