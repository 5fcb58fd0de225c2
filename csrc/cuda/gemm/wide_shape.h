// Sizes of the kernel for many rows (gemm_wide.cu), and its arguments.
#pragma once
#include "gemm/wide_adapters.h"
#include "gemm/wide_codes.h"
#include "gemm/wide_memory.h"

#ifndef QUIRE_ROWS
#define QUIRE_ROWS 128
#endif

struct QuireWideArgs {  // WideArgs, AdaptedArgs in quire/kernels/gemm/hopper_product.py
    const void* x;
    const void* w;
    const void* bias;
    void* y;                      // with a residual it holds what the result is added to
    void* sums;                   // split: room for the sums of all blocks, fp32
    const float* x_scale;         // e4m3: as in QuireGemmArgs; of blocks there are those of whole tiles
    const float* w_scale;
    int64_t x_row, y_row;         // elements; multiples of 16 bytes
    int32_t m, n, k;              // n: rows of w
    int32_t x_scale_step, w_scale_step, group;
    int32_t n_teams, n_together;  // teams of QUIRE_SPLIT blocks; tiles of tokens taken together over all rows of w
#if QUIRE_RANK
    QuireWideAdapters adapters;
#elif QUIRE_SENT_TO
    QuireWideSent sent;
#endif
};

namespace quire {

constexpr int TOKENS = QUIRE_TOKENS, SPLIT = QUIRE_SPLIT;
constexpr int GROUP = 128, WORKERS = 2 * GROUP, THREADS = WORKERS + GROUP, MOST_THREADS = QUIRE_RANK ? 512 : THREADS;
constexpr int ROWS = QUIRE_ROWS;                                // of w in a tile
constexpr bool TURNED = ROWS != 128;                            // tokens are the 64-row operand, rows of w its columns
constexpr int COLUMNS = TURNED ? ROWS : TOKENS;                 // of a product
constexpr int OUT_ROWS = QUIRE_SILU ? 32 : 64;                  // of y in a product; SiLU: 8 of gate, then 8 of up
constexpr int TILE_ROWS = ROWS / (1 + QUIRE_SILU);              // of y
constexpr int QUADS = COLUMNS / 8;                              // sums of a thread: 2 rows (8 apart) x 2 columns each
constexpr int OWN_QUADS = QUADS / SPLIT;                        // that a thread finishes
constexpr int X_CHUNKS = QUIRE_NIBBLES ? 2 : 1;                 // rows of 128 bytes of x that a chunk has
constexpr int W_BYTES = ROWS * ROW_BYTES, X_PART = TOKENS * 128, X_BYTES = X_CHUNKS * X_PART;
constexpr int W_AT = TURNED ? X_BYTES : 0, X_AT = TURNED ? 0 : W_BYTES, COLUMNS_AT = TURNED ? W_AT : X_AT;  // in a stage
constexpr int STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int divisor(int n, int most) { return n % most == 0 ? most : divisor(n, most - 1); }
constexpr int ROUND_QUADS = divisor(OWN_QUADS, QUIRE_NIBBLES && TOKENS == 256 ? 4 : 8);  // that pass through shared memory at a time
constexpr int CELLS = OUT_ROWS / 8;                             // of 16 bytes, of a token in a product
constexpr int ROUND_CELLS = ROUND_QUADS * 8 * CELLS, OUT_BYTES = (ROUND_CELLS * 16 + 1023) / 1024 * 1024;
// For a stage: of e4m3 in blocks (wide_scaled.h), those of w in 16 bytes of their own where a sum is scaled by both; of
// rows of codes.
constexpr bool PAIRED_SCALES = QUIRE_FP8 == 2 && QUIRE_SILU && !TURNED;
constexpr int SCALE_SETS = TURNED ? ROWS / 64 * (1 + QUIRE_SILU) : 1, W_SCALES = PAIRED_SCALES ? 3 : SCALE_SETS;
constexpr int BLOCK_SCALE_BYTES = SCALE_SETS * TOKENS * 4 + (PAIRED_SCALES ? 16 : 0);
constexpr int SCALE_BYTES =
    QUIRE_FP8 == 2 ? BLOCK_SCALE_BYTES : QUIRE_NIBBLES ? QUIRE_CHUNK_GROUPS * (1 + QUIRE_ZEROS) * ROWS * 2 : 0;
constexpr int RING_BYTES = 232448 - 1024 - BESIDE_BYTES;
constexpr int stages_with(int n_out) { return (RING_BYTES - 2 * n_out * OUT_BYTES) / (STAGE_BYTES + SCALE_BYTES); }
constexpr int N_OUT = stages_with(2) == stages_with(1) ? 2 : 1;  // buffers of a warpgroup for results on their way out
constexpr int N_STAGES = stages_with(N_OUT);
constexpr int MAX_TEAMS = 1024, WORKERS_BARRIER = 3;
constexpr int SCALERS = QUIRE_FP8 == 2 ? 3 : 0;  // warps that make scales of blocks
// e4m3: parts of a tile's columns, whose sums of a chunk have registers of their own, two of them at a time; chunks that
// are multiplied without a pause. The group that a warp belongs to is kept over the chunks but where that was slower (3 %
// of a tile of 256).
constexpr int PARTS = TURNED || COLUMNS < 192 ? 1 : COLUMNS == 192 ? 2 : 4, PART_QUADS = QUADS / PARTS;
constexpr int RUN = COLUMNS == 128 && SPLIT <= 2 ? 2 : 1, IN_FLIGHT = RUN * PARTS == 1 ? 1 : 2;
constexpr bool KEEPS_GROUP = TURNED || RUN > 1;
static_assert(!TURNED || (QUIRE_FP8 == 2 && SPLIT == 1 && TOKENS == 128 && ROWS == 192));
static_assert(QUADS % SPLIT == 0 && N_STAGES >= 2);

// How often blocks have handed over their sums, for each team: SPLIT times in a launch, so never reset.
__device__ uint32_t n_handed_over[MAX_TEAMS];

struct Barriers {
    uint64_t full[N_STAGES], empty[N_STAGES];
};
constexpr int OUT_AT = N_STAGES * STAGE_BYTES, SCALES_AT = OUT_AT + 2 * N_OUT * OUT_BYTES;
constexpr int BARRIERS_AT = SCALES_AT + N_STAGES * SCALE_BYTES;
constexpr int PLACES_AT = BARRIERS_AT + int(sizeof(Barriers)), END = PLACES_AT + PLACES_BYTES;

}  // namespace quire
