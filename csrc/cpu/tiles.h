// What products of all formats share: tiles of output channels, blocks of rows, and the order of prefetches.
//
// A tile is TILE output channels with all of k; its weights come in lines of TILE channels times one, two or four k.
#pragma once
#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace quire {

constexpr int TILE = 64;
constexpr int BLOCK_BYTES = 16384;  // weights worked on at once for many rows: half of an L1 cache
constexpr int AHEAD = 4096;         // bytes between a load of weights and the prefetch

// Sums in registers: rows times vectors. More rows with fewer vectors, which read every other line, were slower wherever
// weights come from memory.
#if QUIRE_AVX512
constexpr int TILE_ROWS = 6, VECTORS = 4;
#elif QUIRE_AVX2
constexpr int TILE_ROWS = 4, VECTORS = 2;
#else
constexpr int TILE_ROWS = 2, VECTORS = 2;
#endif

#define UNROLL _Pragma("GCC unroll 8")

// Rows of activations as one format reads them, in blocks of a few rows: [block][line][row of the block][X_BYTES], so that
// a product walks through them in order. A block of n rows has n * stride bytes from first row * stride on.
struct Activations {
    char* data;
    float* scales;    // quantised: [n_groups, m], x = integer * scale
    int32_t* starts;  // quantised: [n_groups, m], what the zero point of the weights adds to the sums, negative
    int64_t m, stride, n_groups;
};

// Calls f(constant of n) for n in 1 .. MOST.
template <int MOST, class F> QUIRE_INLINE void with_count(int64_t n, const F& f) {
    if constexpr (MOST > 1) {
        if (n < MOST) return with_count<MOST - 1>(n, f);
    }
    f(std::integral_constant<int, MOST>());
}

inline int64_t n_row_blocks(int64_t m) { return (m + TILE_ROWS - 1) / TILE_ROWS; }

// First row of block b of m rows, whose heights are nearly equal.
inline int64_t block_begin(int64_t m, int64_t b) { return b * m / n_row_blocks(m); }

// Calls f(first row, constant number of rows, index of the block) for each block.
template <class F> QUIRE_INLINE void row_blocks(int64_t m, const F& f) {
    for (int64_t b = 0; b < n_row_blocks(m); b++) {
        const int64_t first = block_begin(m, b), end = block_begin(m, b + 1);
        with_count<TILE_ROWS>(end - first, [&](auto n) { f(first, n, b); });
    }
}

// How many lines are worked on at once: all of a tile for one block of rows, which prefetches a fixed distance ahead.
// Several blocks take turns at weights that stay in an L1 cache together with what is prefetched for the next turn; many
// blocks hide a prefetch that is lost, and like longer turns.
inline int64_t lines_at_once(int64_t m, int64_t n_lines, int64_t line_bytes) {
    if (m <= TILE_ROWS) return n_lines;
    return (m <= 3 * TILE_ROWS ? BLOCK_BYTES / 2 : BLOCK_BYTES) / line_bytes;
}

// What row block b prefetches while it works on w .. end: each a part of what is next. Later ones find all done.
template <int PREFETCHES> const uint8_t* prefetched(const uint8_t* w, const uint8_t* end, int64_t b) {
    if (PREFETCHES == 4) return w + AHEAD;
    return b * PREFETCHES < 4 ? end + b * (end - w) * PREFETCHES / 4 : w;
}

// Calls f(constant number of prefetches for each 256 bytes of weights).
template <class F> QUIRE_INLINE void with_prefetches(int64_t m, const F& f) {
    if (m <= TILE_ROWS) f(std::integral_constant<int, 4>());
    else if (m <= 3 * TILE_ROWS) f(std::integral_constant<int, 2>());
    else f(std::integral_constant<int, 1>());
}

}  // namespace quire
