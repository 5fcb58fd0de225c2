// Experts in codes for moe_few.cu: 64 columns of 16 rows of w, made to numbers in registers and multiplied by one warp.
//
// A thread has two of the rows, lane / 4 of the upper eight and of the lower, and 16 columns of each. Columns are added
// in an order of their own, which x follows: of bytes a thread has 16 that lie side by side, of words the order is that of
// quire/kernels/nibbles.py. Sums are scaled after each group of columns that share a scale.
#pragma once
#include "moe/codes.h"
#include "moe/few_lists.h"

namespace quire {

#if QUIRE_CODES
struct FewCodes : FewLists {
    using FewLists::FewLists;

    template <class K> __device__ __forceinline__ RowScales scales_of(int expert, int row, int column) const {
        const int n = K::IS_UP ? 2 * a.inner : a.hidden;
        return scales_at(K::IS_UP ? a.up_scales : a.down_scales, expert, row, column, n, columns<K>());
    }

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
    // What a thread's sums of e4m3 are scaled by, of its two tokens of each eight: rows of x are codes, too. Scales lie
    // [group][TOKENS], and of the parts of a sum [part][group].
    template <class K> __device__ __forceinline__ uint32_t row_scales(int row) const {
        return base + this->at.scales + (K::IN_PARTS ? row * Layout::n_groups(columns<K>()) : row) * 4;
    }
    template <class K> static constexpr int SCALES_STEP = K::IN_PARTS ? 4 : TOKENS * 4;  // to the next group
    template <class K> __device__ __forceinline__ void read_row_scales(float2 (&by)[EIGHTS], int column, int part) const {
        const uint32_t from = row_scales<K>(part) + (QUIRE_GROUP ? column / 128 : 0) * SCALES_STEP<K>;
#pragma unroll
        for (int v = 0; v < EIGHTS; v++) {
            by[v] = make_float2(1.0f, 1.0f);
            if (QUIRE_CODES == 1 && K::IN_PARTS) by[v].x = by[v].y = read4(from);
            if (QUIRE_CODES == 1 && !K::IN_PARTS) by[v] = read8(from + (v * 8 + threadIdx.x % 4 * 2) * 4);
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
        fragment_of_words(left, codes.upper, codes.lower, s, upper_point, lower_point);
#else
        left[0] = elements<false>(codes.upper[s]), left[1] = elements<false>(codes.lower[s]);
        left[2] = elements<true>(codes.upper[s]), left[3] = elements<true>(codes.lower[s]);
#endif
    }
    // d += 64 columns of 16 rows of w times x.
    __device__ __forceinline__ static void add(float (*d)[4], uint32_t w, int part, const uint32_t (&x)[EIGHTS][8],
                                               const float2 (&by)[EIGHTS], const RowScales& upper, const RowScales& lower) {
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
                d[v][0] += sums[v][0] * (above * by[v].x), d[v][1] += sums[v][1] * (above * by[v].y);
                d[v][2] += sums[v][2] * (below * by[v].x), d[v][3] += sums[v][3] * (below * by[v].y);
            }
        }
    }
};
#else
using FewCodes = FewLists;
#endif

}  // namespace quire
