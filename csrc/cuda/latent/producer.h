// A warp that copies: it reads the page table ahead of time, across the borders of lines. Behind a kernel's shape.h.
#pragma once

namespace quire {
namespace {

struct Boxes {  // of a block: how many there are, and where this lane's begins: at the page's key 8 * eight
    int n, page, eight;
};

// Calls copy(block, boxes, later) for all blocks of all lines, by all lanes; `later` are those of the block AHEAD of it
// in its line, none if there is no such. Lanes hold the places of 32 boxes, those that come next; the 32 after them are
// looked up meanwhile.
template <int AHEAD, class Copy>
__device__ __forceinline__ void for_all_blocks(const QuireAttnArgs& args, const Share& share, int box_rows,
                                               const Copy& copy) {
    const int lane = threadIdx.x % 32, n_boxes = KEYS / box_rows, n_ahead = 32 / n_boxes, of_block = lane % n_boxes;
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
            const auto boxes_of = [&](int of_line) {
                const int held_by = (of_line - block) * n_boxes + of_block;
                const int n = (line.end - line.start - of_line * KEYS + box_rows - 1) / box_rows;
                Boxes found{min(n_boxes, n), __shfl_sync(~0u, page, held_by % 32), __shfl_sync(~0u, eight, held_by % 32)};
                if (of_line == i) return found;
                const int later_page = __shfl_sync(~0u, next_page, held_by % 32);
                const int later_eight = __shfl_sync(~0u, next_eight, held_by % 32);
                if (held_by >= 32) found.page = later_page, found.eight = later_eight;
                return found;
            };
            copy(i, boxes_of(i), AHEAD > 0 ? boxes_of(i + AHEAD) : Boxes{0, 0, 0});
        }
        if (next_index >= share.last) return;
        line = next, index = next_index, block = next_block, page = next_page, eight = next_eight;
    }
}

}  // namespace
}  // namespace quire
