// The sums of a tile of moe_wide.cu: of elements, of w in codes, or of e4m3 with scales. One of two warpgroups has half of
// the rows of w.
#pragma once
#include "moe/wide_shape.h"

namespace quire {

struct MoeProducts : MoeBlock {
    using MoeBlock::MoeBlock;

    __device__ int group() const { return threadIdx.x / GROUP; }
    __device__ void await_stage(int i, int turn) const {
        await(full(i), turn & 1);
        if (GATHERS) async_fence();  // rows were written by threads
    }
    __device__ void release(int i) const {
        if ((threadIdx.x & 31) == 0) barrier_arrive(empty(i));
    }
    // Rows of an expert's matrix that a thread has in a product of 64: of gate and of up, or eight apart.
    __device__ int upper_row(const Place& at, int half) const {
        const int lane = threadIdx.x & 31, warp = threadIdx.x % GROUP / 32;
        return at.row + (group() * HALVES + half) * OUT_ROWS + warp * (OUT_ROWS / 4) + lane / 4;
    }
    __device__ int lower_row(int upper) const { return QUIRE_SILU ? a.n_rows + upper : upper + 8; }
    __device__ int n_matrix_rows() const { return QUIRE_SILU ? 2 * a.n_rows : a.n_rows; }
#if QUIRE_CODES
    __device__ void find_scales(RowScales (&found)[HALVES][2], const Place& at, int unit) const {
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const int upper = min(upper_row(at, half), a.n_rows - 1), lower = min(lower_row(upper), n_matrix_rows() - 1);
            found[half][0] = scales_at(a.scales, at.expert, upper, unit * CHUNK, n_matrix_rows(), a.k);
            found[half][1] = scales_at(a.scales, at.expert, lower, unit * CHUNK, n_matrix_rows(), a.k);
        }
    }
    template <int N> __device__ void multiply(float (&d)[HALVES][TOKENS / 2], int first, const Place& at) const {
        int at_stage = first % N_STAGES, turn = first / N_STAGES;
        RowScales next[HALVES][2];
        find_scales(next, at, 0);
        for (int unit = 0; unit < n_units; unit++) {
            RowScales now[HALVES][2];
#pragma unroll
            for (int half = 0; half < HALVES; half++) now[half][0] = next[half][0], now[half][1] = next[half][1];
            find_scales(next, at, min(unit + 1, n_units - 1));  // they come from far
            await_stage(at_stage, turn);
            const Operand x = rows_operand(stage(at_stage) + W_BYTES);
            uint32_t left[HALVES][4][4];
#pragma unroll
            for (int half = 0; half < HALVES; half++) {  // numbers of the second are made while the first multiplies
                const uint32_t w = stage(at_stage) + (group() * HALVES + half) * 64 * W_ROW_BYTES;
                read_fragments(left[half], w, now[half][0], now[half][1]);
                products_begin();
                float(&sums)[N / 2] = reinterpret_cast<float(&)[N / 2]>(d[half]);
#pragma unroll
                for (int s = 0; s < 4; s++) Product<N>::rows_of(sums, left[half][s], x.further(32 * s), unit + s > 0);
                products_commit();
            }
            products_wait<0>();
            pin(d[0]), pin(d[1]);
            __syncwarp();  // all have read their codes
            release(at_stage);
            if (++at_stage == N_STAGES) at_stage = 0, turn++;
        }
    }
#elif QUIRE_FP8
    // Sums leave the tensor cores, which keep few digits of them, after each chunk; scaled where scales are of blocks. While
    // one warpgroup adds, the other multiplies.
    __device__ float w_scale(int i) const { return __ldg(static_cast<const float*>(a.scales) + i); }
    __device__ int first_scale(const Place& at, int row) const {  // of a row of w
        constexpr int SIDE = QUIRE_FP8 == 2 ? SCALE_BLOCK : 1;
        const int n_down = (n_matrix_rows() + SIDE - 1) / SIDE, n_right = QUIRE_FP8 == 2 ? n_units : 1;
        return (at.expert * n_down + min(row, n_matrix_rows() - 1) / SIDE) * n_right;
    }
    template <int N> __device__ void multiply(float (&d)[HALVES][TOKENS / 2], int first, const Place& at) const {
        int at_stage = first % N_STAGES, turn = first / N_STAGES;
        // In a tile of this warpgroup all rows of gate are of one block, and those that are not of pairs.
        const int upper_at = first_scale(at, upper_row(at, 0));
        int lower_at[HALVES];
        float part[N / 2];
#pragma unroll
        for (int half = 0; half < HALVES; half++) lower_at[half] = first_scale(at, lower_row(upper_row(at, half)));
#pragma unroll
        for (int half = 0; half < HALVES; half++)
#pragma unroll
            for (int i = 0; i < N / 2; i++) d[half][i] = 0.0f;
        for (int unit = 0; unit < n_units; unit++) {
            float lower[HALVES];  // they come from far
            const float upper = QUIRE_FP8 == 2 ? w_scale(upper_at + unit) : 1.0f;
#pragma unroll
            for (int half = 0; half < HALVES; half++)
                lower[half] = QUIRE_FP8 == 2 && QUIRE_SILU ? w_scale(lower_at[half] + unit) : upper;
            await_stage(at_stage, turn);
            const Operand x = rows_operand(stage(at_stage) + W_BYTES);
            const uint32_t from = scales(at_stage) + threadIdx.x % 4 * 8;
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                const Operand w = rows_operand(stage(at_stage) + (uniform(group()) * HALVES + half) * 8192);
                products_begin();
#pragma unroll
                for (int i = 0; i < 4; i++) Product<N>::rows(part, w.further(32 * i), x.further(32 * i), i > 0);
                products_commit();
                products_wait<0>();
                pin(part);
                if (QUIRE_FP8 == 1 && half + 1 == HALVES) release(at_stage);
#pragma unroll
                for (int v = 0; v < N / 8; v++) {
                    const float2 s = QUIRE_FP8 == 2 ? read8(from + v * 32) : make_float2(1.0f, 1.0f);
                    float* sum = &d[half][4 * v];
                    sum[0] += part[4 * v] * (s.x * upper), sum[1] += part[4 * v + 1] * (s.y * upper);
                    sum[2] += part[4 * v + 2] * (s.x * lower[half]), sum[3] += part[4 * v + 3] * (s.y * lower[half]);
                }
            }
            if (QUIRE_FP8 == 2) {
                __syncwarp();  // all have read the scales
                release(at_stage);
            }
            if (++at_stage == N_STAGES) at_stage = 0, turn++;
        }
        if (QUIRE_FP8 == 1) scale_rows<N>(d, at);
    }
    // A scale of each row of w and of x.
    template <int N> __device__ void scale_rows(float (&d)[HALVES][TOKENS / 2], const Place& at) const {
        float upper[HALVES], lower[HALVES];
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const int row = upper_row(at, half);
            upper[half] = w_scale(first_scale(at, row)), lower[half] = w_scale(first_scale(at, lower_row(row)));
        }
#pragma unroll
        for (int v = 0; v < N / 8; v++) {
            const int slot = at.slot + v * 8 + threadIdx.x % 4 * 2;
            const float even = load_float(a.x_scales + min(slot, a.n_slots - 1));
            const float odd = load_float(a.x_scales + min(slot + 1, a.n_slots - 1));
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                float* sum = &d[half][4 * v];
                sum[0] *= even * upper[half], sum[1] *= odd * upper[half];
                sum[2] *= even * lower[half], sum[3] *= odd * lower[half];
            }
        }
    }
#else
    template <int N> __device__ void multiply(float (&d)[HALVES][TOKENS / 2], int first, const Place&) const {
        int at_stage = first % N_STAGES, turn = first / N_STAGES, before = at_stage;
        for (int unit = 0; unit < n_units; unit++) {
            await_stage(at_stage, turn);
            const Operand x = rows_operand(stage(at_stage) + W_BYTES);
            products_begin();
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                const Operand w = rows_operand(stage(at_stage) + (uniform(group()) * HALVES + half) * 8192);
                float(&sums)[N / 2] = reinterpret_cast<float(&)[N / 2]>(d[half]);
#pragma unroll
                for (int i = 0; i < 4; i++) Product<N>::rows(sums, w.further(32 * i), x.further(32 * i), unit + i > 0);
            }
            products_commit();
            products_wait<1>();
            if (unit > 0) release(before);
            before = at_stage;
            if (++at_stage == N_STAGES) at_stage = 0, turn++;
        }
        products_wait<0>();
        pin(d[0]), pin(d[1]);
        release(before);
    }
#endif
};

}  // namespace quire
