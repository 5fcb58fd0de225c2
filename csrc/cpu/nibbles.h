// Products of 4-bit weights: integers plus 8 in groups of 32 along k, each group with a scale a channel.
//
// Layout: quire/kernels/qgemm/weight.py. Sums of a group are exact integers; groups are added as floats in the order
// of k.
#pragma once
#include "dot.h"
#include "tiles.h"

namespace quire {

constexpr int GROUP = 32, NIBBLE_LINES = GROUP / 8;  // lines of a group: TILE channels times eight k
constexpr int PACKED_GROUP = TILE * GROUP / 2;       // bytes

// Vectors of sums in registers, which come in two kinds, integers and floats.
#if QUIRE_AVX512 || QUIRE_AVX2
constexpr int NIBBLE_VECTORS = 2;
#else
constexpr int NIBBLE_VECTORS = 1;
#endif

// sums[r][c] += weight c times row + r over groups first_group .. end_group of the tile. Prefetches like lines_block.
template <int R, int PREFETCHES>
void nibbles_block(
    const uint8_t* w, const bf16* w_scales, int64_t first_group, int64_t end_group, const Activations& x, int64_t row,
    float* sums, const uint8_t* next) {
    constexpr int N = R <= 2 ? VECTORS : NIBBLE_VECTORS, HINTS = PREFETCHES * N * W / TILE;  // columns share the work
    const vi low = set1i(0x0f0f0f0f);
    for (int c = 0; c < TILE; c += N * W) {
        vf total[R][N];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < N; v++) total[r][v] = load(sums + r * TILE + c + v * W);
        const uint8_t *at = w + first_group * PACKED_GROUP + c * 4, *hint = next + c * PREFETCHES;
        const int8_t* q = (const int8_t*)x.data + row * x.stride + first_group * GROUP * R;
        for (int64_t g = first_group; g < end_group; g++, at += PACKED_GROUP, q += GROUP * R) {
            const int64_t first = g * x.m + row;
            vi acc[R][N];
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < N; v++) acc[r][v] = begin_nibbles(x.starts[first + r]);
            UNROLL for (int line = 0; line < NIBBLE_LINES; line++, hint += PREFETCHES * 64) {
                UNROLL for (int p = 0; p < HINTS; p++) __builtin_prefetch(hint + p * 64);
                UNROLL for (int v = 0; v < N; v++) {
                    const vi packed = load_bits<vi>(at + (line * TILE + v * W) * 4);
                    UNROLL for (int r = 0; r < R; r++) {
                        const int8_t* values = q + (line * R + r) * 4;
                        acc[r][v] = dot_nibbles(acc[r][v], packed & low, repeat(values));
                        acc[r][v] = dot_nibbles(acc[r][v], (packed >> 4) & low, repeat(values + GROUP / 2 * R));
                    }
                }
            }
            UNROLL for (int v = 0; v < N; v++) {
                const vf w_scale = load(w_scales + g * TILE + c + v * W);
                UNROLL for (int r = 0; r < R; r++) {
                    const vi sum = end_nibbles(acc[r][v], x.starts[first + r]);
                    total[r][v] = fma(to_float(sum), w_scale * x.scales[first + r], total[r][v]);
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < N; v++) store(sums + r * TILE + c + v * W, total[r][v]);
    }
}

// sums [n_rows, TILE] of a tile, for the rows from `first` on.
inline void nibbles_sums(
    const uint8_t* w, const bf16* w_scales, const Activations& x, int64_t first, int64_t n_rows, float* sums) {
    memset(sums, 0, n_rows * TILE * sizeof(float));
    with_prefetches(n_rows, [&](auto prefetches) {
        const int64_t step = lines_at_once(n_rows, x.n_groups, PACKED_GROUP);
        for (int64_t g = 0; g < x.n_groups; g += step) {
            const int64_t end = g + step < x.n_groups ? g + step : x.n_groups;
            const uint8_t *block = w + g * PACKED_GROUP, *after = w + end * PACKED_GROUP;
            row_blocks(n_rows, [&](int64_t row, auto n, int64_t b) {
                const uint8_t* next = prefetched<prefetches>(block, after, b);
                nibbles_block<n, prefetches>(w, w_scales, g, end, x, first + row, sums + row * TILE, next);
            });
        }
    });
}

}  // namespace quire
