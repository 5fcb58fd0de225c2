// What becomes of the sums of moe_wide.cu: with bias and activation through shared memory, where a slot's rows of y come to
// lie side by side, and by threads from there. The copy engine would take as long to let go of the memory as a round
// takes; and rows behind an expert's last are another's.
#pragma once
#include "moe/wide_products.h"

namespace quire {

struct MoeResults : MoeProducts {
    using MoeProducts::MoeProducts;

    __device__ uint32_t out_at(int buffer) const { return base + OUT_AT + (group() * N_OUT + buffer) * OUT_BYTES; }
    __device__ static uint32_t out_cell(uint32_t out, int token, int cell) {  // no two of a warp's in the same banks
        return out + (token * CELLS + (CELLS == 8 ? cell ^ (token & 7) : cell ^ (token >> 1 & 3))) * 16;
    }
    // d: of ROUND_TOKENS, of which n are of the tile. PLAIN: without biases and limit.
    template <bool PLAIN> __device__ void stage_round(const float* d, uint32_t out, int n, float above, float below) const {
        const int lane = threadIdx.x & 31, warp = threadIdx.x % GROUP / 32;
        const Gating gate{a.slope, a.offset, a.limit};
#pragma unroll
        for (int v = 0; v < ROUND_TOKENS / 8; v++) {
            if (v % 4 == 0 && v * 8 >= n) break;  // not oftener: what is between goes on at once
            float x = d[4 * v], y = d[4 * v + 1], z = d[4 * v + 2], w = d[4 * v + 3];
            if (!PLAIN) x += above, y += above, z += below, w += below;
            const int token = v * 8 + (lane & 7);
            if (QUIRE_SILU) {
                const float first = PLAIN ? gate.of(x, z) : gate(x, z), second = PLAIN ? gate.of(y, w) : gate(y, w);
                store_transposed(out_cell(out, token, warp), pack(first, second));
            } else {
                store_transposed(out_cell(out, token, warp * 2 + (lane >> 3 & 1)), pack(x, y), pack(z, w));
            }
        }
    }
    __device__ void store_round(uint32_t out, int row, int slot, int n) const {
        const int thread = threadIdx.x % GROUP, cell = thread % CELLS;
        Element* to = static_cast<Element*>(a.y) + int64_t(slot) * a.n_rows + row + cell * 8;
        if (row + cell * 8 >= a.n_rows) return;
#pragma unroll
        for (int first = 0; first < ROUND_TOKENS; first += GROUP / CELLS) {
            const int token = first + thread / CELLS;
            if (token < n) *reinterpret_cast<uint4*>(to + int64_t(token) * a.n_rows) = read16(out_cell(out, token, cell));
        }
    }
    // n_rounds: of this warpgroup so far; buffers take turns: who is at the barrier of a round has read what the one before
    // left, so its own may be written over in the next.
    __device__ void store(const float (&d)[HALVES][TOKENS / 2], const Place& at, int& n_rounds) const {
        const bool is_plain = a.bias == nullptr && !(QUIRE_SILU && a.limit > 0);
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const int row = at.row + (group() * HALVES + half) * OUT_ROWS, own = upper_row(at, half);
            const int n = n_matrix_rows(), last = n - 1;  // rows beyond are not stored
            const float above = bias_of(a.bias, n, at.expert, min(own, last));
            const float below = bias_of(a.bias, n, at.expert, min(lower_row(own), last));
#pragma unroll
            for (int first = 0; first < TOKENS; first += ROUND_TOKENS) {
                if (first >= at.n || row >= a.n_rows) continue;
                const uint32_t out = out_at(n_rounds++ % N_OUT);
                if (is_plain) {
                    stage_round<true>(&d[half][first / 2], out, at.n - first, above, below);
                } else {
                    stage_round<false>(&d[half][first / 2], out, at.n - first, above, below);
                }
                named_sync(1 + group(), GROUP);
                store_round(out, row, at.slot + first, at.n - first);
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
    __device__ void work() const {
        if (!QUIRE_SILU) wait_for_previous_grid();
        int n_rounds = 0;
        Place at = place(item(0));
        for (int pass = 0; at.n > 0; pass++) {
            const Place next = place(item(pass + 1));
            float d[HALVES][TOKENS / 2];
            multiply_width<TOKENS>(d, pass * n_units, at);
            store(d, at, n_rounds);
            at = next;
        }
    }
};

}  // namespace quire
