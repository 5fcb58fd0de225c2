// The producer warpgroup: one warp takes items, one loads keys, one values, and two load q.
#pragma once
#include "prefill/queue.h"

namespace quire {

struct Spot {  // of a box: the page (ragged: 0) and the row in it
    int page, token;
};
__device__ __forceinline__ Spot find_key(const QuireAttnArgs& args, const Work& work, int key) {
    if (LAYOUT == RAGGED || key >= work.end) return {0, work.kv_at + key};
    const int entry = key / args.page_size;
    const int logical = LAYOUT == SPARSE ? __ldg(args.blocks + work.blocks_at + entry) : entry;
    return {__ldg(args.pages + work.kv_at + logical), key - entry * args.page_size};
}

// One block of keys or values, by a warp; `mine`: this lane has a box.
__device__ __forceinline__ void load_block(uint8_t* to, uint64_t* full, const CUtensorMap* map, int heads_of_page,
                                           int kv_head, bool mine, Spot spot, int box_rows) {
    const int lane = threadIdx.x % 32;
    const uint32_t barrier = shared_address(full);
    const int n_boxes = __popc(__ballot_sync(0xffffffffu, mine));
    if (lane == 0) barrier_expect(barrier, n_boxes * box_rows * N_CHUNKS * ROW_BYTES);
    __syncwarp();
    if (!mine) return;
    const uint32_t address = shared_address(to) + lane * box_rows * (GROUP_BYTES / 8);
    if constexpr (JOINED) {
        load_box(address, map, barrier, L2_EVICT_NORMAL, 0, 0, 0, spot.token / 8, spot.page * heads_of_page + kv_head);
    } else {
        for (int chunk = 0; chunk < N_CHUNKS; chunk++)
            load_box(address + chunk * CHUNK_BYTES, map, barrier, L2_EVICT_NORMAL, chunk * 64, spot.token, kv_head,
                     spot.page);
    }
}

// Loads the keys (or values) of each item; one warp, lane t rows of box t.
template <int N_STAGES, bool KEYS>
__device__ __forceinline__ void load_blocks(const QuireAttnArgs& args, const CUtensorMap* map, int heads_of_page,
                                            uint8_t (&buffers)[N_STAGES][KEYS_BYTES], uint64_t* full, uint64_t* empty,
                                            int box_rows, Shared& shared) {
    const int lane = threadIdx.x % 32, my_row = lane * box_rows;
    Ring ring;
    if (lane == 0) prefetch_map(map);
    for (Ring item;; item.advance<N_ITEMS>()) {
        await(shared_address(&shared.work_full[item.index]), item.parity);
        const Work& work = shared.work[item.index];
        if (work.n_tokens == 0) return;
        const int n_blocks = work.n_blocks(), kv_head = work.kv_head;
        int key = work.key_of(0) + my_row;
        Spot spot = find_key(args, work, key);
        for (int i = 0; i < n_blocks; i++) {
            if (KEYS && i == max(n_blocks - 2, 0) && lane == 0)
                barrier_arrive(shared_address(&shared.work_ends[item.index]));
            const Spot now = spot;
            const bool mine = my_row < N_KEYS && key < work.end;
            if (i + 1 < n_blocks) {  // fetched while the block waits for its buffer
                key = work.key_of(i + 1) + my_row;
                spot = find_key(args, work, key);
            }
            await(shared_address(empty + ring.index), ring.parity ^ 1);
            load_block(buffers[ring.index], full + ring.index, map, heads_of_page, kv_head, mine, now, box_rows);
            ring.advance<N_STAGES>();
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(shared_address(&shared.work_empty[item.index]));
    }
}

// Loads q of items, N_LOADERS threads; rows beyond an item's are zero. A thread keeps its column of 16-byte cells and
// walks down the rows. Few warps do this one after the other: every instruction of the loop counts.
struct QueryLoader {
    static constexpr uint32_t CELLS = N_CHUNKS * 8, STEP = N_LOADERS / CELLS;  // rows that are covered at once
    const QuireAttnArgs& args;
    Shared& shared;
    uint32_t group, first_row, cell;
    Ring slot;

    __device__ __forceinline__ QueryLoader(const QuireAttnArgs& args, Shared& shared, uint32_t thread)
        : args(args), shared(shared), group(args.n_q_heads / args.n_kv_heads), first_row(thread / CELLS),
          cell(thread % CELLS) {}

    __device__ __forceinline__ void load(const Work& work) {
        await(shared_address(&shared.q_empty[slot.index]), slot.parity ^ 1);
        const uint32_t n_rows = work.n_tokens * group;
        if (n_rows > 0) {
            copy_rows(work, n_rows);
            asm volatile("cp.async.wait_all;" ::: "memory");
            async_fence();
        }
        barrier_arrive(shared_address(&shared.q_full[slot.index]));
        slot.advance<N_SLOTS>();
    }

    __device__ __forceinline__ void copy_rows(const Work& work, uint32_t n_rows) {
        const int64_t head_bytes = args.q_head * 2, token_bytes = args.q_row * 2;
        const char* column = static_cast<const char*>(args.q) + int64_t(work.kv_head) * group * head_bytes + cell * 16;
        const uint32_t to = shared_address(shared.q[slot.index]) + cell / 8 * N_ROWS * ROW_BYTES;
        const auto copy_to = [&](uint32_t row, const char* from) {
            copy_16_bytes(to + row * ROW_BYTES + ((cell ^ row) & 7) * 16, from, cell * 8 < DIM && row < n_rows);
        };
        if (work.gathered) {
            const int* line_rows = args.rows + 2 * work.row;
#pragma unroll 2
            for (uint32_t row = first_row; row < N_ROWS; row += STEP) {
                const uint32_t token = row < n_rows ? row / group : 0, head = row < n_rows ? row % group : 0;
                copy_to(row, column + __ldg(line_rows + 2 * token) * token_bytes + head * head_bytes);
            }
        } else {
            const int64_t step_bytes = STEP / group * token_bytes + STEP % group * head_bytes;
            const int64_t wrap_bytes = token_bytes - int64_t(group) * head_bytes;  // behind the last head
            const char* from = column + (work.row + first_row / group) * token_bytes + first_row % group * head_bytes;
            uint32_t head = first_row % group;
#pragma unroll 4
            for (uint32_t row = first_row; row < N_ROWS; row += STEP) {
                copy_to(row, from);
                head += STEP % group, from += step_bytes;
                if (head >= group) head -= group, from += wrap_bytes;
            }
        }
    }
};

// Takes items from the queue, publishes them and loads its share of q; one warp.
__device__ __forceinline__ void take_items(const QuireAttnArgs& args, int box_rows, Shared& shared) {
    const int lane = threadIdx.x % 32;
    auto* counter = reinterpret_cast<uint32_t*>(args.ticket);
    const Order order = choose_order(args);
    QueryLoader queries(args, shared, lane);
    int item = blockIdx.x;
    for (Ring ring;; ring.advance<N_ITEMS>()) {
        const Work work = read_work(args, order, item, box_rows);
        await(shared_address(&shared.work_empty[ring.index]), ring.parity ^ 1);
        if (lane == 0) {
            shared.work[ring.index] = work;
            barrier_arrive(shared_address(&shared.work_full[ring.index]));
        }
        __syncwarp();
        queries.load(shared.work[ring.index]);
        if (work.n_tokens == 0) break;
        await(shared_address(&shared.work_ends[ring.index]), ring.parity);  // not earlier: the rest is for idle blocks
        uint32_t ticket = 0;
        if (lane == 0) ticket = atomicAdd(counter, 1u) & 0xFFFFFFu;
        item = gridDim.x + uniform(ticket);
    }
    // The upper byte of the ticket counts blocks that are done: the last one leaves 0 behind.
    if (lane == 0) {
        const uint32_t done = atomicAdd(counter, 1u << 24) >> 24;
        if (done + 1 == gridDim.x) *args.ticket = 0;
    }
}

__device__ __forceinline__ void load_queries(const QuireAttnArgs& args, Shared& shared) {
    QueryLoader queries(args, shared, 32 + threadIdx.x % 32);
    for (Ring item;; item.advance<N_ITEMS>()) {
        await(shared_address(&shared.work_full[item.index]), item.parity);
        const Work& work = shared.work[item.index];
        const bool last = work.n_tokens == 0;
        queries.load(work);
        if (last) return;
    }
}

}  // namespace quire
