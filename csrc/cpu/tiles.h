// What products of all formats share: tiles of output channels, blocks of rows, and the order of prefetches.
//
// A tile is TILE output channels with all of k; its weights come in lines of TILE channels times one, two or four k.
#pragma once
#include <cstdint>
#include <type_traits>

#include "simd.h"

namespace quire {

constexpr int TILE = 64;
// Weights worked on at once: half of an L1, a fifth of an L2 cache.
constexpr int L1_BYTES = 16384, L2_BYTES = 196608;

// Bytes between a load of weights from memory and the prefetch, where there is one block of rows. With several rows, 2 KB
// come sooner than memory answers: 2 to 6 rows of bf16 took 1.3 to 1.9 times as long as with 12 KB where weights were in
// no cache. One row runs at memory's pace, whatever the distance.
constexpr int AHEAD = 2048, AHEAD_OF_ROWS = 12288;

// Sums in registers: rows times vectors. More rows with fewer vectors, which read every other line, were slower
// wherever weights come from memory.
#if QUIRE_AVX512
constexpr int TILE_ROWS = 6, VECTORS = 4;
#elif QUIRE_AVX2
constexpr int TILE_ROWS = 4, VECTORS = 2;
#else
constexpr int TILE_ROWS = 2, VECTORS = 2;
#endif

constexpr int FEW_ROWS = 3 * TILE_ROWS;  // up to here reading the weights takes longer than products

inline int64_t ahead(int64_t m) { return m > 1 && m <= TILE_ROWS ? AHEAD_OF_ROWS : AHEAD; }

#define UNROLL _Pragma("GCC unroll 8")

// Rows of activations as one format reads them, in blocks of a few rows: [block][line][row of the block][X_BYTES], so
// that a product walks through them in order. A block of n rows has n * stride bytes from first row * stride on.
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

// First row of block b of m rows: blocks are nearly equal.
inline int64_t block_begin(int64_t m, int64_t b) { return b * m / n_row_blocks(m); }

// Calls f(first row, constant number of rows, index of the block) for each block.
template <class F> QUIRE_INLINE void row_blocks(int64_t m, const F& f) {
    for (int64_t b = 0; b < n_row_blocks(m); b++) {
        const int64_t first = block_begin(m, b), end = block_begin(m, b + 1);
        with_count<TILE_ROWS>(end - first, [&](auto n) { f(first, n, b); });
    }
}

// How many lines are worked on at once. One block of rows: a whole tile, but for the end, during which the next tile is
// asked for. Few rows: what stays in an L1 cache while row blocks take turns, since from an L2 cache they would take it
// where memory delivers. Many: what stays in an L2 cache, which gives lines as fast as they are multiplied; the longer a
// block, the rarer sums are loaded and stored.
inline int64_t lines_at_once(int64_t m, int64_t n_lines, int64_t line_bytes) {
    if (m <= TILE_ROWS) return n_lines * line_bytes > ahead(m) ? n_lines - ahead(m) / line_bytes : n_lines;
    const int64_t most = (m <= FEW_ROWS ? L1_BYTES : L2_BYTES) / line_bytes, n_parts = (n_lines + most - 1) / most;
    return (n_lines + n_parts - 1) / n_parts;
}

// What a row block asks memory for while it works: COUNT cache lines for each 256 bytes of weights, for the L2 cache. An
// L1 cache has too few misses in flight to compute meanwhile.
template <int N> struct Prefetch { static constexpr int COUNT = N; };

// Calls f(a Prefetch, address to begin at) for row block b of m rows at work on n_bytes from w on, which `next` follows.
// One block: what lies a fixed distance ahead. Several: each a part of what follows, so that memory is busy all the time;
// of many blocks the later ones find all done.
template <class F>
QUIRE_INLINE void with_prefetch(
    int64_t m, int64_t b, const uint8_t* w, int64_t n_bytes, const uint8_t* next, const F& f) {
    if (m > FEW_ROWS) f(Prefetch<1>(), b < 4 ? next + b * n_bytes / 4 : w);
    else if (m > 2 * TILE_ROWS && b > 0) f(Prefetch<1>(), next + (b + 1) * n_bytes / 4);
    else if (m > TILE_ROWS) f(Prefetch<2>(), next + b * n_bytes / 2);
    else f(Prefetch<4>(), n_bytes > ahead(m) ? w + ahead(m) : next);
}

}  // namespace quire
