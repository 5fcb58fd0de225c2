// The queue of items: their order, and a line read as the item that warps share.
#pragma once
#include "prefill/shape.h"

namespace quire {

// The order of items: `n_heads` KV heads at a time, lines in their order, so that the keys and values of the blocks at
// work stay in the second-level cache.
struct Order {
    int n_lines, n_heads;
    __device__ int line_of(int item) const { return item / n_heads % n_lines; }
    __device__ int head_of(int item) const { return item / (n_heads * n_lines) * n_heads + item % n_heads; }
};
__device__ __forceinline__ Order choose_order(const QuireAttnArgs& args) {
    Order order = {args.n_large, args.n_kv_heads};
    if (args.n_large * args.n_kv_heads < 4 * gridDim.x) return order;  // all at work at once, or nearly
    const QuireTile& first = args.large_lines[0];
    const int64_t head_bytes = int64_t(first.end - first.begin) * DIM * 4;
    while (order.n_heads % 2 == 0 && order.n_heads * head_bytes > L2_SHARE) order.n_heads /= 2;
    if (order.n_heads < args.n_kv_heads) {  // the heads' turns must end at the last real line
        int low = 0;
        while (low < order.n_lines) {
            const int middle = (low + order.n_lines) / 2;
            if (args.large_lines[middle].n_tokens > 0) low = middle + 1;
            else order.n_lines = middle;
        }
        order.n_lines = max(low, 1);
    }
    return order;
}

// Reads the line of an item; whole warp.
__device__ __forceinline__ Work read_work(const QuireAttnArgs& args, const Order& order, int item, int box_rows) {
    Work work;
    work.n_tokens = 0;
    if (item >= order.n_lines * args.n_kv_heads) return work;
    const QuireTile line = args.large_lines[order.line_of(item)];
    work.row = line.row, work.n_tokens = line.n_tokens, work.position = line.position, work.gathered = line.gathered;
    work.partial = line.partial, work.kv_head = order.head_of(item);
    work.kv_at = line.kv_at, work.blocks_at = line.blocks_at;
    work.first_pos = line.position, work.last_pos = line.position + line.n_tokens - 1;
    if (line.gathered) {
        int low = INT32_MAX, high = INT32_MIN;
        for (int i = threadIdx.x % 32; i < line.n_tokens; i += 32) {
            const int position = args.rows[2 * (line.row + i) + 1];
            low = min(low, position), high = max(high, position);
        }
        work.first_pos = __reduce_min_sync(0xffffffffu, low);
        work.last_pos = __reduce_max_sync(0xffffffffu, high);
    }
    work.begin = line.begin, work.end = line.end;
    if (Variant::causal && LAYOUT != SPARSE) work.end = min(work.end, work.last_pos + 1);
    work.start = line.begin - line.begin % box_rows;
    work.low = Variant::window ? work.first_pos - args.window + 1 : work.begin;
    const int n_blocks = work.end > work.begin ? (work.end - work.start + N_KEYS - 1) / N_KEYS : 0;
    work.last_block = n_blocks - 1;
    work.n_lead = 0;
    int tail_from = 0;
    if (Variant::window && LAYOUT != SPARSE) {
        const int first = min(args.n_first, work.end) - work.start;
        work.n_lead = first > 0 ? (first + N_KEYS - 1) / N_KEYS : 0;
        tail_from = min(max((work.low - work.start) / N_KEYS, work.n_lead), n_blocks);
    }
    work.n_tail = n_blocks - tail_from;
    if (work.n_tail + work.n_lead == 0) work.n_tail = 1, work.last_block = 0;  // nothing to see: one block, all hidden
    if (LAYOUT != SPARSE) {
        const int clear_to = Variant::causal ? min(work.end, work.first_pos + 1) : work.end;
        work.front = (work.start + N_KEYS * work.last_block + 2 * N_KEYS - 1 - clear_to) / N_KEYS;
        work.back = work.n_tail + work.n_lead - (work.start < work.begin);
        if (Variant::window) {
            const int hidden_to = work.last_pos - args.window - work.start;  // the last row does not see this key
            work.back = min(work.back, work.n_tail);
            if (hidden_to >= 0) work.back = min(work.back, work.last_block - hidden_to / N_KEYS);
        }
        if (Variant::has_mask || work.front > work.n_tail) work.front = INT32_MAX;
    }
    return work;
}

}  // namespace quire
