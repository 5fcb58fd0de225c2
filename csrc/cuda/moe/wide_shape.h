// Sizes of the kernel of experts for many rows (moe_wide.cu), and its arguments.
#pragma once
#define QUIRE_RESIDUAL 0
#include "gemm/wide_memory.h"
#include "moe/gating.h"
#include "moe/wide_codes.h"

struct QuireMoeWideArgs {  // _WideArgs in quire/kernels/moe/hopper.py
    const void* x;
    const void* w;
    const void* scales;  // QUIRE_CODES, QUIRE_FP8: see CodedMatrices in quire/kernels/moe/coded.py
    const float* x_scales;  // QUIRE_FP8: see QuireMoeRoundArgs
    const void* bias;    // [experts, rows of w]; null: 0
    const int32_t* tokens;  // GATHERS: of the slots, their rows of x
    const int4* tiles;   // (expert, first slot, slots, 0)
    const int32_t* n_tiles;
    void* y;            // [n_slots, n_rows]
    int64_t x_row;      // elements
    float slope, offset, limit;  // QUIRE_SILU: see QuireMoeFewArgs
    int32_t n_slots, n_experts, n_rows, k;  // n_rows: of y for an expert; SiLU: w has twice as many
    int32_t n_blocks;
    int32_t x_scales_row;
};

namespace quire {

constexpr int TOKENS = QUIRE_TOKENS, BOX_TOKENS = 32;
constexpr int GROUP = 128, WORKERS = 2 * GROUP, THREADS = WORKERS + GROUP;
constexpr int ROWS = 256, HALVES = 2;                           // of w in a tile; products of a warpgroup
constexpr int OUT_ROWS = QUIRE_SILU ? 32 : 64;                  // of y in a product; SiLU: 8 of gate, then 8 of up
constexpr int TILE_ROWS = 4 * OUT_ROWS;                         // of y
constexpr int W_BYTES = ROWS * W_ROW_BYTES, X_BYTES = TOKENS * 128, STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int W_STEP = QUIRE_CODES ? W_ROW_BYTES : CHUNK;        // of 64 columns, as the copy engine counts
constexpr int ROUND_TOKENS = TOKENS % 64 ? 32 : 64;             // whose results pass through shared memory at a time
constexpr int CELLS = OUT_ROWS / 8;                             // of 16 bytes, of a token in a product
constexpr int OUT_BYTES = ROUND_TOKENS * CELLS * 16;
constexpr int SCALE_BYTES = QUIRE_FP8 == 2 ? TOKENS * 4 : 0;    // of x, for a stage
constexpr int RING_BYTES = 232448 - 1024;
constexpr int stages_with(int n_out) { return (RING_BYTES - 2 * n_out * OUT_BYTES) / (STAGE_BYTES + SCALE_BYTES); }
constexpr int N_OUT = stages_with(2) == stages_with(1) ? 2 : 1;  // buffers of a warpgroup for results on their way out
constexpr int N_STAGES = stages_with(N_OUT);
constexpr int WIDTH_STEP = QUIRE_CODES || QUIRE_FP8 ? 32 : 8;    // from an instruction's width to the next, from 64 on
constexpr bool GATHERS = QUIRE_SILU && !QUIRE_FP8;              // rows of x are those of tokens, else of slots
constexpr int LANE_ROWS = (TOKENS + 127) / 128;  // of x in a tile, whose tokens a lane keeps
constexpr int OUT_AT = N_STAGES * STAGE_BYTES, SCALES_AT = OUT_AT + 2 * N_OUT * OUT_BYTES;
constexpr int BARRIERS_AT = SCALES_AT + N_STAGES * SCALE_BYTES;
constexpr int END = BARRIERS_AT + 2 * N_STAGES * 8;
// Registers of a thread. A block has what it starts with: asking for more waits forever.
constexpr int LOADING = 40, MULTIPLYING = 232;
static_assert(2 * MULTIPLYING + LOADING <= 3 * (65536 / THREADS / 8 * 8));
static_assert(N_STAGES >= 3 && !(QUIRE_FP8 && QUIRE_CODES));

struct Place {  // of a tile
    int expert, slot, n, row;  // first of x, how many; first of y
};

struct MoeBlock {
    const QuireMoeWideArgs& a;
    uint32_t base;
    int n_row_tiles, n_items, n_units;

    __device__ MoeBlock(const QuireMoeWideArgs& args, char* shared) : a(args), base(shared_address(shared)) {
        n_row_tiles = (a.n_rows + TILE_ROWS - 1) / TILE_ROWS;
        n_units = (a.k + (QUIRE_FP8 ? CHUNK - 1 : 0)) / CHUNK;
    }
    __device__ uint32_t stage(int i) const { return base + i * STAGE_BYTES; }
    __device__ uint32_t scales(int i) const { return base + SCALES_AT + i * SCALE_BYTES; }
    __device__ uint32_t full(int i) const { return base + BARRIERS_AT + i * 8; }
    __device__ uint32_t empty(int i) const { return base + BARRIERS_AT + (N_STAGES + i) * 8; }
    __device__ int item(int pass) const { return blockIdx.x + pass * a.n_blocks; }
    // From the L2 cache, which all grids share. Beyond the last there is nothing.
    __device__ Place place(int item) const {
        if (item >= n_items) return {0, 0, 0, 0};
        const volatile int* tile = reinterpret_cast<const volatile int*>(a.tiles + item / n_row_tiles);
        return {tile[0], tile[1], tile[2], item % n_row_tiles * TILE_ROWS};
    }
    __device__ void init() const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < N_STAGES; i++) {
                barrier_init(full(i), GATHERS ? 1 + GROUP : 1);
                barrier_init(empty(i), WORKERS / 32);
            }
            barrier_init_fence();
        }
        __syncthreads();
    }
    __device__ void count() { n_items = *const_cast<const volatile int*>(a.n_tiles) * n_row_tiles; }
};

}  // namespace quire
