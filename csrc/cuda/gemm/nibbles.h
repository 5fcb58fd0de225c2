// Products with codes of 4 bits: made to numbers in registers, multiplied by the warp (mma.m16n8k16, rows of w are the
// 16), and their sums scaled after each group. Warpgroups take the chunks of a tile in turn, as making numbers of codes
// is more work than one of them can do while the chunk after is read; the first adds the sums of all, in their order.
#pragma once
#include "gemm/block.h"
#include "gemm/codes.h"

namespace quire {

__device__ __forceinline__ float read_element(uint32_t address) {
    uint16_t x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
    return low(x);
}
// One chunk: 16 rows a warp, of which a thread has row lane / 4 and the one 8 below, 16 codes side by side of each 64.
__device__ inline void GemmBlock::multiply_codes(float (&d)[TOKENS / 2], int unit, int stage_index) const {
    constexpr int STEPS = 16 / QUIRE_CHUNK_GROUPS;  // of 16 columns, of a group
    const int lane = threadIdx.x & 31, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const uint32_t codes = stage(stage_index) + row * 128 + lane % 2 * 8;
    float part[TOKENS / 2], upper = 0.0f, lower = 0.0f;
    uint32_t upper_point = raised_point(8.0f), lower_point = upper_point;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint32_t at_codes = codes + ((j * 2 + lane % 4 / 2) ^ (row & 7)) * 16;
        const uint2 high = read_pair(at_codes), below = read_pair(at_codes + 8 * 128);
        uint32_t x[QUADS][2][4];
#pragma unroll
        for (int v = 0; v < QUADS; v++) {
#pragma unroll
            for (int half = 0; half < 2; half++)
                load_matrices(x[v][half], x_cell(v * 8 + lane % 8, unit * X_CHUNKS + j, half * 4 + lane / 8));
        }
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const int step = j * 4 + s, shift = s % 2 * 8;
            if (step % STEPS == 0) {
                const uint32_t line = scales(stage_index) + (step / STEPS * (1 + QUIRE_ZEROS) * ROWS + row) * 2;
                upper = read_element(line), lower = read_element(line + 16);
                if (QUIRE_ZEROS) {
                    upper_point = raised_point(read_element(line + ROWS * 2));
                    lower_point = raised_point(read_element(line + ROWS * 2 + 16));
                }
#pragma unroll
                for (int i = 0; i < TOKENS / 2; i++) part[i] = 0.0f;
            }
            const uint32_t above = (s < 2 ? high.x : high.y) >> shift, under = (s < 2 ? below.x : below.y) >> shift;
            const uint32_t left[4] = {numbers(above, upper_point), numbers(under, lower_point),
                                      numbers(above >> 4, upper_point), numbers(under >> 4, lower_point)};
#pragma unroll
            for (int v = 0; v < QUADS; v++)
                multiply_add(reinterpret_cast<float(&)[4]>(part[4 * v]), left, x[v][s / 2][s % 2 * 2],
                             x[v][s / 2][s % 2 * 2 + 1]);
            if (step % STEPS == STEPS - 1) {
#pragma unroll
                for (int i = 0; i < TOKENS / 2; i++) d[i] += part[i] * (i % 4 < 2 ? upper : lower);
            }
        }
    }
}

// The sums of all warpgroups come to the first, through two buffers in turn: who writes the one again has waited for
// the other, before which the first has read.
__device__ inline void GemmBlock::gather(float (&d)[TOKENS / 2], int pass) const {
    const int group = threadIdx.x / 128, slot = threadIdx.x % 128;
    const uint32_t parts = base + at.group_parts + (pass & 1) * (PARTS_BYTES / 2) + slot * 16;
    if (group > 0) {
#pragma unroll
        for (int v = 0; v < QUADS; v++)
            write16(parts + ((group - 1) * QUADS + v) * 2048,
                    make_uint4(__float_as_uint(d[4 * v]), __float_as_uint(d[4 * v + 1]), __float_as_uint(d[4 * v + 2]),
                               __float_as_uint(d[4 * v + 3])));
    }
    named_sync(WORKERS_BARRIER, WORKERS);
    if (group > 0) return;
#pragma unroll
    for (int i = 0; i < (QUIRE_GROUPS - 1) * QUADS; i++) {
        const uint4 x = read16(parts + i * 2048);
        const int v = i % QUADS * 4;
        d[v] += __uint_as_float(x.x), d[v + 1] += __uint_as_float(x.y);
        d[v + 2] += __uint_as_float(x.z), d[v + 3] += __uint_as_float(x.w);
    }
}

__device__ inline void GemmBlock::multiply_nibbles(float (&d)[TOKENS / 2], int pass) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) d[i] = 0.0f;
    for (int unit = uniform(threadIdx.x / 128); unit < n_units; unit += QUIRE_GROUPS) {
        const int item = pass * n_units + unit, at_stage = item % a.n_stages;
        barrier_wait(full(at_stage), item / a.n_stages & 1);
        multiply_codes(d, unit, at_stage);
        __syncwarp();
        if (lane == 0) barrier_arrive(empty(at_stage));
    }
    gather(d, pass);
}

}  // namespace quire
