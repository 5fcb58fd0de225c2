// The writer warps: bring q of the next line and write the results of the one before.
#pragma once
#include "decode/results.h"

namespace quire {
namespace {

// Rows up to the next multiple of 8 are zero: what they would weigh moves the maxima of the others.
__device__ __forceinline__ void load_queries(const QuireTile& tile, uint32_t queries, uint32_t barrier, int group,
                                             const QuireAttnArgs& args) {
    constexpr int Q_CELLS = DIM / 8;
    const int n_rows = tile.n_tokens * group;
    for (int cell = threadIdx.x - WARPS * 32; cell < (n_rows + 7) / 8 * 8 * Q_CELLS; cell += WRITERS * 32) {
        const int row = cell / Q_CELLS, of_row = cell % Q_CELLS;
        const Row found = find_row(tile, row / group, row % group, group, args);
        const int64_t at = found.q_row * args.q_row + found.q_head * args.q_head;
        const Element* from = static_cast<const Element*>(args.q) + at;
        copy_16_bytes(queries + row * Q_ROW_BYTES + of_row * 16, from + of_row * 8, row < n_rows);
    }
    barrier_arrive_after_copies(barrier);
}

// q of a line is loaded once the results of the line that had its place are there: its consumers have read it then.
__device__ __forceinline__ void write(const QuireAttnArgs& args, const Shared& shared, int first, int last) {
    const int group = args.n_q_heads / args.n_kv_heads;
    Slot<QUERIES> query;
    Slot<RESULTS> result;
    QuireTile next{};
    int index = first - 1;  // of `next`
    const auto find_next = [&] {  // lines without rows have no q and no results
        for (next.n_tokens = 0; next.n_tokens == 0 && ++index < last;) next = load_tile(args.small_lines, index);
    };
    const auto load_next = [&] {
        if (next.n_tokens == 0) return;
        load_queries(next, shared.queries + query.at * Q_BYTES, shared.q_filled + query.at * 8, group, args);
        query.advance();
    };
    find_next();
    load_next();
    while (next.n_tokens > 0 && !(FINISH && index + 1 == last)) {
        const QuireTile tile = next;
        find_next();
        if (QUERIES > 1) load_next();
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
            barrier_wait(shared.written + result.at * 8, result.parity);
            write_round<WRITERS * 32>(threadIdx.x - WARPS * 32, shared.sums + result.at * SUMS,
                                      shared.states + result.at * STATES, tile, round, group, args);
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(shared.read + result.at * 8);
            result.advance();
        }
        if (QUERIES == 1) load_next();
    }
}

}  // namespace
}  // namespace quire
