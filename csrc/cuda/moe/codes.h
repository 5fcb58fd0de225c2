// Codes of 8 and 4 bits of experts' matrices: to elements in registers, and their scales. For moe_few.cu and moe_wide.cu.
//
// Macros: QUIRE_CODES (0: w is elements; 1: e4m3, 2: int8, 3: 4-bit integers, 4: e2m1), QUIRE_GROUP (0: a row has one
// scale; 32, or a multiple of 64; bytes: 0, or 128 for blocks of 128 x 128), QUIRE_ZEROS (3: and a zero point).
#pragma once
#include "gemm/codes.h"

#ifndef QUIRE_CODES
#define QUIRE_CODES 0
#define QUIRE_GROUP 0
#endif

namespace quire {

#if QUIRE_CODES
constexpr bool IN_WORDS = QUIRE_CODES >= 3, IS_FP4 = QUIRE_CODES == 4;
constexpr int GROUPS = QUIRE_GROUP == 32 ? 2 : 1;  // of 64 columns
constexpr int SCALES = IN_WORDS ? GROUPS * (1 + QUIRE_ZEROS) : 1;  // of 64 columns of a row

// ---- codes to elements, two of a word -------------------------------------------------------------------------------

#if QUIRE_CODES == 4
// In the lower four bits of each half (SECOND: the next four). The bits of e2m1 are those of a smaller element, 2^126
// (half: 2^14) times less. bf16: one product puts the sign and the rest where they belong, with other bits between.
template <bool SECOND> __device__ __forceinline__ uint32_t elements(uint32_t word) {
#if QUIRE_BF16
    const uint32_t two = (word & (SECOND ? 0x00F000F0u : 0x000F000Fu)) * (SECOND ? 0x104u : 0x1040u);
    return times(two & 0x81C081C0u, 0x7E807E80u);
#else
    const uint32_t own = SECOND ? word >> 4 : word;
    return times((own & 0x00070007u) << 9 | (own & 0x00080008u) << 12, 0x74007400u);
#endif
}
#elif QUIRE_CODES == 1
// Bytes 0, 1 (UPPER: 2, 3), e4m3: those of an element 2^120 times less; half has an instruction.
template <bool UPPER> __device__ __forceinline__ uint32_t elements(uint32_t word) {
#if QUIRE_BF16
    const uint32_t raised = __byte_perm(word, 0, UPPER ? 0x3424 : 0x1404);
    return times((raised >> 4 & 0x07F007F0u) | (raised & 0x80008000u), 0x7B807B80u);
#else
    return UPPER ? halves_of_high(word) : halves_of_low(word);
#endif
}
#elif QUIRE_CODES == 2
template <bool UPPER> __device__ __forceinline__ uint32_t elements(uint32_t word) {
    const int first = UPPER ? 16 : 0;
    return pack(float(int8_t(word >> first)), float(int8_t(word >> (first + 8))));
}
#endif

// ---- scales ---------------------------------------------------------------------------------------------------------

struct RowScales {  // of 64 columns of one row, as they lie in memory
    uint32_t bits[SCALES > 2 ? 2 : 1];

    __device__ __forceinline__ float element(int i) const {
        return i % 2 ? high(bits[i / 2]) : low(bits[i / 2]);
    }
    __device__ __forceinline__ float scale(int group) const {
        if (!IN_WORDS) return __uint_as_float(bits[0]);
        if (IS_FP4) return __uint_as_float((bits[0] >> group * 8 & 0xff) << 23);  // 2^-127 is taken for 0
        return element(group * (1 + QUIRE_ZEROS));
    }
    __device__ __forceinline__ float point(int group) const {
        return QUIRE_ZEROS ? element(group * 2 + 1) : 8.0f;
    }
};

// Of the columns from `column` of row `row` of an expert's matrix [n, k]. all: CodedMatrices.scales in
// quire/kernels/moe/coded.py.
__device__ __forceinline__ RowScales scales_at(const void* all, int expert, int row, int column, int n, int k) {
    RowScales found;
#if QUIRE_CODES <= 2
    const int n_down = QUIRE_GROUP ? (n + 127) / 128 : n, n_right = QUIRE_GROUP ? (k + 127) / 128 : 1;
    const int line = QUIRE_GROUP ? row / 128 : row, at = QUIRE_GROUP ? min(column, k - 1) / 128 : 0;
    found.bits[0] = __ldg(static_cast<const uint32_t*>(all) + (int64_t(expert) * n_down + line) * n_right + at);
#else
    constexpr int WIDE = QUIRE_GROUP ? QUIRE_GROUP : 1;
    const int n_lines = QUIRE_GROUP ? (k + WIDE - 1) / WIDE * (1 + QUIRE_ZEROS) : 1 + QUIRE_ZEROS;
    const int at = QUIRE_GROUP ? min(column, k - 64) / WIDE * (1 + QUIRE_ZEROS) : 0;
    const int64_t first = (int64_t(expert) * n + row) * n_lines + at;
    if (IS_FP4) {
        found.bits[0] = __ldg(reinterpret_cast<const uint16_t*>(static_cast<const uint8_t*>(all) + first));
        return found;
    }
    const uint16_t* from = static_cast<const uint16_t*>(all) + first;
    if (SCALES == 1) {
        found.bits[0] = __ldg(from);
    } else if (SCALES == 2) {
        found.bits[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
    } else {
        const uint2 four = __ldg(reinterpret_cast<const uint2*>(from));
        found.bits[0] = four.x, found.bits[SCALES > 2 ? 1 : 0] = four.y;
    }
#endif
    return found;
}

// ---- 4 bits: the fragment of 16 rows of w for step s of 16 columns, of the two words that a thread has of 64 ------------

#if QUIRE_CODES >= 3
__device__ __forceinline__ void fragment_of_words(uint32_t (&left)[4], const uint32_t* upper_words,
                                                  const uint32_t* lower_words, int s, uint32_t upper_point,
                                                  uint32_t lower_point) {
    const uint32_t upper = upper_words[s / 2] >> s % 2 * 8, lower = lower_words[s / 2] >> s % 2 * 8;
#if QUIRE_CODES == 4
    left[0] = elements<false>(upper), left[1] = elements<false>(lower);
    left[2] = elements<true>(upper), left[3] = elements<true>(lower);
#else
    left[0] = numbers(upper, upper_point), left[1] = numbers(lower, lower_point);
    left[2] = numbers(upper >> 4, upper_point), left[3] = numbers(lower >> 4, lower_point);
#endif
}
#endif
#endif

}  // namespace quire
