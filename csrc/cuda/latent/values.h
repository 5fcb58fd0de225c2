// values: of each head what was seen of lines [512] times its matrix [128, 512]. Few rows in clusters of blocks, which
// may have parts of lines to sum first; many rows in tiles.
#pragma once
#include "gemm.h"
#include "plain_variant.h"
#include "decode/parts.h"
#include "latent/tiles.h"

struct QuireValuesArgs {       // ValuesArgs in quire/kernels/mla/hopper.py
    const void *seen, *values;
    void* y;                   // as seen contiguous
    int64_t values_head;       // stride in elements; the rows of a head's matrix are contiguous
    int32_t n, n_heads;
};

namespace quire {
namespace {

// ---- few rows: a block has some dimensions of what one head has seen -------------------------------------------------
//
// Where lines were split it sums their parts in its dimensions. It multiplies, and hands its sums for all 128 numbers to
// the last block of its cluster, which adds them in the order of the ranks: 128 KB of them at 32 rows, where tiles take half
// of the time.

constexpr int FEW_ROWS = 8, FEW_RANKS = 8, FEW_THREADS = 256;
constexpr int OWN = RANK / FEW_RANKS, OWN_CELLS = OWN / WIDTH, OWN_STEPS = OWN / 16;  // of a block
constexpr int PARTS_CELLS = OWN / 4, GROUPS = FEW_THREADS / PARTS_CELLS;  // of parts: four dimensions a thread

struct FewMemory {
    char matrix[PLAIN * OWN * 2], rows[16 * OWN * 2];  // tiles, one of rows
    float4 slice_sums[FEW_THREADS];
    float2 slice_states[FEW_THREADS];
    int2 parts[FEW_ROWS];  // of a row: its first, and how many; none: it is whole
    float sums[1];         // [FEW_RANKS][n][PLAIN], of the last block
};

// Read before the wait for the grid that writes parts, as the kernels that merge do.
__device__ __forceinline__ void find_parts(FewMemory& memory, int n, const QuireAttnArgs& attention) {
    if (threadIdx.x < FEW_ROWS) memory.parts[threadIdx.x] = make_int2(0, 0);
    __syncthreads();
    for (int i = threadIdx.x; i < attention.n_merges; i += FEW_THREADS) {
        const QuireMerge merge = load_merge(i, attention);
        if (merge.n_parts > 0 && merge.row < n) memory.parts[merge.row] = make_int2(merge.parts_at, merge.n_parts);
    }
    __syncthreads();
}

// This block's dimensions of all rows, to the tile. Groups of threads share the parts of a row, in slices.
__device__ __forceinline__ void gather_rows(FewMemory& memory, const QuireValuesArgs& args, int head, int first_dim,
                                            const QuireAttnArgs& attention) {
    static_assert(FEW_ROWS < GROUPS);
    const uint32_t tile = shared_address(memory.rows);
    int at_once = 1;
    while (at_once < args.n) at_once *= 2;
    const int n_slices = GROUPS / at_once, group = threadIdx.x / PARTS_CELLS, slice = group / at_once;
    const int row = group % at_once, cell = threadIdx.x % PARTS_CELLS, dim = first_dim + cell * 4;
    const int2 parts = row < args.n ? memory.parts[row] : make_int2(0, 0);
    const QuireMerge merge{row, 0, parts.x, parts.y};
    const auto load_parts = [&](int (&found)[FLIGHT], int from) {
        for (int i = 0; i < FLIGHT; ++i) {
            const int part = from + i * n_slices;
            found[i] = part < merge.n_parts ? load_here(attention.parts + merge.parts_at + part) : -1;
        }
    };
    int found[FLIGHT];
    load_parts(found, slice);
    Sum sum = sum_parts(merge, found, load_parts, slice, n_slices, head, dim, attention);
    memory.slice_sums[threadIdx.x] = sum.o;
    memory.slice_states[threadIdx.x] = make_float2(sum.top, sum.total);
    __syncthreads();
    if (slice > 0 || row >= args.n) return;
    for (int other = 1; other < min(n_slices, merge.n_parts); ++other) {
        const int at = other * at_once * PARTS_CELLS + threadIdx.x;
        const float2 state = memory.slice_states[at];
        sum.add(Sum{memory.slice_sums[at], state.x, state.y});
    }
    const float4 o = sum.result();
    uint2 words = make_uint2(pack(o.x, o.y), pack(o.z, o.w));
    if (merge.n_parts == 0)
        words = *reinterpret_cast<const uint2*>(static_cast<const Element*>(args.seen) +
                                                (int64_t(row) * args.n_heads + head) * RANK + dim);
    char* to = memory.rows + (place_of<OWN_CELLS>(tile, row, cell / 2) - tile) + cell % 2 * 8;
    *reinterpret_cast<uint2*>(to) = words;
}

__global__ void __launch_bounds__(FEW_THREADS)
    few_values_kernel(const __grid_constant__ QuireValuesArgs args, const __grid_constant__ QuireAttnArgs attention) {
    extern __shared__ __align__(16) char shared[];
    FewMemory& memory = *reinterpret_cast<FewMemory*>(shared);
    const int rank = blockIdx.x % FEW_RANKS, head = blockIdx.x / FEW_RANKS, last = FEW_RANKS - 1;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    cluster_arrive();
    let_next_grid_start();
    const Element* matrix = static_cast<const Element*>(args.values) + head * args.values_head + rank * OWN;
    load_tile<OWN_CELLS, FEW_THREADS>(shared_address(memory.matrix), matrix, RANK, PLAIN, PLAIN);
    find_parts(memory, args.n, attention);
    wait_for_previous_grid();
    gather_rows(memory, args, head, rank * OWN, attention);
    copies_wait();
    __syncthreads();
    uint32_t values[OWN_STEPS][4];
#pragma unroll
    for (int k = 0; k < OWN_STEPS; ++k) load_right<OWN_CELLS>(values[k], shared_address(memory.matrix), warp * 16, k);
    cluster_wait();  // all blocks have started: their memory can be written
    const uint32_t sums_there = address_in(shared_address(memory.sums), last);
    float sums[2][4] = {};
#pragma unroll
    for (int k = 0; k < OWN_STEPS; ++k) {
        uint32_t x[4];
        load_left<OWN_CELLS>(x, shared_address(memory.rows), 0, k);
        multiply_add(sums[0], x, values[k][0], values[k][1]);
        multiply_add(sums[1], x, values[k][2], values[k][3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = warp * 16 + i % 2 * 8 + lane % 4 * 2;
        if (row < args.n)
            store_there(sums_there + ((rank * args.n + row) * PLAIN + column) * 4,
                        make_float2(sums[i % 2][i / 2 * 2], sums[i % 2][i / 2 * 2 + 1]));
    }
    cluster_arrive();
    cluster_wait();
    if (rank != last) return;
    for (int i = threadIdx.x; i < args.n * (PLAIN / 2); i += FEW_THREADS) {
        float first = 0.f, second = 0.f;
#pragma unroll
        for (int other = 0; other < FEW_RANKS; ++other) {
            const float2 pair = *reinterpret_cast<const float2*>(memory.sums + other * args.n * PLAIN + i * 2);
            first += pair.x, second += pair.y;
        }
        const int row = i / (PLAIN / 2), column = i % (PLAIN / 2) * 2;
        store_pair(args.y, (int64_t(row) * args.n_heads + head) * PLAIN + column, first, second);
    }
}

// ---- many rows: a block has 64 columns of a head, a warp 16 of its 64 rows ---------------------------------------------

constexpr int SEEN_CELLS = RANK / WIDTH, SEEN_BYTES = RANK * 2, STEPS = RANK / 16;
constexpr int MANY_COLUMNS = 64, MANY_PARTS = PLAIN / MANY_COLUMNS;

__device__ __forceinline__ void values_of_many(const QuireValuesArgs& args, const Element* matrix, const Element* seen,
                                               Element* y, int n_rows, char* memory) {
    const uint32_t shared = shared_address(memory), rows = shared + MANY_COLUMNS * SEEN_BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t seen_row = int64_t(args.n_heads) * RANK, y_row = int64_t(args.n_heads) * PLAIN;
    load_tile<SEEN_CELLS, THREADS>(shared, matrix, RANK, MANY_COLUMNS, MANY_COLUMNS);
    wait_for_previous_grid();
    load_tile<SEEN_CELLS, THREADS>(rows, seen, seen_row, BLOCK_ROWS, n_rows);
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

__global__ void __launch_bounds__(THREADS) many_values_kernel(const __grid_constant__ QuireValuesArgs args) {
    extern __shared__ __align__(16) char shared[];
    let_next_grid_start();
    const int column = blockIdx.x % MANY_PARTS * MANY_COLUMNS, head = blockIdx.x / MANY_PARTS % args.n_heads;
    const int64_t first_row = blockIdx.x / MANY_PARTS / args.n_heads * BLOCK_ROWS;
    const Element* matrix = static_cast<const Element*>(args.values) + head * args.values_head + column * RANK;
    const Element* seen = static_cast<const Element*>(args.seen) + (first_row * args.n_heads + head) * RANK;
    Element* y = static_cast<Element*>(args.y) + (first_row * args.n_heads + head) * PLAIN + column;
    values_of_many(args, matrix, seen, y, min(args.n - static_cast<int>(first_row), BLOCK_ROWS), shared);
}

}  // namespace
}  // namespace quire
