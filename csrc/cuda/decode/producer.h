// The producer warp: reads the page table ahead of time and keeps the ring of stages full.
#pragma once
#include "decode/lines.h"

namespace quire {
namespace {

struct Box {  // where a copy begins
    int page, row, position;
};

__device__ __forceinline__ Box find_box(const Line& line, int key, const QuireAttnArgs& args) {
    if (LAYOUT == RAGGED) return {0, line.tile.kv_at + key, key};
    int page = key / args.page_size;
    const int row = key - page * args.page_size;
    if (LAYOUT == SPARSE) page = __ldg(args.blocks + line.tile.blocks_at + page);
    return {__ldg(args.pages + line.tile.kv_at + page), row, page * args.page_size + row};
}

__device__ __forceinline__ void copy_box(const CUtensorMap& map, uint32_t to, uint32_t barrier, const Box& box,
                                         int kv_head, const BoxShape& shape) {
    if (CODED)
        return load_box(to, &map, barrier, L2_EVICT_FIRST, 0, box.row * DIM / 128, kv_head, box.page);
    if (MAY_PACK && shape.packed)
        return load_box(to, &map, barrier, L2_EVICT_FIRST, 0, 0, box.row / 2, kv_head, box.page);
    for (int column = 0; column < (DIM % 64 ? CHUNKS : 1); ++column) {
        const uint32_t at = to + column * shape.rows * 128;
        if (LAYOUT == RAGGED)
            load_box(at, &map, barrier, L2_EVICT_FIRST, column * 64, box.row, 0, kv_head);
        else
            load_box(at, &map, barrier, L2_EVICT_FIRST, column * 64, box.row, 0, kv_head, box.page);
    }
}

// Lanes hold the places of 32 boxes, those of the blocks that come next; the 32 after them are looked up meanwhile.
// Settled keys are copied while the previous grid still runs: it may write those of this step's tokens.
__device__ __forceinline__ void produce(const QuireAttnArgs& args, const CUtensorMap& k_map, const CUtensorMap& v_map,
                                        const Shared& shared, int first, int last, const BoxShape& shape) {
    QuireTile coming = load_tile(args.small_lines, first);
    const int lane = threadIdx.x % 32, n_boxes = KEYS / shape.rows, n_ahead = 32 / n_boxes;
    const int box_bytes = shape.bytes(), of_block = lane % n_boxes;
    const bool is_value = lane >= n_boxes;
    const uint32_t offset = is_value * HALF_BYTES + of_block * box_bytes;
    Slot<STAGES> slot;
    Line line{};
    int index = first - 1, block = 0;
    Box box{};
    bool live = false, waited = !STARTS_EARLY || !args.settled;
    while (true) {
        Line next_line = line;
        int next_index = index, next_block = block + n_ahead;
        while (next_block >= next_line.n_blocks && ++next_index < last) {
            next_line = make_line(coming, args, shape);
            next_block = 0;
            if (next_index + 1 < last) coming = load_tile(args.small_lines, next_index + 1);
        }
        Box next_box{};
        if (next_index < last) {
            const int of_line = next_block + lane / n_boxes;
            const int key = next_line.block_start(of_line) + of_block * shape.rows;
            if (of_line < next_line.n_blocks && key < next_line.end) next_box = find_box(next_line, key, args);
        }
        for (int i = block; live && i < min(block + n_ahead, line.n_blocks); ++i) {
            const int held_by = (i - block) * n_boxes + of_block;
            const Box chosen{__shfl_sync(~0u, box.page, held_by), __shfl_sync(~0u, box.row, held_by),
                             LAYOUT == SPARSE ? __shfl_sync(~0u, box.position, held_by) : 0};
            const int n_copied = min(n_boxes, (line.end - line.block_start(i) + shape.rows - 1) / shape.rows);
            const uint32_t filled = shared.filled + slot.at * 8;
            if (!waited && (line.tile.gathered || line.block_start(i) + KEYS > line.tile.position)) {
                wait_for_previous_grid();
                waited = true;
            }
            barrier_wait(shared.drained + slot.at * 8, slot.parity ^ 1);
            if (LAYOUT == SPARSE && lane < n_boxes)
                shared.box_positions[slot.at * MAX_BOXES + lane] = chosen.position;
            __syncwarp();
            if (lane == 0) barrier_expect(filled, 2 * n_copied * box_bytes);
            __syncwarp();
            if (lane < 2 * n_boxes && of_block < n_copied)
                copy_box(is_value ? v_map : k_map, shared.ring + slot.at * STAGE_BYTES + offset, filled, chosen,
                         line.tile.kv_head, shape);
            slot.advance();
        }
        if (next_index >= last) return;
        line = next_line, index = next_index, block = next_block, box = next_box, live = true;
    }
}

}  // namespace
}  // namespace quire
