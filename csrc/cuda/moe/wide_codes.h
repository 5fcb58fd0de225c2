// Experts in codes for moe_wide.cu: 64 columns of 64 rows of w as the fragments of wgmma that a thread gives from registers,
// made to numbers and scaled, as columns of x keep their order.
#pragma once
#include "moe/codes.h"

namespace quire {

constexpr int W_ROW_BYTES = QUIRE_CODES >= 3 ? 32 : QUIRE_CODES ? 64 : 128;  // of 64 columns of a row of w

#if QUIRE_CODES
// Two numbers times a scale, rounded once: scales of bytes and of e2m1 may be too small for half.
__device__ __forceinline__ uint32_t scaled(uint32_t numbers, float scale) {
    if (QUIRE_BF16 || QUIRE_CODES == 3) return times(numbers, pack(scale, scale));
    return pack(low(numbers) * scale, high(numbers) * scale);
}
// w: where the 64 rows begin, of which a warp has 16. left: for each step of 16 columns.
__device__ __forceinline__ void read_fragments(uint32_t (&left)[4][4], uint32_t w, const RowScales& upper,
                                               const RowScales& lower) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const uint32_t from = w + row * W_ROW_BYTES;
#if QUIRE_CODES >= 3
    const uint2 high = read_pair(from + lane % 4 * 8), below = read_pair(from + lane % 4 * 8 + 8 * W_ROW_BYTES);
    const uint32_t upper_words[2] = {high.x, high.y}, lower_words[2] = {below.x, below.y};
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const int g = s * GROUPS / 4;
        fragment_of_words(left[s], upper_words, lower_words, s, raised_point(upper.point(g)), raised_point(lower.point(g)));
#pragma unroll
        for (int i = 0; i < 4; i++) left[s][i] = scaled(left[s][i], i % 2 ? lower.scale(g) : upper.scale(g));
    }
#else
    // Swizzled by 16 bytes in 64: cell c of row r is at c ^ (r / 2 % 4), the same for the row eight below.
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const uint32_t cell = from + ((s ^ (row >> 1 & 3)) << 4) + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t two = read_two_bytes(cell + i % 2 * 8 * W_ROW_BYTES + i / 2 * 8);
            left[s][i] = scaled(elements<false>(two), i % 2 ? lower.scale(0) : upper.scale(0));
        }
    }
#endif
}
#endif

}  // namespace quire
