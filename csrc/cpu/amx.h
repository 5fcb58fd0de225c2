// Products with Intel's tile registers (AMX): bytes and bfloat16, at every number of rows.
//
// A step is 64 bytes of k: 16 lines of weights, which in memory are the tiles that a multiplication reads, times blocks
// of up to 16 rows of activations. Invariant: an output is one chain of steps in the order of k, whatever stands beside
// it, so it is the same for any number of rows. Tile registers are in use only inside amx_products: a configuration
// left behind would be saved at every switch of threads.
#pragma once
#include "tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define QUIRE_AMX 1

namespace quire {

constexpr int BLOCK_ROWS = 16, PAIR_ROWS = 2 * BLOCK_ROWS, STEP_BYTES = 64;
constexpr int AMX_LINE = 4 * TILE, STEP_LINES = 16, STEP_WEIGHTS = STEP_LINES * AMX_LINE;
// What ldtilecfg reads: the sizes of registers 0..3 (sums), 4, 5 (activations) and 6, 7 (weights).
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
};

// Shapes by number of rows. Up to 16: four tiles of sums side by side, and 5 is one more of weights. More: two blocks
// of rows, 0, 1, 4 and 2, 3, 5, times two columns of tiles.
struct ShapeTable {
    TileShapes of[PAIR_ROWS + 1];

    constexpr ShapeTable() : of{} {
        for (int n = 1; n <= PAIR_ROWS; n++) {
            const bool pair = n > BLOCK_ROWS;
            const uint8_t upper = (uint8_t)(pair ? BLOCK_ROWS : n), lower = (uint8_t)(pair ? n - BLOCK_ROWS : n);
            const uint8_t rows[8] = {upper, upper, lower, lower, upper, (uint8_t)(pair ? lower : 16), 16, 16};
            for (int t = 0; t < 8; t++) of[n].rows[t] = rows[t];
        }
    }
};
inline constexpr ShapeTable SHAPES;

// Row r of n_rows rows that belong together, to its place at `data`: [block of rows][step][row][STEP_BYTES].
inline void place_row(const char* row, int64_t stride, int64_t r, int64_t n_rows, char* data) {
    const int64_t block = r / BLOCK_ROWS * BLOCK_ROWS;
    const int64_t size = (n_rows - block < BLOCK_ROWS ? n_rows - block : BLOCK_ROWS) * STEP_BYTES;
    char* to = data + block * stride + (r - block) * STEP_BYTES;
    for (int64_t at = 0; at + STEP_BYTES <= stride; at += STEP_BYTES, to += size) memcpy(to, row + at, STEP_BYTES);
}

#define AMX_MULTIPLY(sums, x, w) \
    do { \
        if constexpr (INTEGERS) _tile_dpbsud(sums, x, w); \
        else _tile_dpbf16ps(sums, x, w); \
    } while (0)

// Weights of TILE channels, those that will be wanted afterwards, and where sums [few rows, TILE] go.
struct AmxTile {
    const uint8_t *at, *next;
    char* sums;
};

// Up to PAIR_ROWS rows times TILE channels, all of k in one go. INTEGERS: signed bytes times unsigned ones, else pairs
// of bfloat16.
template <bool INTEGERS> class AmxBlock {
  public:
    AmxBlock(const Activations& x, int64_t n_lines)
        : x(x), n_steps(n_lines / STEP_LINES), tail_bytes(n_lines % STEP_LINES * AMX_LINE) {}
    ~AmxBlock() { _tile_release(); }

    // Turn to the rows from `first` on.
    void open(int64_t first, int64_t n) {
        if (n != n_rows) _tile_loadconfig(&SHAPES.of[n]);
        n_rows = n;
        upper = x.data + first * x.stride, lower = upper + BLOCK_ROWS * x.stride;
        if constexpr (INTEGERS)
            for (int64_t r = 0; r < n; r++) starts[r] = set1i(x.starts[first + r]);
        asm volatile("" ::: "memory");  // compilers know not what tile loads read
    }

    // All sums of the rows. Each step asks for `hints` cache lines of what follows.
    void multiply(const AmxTile& w, int64_t hints) {
        char* sums = w.sums;
        if (tail_bytes > 0) {
            memcpy(tail, w.at + n_steps * STEP_WEIGHTS, tail_bytes);
            memset(tail + tail_bytes, 0, STEP_WEIGHTS - tail_bytes);
            asm volatile("" ::: "memory");
        }
        if (n_rows <= BLOCK_ROWS) return hints == 0 ? all_channels<false>(w) : all_channels<true>(w);
        half(w.at, tail, w.next, hints, sums);
        half(w.at + AMX_LINE / 2, tail + AMX_LINE / 2, w.next + n_steps * hints * 64, hints, sums + AMX_LINE / 2);
    }

  private:
    // Two blocks of rows times half of the channels.
    void half(const uint8_t* w, const uint8_t* rest, const uint8_t* hint, int64_t hints, char* sums) {
        const int64_t lower_step = (n_rows - BLOCK_ROWS) * STEP_BYTES;
        const char *from = upper, *from_lower = lower;
        const vi* lower_starts = INTEGERS ? starts + BLOCK_ROWS : starts;
        _tile_loadd(0, starts, START_STRIDE);
        _tile_loadd(1, starts, START_STRIDE);
        _tile_loadd(2, lower_starts, START_STRIDE);
        _tile_loadd(3, lower_starts, START_STRIDE);
        for (int64_t i = 0; i < n_steps; i++, w += STEP_WEIGHTS) {
            for (int64_t h = 0; h < hints; h++, hint += 64) __builtin_prefetch(hint, 0, 2);
            step(from, from_lower, w);
            from += BLOCK_ROWS * STEP_BYTES, from_lower += lower_step;
        }
        if (tail_bytes > 0) step(from, from_lower, rest);
        _tile_stored(0, sums, AMX_LINE);
        _tile_stored(1, sums + 64, AMX_LINE);
        _tile_stored(2, sums + BLOCK_ROWS * AMX_LINE, AMX_LINE);
        _tile_stored(3, sums + BLOCK_ROWS * AMX_LINE + 64, AMX_LINE);
    }

    QUIRE_INLINE void step(const char* from, const char* from_lower, const uint8_t* w) {
        _tile_loadd(4, from, STEP_BYTES);
        _tile_loadd(6, w, AMX_LINE);
        AMX_MULTIPLY(0, 4, 6);
        _tile_loadd(7, w + 64, AMX_LINE);
        AMX_MULTIPLY(1, 4, 7);
        _tile_loadd(5, from_lower, STEP_BYTES);
        AMX_MULTIPLY(2, 5, 6);
        AMX_MULTIPLY(3, 5, 7);
    }

    // One block of rows times all channels. FRESH: the weights come from memory.
    template <bool FRESH> void all_channels(const AmxTile& w) {
        const char* from = upper;
        char* sums = w.sums;
        _tile_loadd(0, starts, START_STRIDE);
        _tile_loadd(1, starts, START_STRIDE);
        _tile_loadd(2, starts, START_STRIDE);
        _tile_loadd(3, starts, START_STRIDE);
        for (int64_t i = 0; i < n_steps + (tail_bytes > 0); i++, from += n_rows * STEP_BYTES) {
            const uint8_t* at = i < n_steps ? w.at + i * STEP_WEIGHTS : tail;
            const uint8_t* hint = i + 1 < n_steps ? at + STEP_WEIGHTS : w.next;
            if constexpr (FRESH)
                for (int p = 0; p < STEP_WEIGHTS; p += 64) __builtin_prefetch(hint + p);
            _tile_loadd(4, from, STEP_BYTES);
            _tile_loadd(6, at, AMX_LINE);
            AMX_MULTIPLY(0, 4, 6);
            _tile_loadd(7, at + 64, AMX_LINE);
            AMX_MULTIPLY(1, 4, 7);
            _tile_loadd(5, at + 128, AMX_LINE);
            AMX_MULTIPLY(2, 4, 5);
            _tile_loadd(6, at + 192, AMX_LINE);
            AMX_MULTIPLY(3, 4, 6);
        }
        _tile_stored(0, sums, AMX_LINE);
        _tile_stored(1, sums + 64, AMX_LINE);
        _tile_stored(2, sums + 128, AMX_LINE);
        _tile_stored(3, sums + 192, AMX_LINE);
    }

    static constexpr int64_t START_STRIDE = INTEGERS ? sizeof(vi) : 0;  // floats begin with the same zeros
    const Activations& x;
    const int64_t n_steps, tail_bytes;
    int64_t n_rows = 0;
    const char *upper = nullptr, *lower = nullptr;
    alignas(64) vi starts[INTEGERS ? PAIR_ROWS : 1] = {};
    alignas(64) uint8_t tail[STEP_WEIGHTS];
};

#undef AMX_MULTIPLY

// Products of n_tiles tiles of weights with the rows from `first` on, which place_row put together: a few rows at a
// time, sums of each tile, and then done(row, number of rows).
template <bool INTEGERS, class Done>
void amx_products(
    const AmxTile* tiles, int n_tiles, int64_t n_lines, const Activations& x, int64_t first, int64_t n_rows,
    const Done& done) {
    AmxBlock<INTEGERS> block(x, n_lines);
    const int64_t n_blocks = (n_rows + PAIR_ROWS - 1) / PAIR_ROWS, share = (PAIR_ROWS + n_blocks - 1) / n_blocks;
    for (int64_t b = 0; b < n_blocks; b++) {
        const int64_t row = b * PAIR_ROWS, n = n_rows - row < PAIR_ROWS ? n_rows - row : PAIR_ROWS;
        const int64_t hints = b > 0 && n <= BLOCK_ROWS ? 0 : share;
        block.open(first + row, n);
        for (int i = 0; i < n_tiles; i++) {
            const AmxTile& w = tiles[i];
            block.multiply({w.at, w.next + b * 2 * (n_lines / STEP_LINES) * share * 64, w.sums}, hints);
        }
        done(row, n);
    }
}

}  // namespace quire
#endif
