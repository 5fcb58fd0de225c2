// Experts in codes for moe_few.cu: 64 columns of 16 rows of w, made to numbers in registers and multiplied by one warp.
//
// A thread has two of the rows, lane / 4 of the upper eight and of the lower, and 16 columns of each. Columns are added
// in an order of their own, which x follows: of bytes a thread has 16 that lie side by side, of words the order is that of
// quire/kernels/nibbles.py. Sums are scaled after each group of columns that share a scale.
//
// Macros: QUIRE_CODES (0: w is elements; 1: e4m3, 2: int8, 3: 4-bit integers, 4: e2m1), QUIRE_GROUP (0: a row has one
// scale; 32, or a multiple of 64; bytes: 0, or 128 for blocks of 128 x 128), QUIRE_POINTS (3: and a zero point).
#pragma once
#include "gemm/codes.h"
#include "moe/few_lists.h"

namespace quire {

#if QUIRE_CODES
constexpr bool IN_WORDS = QUIRE_CODES >= 3, IS_FP4 = QUIRE_CODES == 4;
constexpr int GROUPS = QUIRE_GROUP == 32 ? 2 : 1;  // of 64 columns
constexpr int SCALES = IN_WORDS ? GROUPS * (1 + QUIRE_POINTS) : 1;  // of 64 columns of a row

// ---- codes to elements, two of a word -------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t both(float x) { return pack(x, x); }
#if QUIRE_CODES == 4
// In the lower four bits of each half. The bits of e2m1 are those of a smaller element, 2^126 (half: 2^14) times less.
__device__ __forceinline__ uint32_t elements(uint32_t word) {
    constexpr int SHIFT = QUIRE_BF16 ? 6 : 9;
    constexpr uint32_t FACTOR = QUIRE_BF16 ? 0x7E807E80u : 0x74007400u;
    return times((word & 0x00070007u) << SHIFT | (word & 0x00080008u) << 12, FACTOR);
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
        return element(group * (1 + QUIRE_POINTS));
    }
    __device__ __forceinline__ float point(int group) const {
        return QUIRE_POINTS ? element(group * 2 + 1) : 8.0f;
    }
};

struct FewCodes : FewLists {
    using FewLists::FewLists;

    // Of the columns from `column` of row `row` of an expert's matrix [n, k].
    template <class K> __device__ __forceinline__ RowScales scales_of(int expert, int row, int column) const {
        const int n = K::IS_UP ? 2 * a.inner : a.hidden, k = columns<K>();
        const void* all = K::IS_UP ? a.up_scales : a.down_scales;
        RowScales found;
#if QUIRE_CODES <= 2
        const int n_down = QUIRE_GROUP ? (n + 127) / 128 : n, n_right = QUIRE_GROUP ? (k + 127) / 128 : 1;
        const int line = QUIRE_GROUP ? row / 128 : row, at = QUIRE_GROUP ? min(column, k - 1) / 128 : 0;
        found.bits[0] = __ldg(static_cast<const uint32_t*>(all) + (int64_t(expert) * n_down + line) * n_right + at);
#else
        constexpr int WIDTH = QUIRE_GROUP ? QUIRE_GROUP : 1;
        const int n_lines = QUIRE_GROUP ? (k + WIDTH - 1) / WIDTH * (1 + QUIRE_POINTS) : 1 + QUIRE_POINTS;
        const int at = QUIRE_GROUP ? min(column, k - 64) / WIDTH * (1 + QUIRE_POINTS) : 0;
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

    // ---- the product ----

    // Where a lane's rows of x begin, of each eight tokens of a tile.
    __device__ __forceinline__ void find_x(uint32_t (&at)[EIGHTS], const Tile& tile, int row_bytes) const {
        const int lane = threadIdx.x % 32, row = IN_WORDS ? lane % 8 : lane / 4;
#pragma unroll
        for (int v = 0; v < EIGHTS; v++)
            at[v] = base + this->at.x + min(v * 8 + row, tile.n - 1) * row_bytes +
                    (IN_WORDS ? lane / 8 * 16 : lane % 4 * 32);
    }
    // x of 64 columns: of step s, of 16, [2 s] and [2 s + 1].
    __device__ __forceinline__ static void read_x(uint32_t (&x)[8], uint32_t from) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t four[4];
            if (IN_WORDS) {
                load_matrices(four, from + half * 64);
            } else {
                const uint4 own = read16(from + half * 16);
                four[0] = own.x, four[1] = own.y, four[2] = own.z, four[3] = own.w;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) x[half * 4 + i] = four[i];
        }
    }
    struct Codes {  // of 64 columns of both rows of a thread
        uint32_t upper[4], lower[4];  // words: [0], [1]
    };
    // w: of 16 rows of 128 bytes; part: which 64 columns of them.
    __device__ __forceinline__ static Codes read_codes(uint32_t w, int part) {
        const int lane = threadIdx.x % 32, row = lane / 4, cell = IN_WORDS ? part * 2 + lane % 4 / 2 : part * 4 + lane % 4;
        const uint32_t from = w + row * 128 + ((cell ^ row) << 4);
        Codes found = {};
        if (IN_WORDS) {
            const uint2 upper = read_pair(from + lane % 2 * 8), lower = read_pair(from + lane % 2 * 8 + 1024);
            found.upper[0] = upper.x, found.upper[1] = upper.y, found.lower[0] = lower.x, found.lower[1] = lower.y;
        } else {
            const uint4 upper = read16(from), lower = read16(from + 1024);
            found.upper[0] = upper.x, found.upper[1] = upper.y, found.upper[2] = upper.z, found.upper[3] = upper.w;
            found.lower[0] = lower.x, found.lower[1] = lower.y, found.lower[2] = lower.z, found.lower[3] = lower.w;
        }
        return found;
    }
    // The fragment of w for step s of 16 columns.
    __device__ __forceinline__ static void fragment(uint32_t (&left)[4], const Codes& codes, int s, uint32_t upper_point,
                                                    uint32_t lower_point) {
#if QUIRE_CODES >= 3
        const uint32_t upper = codes.upper[s / 2] >> s % 2 * 8, lower = codes.lower[s / 2] >> s % 2 * 8;
#if QUIRE_CODES == 4
        left[0] = elements(upper), left[1] = elements(lower), left[2] = elements(upper >> 4);
        left[3] = elements(lower >> 4);
#else
        left[0] = numbers(upper, upper_point), left[1] = numbers(lower, lower_point);
        left[2] = numbers(upper >> 4, upper_point), left[3] = numbers(lower >> 4, lower_point);
#endif
#else
        left[0] = elements<false>(codes.upper[s]), left[1] = elements<false>(codes.lower[s]);
        left[2] = elements<true>(codes.upper[s]), left[3] = elements<true>(codes.lower[s]);
#endif
    }
    // d += 64 columns of 16 rows of w times x.
    __device__ __forceinline__ static void add(float (*d)[4], uint32_t w, int part, const uint32_t (&x)[EIGHTS][8],
                                               const RowScales& upper, const RowScales& lower) {
        const Codes codes = read_codes(w, part);
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const float above = upper.scale(g), below = lower.scale(g);
            const uint32_t upper_point = raised_point(upper.point(g)), lower_point = raised_point(lower.point(g));
            float sums[EIGHTS][4] = {};
#pragma unroll
            for (int s = g * 4 / GROUPS; s < (g + 1) * 4 / GROUPS; s++) {
                uint32_t left[4];
                fragment(left, codes, s, upper_point, lower_point);
#pragma unroll
                for (int v = 0; v < EIGHTS; v++) multiply_add(sums[v], left, x[v][2 * s], x[v][2 * s + 1]);
            }
#pragma unroll
            for (int v = 0; v < EIGHTS; v++) {
                d[v][0] += sums[v][0] * above, d[v][1] += sums[v][1] * above;
                d[v][2] += sums[v][2] * below, d[v][3] += sums[v][3] * below;
            }
        }
    }
};
#else
using FewCodes = FewLists;
#endif

}  // namespace quire
