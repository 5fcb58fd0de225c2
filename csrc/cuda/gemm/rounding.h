// x rounded to e4m3 by each block for itself (QUIRE_ROUNDS), normed before if asked: so few rows need no launch of their
// own for it. A thread holds QUIRE_ROUNDS cells of 16 bytes of the whole row, as a row's scale is its largest / 448.
#pragma once
#include "gemm/input.h"

namespace quire {

#if QUIRE_ROUNDS
constexpr float LARGEST_CODE = 448.0f, LEAST = 1e-10f;  // quire/kernels/e4m3.py, w8a8/reference.py

__device__ __forceinline__ float largest_of(uint32_t pair) { return fmaxf(fabsf(low(pair)), fabsf(high(pair))); }
__device__ __forceinline__ uint32_t codes_of(uint32_t pair, float scale, float inverse) {
    return quire::codes_of(quotient(low(pair), scale, inverse), quotient(high(pair), scale, inverse));
}

// Over all threads that multiply. Buffers of two calls in a row differ: so one barrier is enough.
template <class Join> __device__ __forceinline__ float GemmBlock::joined(float x, int buffer, Join join) const {
    float* of_warps = rounds()->of_warps[buffer];
    for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(0xffffffffu, x, step));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    named_sync(WORKERS_BARRIER, WORKERS);
    x = of_warps[0];
#pragma unroll
    for (int warp = 1; warp < WORKERS / 32; warp++) x = join(x, of_warps[warp]);
    return x;
}

__device__ inline void GemmBlock::round_x() const {
    const int n_cells = a.k / 8;
    uint4 weights[QUIRE_ROUNDS], cells[QUIRE_ROUNDS];
#pragma unroll
    for (int i = 0; i < QUIRE_ROUNDS; i++) {
        const int cell = threadIdx.x + i * WORKERS;
        weights[i] = make_uint4(0, 0, 0, 0);
        if (QUIRE_NORM && cell < n_cells) weights[i] = load16(static_cast<const Element*>(a.norm_weight) + cell * 8);
    }
    wait_for_previous_grid();
    for (int token = 0; token < a.m; token++) {
        const Element* x = static_cast<const Element*>(a.x) + token * a.x_row;
#pragma unroll
        for (int i = 0; i < QUIRE_ROUNDS; i++) {
            const int cell = threadIdx.x + i * WORKERS;
            cells[i] = make_uint4(0, 0, 0, 0);
            if (cell < n_cells) cells[i] = load16(x + cell * 8);
        }
        if (QUIRE_NORM) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < QUIRE_ROUNDS; i++)
                sum += square_sum(cells[i].x) + square_sum(cells[i].y) + square_sum(cells[i].z) + square_sum(cells[i].w);
            sum = joined(sum, 0, [](float x, float y) { return x + y; });
            const float scale = 1.0f / sqrtf(sum / float(a.k) + a.eps);
#pragma unroll
            for (int i = 0; i < QUIRE_ROUNDS; i++) {
                const uint4 v = cells[i], g = weights[i];
                cells[i] = make_uint4(normed(v.x, scale, g.x), normed(v.y, scale, g.y), normed(v.z, scale, g.z),
                                      normed(v.w, scale, g.w));
            }
        }
        float largest = LEAST;
#pragma unroll
        for (int i = 0; i < QUIRE_ROUNDS; i++)
            largest = fmaxf(fmaxf(largest, fmaxf(largest_of(cells[i].x), largest_of(cells[i].y))),
                            fmaxf(largest_of(cells[i].z), largest_of(cells[i].w)));
        largest = joined(largest, QUIRE_NORM ? 1 : token % 2, [](float x, float y) { return fmaxf(x, y); });
        const float scale = __fdiv_rn(largest, LARGEST_CODE), inverse = __frcp_rn(scale);
        if (threadIdx.x == 0) rounds()->x_scales[token] = scale;
#pragma unroll
        for (int i = 0; i < QUIRE_ROUNDS; i++) {
            const int cell = threadIdx.x + i * WORKERS, chunk = cell / 16 - first_chunk;
            if (chunk < 0 || chunk >= n_chunks) continue;
            const uint4 v = cells[i];
            write8(x_cell(token, chunk, cell % 16 / 2) + cell % 2 * 8,
                   make_uint2(codes_of(v.x, scale, inverse) | codes_of(v.y, scale, inverse) << 16,
                              codes_of(v.z, scale, inverse) | codes_of(v.w, scale, inverse) << 16));
        }
    }
}
#endif

}  // namespace quire
