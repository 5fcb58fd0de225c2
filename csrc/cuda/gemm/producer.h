// The producer warp: keeps the ring of shared memory filled with w, and with x unless that is resident.
#pragma once
#include "gemm/block.h"

namespace quire {

__device__ __forceinline__ void prefetch_box(const CUtensorMap* map, int c0, int c1) {  // into L2
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(c0), "r"(c1) : "memory");
}
__device__ __forceinline__ void prefetch_box(const CUtensorMap* map, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(c0), "r"(c1),
                 "r"(c2), "r"(c3)
                 : "memory");
}

__device__ __forceinline__ void GemmBlock::advance(Item& item) const {
    if (++item.unit < n_units) return;
    item.unit = 0;
    item.row += a.n_clusters * OUT_ROWS;
}

__device__ inline void GemmBlock::load_w(const CUtensorMap* map, Item item, int stage_index) const {
    if (QUIRE_PAIRED) {
        const int chunk = first_chunk + item.unit * CHUNKS;
        if (QUIRE_SILU) {
            load_box(stage(stage_index), map, full(stage_index), L2_EVICT_FIRST, 0, 0, 0, item.row / 8, chunk);
        } else {
            load_box(stage(stage_index), map, full(stage_index), L2_EVICT_FIRST, 0, item.row, chunk);
        }
        return;
    }
    for (int c = 0; c < chunks_of(item.unit); c++) {
        const int column = (first_chunk + item.unit * CHUNKS + c) * BOX_COLUMNS;
        const uint32_t to = stage(stage_index) + c * W_BYTES;
        if (QUIRE_SILU) {
            load_box(to, map, full(stage_index), L2_EVICT_FIRST, column, 0, 0, item.row / 8);
        } else {
            load_box(to, map, full(stage_index), L2_EVICT_FIRST, column, item.row);
        }
    }
}

__device__ inline void GemmBlock::prefetch_w(const CUtensorMap* map, Item item) const {
    for (int c = 0; c < chunks_of(item.unit); c++) {
        const int column = (first_chunk + item.unit * CHUNKS + c) * BOX_COLUMNS;
        if (QUIRE_SILU) {
            prefetch_box(map, column, 0, 0, item.row / 8);
        } else {
            prefetch_box(map, column, item.row);
        }
    }
}

__device__ inline void GemmBlock::load_x(const CUtensorMap* map, Item item, int stage_index) const {
    for (int c = 0; c < loaded_chunks(item.unit); c++) {
        const int chunk = first_chunk + item.unit * CHUNKS + c;
        const uint32_t to = stage(stage_index) + CHUNKS * W_BYTES + c * X_BYTES;
        if (QUIRE_NIBBLES) {
            load_box(to, map, full(stage_index), L2_EVICT_LAST, 0, 0, chunk * X_CHUNKS);
        } else {
            load_box(to, map, full(stage_index), L2_EVICT_LAST, chunk * CHUNK, 0);
        }
    }
}

__device__ inline void GemmBlock::load_scales(const CUtensorMap* map, Item item, int stage_index) const {
    quire::load_scales(scales(stage_index), map, full(stage_index), L2_EVICT_FIRST, item.row,
                       first_chunk + item.unit * CHUNKS, a.k, a.group);
}

__device__ inline void GemmBlock::expect(Item item, int stage_index) const {
    const int n_bytes = W_BYTES + (QUIRE_RESIDENT ? 0 : X_BYTES);
    barrier_expect(full(stage_index), loaded_chunks(item.unit) * n_bytes + SCALE_BYTES);
}

// One thread, whose own time for an item is the limit where there is much in it: each division took a quarter of it.
__device__ inline void GemmBlock::feed(const CUtensorMap* w_map, const CUtensorMap* x_map,
                                        const CUtensorMap* scales_map) const {
    const int n_items = n_passes * n_units, n_early = QUIRE_NIBBLES ? min(a.n_stages, EARLY_STAGES) : a.n_stages;
    const int n_first = min(n_items, n_early);
    Item item = {0, first_row(0)};
    for (int i = 0; i < n_first; i++, advance(item)) {
        expect(item, i);
        load_w(w_map, item, i);
        if (QUIRE_NIBBLES) load_scales(scales_map, item, i);
    }
    Item further = item;
    const int n_ahead = QUIRE_NIBBLES ? 0 : min(n_items - n_first, a.n_ahead);
    for (int i = 0; i < n_ahead; i++, advance(further)) prefetch_w(w_map, further);
    if (!QUIRE_RESIDENT) {
        wait_for_previous_grid();
        Item again = {0, first_row(0)};
        for (int i = 0; i < n_first; i++, advance(again)) load_x(x_map, again, i);
    }
    // Of a stage that has had nothing the wait ends at once: it is for the parity before the first.
    int at_stage = n_first == a.n_stages ? 0 : n_first, turn = n_first == a.n_stages ? 0 : 1;
    for (int i = n_first; i < n_items; i++, advance(item)) {
        barrier_wait(empty(at_stage), turn & 1);
        expect(item, at_stage);
        load_w(w_map, item, at_stage);
        if (QUIRE_NIBBLES) load_scales(scales_map, item, at_stage);
        if (!QUIRE_RESIDENT) load_x(x_map, item, at_stage);
        if (++at_stage == a.n_stages) at_stage = 0, turn++;
    }
}

}  // namespace quire
