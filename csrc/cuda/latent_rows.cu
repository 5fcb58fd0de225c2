// What stands around attention to lines in a decode step of latent attention, in one launch before it and one behind:
//
// ask: queries' plain part times the keys' matrix of each head, their other part rotated, and the tokens' lines normed,
// rotated and stored. values: of each head what was seen of lines times the values' matrix. Both for lines of 512 + 64
// numbers, and 128 plain ones of a head on both sides. Hopper; QUIRE_BF16 0 or 1.
//
// Matrices are 2 MB for 16 heads, so a launch is what counts: each block asks for its piece of a matrix before it waits
// for the previous grid, which writes the rows, and lets the next grid start at once (programmatic dependent launch).
// Every thread waits, so that who waits for this grid has waited for all before it. A row's results do not depend on the
// other rows; those of values are summed in another order from FEW_ROWS + 1 rows on.
#include "cells.h"
#include "launch.h"
#include "shared_memory.h"

struct QuireAskArgs {          // _AskArgs in quire/kernels/mla/hopper.py
    const void *lines, *norm, *q, *keys;
    void *asked, *pages;       // contiguous
    const void* positions;     // int32, or int64 if wide_positions
    const float* cos_sin;      // [n_positions, ROPE]
    const int64_t* cache_locs;
    int64_t lines_row, q_row, q_head, keys_head;  // strides in elements; the rows of a head's matrix are contiguous
    int32_t n, n_heads, n_positions, wide_positions;
    float eps;
};

struct QuireValuesArgs {       // _ValuesArgs, likewise
    const void *seen, *values;
    void* y;                   // as seen contiguous
    int64_t values_head;
    int32_t n, n_heads;
};

namespace quire {
namespace {

constexpr int RANK = 512, ROPE = 64, LINE = RANK + ROPE, PLAIN = 128;
constexpr int BLOCK_ROWS = 64, THREADS = 128, WARPS = THREADS / 32;
constexpr int FEW_ROWS = 32;

// ---- a tile of rows in shared memory: 16-byte cell c of a row is found at cell c ^ (row % 8) ------------------------

template <int CELLS> __device__ __forceinline__ uint32_t place_of(uint32_t tile, int row, int cell) {
    return tile + row * (CELLS * 16) + (cell ^ row % 8) * 16;
}

// Rows at `from`, `stride` elements apart; zeros from n_real on.
template <int CELLS>
__device__ __forceinline__ void load_tile(uint32_t tile, const void* from, int64_t stride, int n_rows, int n_real) {
    for (int i = threadIdx.x; i < n_rows * CELLS; i += THREADS) {
        const int row = i / CELLS, cell = i % CELLS;
        const Element* at = static_cast<const Element*>(from) + min(row, n_real - 1) * stride + cell * WIDTH;
        copy_16_bytes(place_of<CELLS>(tile, row, cell), at, row < n_real);
    }
}

// The left side of a product: 16 rows from `row` on, 16 columns from cell 2 k on.
template <int CELLS> __device__ __forceinline__ void load_left(uint32_t (&a)[4], uint32_t tile, int row, int k) {
    const int lane = threadIdx.x % 32;
    load_matrices(a, place_of<CELLS>(tile, row + lane % 16, 2 * k + lane / 16));
}
// The right side: 16 columns of the result, from tile row `row` on, whose rows are columns of the result.
template <int CELLS> __device__ __forceinline__ void load_right(uint32_t (&b)[4], uint32_t tile, int row, int k) {
    const int lane = threadIdx.x % 32;
    load_matrices(b, place_of<CELLS>(tile, row + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
}
// The same of a tile whose columns are those of the result, from cell `cell` on.
template <int CELLS> __device__ __forceinline__ void load_right_turned(uint32_t (&b)[4], uint32_t tile, int cell, int k) {
    const int lane = threadIdx.x % 32;
    load_matrices_transposed(b, place_of<CELLS>(tile, 16 * k + lane % 16, cell + lane / 16));
}

__device__ __forceinline__ void store_pair(void* base, int64_t element, float first, float second) {
    *reinterpret_cast<uint32_t*>(static_cast<Element*>(base) + element) = pack(first, second);
}

// ---- ask -------------------------------------------------------------------------------------------------------------

constexpr int ASK_COLUMNS = 64, ASK_PARTS = RANK / ASK_COLUMNS;
constexpr int KEY_BYTES = PLAIN * ASK_COLUMNS * 2, ASK_BYTES = KEY_BYTES + BLOCK_ROWS * PLAIN * 2;

// Some columns of what one head asks, of up to BLOCK_ROWS rows; a warp has 16 of the columns.
__device__ __forceinline__ void ask_plain(const QuireAskArgs& args, int block, uint32_t shared) {
    constexpr int KEY_CELLS = ASK_COLUMNS / WIDTH, Q_CELLS = PLAIN / WIDTH, STEPS = PLAIN / 16;
    const int part = block % ASK_PARTS, head = block / ASK_PARTS % args.n_heads;
    const int64_t first_row = block / ASK_PARTS / args.n_heads * BLOCK_ROWS;
    const int n_rows = min(args.n - static_cast<int>(first_row), BLOCK_ROWS), n_tiles = (n_rows + 15) / 16;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t rows = shared + KEY_BYTES;
    load_tile<KEY_CELLS>(shared, static_cast<const Element*>(args.keys) + head * args.keys_head + part * ASK_COLUMNS, RANK,
                         PLAIN, PLAIN);
    wait_for_previous_grid();
    load_tile<Q_CELLS>(rows, static_cast<const Element*>(args.q) + first_row * args.q_row + head * args.q_head, args.q_row,
                       n_tiles * 16, n_rows);
    copies_wait();
    __syncthreads();
    uint32_t keys[STEPS][4];
#pragma unroll
    for (int k = 0; k < STEPS; ++k) load_right_turned<KEY_CELLS>(keys[k], shared, warp * 2, k);
    for (int tile = 0; tile < n_tiles; ++tile) {
        float sums[2][4] = {};
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            uint32_t q[4];
            load_left<Q_CELLS>(q, rows, tile * 16, k);
            multiply_add(sums[0], q, keys[k][0], keys[k][1]);
            multiply_add(sums[1], q, keys[k][2], keys[k][3]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = tile * 16 + lane / 4 + i / 2 * 8;
            const int column = part * ASK_COLUMNS + warp * 16 + i % 2 * 8 + lane % 4 * 2;
            const float* pair = sums[i % 2] + i / 2 * 2;
            if (row < n_rows)
                store_pair(args.asked, ((first_row + row) * args.n_heads + head) * LINE + column, pair[0], pair[1]);
        }
    }
}

// The line of a row, and the part of its queries that is rotated.
__device__ __forceinline__ void store_line(const QuireAskArgs& args, int64_t row, float* of_warps) {
    constexpr int CELLS = RANK / WIDTH, HALF = ROPE / 2, PAIRS = HALF / WIDTH;  // of a line, and of what is rotated
    const int at = threadIdx.x * WIDTH, first = threadIdx.x % PAIRS * WIDTH;
    const bool has_cell = threadIdx.x < CELLS;
    const Cell weight = load_cell(args.norm, at, has_cell);
    // A guess, as in rows.cu: an earlier grid may still write positions.
    const int64_t guess = min(max(load_position(args.positions, args.wide_positions, row), int64_t(0)),
                              int64_t(args.n_positions - 1));
    Turn turn;
    load_turn(turn, args.cos_sin, HALF, guess, first);
    wait_for_previous_grid();
    const int64_t position = load_position(args.positions, args.wide_positions, row);
    if (position != guess) load_turn(turn, args.cos_sin, HALF, position, first);
    const int64_t entry = static_cast<const volatile int64_t*>(args.cache_locs)[row] * LINE;
    const int64_t line = row * args.lines_row;

    float x[WIDTH];
    widen(x, load_cell(args.lines, line + at, has_cell));
    float sum = square_sum(x);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += of_warps[i];
    scale(x, rsqrtf(sum / RANK + args.eps), weight);
    if (has_cell) store_cell(args.pages, entry + at, narrow(x));

    for (int i = threadIdx.x; i < (args.n_heads + 1) * PAIRS; i += THREADS) {
        const int head = i / PAIRS;
        const bool is_line = head == args.n_heads;
        const void* from = is_line ? args.lines : args.q;
        const int64_t source = (is_line ? line + RANK : row * args.q_row + head * args.q_head + PLAIN) + first;
        const int64_t target = (is_line ? entry : (row * args.n_heads + head) * LINE) + RANK + first;
        float a[WIDTH], b[WIDTH];
        widen(a, load_cell(from, source, true));
        widen(b, load_cell(from, source + HALF, true));
        rotate(a, b, turn);
        store_cell(is_line ? args.pages : args.asked, target, narrow(a));
        store_cell(is_line ? args.pages : args.asked, target + HALF, narrow(b));
    }
}

__global__ void __launch_bounds__(THREADS) ask_kernel(const __grid_constant__ QuireAskArgs args) {
    extern __shared__ __align__(16) char shared[];
    let_next_grid_start();
    if (blockIdx.x < args.n) {
        store_line(args, blockIdx.x, reinterpret_cast<float*>(shared));
    } else {
        ask_plain(args, blockIdx.x - args.n, shared_address(shared));
    }
}

// ---- values ------------------------------------------------------------------------------------------------------------

constexpr int SEEN_CELLS = RANK / WIDTH, SEEN_BYTES = RANK * 2, STEPS = RANK / 16;
constexpr int FEW_COLUMNS = 16, MANY_COLUMNS = 64;

// Up to FEW_ROWS rows: a block has 16 columns of a head, a warp a quarter of the sums.
__device__ __forceinline__ void values_of_few(const QuireValuesArgs& args, const Element* matrix, const Element* seen,
                                              Element* y, char* memory) {
    constexpr int OWN_STEPS = STEPS / WARPS;
    const uint32_t shared = shared_address(memory), rows = shared + FEW_COLUMNS * SEEN_BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_tiles = (args.n + 15) / 16;
    const int64_t seen_row = int64_t(args.n_heads) * RANK, y_row = int64_t(args.n_heads) * PLAIN;
    load_tile<SEEN_CELLS>(shared, matrix, RANK, FEW_COLUMNS, FEW_COLUMNS);
    wait_for_previous_grid();
    load_tile<SEEN_CELLS>(rows, seen, seen_row, n_tiles * 16, args.n);
    copies_wait();
    __syncthreads();
    uint32_t values[OWN_STEPS][4];
#pragma unroll
    for (int k = 0; k < OWN_STEPS; ++k) load_right<SEEN_CELLS>(values[k], shared, 0, warp * OWN_STEPS + k);
    __syncthreads();  // the matrix has been read: its place takes the sums
    float* parts = reinterpret_cast<float*>(memory);  // [tile][warp][16 rows][16 columns]
    for (int tile = 0; tile < n_tiles; ++tile) {
        float sums[2][4] = {};
#pragma unroll
        for (int k = 0; k < OWN_STEPS; ++k) {
            uint32_t x[4];
            load_left<SEEN_CELLS>(x, rows, tile * 16, warp * OWN_STEPS + k);
            multiply_add(sums[0], x, values[k][0], values[k][1]);
            multiply_add(sums[1], x, values[k][2], values[k][3]);
        }
        float* to = parts + (tile * WARPS + warp) * 256 + lane / 4 * 16 + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<float2*>(to + i / 2 * 128 + i % 2 * 8) =
                make_float2(sums[i % 2][i / 2 * 2], sums[i % 2][i / 2 * 2 + 1]);
    }
    __syncthreads();
    for (int tile = 0; tile < n_tiles; ++tile) {
        const int row = tile * 16 + threadIdx.x / 8, column = threadIdx.x % 8 * 2;
        float first = 0.f, second = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            const float2 pair =
                *reinterpret_cast<const float2*>(parts + (tile * WARPS + i) * 256 + threadIdx.x / 8 * 16 + column);
            first += pair.x, second += pair.y;
        }
        if (row < args.n) store_pair(y, row * y_row + column, first, second);
    }
}

// More: a block has 64 columns of a head, a warp 16 of its 64 rows.
__device__ __forceinline__ void values_of_many(const QuireValuesArgs& args, const Element* matrix, const Element* seen,
                                               Element* y, int n_rows, char* memory) {
    const uint32_t shared = shared_address(memory), rows = shared + MANY_COLUMNS * SEEN_BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t seen_row = int64_t(args.n_heads) * RANK, y_row = int64_t(args.n_heads) * PLAIN;
    load_tile<SEEN_CELLS>(shared, matrix, RANK, MANY_COLUMNS, MANY_COLUMNS);
    wait_for_previous_grid();
    load_tile<SEEN_CELLS>(rows, seen, seen_row, BLOCK_ROWS, n_rows);
    copies_wait();
    __syncthreads();
    if (warp * 16 >= n_rows) return;
    float sums[MANY_COLUMNS / 8][4] = {};
#pragma unroll 4
    for (int k = 0; k < STEPS; ++k) {
        uint32_t x[4];
        load_left<SEEN_CELLS>(x, rows, warp * 16, k);
#pragma unroll
        for (int j = 0; j < MANY_COLUMNS / 16; ++j) {
            uint32_t values[4];
            load_right<SEEN_CELLS>(values, shared, j * 16, k);
            multiply_add(sums[2 * j], x, values[0], values[1]);
            multiply_add(sums[2 * j + 1], x, values[2], values[3]);
        }
    }
#pragma unroll
    for (int j = 0; j < MANY_COLUMNS / 8; ++j) {
        const int row = warp * 16 + lane / 4, column = j * 8 + lane % 4 * 2;
        if (row < n_rows) store_pair(y, row * y_row + column, sums[j][0], sums[j][1]);
        if (row + 8 < n_rows) store_pair(y, (row + 8) * y_row + column, sums[j][2], sums[j][3]);
    }
}

template <bool MANY>
__global__ void __launch_bounds__(THREADS) values_kernel(const __grid_constant__ QuireValuesArgs args) {
    extern __shared__ __align__(16) char shared[];
    let_next_grid_start();
    constexpr int COLUMNS = MANY ? MANY_COLUMNS : FEW_COLUMNS;
    const int column = blockIdx.x % (PLAIN / COLUMNS) * COLUMNS, head = blockIdx.x / (PLAIN / COLUMNS) % args.n_heads;
    const int64_t first_row = blockIdx.x / (PLAIN / COLUMNS) / args.n_heads * BLOCK_ROWS;
    const Element* matrix = static_cast<const Element*>(args.values) + head * args.values_head + column * RANK;
    const Element* seen = static_cast<const Element*>(args.seen) + (first_row * args.n_heads + head) * RANK;
    Element* y = static_cast<Element*>(args.y) + (first_row * args.n_heads + head) * PLAIN + column;
    if constexpr (MANY) {
        values_of_many(args, matrix, seen, y, min(args.n - static_cast<int>(first_row), BLOCK_ROWS), shared);
    } else {
        values_of_few(args, matrix, seen, y, shared);
    }
}

// ---- host ----------------------------------------------------------------------------------------------------------

template <bool MANY> int launch_values(const QuireValuesArgs& args, int n_rows, void* stream) {
    constexpr int COLUMNS = MANY ? MANY_COLUMNS : FEW_COLUMNS;
    const int n_bytes = (COLUMNS + n_rows) * SEEN_BYTES, n_blocks = (args.n + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const cudaError_t error = allow_shared_memory<values_kernel<MANY>>(n_bytes);
    if (error != cudaSuccess) return error;
    return launch(values_kernel<MANY>, n_blocks * args.n_heads * (PLAIN / COLUMNS), THREADS, n_bytes, stream, args);
}

}  // namespace
}  // namespace quire

extern "C" __attribute__((visibility("default"))) int quire_latent_ask(const QuireAskArgs* args, void* stream) {
    using namespace quire;
    if (args->n <= 0 || args->n_heads <= 0 || args->n_positions <= 0) return cudaErrorInvalidValue;
    const int n_blocks = (args->n + BLOCK_ROWS - 1) / BLOCK_ROWS;
    return launch(ask_kernel, args->n + n_blocks * args->n_heads * ASK_PARTS, THREADS, ASK_BYTES, stream, *args);
}

extern "C" __attribute__((visibility("default"))) int quire_latent_values(const QuireValuesArgs* args, void* stream) {
    using namespace quire;
    if (args->n <= 0 || args->n_heads <= 0) return cudaErrorInvalidValue;
    if (args->n > FEW_ROWS) return launch_values<true>(*args, BLOCK_ROWS, stream);
    return launch_values<false>(*args, (args->n + 15) / 16 * 16, stream);
}
