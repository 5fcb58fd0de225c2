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
#define QUIRE_OUT_DIM 512
#include "latent/values.h"
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

namespace quire {
namespace {

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
    load_tile<KEY_CELLS, THREADS>(shared, static_cast<const Element*>(args.keys) + head * args.keys_head + part * ASK_COLUMNS, RANK,
                         PLAIN, PLAIN);
    wait_for_previous_grid();
    load_tile<Q_CELLS, THREADS>(rows, static_cast<const Element*>(args.q) + first_row * args.q_row + head * args.q_head, args.q_row,
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

// ---- host ----------------------------------------------------------------------------------------------------------

int launch_few(const QuireValuesArgs& args, const QuireAttnArgs& attention, void* stream) {
    const int n_bytes = sizeof(FewMemory) + FEW_RANKS * args.n * PLAIN * sizeof(float);
    const cudaError_t error = allow_shared_memory<few_values_kernel>(n_bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = FEW_RANKS;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(args.n_heads * FEW_RANKS);
    config.blockDim = dim3(FEW_THREADS);
    config.dynamicSmemBytes = n_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, few_values_kernel, args, attention);
}

int launch_many(const QuireValuesArgs& args, void* stream) {
    const int n_bytes = (MANY_COLUMNS + BLOCK_ROWS) * SEEN_BYTES, n_blocks = (args.n + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const cudaError_t error = allow_shared_memory<many_values_kernel>(n_bytes);
    if (error != cudaSuccess) return error;
    return launch(many_values_kernel, n_blocks * args.n_heads * MANY_PARTS, THREADS, n_bytes, stream, args);
}

}  // namespace
}  // namespace quire

extern "C" __attribute__((visibility("default"))) int quire_latent_ask(const QuireAskArgs* args, void* stream) {
    using namespace quire;
    if (args->n <= 0 || args->n_heads <= 0 || args->n_positions <= 0) return cudaErrorInvalidValue;
    const int n_blocks = (args->n + BLOCK_ROWS - 1) / BLOCK_ROWS;
    return launch(ask_kernel, args->n + n_blocks * args->n_heads * ASK_PARTS, THREADS, ASK_BYTES, stream, *args);
}

// attention: with parts of lines that were split, of at most FEW_ROWS rows; null: seen is whole.
extern "C" __attribute__((visibility("default"))) int quire_latent_values(const QuireValuesArgs* args,
                                                                         const QuireAttnArgs* attention, void* stream) {
    using namespace quire;
    if (args->n <= 0 || args->n_heads <= 0 || (attention && args->n > FEW_ROWS)) return cudaErrorInvalidValue;
    if (args->n > FEW_ROWS) return launch_many(*args, stream);
    return launch_few(*args, attention ? *attention : QuireAttnArgs{}, stream);
}
