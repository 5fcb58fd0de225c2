// Products of many rows with weights in groups along k, whose sums of integers come from Intel's tile registers.
//
// The arithmetic is that of groups.h, bit for bit: sums of a group are exact, groups are added as floats in the order
// of k. Groups are whole steps. Nibbles are looked up once for all rows.
#pragma once
#include "amx.h"
#include "groups.h"

#if QUIRE_AMX

namespace quire {

constexpr int64_t LEAST_AMX_ROWS = 24;  // fewer are as fast with vectors

// Weights of TILE channels as bytes, their scales, where products [few rows, TILE] go, and the bytes of memory that
// will be wanted afterwards.
struct AmxGroupTile {
    const uint8_t* bytes;
    const f16* scales;
    float* sums;
    const uint8_t* next;
    int64_t next_bytes;
};

class AmxGroups {
  public:
    AmxGroups(const Activations& x, int64_t group) : x(x), n_steps(group / STEP_BYTES) {}
    ~AmxGroups() { _tile_release(); }

    // Turn to the rows from `row` on.
    void open(int64_t row, int64_t n) {
        if (n != n_rows) _tile_loadconfig(&SHAPES.of[n]);
        first = row, n_rows = n;
        asm volatile("" ::: "memory");  // compilers know not what tile loads read
    }

    // All groups of half of the channels. Integers of the next group are under way while those of one are added.
    void multiply(const uint8_t* w, const f16* scales, float* sums) {
        for (int64_t r = 0; r < n_rows; r++)
            for (int c = 0; c < HALF; c += W) store(sums + r * TILE + c, vf{});
        integers(w, 0);
        for (int64_t g = 0; g < x.n_groups; g++) {
            if (g + 1 < x.n_groups) integers(w, g + 1);
            add(g, scales + g * TILE, sums);
        }
    }

  private:
    static constexpr int HALF = TILE / 2;

    void integers(const uint8_t* w, int64_t g) {
        const bool pair = n_rows > BLOCK_ROWS;
        const int64_t size = (pair ? BLOCK_ROWS : n_rows) * STEP_BYTES, lower_size = (n_rows - BLOCK_ROWS) * STEP_BYTES;
        const char* upper = x.data + first * x.stride + g * n_steps * size;
        const char* lower = x.data + (first + BLOCK_ROWS) * x.stride + g * n_steps * lower_size;
        const uint8_t* at = w + g * n_steps * STEP_WEIGHTS;
        int32_t* to = exact[g % 2];
        _tile_loadd(0, ZEROS, 0);
        _tile_loadd(1, ZEROS, 0);
        if (pair) {
            _tile_loadd(2, ZEROS, 0);
            _tile_loadd(3, ZEROS, 0);
        }
        for (int64_t i = 0; i < n_steps; i++, at += STEP_WEIGHTS, upper += size, lower += lower_size) {
            _tile_loadd(4, upper, STEP_BYTES);
            _tile_loadd(6, at, AMX_LINE);
            _tile_dpbsud(0, 4, 6);
            _tile_loadd(7, at + 64, AMX_LINE);
            _tile_dpbsud(1, 4, 7);
            if (!pair) continue;
            _tile_loadd(5, lower, STEP_BYTES);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
        constexpr int64_t ROW_BYTES = HALF * sizeof(int32_t);
        _tile_stored(0, to, ROW_BYTES);
        _tile_stored(1, to + W, ROW_BYTES);
        if (pair) {
            _tile_stored(2, to + BLOCK_ROWS * HALF, ROW_BYTES);
            _tile_stored(3, to + BLOCK_ROWS * HALF + W, ROW_BYTES);
        }
    }

    void add(int64_t g, const f16* scales, float* sums) {
        const int32_t *starts = x.starts + g * x.m + first, *from = exact[g % 2];
        const float* x_scales = x.scales + g * x.m + first;
        const vf left = load(scales), right = load(scales + W);
        for (int64_t r = 0; r < n_rows; r++, from += HALF, sums += TILE) {
            const vi one = load_bits<vi>(from) + starts[r], two = load_bits<vi>(from + W) + starts[r];
            store(sums, fma(to_float(one), left * x_scales[r], load(sums)));
            store(sums + W, fma(to_float(two), right * x_scales[r], load(sums + W)));
        }
    }

    alignas(64) static inline const char ZEROS[64] = {};
    const Activations& x;
    const int64_t n_steps;
    int64_t first = 0, n_rows = 0;
    alignas(64) int32_t exact[2][PAIR_ROWS * HALF];
};

// Products of n_tiles tiles with the rows from `first` on, which place_row put together: a few rows at a time, the sums
// of each tile, and then done(row, number of rows).
template <class Done>
void amx_group_products(
    const AmxGroupTile* tiles, int n_tiles, int64_t group, const Activations& x, int64_t first, int64_t n_rows,
    const Done& done) {
    AmxGroups groups(x, group);
    for (int64_t row = 0; row < n_rows; row += PAIR_ROWS) {
        const int64_t n = n_rows - row < PAIR_ROWS ? n_rows - row : PAIR_ROWS;
        groups.open(first + row, n);
        for (int i = 0; i < n_tiles; i++) {
            const AmxGroupTile& tile = tiles[i];
            const int64_t begin = row * tile.next_bytes / n_rows & -64, end = (row + n) * tile.next_bytes / n_rows;
            for (int64_t at = begin; at < end; at += 64) __builtin_prefetch(tile.next + at, 0, 2);
            groups.multiply(tile.bytes, tile.scales, tile.sums);
            groups.multiply(tile.bytes + AMX_LINE / 2, tile.scales + TILE / 2, tile.sums + TILE / 2);
        }
        done(row, n);
    }
}

}  // namespace quire
#endif
