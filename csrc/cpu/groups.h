// Products of weights in groups along k: bytes, or nibbles that each stand for one of 16 bytes. A group has a scale a
// channel.
//
// Layouts: quire/kernels/qgemm/weight.py. Sums of a group are exact integers; groups are added as floats in the order
// of k: so it is the same whether nibbles are looked up in registers or, for many rows, once.
#pragma once
#include "dot.h"
#include "processor.h"
#include "tiles.h"

namespace quire {

constexpr int PAIR_K = 8, BYTE_LINE = TILE * 4;   // k of a pair of lines of bytes, which is one line of nibbles
constexpr int64_t AHEAD_IN_ORDER = 6144;         // bytes between a read in order and what is asked for
constexpr int CHUNK_K = L1_BYTES / TILE;         // worked on at once where rows or channels take turns: whole groups

struct Pair { vi first, second; };

struct GroupBytes {
    static constexpr int PAIR_BYTES = 2 * BYTE_LINE;
    QUIRE_INLINE Pair get(const GroupBytes&, const uint8_t* at) {
        return {load_bits<vi>(at), load_bits<vi>(at + BYTE_LINE)};
    }
};

struct GroupNibbles {
    static constexpr int PAIR_BYTES = BYTE_LINE;
    Table table;
    QUIRE_INLINE Pair get(const GroupNibbles& source, const uint8_t* at) {
        const vi packed = load_bits<vi>(at), low = set1i(0x0f0f0f0f);
        return {look_up(source.table, packed & low), look_up(source.table, (packed >> 4) & low)};
    }
};

// What a block of rows asks for while it works: N_HINTS cache lines for each line, of the chunk that follows; two blocks
// ask for a half each. A block that takes whole lines reads in order, which the hardware foresees: it asks for nothing
// but on processors that gain by it (processor.h). One that takes the halves of lines in turns asks for all of the next chunk in its first turn: 4 to 6 rows took 1.5 times as long as 7 without.
template <int N_HINTS> struct AskNext {
    const uint8_t* hint = nullptr;
    void line() {
        UNROLL for (int p = 0; p < N_HINTS; p++, hint += 64) __builtin_prefetch(hint, 0, 2);
    }
};

// One tile's weights.
struct GroupTile {
    const uint8_t* data;
    const f16* scales;  // [n_groups, TILE]
    int64_t group, n_groups;
};

// Vectors of a line at once: integers and floats of R rows fit the registers.
constexpr int group_vectors(int n_rows) { return n_rows * 2 > TILE_ROWS ? VECTORS / 2 : VECTORS; }

// sums[r][c] += weight c times row + r for channels c .. over groups first .. end - 1, whose weights begin at `data`.
template <int R, bool ASKS, class Source, class Ask>
QUIRE_INLINE void groups_pass(
    const Source& source, const uint8_t* data, const GroupTile& tile, int64_t first, int64_t end, const Activations& x,
    int64_t row, float* sums, int c, Ask& ask) {
    constexpr int N = group_vectors(R);
    vf total[R][N];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < N; v++) total[r][v] = load(sums + r * TILE + c + v * W);
    const uint8_t* at = data + c * 4;
    const int8_t* q = (const int8_t*)x.data + row * x.stride + first * tile.group * R;
    for (int64_t g = first; g < end; g++) {
        const int32_t* starts = x.starts + g * x.m + row;
        const float* x_scales = x.scales + g * x.m + row;
        vi acc[R][N];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < N; v++) acc[r][v] = set1i(starts[r]);
        for (int64_t k = 0; k < tile.group; k += PAIR_K, at += Source::PAIR_BYTES, q += R * PAIR_K) {
            if constexpr (ASKS)
                UNROLL for (int p = 0; p < Source::PAIR_BYTES; p += BYTE_LINE) ask.line();
            Pair w[N];
            UNROLL for (int v = 0; v < N; v++) w[v] = Source::get(source, at + v * W * 4);
            UNROLL for (int r = 0; r < R; r++) {
                const vi value = repeat(q + r * 4);
                UNROLL for (int v = 0; v < N; v++) acc[r][v] = dot_bytes(acc[r][v], w[v].first, value);
            }
            UNROLL for (int r = 0; r < R; r++) {
                const vi value = repeat(q + (R + r) * 4);
                UNROLL for (int v = 0; v < N; v++) acc[r][v] = dot_bytes(acc[r][v], w[v].second, value);
            }
        }
        UNROLL for (int v = 0; v < N; v++) {
            const vf w_scale = load(tile.scales + g * TILE + c + v * W);
            UNROLL for (int r = 0; r < R; r++)
                total[r][v] = fma(to_float(acc[r][v]), w_scale * x_scales[r], total[r][v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < N; v++) store(sums + r * TILE + c + v * W, total[r][v]);
}

// The same for all channels of the tile.
template <int R, class Source, class Ask>
void groups_block(
    const Source& source, const uint8_t* data, const GroupTile& tile, int64_t first, int64_t end, const Activations& x,
    int64_t row, float* sums, Ask ask) {
    groups_pass<R, true>(source, data, tile, first, end, x, row, sums, 0, ask);
    for (int c = group_vectors(R) * W; c < TILE; c += group_vectors(R) * W)
        groups_pass<R, false>(source, data, tile, first, end, x, row, sums, c, ask);
}

// n_pairs lines of nibbles looked up into `to`.
inline void look_up_lines(const GroupNibbles& source, const uint8_t* at, int64_t n_pairs, uint8_t* to) {
    for (int64_t i = 0; i < n_pairs; i++)
        UNROLL for (int c = 0; c < BYTE_LINE; c += W * 4) {
            const Pair pair = GroupNibbles::get(source, at + i * BYTE_LINE + c);
            store_bits(to + 2 * i * BYTE_LINE + c, pair.first);
            store_bits(to + (2 * i + 1) * BYTE_LINE + c, pair.second);
        }
}

// Groups first_group .. end - 1, at `data`, for all rows, block by block; `after`: the weights that follow.
template <int N_HINTS, class Source>
void groups_chunk(
    const Source& source, const uint8_t* data, const GroupTile& tile, int64_t first_group, int64_t end,
    const Activations& x, int64_t first, int64_t n_rows, float* sums, const uint8_t* after, int64_t after_bytes) {
    row_blocks(n_rows, [&](int64_t row, auto n, int64_t b) {
        const AskNext<N_HINTS> ask{b < 2 ? after + b * after_bytes / 2 : data};
        groups_block<n>(source, data, tile, first_group, end, x, first + row, sums + row * TILE, ask);
    });
}

// All groups for R rows that take whole lines. Asks for what lies ahead, in `next` at the end of the tile, and for the
// scales of `next` at once: between codes they would be strangers to memory's open pages.
template <int R, class Source>
void groups_in_order(
    const Source& source, const GroupTile& tile, const Activations& x, int64_t first, float* sums,
    const GroupTile& next) {
    constexpr int N_HINTS = BYTE_LINE / 64;
    const int64_t group_bytes = tile.group / PAIR_K * Source::PAIR_BYTES, most = AHEAD_IN_ORDER / group_bytes;
    const int64_t n_ahead = most < tile.n_groups ? most : tile.n_groups, end = tile.n_groups - n_ahead;
    for (int64_t g = 0; g < tile.n_groups; g++)
        UNROLL for (int c = 0; c < TILE; c += 64 / (int)sizeof(f16))
            __builtin_prefetch(next.scales + g * TILE + c, 0, 2);
    const AskNext<N_HINTS> own{tile.data + n_ahead * group_bytes}, others{next.data};
    groups_block<R>(source, tile.data, tile, 0, end, x, first, sums, own);
    groups_block<R>(source, tile.data + end * group_bytes, tile, end, tile.n_groups, x, first, sums, others);
}

// sums [n_rows, TILE] of a tile, for the rows from `first` on. next: the tile that will follow.
template <class Source>
void groups_sums(
    const Source& source, const GroupTile& tile, const Activations& x, int64_t first, int64_t n_rows, float* sums,
    const GroupTile& next) {
    constexpr bool NIBBLES = Source::PAIR_BYTES == BYTE_LINE;
    const int64_t group_bytes = tile.group / PAIR_K * Source::PAIR_BYTES, chunk = CHUNK_K / tile.group;
    memset(sums, 0, n_rows * TILE * sizeof(float));
    const bool one_pass = n_rows * 2 <= TILE_ROWS && VECTORS * W == TILE;
    if (NIBBLES && one_pass && gains_by_prefetch_in_order())
        return with_count<TILE_ROWS / 2>(
            n_rows, [&](auto n) { groups_in_order<n>(source, tile, x, first, sums, next); });
    const int64_t step = one_pass ? tile.n_groups : chunk;
    for (int64_t g = 0; g < tile.n_groups; g += step) {
        const bool last = g + step >= tile.n_groups;
        const int64_t stop = last ? tile.n_groups : g + step, n_bytes = (stop - g) * group_bytes;
        const uint8_t *data = tile.data + g * group_bytes, *after = last ? next.data : data + n_bytes;
        if (n_rows <= TILE_ROWS) {
            with_count<TILE_ROWS>(n_rows, [&](auto n) {
                constexpr int N_HINTS = group_vectors(n) < VECTORS ? BYTE_LINE / 64 : 0;
                groups_block<n>(source, data, tile, g, stop, x, first, sums, AskNext<N_HINTS>{after});
            });
        } else if constexpr (NIBBLES) {
            if (n_rows <= FEW_ROWS) {
                groups_chunk<2>(source, data, tile, g, stop, x, first, n_rows, sums, after, n_bytes);
            } else {
                alignas(64) uint8_t bytes[L1_BYTES];
                look_up_lines(source, data, (stop - g) * tile.group / PAIR_K, bytes);
                groups_chunk<1>(GroupBytes(), bytes, tile, g, stop, x, first, n_rows, sums, after, n_bytes);
            }
        } else {
            groups_chunk<2>(source, data, tile, g, stop, x, first, n_rows, sums, after, n_bytes);
        }
    }
}

}  // namespace quire
