// Products with Intel's tile registers (AMX): bytes and bfloat16, at every number of rows.
//
// A step is 64 bytes of k: 16 lines of weights, which in memory are the tiles that a multiplication reads, times blocks
// of up to 16 rows of activations. Invariant: an output is one chain of steps in the order of k, whatever stands beside
// it, so it is the same for any number of rows. Tile registers are in use only inside amx_sums: a configuration left
// behind would be saved at every switch of threads.
#pragma once
#include "tiles.h"

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define QUIRE_AMX 1

namespace quire {

constexpr int BLOCK_ROWS = 16, PAIR_ROWS = 2 * BLOCK_ROWS, STEP_BYTES = 64;
constexpr int AMX_LINE = 4 * TILE, STEP_LINES = 16, STEP_WEIGHTS = STEP_LINES * AMX_LINE;
#ifndef QUIRE_AMX_STEPS
#define QUIRE_AMX_STEPS 32
#endif
constexpr int STEPS_AT_ONCE = QUIRE_AMX_STEPS;  // half of their weights, 16 KB, stays in an L1 cache while rows pass by

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

// The products of one tile, TILE channels wide, with rows of activations. INTEGERS: signed bytes times unsigned ones,
// else pairs of bfloat16.
template <bool INTEGERS> class AmxTile {
  public:
    AmxTile(const uint8_t* w, int64_t n_lines, const Activations& x, char* sums, const uint8_t* next)
        : w(w), n_steps(n_lines / STEP_LINES), x(x), sums(sums), next(next) {
        const int64_t rest = n_lines % STEP_LINES * AMX_LINE;
        has_tail = rest > 0;
        if (!has_tail) return;
        memcpy(tail, w + n_steps * STEP_WEIGHTS, rest);
        memset(tail + rest, 0, STEP_WEIGHTS - rest);
    }

    // The rows from `first` on.
    void run(int64_t first, int64_t n_rows) {
        const int64_t n_pairs = n_rows / PAIR_ROWS, n_left = n_rows % PAIR_ROWS;
        if (n_pairs > 0) pairs(first, n_pairs, PAIR_ROWS, (PAIR_ROWS + n_pairs - 1) / n_pairs);
        const int64_t done = n_pairs * PAIR_ROWS;
        sums += done * AMX_LINE;
        if (n_left > BLOCK_ROWS) pairs(first + done, 1, n_left, n_pairs > 0 ? 0 : PAIR_ROWS);
        else if (n_left > 0) done > 0 ? block<false>(first + done, n_left) : block<true>(first, n_left);
        _tile_release();
    }

  private:
    // Pairs of blocks, of n_rows rows together. Each step asks for `hints` cache lines of what follows.
    void pairs(int64_t first, int64_t n_pairs, int64_t n_rows, int64_t hints) {
        _tile_loadconfig(&SHAPES.of[n_rows]);
        const int64_t lower_step = (n_rows - BLOCK_ROWS) * STEP_BYTES;
        int64_t step = 0;
        do {
            const int64_t n = n_steps - step < STEPS_AT_ONCE ? n_steps - step : STEPS_AT_ONCE;
            const bool last = step + n == n_steps;
            const uint8_t *from = w + step * STEP_WEIGHTS, *hint = last ? next : from + n * STEP_WEIGHTS;
            for (int half = 0; half < 2; half++)
                for (int64_t p = 0; p < n_pairs; p++) {
                    const int64_t row = first + p * PAIR_ROWS;
                    const char* upper = x.data + row * x.stride + step * BLOCK_ROWS * STEP_BYTES;
                    const char* lower = x.data + (row + BLOCK_ROWS) * x.stride + step * lower_step;
                    char* at = sums + p * PAIR_ROWS * AMX_LINE + half * AMX_LINE / 2;
                    if (step == 0) start(row, n_rows);
                    else load(at);
                    multiply(upper, lower, lower_step, from + half * AMX_LINE / 2, n, hint, hints);
                    if (last && has_tail)
                        multiply(
                            upper + n * BLOCK_ROWS * STEP_BYTES, lower + n * lower_step, lower_step,
                            tail + half * AMX_LINE / 2, 1, hint, 0);
                    store(at);
                }
            step += n;
        } while (step < n_steps);
    }

    // n steps of a pair of blocks times half of the channels.
    static void multiply(
        const char* upper, const char* lower, int64_t lower_step, const uint8_t* w, int64_t n, const uint8_t*& hint,
        int64_t hints) {
        for (int64_t i = 0; i < n; i++, w += STEP_WEIGHTS, upper += BLOCK_ROWS * STEP_BYTES, lower += lower_step) {
            for (int64_t h = 0; h < hints; h++, hint += 64) __builtin_prefetch(hint, 0, 2);
            _tile_loadd(4, upper, STEP_BYTES);
            _tile_loadd(6, w, AMX_LINE);
            AMX_MULTIPLY(0, 4, 6);
            _tile_loadd(7, w + 64, AMX_LINE);
            AMX_MULTIPLY(1, 4, 7);
            _tile_loadd(5, lower, STEP_BYTES);
            AMX_MULTIPLY(2, 5, 6);
            AMX_MULTIPLY(3, 5, 7);
        }
    }

    // A block of rows times all channels, all of k in one go. FRESH: the weights come from memory.
    template <bool FRESH> void block(int64_t first, int64_t n_rows) {
        _tile_loadconfig(&SHAPES.of[n_rows]);
        const char* from = x.data + first * x.stride;
        start(first, n_rows);
        for (int64_t i = 0; i < n_steps + has_tail; i++, from += n_rows * STEP_BYTES) {
            const uint8_t* at = i < n_steps ? w + i * STEP_WEIGHTS : tail;
            const uint8_t* hint = i + 1 < n_steps ? at + STEP_WEIGHTS : next;
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

    // Sums of rows before the first step. Loads are faster than _tile_zero in a chain of multiplications.
    void start(int64_t row, int64_t n_rows) {
        const bool pair = n_rows > BLOCK_ROWS;
        int64_t stride = 0;
        if constexpr (INTEGERS) {
            stride = sizeof(vi);
            for (int64_t r = 0; r < n_rows; r++) starts[r] = set1i(x.starts[row + r]);
        }
        asm volatile("" ::: "memory");  // compilers know not what tile loads read
        const vi *upper = starts, *lower = pair && INTEGERS ? starts + BLOCK_ROWS : starts;
        _tile_loadd(0, upper, stride);
        _tile_loadd(1, upper, stride);
        _tile_loadd(2, lower, stride);
        _tile_loadd(3, lower, stride);
    }

    static void load(const char* at) {
        _tile_loadd(0, at, AMX_LINE);
        _tile_loadd(1, at + 64, AMX_LINE);
        _tile_loadd(2, at + BLOCK_ROWS * AMX_LINE, AMX_LINE);
        _tile_loadd(3, at + BLOCK_ROWS * AMX_LINE + 64, AMX_LINE);
    }

    static void store(char* at) {
        _tile_stored(0, at, AMX_LINE);
        _tile_stored(1, at + 64, AMX_LINE);
        _tile_stored(2, at + BLOCK_ROWS * AMX_LINE, AMX_LINE);
        _tile_stored(3, at + BLOCK_ROWS * AMX_LINE + 64, AMX_LINE);
    }

    const uint8_t* w;
    int64_t n_steps;
    bool has_tail;
    const Activations& x;
    char* sums;
    const uint8_t* next;
    alignas(64) vi starts[INTEGERS ? PAIR_ROWS : 1] = {};
    alignas(64) uint8_t tail[STEP_WEIGHTS];
};

#undef AMX_MULTIPLY

// sums [n_rows, TILE] of a tile, for the rows from `first` on, which place_row put together. next: the tile that will
// follow.
template <bool INTEGERS>
void amx_sums(
    const uint8_t* w, int64_t n_lines, const Activations& x, int64_t first, int64_t n_rows, char* sums,
    const uint8_t* next) {
    AmxTile<INTEGERS>(w, n_lines, x, sums, next).run(first, n_rows);
}

}  // namespace quire
#endif
