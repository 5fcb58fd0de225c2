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

__device__ inline void GemmBlock::load_w(const CUtensorMap* map, int item, int stage_index) const {
    const int unit = item % n_units, row = first_row(item / n_units);
    for (int c = 0; c < chunks_of(unit); c++) {
        const int column = (first_chunk + unit * CHUNKS + c) * BOX_COLUMNS;
        const uint32_t to = stage(stage_index) + c * W_BYTES;
        if (QUIRE_SILU) {
            load_box(to, map, full(stage_index), L2_EVICT_FIRST, column, 0, 0, row / 8);
        } else {
            load_box(to, map, full(stage_index), L2_EVICT_FIRST, column, row);
        }
    }
}

__device__ inline void GemmBlock::prefetch_w(const CUtensorMap* map, int item) const {
    const int unit = item % n_units, row = first_row(item / n_units);
    for (int c = 0; c < chunks_of(unit); c++) {
        const int column = (first_chunk + unit * CHUNKS + c) * BOX_COLUMNS;
        if (QUIRE_SILU) {
            prefetch_box(map, column, 0, 0, row / 8);
        } else {
            prefetch_box(map, column, row);
        }
    }
}

__device__ inline void GemmBlock::load_x(const CUtensorMap* map, int item, int stage_index) const {
    const int unit = item % n_units;
    for (int c = 0; c < chunks_of(unit); c++)
        load_box(stage(stage_index) + CHUNKS * W_BYTES + c * X_BYTES, map, full(stage_index), L2_EVICT_LAST,
                 (first_chunk + unit * CHUNKS + c) * CHUNK, 0);
}

__device__ inline void GemmBlock::load_scales(const CUtensorMap* map, int item, int stage_index) const {
    quire::load_scales(scales(stage_index), map, full(stage_index), L2_EVICT_FIRST, first_row(item / n_units),
                       (first_chunk + item % n_units) * CHUNK, a.group);
}

__device__ inline void GemmBlock::expect(int item, int stage_index) const {
    const int n_bytes = W_BYTES + (QUIRE_RESIDENT ? 0 : X_BYTES);
    barrier_expect(full(stage_index), chunks_of(item % n_units) * n_bytes + SCALE_BYTES);
}

__device__ inline void GemmBlock::feed(const CUtensorMap* w_map, const CUtensorMap* x_map) const {
    const int n_items = n_passes * n_units, n_first = min(n_items, a.n_stages);
    for (int i = 0; i < n_first; i++) {
        expect(i, i);
        load_w(w_map, i, i);
        if (QUIRE_NIBBLES) load_scales(x_map, i, i);
    }
    for (int i = n_first; i < min(n_items, n_first + a.n_ahead); i++) prefetch_w(w_map, i);
    if (!QUIRE_RESIDENT) {
        wait_for_previous_grid();
        for (int i = 0; i < n_first; i++) load_x(x_map, i, i);
    }
    for (int i = n_first, at_stage = 0, turn = 0; i < n_items; i++) {
        barrier_wait(empty(at_stage), turn & 1);
        expect(i, at_stage);
        load_w(w_map, i, at_stage);
        if (QUIRE_NIBBLES) load_scales(x_map, i, at_stage);
        if (!QUIRE_RESIDENT) load_x(x_map, i, at_stage);
        if (++at_stage == a.n_stages) at_stage = 0, turn++;
    }
}

}  // namespace quire
