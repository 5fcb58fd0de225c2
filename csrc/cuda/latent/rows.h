// Rows of a tile on their way in and out of shared memory, for both kernels. Behind a kernel's shape.h.
#pragma once

namespace quire {
namespace {

__device__ __forceinline__ void sync_consumers() { named_sync(BARRIER_ALL, CONSUMERS); }

__device__ __forceinline__ void load_queries(const Line& line, const Shared& shared, int first_row,
                                             const QuireAttnArgs& args) {
    constexpr int CELLS = DIM / 8;
    for (int cell = threadIdx.x; cell < ROWS * CELLS; cell += CONSUMERS) {
        const int row = cell / CELLS, of_row = cell % CELLS;
        const Row found = find_row(line.tile, first_row + min(row, line.n_rows - 1), args.n_q_heads, args);
        const Element* from =
            static_cast<const Element*>(args.q) + found.q_row * args.q_row + found.head * args.q_head + of_row * 8;
        const uint32_t to = shared.queries + of_row / 8 * Q_CHUNK_BYTES + row * 128 + (of_row % 8 ^ row % 8) * 16;
        copy_16_bytes(to, from, row < line.n_rows);
    }
    for (int row = threadIdx.x; row < ROWS; row += CONSUMERS)
        shared.positions[row] =
            find_row(line.tile, first_row + min(row, line.n_rows - 1), args.n_q_heads, args).position;
    copies_wait();
    async_fence();
    sync_consumers();
}

// The logarithm (base 2) of a row's sum of weights, of one thread for each row.
__device__ __forceinline__ void write_lse(const Line& line, int first_row, int row, float lse,
                                          const QuireAttnArgs& args) {
    const QuireTile& tile = line.tile;
    if (tile.partial >= 0) {
        args.partial_lse[tile.partial + first_row + row] = lse;
    } else if (args.lse != nullptr) {
        const Row found = find_row(tile, first_row + row, args.n_q_heads, args);
        args.lse[static_cast<int64_t>(found.q_row) * args.n_q_heads + found.head] = lse * LN2;
    }
}

// Results that lie in the place of the queries, RESULT_BYTES a row.
__device__ __forceinline__ void write_rows(const Line& line, int first_row, const Shared& shared,
                                           const QuireAttnArgs& args) {
    constexpr int CELLS = RANK / 8;
    for (int cell = threadIdx.x; cell < line.n_rows * CELLS; cell += CONSUMERS) {
        const int row = cell / CELLS, of_row = cell % CELLS;
        const Row found = find_row(line.tile, first_row + row, args.n_q_heads, args);
        Element* out = static_cast<Element*>(args.out);
        out += (static_cast<int64_t>(found.q_row) * args.n_q_heads + found.head) * RANK + of_row * 8;
        *reinterpret_cast<uint4*>(out) = load_16_bytes(shared.queries + row * RESULT_BYTES + of_row * 16);
    }
}

}  // namespace
}  // namespace quire
