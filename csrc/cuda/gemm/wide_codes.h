// Elements of 4-bit codes in registers for products of many rows: scaled, so that all columns add to one sum.
#pragma once
#include "gemm/codes.h"

namespace quire {

#if QUIRE_NIBBLES
// Of 64 columns of 64 rows, the c-th of a chunk in a stage, what a thread gives to wgmma, for each step of 16 columns.
// codes, scales: where those of all the tile's rows begin.
__device__ __forceinline__ void make_elements(uint32_t (&left)[4][4], uint32_t codes, uint32_t scales, int c) {
    constexpr int ROWS = 128, STEPS = QUIRE_CHUNK_GROUPS == 4 ? 2 : 4;  // of a tile; of a group
    const int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16 + lane / 4, cell = c * 2 + lane % 4 / 2;
    codes += row * ROW_BYTES + (cell ^ (row >> 1 & 3)) * 16 + lane % 2 * 8;
    const uint2 high = read_pair(codes), below = read_pair(codes + 8 * ROW_BYTES);
    uint32_t upper = 0, lower = 0, upper_point = raised_point(8.0f), lower_point = upper_point;
#pragma unroll
    for (int s = 0; s < 4; s++) {
        if (s % STEPS == 0) {
            const int group = QUIRE_CHUNK_GROUPS == 1 ? 0 : (c * 4 + s) * QUIRE_CHUNK_GROUPS / 8;
            const uint32_t line = scales + (group * (1 + QUIRE_ZEROS) * ROWS + row) * 2;
            upper = read_two_bytes(line) * 0x10001u, lower = read_two_bytes(line + 16) * 0x10001u;
            if (QUIRE_ZEROS) {
                upper_point = raised_point(low(read_two_bytes(line + ROWS * 2)));
                lower_point = raised_point(low(read_two_bytes(line + ROWS * 2 + 16)));
            }
        }
        const uint32_t above = s < 2 ? high.x : high.y, under = s < 2 ? below.x : below.y;
        const int first = s % 2 * 8;
        left[s][0] = times(numbers(above >> first, upper_point), upper);
        left[s][1] = times(numbers(under >> first, lower_point), lower);
        left[s][2] = times(numbers(above >> (first + 4), upper_point), upper);
        left[s][3] = times(numbers(under >> (first + 4), lower_point), lower);
    }
}
#endif

}  // namespace quire
