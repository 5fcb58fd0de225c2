// Sums over the threads of rows that are cut among the blocks of a cluster, as norms need them.
//
// Threads of a block are (column, group): each has a cell of R rows, and each group, of whole warps, its own rows.
#pragma once
#include "../cluster.h"

namespace quire {

// The one thread of a block.
__device__ __forceinline__ bool is_first_thread() { return threadIdx.x == 0 && threadIdx.y == 0; }

// What the warps of rows have summed, in each block of a cluster: two turns, as no block is two ahead. ALL: rows of all
// groups; WARPS: at most, of a row.
template <int ALL, int WARPS> struct OfWarps {
    float sums[2][ALL][WARPS];
    uint64_t come[2];  // barriers

    __device__ __forceinline__ void init() {  // by one thread
        for (int i = 0; i < 2; ++i) barrier_init(shared_address(&come[i]), 1);
        barrier_init_fence();
    }
};

template <int R> __device__ __forceinline__ void sum_lanes(float (&sums)[R]) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
#pragma unroll
        for (int r = 0; r < R; ++r) sums[r] += __shfl_xor_sync(~0u, sums[r], step);
    }
}

// Sums over all threads of a row, for R rows of each group. The warps of a row are added in one order, however it is
// cut. index: how many times this block has done so.
template <int R, int ALL, int WARPS>
__device__ __forceinline__ void sum_rows(float (&sums)[R], OfWarps<ALL, WARPS>& all, int n_slices, int index) {
    float(*of_warps)[WARPS] = all.sums[index & 1] + threadIdx.y * R;
    const int lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    const int warp = blockIdx.x % n_slices * n_warps + threadIdx.x / 32;
    sum_lanes(sums);
    if (n_slices == 1) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if (lane == 0) of_warps[r][warp] = sums[r];
        }
        __syncthreads();
    } else {
        const uint32_t come = shared_address(&all.come[index & 1]);
        if (is_first_thread()) barrier_expect(come, n_slices * n_warps * ALL * sizeof(float));
        if (lane < n_slices) {
            const uint32_t there = address_in(shared_address(of_warps), lane), come_there = address_in(come, lane);
#pragma unroll
            for (int r = 0; r < R; ++r) send_there(there + (r * WARPS + warp) * sizeof(float), sums[r], come_there);
        }
        while (!barrier_try(come, index >> 1 & 1)) {  // however long another block waits for a rank
        }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) sums[r] = 0.f;
#pragma unroll 1
    for (int i = lane; i < n_warps * n_slices; i += 32) {
#pragma unroll
        for (int r = 0; r < R; ++r) sums[r] += of_warps[r][i];
    }
    sum_lanes(sums);
}

}  // namespace quire
