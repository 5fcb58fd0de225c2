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

// sums[r][c] += weight c times row + r over groups first_group .. end_group of the tile. Prefetches from `hint` on.
template <int R, class Ask>
void nibbles_block(
    const uint8_t* w, const bf16* w_scales, int64_t first_group, int64_t end_group, const Activations& x, int64_t row,
    float* sums, const uint8_t* hint) {
    constexpr int N = R <= 2 ? VECTORS : NIBBLE_VECTORS, SHARE = Ask::COUNT * N * W / TILE;  // of a pass of columns
    constexpr int HINTS = SHARE > 0 ? SHARE : 1;
    const vi low = set1i(0x0f0f0f0f);
    for (int c = 0; c < TILE; c += N * W) {
        vf total[R][N];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < N; v++) total[r][v] = load(sums + r * TILE + c + v * W);
        const uint8_t* at = w + first_group * PACKED_GROUP + c * 4;
        const uint8_t* ask = hint + (SHARE > 0 ? c * Ask::COUNT : 0);
        const int8_t* q = (const int8_t*)x.data + row * x.stride + first_group * GROUP * R;
        for (int64_t g = first_group; g < end_group; g++, at += PACKED_GROUP, q += GROUP * R) {
            const int64_t first = g * x.m + row;
            vi acc[R][N];
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < N; v++) acc[r][v] = begin_nibbles(x.starts[first + r]);
            UNROLL for (int line = 0; line < NIBBLE_LINES; line++, ask += Ask::COUNT * 64) {
                UNROLL for (int p = 0; p < HINTS; p++) __builtin_prefetch(ask + p * 64, 0, 2);
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

// sums [n_rows, TILE] of a tile, for the rows from `first` on. next: the tile that will follow.
inline void nibbles_sums(
    const uint8_t* w, const bf16* w_scales, const Activations& x, int64_t first, int64_t n_rows, float* sums,
    const uint8_t* next) {
    memset(sums, 0, n_rows * TILE * sizeof(float));
    const int64_t step = lines_at_once(n_rows, x.n_groups, PACKED_GROUP);
    for (int64_t g = 0; g < x.n_groups; g += step) {
        const bool last = g + step >= x.n_groups;
        const int64_t end = last ? x.n_groups : g + step;
        const uint8_t *block = w + g * PACKED_GROUP, *after = last ? next : w + end * PACKED_GROUP;
        row_blocks(n_rows, [&](int64_t row, auto n, int64_t b) {
            with_prefetch(n_rows, b, block, (end - g) * PACKED_GROUP, after, [&](auto ask, const uint8_t* hint) {
                nibbles_block<n, decltype(ask)>(w, w_scales, g, end, x, first + row, sums + row * TILE, hint);
            });
        });
    }
}

}  // namespace quire
