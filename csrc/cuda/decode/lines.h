// Lines of work as the producer, the consumers and the writers all see them: blocks of keys, and rows of q.
#pragma once
#include "decode/shape.h"

namespace quire {
namespace {

__device__ __forceinline__ QuireTile load_tile(const QuireTile* tiles, int index) {
    union {
        int4 words[3];
        QuireTile tile;
    } both;
    const int4* from = reinterpret_cast<const int4*>(tiles + index);
    for (int i = 0; i < 3; ++i) both.words[i] = load_here(from + i);  // __ldg would move to where a field is used
    return both.tile;
}

// A tile and the blocks of KEYS keys that it reads: those that a window hides from every row are left out.
struct Line {
    QuireTile tile;
    int begin, end;          // keys that some row may see ..
    int gap_begin, gap_end;  // .. without these
    int head_start, n_head;  // first key of the blocks before the gap, and their number
    int tail_start, n_blocks;

    __device__ __forceinline__ int block_start(int i) const {
        return Variant::window && i < n_head ? head_start + i * KEYS : tail_start + (i - n_head) * KEYS;
    }
    __device__ __forceinline__ bool holds(int key) const {
        return key >= begin && key < end && (!Variant::window || key < gap_begin || key >= gap_end);
    }
    __device__ __forceinline__ bool holds_block(int start) const {
        return start >= begin && start + KEYS <= end &&
               (!Variant::window || start + KEYS <= gap_begin || start >= gap_end);
    }
};

__device__ __forceinline__ Line make_line(const QuireTile& tile, const QuireAttnArgs& args, const BoxShape& shape) {
    const auto down = [&](int key) { return LAYOUT == RAGGED ? key : key & ~(shape.rows - 1); };
    Line line{tile, tile.begin, tile.end, tile.begin, tile.begin, 0, 0, 0, 0};
    const bool consecutive = LAYOUT != SPARSE && !tile.gathered;  // positions are known without reading them
    if (Variant::causal && consecutive) line.end = min(line.end, tile.position + tile.n_tokens);
    if (Variant::window && consecutive && args.window > 0) {
        line.gap_begin = max(line.begin, min(args.n_first, line.end));
        line.gap_end = max(line.gap_begin, min(line.end, tile.position - args.window + 1));
    }
    line.head_start = down(line.begin);
    line.tail_start = down(line.gap_end);
    if (tile.n_tokens == 0 || line.end <= line.begin) return line;
    if (line.gap_begin > line.begin) line.n_head = (line.gap_begin - line.head_start + KEYS - 1) / KEYS;
    if (line.n_head > 0 && line.head_start + line.n_head * KEYS >= line.tail_start) {
        line.n_head = 0;
        line.tail_start = line.head_start;
    }
    line.n_blocks = line.n_head;
    if (line.end > line.gap_end || line.tail_start < line.gap_begin)
        line.n_blocks += (line.end - line.tail_start + KEYS - 1) / KEYS;
    return line;
}

struct Row {
    int q_row, q_pos, q_head;
};

// A token beyond the last one stands for it: hooks are asked about real rows only.
__device__ __forceinline__ Row find_row(const QuireTile& tile, int token, int head, int group,
                                        const QuireAttnArgs& args) {
    token = min(token, tile.n_tokens - 1);
    const int q_head = tile.kv_head * group + head;
    if (!tile.gathered) return {tile.row + token, tile.position + token, q_head};
    const int2 found = __ldg(reinterpret_cast<const int2*>(args.rows) + tile.row + token);
    return {found.x, found.y, q_head};
}

}  // namespace
}  // namespace quire
