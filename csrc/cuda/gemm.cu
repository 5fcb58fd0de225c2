// Products of few rows with a large matrix: y = f(x w^T), x [m, K] with m <= 64, w [N, K] as nn.Linear stores it.
//
// Reading w once at the speed of memory is all that counts. A tile of rows of w is the 64-row operand of wgmma and the
// tokens are its columns. A cluster of up to 8 blocks shares the tiles: each block multiplies its slice of K, then hands
// its sums to the blocks that own the rows (through distributed shared memory), which add them in the order of the ranks.
// So results do not depend on timing, and nothing is left in global memory between launches.
//
// In a block one warp keeps a ring of shared memory filled with w (TMA); it starts before the previous grid has ended, as
// weights never change. Warpgroups multiply: either all of them share a tile, or (QUIRE_TURNS) they take tiles in turn, so
// that one multiplies while another finishes. x is either held for the whole slice (QUIRE_RESIDENT: read once, normed
// there if asked) or travels through the ring beside w.
//
// Macros: QUIRE_BF16, QUIRE_TOKENS (8, 16, 32, 64), QUIRE_CLUSTER (1, 2, 4, 8 blocks), QUIRE_GROUPS (warpgroups),
// QUIRE_TURNS, QUIRE_RESIDENT, QUIRE_NORM (needs QUIRE_RESIDENT), QUIRE_RESIDUAL, QUIRE_SILU, QUIRE_BIAS, QUIRE_WIDE
// (results are stored as fp32), QUIRE_FP8 (gemm.h), QUIRE_ROUNDS (gemm/rounding.h: x of e4m3's first kind comes as
// elements; only then it may be normed), QUIRE_NIBBLES = 1, QUIRE_ZEROS, QUIRE_CHUNK_GROUPS (1, 2, 4, 8; gemm.h; without
// QUIRE_NORM and QUIRE_RESIDENT). Of nibbles warpgroups take the stages of a tile in turn; in clusters of one block a
// stage may have two chunks of 32 rows (QUIRE_PAIRED), or QUIRE_GROUPS pairs of warps have 32 rows each of every stage
// (QUIRE_TURNS).
#include "gemm/consumer.h"
#include "gemm/producer.h"
#include "shared_memory.h"

namespace quire {

__global__ void __launch_bounds__(THREADS, 1) gemm(const __grid_constant__ CUtensorMap w_map,
                                                     const __grid_constant__ CUtensorMap x_map,
                                                     const __grid_constant__ CUtensorMap scales_map,
                                                     const __grid_constant__ QuireGemmArgs args) {
    extern __shared__ __align__(1024) char shared[];
    const GemmBlock block(args, shared);
    if (threadIdx.x == WORKERS) prefetch_map(&w_map);
    block.init();
    let_next_grid_start();
    if (threadIdx.x < WORKERS) {
        block.work();
    } else {
        if (threadIdx.x == WORKERS) block.feed(&w_map, &x_map, &scales_map);
        if (CLUSTER > 1) cluster_wait();
    }
}

int launch(const QuireGemmArgs& a, cudaStream_t stream) {
    CUtensorMap w_map, x_map = {}, scales_map = {};
    cudaError_t error = encode_weights(&w_map, a.w, a.n, a.k, QUIRE_SILU, ROWS);
    if (error == cudaSuccess && QUIRE_NIBBLES)
        error = encode_scales(&scales_map, a.w_scale, a.n, a.k, a.group, QUIRE_SILU, ROWS);
    if (error == cudaSuccess && !QUIRE_RESIDENT) error = encode_tokens(&x_map, a.x, a.m, a.k, a.x_row, TOKENS);
    if (error != cudaSuccess) return error;
    const int n_bytes = Layout(a).end;
    error = allow_shared_memory<gemm>(n_bytes);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = CLUSTER;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(a.n_clusters * CLUSTER);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = n_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = a.dependent ? 2 : 1;
    return cudaLaunchKernelEx(&config, gemm, w_map, x_map, scales_map, a);
}

}  // namespace quire

extern "C" __attribute__((visibility("default"))) int quire_gemm(const QuireGemmArgs* args, void* stream) {
    return quire::launch(*args, static_cast<cudaStream_t>(stream));
}
