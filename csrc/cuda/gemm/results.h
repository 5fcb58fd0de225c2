// Results of a tile: sums handed over between the blocks of a cluster, then bias, SiLU, residual and the store.
#pragma once
#include "gemm/block.h"

namespace quire {

__device__ inline uint32_t GemmBlock::residual_bits(int row, int token) const {
    uint16_t x = 0;
    if (row < n_out() && token < a.m) {
        const Element* from = static_cast<const Element*>(a.residual) + token * a.residual_row + row;
        asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(from) : "memory");
    }
    return x;
}

__device__ inline GemmBlock::Added GemmBlock::residual_quad(int row, int token) const {
    Added added = {};
    if (!QUIRE_RESIDUAL) return added;
#pragma unroll
    for (int i = 0; i < (QUIRE_SILU ? 2 : 4); i++) added.bits[i] = residual_bits(row + i / 2 * 8, token + i % 2);
    return added;
}

template <int N> __device__ inline void GemmBlock::pin(Added (&added)[N]) {
#pragma unroll
    for (int i = 0; i < N * 4; i++) asm volatile("" : "+r"(added[i / 4].bits[i % 4])::"memory");
}

__device__ inline float GemmBlock::biased(float sum, int w_row) const {
    return rounded(QUIRE_BIAS && w_row < a.n ? sum + widen(static_cast<const Element*>(a.bias)[w_row]) : sum);
}

// A whole sum of codes of e4m3 as a number; those of blocks are numbers already.
__device__ inline float GemmBlock::scaled(float sum, int w_row, int token) const {
    if (QUIRE_FP8 != 1) return sum;
    const float x_scale = QUIRE_ROUNDS ? rounds()->x_scales[token] : load_float(a.x_scale + token * a.x_scale_step);
    return sum * x_scale * a.w_scale[w_row * a.w_scale_step];
}

// sum, up: sums of one element of y; up only for SiLU. Rounded where separate torch operations would round.
__device__ inline void GemmBlock::store(float sum, float up, float added, int row, int token) const {
    if (row >= n_out() || token >= a.m) return;
    float y = biased(scaled(sum, row, token), row);
    if (QUIRE_SILU) {
        const int up_row = a.n / 2 + row;
        y = rounded(rounded(silu(y)) * biased(scaled(up, up_row, token), up_row));
    }
    if (QUIRE_RESIDUAL) y = rounded(y + added);
#if QUIRE_WIDE
    static_cast<float*>(a.y)[token * a.y_row + row] = y;
#else
    static_cast<Element*>(a.y)[token * a.y_row + row] = Element(y);
#endif
}

__device__ inline void GemmBlock::store_quad(float4 sums, const Added& added, int row, int token) const {
    store(sums.x, sums.z, added.at(0), row, token);
    store(sums.y, sums.w, added.at(1), row, token + 1);
    if (QUIRE_SILU) return;
    store(sums.z, 0.0f, added.at(2), row + 8, token);
    store(sums.w, 0.0f, added.at(3), row + 8, token + 1);
}

__device__ inline float4 GemmBlock::quad(const float (&d)[TOKENS / 2], int v) {
    return make_float4(d[4 * v], d[4 * v + 1], d[4 * v + 2], d[4 * v + 3]);
}

#if QUIRE_CLUSTER > 1
// The block of rank r finishes what threads r * SHARE .. of every block's team have summed: [source][v][thread].
__device__ inline uint32_t GemmBlock::sums_at(int team, int source, int v, int slot) const {
    return base + at.sums + team * SUMS_BYTES + ((source * QUADS + v) * SHARE + slot) * 16;
}

__device__ inline void GemmBlock::hand_over(const float (&d)[TOKENS / 2], int team) const {
    const int t = threadIdx.x % TEAM, owner = t / SHARE;
    const uint32_t there = address_in(sums_at(team, rank, 0, t % SHARE), owner);
#pragma unroll
    for (int v = 0; v < QUADS; v++) {
        if (v * 8 < a.m) store_there(there + v * SHARE * 16, quad(d, v));
    }
    __syncwarp();
    if (t % 32 % SHARE == 0) arrive_there(address_in(shared_address(&barriers()->sums[team]), owner));
}

__device__ inline float4 GemmBlock::total(int team, int v, int slot) const {
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int source = 0; source < CLUSTER; source++) {
        const uint4 x = read16(sums_at(team, source, v, slot));
        sum.x += __uint_as_float(x.x), sum.y += __uint_as_float(x.y);
        sum.z += __uint_as_float(x.z), sum.w += __uint_as_float(x.w);
    }
    return sum;
}
#endif

}  // namespace quire
