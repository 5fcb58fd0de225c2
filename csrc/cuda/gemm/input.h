// x held for the whole slice (QUIRE_RESIDENT): read once, normed if asked. By the consumers, before they multiply.
#pragma once
#include "gemm/block.h"

namespace quire {

__device__ __forceinline__ float square_sum(uint32_t pair) { return low(pair) * low(pair) + high(pair) * high(pair); }
__device__ __forceinline__ uint32_t normed(uint32_t pair, float scale, uint32_t weight) {
    return pack(rounded(low(pair) * scale) * low(weight), rounded(high(pair) * scale) * high(weight));
}

// What does not depend on the previous grid.
__device__ inline void GemmBlock::prepare_x() const {
    for (int i = threadIdx.x; i < TOKENS * n_chunks * 8; i += WORKERS) {
        const int token = i / 8 % TOKENS;
        if (token >= a.m) write16(x_cell(token, i / 8 / TOKENS, i % 8), make_uint4(0, 0, 0, 0));
    }
    if (STAGED_NORM) {
        const Element* weight = static_cast<const Element*>(a.norm_weight) + first_chunk * CHUNK;
        for (int i = threadIdx.x; i < n_chunks * 8; i += WORKERS)
            write16(base + at.norm_weight + i * 16, load16(weight + i * 8));
    }
}

__device__ inline void GemmBlock::stage_x() const {
    const char* x = static_cast<const char*>(a.x) + first_chunk * 128 + threadIdx.x % 8 * 16;
    float* parts = reinterpret_cast<float*>(memory + at.parts);
    for (int i = threadIdx.x; i - int(threadIdx.x & 31) < walk_end(); i += UNROLL * WORKERS) {
        uint4 cells[UNROLL];
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            const int k = i + j * WORKERS, token = walk_token(k);
            cells[j] = make_uint4(0, 0, 0, 0);
            if (k < walk_end() && token < a.m) cells[j] = load16(x + token * a.x_row * OPERAND_BYTES + walk_chunk(k) * 128);
        }
#pragma unroll
        for (int j = 0; j < UNROLL; j++) {
            const int k = i + j * WORKERS, token = walk_token(k), chunk = walk_chunk(k);
            const bool live = k < walk_end() && token < a.m;
            if (live) write16(x_cell(token, chunk, k % 8), cells[j]);
            if (QUIRE_NORM) {
                float sum = square_sum(cells[j].x) + square_sum(cells[j].y) + square_sum(cells[j].z) +
                            square_sum(cells[j].w);
                for (int lane = 1; lane < 8; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
                if (k % 8 == 0 && live) parts[token * n_chunks + chunk] = sum;
            }
        }
    }
}

// Every block of the cluster needs the squares of whole rows: sums of slices are handed to all.
__device__ inline void GemmBlock::norm_x() const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    const float* parts = reinterpret_cast<const float*>(memory + at.parts);
    float* squares = reinterpret_cast<float*>(memory + at.squares);
    float* scales = squares + CLUSTER * TOKENS;
    const uint32_t barrier = shared_address(&barriers()->squares);
    named_sync(WORKERS_BARRIER, WORKERS);
    for (int token = warp; token < a.m; token += WORKERS / 32) {
        float sum = 0.0f;
        for (int i = lane; i < n_chunks; i += 32) sum += parts[token * n_chunks + i];
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (CLUSTER == 1 && lane == 0) squares[token] = sum;
        if (CLUSTER > 1 && lane < CLUSTER)
            store_there(address_in(base + at.squares + (rank * TOKENS + token) * 4, lane), sum);
    }
    named_sync(WORKERS_BARRIER, WORKERS);
    if (CLUSTER > 1) {
        if (threadIdx.x < CLUSTER) arrive_there(address_in(barrier, threadIdx.x));
        wait_cluster(barrier, 0);
    }
    if (threadIdx.x < a.m) {
        float sum = 0.0f;
        for (int r = 0; r < CLUSTER; r++) sum += squares[r * TOKENS + threadIdx.x];
        scales[threadIdx.x] = 1.0f / sqrtf(sum / float(a.k) + a.eps);
    }
    named_sync(WORKERS_BARRIER, WORKERS);
    for (int i = threadIdx.x; i < walk_end(); i += WORKERS) {
        const int token = walk_token(i), chunk = walk_chunk(i), cell = i % 8;
        if (token >= a.m) continue;
        const float scale = scales[token];
        const uint4 v = read16(x_cell(token, chunk, cell));
        const uint4 g = read16(base + at.norm_weight + (chunk * 8 + cell) * 16);
        write16(x_cell(token, chunk, cell), make_uint4(normed(v.x, scale, g.x), normed(v.y, scale, g.y),
                                                       normed(v.z, scale, g.z), normed(v.w, scale, g.w)));
    }
}

}  // namespace quire
