// Contraction of the parts of lines that were split, in a fixed order: two kernels, for few merges and for many.
#pragma once
#include "decode/parts.h"
#include "launch.h"

namespace quire {
namespace {

#ifndef QUIRE_MERGE_WIDTH
#define QUIRE_MERGE_WIDTH 512
#endif
constexpr int CELLS = OUT_DIM / 4;  // of a row: four dimensions each
constexpr int MERGE_THREADS = 512;
constexpr int MERGE_WIDTH = QUIRE_MERGE_WIDTH;  // most cells of a block of merge_kernel, at a time
constexpr int CELL_THREADS = 256, CELL_BLOCKS = 5;  // of a multiprocessor
constexpr int CELL_FLIGHT = 3;  // parts loaded together, by merge_cells_kernel

__device__ __forceinline__ void write_merged(const Sum& sum, const QuireMerge& merge, int group, int head, int dim,
                                             const QuireAttnArgs& args) {
    const float4 o = sum.result();
    const float lse = sum.total > 0.f ? sum.top + log2f(sum.total) : -INFINITY;
    write_out(o, lse, {merge.row, -1, 0, merge.kv_head * group + head, merge.kv_head, dim}, args);
}

// Few merges: a block, or some side by side, for each row and KV head. Threads beyond its cells share the parts: slice s takes parts s,
// s + n_slices .., and the slices are added in order. Both kernels read the plan before the grid that writes the parts
// has ended.
__global__ void __launch_bounds__(MERGE_THREADS) merge_kernel(const __grid_constant__ QuireAttnArgs args) {
    __shared__ float4 slice_sums[MERGE_THREADS];
    __shared__ float2 slice_states[MERGE_THREADS];
    const QuireMerge merge = load_merge(blockIdx.x, args);
    const int group = args.n_q_heads / args.n_kv_heads, n_cells = group * CELLS;
    const int width = min(n_cells, MERGE_WIDTH), n_slices = MERGE_THREADS / width;
    const int slice = threadIdx.x / width, start = blockIdx.y * width, step = gridDim.y * width;
    const auto load_parts = [&](int (&found)[FLIGHT], int from) {
        for (int i = 0; i < FLIGHT; ++i) {
            const int part = from + i * n_slices;
            found[i] = slice < n_slices && part < merge.n_parts ? load_here(args.parts + merge.parts_at + part) : -1;
        }
    };
    int found[FLIGHT];
    load_parts(found, slice);
    let_next_grid_start();  // a product reads its weights while the last lines are still computed
    wait_for_previous_grid();
    for (int base = start; merge.n_parts > 0 && base < n_cells; base += step) {
        if (base > start) load_parts(found, slice);
        const int cell = min(base + static_cast<int>(threadIdx.x) % width, n_cells - 1);
        const int head = cell / CELLS, dim = cell % CELLS * 4;
        Sum sum = sum_parts(merge, found, load_parts, slice, n_slices, head, dim, args);
        slice_sums[threadIdx.x] = sum.o;
        slice_states[threadIdx.x] = make_float2(sum.top, sum.total);
        __syncthreads();
        for (int other = 1; slice == 0 && other < min(n_slices, merge.n_parts); ++other) {
            const float2 state = slice_states[other * width + threadIdx.x];
            Sum more{slice_sums[other * width + threadIdx.x], state.x, state.y};
            sum.add(more);
        }
        if (slice == 0) write_merged(sum, merge, group, head, dim, args);
        __syncthreads();
    }
}

// Many merges: a thread for each cell, which finds the plan of its next two merges meanwhile. Those without parts come
// last.
__global__ void __launch_bounds__(CELL_THREADS, CELL_BLOCKS)
    merge_cells_kernel(const __grid_constant__ QuireAttnArgs args) {
    const uint32_t group = args.n_q_heads / args.n_kv_heads, n_cells = group * CELLS;
    uint32_t at = blockIdx.x * CELL_THREADS + threadIdx.x;
    const uint32_t step = gridDim.x * CELL_THREADS;
    QuireMerge merge = load_merge(at / n_cells, args), next = load_merge((at + step) / n_cells, args);
    const auto load_parts = [&](int (&found)[CELL_FLIGHT], const QuireMerge& of, int from) {
        for (int i = 0; i < CELL_FLIGHT; ++i)
            found[i] = from + i < of.n_parts ? load_here(args.parts + of.parts_at + from + i) : -1;
    };
    int found[CELL_FLIGHT];
    load_parts(found, merge, 0);
    let_next_grid_start();
    wait_for_previous_grid();
    while (merge.n_parts > 0) {
        int next_found[CELL_FLIGHT];
        load_parts(next_found, next, 0);
        const QuireMerge third = load_merge((at + 2 * step) / n_cells, args);
        const uint32_t cell = at % n_cells, head = cell / CELLS, dim = cell % CELLS * 4;
        const auto load_more = [&](int (&to)[CELL_FLIGHT], int from) { load_parts(to, merge, from); };
        const Sum sum = sum_parts(merge, found, load_more, 0, 1, head, dim, args);
        write_merged(sum, merge, group, head, dim, args);
        at += step, merge = next, next = third;
        for (int i = 0; i < CELL_FLIGHT; ++i) found[i] = next_found[i];
    }
}

}  // namespace
}  // namespace quire
