// The producer warp: reads the page table ahead of time and keeps the stages full, across the borders of lines.
#pragma once
#include "latent/shape.h"

namespace quire {
namespace {

// Lanes hold the places of 32 copies, those that come next; the 32 after them are looked up meanwhile.
__device__ __forceinline__ void produce(const QuireAttnArgs& args, const CUtensorMap& map, const Shared& shared,
                                        const Share& share, int box_rows, uint64_t hint) {
    const int lane = threadIdx.x % 32, n_boxes = KEYS / box_rows, n_ahead = 32 / n_boxes, of_block = lane % n_boxes;
    const int box_bytes = box_rows / 8 * EIGHT_BYTES;
    Stage stage;
    Line line{};
    int index = share.first - 1, block = 0, page = 0, eight = 0;
    while (true) {
        Line next = line;
        int next_index = index, next_block = block + n_ahead, next_page = 0, next_eight = 0;
        while (next_block >= next.n_blocks && ++next_index < share.last) {
            next = load_line(share, next_index, args.n_q_heads, box_rows);
            next_block = 0;
        }
        if (next_index < share.last) {
            const int of_line = next_block + lane / n_boxes;
            const int key = next.start + of_line * KEYS + of_block * box_rows;
            if (of_line < next.n_blocks && key < next.end) {
                const int entry = key / args.page_size;
                next_page = __ldg(args.pages + next.tile.kv_at + entry);
                next_eight = (key - entry * args.page_size) / 8;
            }
        }
        for (int i = block; i < min(block + n_ahead, line.n_blocks); ++i) {
            const int held_by = (i - block) * n_boxes + of_block;
            const int from_page = __shfl_sync(~0u, page, held_by), from_eight = __shfl_sync(~0u, eight, held_by);
            const int n_copied = min(n_boxes, (line.end - line.start - i * KEYS + box_rows - 1) / box_rows);
            const uint32_t filled = shared.filled + stage.at * 8;
            await(shared.drained + stage.at * 8, stage.parity ^ 1);
            if (lane == 0) barrier_expect(filled, n_copied * box_bytes);
            __syncwarp();
            if (lane < n_copied)
                load_box(shared.ring + stage.at * STAGE_BYTES + lane * box_bytes, &map, filled, hint, 0, 0, 0,
                         from_eight, from_page);
            __syncwarp();
            stage.advance();
        }
        if (next_index >= share.last) return;
        line = next, index = next_index, block = next_block, page = next_page, eight = next_eight;
    }
}

}  // namespace
}  // namespace quire
